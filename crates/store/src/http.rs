//! Cancellable GET requests with deadlines.
//!
//! Each request runs on its own thread, since neither name lookup nor a blocked read can be
//! interrupted. The thread sends received data through a bounded channel, on which the caller waits
//! with deadline and cancel flag. When the caller gives up, the thread ends at its next send, or at
//! its socket timeout.
//!
//! Redirects are followed here, not by the HTTP library, so that only the hub's own origin gets the
//! token.

use std::io::Read;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use ureq::http::{HeaderMap, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Proxy};

use crate::Error;
use crate::hash::is_sha256;
use crate::options::{Hub, HubDeadlines, ProxySetting};
use crate::progress::Cancel;

/// Interval of cancel checks of a waiting caller.
const POLL: Duration = Duration::from_millis(50);
/// Bytes per message from the reading thread.
const BLOCK_BYTES: usize = 64 << 10;
/// Buffered messages: 1 MiB of read-ahead.
const BLOCKS: usize = 16;
/// Maximum redirects. The hub needs two (repository renamed, then storage); more is a loop.
const REDIRECTS_MAX: usize = 6;

/// A client for one hub. Clones share connections.
#[derive(Clone, Debug)]
pub(crate) struct HttpClient {
    agent: Agent,
    hub: Hub,
    endpoint: Uri,
    deadlines: HubDeadlines,
    reached: bool,
}

/// The head of a response, and its body as a stream.
#[derive(Debug)]
pub(crate) struct HubResponse {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    /// SHA-256 and size of the file, as announced by the hub.
    pub(crate) announced: AnnouncedFile,
    body: Receiver<Event>,
    url: String,
    stall: Duration,
}

/// Facts about a file in the hub's large-file storage (headers `x-linked-etag` and `x-linked-size`
/// of the hub's own response).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnnouncedFile {
    pub(crate) sha256: Option<String>,
    pub(crate) bytes: Option<u64>,
}

#[derive(Debug)]
enum Event {
    Head { status: u16, headers: HeaderMap },
    Data(Vec<u8>),
    End,
    Failed(String),
}

impl HttpClient {
    pub(crate) fn new(hub: &Hub, deadlines: &HubDeadlines) -> Result<Self, Error> {
        let endpoint = parse_endpoint(&hub.endpoint)?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_per_read(Some(deadlines.stall))
            .timeout_per_write(Some(deadlines.stall))
            // The library would else read the environment.
            .proxy(hub.proxy.as_ref().map(build_proxy).transpose()?);
        if let Some(pem) = &hub.ca_pem {
            config = config.tls_config(trust(pem)?);
        }
        Ok(Self {
            agent: config.build().new_agent(),
            hub: hub.clone(),
            endpoint,
            deadlines: deadlines.clone(),
            reached: false,
        })
    }

    /// The address of `path` (escaped, without leading `/`) on the hub.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.hub.endpoint.trim_end_matches('/'))
    }

    /// Whether requests to the hub carry a token.
    pub(crate) fn sends_token(&self) -> bool {
        self.hub.token.is_some() && (is_https(&self.endpoint) || is_loopback(&self.endpoint))
    }

    /// Requests `url` and follows redirects. The first response of the client has the deadline
    /// `reach`, later ones `answer` per hop.
    ///
    /// # Errors
    /// [`Error::HubUnreachable`] before the hub's first response, else [`Error::ConnectionLost`] or
    /// [`Error::Stalled`]; [`Error::BadRedirect`]. Any status is a success here, see
    /// [`check_status`](Self::check_status).
    pub(crate) fn get(
        &mut self,
        url: &str,
        headers: &[(&'static str, String)],
        cancel: &Cancel,
    ) -> Result<HubResponse, Error> {
        let mut uri = parse_uri(url)?;
        let mut announced = AnnouncedFile::default();
        for _ in 0..=REDIRECTS_MAX {
            let mut response = self.hop(&uri, headers, cancel)?;
            if same_origin(&uri, &self.endpoint) {
                announced = read_announced(&response.headers).or(announced);
            }
            if !matches!(response.status, 301 | 302 | 303 | 307 | 308) {
                response.announced = announced;
                return Ok(response);
            }
            uri = redirect_target(&uri, &response.headers)?;
        }
        Err(Error::BadRedirect {
            url: shown(&uri),
            reason: "too many in a row",
        })
    }

    fn hop(
        &mut self,
        uri: &Uri,
        headers: &[(&'static str, String)],
        cancel: &Cancel,
    ) -> Result<HubResponse, Error> {
        let wait = if self.reached {
            self.deadlines.answer
        } else {
            self.deadlines.reach
        };
        let mut request = self.agent.get(uri.clone());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        if let Some(token) = &self.hub.token
            && self.sends_token()
            && same_origin(uri, &self.endpoint)
        {
            request = request.header(header::AUTHORIZATION, token.header());
        }
        let request = request
            .config()
            .timeout_resolve(Some(wait))
            .timeout_connect(Some(wait))
            .timeout_recv_response(Some(wait))
            .build();
        let started = Instant::now();
        let (events, body) = sync_channel(BLOCKS);
        let spawned = thread::Builder::new()
            .name("store-http".into())
            .spawn(move || run(|| request.call(), &events));
        spawned.map_err(|error| self.no_answer(uri, started, &error.to_string()))?;
        match wait_for(&body, wait, cancel)? {
            Some(Event::Head { status, headers }) => {
                self.reached = true;
                let url = shown(uri);
                let announced = AnnouncedFile::default();
                let stall = self.deadlines.stall;
                Ok(HubResponse {
                    status,
                    headers,
                    announced,
                    body,
                    url,
                    stall,
                })
            }
            Some(Event::Failed(cause)) => Err(self.no_answer(uri, started, &cause)),
            Some(_) | None => Err(self.no_answer(uri, started, "no answer in time")),
        }
    }

    fn no_answer(&self, uri: &Uri, started: Instant, cause: &str) -> Error {
        if self.reached {
            return Error::ConnectionLost {
                url: shown(uri),
                got: Bytes(0),
                cause: cause.into(),
            };
        }
        let host = uri
            .authority()
            .map_or_else(|| uri.to_string(), |a| without_user(a.as_str()));
        Error::HubUnreachable {
            host,
            after: started.elapsed(),
            cause: cause.into(),
        }
    }

    /// Converts unsuccessful statuses into errors.
    pub(crate) fn check_status(&self, response: &HubResponse, url: &str) -> Result<(), Error> {
        let url = parse_uri(url).map_or_else(|_| url.to_owned(), |uri| shown(&uri));
        let token_sent = self.sends_token();
        match response.status {
            200..=299 => Ok(()),
            401 => Err(Error::Unauthorized { url, token_sent }),
            403 => Err(Error::Forbidden { url, token_sent }),
            404 | 410 => Err(Error::NotFound { url }),
            status => Err(Error::HttpStatus { url, status }),
        }
    }
}

impl HubResponse {
    /// The next chunk of the body; `None` at its end.
    ///
    /// # Errors
    /// [`Error::ConnectionLost`] (`got` is the caller's count of bytes), [`Error::Stalled`],
    /// [`Error::Cancelled`].
    pub(crate) fn next(&self, got: u64, cancel: &Cancel) -> Result<Option<Vec<u8>>, Error> {
        let url = self.url.clone();
        match wait_for(&self.body, self.stall, cancel)? {
            Some(Event::Data(data)) => Ok(Some(data)),
            Some(Event::End) => Ok(None),
            Some(Event::Failed(cause)) => Err(Error::ConnectionLost {
                url,
                got: Bytes(got),
                cause,
            }),
            Some(Event::Head { .. }) | None => Err(Error::Stalled {
                url,
                after: self.stall,
            }),
        }
    }

    /// The whole body, at most `limit` bytes.
    pub(crate) fn read_all(&self, limit: usize, cancel: &Cancel) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        while let Some(data) = self.next(all.len() as u64, cancel)? {
            all.extend_from_slice(&data);
            if all.len() > limit {
                return Err(Error::SizeMismatch {
                    what: self.url.clone(),
                    expected: Bytes(limit as u64),
                    got: Bytes(all.len() as u64),
                });
            }
        }
        Ok(all)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

impl AnnouncedFile {
    fn or(self, earlier: Self) -> Self {
        Self {
            sha256: self.sha256.or(earlier.sha256),
            bytes: self.bytes.or(earlier.bytes),
        }
    }
}

/// The request's thread: sends the head, then the body, until the end or until the receiver is
/// dropped.
fn run(
    call: impl FnOnce() -> Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    events: &SyncSender<Event>,
) {
    let response = match call() {
        Ok(response) => response,
        Err(error) => {
            let cause = match error {
                ureq::Error::Io(error) => error.to_string(),
                other => other.to_string(),
            };
            let _ = events.send(Event::Failed(cause));
            return;
        }
    };
    let (parts, body) = response.into_parts();
    let head = Event::Head {
        status: parts.status.as_u16(),
        headers: parts.headers,
    };
    if events.send(head).is_err() {
        return;
    }
    let mut reader = body.into_reader();
    loop {
        let mut block = vec![0; BLOCK_BYTES];
        let event = match reader.read(&mut block) {
            Ok(0) => Event::End,
            Ok(n) => {
                block.truncate(n);
                Event::Data(block)
            }
            Err(error) => Event::Failed(error.to_string()),
        };
        let last = !matches!(event, Event::Data(_));
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Waits for an event; `None` after `wait`, or when the thread has ended.
fn wait_for(
    events: &Receiver<Event>,
    wait: Duration,
    cancel: &Cancel,
) -> Result<Option<Event>, Error> {
    let deadline = Instant::now() + wait;
    loop {
        cancel.check()?;
        let left = deadline.saturating_duration_since(Instant::now());
        match events.recv_timeout(left.min(POLL)) {
            Ok(event) => return Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) if left > Duration::ZERO => {}
            Err(_) => return Ok(None),
        }
    }
}

fn read_announced(headers: &HeaderMap) -> AnnouncedFile {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let sha256 = text("x-linked-etag").map(|etag| etag.trim_matches('"').to_ascii_lowercase());
    AnnouncedFile {
        sha256: sha256.filter(|etag| is_sha256(etag)),
        bytes: text("x-linked-size").and_then(|size| size.parse().ok()),
    }
}

/// The target of a redirect. HTTPS must not redirect to HTTP.
fn redirect_target(from: &Uri, headers: &HeaderMap) -> Result<Uri, Error> {
    let bad = |reason| Error::BadRedirect {
        url: shown(from),
        reason,
    };
    let location = headers
        .get(header::LOCATION)
        .and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| bad("it has no location"))?;
    let to = absolute(from, location)
        .parse::<Uri>()
        .map_err(|_| bad("its location is no address"))?;
    match to.scheme_str() {
        _ if to.host().is_none_or(str::is_empty) => Err(bad("its location has no host")),
        Some("https") => Ok(to),
        Some("http") if !is_https(from) => Ok(to),
        Some("http") => Err(bad("it leads from https to http")),
        _ => Err(bad("it leads away from http and https")),
    }
}

/// `location` as an address of its own, relative to `from`.
fn absolute(from: &Uri, location: &str) -> String {
    let scheme = from.scheme_str().unwrap_or("https");
    let origin = format!("{scheme}://{}", from.authority().map_or("", |a| a.as_str()));
    if location.contains("://") {
        return location.to_owned();
    }
    if location.starts_with("//") {
        return format!("{scheme}:{location}");
    }
    if location.starts_with('/') {
        return format!("{origin}{location}");
    }
    let (mut rest, mut folder) = (location, parent(from.path()));
    while let Some(above) = rest.strip_prefix("../") {
        (rest, folder) = (above, parent(folder));
    }
    format!("{origin}{folder}/{rest}")
}

/// A path without its last part.
fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The address of `location`, as a page at `base` names it.
pub(crate) fn linked(base: &str, location: &str) -> Result<String, Error> {
    Ok(absolute(&parse_uri(base)?, location))
}

fn parse_uri(url: &str) -> Result<Uri, Error> {
    url.parse()
        .map_err(|error: ureq::http::uri::InvalidUri| Error::BadSetting {
            what: "address",
            value: url.to_owned(),
            reason: error.to_string(),
        })
}

fn parse_endpoint(text: &str) -> Result<Uri, Error> {
    let bad = |reason: &str| Error::BadSetting {
        what: "hub address",
        value: without_user(text),
        reason: reason.into(),
    };
    let uri = text
        .parse::<Uri>()
        .map_err(|error| bad(&error.to_string()))?;
    let known_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    if !known_scheme || uri.host().is_none_or(str::is_empty) {
        return Err(bad("expected http(s)://host[:port][/path]"));
    }
    if uri.query().is_some() {
        return Err(bad("it has a query"));
    }
    Ok(uri)
}

fn build_proxy(setting: &ProxySetting) -> Result<Proxy, Error> {
    // The address may have a password, so the error omits it.
    let bad = |error: ureq::Error| Error::BadSetting {
        what: "proxy",
        value: setting
            .url
            .rsplit('@')
            .next()
            .unwrap_or_default()
            .to_owned(),
        reason: error.to_string(),
    };
    let plain = Proxy::new(&setting.url).map_err(bad)?;
    let mut proxy = Proxy::builder(plain.protocol())
        .host(plain.host())
        .port(plain.port());
    if let Some(user) = plain.username() {
        proxy = proxy.username(user);
    }
    if let Some(password) = plain.password() {
        proxy = proxy.password(password);
    }
    for host in setting
        .no_proxy
        .split(',')
        .map(str::trim)
        .filter(|host| !host.is_empty())
    {
        proxy = proxy.no_proxy(host);
    }
    proxy.build().map_err(bad)
}

fn trust(pem: &[u8]) -> Result<TlsConfig, Error> {
    // Skips unknown items of a system's bundle.
    let certificates = parse_pem(pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    if certificates.is_empty() {
        return Err(Error::BadSetting {
            what: "certificate file",
            value: format!("{} bytes", pem.len()),
            reason: "no certificate in PEM form in it".into(),
        });
    }
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::from(certificates))
        .build())
}

fn is_https(uri: &Uri) -> bool {
    uri.scheme_str() == Some("https")
}

fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost"
        || host
            .parse()
            .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

fn same_origin(a: &Uri, b: &Uri) -> bool {
    let port = |uri: &Uri| {
        uri.port_u16()
            .unwrap_or(if is_https(uri) { 443 } else { 80 })
    };
    let host = |uri: &Uri| uri.host().unwrap_or_default().to_ascii_lowercase();
    a.scheme_str() == b.scheme_str() && host(a) == host(b) && port(a) == port(b)
}

/// An address without user, password and query: signed storage addresses have secrets in the query.
fn shown(uri: &Uri) -> String {
    let authority = uri
        .authority()
        .map_or(String::new(), |a| without_user(a.as_str()));
    format!(
        "{}://{authority}{}",
        uri.scheme_str().unwrap_or_default(),
        uri.path()
    )
}

fn without_user(text: &str) -> String {
    text.rsplit('@').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(from: &str, location: &str) -> Result<String, Error> {
        let mut headers = HeaderMap::new();
        headers.insert(header::LOCATION, location.parse().unwrap());
        redirect_target(&from.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn redirects_lead_where_they_say_and_never_to_clear_text() {
        for (from, location, to) in [
            ("https://a/x/y?q", "/z", "https://a/z"),
            ("https://a:8/x/y", "z?k=1", "https://a:8/x/z?k=1"),
            ("https://a/x", "//b/z", "https://b/z"),
            ("https://a/x", "https://b/z?s=1", "https://b/z?s=1"),
            ("http://a/x", "http://b/z", "http://b/z"),
        ] {
            assert_eq!(target(from, location).unwrap(), to);
        }
        for location in [
            "http://a/x",
            "file:///etc/passwd",
            "ftp://b/x",
            "https://",
            "https:///x",
        ] {
            let refused = target("https://a/x", location);
            assert!(
                matches!(refused, Err(Error::BadRedirect { .. })),
                "{location} {refused:?}"
            );
        }
    }

    #[test]
    fn origins_are_scheme_host_and_port() {
        let same = |a: &str, b: &str| same_origin(&a.parse().unwrap(), &b.parse().unwrap());
        assert!(same("https://A/x", "https://a:443/y"));
        assert!(!same("https://a/", "http://a/"));
        assert!(!same("https://a/", "https://a:444/"));
        assert!(!same("https://a/", "https://a.evil/"));
    }

    #[test]
    fn a_token_is_not_sent_in_clear_text_off_this_machine() {
        for (endpoint, sent) in [
            ("https://hub.example", true),
            ("http://hub.example", false),
            ("http://127.0.0.1:80", true),
            ("http://[::1]:80", true),
            ("http://localhost", true),
        ] {
            let token = Some(crate::HubToken::new("x"));
            let hub = Hub {
                endpoint: endpoint.into(),
                token,
                ..Hub::default()
            };
            let client = HttpClient::new(&hub, &HubDeadlines::default()).unwrap();
            assert_eq!(client.sends_token(), sent, "{endpoint}");
        }
    }

    #[test]
    fn addresses_are_shown_without_secrets() {
        let uri = "https://u:p@cdn/x/y?signature=1".parse().unwrap();
        assert_eq!(shown(&uri), "https://cdn/x/y");
        for bad in ["", "hub", "ftp://x", "https://", "https://a/?q"] {
            let hub = Hub {
                endpoint: bad.into(),
                ..Hub::default()
            };
            let refused = HttpClient::new(&hub, &HubDeadlines::default());
            assert!(matches!(refused, Err(Error::BadSetting { .. })), "{bad:?}");
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        assert!(trust(b"no certificate").is_err());
        let bad = ProxySetting {
            url: "socks9://x".into(),
            no_proxy: String::new(),
        };
        assert!(build_proxy(&bad).is_err());
        let good = ProxySetting {
            url: "http://u:p@proxy:3128".into(),
            no_proxy: "localhost, .example.com".into(),
        };
        let proxy = build_proxy(&good).unwrap();
        assert_eq!(
            (proxy.host(), proxy.port(), proxy.username()),
            ("proxy", 3128, Some("u"))
        );
        assert!(proxy.is_no_proxy(&"https://a.example.com".parse().unwrap()));
    }
}
