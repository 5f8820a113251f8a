//! What this machine can do at best at the moment.

use std::sync::Arc;
use std::time::Instant;

use paceline_mlx::{Device, Library, read_rate};
use paceline_tensor::Kernels;
use paceline_tensor::limits::{ReadLimit, integer_work};

use crate::{home, load};

/// How far ahead a reading loop asks for lines: not at all, and a distance that helped where
/// hardware fetches little by itself. The best of both counts.
const AHEAD: [usize; 2] = [0, 2048];

/// Memory that is read to know the limit, 512 MiB: several times the last cache of most machines,
/// and ten times that of the largest GPUs.
const LIMIT_BYTES: usize = 512 << 20;

/// Measures how fast memory can be read at the moment, by what computes.
pub(super) enum Limit {
    /// By all threads.
    Cpu {
        memory: ReadLimit,
        kernels: Arc<Kernels>,
    },
    /// By the device that MLX computes on.
    Mlx { library: Library, device: Device },
}

impl Limit {
    pub(super) fn of_cpu(threads: usize) -> anyhow::Result<Self> {
        let kernels = load::kernels(threads)?;
        let memory = ReadLimit::new(LIMIT_BYTES, kernels.pool())?;
        Ok(Self::Cpu { memory, kernels })
    }

    pub(super) fn of_mlx() -> anyhow::Result<Self> {
        let library = Library::open(&home::mlx_places()?)?;
        let device = library.best_device()?;
        Ok(Self::Mlx { library, device })
    }

    /// Bytes per second.
    ///
    /// # Errors
    /// When MLX fails.
    pub(super) fn measure(&self) -> anyhow::Result<f64> {
        Ok(match self {
            Self::Cpu { memory, kernels } => read_limit(memory, kernels),
            Self::Mlx { library, device } => {
                let bytes = match device {
                    Device::Cpu => LIMIT_BYTES / 8, // one thread of MLX reads 5 GB/s
                    Device::Gpu => LIMIT_BYTES,
                };
                read_rate(library, *device, bytes)?
            }
        })
    }

    /// Who reads.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Cpu { .. } => "cpu".to_owned(),
            Self::Mlx { device, .. } => format!("mlx {device}"),
        }
    }
}

/// Bytes that all threads of `kernels` read per second.
pub(super) fn read_limit(memory: &ReadLimit, kernels: &Kernels) -> f64 {
    let rate = |ahead| {
        let start = Instant::now();
        memory.read(kernels, ahead);
        memory.bytes().0 as f64 / start.elapsed().as_secs_f64()
    };
    AHEAD.map(rate).into_iter().fold(0.0, f64::max)
}

/// Integer operations that all threads of `kernels` do per second: the best of some rounds.
pub(super) fn integer_peak(kernels: &Kernels) -> f64 {
    let rate = |_| {
        let start = Instant::now();
        let operations = integer_work(kernels);
        operations as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(rate).fold(0.0, f64::max)
}

/// Bytes that `threads` threads read and integer operations that they do, per second.
///
/// # Errors
/// What the system refuses.
pub(crate) fn measured(threads: usize) -> anyhow::Result<(f64, f64)> {
    let kernels = load::kernels(threads)?;
    let memory = ReadLimit::new(LIMIT_BYTES, kernels.pool())?;
    read_limit(&memory, &kernels); // brings the pages in
    Ok((read_limit(&memory, &kernels), integer_peak(&kernels)))
}
