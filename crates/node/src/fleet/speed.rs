//! This machine's memory bandwidth and compute rate, measured once, for nodes that plan placements.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_tensor::Kernels;
use paceline_tensor::limits::{ReadLimit, integer_work};
use serde::{Deserialize, Serialize};

/// Bytes read, 128 MiB: four times the last-level cache of the machines at hand.
const READ_BYTES: usize = 128 << 20;

/// Prefetch distances in bytes: none, and one that helped where hardware prefetches little.
const AHEAD: [usize; 2] = [0, 2048];

/// Rounds per distance; the best counts.
const ROUNDS: usize = 3;

/// Longest wait for another machine to measure itself.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Peak rates of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MeasuredSpeed {
    /// Bytes a second read by all threads together.
    pub(super) reads: f64,
    /// Integer operations a second of all threads together.
    pub(super) computes: f64,
}

/// Cache of this machine's speed; empty before the first call.
#[derive(Default)]
pub(super) struct SpeedCache(Mutex<Option<MeasuredSpeed>>);

impl SpeedCache {
    /// Measures the first time, which takes some tenths of a second.
    pub(super) fn get(
        &self,
        kernels: impl FnOnce() -> io::Result<Arc<Kernels>>,
    ) -> io::Result<MeasuredSpeed> {
        let mut known = lock(&self.0);
        if let Some(speed) = *known {
            return Ok(speed);
        }
        let speed = measure(&*kernels()?)?;
        *known = Some(speed);
        Ok(speed)
    }
}

fn measure(kernels: &Kernels) -> io::Result<MeasuredSpeed> {
    let memory = ReadLimit::new(READ_BYTES, kernels.pool()).map_err(io::Error::other)?;
    let reads = (0..ROUNDS).flat_map(|_| AHEAD).map(|ahead| {
        let start = Instant::now();
        memory.read(kernels, ahead);
        memory.bytes().0 as f64 / start.elapsed().as_secs_f64()
    });
    let computes = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        integer_work(kernels) as f64 / start.elapsed().as_secs_f64()
    });
    Ok(MeasuredSpeed {
        reads: reads.fold(1.0, f64::max),
        computes: computes.fold(1.0, f64::max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_measured_once() {
        let known = SpeedCache::default();
        let first = known.get(|| Kernels::new(1).map(Arc::new)).unwrap();
        assert!(first.reads > 1e6 && first.computes > 1e6, "{first:?}");
        let again = known.get(|| Err(io::ErrorKind::Other.into()));
        assert_eq!(again.unwrap(), first);
    }
}
