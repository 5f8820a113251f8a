//! Counts of guesses, for people: how many steps checked, and how many were right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// Guesses that an engine's steps checked since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guesses {
    /// Rows that steps had beside those of tokens that were known.
    pub checked: u64,
    /// Of these, the ones that became tokens of an answer: each saved a step.
    pub right: u64,
    /// Windows of guesses that followed others of the same sequence through a pipeline while those
    /// were under way.
    #[serde(default)]
    pub windows: u64,
}

impl std::iter::Sum for Guesses {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            checked: a.checked + b.checked,
            right: a.right + b.right,
            windows: a.windows + b.windows,
        })
    }
}

/// Counts while an engine computes on another thread. Clones count the same.
#[derive(Clone, Debug, Default)]
pub struct GuessCounts(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    checked: AtomicU64,
    right: AtomicU64,
    windows: AtomicU64,
}

impl GuessCounts {
    pub(crate) fn add(&self, checked: usize, right: usize) {
        self.0.checked.fetch_add(checked as u64, Ordering::Relaxed);
        self.0.right.fetch_add(right as u64, Ordering::Relaxed);
    }

    /// A window followed another one.
    pub(crate) fn add_window(&self) {
        self.0.windows.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts by now; a step that ends meanwhile may be in one of them only.
    pub fn told(&self) -> Guesses {
        Guesses {
            checked: self.0.checked.load(Ordering::Relaxed),
            right: self.0.right.load(Ordering::Relaxed),
            windows: self.0.windows.load(Ordering::Relaxed),
        }
    }
}
