//! This machine's speed of reading memory and computing, measured once, for nodes that plan.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_tensor::Kernels;
use paceline_tensor::limits::{ReadLimit, integer_work};
use serde::{Deserialize, Serialize};

/// Memory that is read, 128 MiB: four times the last cache of the machines at hand.
const READ_BYTES: usize = 128 << 20;

/// How far ahead lines are asked for: not at all, and a distance that helped where hardware
/// fetches little by itself.
const AHEAD: [usize; 2] = [0, 2048];

/// Rounds of each, of which the best counts.
const ROUNDS: usize = 3;

/// Longest wait for another machine to measure itself.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Peak rates of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Speed {
    /// Bytes a second that all its threads read.
    pub(super) reads: f64,
    /// Integer operations a second of all its threads.
    pub(super) computes: f64,
}

/// This machine's, once it was asked for.
#[derive(Default)]
pub(super) struct Known(Mutex<Option<Speed>>);

impl Known {
    /// Measures the first time, which takes some tenths of a second.
    ///
    /// # Errors
    /// The system's error when it refuses threads or memory.
    pub(super) fn get(
        &self,
        kernels: impl FnOnce() -> io::Result<Arc<Kernels>>,
    ) -> io::Result<Speed> {
        let mut known = lock(&self.0);
        if let Some(speed) = *known {
            return Ok(speed);
        }
        let speed = measure(&*kernels()?)?;
        *known = Some(speed);
        Ok(speed)
    }
}

fn measure(kernels: &Kernels) -> io::Result<Speed> {
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
    Ok(Speed {
        reads: reads.fold(1.0, f64::max),
        computes: computes.fold(1.0, f64::max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_measured_once() {
        let known = Known::default();
        let first = known.get(|| Kernels::new(1).map(Arc::new)).unwrap();
        assert!(first.reads > 1e6 && first.computes > 1e6, "{first:?}");
        let again = known.get(|| Err(io::ErrorKind::Other.into()));
        assert_eq!(again.unwrap(), first);
    }
}
