//! Servers that a request came through, by the header `Via`.

use axum::http::HeaderMap;
use axum::http::header::VIA;

/// Maximum servers on a request's way. A longer way is a loop through servers without pseudonyms.
const HOPS_MAX: usize = 8;

/// The pseudonyms in a request's `Via`, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hops(Vec<String>);

impl Hops {
    /// Reads all `Via` headers, also those of other servers.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let values = headers.get_all(VIA).into_iter();
        let texts = values.filter_map(|value| value.to_str().ok());
        let entries = texts.flat_map(|text| text.split(','));
        // `1.1 pseudonym (comment)`.
        let names = entries.filter_map(|entry| entry.split_whitespace().nth(1));
        Self(names.map(str::to_owned).collect())
    }

    /// Whether the request must be refused: it was here before, or its way is too long.
    pub(crate) fn is_loop(&self, own: &str) -> bool {
        self.0.len() >= HOPS_MAX || self.0.iter().any(|hop| hop == own)
    }

    pub(crate) fn has_any(&self, others: &[String]) -> bool {
        self.0.iter().any(|hop| others.contains(hop))
    }

    /// The first pseudonym of a paceline server.
    pub(crate) fn into_server(self) -> Option<String> {
        self.0.into_iter().find(|hop| hop.starts_with("paceline-"))
    }

    /// The header's value with `own` at its end.
    pub(crate) fn and(&self, own: &str) -> String {
        let all = self.0.iter().map(String::as_str).chain([own]);
        let all: Vec<String> = all.map(|hop| format!("1.1 {hop}")).collect();
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_comes_back_is_found() {
        let mut headers = HeaderMap::new();
        assert_eq!(Hops::of(&headers).and("a"), "1.1 a");
        headers.append(VIA, "1.1 a, 1.0 proxy (x)".parse().unwrap());
        headers.append(VIA, "1.1 b".parse().unwrap());
        let hops = Hops::of(&headers);
        assert!(hops.is_loop("a") && hops.is_loop("b") && !hops.is_loop("c"));
        assert_eq!(hops.and("c"), "1.1 a, 1.1 proxy, 1.1 b, 1.1 c");
        assert!(hops.has_any(&["x".into(), "b".into()]) && !hops.has_any(&["x".into()]));
        let long = "1.1 p, ".repeat(HOPS_MAX);
        headers.insert(VIA, long.parse().unwrap());
        assert!(Hops::of(&headers).is_loop("c"));
    }
}
