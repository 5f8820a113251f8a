//! Why a server cannot be made or has ended.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio_rustls::rustls;

/// Startup and runtime errors of a server. Errors of clients are rejections of requests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no address to listen on")]
    NoAddress,
    /// The address is reachable from other machines, and there are no keys.
    #[error(
        "{addr} can be reached from other machines and there are no API keys, \
         expected a loopback address, keys, or leave to be open to the network"
    )]
    Open { addr: SocketAddr },
    #[error("limit {limit} is {got}, expected 1 to {most}")]
    Limit {
        limit: &'static str,
        got: usize,
        most: usize,
    },
    /// The name of a model or a metric has unusable characters.
    #[error("{what} {name:?}: expected 1 to 256 characters without control characters")]
    Name {
        /// The kind of thing that it names.
        what: &'static str,
        name: String,
    },
    #[error("listening on {addr}")]
    Bind { addr: SocketAddr, source: io::Error },
    /// The system refused threads or sockets.
    #[error("setting up the server")]
    SetUp(#[source] io::Error),
    #[error(transparent)]
    Keys(#[from] crate::keys::Error),
    /// A file of a certificate or its key could not be read.
    #[error("reading {}", path.display())]
    TlsRead { path: PathBuf, source: io::Error },
    /// A file of a certificate or its key could not be written.
    #[error("writing {}", path.display())]
    TlsWrite { path: PathBuf, source: io::Error },
    /// A PEM file of the wrong kind.
    #[error("{}: no {what} in PEM form", path.display())]
    TlsPem {
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        source: rustls::pki_types::pem::Error,
    },
    /// A certificate and a key that do not match.
    #[error("certificate {} with key {}", certificate.display(), key.display())]
    TlsPair {
        certificate: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },
    /// Certificates that cannot be trusted.
    #[error("trusting {}", path.display())]
    TlsTrust {
        path: PathBuf,
        source: rustls::Error,
    },
    #[error("making a certificate")]
    TlsMake(#[source] rcgen::Error),
}
