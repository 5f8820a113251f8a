//! The description of an upstream, as a command line has it.
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use axum::http::Uri;
use tokio_rustls::rustls::ClientConfig;

use paceline_auth::tls::client_config;

/// Maximum bytes of a key file. Keys of common servers have some hundred.
const KEY_BYTES_MAX: u64 = 8 << 10;

/// An unusable description of an upstream.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not an address of a server.
    #[error("{url:?} is no http:// or https:// URL of a server")]
    Url { url: String },
    /// A user or password in the URL, which other users of the machine could read.
    #[error("the URL has a user or password, expected a key in a file: URL,key=FILE")]
    UserInfo,
    /// An unknown option behind the URL.
    #[error("{option:?} is no option of an upstream, expected key=FILE, cert=FILE or replica")]
    Option { option: String },
    /// A certificate for a server without TLS.
    #[error("cert= belongs to an https:// URL")]
    CertificateOfPlain,
    /// The file of the key could not be read.
    #[error("reading {}", path.display())]
    Key { path: PathBuf, source: io::Error },
    /// The file of the key has no single line of printable ASCII.
    #[error("{}: expected one line with a key", path.display())]
    KeyText { path: PathBuf },
    /// The certificates of the server are unusable.
    #[error(transparent)]
    Certificate(#[from] paceline_auth::tls::Error),
}

/// Whether an upstream may answer for a model that the cluster serves under the same name. Its
/// answers have other bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaUse {
    #[default]
    Never,
    Allowed,
}

/// `URL[,key=FILE][,cert=FILE][,replica]`: an upstream whose files were not read yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamArg {
    is_tls: bool,
    /// Without brackets.
    host: String,
    port: u16,
    /// Path before `/v1`, without a slash at its end.
    base: String,
    key: Option<PathBuf>,
    certificates: Option<PathBuf>,
    replica: ReplicaUse,
}

/// Opens a stream of HTTP to another node. Called on a thread that may block, for some seconds.
pub type UpstreamDialer = Arc<dyn Fn() -> io::Result<UnixStream> + Send + Sync>;

/// The way to an upstream.
#[derive(Clone)]
pub(super) enum Route {
    Tcp {
        host: String,
        port: u16,
        /// `None` for plain HTTP.
        tls: Option<Arc<ClientConfig>>,
    },
    /// The upstreams of another node of the cluster.
    Node { name: String, dial: UpstreamDialer },
}

/// A server that takes requests of this node.
#[derive(Clone, derive_more::Debug)]
#[debug("upstream {}", self.name())]
pub struct UpstreamSpec {
    pub(super) route: Route,
    pub(super) base: String,
    /// Sent as a bearer token; never printed.
    pub(super) key: Option<String>,
    pub(super) replica: ReplicaUse,
}

impl FromStr for UpstreamArg {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut parts = text.split(',');
        let mut arg = Self::at(parts.next().unwrap_or_default())?;
        for option in parts {
            match option.split_once('=') {
                Some(("key", file)) if !file.is_empty() => arg.key = Some(file.into()),
                Some(("cert", file)) if !file.is_empty() => arg.certificates = Some(file.into()),
                None if option == "replica" => arg.replica = ReplicaUse::Allowed,
                _ => {
                    let option = option.to_owned();
                    return Err(SpecError::Option { option });
                }
            }
        }
        match arg.certificates.is_some() && !arg.is_tls {
            true => Err(SpecError::CertificateOfPlain),
            false => Ok(arg),
        }
    }
}

impl UpstreamArg {
    /// Parses a URL with or without `/v1` at its end.
    fn at(text: &str) -> Result<Self, SpecError> {
        let wrong = || SpecError::Url {
            url: text.to_owned(),
        };
        if text.contains('@') {
            return Err(SpecError::UserInfo);
        }
        let url: Uri = text.parse().map_err(|_| wrong())?;
        let is_tls = match url.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        let host = url.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || url.query().is_some() || text.contains('#') {
            return Err(wrong());
        }
        let base = url.path().trim_end_matches('/');
        Ok(Self {
            is_tls,
            host: host.to_owned(),
            port: url.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            base: base.strip_suffix("/v1").unwrap_or(base).to_owned(),
            key: None,
            certificates: None,
            replica: ReplicaUse::Never,
        })
    }

    /// Reads the files of the key and of the certificates.
    ///
    /// # Errors
    /// [`SpecError::Key`], [`SpecError::KeyText`], [`SpecError::Certificate`].
    pub fn open(self) -> Result<UpstreamSpec, SpecError> {
        let tls = self
            .is_tls
            .then(|| client_config(self.certificates.as_deref()));
        Ok(UpstreamSpec {
            key: self.key.as_deref().map(read_key).transpose()?,
            route: Route::Tcp {
                tls: tls.transpose()?,
                host: self.host,
                port: self.port,
            },
            base: self.base,
            replica: self.replica,
        })
    }
}

impl UpstreamSpec {
    /// The upstreams of the node `name`, which takes no part as a replica. `dial` reaches its
    /// [`serve_upstreams`](crate::ModelRegistry::serve_upstreams).
    pub fn of_node(name: String, dial: UpstreamDialer) -> Self {
        Self {
            route: Route::Node { name, dial },
            base: String::new(),
            key: None,
            replica: ReplicaUse::Never,
        }
    }

    /// Whether no other node of the cluster is between.
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self.route, Route::Tcp { .. })
    }

    /// Host and port, or the node's name, as users see it: `192.168.1.5:11434`.
    pub fn name(&self) -> String {
        match &self.route {
            Route::Node { name, .. } => name.clone(),
            Route::Tcp { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            Route::Tcp { host, port, .. } => format!("{host}:{port}"),
        }
    }

    /// Whether requests leave this machine unencrypted.
    pub fn is_exposed(&self) -> bool {
        let Route::Tcp { host, tls, .. } = &self.route else {
            return false; // sessions between nodes are encrypted
        };
        let is_loopback = match host.parse::<std::net::IpAddr>() {
            Ok(ip) => ip.to_canonical().is_loopback(),
            Err(_) => host == "localhost" || host.ends_with(".localhost"),
        };
        tls.is_none() && !is_loopback
    }
}

/// Reads a key: one line, which fits into a header.
fn read_key(path: &Path) -> Result<String, SpecError> {
    let failed = |source| SpecError::Key {
        path: path.to_owned(),
        source,
    };
    let mut text = Vec::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(KEY_BYTES_MAX).read_to_end(&mut text);
    read.map_err(failed)?;
    let key = text.trim_ascii();
    match !key.is_empty() && key.iter().all(u8::is_ascii_graphic) {
        true => Ok(String::from_utf8_lossy(key).into_owned()),
        false => Err(SpecError::KeyText {
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_hosts_ports_and_options() {
        let of = |text: &str| text.parse::<UpstreamArg>();
        let parts = |text: &str| {
            let arg = of(text).unwrap();
            (arg.is_tls, arg.host, arg.port, arg.base)
        };
        let expected =
            |is_tls, host: &str, port, base: &str| (is_tls, host.to_owned(), port, base.to_owned());
        for (text, wanted) in [
            ("http://box:11434", expected(false, "box", 11434, "")),
            ("http://box", expected(false, "box", 80, "")),
            ("https://box/v1/", expected(true, "box", 443, "")),
            ("http://[::1]:8/a/v1", expected(false, "::1", 8, "/a")),
        ] {
            assert_eq!(parts(text), wanted, "{text}");
        }
        let full = of("https://box,key=k,cert=c.pem,replica").unwrap();
        assert_eq!(full.key.as_deref(), Some(Path::new("k")));
        assert_eq!(full.certificates.as_deref(), Some(Path::new("c.pem")));
        assert_eq!(full.replica, ReplicaUse::Allowed);
        for bad in [
            "",
            "box",
            "box:80",
            "ftp://box",
            "http://",
            "http://a b",
            "http://box?x=1",
            "http://u:p@box",
            "http://box,keys=f",
            "http://box,key=",
            "http://box,replica=1",
            "http://box,cert=c",
        ] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_is_read_and_never_printed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let open = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let arg = format!("http://box,key={}", file.display());
            arg.parse::<UpstreamArg>().unwrap().open()
        };
        let spec = open("s3cret\n").unwrap();
        assert_eq!(spec.key.as_deref(), Some("s3cret"));
        assert!(!format!("{spec:?}").contains("s3cret"));
        for bad in ["", "\n", "two\nlines", "spä\n"] {
            let error = open(bad).unwrap_err();
            assert!(matches!(error, SpecError::KeyText { .. }), "{error}");
        }
        assert!(spec.is_exposed());
        let own = "http://127.0.0.2".parse::<UpstreamArg>().unwrap();
        assert!(!own.open().unwrap().is_exposed());
    }
}
