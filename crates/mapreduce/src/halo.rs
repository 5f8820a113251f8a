//! How a function is computed over blocks of rows: its halo, its steps, and the rows of a part.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Parts that a thread gets, so that all end together.
const PARTS_PER_THREAD: u64 = 8;

/// Fewest rows of a part whose halo is everything: below, a call costs more than its rows.
const ROWS_MIN: u64 = 256;

/// How a function is computed over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockMap {
    /// Rows to each side of a row that the function reads; `u64::MAX` for all rows.
    pub halo: u64,
    /// Times that it is computed, each time of its last result; at least one.
    pub steps: u32,
    /// Values of a row of the result.
    pub columns: u64,
}

impl BlockMap {
    /// Rows of a part, when `threads` threads in all compute `rows` rows.
    pub(crate) fn part_rows(self, rows: u64, threads: u64) -> u64 {
        let even = rows.div_ceil((threads * PARTS_PER_THREAD).max(1));
        let least = match self.margin(self.steps) {
            u64::MAX => ROWS_MIN,
            margin => 4 * margin.min(rows), // the halo is at most a third of what is computed
        };
        even.max(least).max(1)
    }

    /// Rows to each side of a result that `steps` steps read.
    pub(crate) const fn margin(self, steps: u32) -> u64 {
        self.halo.saturating_mul(steps as u64)
    }

    /// `rows` and those around them that `steps` steps read, of `all`.
    pub(crate) fn around(self, rows: &Range<u64>, steps: u32, all: u64) -> Range<u64> {
        let margin = self.margin(steps);
        rows.start.saturating_sub(margin)..rows.end.saturating_add(margin).min(all)
    }
}
