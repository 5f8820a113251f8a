//! Why a model cannot be measured.

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
}
