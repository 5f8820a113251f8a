//! Counts of what steps do, for tests and measurements.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of an MLX model's steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlxCounts {
    /// Bytes of logits that were read from the device.
    pub logit_bytes: u64,
    /// Calls of attention.
    pub attentions: u64,
    /// Keys or values of a sequence that attention gathered from pages apart.
    pub gathers: u64,
    /// Steps that were submitted before the tokens of the step before were read.
    pub steps_ahead: u64,
    /// Rows that the last layer computed behind its attention.
    pub output_rows: u64,
    /// Experts that were read into slots.
    pub expert_reads: u64,
}

/// A count while it grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// [`MlxCounts`] while they grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) logit_bytes: Counter,
    pub(super) attentions: Counter,
    pub(super) gathers: Counter,
    pub(super) steps_ahead: Counter,
    pub(super) output_rows: Counter,
    pub(super) expert_reads: Counter,
}

impl Counters {
    pub(super) fn now(&self) -> MlxCounts {
        MlxCounts {
            logit_bytes: self.logit_bytes.now(),
            attentions: self.attentions.now(),
            gathers: self.gathers.now(),
            steps_ahead: self.steps_ahead.now(),
            output_rows: self.output_rows.now(),
            expert_reads: self.expert_reads.now(),
        }
    }
}
