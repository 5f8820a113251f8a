//! Options of a run's execution.

use std::path::Path;

/// Execution of a run, of an adapter or a draft head: no bit of the result depends on it.
#[derive(Clone, Copy)]
#[allow(
    missing_debug_implementations,
    reason = "functions have nothing to show"
)]
pub struct RunOptions<'a> {
    /// Folder of everything that it writes.
    pub output: &'a Path,
    /// Continue from the checkpoint in the output folder.
    pub resume: bool,
    /// Steps between checkpoints.
    pub save_every: u64,
    /// Steps between looks at what is held out.
    pub eval_every: u64,
    /// Seconds since some moment.
    pub clock: &'a dyn Fn() -> f64,
    /// Whether to end after the step under way.
    pub stop: &'a dyn Fn() -> bool,
    /// For the metrics of an adapter's run.
    pub figures: RunFigures<'a>,
}

/// Figures of the machine for the metrics of a run.
#[derive(Clone, Copy)]
#[allow(
    missing_debug_implementations,
    reason = "functions have nothing to show"
)]
pub struct RunFigures<'a> {
    /// Seconds between 1970 and the moment from which the clock counts.
    pub epoch_s: f64,
    /// Floating-point operations a second of what computes, all together; 0 where unknown.
    pub flops: f64,
    /// Most bytes that this process had in memory, where that is known.
    pub memory: &'a dyn Fn() -> Option<u64>,
}

impl RunFigures<'_> {
    /// For runs without metrics.
    pub const UNKNOWN: Self = Self {
        epoch_s: 0.0,
        flops: 0.0,
        memory: &|| None,
    };
}
