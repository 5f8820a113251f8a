//! State of each sequence in a draft proposer, and its draft in progress.

use crate::SequenceId;
use crate::pages::SequencePages;
use crate::proposer::{DraftLedger, DraftPart};
use crate::sampling::Sampler;
use crate::sequence::Sequence;

use super::network::FeatureBuffer;

/// A sequence that may get draft tokens in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftRequest<'a> {
    pub(super) sequence: &'a Sequence,
    /// Maximum draft tokens in its step.
    pub(super) room: usize,
}

impl<'a> DraftRequest<'a> {
    /// Nothing where a grammar applies: masks would cost more than most drafts save.
    pub(super) fn new(part: &DraftPart, running: &'a [Sequence]) -> Self {
        let sequence = &running[part.index];
        let is_bound = sequence.guide.as_ref().is_some_and(|it| !it.is_free());
        let room = if is_bound { 0 } else { part.room };
        Self { sequence, room }
    }
}

/// The draft model's state of a sequence.
#[derive(Debug)]
pub(super) struct DraftState {
    pub(super) pages: SequencePages,
    /// Position of the first token in the cache: 0 for a model.
    pub(super) origin: usize,
    /// Captured rows that a head has not read.
    pub(super) features: FeatureBuffer,
    /// Positions of accepted tokens whose keys are in the draft model's cache.
    pub(super) computed: usize,
    /// Draft tokens after these; all but the last have keys in the cache too.
    pub(super) ledger: DraftLedger,
}

impl DraftState {
    pub(super) const fn new(pages: SequencePages, computed: usize, acceptance: f64) -> Self {
        Self {
            pages,
            origin: 0,
            features: FeatureBuffer::new(),
            computed,
            ledger: DraftLedger::new(computed, acceptance),
        }
    }

    /// Processes the verification of the last draft, see [`DraftLedger::settle`]. Keys of right
    /// draft tokens stay.
    pub(super) fn settle(&mut self, tokens: &[u32], ahead: &[u32], judge: impl FnMut(bool)) {
        let guessed = self.ledger.guessed.len();
        let right = self.ledger.settle(tokens, ahead, judge);
        let is_open = !self.ledger.guessed.is_empty();
        let most = if is_open {
            guessed
        } else {
            guessed.saturating_sub(1)
        };
        self.computed += right.min(most);
    }
}

pub(super) struct SequenceDraft {
    /// Index among the requests.
    pub(super) place: usize,
    pub(super) id: SequenceId,
    pub(super) depth: usize,
    /// Tokens of the sequence, then the draft tokens so far.
    pub(super) history: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Position of its next rows.
    pub(super) from: usize,
    pub(super) sampler: Sampler,
    /// A head's output after the last draft token; empty before the first.
    pub(super) feature: Vec<f32>,
}

impl SequenceDraft {
    /// Its next rows.
    pub(super) fn part(&self) -> PassPart<'_> {
        PassPart {
            id: self.id,
            tokens: &self.history[self.from..],
            from: self.from,
            feature: &self.feature,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PassPart<'a> {
    pub(super) id: SequenceId,
    pub(super) tokens: &'a [u32],
    /// Position of the first of them.
    pub(super) from: usize,
    /// A head's output at the position before; empty where captured rows are read.
    pub(super) feature: &'a [f32],
}

#[cfg(test)]
mod tests {
    use super::super::FIRST_ACCEPTANCE;
    use super::*;

    /// A draft after 3 tokens.
    fn state(guessed: &[u32]) -> DraftState {
        let mut state = DraftState::new(SequencePages::default(), 3, FIRST_ACCEPTANCE);
        state.ledger.guessed = guessed.to_vec();
        state
    }

    /// Computed positions and verification results, if `chosen` follows 3 tokens.
    fn settled(guessed: &[u32], chosen: &[u32]) -> (usize, Vec<bool>) {
        let mut held = state(guessed);
        let mut judged = Vec::new();
        let tokens = [&[1, 2, 3][..], chosen].concat();
        held.settle(&tokens, &[], |is_right| judged.push(is_right));
        assert!(held.ledger.guessed.is_empty());
        (held.computed, judged)
    }

    /// A window of two draft tokens is verified, and later ones are in flight.
    #[test]
    fn guesses_under_way_stay_as_long_as_those_before_were_right() {
        let settled = |chosen: &[u32], ahead: &[u32]| {
            let mut held = state(&[7, 8, 9, 10]);
            let mut judged = Vec::new();
            let tokens = [&[1, 2, 3][..], chosen].concat();
            held.settle(&tokens, ahead, |is_right| judged.push(is_right));
            (held.computed, held.ledger.guessed, judged)
        };
        let right = settled(&[7, 8, 9], &[10]);
        assert_eq!(right, (6, vec![10], vec![true; 3]));
        assert_eq!(settled(&[], &[7, 8, 9, 10]).1, [7, 8, 9, 10]);
        // The other proposer made the in-flight draft, or it is stale.
        assert_eq!(settled(&[7, 8, 9], &[11]), (6, vec![], vec![true; 3]));
        assert_eq!(settled(&[7, 5], &[]), (4, vec![], vec![true, false]));
    }

    #[test]
    fn keys_of_guesses_that_were_right_stay() {
        assert_eq!(settled(&[], &[7]), (3, vec![]));
        assert_eq!(settled(&[7, 8, 9], &[5]), (3, vec![false]));
        assert_eq!(settled(&[7, 8, 9], &[7, 5]), (4, vec![true, false]));
        // The last draft token was not read.
        assert_eq!(settled(&[7, 8, 9], &[7, 8, 9, 4]), (5, vec![true; 3]));
        assert_eq!(settled(&[7], &[7, 4]), (3, vec![true]));
        // An answer moved here with fewer tokens does not judge the others.
        assert_eq!(settled(&[7, 8], &[7]), (4, vec![true]));
    }
}
