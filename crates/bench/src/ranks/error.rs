//! Errors of measurements with ranks in their own processes.

use std::{io, net, num, str};

use paceline_cluster::nodes::agent::local;
use paceline_comm::InitError;
use paceline_node::launched::WireError;

/// Why ranks in their own processes cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing}")]
    Step {
        /// The step: `cannot start a rank`.
        doing: String,
        source: Box<Error>,
    },
    /// A system call failed, or a pipe has ended.
    #[error(transparent)]
    System(#[from] io::Error),
    /// Output of a rank or its parent is no JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A rank's address is invalid.
    #[error(transparent)]
    Address(#[from] net::AddrParseError),
    /// A rank's number is invalid.
    #[error(transparent)]
    Integer(#[from] num::ParseIntError),
    /// A rank's time is invalid.
    #[error(transparent)]
    Time(#[from] num::ParseFloatError),
    /// A rank's output is not UTF-8.
    #[error(transparent)]
    Text(#[from] str::Utf8Error),
    /// The transport of a rank is unavailable.
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Join(#[from] InitError),
    #[error("{0}")]
    Comm(#[from] paceline_comm::Error),
    #[error("{0}")]
    Node(#[from] local::Error),
    /// A requirement of the measurement on a rank, a machine or another library is not met.
    #[error("{0}")]
    Unmet(String),
}

/// Adds the failed step to an error, or to a missing value.
pub(crate) trait Context<T> {
    /// As [`with_context`](Self::with_context), with a fixed text.
    fn context(self, doing: &str) -> Result<T, Error>;

    /// # Errors
    /// [`Error::Step`], or [`Error::Unmet`] where there is no cause.
    fn with_context(self, doing: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, doing: &str) -> Result<T, Error> {
        self.with_context(|| doing.to_owned())
    }

    fn with_context(self, doing: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|error| Error::Step {
            doing: doing(),
            source: Box::new(error.into()),
        })
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, doing: &str) -> Result<T, Error> {
        self.with_context(|| doing.to_owned())
    }

    fn with_context(self, doing: impl FnOnce() -> String) -> Result<T, Error> {
        self.ok_or_else(|| Error::Unmet(doing()))
    }
}

/// Fails unless `holds`.
///
/// # Errors
/// [`Error::Unmet`] with the text of `otherwise`.
pub(crate) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Error> {
    match holds {
        true => Ok(()),
        false => Err(Error::Unmet(otherwise())),
    }
}
