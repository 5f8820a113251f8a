//! Guesses that steps check: of the text itself, or of a draft model.
//!
//! A sequence's guesses are made when its rows are planned. A sequence that decodes has rows in one
//! batch at a time, so all its tokens are known then, also while batches of other sequences are
//! under way in a pipeline; and its next rows are planned when the guesses were checked.

use super::{Engine, PlannedRows};
use crate::draft::{Bounds, Candidate, DRAFT_ROWS, depths};
use crate::drafter::{Draft, Drafter, Wish};
use crate::sequence::Sequence;
use crate::{Error, GuessCounts, SequenceId};

/// Steps that check guesses before one that checks none: times change with the length of the text
/// and with what else the machine does, and a gain is known beside fresh times only. One step in 65
/// costs 1 % where guesses give twice as much.
const PLAIN_EVERY: usize = 64;

impl Engine {
    /// Has a small model guess tokens, up to [`drafts`](crate::EngineConfig::drafts) in a step,
    /// where measured times and the share of guesses that were right say that it pays. Answers do
    /// not depend on it. Reserves memory for a cache of the draft's own.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`] for a model of another vocabulary, [`Error::Model`] when memory
    /// cannot be had.
    pub fn guess_with(&mut self, draft: Draft) -> Result<(), Error> {
        let vocab = self.model.config().vocab;
        let drafter = Drafter::new(draft, &self.tokenizer, &self.config, vocab)?;
        self.drafter = Some(drafter);
        Ok(())
    }

    /// Counts guesses that were checked, for others to look at while steps are computed.
    pub const fn guesses(&self) -> &GuessCounts {
        &self.guesses
    }

    /// Whether a step may check guesses: all sequences decode. MLX computes few rows no faster than
    /// one by one. Now and then a step has none, so that what one takes without is known.
    fn drafts(&self) -> bool {
        let is_on = self.config.drafts > 0 && !self.model.class().is_mlx();
        is_on && self.drafted_steps < PLAIN_EVERY && self.running.iter().all(Sequence::is_decoding)
    }

    /// Adds guesses to the rows of sequences that decode, where they are expected to pay: those of
    /// their own text, or those of the draft model where more is expected of them. Where a grammar
    /// binds they spell what it says must come: a mask beyond that, between two steps, would cost
    /// more than most guesses give.
    pub(super) fn speculate(&mut self, plan: &mut [PlannedRows]) -> Result<(), Error> {
        let mut is_drafted = false;
        if self.drafts() {
            let (gain, depths) = self.look_up(plan);
            is_drafted = self.ask_draft(plan, gain)?;
            if !is_drafted {
                is_drafted = depths.iter().any(|depth| *depth > 0);
                self.check(plan, &depths);
            }
        }
        self.drafted_steps = if is_drafted {
            self.drafted_steps + 1
        } else {
            0
        };
        Ok(())
    }

    /// Positions of a sequence's last page that no guess may have: states of recurrent layers
    /// change with the last row of a page and cannot go back.
    fn kept(&self) -> usize {
        usize::from(!self.compute.windows().is_empty())
    }

    fn bounds(&self, plan: &[PlannedRows]) -> Bounds {
        let planned: usize = plan.iter().map(|part| part.rows).sum();
        Bounds {
            decoding: plan.len(),
            most: self.config.drafts,
            rows: DRAFT_ROWS.min(self.config.step_rows().saturating_sub(planned)),
        }
    }

    /// Has the draft model guess, if more than `least` times the tokens of a plain step are
    /// expected of that; whether it did.
    fn ask_draft(&mut self, plan: &mut [PlannedRows], least: f64) -> Result<bool, Error> {
        let (kept, bounds) = (self.kept(), self.bounds(plan));
        let running: Vec<SequenceId> = self.running.iter().map(|s| s.id).collect();
        let Some(drafter) = &mut self.drafter else {
            return Ok(false);
        };
        let wish = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let is_bound = sequence.guide.as_ref().is_some_and(|it| !it.is_free());
            let is_forced = sequence.pending().len() > 1;
            let room = match is_bound || is_forced {
                true => 0,
                false => sequence.draft_room().saturating_sub(kept),
            };
            Wish { sequence, room }
        };
        let wishes: Vec<Wish<'_>> = plan.iter().map(wish).collect();
        let Some(guesses) = drafter.guess((&running, &wishes), (bounds, &self.costs), least)?
        else {
            return Ok(false);
        };
        for (part, guesses) in plan.iter_mut().zip(guesses) {
            if !guesses.is_empty() {
                let pending = self.running[part.index].pending().iter().copied();
                part.checked = pending.chain(guesses).collect();
            }
        }
        Ok(true)
    }

    /// Looks for guesses in the sequences' own texts; how many of them each is to check, and how
    /// many times the tokens of a plain step are expected of that.
    fn look_up(&mut self, plan: &mut [PlannedRows]) -> (f64, Vec<usize>) {
        let (kept, bounds) = (self.kept(), self.bounds(plan));
        for part in &mut *plan {
            let sequence = &mut self.running[part.index];
            if sequence.pending().len() > 1 {
                continue; // forced tokens, whose logits nobody needs
            }
            part.guesses = match &mut sequence.guide {
                Some(guide) if !guide.is_free() => guide.guesses(bounds.most),
                _ => sequence.drafts.guess(&sequence.tokens, bounds.most),
            };
        }
        let candidate = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let room = sequence.draft_room().saturating_sub(kept);
            Candidate {
                drafts: &sequence.drafts,
                guesses: part.guesses.len().min(room),
            }
        };
        let candidates: Vec<Candidate<'_>> = plan.iter().map(candidate).collect();
        depths(&candidates, bounds, &self.costs)
    }

    /// Has a step check so many of each sequence's own guesses.
    fn check(&self, plan: &mut [PlannedRows], depths: &[usize]) {
        let parts = plan.iter_mut().zip(depths);
        for (part, depth) in parts.filter(|(_, depth)| **depth > 0) {
            let pending = self.running[part.index].pending().iter().copied();
            part.checked = pending
                .chain(part.guesses[..*depth].iter().copied())
                .collect();
        }
    }
}
