//! Errors of model measurements.

use std::io;
use std::process::ExitStatus;

use paceline_engine::RequestFailure;

/// Why a model cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Mlx(paceline_mlx::Error),
    #[error(transparent)]
    Failure(RequestFailure),
    /// There is no answer to measure.
    #[error("the model ended its answer at once: nothing to measure")]
    NoAnswer,
    #[error("mlx-lm decodes behind the prompt, so --depth cannot be compared with it")]
    PeerDepth,
    #[error("cannot run Python, which drives {name}")]
    PeerStart {
        name: &'static str,
        source: io::Error,
    },
    /// The other program closed its output.
    #[error("cannot hear {name}")]
    PeerLost {
        name: &'static str,
        source: io::Error,
    },
    #[error("{name} did not run ({status}), its message is above")]
    PeerEnded {
        name: &'static str,
        status: ExitStatus,
    },
    #[error("the answer of {name}'s script is not two numbers")]
    PeerAnswer {
        name: &'static str,
        /// The parse error.
        source: serde_json::Error,
    },
}
