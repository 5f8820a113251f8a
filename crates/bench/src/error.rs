//! Why a model cannot be measured.

use std::io;
use std::process::ExitStatus;

use paceline_engine::Failure;

/// Why a model cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device's reads cannot be measured.
    #[error(transparent)]
    Mlx(paceline_mlx::Error),
    /// The model did not answer.
    #[error(transparent)]
    Failure(Failure),
    /// There is no answer to take the time of.
    #[error("the model ended its answer at once: nothing to measure")]
    NoAnswer,
    /// The other program cannot be compared there.
    #[error("mlx-lm decodes behind the prompt, so --depth cannot be compared with it")]
    PeerDepth,
    /// The other program cannot be started.
    #[error("cannot run Python, which drives {name}")]
    PeerStart {
        /// The other program.
        name: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The other program cannot be heard any more.
    #[error("cannot hear {name}")]
    PeerLost {
        /// The other program.
        name: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The other program has ended.
    #[error("{name} did not run ({status}), its message is above")]
    PeerEnded {
        /// The other program.
        name: &'static str,
        /// How.
        status: ExitStatus,
    },
    /// The other program says something else.
    #[error("the answer of {name}'s script is not two numbers")]
    PeerAnswer {
        /// The other program.
        name: &'static str,
        /// The fault in the answer.
        source: serde_json::Error,
    },
}
