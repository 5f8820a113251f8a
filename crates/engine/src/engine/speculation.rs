//! Speculative decoding: draft tokens that a step verifies, made by [proposers](crate::proposer).
//!
//! A draft is made when the rows of a sequence are planned. All its tokens are known then, even
//! while batches of other sequences are in flight. Its next rows are normally planned after
//! verification. In a pipeline they may be planned earlier, as if the whole draft were accepted:
//! [`window_behind`](Engine::window_behind).

use paceline_tensor::PAGE;

use super::Engine;
use super::planning::PlannedRows;
use crate::chain::{Pipeline, ProposerStats, WindowShape};
use crate::draft_proposer::{Draft, DraftProposer};
use crate::ngram::{DRAFT_ROWS, DraftLimits, LEAST_GAIN};
use crate::proposer::{DraftPart, DraftStep, Drafts};
use crate::sequence::Sequence;
use crate::{DraftCounters, Error};

/// Steps with drafts between two without. Step times change with the length of the text and with
/// other load, and a gain can only be judged against recent times. One step in 65 costs 1 % where
/// drafts double the speed.
const PLAIN_EVERY: usize = 64;

impl Engine {
    /// Attaches a draft model or head that has up to [`drafts`](crate::EngineConfig::drafts) tokens
    /// per step. It proposes only when measured times and its acceptance rate predict a gain.
    /// Answers do not depend on it. Reserves memory for the draft model's own cache.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`] for a model with another vocabulary, [`Error::DraftCaptures`] for
    /// a head whose layers are not captured, [`Error::Model`] if the allocation fails.
    pub fn set_draft_model(&mut self, draft: &Draft) -> Result<(), Error> {
        let drafter = DraftProposer::new(draft, &self.tokenizer, &self.config, &*self.model)?;
        self.proposers.truncate(1);
        self.proposers.push(Box::new(drafter));
        Ok(())
    }

    /// Counters of verified draft tokens, readable while steps run.
    pub const fn draft_counters(&self) -> &DraftCounters {
        &self.draft_counters
    }

    /// Whether a step may verify drafts: all sequences decode, and no measuring step without drafts
    /// is due.
    fn drafts(&self) -> bool {
        self.may_guess() && !self.wants_plain_step()
    }

    fn may_guess(&self) -> bool {
        self.config.drafts > 0 && self.running.iter().all(Sequence::is_decoding)
    }

    /// Whether the next step must have no drafts, to measure its time.
    pub(super) const fn wants_plain_step(&self) -> bool {
        self.drafted_steps >= PLAIN_EVERY && !self.costs.is_fixed()
    }

    /// Whether speculation windows may follow the planned rows: those of one sequence without a
    /// grammar, in a pipeline.
    fn may_be_followed(&self, plan: &[PlannedRows]) -> bool {
        match plan {
            [part] => self.compute.depth() > 1 && self.running[part.index].guide.is_none(),
            _ => false,
        }
    }

    /// Adds draft tokens to the rows of decoding sequences, where a gain is expected. They come
    /// from the proposer that promises most.
    pub(super) fn speculate(&mut self, plan: &mut [PlannedRows]) -> Result<(), Error> {
        let drafts = match self.drafts() {
            true => self.best_drafts(plan)?,
            false => None,
        };
        let Some((number, drafts)) = drafts else {
            self.drafted_steps = 0;
            return Ok(());
        };
        self.drafted_steps += 1;
        let parts = plan.iter_mut().zip(drafts.tokens);
        for (part, tokens) in parts.filter(|(_, tokens)| !tokens.is_empty()) {
            let pending = self.running[part.index].pending().iter().copied();
            part.checked = pending.chain(tokens).collect();
            part.guesser = Some(number);
        }
        Ok(())
    }

    /// The drafts with the largest gain, if one is expected, and the number of their proposer.
    fn best_drafts(&mut self, plan: &[PlannedRows]) -> Result<Option<(usize, Drafts)>, Error> {
        let (parts, limits) = (self.draft_parts(plan), self.bounds(plan));
        let (windows, rows) = (self.windows_max(), self.window_rows());
        let pipeline = self.may_be_followed(plan).then_some(Pipeline {
            rounds: &self.costs,
            intervals: &self.intervals,
            stages: self.compute.depth(),
            windows,
            rows,
        });
        let mut step = DraftStep {
            running: &mut self.running,
            parts: &parts,
            limits,
            costs: &self.costs,
            pipeline,
        };
        let (mut least, mut best) = (LEAST_GAIN, None);
        for (number, proposer) in self.proposers.iter_mut().enumerate() {
            if let Some(drafts) = proposer.propose(&mut step, least)? {
                least = drafts.gain.max(least);
                best = Some((number, drafts));
            }
        }
        Ok(best)
    }

    /// Room for draft tokens in each part of a plan. Forced tokens need no logits, and throttled
    /// clients get no draft rows.
    fn draft_parts(&self, plan: &[PlannedRows]) -> Vec<DraftPart> {
        let (kept, pressed) = (self.reserved_positions(), self.throttled_clients());
        let of = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let is_forced = sequence.pending().len() > 1;
            let is_out = is_forced || pressed.contains(&sequence.order.client);
            let room = sequence.draft_room().saturating_sub(kept);
            DraftPart {
                index: part.index,
                room: if is_out { 0 } else { room },
            }
        };
        plan.iter().map(of).collect()
    }

    /// Positions of a sequence's last page that no draft token may occupy. Recurrent states change
    /// with the last row of a page and cannot be rolled back.
    fn reserved_positions(&self) -> usize {
        usize::from(!self.compute.windows().is_empty())
    }

    fn bounds(&self, plan: &[PlannedRows]) -> DraftLimits {
        let planned: usize = plan.iter().map(|part| part.rows).sum();
        DraftLimits {
            decoding: plan.len(),
            most: self.config.drafts,
            rows: DRAFT_ROWS.min(self.config.step_rows().saturating_sub(planned)),
        }
    }

    /// Gives the proposers what the step captured of tokens that are in answers now.
    pub(super) fn observe(&mut self, plan: &[PlannedRows]) {
        let captured = self.compute.captured();
        let width = self.model.config().width * self.model.captures().len();
        for part in plan.iter().filter(|_| width > 0) {
            let sequence = &self.running[part.index];
            let known = sequence.computed.saturating_sub(part.position);
            let n = part.span.len().min(known);
            let rows = &captured[part.span.start * width..][..n * width];
            if n > 0 && !sequence.gone {
                let proposers = self.proposers.iter_mut();
                proposers.for_each(|proposer| proposer.observe(sequence, part.position, rows));
            }
        }
    }

    /// Maximum rows of a speculation window, as many as the first one with its full draft.
    fn window_rows(&self) -> usize {
        let rows = self.config.drafts.saturating_add(1);
        rows.min(DRAFT_ROWS).min(self.config.step_rows())
    }

    /// Maximum in-flight windows per sequence, if all sequences have equally many.
    fn windows_max(&self) -> usize {
        let live = self.running.iter().filter(|s| !s.gone).count();
        self.compute.steps_max() / live.max(1)
    }

    /// The best windows for draft tokens of this acceptance and cost.
    fn shape(&self, chance: ProposerStats) -> WindowShape {
        let pipeline = Pipeline {
            rounds: &self.costs,
            intervals: &self.intervals,
            stages: self.compute.depth(),
            windows: self.windows_max(),
            rows: self.window_rows(),
        };
        pipeline.best(chance)
    }

    /// Plans a speculation window after the in-flight ones of a sequence, as if all their draft
    /// tokens were accepted. The sequence with the fewest windows gets it. `None` if no further
    /// window promises a gain.
    ///
    /// # Errors
    /// [`Error::Model`] if a pass of the draft model fails.
    pub(super) fn window_behind(&mut self) -> Result<Option<PlannedRows>, Error> {
        if self.compute.depth() == 1 || !self.may_guess() {
            return Ok(None);
        }
        let wanted = (0..self.running.len()).filter_map(|index| self.wants_window(index));
        let mut wanted: Vec<(usize, usize, usize)> = wanted.collect();
        wanted.sort_unstable();
        for (_, index, rows) in wanted {
            let room = self.window_room(index, rows);
            let part = self.plan_window(index, room)?;
            if part.is_some() {
                return Ok(part);
            }
        }
        Ok(None)
    }

    /// In-flight windows of a running sequence, its index, and the rows of a further window, if one
    /// pays.
    fn wants_window(&self, index: usize) -> Option<(usize, usize, usize)> {
        let sequence = &self.running[index];
        let guesser = sequence.guesser.filter(|_| sequence.may_go_on())?;
        let last = sequence.ahead.last();
        let ends = last.is_some_and(|token| self.tokenizer.is_end_of_generation(*token));
        let is_pressed = || self.throttled_clients().contains(&sequence.order.client);
        if ends || sequence.is_to_end(self.elapsed) || is_pressed() {
            return None;
        }
        let plain = self.costs.seconds(1)?;
        let shape = self.shape(self.proposers[guesser].chance(sequence.id, plain));
        let parts = self.in_flight.iter().flat_map(|flight| &flight.parts);
        let live = parts.filter(|(id, part)| *id == sequence.id && part.course == sequence.course);
        let live = live.count();
        let pays = shape.gain > LEAST_GAIN && live < shape.windows;
        pays.then_some((live, index, shape.rows))
    }

    /// Maximum rows of a further window, up to `rows`. Allocates a page for it if one is free,
    /// since the answer needs it soon. Windows end before the last row of a page if recurrent
    /// states change there and cannot be rolled back.
    fn window_room(&mut self, index: usize, rows: usize) -> usize {
        let kept = self.reserved_positions();
        let sequence = &mut self.running[index];
        let ahead = sequence.ahead.len();
        if kept == 0 {
            let rows = rows.min(sequence.tokens_left().saturating_sub(1 + ahead));
            let pages = (sequence.tokens.len() + ahead + rows).div_ceil(PAGE);
            self.pages.grow(&mut sequence.pages, pages); // else the room is the rest of the page
        }
        let room = sequence.draft_room().saturating_sub(kept + ahead);
        room.min(rows)
    }

    /// A window of up to `room` draft tokens after the in-flight ones; `None` without any.
    fn plan_window(&mut self, index: usize, room: usize) -> Result<Option<PlannedRows>, Error> {
        if room == 0 {
            return Ok(None);
        }
        let sequence = &self.running[index];
        let Some(guesser) = sequence.guesser else {
            return Ok(None);
        };
        let checked = self.proposers[guesser].propose_ahead(sequence, room)?;
        if checked.is_empty() {
            return Ok(None);
        }
        self.draft_counters.add_window();
        Ok(Some(PlannedRows {
            checked,
            is_behind: true,
            ..PlannedRows::new(index, 1, false)
        }))
    }
}
