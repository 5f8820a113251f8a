//! Limits the rows of prompts in a step, so that answers keep their pace while prompts are read.
//!
//! ```text
//! step time = base(decoding rows) + prompt rows x cost of a row
//!             measured without prompts   measured in the last mixed steps
//! budget    = (target - base) / cost of a row
//! ```
//!
//! The pacer is pure: it gets the composition and the duration of each step and gives a number of
//! rows. A budget decides when a row is computed, never what it gives: chunks do not change bits.
//! In a split model the leader's plan carries the budget, so other ranks need no clock.
//!
//! A step with few prompt rows costs more a row than one with many, because weights are unpacked
//! once a step. The cost is therefore taken from the last steps and not fitted over all sizes. The
//! budget settles where the model above holds at its own size.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use paceline_tensor::PAGE;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::fair::FACTOR;

/// The pace that answers keep while prompts are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pace {
    /// A step takes at most [`AUTO_FACTOR`] times as long as one without prompts.
    #[default]
    Auto,
    /// Prompts take all rows of a step: the shortest time to the first token, and other answers
    /// pause meanwhile.
    Off,
    /// Milliseconds of a step, and so between two tokens of an answer. The least number of prompt
    /// rows is computed even where the target leaves no time for them.
    Millis(u32),
}

/// Multiple of a step without prompts that a step with them may take with [`Pace::Auto`]. Prompts
/// get 60 % of the machine then. The promise is a factor of 3 for 99 of 100 tokens: the rest is for
/// steps that other programs delay.
const AUTO_FACTOR: f64 = 2.5;

/// Rows that prompts get in any step that has some, so that every prompt is read in the end.
/// Kernels for several rows unpack weights once for 8 or more of them.
const LEAST_ROWS: usize = 8;

/// Budgets above this are whole multiples of it, because kernels multiply tiles of 16 rows.
const TILE: usize = 16;

/// Steps without prompts that are measured before the first prompt row is computed beside as many
/// decoding rows. The median of three survives one delayed step.
const PROBES: usize = 3;

/// Durations that a median is taken over.
const KEPT: usize = 9;

/// Weight of the last step in the cost of a row.
const LAST_WEIGHT: f64 = 0.5;

/// Cost of a row beside answers, relative to a step of prompts only, until it is measured.
const FIRST_GUESS: f64 = 3.0;

/// Largest change of the cost of a row by one step: a step that the system held up must not stop
/// prompts.
const CHANGE_MAX: f64 = 2.0;

impl FromStr for Pace {
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

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Millis(ms) => write!(f, "{ms}"),
        }
    }
}

/// Rows of a step by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Composition {
    /// Rows that give a token of an answer, one a sequence.
    pub(crate) decoding: usize,
    /// Rows of prompts.
    pub(crate) prompt: usize,
    /// Further rows of the same sequences: of guesses to check, and of forced tokens.
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
        let mut known = self.values[..self.n.min(KEPT)].to_vec();
        known.sort_by(f64::total_cmp);
        known.get(known.len() / 2).copied()
    }
}

/// Decides budgets by what steps took.
#[derive(Clone, Debug)]
pub(crate) struct Pacer {
    pace: Pace,
    /// Durations of steps without prompt rows; place `i` is for 2^i to 2^(i+1) - 1 decoding rows.
    decoding: Vec<Durations>,
    /// Seconds of a prompt row beside decoding rows.
    row_s: Option<f64>,
    /// The same in a step of prompts only.
    row_alone_s: Option<f64>,
    /// Whether durations are told at all: an owner without a clock gets no pace.
    is_told: bool,
}

impl Pacer {
    pub(crate) const fn new(pace: Pace) -> Self {
        Self {
            pace,
            decoding: Vec::new(),
            row_s: None,
            row_alone_s: None,
            is_told: false,
        }
    }

    /// Prompt rows that a step with `decoding` rows may have, of the `room` that is left for them.
    pub(crate) fn budget(&self, decoding: usize, room: usize) -> usize {
        self.budget_of(decoding, room, f64::INFINITY)
    }

    /// The same for prompts of a client that has more to compute than others. The step takes at
    /// most [`FACTOR`] times as long as one without them.
    pub(crate) fn scant(&self, decoding: usize, room: usize) -> usize {
        self.budget_of(decoding, room, FACTOR)
    }

    /// For a step that takes at most `factor` times as long as one without prompts.
    fn budget_of(&self, decoding: usize, room: usize, factor: f64) -> usize {
        if decoding == 0 || !self.is_told || self.pace == Pace::Off {
            return room;
        }
        let known = self.decoding.get(place(decoding));
        let Some(base) = known.filter(|d| d.n >= PROBES).and_then(Durations::median) else {
            return 0; // a step without prompts is measured first
        };
        let target = match self.pace {
            Pace::Millis(ms) => f64::from(ms) / 1e3,
            Pace::Auto | Pace::Off => base * AUTO_FACTOR,
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

    /// Nanoseconds of a page of a prompt, by the last steps; 0 before the first.
    pub(crate) fn page_nanos(&self) -> u64 {
        let row = self.row_alone_s.or(self.row_s).unwrap_or(0.0);
        (row * PAGE as f64 * 1e9) as u64 // saturates
    }

    /// Takes in how long a step took.
    pub(crate) fn took(&mut self, step: Composition, duration: Duration) {
        let seconds = duration.as_secs_f64();
        match (step.prompt, step.decoding) {
            (0, 0) => return,
            (0, decoding) if step.drafted == 0 => self.took_decoding(decoding, seconds),
            (0, _) => {} // longer than a step without drafts, which a prompt's steps have none of
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

/// The place of steps with `decoding` rows, 1 or more.
const fn place(decoding: usize) -> usize {
    decoding.ilog2() as usize
}

/// Shares `budget` rows among prompts of which `left` rows are to be read, oldest first.
///
/// The prompt with the fewest rows left gets up to half of the budget. So a short question does not
/// wait until a long document is read. All that remains goes to the oldest: it gets at least half,
/// so every prompt is read in the end.
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
