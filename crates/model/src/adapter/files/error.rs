//! Errors of adapter files.

use std::io;
use std::path::{Path, PathBuf};

/// Why an adapter's files cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {what} {}", path.display())]
    File {
        /// The operation that was tried.
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// A file is not as it should be.
    #[error("{}: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
}

impl Error {
    /// The system's answer about a file.
    pub fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            what,
            path: path.to_owned(),
            source,
        }
    }

    /// A malformed file.
    pub fn malformed(path: &Path, reason: impl ToString) -> Self {
        Self::Malformed {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}
