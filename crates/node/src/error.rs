//! Errors of instances.

use paceline_base::{KernelClass, Rank};

/// Why an instance cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model's files, or a worker in this process.
    #[error(transparent)]
    Worker(paceline_worker::Error),
    #[error(transparent)]
    Cluster(#[from] paceline_cluster::Error),
    /// Nodes that share layers have different kernel classes.
    #[error("nodes that share layers compute as {a} and as {b}, expected one class in a stage")]
    MixedStage {
        /// Class of the stage's first node.
        a: KernelClass,
        b: KernelClass,
    },
    #[error("an instance computes one pipeline of layers, and this placement has {part}")]
    Placement {
        /// The unsupported part of the model.
        part: &'static str,
    },
    #[error(transparent)]
    Adapter(#[from] paceline_model::adapter::files::Error),
    /// Two adapters of one instance have one name.
    #[error("two adapters are called {name}")]
    SameAdapter { name: String },
    #[error("adapters beside a model need nodes that compute on the CPU, and MLX computes here")]
    AdapterOnMlx,
    /// Something that keeps all of its weights in memory, where a limit is set.
    #[error("a limit of memory is for a model without {part}, whose weights would be beyond it")]
    Unlimited { part: &'static str },
    #[error("{reason}")]
    RankFailed {
        /// The rank that caused it.
        rank: Rank,
        /// The failure, with the rank's name.
        reason: String,
    },
    /// A worker on another machine cannot be started or is unreachable.
    #[error("{rank} on {source}")]
    Place {
        rank: Rank,
        /// The machine, and what happened.
        source: crate::workers::connection::ConnectionError,
    },
    #[error(transparent)]
    Split(#[from] paceline_model::split::Error),
    /// The model cannot be loaded, or a step failed.
    #[error(transparent)]
    Model(#[from] paceline_model::Error),
    #[error(transparent)]
    Engine(#[from] paceline_engine::Error),
    #[error(transparent)]
    Join(#[from] paceline_comm::InitError),
    #[error(transparent)]
    Comm(#[from] paceline_comm::Error),
    #[error(transparent)]
    Tokenizer(#[from] paceline_text::tokenizer::Error),
    #[error(transparent)]
    Plan(#[from] paceline_plan::Error),
    /// Packing weights or allocating a cache failed.
    #[error(transparent)]
    Tensor(#[from] paceline_tensor::Error),
    /// A rank did not return its recorded trace.
    #[error("{rank} did not tell what it recorded: trace again")]
    NotTraced { rank: Rank },
    #[error("another trace of it runs")]
    BeingTraced,
    /// A traced request was refused, or failed.
    #[error(transparent)]
    Request(#[from] paceline_engine::RequestFailure),
    #[error("no answer within {} s", limit.as_secs())]
    NoAnswer { limit: std::time::Duration },
    /// The model's speed on this machine cannot be measured by probing some of its layers.
    #[error("speed cannot be measured: {what}")]
    NotMeasured { what: &'static str },
    /// A thread ended before its work was done; the reason is on standard error.
    #[error("{what} ended early")]
    Ended { what: &'static str },
    /// The system refuses threads, sockets or random numbers.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that was tried.
        what: &'static str,
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the message caused the error, not its receiver.
    pub const fn is_of_message(&self) -> bool {
        use paceline_cluster::Error::{TooLong, Unencodable};
        matches!(self, Self::Cluster(TooLong { .. } | Unencodable { .. }))
    }
}

impl From<paceline_worker::Error> for Error {
    fn from(error: paceline_worker::Error) -> Self {
        use paceline_worker::Error as Source;
        match error {
            Source::Cluster(error) => Self::Cluster(error),
            Source::Split(error) => Self::Split(error),
            Source::Model(error) => Self::Model(error),
            Source::Engine(error) => Self::Engine(error),
            Source::Tokenizer(error) => Self::Tokenizer(error),
            Source::Adapter(error) => Self::Adapter(error),
            Source::Comm(error) => Self::Comm(error),
            Source::Tensor(error) => Self::Tensor(error),
            Source::Join(error) => Self::Join(error),
            Source::System { what, source } => Self::System { what, source },
            error => Self::Worker(error),
        }
    }
}
