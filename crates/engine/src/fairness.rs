//! Fair decode rows between clients: a client with many streams slows others by a bounded factor.
//!
//! ```text
//! round       1        2        3      ...
//! client A    row                            one stream
//! client B    row                            one stream
//! client C    row      row      row    ...   28 streams
//!             always   while the step takes at most FACTOR times as long as with round 1 alone
//! ```
//!
//! Each client gets as many rows as the client with the fewest streams wants: the *equal* rows.
//! Further rows are granted round by round, while their expected time is within [`FACTOR`]. Within
//! a round, and among the streams of a client, the least recently served stream is first. So each
//! stream of a client with `n` streams has a row in `n` steps at least. Nothing changes if all
//! clients have equally many streams, or there is one client.
//!
//! The cost of a row is estimated from the last steps ([`RowCostModel`]). Until it is measured, all
//! clients together get twice the equal rows. All of this is pure; it decides when a row is
//! computed, never its result.

use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum time of a step relative to one with the equal rows only. Requests of others may take
/// twice as long as without such a client (issue 33), which also leaves room for its prompts.
/// SmolLM2 on two threads (EPYC VM) then has about 3 rows beyond 5. A machine whose steps take as
/// long with 28 rows as with 5 has all of them.
pub(crate) const FACTOR: f64 = 1.25;

/// Weight of a step relative to the next one: some 50 steps count.
const DECAY: f64 = 0.98;

/// Minimum variance of the rows of these steps for an estimate of the row cost. Noise of 5 % in the
/// times then causes an error of 2 % of a step.
const VARIANCE_LEAST: f64 = 0.1;

/// Variance that needs no further probes: two rows more in every third step.
const VARIANCE_ENOUGH: f64 = 1.0;

/// Steps between two probes with the equal rows only, if the number of rows hardly varies.
const PROBE_EVERY: usize = 16;

/// Bound of a recorded time, as a multiple of the expected one: other load may delay a step.
const CHANGE_MAX: f64 = 2.0;

/// Scheduling state of a running sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowDemand {
    pub(crate) client: u64,
    /// Whether it has rows to compute.
    pub(crate) wants: bool,
    /// Whether it has in-flight rows.
    pub(crate) is_under_way: bool,
    /// Increases with the time of its last row.
    pub(crate) ticket: u64,
}

/// Which sequences, oldest first, have rows in the next step or in flight. `beyond` returns the
/// additional rows for a number of equal rows.
pub(crate) fn grant(wishes: &[RowDemand], beyond: impl FnOnce(usize) -> usize) -> Vec<bool> {
    let is_live = |at: &usize| wishes[*at].wants || wishes[*at].is_under_way;
    let mut order: Vec<usize> = (0..wishes.len()).filter(is_live).collect();
    // Stable: the oldest first among equals. A long prompt with in-flight rows that wants more
    // takes its turn like others.
    let is_left_alone = |wish: RowDemand| wish.is_under_way && !wish.wants;
    order.sort_by_key(|at| (!is_left_alone(wishes[*at]), wishes[*at].ticket));
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    let round_of = |at: usize| {
        let count = counts.entry(wishes[at].client).or_default();
        *count += 1;
        (*count, at)
    };
    let mut rounds: Vec<(usize, usize)> = order.into_iter().map(round_of).collect();
    let fewest = counts.values().min().copied().unwrap_or(0);
    let equal = fewest * counts.len();
    if rounds.len() == equal {
        return vec![true; wishes.len()];
    }
    rounds.sort_by_key(|(round, _)| *round);
    let most = equal.saturating_add(beyond(equal));
    let mut granted = vec![false; wishes.len()];
    for (_, at) in rounds.into_iter().take(most) {
        granted[at] = true;
    }
    granted
}

/// Row cost model: a linear fit of step times over rows, from the last steps without prompts.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowCostModel {
    /// Reported steps.
    told: usize,
    /// Weighted sums over steps.
    steps: f64,
    rows: f64,
    rows_squared: f64,
    seconds: f64,
    rows_seconds: f64,
    /// Seconds per row, from the last steps with varying rows.
    row_s: Option<f64>,
}

impl RowCostModel {
    /// Records the duration of a step, and its rows if all were decode rows without drafts.
    pub(crate) fn record(&mut self, rows: Option<usize>, duration: Duration) {
        self.told = self.told.wrapping_add(1);
        let Some(rows) = rows.map(|rows| rows as f64) else {
            return;
        };
        let seconds = duration.as_secs_f64();
        let expected = self.expected_s(rows).filter(|expected| *expected > 0.0);
        let seconds = expected.map_or(seconds, |expected| {
            seconds.clamp(expected / CHANGE_MAX, expected * CHANGE_MAX)
        });
        self.steps = self.steps * DECAY + 1.0;
        self.rows = self.rows * DECAY + rows;
        self.rows_squared = self.rows_squared * DECAY + rows * rows;
        self.seconds = self.seconds * DECAY + seconds;
        self.rows_seconds = self.rows_seconds * DECAY + rows * seconds;
        let variance = self.variance();
        if variance >= VARIANCE_LEAST {
            let means = self.rows / self.steps * self.seconds / self.steps;
            let row_s = (self.rows_seconds / self.steps - means) / variance;
            self.row_s = Some(row_s.max(0.0));
        }
    }

    /// Variance of the rows of the last steps; needs at least one.
    fn variance(&self) -> f64 {
        let mean = self.rows / self.steps;
        self.rows_squared / self.steps - mean * mean
    }

    /// Expected seconds of a step of `rows` rows; `None` before the row cost is known.
    fn expected_s(&self, rows: f64) -> Option<f64> {
        let (mean_s, mean_rows) = (self.seconds / self.steps, self.rows / self.steps);
        self.row_s.map(|row_s| mean_s + row_s * (rows - mean_rows))
    }

    /// Additional rows of a step with `equal` rows.
    pub(crate) fn beyond(&self, equal: usize) -> usize {
        if self.is_probe() {
            return 0;
        }
        let rows_of = |row_s: f64| {
            let equal_s = self.expected_s(equal as f64).unwrap_or_default();
            ((FACTOR - 1.0) * equal_s / row_s) as usize // saturates
        };
        self.row_s.map_or(equal, rows_of)
    }

    /// Whether the next step should have the equal rows only, to measure the cost of further ones.
    fn is_probe(&self) -> bool {
        let is_due = self.told > 0 && self.told.is_multiple_of(PROBE_EVERY);
        is_due && self.steps > 0.0 && self.variance() < VARIANCE_ENOUGH
    }
}

#[cfg(test)]
mod tests;
