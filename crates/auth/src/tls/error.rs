//! Why a certificate cannot be used or made.

use std::io;
use std::path::PathBuf;

use tokio_rustls::rustls;

/// Errors of certificates and of their files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of a certificate or its key could not be read.
    #[error("reading {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file of a certificate or its key could not be written.
    #[error("writing {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{}: no {what} in PEM form", path.display())]
    Pem {
        path: PathBuf,
        /// `certificate` or `private key`.
        what: &'static str,
        source: rustls::pki_types::pem::Error,
    },
    /// A certificate and a key that do not match.
    #[error("certificate {} with key {}", certificate.display(), key.display())]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },
    #[error("trusting {}", path.display())]
    Trust {
        path: PathBuf,
        source: rustls::Error,
    },
    #[error("making a certificate")]
    Make(#[source] rcgen::Error),
    #[error("setting up TLS")]
    SetUp(#[source] rustls::Error),
}
