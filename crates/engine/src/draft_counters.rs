//! Counters of speculative decoding for metrics: verified and accepted draft tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Draft tokens since the engine was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftCounts {
    /// Verified draft rows.
    pub checked: u64,
    /// Accepted draft tokens; each saved a step.
    pub right: u64,
    /// Drafts that a step verified, of a sequence each.
    #[serde(default)]
    pub steps: u64,
    /// Speculation windows that followed an in-flight window of the same sequence in a pipeline.
    #[serde(default)]
    pub windows: u64,
}

impl DraftCounts {
    /// Whether no draft was verified.
    pub const fn is_none(&self) -> bool {
        self.steps == 0
    }

    /// Adds the draft of a sequence in a step; nothing without draft tokens.
    pub(crate) const fn add(&mut self, checked: usize, right: usize) {
        if checked > 0 {
            self.checked += checked as u64;
            self.right += right as u64;
            self.steps += 1;
        }
    }

    /// Mean accepted tokens of a draft; `None` before the first.
    pub fn accepted(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.right as f64 / self.steps as f64)
    }
}

impl std::iter::Sum for DraftCounts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            checked: a.checked + b.checked,
            right: a.right + b.right,
            steps: a.steps + b.steps,
            windows: a.windows + b.windows,
        })
    }
}

/// Shared counters, readable while the engine runs on another thread. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct DraftCounters(Arc<DraftTotals>);

#[derive(Debug, Default)]
struct DraftTotals {
    checked: AtomicU64,
    right: AtomicU64,
    steps: AtomicU64,
    windows: AtomicU64,
}

impl DraftCounters {
    /// Counts the draft of a sequence in a step; nothing without draft tokens.
    pub(crate) fn add(&self, checked: usize, right: usize) {
        if checked == 0 {
            return;
        }
        self.0.steps.fetch_add(1, Ordering::Relaxed);
        self.0.checked.fetch_add(checked as u64, Ordering::Relaxed);
        self.0.right.fetch_add(right as u64, Ordering::Relaxed);
    }

    /// Counts an overlapping window.
    pub(crate) fn add_window(&self) {
        self.0.windows.fetch_add(1, Ordering::Relaxed);
    }

    /// Current counts. A step that ends concurrently may be in some of them only.
    pub fn totals(&self) -> DraftCounts {
        DraftCounts {
            checked: self.0.checked.load(Ordering::Relaxed),
            right: self.0.right.load(Ordering::Relaxed),
            steps: self.0.steps.load(Ordering::Relaxed),
            windows: self.0.windows.load(Ordering::Relaxed),
        }
    }
}
