//! String formats that `llguidance` 1.9 knows only in part, as patterns.
//!
//! Its `email` has no quoted local part and no IPv6 literal, its `ipv6` no IPv4 at the end. Valid
//! documents of the JSON-Schema test suite (`optional/format`) would be masked. These patterns pass
//! the suite's valid documents and none of its invalid ones.

const IPV4: &str = concat!(
    r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}",
    r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
);

/// Sixteen bits of an IPv6 address.
const H16: &str = "[0-9a-fA-F]{1,4}";

/// The pattern for `format`; `None` when the compiler's own is complete.
pub(super) fn pattern(format: &str) -> Option<String> {
    match format {
        "ipv6" => Some(format!("^{}$", ipv6())),
        "email" => Some(format!("^{}$", email())),
        _ => None,
    }
}

/// `IPv6address` of RFC 3986, appendix A.
fn ipv6() -> String {
    let last_32 = format!("({H16}:{H16}|{IPV4})");
    let mut forms = vec![
        format!("({H16}:){{6}}{last_32}"),
        format!("::({H16}:){{5}}{last_32}"),
    ];
    // Up to n + 1 groups before the gap, and 4 - n groups and the last 32 bits behind it.
    forms.extend((0..=4).map(|n| {
        let left = 4 - n;
        format!("(({H16}:){{0,{n}}}{H16})?::({H16}:){{{left}}}{last_32}")
    }));
    forms.push(format!("(({H16}:){{0,5}}{H16})?::{H16}"));
    forms.push(format!("(({H16}:){{0,6}}{H16})?::"));
    format!("({})", forms.join("|"))
}

/// `Mailbox` of RFC 5321, section 4.1.2, with literals of IPv4 and IPv6 only.
fn email() -> String {
    let atom = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+";
    let quoted = r#""([ !#-\[\]-~]|\\[ -~])*""#;
    let label = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?";
    let local = format!(r"({atom}(\.{atom})*|{quoted})");
    let ipv6 = ipv6();
    format!(r"{local}@({label}(\.{label})*|\[{IPV4}\]|\[IPv6:{ipv6}\])")
}
