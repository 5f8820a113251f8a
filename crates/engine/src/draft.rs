//! Guesses of the next tokens, which a step checks together: speculation by n-grams, also called
//! prompt lookup.
//!
//! ```text
//! tokens   ... A B C D E F ... A B C        the last three tokens came before
//! draft                              D E F  what followed them there
//! step     rows C D E F, logits after each: the model's own choice after C, D, E, F
//! accepted as long as the choice is the draft's token; the first other choice counts too
//! ```
//!
//! The answer is the same with and without drafts, greedy and sampled. Every token is chosen by the
//! logits after the tokens before it, in the same order, with the same random numbers. A row of a
//! draft that was not accepted leaves keys behind. No row looks at them before they are
//! overwritten.
//!
//! A draft model, which is another way to guess, is in [`drafter`](crate::drafter).
//!
//! Whether drafts pay is measured. A sequence counts how often its first guess would have been
//! right, also while nothing is drafted, which costs a look into a table. [`Costs`] has what steps
//! of so many rows took. Only a gain beyond [`LEAST_GAIN`] starts drafts, so a text that does not
//! repeat itself is decoded as without them.

use std::collections::HashMap;
use std::time::Duration;

/// Tokens that must have come before in the same order. Two find more guesses, most of them wrong.
const N: usize = 3;

/// Most drafted rows of a step, over all sequences: each has a row of logits of its own.
pub(crate) const DRAFT_ROWS: usize = 32;

/// Weight of the last guess in a sequence's acceptance.
pub(crate) const LAST_WEIGHT: f64 = 0.08;

/// Acceptance before the first guess: too little to draft anything.
const FIRST_ACCEPTANCE: f64 = 0.2;

/// Expected tokens a second with drafts must be so many times those without.
pub(crate) const LEAST_GAIN: f64 = 1.1;

/// Rows up to which durations are kept.
const ROWS_KNOWN: usize = 64;

/// Estimated cost of one more row, as a share of a step of one row, until it is measured. The
/// estimate is low, so that drafts are tried once.
pub(crate) const FIRST_GUESS: f64 = 0.15;

/// Weight of the last step in the duration of a number of rows.
const STEP_WEIGHT: f64 = 0.2;

/// The n-grams of a sequence, and how well they foretold it.
#[derive(Clone, Debug)]
pub(crate) struct Drafts {
    /// Where the token behind an n-gram was, the last time that one followed.
    behind: HashMap<[u32; N], usize>,
    /// Tokens whose n-grams are in `behind`.
    indexed: usize,
    /// How likely the next guess is right, by those before.
    acceptance: f64,
}

impl Default for Drafts {
    fn default() -> Self {
        Self {
            behind: HashMap::new(),
            indexed: N,
            acceptance: FIRST_ACCEPTANCE,
        }
    }
}

impl Drafts {
    /// Takes in tokens that were added. Costs a table's entry each: some 30 bytes.
    fn index(&mut self, tokens: &[u32]) {
        for at in self.indexed..tokens.len() {
            let gram = *tokens[..at].last_chunk().expect("N tokens or more");
            self.behind.insert(gram, at);
        }
        self.indexed = self.indexed.max(tokens.len());
    }

    /// Up to `most` guesses of what follows `tokens` and behind them those `ahead`, which are
    /// guesses as well.
    pub(crate) fn guess(&mut self, tokens: &[u32], ahead: &[u32], most: usize) -> Vec<u32> {
        self.index(tokens);
        let len = tokens.len() + ahead.len();
        let token = |at: usize| match at.checked_sub(tokens.len()) {
            None => tokens[at],
            Some(at) => ahead[at],
        };
        let Some(begin) = len.checked_sub(N) else {
            return Vec::new();
        };
        let gram: [u32; N] = std::array::from_fn(|i| token(begin + i));
        let Some(&from) = self.behind.get(&gram) else {
            return Vec::new();
        };
        // A repetition that is shorter than the draft goes on with the draft itself.
        let period = len - from;
        (0..most).map(|i| token(from + i % period)).collect()
    }

    /// How likely the next guess is right.
    pub(crate) const fn acceptance(&self) -> f64 {
        self.acceptance
    }

    /// Counts whether a guess was right.
    pub(crate) fn judge(&mut self, is_right: bool) {
        self.acceptance = judged(self.acceptance, is_right, LAST_WEIGHT);
    }

    fn expected(&self, guesses: usize) -> f64 {
        expected(self.acceptance, guesses)
    }
}

/// Tokens that a draft of so many guesses is expected to give beside the first. A guess counts only
/// when all guesses before it are right; each is right with a chance of `acceptance`.
pub(crate) fn expected(acceptance: f64, guesses: usize) -> f64 {
    let mut chance = 1.0;
    let of_one = |_| {
        chance *= acceptance;
        chance
    };
    (0..guesses).map(of_one).sum()
}

/// The acceptance after one more guess.
pub(crate) fn judged(acceptance: f64, is_right: bool, weight: f64) -> f64 {
    acceptance + weight * (f64::from(u8::from(is_right)) - acceptance)
}

/// How long steps without prompts take, by their rows.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Place `i` is of `i + 1` rows.
    seconds: Vec<Option<f64>>,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            seconds: vec![None; ROWS_KNOWN],
        }
    }
}

impl Costs {
    /// Takes in how long a step of `rows` rows took, 1 or more.
    pub(crate) fn took(&mut self, rows: usize, duration: Duration) {
        let Some(known) = self.seconds.get_mut(rows - 1) else {
            return;
        };
        let seconds = duration.as_secs_f64();
        *known = Some(known.map_or(seconds, |known| known + STEP_WEIGHT * (seconds - known)));
    }

    /// Seconds of a step of `rows` rows, 1 or more, where such a step was measured.
    pub(crate) fn seconds(&self, rows: usize) -> Option<f64> {
        self.seconds.get(rows - 1).copied().flatten()
    }

    /// Seconds of a step of `rows` rows, 1 or more. The nearest number of rows that was measured
    /// counts; the cost of further rows is a guess.
    pub(crate) fn about(&self, rows: usize) -> Option<f64> {
        let measured = |n: usize| Some((n, self.seconds(n)?));
        let fewer = (1..=rows).rev().find_map(measured);
        let more = || (rows..=ROWS_KNOWN).find_map(measured);
        let (n, seconds) = fewer.or_else(more)?;
        Some(seconds * (1.0 + FIRST_GUESS * rows.saturating_sub(n) as f64))
    }

    /// Seconds of a step of `rows` rows relative to one of `base` rows, `rows` being at least as
    /// many. Between two known numbers of rows the time is on a line; beyond them a guess.
    pub(crate) fn relative(&self, base: usize, rows: usize) -> f64 {
        let known = |rows: usize| self.seconds(rows);
        let Some(of_base) = known(base) else {
            return 1.0 + FIRST_GUESS * (rows - base) as f64;
        };
        if let Some(seconds) = known(rows) {
            return seconds / of_base;
        }
        let below = (base..rows).rev().find_map(|n| Some((n, known(n)?)));
        let above = (rows..=ROWS_KNOWN).find_map(|n| Some((n, known(n)?)));
        let (n, seconds) = below.unwrap_or((base, of_base));
        let slope = match above {
            Some((more, longer)) => (longer - seconds) / (more - n) as f64,
            None => FIRST_GUESS * of_base / base as f64,
        };
        (seconds + slope * (rows - n) as f64) / of_base
    }
}

/// A sequence that may have a draft.
pub(crate) struct Candidate<'a> {
    pub(crate) drafts: &'a Drafts,
    /// Guesses that there are.
    pub(crate) guesses: usize,
}

/// Bounds of a step's drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Rows besides, one for each sequence that decodes.
    pub(crate) decoding: usize,
    /// Guesses of one sequence.
    pub(crate) most: usize,
    /// Guesses of all.
    pub(crate) rows: usize,
}

/// Guesses to check for each candidate in a step: none, or as many as are expected to give most
/// tokens a second. Before them how many times as many as without: [`LEAST_GAIN`] for none.
pub(crate) fn depths(
    candidates: &[Candidate<'_>],
    bounds: Bounds,
    costs: &Costs,
) -> (f64, Vec<usize>) {
    let Bounds {
        decoding,
        most,
        rows,
    } = bounds;
    let of_depth = |depth: usize| -> Vec<usize> {
        let mut left = rows;
        let one = |candidate: &Candidate<'_>| {
            let guesses = candidate.guesses.min(depth).min(left);
            left -= guesses;
            guesses
        };
        candidates.iter().map(one).collect()
    };
    let gain = |depths: &[usize]| {
        let more: usize = depths.iter().sum();
        let each = candidates.iter().zip(depths);
        let tokens: f64 = each.map(|(c, depth)| c.drafts.expected(*depth)).sum();
        let base = decoding as f64;
        (base + tokens) / base / costs.relative(decoding, decoding + more)
    };
    let mut best = (LEAST_GAIN, vec![0; candidates.len()]);
    for depth in (1..=most).filter(|depth| depth.is_power_of_two() || *depth == most) {
        let depths = of_depth(depth);
        let gain = gain(&depths);
        if gain > best.0 {
            best = (gain, depths);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(rights: usize, wrongs: usize) -> Drafts {
        let mut drafts = Drafts::default();
        (0..rights).for_each(|_| drafts.judge(true));
        (0..wrongs).for_each(|_| drafts.judge(false));
        drafts
    }

    const fn bounds(decoding: usize, most: usize) -> Bounds {
        let rows = DRAFT_ROWS;
        Bounds {
            decoding,
            most,
            rows,
        }
    }

    fn costs(seconds: &[(usize, f64)]) -> Costs {
        let mut costs = Costs::default();
        for (rows, seconds) in seconds {
            costs.took(*rows, Duration::from_secs_f64(*seconds));
        }
        costs
    }

    #[test]
    fn guesses_are_what_followed_last_time() {
        const NONE: [u32; 0] = [];
        let mut drafts = Drafts::default();
        let guess = |drafts: &mut Drafts, tokens: &[u32]| drafts.guess(tokens, &[], 4);
        assert_eq!(guess(&mut drafts, &[]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 1, 2]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 1, 2, 3]), [4, 1, 2, 3]);
        // The last time counts.
        let tokens = [1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3];
        assert_eq!(guess(&mut drafts, &tokens), [5, 6, 7, 8]);
        // Behind guesses that are checked they go on, around the circle too.
        let on = |ahead: &[u32]| Drafts::default().guess(&[1, 2, 3, 4, 1, 2, 3], ahead, 4);
        assert_eq!(on(&[4, 1]), [2, 3, 4, 1]);
        assert_eq!(on(&[4, 1, 2, 3, 4]), [1, 2, 3, 4]);
        assert_eq!(on(&[4, 4]), NONE);
        // A loop of one token goes on.
        assert_eq!(Drafts::default().guess(&[9, 9, 9, 9], &[], 3), [9, 9, 9]);
    }

    #[test]
    fn drafts_need_to_pay() {
        let cheap = costs(&[(1, 1.0), (9, 2.5)]);
        let dear = costs(&[(1, 1.0), (2, 2.0), (3, 3.0), (5, 5.0), (9, 9.0)]);
        let of = |drafts: &Drafts, costs: &Costs| {
            let candidate = Candidate { drafts, guesses: 8 };
            depths(&[candidate], bounds(1, 8), costs).1[0]
        };
        assert_eq!(of(&trained(60, 0), &cheap), 8);
        assert_eq!(of(&trained(60, 0), &dear), 0, "each row costs a step");
        assert_eq!(
            of(&trained(0, 0), &cheap),
            0,
            "nothing is known of the text"
        );
        assert_eq!(of(&trained(60, 40), &cheap), 0, "guesses were wrong");
        let few = of(&trained(10, 0), &costs(&[(1, 1.0), (9, 3.0)]));
        assert!((1..8).contains(&few), "{few}");
    }

    #[test]
    fn rows_of_all_drafts_are_bounded() {
        let (drafts, costs) = (trained(60, 0), costs(&[(8, 1.0), (40, 1.1)]));
        let candidates: Vec<Candidate<'_>> = (0..8)
            .map(|_| Candidate {
                drafts: &drafts,
                guesses: 16,
            })
            .collect();
        let (_, depths) = depths(&candidates, bounds(8, 16), &costs);
        assert_eq!(depths.iter().sum::<usize>(), DRAFT_ROWS, "{depths:?}");
    }

    #[test]
    fn unknown_numbers_of_rows_lie_on_lines() {
        let costs = costs(&[(2, 1.0), (4, 2.0), (8, 3.0)]);
        for (rows, expected) in [(2, 1.0), (3, 1.5), (4, 2.0), (6, 2.5), (8, 3.0)] {
            assert!((costs.relative(2, rows) - expected).abs() < 1e-9, "{rows}");
        }
        assert!(costs.relative(2, 12) > 3.0);
        assert!((Costs::default().relative(1, 5) - 1.6).abs() < 1e-9);
    }
}
