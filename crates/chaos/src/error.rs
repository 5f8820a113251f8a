//! Why a cluster cannot be made, broken or healed.

use std::io;

use paceline_cluster::nodes::agent::local;

/// Why a cluster cannot be made, broken or healed, or that its answers were not right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing}")]
    Step {
        /// The step: `cannot start a node`.
        doing: String,
        source: Box<Error>,
    },
    #[error(transparent)]
    System(#[from] io::Error),
    /// A node does not answer on its socket, or refuses a command.
    #[error("{0}")]
    Node(#[from] local::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The cluster, the system or the request is not as a round needs it; says in which way.
    #[error("{0}")]
    Unmet(String),
    /// Clients did not get what they get from a cluster that nobody breaks.
    #[error("of {answers} answers {lost} were lost and {altered} altered{first}")]
    Answers {
        answers: usize,
        /// Answers that did not come to their end.
        lost: usize,
        /// Answers that said something else.
        altered: usize,
        /// The reason of the first one lost, with words before it, where it is known.
        first: String,
    },
}

impl Error {
    /// The error with all of its causes, on one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let said = error.to_string();
            if !text.ends_with(&said) {
                text += &format!(": {said}");
            }
            cause = error.source();
        }
        text
    }
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
