//! Errors of model measurements.

use paceline_engine::RequestFailure;
use paceline_process::Ending;
use std::io;

/// Why a model cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Mlx(paceline_mlx::Error),
    #[error(transparent)]
    Failure(RequestFailure),
    #[error("the model ended its answer at once: nothing to measure")]
    NoAnswer,
    #[error("mlx-lm decodes behind the prompt, so --depth cannot be compared with it")]
    PeerDepth,
    #[error("cannot run Python, which drives {name}")]
    PeerStart {
        name: &'static str,
        source: io::Error,
    },
    #[error("cannot hear {name}")]
    PeerLost {
        name: &'static str,
        source: io::Error,
    },
    #[error("{name} {ending}, its message is above")]
    PeerEnded { name: &'static str, ending: Ending },
    #[error("the answer of {name}'s script is not two numbers")]
    PeerAnswer {
        name: &'static str,
        source: serde_json::Error,
    },
}
