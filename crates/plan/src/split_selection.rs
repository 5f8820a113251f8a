//! Selects the split of a running model from live token times.
//!
//! The plan predicts the speed of each split candidate; live tokens measure the one in use.
//! [`SplitSelector`] compares them. Where another candidate is believed to be faster by more than
//! [`NOISE`], it counts the seconds lost. It orders a change once they exceed the cost of the
//! change, doubled with each change.
//!
//! That is the ski rental rule: Karlin, Manasse, Rudolph, Sleator, Algorithmica 3, 1988. In every
//! case, changes cost at most about as much as staying would. A candidate that is slower than
//! another's measured speed is left by the same rule: that is the roll-back.
//!
//! Pure: times come in with the events. A token's time is its step's, by the leader's clock: tokens
//! of one step share the step's time in any order of arrival. Only tokens of a response that is
//! computed alone count, since predictions are for one. They are for a short response too. So the
//! time of a token with many keys in the cache is scaled to the time with few.

use std::time::Duration;

use paceline_base::upper_median;

use crate::Error;

/// Keys in the cache that the speeds of ways are for: a short question and answer.
pub const KEYS: u32 = 128;

/// Factor by which another way must be better. Two runs of one split differ by up to 15 %: that
/// noise is what the project's performance bars allow.
pub const NOISE: f64 = 0.15;

/// Tokens at one way before anything is concluded: a few times the spikes of a busy machine.
pub const LEAST: usize = 24;

/// Steps that do not count after a start or a gap: caches and pools are cold.
const COLD: usize = 4;

/// Tokens whose median is the speed.
const WINDOW: usize = 64;

/// Changes at most, those back included.
pub const MOST: u32 = 6;

/// A way to compute a model, as it is known before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitEstimate {
    /// Decode tokens a second with [`KEYS`] in the cache, as predicted and corrected by earlier
    /// runs.
    pub tok_s: f64,
    /// Seconds that a further key in the cache adds to a token; 0 where that is not known.
    pub key_s: f64,
    /// Time that a change to it takes.
    pub change: Duration,
}

impl SplitEstimate {
    /// Time of a token with [`KEYS`] over that with `further` ones.
    fn of_short(&self, further: u32) -> f64 {
        1.0 / (1.0 + f64::from(further) * self.key_s * self.tok_s)
    }
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request arrived.
    Opened,
    /// A token of a request.
    Token {
        /// Keys in the cache beyond [`KEYS`].
        further: u32,
        /// When the step that gave it ended, by the leader's clock.
        at: Duration,
    },
    /// A request is over.
    Closed,
    /// The way in use was started again, with another clock of its leader.
    Restarted,
    /// The change that was ordered was made, and took so long.
    Changed(Duration),
    /// The change that was ordered could not be made: the way before is in use again.
    Refused,
}

/// A change to make, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitChange {
    /// Place of the way in use.
    pub from: usize,
    /// Place of the way to change to.
    pub to: usize,
    /// Decode tokens a second of the one in use, measured.
    pub measured: f64,
    /// Speed of the new candidate, predicted, or measured when it was in use.
    pub expected: f64,
}

#[derive(Clone, Copy, Debug)]
struct SplitRecord {
    way: SplitEstimate,
    /// Last measured speed; `None` before [`LEAST`] tokens.
    measured: Option<f64>,
    refused: bool,
}

impl SplitRecord {
    /// Tokens a second, as far as is known.
    fn believed(&self) -> f64 {
        self.measured.unwrap_or(self.way.tok_s)
    }
}

/// A step of an answer alone.
#[derive(Clone, Copy, Debug)]
struct DecodeStep {
    /// When it ended.
    at: Duration,
    /// Time since the end of the step before; `None` of the first.
    took: Option<Duration>,
    tokens: u32,
    /// Keys in the cache beyond [`KEYS`], of its first token.
    further: u32,
}

/// Follows answers and orders changes. [`step`](Self::step) is given everything that happens, in
/// order.
#[derive(Clone, Debug)]
pub struct SplitSelector {
    ways: Vec<SplitRecord>,
    at: usize,
    /// The change that is being made.
    ordered: Option<usize>,
    changes: u32,
    /// Whether it orders no change by itself.
    holds: bool,
    /// Requests.
    open: usize,
    /// When the way in use began.
    since: Duration,
    /// The last step of an answer alone, which may give more tokens.
    last: Option<DecodeStep>,
    cold: usize,
    /// Seconds of each token, as many as [`WINDOW`], as a ring.
    gaps: Vec<f64>,
    /// Tokens since the change.
    n: usize,
}

impl SplitSelector {
    /// Begins with the way `at`.
    ///
    /// # Errors
    /// [`Error::Value`] for speeds that are not finite and positive.
    ///
    /// # Panics
    /// When there is no way `at`.
    pub fn new(ways: &[SplitEstimate], at: usize) -> Result<Self, Error> {
        assert!(at < ways.len(), "way {at} of {}", ways.len());
        for (i, way) in ways.iter().enumerate() {
            if !(way.tok_s.is_finite() && way.tok_s > 0.0) {
                return Err(Error::Value {
                    what: format!("way {i}"),
                    field: "decode tok/s",
                    got: way.tok_s.to_string(),
                    expected: "a finite number above 0",
                });
            }
        }
        let known = |way: &SplitEstimate| SplitRecord {
            way: *way,
            measured: None,
            refused: false,
        };
        Ok(Self {
            ways: ways.iter().map(known).collect(),
            at,
            ordered: None,
            changes: 0,
            holds: false,
            open: 0,
            since: Duration::ZERO,
            last: None,
            cold: COLD,
            gaps: Vec::with_capacity(WINDOW),
            n: 0,
        })
    }

    /// Orders no change by itself from now on: [`order`](Self::order) does.
    #[must_use]
    pub const fn holding(mut self) -> Self {
        self.holds = true;
        self
    }

    /// Orders a change to way `to`, where `gain` times the tokens a second of the one in use are
    /// expected. Nothing is ordered while another change is made, or where `to` is in use or could
    /// not be started before.
    pub fn order(&mut self, to: usize, gain: f64) -> Option<SplitChange> {
        let way = self.ways.get(to)?;
        if self.ordered.is_some() || to == self.at || way.refused {
            return None;
        }
        let measured = self.ways[self.at].believed();
        self.ordered = Some(to);
        Some(SplitChange {
            from: self.at,
            to,
            measured,
            expected: measured * gain,
        })
    }

    /// Whether way `i` could not be started before.
    pub fn is_refused(&self, i: usize) -> bool {
        self.ways.get(i).is_some_and(|way| way.refused)
    }

    /// Place of the way in use.
    pub const fn at(&self) -> usize {
        self.at
    }

    /// Changes made.
    pub const fn changes(&self) -> u32 {
        self.changes
    }

    /// Decode tokens a second that way `i` reached, scaled to a short answer, if it was in use for
    /// long enough.
    pub fn measured(&self, i: usize) -> Option<f64> {
        self.ways[i].measured
    }

    /// Handles an event at `now`, counted from any moment. Returns a change once; the caller
    /// reports its outcome by [`Event::Changed`] or [`Event::Refused`].
    pub fn step(&mut self, now: Duration, event: Event) -> Option<SplitChange> {
        match event {
            Event::Opened => self.interrupt(self.open + 1),
            Event::Closed => self.interrupt(self.open.saturating_sub(1)),
            Event::Changed(took) => self.changed(now, took),
            Event::Refused => {
                if let Some(to) = self.ordered.take() {
                    self.ways[to].refused = true;
                    self.begin(now);
                }
            }
            Event::Restarted => self.interrupt(self.open),
            Event::Token { further, at } => return self.token(now, further, at),
        }
        None
    }

    fn interrupt(&mut self, open: usize) {
        (self.open, self.last, self.cold) = (open, None, COLD);
    }

    fn changed(&mut self, now: Duration, took: Duration) {
        if let Some(to) = self.ordered.take() {
            self.ways[self.at].way.change = took; // as long as the way there
            self.at = to;
            self.changes += 1;
            self.begin(now);
        }
    }

    /// Counts anew.
    fn begin(&mut self, now: Duration) {
        self.gaps.clear();
        (self.n, self.since, self.last, self.cold) = (0, now, None, COLD);
    }

    fn token(&mut self, now: Duration, further: u32, at: Duration) -> Option<SplitChange> {
        // Tokens of the previous candidate may be reported late.
        if self.open != 1 || self.ordered.is_some() || now < self.since {
            return None;
        }
        if let Some(step) = self.last.as_mut().filter(|step| step.at == at) {
            step.tokens = step.tokens.saturating_add(1);
            return None;
        }
        let took = self.last.and_then(|before| at.checked_sub(before.at));
        let step = DecodeStep {
            at,
            took,
            tokens: 1,
            further,
        };
        // The step before has given all its tokens.
        let before = self.last.replace(step)?;
        self.count(before, before.took?)
    }

    /// Counts a step that took so long.
    fn count(&mut self, step: DecodeStep, took: Duration) -> Option<SplitChange> {
        if self.cold > 0 {
            self.cold -= 1;
            return None;
        }
        let scale = self.ways[self.at].way.of_short(step.further);
        let gap = took.as_secs_f64() * scale / f64::from(step.tokens);
        for _ in 0..step.tokens.min(WINDOW as u32) {
            match self.gaps.get_mut(self.n % WINDOW) {
                Some(oldest) => *oldest = gap,
                None => self.gaps.push(gap),
            }
            self.n += 1;
        }
        self.decide()
    }

    fn decide(&mut self) -> Option<SplitChange> {
        if self.n < LEAST {
            return None;
        }
        // A clock that does not move measures nothing.
        let gap = upper_median(self.gaps.clone())?.max(1e-9);
        let measured = 1.0 / gap;
        self.ways[self.at].measured = Some(measured);
        let (to, expected) = self.best_other()?;
        if self.holds || self.changes >= MOST || expected <= measured * (1.0 + NOISE) {
            return None;
        }
        let lost = self.n as f64 * (gap - 1.0 / expected);
        let price = self.ways[to].way.change.as_secs_f64() * f64::from(1u32 << self.changes);
        if lost < price {
            return None;
        }
        self.ordered = Some(to);
        Some(SplitChange {
            from: self.at,
            to,
            measured,
            expected,
        })
    }

    fn best_other(&self) -> Option<(usize, f64)> {
        let others = self.ways.iter().enumerate();
        let others = others.filter(|(i, way)| *i != self.at && !way.refused);
        let believed = others.map(|(i, way)| (i, way.believed()));
        believed.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
    }
}

#[cfg(test)]
mod tests;
