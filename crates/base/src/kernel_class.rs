//! Kernel classes: each defines the bits of a model's results.

use std::str::FromStr;

crate::named_enum! {
    /// A kernel class. Results of one class are bit-identical however they were computed (any
    /// batch, threads, instruction set, split). Results of different classes agree only
    /// approximately.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum KernelClass {
        /// The default: weights as stored, keys and values in f16. For quantised weights,
        /// activations are rounded to 15 bits per 256 values, too finely to change an answer.
        #[default]
        Cpu = "cpu",
        /// As `Cpu` with activations rounded to 8 bits, as other engines do (to bf16 for BF16
        /// weights). Prefill of BF16 weights is faster, of others mostly slower. The most probable
        /// token differs at 2 to 4 of 100 positions (docs/numerics.md).
        CpuQ8 = "cpu-q8",
        /// Weights decoded to f32, activations and cache in f32: four to eight times the memory;
        /// the reference that `Cpu` is measured against.
        CpuF32 = "cpu-f32",
        /// MLX, with activations and cache in the type of the model's floats. Bits are the same run
        /// after run and for pipeline splits, not for other batches or tensor splits
        /// (docs/numerics.md).
        Mlx = "mlx",
        /// MLX with activations, scales and cache in f32: slower and nearer to `CpuF32`.
        MlxF32 = "mlx-f32",
        /// As `Mlx`, every row computed by itself and every product whole: the same bits for all
        /// batches and splits, slower (docs/numerics.md).
        MlxExact = "mlx-exact",
    }
}

/// Not the name of a kernel class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown kernel class {0:?}, expected cpu, cpu-q8, cpu-f32, mlx, mlx-f32 or mlx-exact")]
pub struct UnknownKernelClass(pub String);

impl KernelClass {
    /// Whether MLX computes it; otherwise paceline's kernels.
    pub const fn is_mlx(self) -> bool {
        matches!(self, Self::Mlx | Self::MlxF32 | Self::MlxExact)
    }

    /// Whether results have the same bits on any split and in any batch, so that an answer can
    /// continue after a failure.
    pub const fn is_exact(self) -> bool {
        !matches!(self, Self::Mlx | Self::MlxF32)
    }
}

impl FromStr for KernelClass {
    type Err = UnknownKernelClass;

    fn from_str(name: &str) -> Result<Self, UnknownKernelClass> {
        Self::from_name(name).ok_or_else(|| UnknownKernelClass(name.to_owned()))
    }
}
