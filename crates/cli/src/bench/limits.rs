//! What this machine can do at best at the moment.

use std::time::Instant;

use paceline_tensor::Kernels;
use paceline_tensor::limits::{ReadLimit, integer_work};

/// How far ahead a reading loop asks for lines: not at all, and a distance that helped where
/// hardware fetches little by itself. The best of both counts.
const AHEAD: [usize; 2] = [0, 2048];

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
