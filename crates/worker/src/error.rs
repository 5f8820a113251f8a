//! Errors of worker processes and of a model's files on one machine.

use paceline_base::{KernelClass, Rank};
use paceline_comm::InitError;
use paceline_comm::tcp::JoinError;
use paceline_model::split;

/// Why a model cannot be loaded here, or a worker's epoch failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Cluster(#[from] paceline_cluster::Error),
    #[error(transparent)]
    Adapter(#[from] paceline_model::adapter::files::Error),
    /// An adapter's files were replaced since its instance started.
    #[error("adapter {name}: {}: the file was replaced", path.display())]
    OtherAdapter {
        name: String,
        path: std::path::PathBuf,
    },
    /// States of layers have another layout in each class, and on MLX no layout of pages.
    #[error("nodes for prompts: class {from} hands no states of layers to class {to}")]
    PromptStates { from: KernelClass, to: KernelClass },
    /// Keys and values in blocks with scales are not converted.
    #[error("nodes for prompts: class {from} hands no q8 or q4 keys and values to class {to}")]
    PromptsQuantised { from: KernelClass, to: KernelClass },
    /// Unlike classes give near answers.
    #[error("nodes for prompts: with {from} reading for {to}, answers would only be near")]
    PromptsNear { from: KernelClass, to: KernelClass },
    /// Prefill and decode ranks must have one kernel class, else an answer would depend on which
    /// group computed the prompt.
    #[error("nodes for prompts need one class on all nodes, and they compute as {a} and as {b}")]
    MixedPrompts {
        /// Class of the first node.
        a: KernelClass,
        b: KernelClass,
    },
    /// A prefill rank sent bytes that are no valid page for this rank.
    #[error("a page of a prompt was refused: {what}")]
    BadPage { what: &'static str },
    /// Packed weights cannot be carried into another epoch.
    #[error("something still holds the weights of the epoch before")]
    Held,
    /// The model's file was replaced since its instance was loaded.
    #[error("{}: the file was replaced: it is model {got}, the instance is of {expected}", path.display())]
    OtherModel {
        path: std::path::PathBuf,
        got: String,
        expected: String,
    },
    /// The engine of this worker has stopped.
    #[error("{reason}")]
    Stopped {
        reason: String,
        /// The rank at fault, if it is another one.
        blamed: Option<Rank>,
        /// See [`is_interrupted`](Self::is_interrupted).
        interrupted: bool,
    },
    /// The parent uses a different protocol version.
    #[error("the parent sent {got} where {expected} was due: are they of one version?")]
    Protocol {
        got: &'static str,
        expected: &'static str,
    },
    /// This rank hangs in a kernel or a driver.
    #[error(
        "hangs: layer {layer} has not ended within {:.1} s, expected {:.1} s at most",
        stalled.as_secs_f64(), limit.as_secs_f64()
    )]
    Hang {
        /// The layer, counted from 0.
        layer: u32,
        /// Time without progress.
        stalled: std::time::Duration,
        /// How long a layer may take.
        limit: std::time::Duration,
    },
    /// A setting from the parent does not parse.
    #[error("{field} is {got:?}, which this worker does not know")]
    Setting { field: &'static str, got: String },
    #[error(transparent)]
    Split(#[from] split::Error),
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
    /// Packing weights or allocating a cache failed.
    #[error(transparent)]
    Tensor(#[from] paceline_tensor::Error),
    /// All ports that a worker may listen at are taken.
    #[error("ports {first} to {last} are taken, and a worker may listen at no other")]
    Ports { first: u16, last: u16 },
    /// The system refuses threads, sockets or random numbers.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that was tried.
        what: &'static str,
        source: std::io::Error,
    },
}

impl Error {
    /// Whether the worker was started without a parent on its control channel, for example by hand.
    pub const fn is_by_hand(&self) -> bool {
        matches!(
            self,
            Self::Cluster(paceline_cluster::Error::NoControl { .. })
        )
    }

    /// Whether this rank's device interrupted a step because it took too long.
    pub const fn is_interrupted(&self) -> bool {
        match self {
            Self::Model(error) | Self::Engine(paceline_engine::Error::Model(error)) => {
                error.is_interrupted()
            }
            Self::Stopped { interrupted, .. } => *interrupted,
            _ => false,
        }
    }

    /// The other rank to blame; `None` if the failure is this rank's own.
    pub fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Model(error) | Self::Engine(paceline_engine::Error::Model(error)) => {
                error.blamed()
            }
            Self::Stopped { blamed, .. } => *blamed,
            Self::Join(InitError::Join(error)) => missing(error),
            // A collective's error names a rank.
            Self::Comm(error) => paceline_model::Error::Comm(*error).blamed(),
            _ => None,
        }
    }
}

/// The other rank that prevented the group from forming, if there is one.
const fn missing(error: &JoinError) -> Option<Rank> {
    match error {
        JoinError::Missing { rank, .. } | JoinError::Lost { rank } => Some(*rank),
        // That rank reports its own reason, which is more certain.
        JoinError::GaveUp { by, .. } => Some(*by),
        JoinError::NoSuchRank { .. }
        | JoinError::System { .. }
        | JoinError::Refused { .. }
        | JoinError::Unfit { .. }
        | JoinError::Unprotected { .. }
        | JoinError::NoAddress { .. }
        | JoinError::Apart { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use paceline_comm::{Call, Dtype, Kind, Site};

    use super::*;

    #[test]
    fn a_rank_that_is_left_alone_blames_the_other() {
        let rank = Rank(2);
        let lost = Error::Join(InitError::Join(JoinError::Lost { rank }));
        assert_eq!(lost.blamed(), Some(rank));
        let turned_away = None;
        let missing = JoinError::Missing { rank, turned_away };
        assert_eq!(Error::Join(missing.into()).blamed(), Some(rank));
        let size = 2;
        let own = JoinError::NoSuchRank { rank, size };
        assert_eq!(Error::Join(own.into()).blamed(), None);
        let call = Call {
            sequence: 1,
            kind: Kind::Barrier,
            dtype: Dtype::U8,
            length: 0,
            digest: 0,
            site: Site::NONE,
        };
        let lost = paceline_comm::Error::PeerLost { call, rank };
        assert_eq!(Error::Comm(lost).blamed(), Some(rank));
    }
}
