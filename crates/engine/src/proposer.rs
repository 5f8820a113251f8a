//! The interface of everything that proposes draft tokens, and the record that each keeps of them.
//!
//! ```text
//! Engine --DraftStep--> Proposer --Drafts--> rows of the step --tokens--> DraftLedger::settle
//! ```
//!
//! Each step asks all proposers in order. A later one wins only with a larger gain. The answer
//! never depends on a draft: see [`ngram`](crate::ngram).
//!
//! - [`TextProposer`](crate::ngram::TextProposer): the sequence's own text, or its grammar.
//! - [`DraftProposer`](crate::draft_proposer::DraftProposer): a small model, or a draft head.

use std::fmt;
use std::time::Duration;

use crate::chain::{Pipeline, ProposerStats};
use crate::ngram::{Costs, DraftLimits, LAST_WEIGHT, updated_acceptance};
use crate::sequence::Sequence;
use crate::{Error, SequenceId};

/// A decoding sequence in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftPart {
    /// Index among the running sequences.
    pub(crate) index: usize,
    /// Maximum draft tokens in its step.
    pub(crate) room: usize,
}

/// A step without prompts that may verify drafts.
#[derive(Debug)]
pub(crate) struct DraftStep<'a> {
    pub(crate) running: &'a mut [Sequence],
    /// The sequences of the step, in order.
    pub(crate) parts: &'a [DraftPart],
    pub(crate) limits: DraftLimits,
    /// Measured times of steps.
    pub(crate) costs: &'a Costs,
    /// If speculation windows may follow the step.
    pub(crate) pipeline: Option<Pipeline<'a>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drafts {
    /// Expected speed-up over a step without drafts.
    pub(crate) gain: f64,
    /// Of each part of the step, in order; at least one is not empty.
    pub(crate) tokens: Vec<Vec<u32>>,
}

/// Proposes draft tokens for the sequences of an engine.
///
/// The engine calls it on its own thread, between two steps.
pub(crate) trait Proposer: fmt::Debug + Send {
    /// Drafts for a step, if they promise more than `least` times the speed without drafts.
    ///
    /// # Errors
    /// [`Error::Model`] if a pass of a model fails.
    fn propose(&mut self, step: &mut DraftStep<'_>, least: f64) -> Result<Option<Drafts>, Error>;

    /// Up to `most` draft tokens after the in-flight ones of a sequence. Empty if those are not all
    /// from this proposer.
    ///
    /// # Errors
    /// As [`propose`](Self::propose).
    fn propose_ahead(&mut self, sequence: &Sequence, most: usize) -> Result<Vec<u32>, Error>;

    /// Acceptance and cost of the next draft token of a sequence, for steps of `plain` seconds.
    fn chance(&self, id: SequenceId, plain: f64) -> ProposerStats;

    /// Drops the state of a sequence that no longer runs.
    fn forget(&mut self, id: SequenceId);

    /// Records the duration of a step without prompts; `is_plain` if it had no drafts. Returns the
    /// time that proposing took in that step.
    fn record_step(&mut self, is_plain: bool, duration: Duration) -> Duration {
        let _ = (is_plain, duration);
        Duration::ZERO
    }

    /// Takes the [captured](paceline_model::Compute::captured) rows of a running sequence from
    /// `position` on. All are of tokens that are in its answer.
    fn observe(&mut self, sequence: &Sequence, position: usize, captured: &[f32]) {
        let _ = (sequence, position, captured);
    }
}

/// Draft tokens of a sequence that are not verified yet, and how often such tokens were right.
#[derive(Clone, Debug)]
pub(crate) struct DraftLedger {
    /// Position of the first of them.
    pub(crate) from: usize,
    pub(crate) guessed: Vec<u32>,
    /// Moving average: probability that the next draft token is right.
    pub(crate) acceptance: f64,
}

impl DraftLedger {
    pub(crate) const fn new(from: usize, acceptance: f64) -> Self {
        Self {
            from,
            guessed: Vec::new(),
            acceptance,
        }
    }

    /// Processes the verification of the draft: calls `judge` for each verified token, and returns
    /// how many of them were right. In-flight windows verify the tokens in `ahead`. If the rest of
    /// the draft begins with these, it stays open and continues after them.
    pub(crate) fn settle(
        &mut self,
        tokens: &[u32],
        ahead: &[u32],
        mut judge: impl FnMut(bool),
    ) -> usize {
        let guessed = std::mem::take(&mut self.guessed);
        let chosen = tokens.get(self.from..).unwrap_or_default();
        let pairs = guessed.iter().zip(chosen);
        let right = pairs.take_while(|(guess, token)| guess == token).count();
        let is_open = !ahead.is_empty() && right == chosen.len();
        if is_open && guessed[right..].starts_with(ahead) {
            self.from += right;
            self.guessed = ahead.to_vec();
        }
        let is_wrong = right < guessed.len() && right < chosen.len();
        for is_right in (0..right).map(|_| true).chain(is_wrong.then_some(false)) {
            self.acceptance = updated_acceptance(self.acceptance, is_right, LAST_WEIGHT);
            judge(is_right);
        }
        right
    }

    /// Whether a draft continues: all in-flight draft tokens are of this ledger.
    pub(crate) fn continues(&self, ahead: &[u32]) -> bool {
        self.guessed == ahead
    }
}
