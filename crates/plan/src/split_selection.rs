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
//! A candidate that is [`FAR`] times slower than another's speed is a wrong prediction, not a close
//! call. [`SplitSelector`] leaves it after three seconds of such steps at any price. A single step
//! may take longer than that, so [`Event::Waited`] reports a step in progress.
//!
//! Pure: times come in with the events. A token's time is its step's, by the leader's clock: tokens
//! of one step share the step's time in any order of arrival. Only tokens of a response that is
//! computed alone count, since predictions are for one. They are for a short response too. So the
//! time of a token with many keys in the cache is scaled to the time with few.

use std::time::Duration;

use crate::Error;

/// Keys in the cache that the speeds of ways are for: a short question and answer.
pub const KEYS: u32 = 128;

/// Factor by which another way must be better. Two runs of one split differ by up to 15 %: that
/// noise is what the project's performance bars allow.
pub const NOISE: f64 = 0.15;

/// Steps at one way before anything is concluded: a few times the spikes of a busy machine.
pub const LEAST: usize = 24;

/// Factor in speed from which the split in use is left at any price (issue 54).
pub const FAR: f64 = 2.0;

/// Steps in a row that are [`FAR`] slower before the split is left: other load delays one or two.
const FAR_STEPS: u32 = 3;

/// Seconds lost in these steps: less would not repay the interruption.
const FAR_LOST: f64 = 1.0;

/// Seconds of such steps, with the one in progress, after which the split is left even before
/// [`FAR_STEPS`]. A worker's silence is reported within 2 s, so a longer step is slow and not dead.
const FAR_WAIT: f64 = 3.0;

/// Steps that do not count after a start or a gap: caches and pools are cold.
const COLD: usize = 4;

/// Last steps whose tokens and time are the speed. The results of a pipeline's draft windows come
/// in bursts, whose later steps seem to take no time: these are several bursts.
const WINDOW: usize = 64;

/// A step that is longer than this times the usual does not count: another program had the cores.
/// A third of all time is in steps that are not longer than the usual one. Steps of a burst differ
/// by up to six with three stages; a stall in the tests is ten times as long.
const STALL: f64 = 8.0;

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
    /// Time went by, at least until [`SplitSelector::due`].
    Waited,
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
    /// Last measured speed; `None` before [`LEAST`] steps.
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
    /// When its first token arrived, by the clock of the events.
    came: Duration,
}

/// Steps of the split in use against [`FAR`].
#[derive(Clone, Copy, Debug, Default)]
struct FarSteps {
    /// Steps since the change that were not so slow.
    fine: u32,
    /// Too slow steps in a row, and their tokens and seconds.
    far: u32,
    tokens: f64,
    seconds: f64,
}

impl FarSteps {
    /// Whether there are steps since the change, and all were too slow.
    const fn are_all(&self) -> bool {
        self.fine == 0 && self.tokens > 0.0
    }
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
    /// Seconds and tokens of each step, as many as [`WINDOW`], as a ring.
    steps: Vec<(f64, u32)>,
    n_steps: usize,
    /// Tokens since the change.
    n: usize,
    far: FarSteps,
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
            steps: Vec::with_capacity(WINDOW),
            n_steps: 0,
            n: 0,
            far: FarSteps::default(),
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
        Some(self.change_to(to, measured, measured * gain))
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
            Event::Waited => return self.waited(now),
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
        self.steps.clear();
        self.n_steps = 0;
        self.far = FarSteps::default();
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
            came: now,
        };
        // The step before has given all its tokens.
        let before = self.last.replace(step)?;
        self.count(before, before.took?)
    }

    /// When [`Event::Waited`] orders a change, unless another event comes before; `None` where it
    /// would not. The first steps of a split count, and a step after others that were too slow.
    pub fn due(&self) -> Option<Duration> {
        let is_open = self.open == 1 && self.may_change();
        let step = self.last.filter(|_| is_open)?;
        let far = self.far_until(step)?;
        let (_, other) = self.best_other()?;
        let scale = self.ways[self.at].way.of_short(step.further);
        // Where all steps were too slow, the one in progress need not be.
        let least = match far.are_all() {
            true => 0.0,
            false => FAR / (other * scale),
        };
        let seconds = least.max(FAR_WAIT - far.seconds);
        let wait = Duration::try_from_secs_f64(seconds).ok()?;
        step.came.checked_add(wait)
    }

    /// The steps that were too slow with the last one, which is not counted yet; `None` after one
    /// that was fast enough.
    fn far_until(&self, step: DecodeStep) -> Option<FarSteps> {
        let (_, other) = self.best_other()?;
        let mut far = self.far;
        let Some(took) = step.took else {
            return (far.fine == 0 || far.far > 0).then_some(far);
        };
        let seconds = took.as_secs_f64() * self.ways[self.at].way.of_short(step.further);
        far.tokens += f64::from(step.tokens);
        far.seconds += seconds;
        (seconds * other > FAR * f64::from(step.tokens)).then_some(far)
    }

    fn waited(&mut self, now: Duration) -> Option<SplitChange> {
        let is_due = self.due().is_some_and(|due| now >= due);
        let step = self.last.filter(|_| is_due)?;
        self.far = self.far_until(step)?;
        if !self.far.are_all() {
            let seconds = now.saturating_sub(step.came).as_secs_f64();
            self.far.tokens += 1.0;
            self.far.seconds += seconds * self.ways[self.at].way.of_short(step.further);
        }
        self.leave()
    }

    /// Counts a step against [`FAR`]; `gap` is the time of each of its tokens.
    fn count_far(&mut self, gap: f64, tokens: u32) -> Option<SplitChange> {
        let (_, other) = self.best_other()?;
        if gap * other <= FAR {
            let fine = self.far.fine.saturating_add(1);
            self.far = FarSteps {
                fine,
                ..FarSteps::default()
            };
            return None;
        }
        self.far.far += 1;
        self.far.tokens += f64::from(tokens);
        self.far.seconds += gap * f64::from(tokens);
        let lost = self.far.seconds - self.far.tokens / other;
        let is_far = self.far.far >= FAR_STEPS && lost >= FAR_LOST;
        is_far.then(|| self.leave()).flatten()
    }

    /// Orders a change to the best other split, with the speed of the steps that were too slow.
    fn leave(&mut self) -> Option<SplitChange> {
        let (to, expected) = self.best_other().filter(|_| self.may_change())?;
        let measured = self.far.tokens / self.far.seconds.max(1e-9);
        self.ways[self.at].measured = Some(measured);
        Some(self.change_to(to, measured, expected))
    }

    const fn change_to(&mut self, to: usize, measured: f64, expected: f64) -> SplitChange {
        self.ordered = Some(to);
        SplitChange {
            from: self.at,
            to,
            measured,
            expected,
        }
    }

    const fn may_change(&self) -> bool {
        !self.holds && self.ordered.is_none() && self.changes < MOST
    }

    /// Counts a step that took so long.
    fn count(&mut self, step: DecodeStep, took: Duration) -> Option<SplitChange> {
        let scale = self.ways[self.at].way.of_short(step.further);
        let gap = took.as_secs_f64() * scale / f64::from(step.tokens);
        if let Some(change) = self.count_far(gap, step.tokens) {
            return Some(change);
        }
        if self.cold > 0 {
            self.cold -= 1;
            return None;
        }
        let counted = (took.as_secs_f64() * scale, step.tokens);
        match self.steps.get_mut(self.n_steps % WINDOW) {
            Some(oldest) => *oldest = counted,
            None => self.steps.push(counted),
        }
        self.n_steps += 1;
        self.n += step.tokens as usize;
        self.decide()
    }

    fn decide(&mut self) -> Option<SplitChange> {
        if self.n_steps < LEAST {
            return None;
        }
        let gap = token_s(&self.steps)?;
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
        Some(self.change_to(to, measured, expected))
    }

    fn best_other(&self) -> Option<(usize, f64)> {
        let others = self.ways.iter().enumerate();
        let others = others.filter(|(i, way)| *i != self.at && !way.refused);
        let believed = others.map(|(i, way)| (i, way.believed()));
        believed.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
    }
}

/// Seconds of a token in these steps of seconds and tokens, without stalls; `None` where no time
/// passed.
fn token_s(steps: &[(f64, u32)]) -> Option<f64> {
    let mut sorted = steps.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all: f64 = steps.iter().map(|(seconds, _)| seconds).sum();
    let mut passed = 0.0;
    let (usual, _) = *sorted.iter().find(|(seconds, _)| {
        passed += seconds;
        3.0 * passed >= all
    })?;
    let counted = sorted.iter();
    let counted = counted.take_while(|(seconds, _)| *seconds <= STALL * usual);
    let add =
        |(s, n): (f64, f64), (seconds, tokens): &(f64, u32)| (s + seconds, n + f64::from(*tokens));
    let (seconds, tokens) = counted.fold((0.0, 0.0), add);
    (seconds > 0.0).then(|| seconds / tokens)
}

#[cfg(test)]
mod tests;
