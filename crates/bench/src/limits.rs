//! Current speed limits of this machine.

use std::sync::Arc;
use std::time::Instant;

use paceline_mlx::{self as mlx, DeviceKind, Library, LibraryPaths, read_rate};
use paceline_tensor::limits::{ReadLimit, integer_work};
use paceline_tensor::{self as tensor, Kernels};

/// Prefetch distances in bytes: none, and one that helped where the hardware prefetches little. The
/// better result counts.
const AHEAD: [usize; 2] = [0, 2048];

/// Memory that is read to measure the limit, 512 MiB. That is several times the last cache of most
/// machines, and ten times that of the largest GPUs.
const LIMIT_BYTES: usize = 512 << 20;

/// Measures the current speed of memory reads, on the device that computes.
#[expect(
    missing_debug_implementations,
    reason = "memory and kernels say nothing"
)]
pub enum Limit {
    /// By all threads.
    Cpu {
        memory: ReadLimit,
        /// The kernels that read.
        kernels: Arc<Kernels>,
    },
    /// By the device that MLX computes on.
    Mlx {
        library: Library,
        device: DeviceKind,
    },
}

impl Limit {
    /// The limit of all threads of `kernels`.
    pub fn of_cpu(kernels: Arc<Kernels>) -> Result<Self, tensor::Error> {
        let memory = ReadLimit::new(LIMIT_BYTES, kernels.pool())?;
        Ok(Self::Cpu { memory, kernels })
    }

    /// The limit of the best device of the MLX at one of `places`.
    pub fn of_mlx(places: &LibraryPaths) -> Result<Self, mlx::Error> {
        let library = Library::open(places)?;
        let device = library.best_device()?;
        Ok(Self::Mlx { library, device })
    }

    /// Bytes per second.
    pub fn measure(&self) -> Result<f64, mlx::Error> {
        Ok(match self {
            Self::Cpu { memory, kernels } => read_limit(memory, kernels),
            Self::Mlx { library, device } => {
                let bytes = match device {
                    DeviceKind::Cpu => LIMIT_BYTES / 8, // one thread of MLX reads 5 GB/s
                    DeviceKind::Gpu => LIMIT_BYTES,
                };
                read_rate(library, *device, bytes)?
            }
        })
    }

    /// The name of the reader.
    pub fn name(&self) -> String {
        match self {
            Self::Cpu { .. } => "cpu".to_owned(),
            Self::Mlx { device, .. } => format!("mlx {device}"),
        }
    }
}

/// Bytes that all threads of `kernels` read per second.
pub fn read_limit(memory: &ReadLimit, kernels: &Kernels) -> f64 {
    let rate = |ahead| {
        let start = Instant::now();
        memory.read(kernels, ahead);
        memory.bytes().0 as f64 / start.elapsed().as_secs_f64()
    };
    AHEAD.map(rate).into_iter().fold(0.0, f64::max)
}

/// Integer operations that all threads of `kernels` perform per second: the best of some rounds.
pub fn integer_peak(kernels: &Kernels) -> f64 {
    let rate = |_| {
        let start = Instant::now();
        let operations = integer_work(kernels);
        operations as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(rate).fold(0.0, f64::max)
}

/// Array jobs that read fewer bytes are too short for a comparison with memory.
pub const COMPARED_BYTES: u64 = 64 << 20;

/// Memory that is read for the comparison: more than most last caches, and read in some 10 ms.
const COMPARED_READ_BYTES: usize = 128 << 20;

/// Passes over it; the best one counts.
const COMPARED_PASSES: usize = 3;

/// GB/s that all threads of `kernels` read, for comparison with a job's speed. Takes some 30 ms.
pub fn compared_gb_s(kernels: &Kernels) -> Result<f64, tensor::Error> {
    let memory = ReadLimit::new(COMPARED_READ_BYTES, kernels.pool())?;
    let pass = |_| {
        let start = Instant::now();
        memory.read(kernels, 0);
        memory.bytes().0 as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    Ok((0..COMPARED_PASSES).map(pass).fold(0.0, f64::max))
}

/// Bytes read and integer operations performed per second by all threads of `kernels`.
pub fn measured(kernels: &Kernels) -> Result<(f64, f64), tensor::Error> {
    let memory = ReadLimit::new(LIMIT_BYTES, kernels.pool())?;
    read_limit(&memory, kernels); // brings the pages in
    Ok((read_limit(&memory, kernels), integer_peak(kernels)))
}
