//! Access checks: names of this server, pages of browsers, and keys.
//!
//! A local API is not protected by being local: any web page that a user opens can send requests
//! to it. Three things keep such a page out. `Host` must be a name of this server, so a page whose
//! name was made to point here (DNS rebinding) is refused. `Origin`, which browsers add to what a
//! page of another site sends, must be this server's or a configured one. And bodies must be
//! declared as JSON, which a page can do only after the browser has asked by `OPTIONS`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use axum::http::header::{AUTHORIZATION, HOST, HeaderValue, ORIGIN};
use axum::http::{HeaderMap, Request, Version};
use serde::{Deserialize, Serialize};

use crate::rejection::Rejection;
use crate::schema::clip;
use paceline_auth::keys::WatchedKeys;

/// Clients and web pages that may send requests. Loopback names and addresses, and the address that
/// a connection came to, are always accepted as `Host`. A page of the server's own origin is always
/// accepted as `Origin`.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// More names that a `Host` header may have, without port: `llm.example.org`.
    pub hosts: Vec<String>,
    /// Web pages that may use the API, as browsers spell an origin: `https://chat.example.org`.
    pub origins: Vec<String>,
    /// A file of [`keys`](paceline_auth::keys); without one no client needs a key. The server reads
    /// the file again when it changes. An empty or missing file admits no client.
    pub keys: Option<PathBuf>,
    /// Allows addresses that others can reach although there are no keys.
    pub open_to_network: bool,
}

/// The address that a connection came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalAddress(pub(crate) SocketAddr);

/// The connection's scheme: `http` or `https`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UrlScheme(pub(crate) &'static str);

/// The client that a request comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum ClientIdentity {
    /// A program of this machine, when there are no keys.
    Anybody,
    /// Another machine, when there are no keys.
    Address(IpAddr),
    Key(String),
}

impl ClientIdentity {
    /// Identifies the client to the engine, which shares its slots fairly between clients; 0 for
    /// programs of this machine. Two clients with equal numbers would share one quota.
    pub(crate) fn number(&self) -> u64 {
        // FNV-1a for 64 bits (RFC 9923).
        let mix = |text: &str| {
            text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
        };
        match self {
            Self::Anybody => 0,
            Self::Address(address) => mix(&address.to_string()),
            Self::Key(id) => mix(id),
        }
    }
}

/// Address of the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote(pub(crate) SocketAddr);

/// Origin of another site that may use the API; the response carries the CORS headers for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AllowedOrigin(pub(crate) String);

/// Checks `Host` and `Origin`; returns the origin if it is another one that is allowed.
pub(crate) fn check_origin<B>(
    request: &Request<B>,
    access: &Access,
) -> Result<Option<AllowedOrigin>, Rejection> {
    let local = request.extensions().get::<LocalAddress>();
    let local = local.map(|local| local.0.ip());
    let host = host(request)?;
    // A target in absolute form names a host as well.
    let named = request
        .uri()
        .authority()
        .map(|authority| authority.as_str());
    for name in named.into_iter().chain(host) {
        if !is_own(name, local, access) {
            let host = clip(name);
            return Err(Rejection::Host { host });
        }
    }
    let mut origins = request.headers().get_all(ORIGIN).iter();
    let Some(origin) = origins.next() else {
        return Ok(None);
    };
    let text = origin.to_str().unwrap_or_default();
    let refused = || Rejection::Origin {
        origin: clip(&String::from_utf8_lossy(origin.as_bytes())),
    };
    if origins.next().is_some() {
        return Err(refused());
    }
    let scheme = request.extensions().get::<UrlScheme>();
    let scheme = scheme.map_or("http", |scheme| scheme.0);
    let own = host.map(|host| format!("{scheme}://{host}"));
    if own.is_some_and(|own| text.eq_ignore_ascii_case(&own)) {
        return Ok(None);
    }
    let mut allowed = access.origins.iter();
    let is_allowed = allowed.any(|origin| origin.eq_ignore_ascii_case(text));
    is_allowed
        .then(|| Some(AllowedOrigin(text.to_owned())))
        .ok_or_else(refused)
}

/// The `Host`; none in HTTP/1.0, which browsers do not speak and which did not have it.
fn host<B>(request: &Request<B>) -> Result<Option<&str>, Rejection> {
    let hosts = request.headers().get_all(HOST);
    let mut values = hosts.iter();
    match (values.next(), values.next()) {
        (None, _) if request.version() == Version::HTTP_10 => Ok(None),
        (Some(host), None) => host.to_str().map(Some).map_err(|_| Rejection::Host {
            host: clip(&String::from_utf8_lossy(host.as_bytes())),
        }),
        _ => {
            let got = hosts.iter().count();
            Err(Rejection::HostCount { got })
        }
    }
}

/// Whether `host`, with or without a port, is this machine or a configured name.
fn is_own(host: &str, local: Option<IpAddr>, access: &Access) -> bool {
    let Some(name) = without_port(host) else {
        return false;
    };
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let literal = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    if let Ok(ip) = literal.unwrap_or(&name).parse::<IpAddr>() {
        let (ip, local) = (ip.to_canonical(), local.map(|local| local.to_canonical()));
        if ip.is_loopback() || Some(ip) == local {
            return true;
        }
    }
    name == "localhost"
        || name.ends_with(".localhost")
        || access
            .hosts
            .iter()
            .any(|host| host.eq_ignore_ascii_case(&name))
}

/// The name in `name`, `name:80` or `[::1]:80`.
fn without_port(host: &str) -> Option<&str> {
    let name_end = if host.starts_with('[') {
        host.find(']')? + 1
    } else {
        host.find(':').unwrap_or(host.len())
    };
    let (name, port) = host.split_at(name_end);
    let port = port.strip_prefix(':').unwrap_or(port);
    let is_port = port.is_empty() || port.parse::<u16>().is_ok();
    (is_port && !name.is_empty()).then_some(name)
}

/// The id of the key that a request has, as a bearer token or as Anthropic's clients send it.
pub(crate) fn check_key(headers: &HeaderMap, keys: &WatchedKeys) -> Result<String, Rejection> {
    let known = |key: &str| keys.id_of(key.trim()).ok_or(Rejection::WrongKey);
    let text = |header: &HeaderValue| {
        let text = header.to_str().map(str::to_owned);
        text.map_err(|_| Rejection::WrongKey)
    };
    let Some(header) = headers.get(AUTHORIZATION) else {
        let header = headers.get("x-api-key").ok_or(Rejection::NoKey)?;
        return known(&text(header)?);
    };
    let text = text(header)?;
    let (scheme, key) = text.split_once(' ').ok_or(Rejection::NoKey)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(Rejection::NoKey);
    }
    known(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_of_this_machine_or_configured() {
        let access = Access {
            hosts: vec!["LLM.example.org".into()],
            ..Access::default()
        };
        let local = Some("192.168.1.5".parse().unwrap());
        for (host, expected) in [
            ("localhost", true),
            ("LOCALHOST:52415", true),
            ("localhost.", true),
            ("a.localhost:1", true),
            ("127.0.0.1:52415", true),
            ("127.9.9.9", true),
            ("[::1]:52415", true),
            ("[::1]", true),
            ("[::ffff:127.0.0.1]", true),
            ("192.168.1.5:52415", true),
            ("llm.example.org", true),
            ("llm.example.org:443", true),
            ("192.168.1.6", false),
            ("example.org", false),
            ("localhost.example.org", false),
            ("127.0.0.1.example.org", false),
            ("evil@localhost", false),
            ("localhost:x", false),
            ("localhost:99999", false),
            ("localhost:1:2", false),
            ("[::1", false),
            ("[::1]x", false),
            ("notlocalhost", false),
            ("", false),
            (":80", false),
            ("0.0.0.0", false),
            ("2130706433", false),
        ] {
            assert_eq!(is_own(host, local, &access), expected, "{host}");
        }
    }

    fn origin(host: &str, origins: &[&str]) -> Result<Option<AllowedOrigin>, Rejection> {
        let access = Access {
            origins: vec!["https://chat.example.org".into()],
            ..Access::default()
        };
        let mut request = Request::builder().header(HOST, host);
        for origin in origins {
            request = request.header(ORIGIN, *origin);
        }
        check_origin(&request.body(()).unwrap(), &access)
    }

    #[test]
    fn origins_are_this_server_or_configured() {
        let host = "localhost:52415";
        assert_eq!(origin(host, &[]).unwrap(), None);
        assert_eq!(origin(host, &["http://localhost:52415"]).unwrap(), None);
        let other = "https://chat.example.org";
        assert_eq!(
            origin(host, &[other]).unwrap(),
            Some(AllowedOrigin(other.into()))
        );
        for bad in [
            "null",
            "",
            "http://localhost",
            "http://localhost:3000",
            "https://localhost:52415",
            "http://localhost:52415.example.org",
            "http://chat.example.org",
            "https://evil.example",
        ] {
            let got = origin(host, &[bad]);
            assert!(
                matches!(got, Err(Rejection::Origin { .. })),
                "{bad}: {got:?}"
            );
        }
        let twice = origin(host, &["http://localhost:52415", "https://evil.example"]);
        assert!(matches!(twice, Err(Rejection::Origin { .. })));
        let rebound = origin("evil.example:52415", &["http://evil.example:52415"]);
        assert!(matches!(rebound, Err(Rejection::Host { .. })));
    }
}
