//! Cost model of speculation windows: how many of one sequence are in flight at once, and how long
//! each is. Pure.
//!
//! A *window* is the rows of one step that verify draft tokens. In a pipeline with slow links, a
//! step spends most of its time on links. Meanwhile further windows follow it: each continues the
//! draft of the window before, as if that were accepted.
//!
//! ```text
//! stage 0   [t a b] [c d e] [f g h]            t is known, the others are draft tokens
//! stage 1           [t a b] [c d e] [f g h]
//! chosen                     a b c   d x       the third window is stale; the next begins at x
//! ```
//!
//! Let `a` be the acceptance, `r` the rows of a window, and `q = a^r` the probability that a whole
//! window is right. A run of windows up to the first wrong token then gives `1 / (1 - a)` tokens.
//! It takes:
//!
//! ```text
//! round(r)                     until the first window completes
//! + interval x q^j             for each further window j that is verified, j = 1, 2, ...
//! + refill instead of interval for each j that is a multiple of the in-flight windows: it was
//!                              sent when the first of them completed
//! ```
//!
//! A draft model proposes on the leader between windows; the interval includes that.

use crate::ngram::Costs;

/// Upper bound of the acceptance in the model: a run of 50 tokens is practically endless, and sums
/// stay finite.
const ACCEPTANCE_MAX: f64 = 0.98;

/// Times and sizes of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pipeline<'a> {
    /// Times of single steps by rows, from plan to logits.
    pub(crate) rounds: &'a Costs,
    /// Times between the ends of two steps planned together.
    pub(crate) intervals: &'a Costs,
    /// Stages that compute concurrently, 1 or more.
    pub(crate) stages: usize,
    /// Maximum in-flight windows of a sequence.
    pub(crate) windows: usize,
    /// Maximum rows of a window.
    pub(crate) rows: usize,
}

/// Acceptance and cost of a proposer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProposerStats {
    /// Fraction of right tokens among those with right predecessors.
    pub(crate) acceptance: f64,
    /// Seconds per draft token.
    pub(crate) pass: f64,
}

/// Windows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WindowShape {
    /// Rows per window. The first window has one draft token less: its first token is not a draft
    /// token.
    pub(crate) rows: usize,
    /// In flight at once.
    pub(crate) windows: usize,
    /// Speed-up over steps without drafts.
    pub(crate) gain: f64,
}

impl WindowShape {
    /// No drafts.
    pub(crate) const PLAIN: Self = Self {
        rows: 1,
        windows: 1,
        gain: 1.0,
    };
}

impl Pipeline<'_> {
    /// The windows with the most tokens per second. [`WindowShape::PLAIN`] if none is faster than
    /// steps without drafts, or if those were not measured.
    ///
    /// Cost: some 20 multiplications per pair of rows and windows, typically 81 pairs.
    pub(crate) fn best(&self, chance: ProposerStats) -> WindowShape {
        let Some(plain) = self.rounds.seconds(1).filter(|seconds| *seconds > 0.0) else {
            return WindowShape::PLAIN;
        };
        let mut best = WindowShape::PLAIN;
        for rows in 2..=self.rows {
            for windows in 1..=self.windows {
                let gain = plain * self.rate(plain, chance, (rows, windows));
                if gain > best.gain {
                    best = WindowShape {
                        rows,
                        windows,
                        gain,
                    };
                }
            }
        }
        best
    }

    /// Seconds between two windows of `rows` rows, for single steps of `round` seconds. Until
    /// measured, the time of one stage without links.
    fn interval(&self, rows: usize, round: f64) -> f64 {
        let guess = round / self.stages as f64;
        self.intervals.about(rows).unwrap_or(guess).min(round)
    }

    /// Tokens per second.
    fn rate(&self, plain: f64, chance: ProposerStats, (rows, windows): (usize, usize)) -> f64 {
        let acceptance = chance.acceptance.clamp(0.0, ACCEPTANCE_MAX);
        let computed = plain * self.rounds.relative(1, rows);
        let interval = self.interval(rows, computed);
        // A stale window may occupy a stage when the next run begins.
        let queued = if windows > 1 { interval } else { 0.0 };
        let round = computed + (rows - 1) as f64 * chance.pass + queued;
        let interval = interval + rows as f64 * chance.pass;
        let refill = interval.max(round - (windows - 1) as f64 * interval);
        let right = acceptance.powf(rows as f64);
        let sum = |ratio: f64| ratio / (1.0 - ratio);
        let (all, refills) = (sum(right), sum(right.powf(windows as f64)));
        let seconds = round + interval * (all - refills) + refill * refills;
        1.0 / (1.0 - acceptance) / seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(rounds: &Costs, intervals: &Costs, acceptance: f64, pass: f64) -> WindowShape {
        let pipeline = Pipeline {
            rounds,
            intervals,
            stages: 4,
            windows: 9,
            rows: 9,
        };
        pipeline.best(ProposerStats { acceptance, pass })
    }

    /// Four stages of 2 ms and links of 25 ms.
    fn slow() -> (Costs, Costs) {
        (
            Costs::of(&[(1, 0.108), (9, 0.116)]),
            Costs::of(&[(1, 0.002), (9, 0.004)]),
        )
    }

    #[test]
    fn slow_links_have_several_windows_under_way() {
        let (rounds, intervals) = slow();
        let text = best(&rounds, &intervals, 0.97, 0.0);
        assert!(text.windows > 3 && text.gain > 15.0, "{text:?}");
        // A draft model of a quarter of the size on ordinary text.
        let draft = best(&rounds, &intervals, 0.65, 0.002);
        assert!(draft.gain > 2.0, "{draft:?}");
        // Before an interval is measured, the links may be fast: windows are tried only with a safe
        // gain.
        let unknown = best(&rounds, &Costs::default(), 0.97, 0.0);
        assert!(
            unknown.windows > 1 && unknown.gain < text.gain,
            "{unknown:?}"
        );
    }

    #[test]
    fn what_does_not_pay_is_plain() {
        let (rounds, intervals) = slow();
        assert_eq!(best(&rounds, &intervals, 0.0, 0.0), WindowShape::PLAIN);
        // A draft model slower than the pipeline.
        assert_eq!(best(&rounds, &intervals, 0.6, 0.2), WindowShape::PLAIN);
        // Nothing is measured.
        let none = Costs::default();
        assert_eq!(best(&none, &none, 0.9, 0.0), WindowShape::PLAIN);
        // Fast links, and each row takes as long as a step: windows only use idle stages.
        let dear: Vec<(usize, f64)> = (1..=9).map(|n| (n, 0.008 * n as f64)).collect();
        let stage: Vec<(usize, f64)> = (1..=9).map(|n| (n, 0.002 * n as f64)).collect();
        let shape = best(&Costs::of(&dear), &Costs::of(&stage), 0.3, 0.0);
        assert!(shape.gain < 1.1, "{shape:?}");
        let shape = best(&Costs::of(&dear), &Costs::of(&stage), 0.97, 0.0);
        assert!(
            shape.windows > 1 && (1.5..4.0).contains(&shape.gain),
            "{shape:?}"
        );
    }

    /// A single window gives the expected tokens of its draft.
    #[test]
    fn a_lone_window_is_the_known_case() {
        let (rounds, intervals) = slow();
        for acceptance in [0.2, 0.5, 0.9] {
            let pipeline = Pipeline {
                rounds: &rounds,
                intervals: &intervals,
                stages: 4,
                windows: 1,
                rows: 9,
            };
            let chance = ProposerStats {
                acceptance,
                pass: 0.001,
            };
            for rows in 2..=9 {
                let right = |n: usize| acceptance.powi(n as i32);
                let tokens = 1.0 + (1..rows).map(right).sum::<f64>();
                let seconds = 0.108 * rounds.relative(1, rows) + 0.001 * (rows - 1) as f64;
                let rate = pipeline.rate(0.108, chance, (rows, 1));
                assert!((rate - tokens / seconds).abs() < 1e-9 * rate, "{rows}");
            }
        }
    }
}
