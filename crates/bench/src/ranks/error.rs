//! Why ranks in processes of their own cannot be measured.

use std::{io, net, num, str};

use paceline_cluster::nodes::agent::local;
use paceline_comm::InitError;
use paceline_node::launched::WireError;

/// Why ranks in processes of their own cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing}")]
    Step {
        /// The step: `cannot start a rank`.
        doing: String,
        source: Box<Error>,
    },
    /// The system refuses a call, or a pipe has ended.
    #[error(transparent)]
    System(#[from] io::Error),
    /// A rank or its parent says what is no JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A rank says an address that is none.
    #[error(transparent)]
    Address(#[from] net::AddrParseError),
    /// A rank says a number that is none.
    #[error(transparent)]
    Integer(#[from] num::ParseIntError),
    /// A rank says a time that is none.
    #[error(transparent)]
    Time(#[from] num::ParseFloatError),
    /// A rank says bytes that are no text.
    #[error(transparent)]
    Text(#[from] str::Utf8Error),
    /// The wire of a rank cannot be had.
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Join(#[from] InitError),
    #[error("{0}")]
    Comm(#[from] paceline_comm::Error),
    #[error("{0}")]
    Node(#[from] local::Error),
    /// A rank, a machine or another library is not as the measurement needs it; says in which way.
    #[error("{0}")]
    Unmet(String),
}

/// Adds the step to the error of its failure, or to a value that is lacking.
pub(crate) trait Context<T> {
    /// As [`with_context`](Self::with_context), with a text that is there.
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

/// Goes on where `holds`.
///
/// # Errors
/// [`Error::Unmet`] with the text of `otherwise`.
pub(crate) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Error> {
    match holds {
        true => Ok(()),
        false => Err(Error::Unmet(otherwise())),
    }
}
