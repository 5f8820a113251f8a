//! Prefill token budget: limits the prompt rows of a step, so that decoding keeps its speed during
//! prefill.
//!
//! ```text
//! step time = base(decoding rows) + prompt rows x cost of a row
//!             measured without prompts   measured in the last mixed steps
//! budget    = (target - base) / cost of a row
//! ```
//!
//! The budget is pure: it gets the composition and the duration of each step and returns a number
//! of rows. It decides when a row is computed, never its result: chunks do not change bits. In a
//! split model the leader's plan carries the rows, so other ranks need no clock.
//!
//! A step with few prompt rows costs more per row than one with many, because weights are unpacked
//! once per step. So the cost is taken from the last steps and not fitted over all sizes. The
//! budget converges to a size where the model above holds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use paceline_base::upper_median;
use paceline_tensor::PAGE;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::fairness::FACTOR;

/// Target step time while prompts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepTimeTarget {
    /// At most [`AUTO_FACTOR`] times the time of a step without prompts.
    #[default]
    Auto,
    /// No limit: the shortest time to the first token, while other answers pause.
    Off,
    /// Milliseconds per step, and so between two tokens of an answer. A prompt row is computed even
    /// if the target leaves no time for one.
    Millis(u32),
}

/// Step time with prompts relative to one without, for [`StepTimeTarget::Auto`]. Prompts then get
/// 60 % of the machine. The documented factor is 3 for 99 of 100 tokens: the rest is for steps that
/// other programs delay.
const AUTO_FACTOR: f64 = 2.5;

/// Minimum prompt rows of a step with prompts, so that every prompt ends. On one thread a row takes
/// two thirds of a step of SmolLM2 (EPYC VM): with 8 rows, steps took 6.5 times as long.
const LEAST_ROWS: usize = 1;

/// Larger budgets are multiples of this, because kernels multiply tiles of 16 rows.
const TILE: usize = 16;

/// Steps without prompts to measure, per number of decoding rows, before the first prompt row. The
/// median of three survives one delayed step.
const PROBES: usize = 3;

/// Durations of a median.
const KEPT: usize = 9;

/// Weight of the last step in the row cost.
const LAST_WEIGHT: f64 = 0.5;

/// Row cost in a mixed step relative to one in a step of prompts only, until measured.
const FIRST_GUESS: f64 = 3.0;

/// Maximum change of the row cost by one step: one delayed step must not stop prompts.
const CHANGE_MAX: f64 = 2.0;

impl FromStr for StepTimeTarget {
    type Err = Error;

    /// `auto`, `off`, or milliseconds from 1 to 60,000.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => return Ok(Self::Auto),
            "off" => return Ok(Self::Off),
            _ => {}
        }
        let millis = text.parse().ok().filter(|ms| (1..=60_000).contains(ms));
        millis.map(Self::Millis).ok_or_else(|| Error::Pace {
            got: text.chars().take(40).collect(),
        })
    }
}

impl fmt::Display for StepTimeTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Millis(ms) => write!(f, "{ms}"),
        }
    }
}

/// Rows of a step by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Composition {
    /// Decode rows, one per sequence.
    pub(crate) decoding: usize,
    /// Prompt rows.
    pub(crate) prompt: usize,
    /// Additional rows of the decoding sequences, for draft tokens and forced tokens.
    pub(crate) drafted: usize,
}

/// The last durations of steps of one kind, in seconds.
#[derive(Clone, Debug, Default)]
struct Durations {
    values: [f64; KEPT],
    n: usize,
}

impl Durations {
    fn push(&mut self, seconds: f64) {
        self.values[self.n % KEPT] = seconds;
        self.n += 1;
    }

    fn median(&self) -> Option<f64> {
        upper_median(self.values[..self.n.min(KEPT)].to_vec())
    }
}

/// Computes budgets from measured step times.
#[derive(Clone, Debug)]
pub(crate) struct PrefillBudget {
    pace: StepTimeTarget,
    /// Durations of steps without prompt rows; index `i` is for 2^i to 2^(i+1) - 1 decoding rows.
    decoding: Vec<Durations>,
    /// Seconds per prompt row in a mixed step.
    row_s: Option<f64>,
    /// Seconds per prompt row in a step of prompts only.
    row_alone_s: Option<f64>,
    /// Whether the owner reports durations; without a clock there is no limit.
    is_told: bool,
}

impl PrefillBudget {
    pub(crate) const fn new(pace: StepTimeTarget) -> Self {
        Self {
            pace,
            decoding: Vec::new(),
            row_s: None,
            row_alone_s: None,
            is_told: false,
        }
    }

    /// Prompt rows for a step with `decoding` rows, out of `room`.
    pub(crate) fn budget(&self, decoding: usize, room: usize) -> usize {
        self.budget_of(decoding, room, f64::INFINITY)
    }

    /// As [`budget`](Self::budget), for prompts of a throttled client: the step takes at most
    /// [`FACTOR`] times as long as one without them.
    pub(crate) fn reduced_budget(&self, decoding: usize, room: usize) -> usize {
        self.budget_of(decoding, room, FACTOR)
    }

    /// For a step that takes at most `factor` times as long as one without prompts.
    fn budget_of(&self, decoding: usize, room: usize, factor: f64) -> usize {
        if decoding == 0 || !self.is_told || self.pace == StepTimeTarget::Off {
            return room;
        }
        let known = self.decoding.get(place(decoding));
        let Some(base) = known.filter(|d| d.n >= PROBES).and_then(Durations::median) else {
            return 0; // a step without prompts is measured first
        };
        let target = match self.pace {
            StepTimeTarget::Millis(ms) => f64::from(ms) / 1e3,
            StepTimeTarget::Auto | StepTimeTarget::Off => base * AUTO_FACTOR,
        };
        let target = target.min(base * factor);
        let guess = self.row_alone_s.map(|row| row * FIRST_GUESS);
        let Some(row) = self.row_s.or(guess) else {
            return LEAST_ROWS.min(room);
        };
        let rows = ((target - base).max(0.0) / row) as usize; // saturates
        let whole = if rows > TILE {
            rows / TILE * TILE
        } else {
            rows
        };
        whole.max(LEAST_ROWS).min(room)
    }

    /// Nanoseconds of a page of prompt rows in the last steps; 0 before the first.
    pub(crate) fn page_nanos(&self) -> u64 {
        let row = self.row_alone_s.or(self.row_s).unwrap_or(0.0);
        (row * PAGE as f64 * 1e9) as u64 // saturates
    }

    pub(crate) fn record(&mut self, step: Composition, duration: Duration) {
        let seconds = duration.as_secs_f64();
        match (step.prompt, step.decoding) {
            (0, 0) => return,
            (0, decoding) if step.drafted == 0 => self.took_decoding(decoding, seconds),
            (0, _) => {} // not comparable: steps with prompts have no drafts
            (prompt, 0) => self.row_alone_s = Some(seconds / prompt as f64),
            (prompt, decoding) => self.took_mixed(prompt, decoding, seconds),
        }
        self.is_told = true;
    }

    fn took_decoding(&mut self, decoding: usize, seconds: f64) {
        let place = place(decoding);
        if self.decoding.len() <= place {
            self.decoding.resize_with(place + 1, Durations::default);
        }
        self.decoding[place].push(seconds);
    }

    fn took_mixed(&mut self, prompt: usize, decoding: usize, seconds: f64) {
        let known = self.decoding.get(place(decoding));
        let Some(base) = known.and_then(Durations::median) else {
            return;
        };
        // A step may by chance be shorter than the median without prompts.
        let row = (seconds - base).max(seconds * 0.01) / prompt as f64;
        self.row_s = Some(match self.row_s {
            None => row,
            Some(before) => {
                let row = row.clamp(before / CHANGE_MAX, before * CHANGE_MAX);
                before + LAST_WEIGHT * (row - before)
            }
        });
    }
}

/// Index for steps with `decoding` rows, 1 or more.
const fn place(decoding: usize) -> usize {
    decoding.ilog2() as usize
}

/// Divides `budget` rows among prompts with `left` remaining rows, oldest first.
///
/// The prompt with the fewest remaining rows gets up to half of the budget, so a short question
/// does not wait for a long document. The rest goes to the oldest: it gets at least half, so every
/// prompt ends.
pub(crate) fn share(left: &[usize], budget: usize) -> Vec<usize> {
    let mut rows = vec![0; left.len()];
    let shortest = (0..left.len()).min_by_key(|i| left[*i]);
    let half = budget.div_ceil(2);
    if let Some(shortest) = shortest {
        let is_oldest = shortest == 0;
        rows[shortest] = left[shortest].min(if is_oldest { budget } else { budget - half });
    }
    let mut rest = budget - rows.iter().sum::<usize>();
    for (rows, left) in rows.iter_mut().zip(left) {
        let more = (left - *rows).min(rest);
        *rows += more;
        rest -= more;
    }
    rows
}

#[cfg(test)]
mod tests;
