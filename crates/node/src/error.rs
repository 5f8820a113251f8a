//! Why an instance cannot be started.

use std::time::Duration;

use paceline_base::Rank;
use paceline_model::split;

/// Why an instance cannot be started, or a worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The workers cannot be started or reached.
    #[error(transparent)]
    Cluster(#[from] paceline_cluster::Error),
    /// A worker failed; says which and how.
    #[error("{reason}")]
    Worker {
        /// The rank that caused it.
        rank: Rank,
        /// What happened, with the rank's name.
        reason: String,
    },
    /// The engine of this worker cannot go on.
    #[error("{reason}")]
    Stopped {
        /// What it says.
        reason: String,
        /// Whose fault it is, if another rank's.
        blamed: Option<Rank>,
    },
    /// Workers did not get ready in time.
    #[error("{rank} did not {what} within {} s", limit.as_secs())]
    Slow {
        /// The first that is missing.
        rank: Rank,
        /// What it should have done.
        what: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// The parent speaks another protocol than this worker.
    #[error("the parent sent {got} where {expected} was due: are they of one version?")]
    Protocol {
        /// What came.
        got: &'static str,
        /// What should have come.
        expected: &'static str,
    },
    /// A setting that the parent sent cannot be read.
    #[error("{field} is {got:?}, which this worker does not know")]
    Setting {
        /// Its name.
        field: &'static str,
        /// Its value.
        got: String,
    },
    /// The model cannot be cut as asked.
    #[error(transparent)]
    Split(#[from] split::Error),
    /// The model cannot be loaded, or a step failed.
    #[error(transparent)]
    Model(#[from] paceline_model::Error),
    /// The engine cannot be made.
    #[error(transparent)]
    Engine(#[from] paceline_engine::Error),
    /// The ranks cannot reach one another.
    #[error(transparent)]
    Join(#[from] paceline_comm::InitError),
    /// A rank failed while the ranks met.
    #[error(transparent)]
    Comm(#[from] paceline_comm::Error),
    /// The model's tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] paceline_formats::tokenizer::Error),
    /// The system refuses threads, sockets or random numbers.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// Whether a worker was started by somebody who does not speak with it, such as a person.
    pub const fn is_by_hand(&self) -> bool {
        matches!(
            self,
            Self::Cluster(paceline_cluster::Error::NoControl { .. })
        )
    }

    /// Of another rank, the one to blame; `None` when the failure is this rank's own.
    pub(crate) fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Model(error) | Self::Engine(paceline_engine::Error::Model(error)) => {
                error.blamed()
            }
            Self::Stopped { blamed, .. } => *blamed,
            _ => None,
        }
    }
}
