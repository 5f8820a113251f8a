//! The engines that a run can compute with, and what they need of a machine.

use std::fmt;

use paceline_model_mlx::MlxPlaces;
use paceline_tensor::Kernels;
use serde::{Deserialize, Serialize};

/// The arithmetic of a run. Classes give different bits, so a resumed run must have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainingClass {
    /// This crate's own kernels: the same bits on every machine.
    #[default]
    Cpu,
    /// MLX, in bf16 where the model is, else in f32: halves are too narrow for gradients.
    Mlx,
    /// MLX in f32.
    MlxF32,
}

impl TrainingClass {
    /// The name in options and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Mlx => "mlx",
            Self::MlxF32 => "mlx-f32",
        }
    }
}

impl fmt::Display for TrainingClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Means of a machine to compute: threads, and MLX where it is installed.
#[derive(Debug)]
pub struct Means {
    /// Threads. Where MLX computes, they read embeddings.
    pub kernels: Kernels,
    /// Folders to search for MLX, for classes of it.
    pub mlx: MlxPlaces,
}

impl From<Kernels> for Means {
    fn from(kernels: Kernels) -> Self {
        Self {
            kernels,
            mlx: MlxPlaces::default(),
        }
    }
}
