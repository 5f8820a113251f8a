//! Rows of a step between clients: many streams of one slow those of others by a bounded factor.
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
//! Rows beyond these come round by round, while the time that they are expected to take is within
//! [`FACTOR`]. In a round, and among the streams of a client, the stream comes first that had its
//! last row before the others. So each stream of a client with `n` has a row in `n` steps at least.
//! Nothing changes where all clients have as many streams, or there is one client.
//!
//! A row is expected to take what it took in the last steps ([`Leeway`]). Before rows were
//! measured, all clients together get twice the equal rows. All of this is pure; it decides when a
//! row is computed, never what it gives.

use std::collections::BTreeMap;
use std::time::Duration;

/// Multiple of a step with the equal rows that a step with rows beyond these may take. Requests of
/// others may take twice as long as without such a client (issue 33), which also leaves room for
/// the prompts that it sends. SmolLM2 on two threads (EPYC VM) has about 3 rows beyond 5 then. A
/// machine whose steps take as long with 28 rows as with 5 has all of them.
pub(crate) const FACTOR: f64 = 1.25;

/// Weight of a step relative to the next one: some 50 steps count.
const DECAY: f64 = 0.98;

/// Least variance of the rows of these steps from which the cost of a row follows. Some 5 % noise
/// in the times is an error of 2 % of a step then.
const VARIANCE_LEAST: f64 = 0.1;

/// Variance that is enough without further probes: two rows more in every third step.
const VARIANCE_ENOUGH: f64 = 1.0;

/// Steps between two that have the equal rows alone, where the numbers of rows hardly vary.
const PROBE_EVERY: usize = 16;

/// Most that a step counts, as a multiple of what was expected: others may have held it up.
const CHANGE_MAX: f64 = 2.0;

/// A running sequence, as a step that is planned sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) client: u64,
    /// Whether it has rows to compute.
    pub(crate) wants: bool,
    /// Whether a batch under way has rows of it.
    pub(crate) is_under_way: bool,
    /// Lower where its last row came before that of others.
    pub(crate) ticket: u64,
}

/// Which of the sequences, oldest first, have rows in the next step or are under way. `beyond` is
/// how many rows there may be beyond so many equal ones.
pub(crate) fn grant(wishes: &[Wish], beyond: impl FnOnce(usize) -> usize) -> Vec<bool> {
    let is_live = |at: &usize| wishes[*at].wants || wishes[*at].is_under_way;
    let mut order: Vec<usize> = (0..wishes.len()).filter(is_live).collect();
    // Stable: of equal ones the oldest first.
    // A long prompt under way that wants further rows takes its turn as the others do.
    let is_left_alone = |wish: Wish| wish.is_under_way && !wish.wants;
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

/// What rows cost: a line through the times of the last steps that had answers only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leeway {
    /// Steps whose time was told.
    told: usize,
    /// Weighted sums over steps.
    steps: f64,
    rows: f64,
    rows_squared: f64,
    seconds: f64,
    rows_seconds: f64,
    /// Seconds of a row, by the last steps whose rows varied.
    row_s: Option<f64>,
}

impl Leeway {
    /// Takes in how long a step took, and its rows if these were of answers only, without guesses.
    pub(crate) fn took(&mut self, rows: Option<usize>, duration: Duration) {
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

    /// Of the rows of the last steps, 1 or more.
    fn variance(&self) -> f64 {
        let mean = self.rows / self.steps;
        self.rows_squared / self.steps - mean * mean
    }

    /// Seconds of a step with so many rows; `None` before the cost of a row is known.
    fn expected_s(&self, rows: f64) -> Option<f64> {
        let (mean_s, mean_rows) = (self.seconds / self.steps, self.rows / self.steps);
        self.row_s.map(|row_s| mean_s + row_s * (rows - mean_rows))
    }

    /// Rows that a step may have beyond `equal` ones.
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

    /// Whether the next step should have the equal rows alone, because too little is known of what
    /// others cost.
    fn is_probe(&self) -> bool {
        let is_due = self.told > 0 && self.told.is_multiple_of(PROBE_EVERY);
        is_due && self.steps > 0.0 && self.variance() < VARIANCE_ENOUGH
    }
}

#[cfg(test)]
mod tests;
