//! The speed that reads from memory reach on this machine, to stand beside a job's speed.

use std::time::Instant;

use paceline_tensor::limits::ReadLimit;

use crate::load;

/// Jobs that read less are over before a comparison means anything.
const COMPARED_BYTES: u64 = 64 << 20;

/// Memory that is read: more than most last caches, and done in some 10 ms.
const READ_BYTES: usize = 128 << 20;

/// Passes, of which the best counts.
const PASSES: usize = 3;

/// GB/s that as many threads as there are cores, at most `threads`, read; `None` when the job read
/// too little to compare.
///
/// # Errors
/// When the system refuses memory or threads.
pub(super) fn measure(job_bytes: u64, threads: usize) -> anyhow::Result<Option<f64>> {
    if job_bytes < COMPARED_BYTES {
        return Ok(None);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernels = load::kernels(threads.min(cores))?;
    let memory = ReadLimit::new(READ_BYTES, kernels.pool())?;
    let pass = |_| {
        let start = Instant::now();
        memory.read(&kernels, 0);
        memory.bytes().0 as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    Ok(Some((0..PASSES).map(pass).fold(0.0, f64::max)))
}
