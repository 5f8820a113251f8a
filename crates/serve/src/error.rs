//! Why a server cannot be made or has ended.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio_rustls::rustls;

/// Why a server cannot be made or has ended. What a client did wrong is not among these: it is
/// told to the client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no address to listen on")]
    NoAddress,
    /// Anybody could use the model: there are no keys, and others reach the address.
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
    /// The name of the model, or of a fact, cannot be shown.
    #[error("{what} {name:?}: expected 1 to 256 characters without control characters")]
    Name {
        /// The kind of thing that it names.
        what: &'static str,
        name: String,
    },
    #[error("listening on {addr}")]
    Bind { addr: SocketAddr, source: io::Error },
    /// Threads or sockets of the server cannot be set up.
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
    /// A file is not what it is given as.
    #[error("{}: no {what} in PEM form", path.display())]
    TlsPem {
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        source: rustls::pki_types::pem::Error,
    },
    /// A certificate and a key that cannot be used together.
    #[error("certificate {} with key {}", certificate.display(), key.display())]
    TlsPair {
        certificate: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },
    #[error("making a certificate")]
    TlsMake(#[source] rcgen::Error),
}
