//! N-gram proposer for speculative decoding, also called prompt lookup, and the rule when drafts
//! pay.
//!
//! ```text
//! tokens   ... A B C D E F ... A B C        the last three tokens occurred before
//! draft                              D E F  what followed them there
//! step     rows C D E F, logits after each: the model's own choice after C, D, E, F
//! accepted up to the first choice that differs from the draft; that choice is kept too
//! ```
//!
//! The answer is the same with and without drafts, greedy and sampled. Every token is sampled from
//! the logits after the tokens before it, in order, with the same random numbers. A rejected draft
//! row leaves keys in the cache. They are overwritten before any row reads them.
//!
//! The other proposer, a draft model or a head, is in [`draft_proposer`](crate::draft_proposer).
//!
//! The gain of drafts is measured. Each sequence tracks the acceptance of its first draft token,
//! even without drafting, which costs a table lookup. [`Costs`] has step times by number of rows.
//! Drafts start only beyond a gain of [`LEAST_GAIN`], so text without repetition is decoded as
//! without drafts.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::chain::ProposerStats;
use crate::proposer::{DraftLedger, DraftPart, DraftStep, Drafts, Proposer};
use crate::sequence::Sequence;
use crate::{Error, SequenceId};

/// Length of the matched n-gram. With 2, more drafts are found, most of them wrong.
const N: usize = 3;

/// Maximum draft rows of a step, over all sequences: each has a row of logits.
pub(crate) const DRAFT_ROWS: usize = 32;

/// Weight of the last draft token in a sequence's acceptance.
pub(crate) const LAST_WEIGHT: f64 = 0.08;

/// Initial acceptance: too low to draft anything.
const FIRST_ACCEPTANCE: f64 = 0.2;

/// Minimum expected speed-up for drafting.
pub(crate) const LEAST_GAIN: f64 = 1.1;

/// Largest number of rows with a measured time.
const ROWS_KNOWN: usize = 64;

/// Estimated cost of one more row, relative to a step of one row, until it is measured. The
/// estimate is low, so that drafting is tried once.
pub(crate) const FIRST_GUESS: f64 = 0.15;

/// Weight of the last step in a measured time, if it took longer; a shorter time replaces it. Other
/// load makes single steps longer, by several times on a full machine, and none shorter.
const STEP_WEIGHT: f64 = 0.2;

/// The n-gram index of a sequence.
#[derive(Clone, Debug)]
struct NgramIndex {
    /// Index of the token after the last occurrence of an n-gram.
    behind: HashMap<[u32; N], usize>,
    /// Indexed tokens.
    indexed: usize,
}

impl Default for NgramIndex {
    fn default() -> Self {
        Self {
            behind: HashMap::new(),
            indexed: N,
        }
    }
}

impl NgramIndex {
    /// Indexes appended tokens, some 30 bytes each.
    fn index(&mut self, tokens: &[u32]) {
        for at in self.indexed..tokens.len() {
            let gram = *tokens[..at].last_chunk().expect("N tokens or more");
            self.behind.insert(gram, at);
        }
        self.indexed = self.indexed.max(tokens.len());
    }

    /// Up to `most` draft tokens after `tokens` and the in-flight draft tokens `ahead`.
    fn propose(&mut self, tokens: &[u32], ahead: &[u32], most: usize) -> Vec<u32> {
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
        // A draft longer than the repetition continues from its own start.
        let period = len - from;
        (0..most).map(|i| token(from + i % period)).collect()
    }
}

/// A sequence's index, and its last draft.
#[derive(Clone, Debug)]
struct TextState {
    index: NgramIndex,
    ledger: DraftLedger,
}

impl Default for TextState {
    fn default() -> Self {
        Self {
            index: NgramIndex::default(),
            ledger: DraftLedger::new(0, FIRST_ACCEPTANCE),
        }
    }
}

impl TextState {
    /// Verifies the last draft and makes the next one. Where a grammar applies, the draft is the
    /// text that it forces. Masks for other drafts would cost more than most drafts save.
    fn propose(&mut self, sequence: &mut Sequence, most: usize) {
        let tokens = &sequence.tokens;
        self.ledger.settle(tokens, &[], |_| {});
        self.ledger.from = tokens.len();
        self.ledger.guessed = match &mut sequence.guide {
            Some(guide) if !guide.is_free() => guide.guesses(most),
            _ => self.index.propose(tokens, &[], most),
        };
    }
}

/// Proposes from the sequences' own texts and grammars. It verifies a draft of every sequence in
/// its record, whether or not a step does.
#[derive(Debug, Default)]
pub(crate) struct TextProposer(BTreeMap<SequenceId, TextState>);

impl Proposer for TextProposer {
    fn propose(&mut self, step: &mut DraftStep<'_>, least: f64) -> Result<Option<Drafts>, Error> {
        let most = step.limits.most;
        for part in step.parts.iter().filter(|part| part.room > 0) {
            let sequence = &mut step.running[part.index];
            let state = self.0.entry(sequence.id).or_default();
            state.propose(sequence, most);
        }
        let none = TextState::default();
        let of = |part: &DraftPart| self.0.get(&step.running[part.index].id).unwrap_or(&none);
        let candidate = |part: &DraftPart| {
            let ledger = &of(part).ledger;
            DraftCandidate {
                acceptance: ledger.acceptance,
                guesses: ledger.guessed.len().min(part.room),
            }
        };
        let candidates: Vec<DraftCandidate> = step.parts.iter().map(candidate).collect();
        let (mut gain, mut depths) = depths(&candidates, step.limits, step.costs, |_| 0.0);
        if let ([only], Some(pipeline)) = (&candidates[..], step.pipeline) {
            let shape = pipeline.best(only.stats());
            if only.guesses > 0 && shape.windows > 1 && shape.gain > gain {
                (gain, depths) = (shape.gain, vec![only.guesses.min(shape.rows - 1)]);
            }
        }
        if gain <= least {
            return Ok(None);
        }
        let parts = step.parts.iter().zip(depths);
        let tokens = parts.map(|(part, depth)| of(part).ledger.guessed[..depth].to_vec());
        let tokens = tokens.collect();
        Ok(Some(Drafts { gain, tokens }))
    }

    fn propose_ahead(&mut self, sequence: &Sequence, most: usize) -> Result<Vec<u32>, Error> {
        let Some(state) = self.0.get_mut(&sequence.id) else {
            return Ok(Vec::new());
        };
        let (tokens, ahead) = (&sequence.tokens, &sequence.ahead);
        state.ledger.settle(tokens, ahead, |_| {});
        let guesses = state.index.propose(tokens, ahead, most);
        if state.ledger.continues(ahead) {
            state.ledger.guessed.extend_from_slice(&guesses);
        }
        Ok(guesses)
    }

    fn forget(&mut self, id: SequenceId) {
        self.0.remove(&id);
    }

    fn chance(&self, id: SequenceId, _: f64) -> ProposerStats {
        let state = self.0.get(&id);
        ProposerStats {
            acceptance: state.map_or(FIRST_ACCEPTANCE, |state| state.ledger.acceptance),
            pass: 0.0, // a table lookup
        }
    }
}

/// Moving average after one more draft token.
pub(crate) fn updated_acceptance(acceptance: f64, is_right: bool, weight: f64) -> f64 {
    acceptance + weight * (f64::from(u8::from(is_right)) - acceptance)
}

/// Times of steps without prompts, by number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Index `i` has the time of `i + 1` rows.
    seconds: Vec<Option<f64>>,
    /// Whether the times never change. In near classes the rows of a step change each other's bits.
    /// Drafts that followed clocks would make other answers in every run.
    is_fixed: bool,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            seconds: vec![None; ROWS_KNOWN],
            is_fixed: false,
        }
    }
}

impl Costs {
    /// Fixed times: `first` seconds for one row, and the usual [estimate](FIRST_GUESS) for each
    /// further one.
    pub(crate) fn fixed(first: f64) -> Self {
        let of = |further: usize| Some(first * (1.0 + FIRST_GUESS * further as f64));
        Self {
            seconds: (0..ROWS_KNOWN).map(of).collect(),
            is_fixed: true,
        }
    }

    /// Times that were measured.
    #[cfg(test)]
    pub(crate) fn of(seconds: &[(usize, f64)]) -> Self {
        let mut costs = Self::default();
        for (rows, seconds) in seconds {
            costs.record(*rows, Duration::from_secs_f64(*seconds));
        }
        costs
    }

    /// Fixed, without a time.
    pub(crate) fn never() -> Self {
        Self {
            is_fixed: true,
            ..Self::default()
        }
    }

    /// Whether [`record`](Self::record) has no effect.
    pub(crate) const fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    /// Records the time of a step of `rows` rows, 1 or more.
    pub(crate) fn record(&mut self, rows: usize, duration: Duration) {
        if self.is_fixed {
            return;
        }
        let Some(known) = self.seconds.get_mut(rows - 1) else {
            return;
        };
        let seconds = duration.as_secs_f64();
        let longer = |known: f64| known + STEP_WEIGHT * (seconds - known);
        *known = Some(known.map_or(seconds, |known| longer(known).min(seconds)));
    }

    /// Seconds of a step of `rows` rows, 1 or more, if measured.
    pub(crate) fn seconds(&self, rows: usize) -> Option<f64> {
        self.seconds.get(rows - 1).copied().flatten()
    }

    /// Estimated seconds of a step of `rows` rows, 1 or more, from the nearest measured number of
    /// rows.
    pub(crate) fn about(&self, rows: usize) -> Option<f64> {
        let measured = |n: usize| Some((n, self.seconds(n)?));
        let fewer = (1..=rows).rev().find_map(measured);
        let more = || (rows..=ROWS_KNOWN).find_map(measured);
        let (n, seconds) = fewer.or_else(more)?;
        Some(seconds * (1.0 + FIRST_GUESS * rows.saturating_sub(n) as f64))
    }

    /// Time of a step of `rows` rows relative to one of `base` rows, `rows >= base`. Interpolates
    /// linearly between measured numbers of rows; extrapolates with an estimate. At least 1: more
    /// rows take no less, and single times of a busy machine swing.
    pub(crate) fn relative(&self, base: usize, rows: usize) -> f64 {
        let known = |rows: usize| self.seconds(rows);
        let Some(of_base) = known(base) else {
            return 1.0 + FIRST_GUESS * (rows - base) as f64;
        };
        if let Some(seconds) = known(rows) {
            return (seconds / of_base).max(1.0);
        }
        let below = (base..rows).rev().find_map(|n| Some((n, known(n)?)));
        let above = (rows..=ROWS_KNOWN).find_map(|n| Some((n, known(n)?)));
        let (n, seconds) = below.unwrap_or((base, of_base));
        let slope = match above {
            Some((more, longer)) => (longer - seconds) / (more - n) as f64,
            None => FIRST_GUESS * of_base / base as f64,
        };
        ((seconds + slope * (rows - n) as f64) / of_base).max(1.0)
    }
}

/// A sequence with a possible draft.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftCandidate {
    /// Probability that a draft token is right.
    pub(crate) acceptance: f64,
    /// Available draft tokens.
    pub(crate) guesses: usize,
}

impl DraftCandidate {
    const fn stats(self) -> ProposerStats {
        ProposerStats {
            acceptance: self.acceptance,
            pass: 0.0, // a table lookup
        }
    }
}

/// Limits of a step's drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftLimits {
    /// Rows without drafts: one per decoding sequence.
    pub(crate) decoding: usize,
    /// Maximum draft tokens of one sequence.
    pub(crate) most: usize,
    /// Maximum draft tokens of all sequences.
    pub(crate) rows: usize,
}

/// Draft length of each candidate that maximises tokens per second, or 0 for all. The first value
/// is the expected speed-up, 1 without drafts. `passes` gives the time that a proposer takes for
/// drafts of at most that length, relative to a step without drafts.
///
/// Draft tokens are added one by one, the likeliest first, and the best number of them is kept.
pub(crate) fn depths(
    candidates: &[DraftCandidate],
    bounds: DraftLimits,
    costs: &Costs,
    passes: impl Fn(usize) -> f64,
) -> (f64, Vec<usize>) {
    let (base, mut tokens) = (bounds.decoding as f64, 0.0);
    let mut lengths = vec![0; candidates.len()];
    // The probability that the next draft token of each is accepted.
    let mut next: Vec<f64> = candidates.iter().map(|c| c.acceptance).collect();
    let mut best = (1.0, lengths.clone());
    for rows in 1..=bounds.rows {
        let has_room = |i: &usize| lengths[*i] < candidates[*i].guesses.min(bounds.most);
        let open = (0..next.len()).filter(has_room);
        // The first among equals, which is the oldest.
        let Some(i) = open.rev().max_by(|a, b| next[*a].total_cmp(&next[*b])) else {
            break;
        };
        tokens += next[i];
        next[i] *= candidates[i].acceptance;
        lengths[i] += 1;
        let deepest = lengths.iter().copied().max().unwrap_or(0);
        let seconds = costs.relative(bounds.decoding, bounds.decoding + rows);
        let gain = (base + tokens) / base / (seconds + passes(deepest));
        if gain > best.0 {
            best = (gain, lengths.clone());
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(rights: usize, wrongs: usize) -> f64 {
        let checks = (0..rights).map(|_| true).chain((0..wrongs).map(|_| false));
        checks.fold(FIRST_ACCEPTANCE, |acceptance, is_right| {
            updated_acceptance(acceptance, is_right, LAST_WEIGHT)
        })
    }

    const fn bounds(decoding: usize, most: usize) -> DraftLimits {
        let rows = DRAFT_ROWS;
        DraftLimits {
            decoding,
            most,
            rows,
        }
    }

    #[test]
    fn guesses_are_what_followed_last_time() {
        const NONE: [u32; 0] = [];
        let mut drafts = NgramIndex::default();
        let guess = |drafts: &mut NgramIndex, tokens: &[u32]| drafts.propose(tokens, &[], 4);
        assert_eq!(guess(&mut drafts, &[]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 1, 2]), NONE);
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 1, 2, 3]), [4, 1, 2, 3]);
        // The last occurrence counts.
        let tokens = [1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3];
        assert_eq!(guess(&mut drafts, &tokens), [5, 6, 7, 8]);
        // After in-flight draft tokens the draft continues, also cyclically.
        let on = |ahead: &[u32]| NgramIndex::default().propose(&[1, 2, 3, 4, 1, 2, 3], ahead, 4);
        assert_eq!(on(&[4, 1]), [2, 3, 4, 1]);
        assert_eq!(on(&[4, 1, 2, 3, 4]), [1, 2, 3, 4]);
        assert_eq!(on(&[4, 4]), NONE);
        // A cycle of one token.
        assert_eq!(
            NgramIndex::default().propose(&[9, 9, 9, 9], &[], 3),
            [9, 9, 9]
        );
    }

    #[test]
    fn drafts_need_to_pay() {
        let cheap = Costs::of(&[(1, 1.0), (9, 2.5)]);
        let dear = Costs::of(&[(1, 1.0), (2, 2.0), (3, 3.0), (5, 5.0), (9, 9.0)]);
        let of = |acceptance: f64, costs: &Costs| {
            let candidate = DraftCandidate {
                acceptance,
                guesses: 8,
            };
            let (gain, lengths) = depths(&[candidate], bounds(1, 8), costs, |_| 0.0);
            if gain > LEAST_GAIN { lengths[0] } else { 0 }
        };
        assert_eq!(of(trained(60, 0), &cheap), 8);
        assert_eq!(of(trained(60, 0), &dear), 0, "each row costs a step");
        assert_eq!(of(trained(0, 0), &cheap), 0, "nothing is known of the text");
        assert_eq!(of(trained(60, 40), &cheap), 0, "guesses were wrong");
        let few = of(trained(10, 0), &Costs::of(&[(1, 1.0), (9, 3.0)]));
        assert!((1..8).contains(&few), "{few}");
    }

    #[test]
    fn rows_of_all_drafts_are_bounded() {
        let costs = Costs::of(&[(8, 1.0), (40, 1.1)]);
        let candidates = [DraftCandidate {
            acceptance: trained(60, 0),
            guesses: 16,
        }; 8];
        let (_, depths) = depths(&candidates, bounds(8, 16), &costs, |_| 0.0);
        assert_eq!(depths.iter().sum::<usize>(), DRAFT_ROWS, "{depths:?}");
    }

    #[test]
    fn each_sequence_has_a_length_of_its_own() {
        let of = |acceptance| DraftCandidate {
            acceptance,
            guesses: 8,
        };
        let costs = Costs::fixed(1.0);
        let (gain, lengths) = depths(&[of(0.9), of(0.3), of(0.6)], bounds(3, 8), &costs, |_| 0.0);
        assert!(gain > 1.3, "{gain}");
        assert!(
            lengths[0] > lengths[2] && lengths[2] > lengths[1],
            "{lengths:?}"
        );
        // Passes of a draft model: the longest draft counts.
        let (_, fewer) = depths(&[of(0.9), of(0.3), of(0.6)], bounds(3, 8), &costs, |n| {
            0.3 * n as f64
        });
        assert!(fewer[0] < lengths[0], "{fewer:?}");
    }

    #[test]
    fn unknown_numbers_of_rows_lie_on_lines() {
        let costs = Costs::of(&[(2, 1.0), (4, 2.0), (8, 3.0)]);
        for (rows, expected) in [(2, 1.0), (3, 1.5), (4, 2.0), (6, 2.5), (8, 3.0)] {
            assert!((costs.relative(2, rows) - expected).abs() < 1e-9, "{rows}");
        }
        assert!(costs.relative(2, 12) > 3.0);
        assert!((Costs::default().relative(1, 5) - 1.6).abs() < 1e-9);
    }
}
