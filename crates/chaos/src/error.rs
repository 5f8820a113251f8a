//! Errors of a run: a cluster that cannot be made, broken or recovered.

use std::io;

use paceline_cluster::nodes::agent::local;

/// Why a run failed, or that its answers were wrong.
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
    /// A node does not reply on its socket, or refuses a command.
    #[error("{0}")]
    Node(#[from] local::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A requirement of a round on the cluster, the system or the request is not met.
    #[error("{0}")]
    Unmet(String),
    /// Answers differ from those of an undisturbed cluster.
    #[error("of {answers} answers {lost} were lost and {altered} altered{first}")]
    Answers {
        answers: usize,
        /// Incomplete answers.
        lost: usize,
        /// Answers with different text.
        altered: usize,
        /// The reason of the first lost answer, if known, as the end of a sentence.
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
