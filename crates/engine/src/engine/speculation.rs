//! Speculative decoding: draft tokens that a step verifies, proposed from the sequence's own text
//! or by a draft model.
//!
//! A draft is made when the rows of a sequence are planned. All its tokens are known then, even
//! while batches of other sequences are in flight. Its next rows are normally planned after
//! verification. In a pipeline they may be planned earlier, as if the whole draft were accepted:
//! [`window_behind`](Engine::window_behind).

use paceline_tensor::PAGE;

use super::{Engine, PlannedRows};
use crate::chain::{Pipeline, ProposerStats, WindowShape};
use crate::draft_proposer::{Draft, DraftProposer, DraftRequest};
use crate::ngram::{DRAFT_ROWS, DraftCandidate, DraftLimits, LEAST_GAIN, depths};
use crate::sequence::{ProposerKind, Sequence};
use crate::{DraftCounters, Error, SequenceId};

/// Steps with drafts between two without. Step times change with the length of the text and with
/// other load, and a gain can only be judged against recent times. One step in 65 costs 1 % where
/// drafts double the speed.
const PLAIN_EVERY: usize = 64;

impl Engine {
    /// Attaches a draft model that proposes up to [`drafts`](crate::EngineConfig::drafts) tokens
    /// per step. It proposes only when measured times and its acceptance rate predict a gain.
    /// Answers do not depend on it. Reserves memory for the draft model's own cache.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`] for a model with another vocabulary, [`Error::Model`] if the
    /// allocation fails.
    pub fn set_draft_model(&mut self, draft: Draft) -> Result<(), Error> {
        let vocab = self.model.config().vocab;
        let drafter = DraftProposer::new(draft, &self.tokenizer, &self.config, vocab)?;
        self.proposer = Some(drafter);
        Ok(())
    }

    /// Counters of verified draft tokens, readable while steps run.
    pub const fn draft_counters(&self) -> &DraftCounters {
        &self.draft_counters
    }

    /// Whether a step may verify drafts: all sequences decode, and no measuring step without drafts
    /// is due. In MLX, several rows are not faster than one by one.
    fn drafts(&self) -> bool {
        self.may_guess() && !self.wants_plain_step()
    }

    fn may_guess(&self) -> bool {
        let is_on = self.config.drafts > 0 && !self.model.class().is_mlx();
        is_on && self.running.iter().all(Sequence::is_decoding)
    }

    /// Whether the next step must have no drafts, to measure its time.
    pub(super) const fn wants_plain_step(&self) -> bool {
        self.drafted_steps >= PLAIN_EVERY
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
    /// from the sequence's own text, or from the draft model if it promises more. If a grammar
    /// applies, the draft is the text that it forces. Masks for other drafts would cost more than
    /// most drafts save.
    pub(super) fn speculate(&mut self, plan: &mut [PlannedRows]) -> Result<(), Error> {
        let mut is_drafted = false;
        if self.drafts() {
            let (gain, depths) = self.propose_from_text(plan);
            is_drafted = self.propose_with_model(plan, gain)?;
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

    /// Lets the draft model propose, if it promises more than `least` times the tokens of a step
    /// without drafts. Returns whether it did.
    fn propose_with_model(&mut self, plan: &mut [PlannedRows], least: f64) -> Result<bool, Error> {
        let (kept, bounds, pressed) = (
            self.reserved_positions(),
            self.bounds(plan),
            self.throttled_clients(),
        );
        let running: Vec<SequenceId> = self.running.iter().map(|s| s.id).collect();
        let (windows, rows) = (self.windows_max(), self.window_rows());
        let pipeline = self.may_be_followed(plan).then_some(Pipeline {
            rounds: &self.costs,
            intervals: &self.intervals,
            stages: self.compute.depth(),
            windows,
            rows,
        });
        let Some(drafter) = &mut self.proposer else {
            return Ok(false);
        };
        let wish = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let is_bound = sequence.guide.as_ref().is_some_and(|it| !it.is_free());
            let is_forced = sequence.pending().len() > 1;
            let is_pressed = pressed.contains(&sequence.order.client);
            let room = match is_bound || is_forced || is_pressed {
                true => 0,
                false => sequence.draft_room().saturating_sub(kept),
            };
            DraftRequest { sequence, room }
        };
        let wishes: Vec<DraftRequest<'_>> = plan.iter().map(wish).collect();
        let times = (bounds, &self.costs, pipeline);
        let Some(guesses) = drafter.propose((&running, &wishes), times, least)? else {
            return Ok(false);
        };
        for (part, guesses) in plan.iter_mut().zip(guesses) {
            if !guesses.is_empty() {
                let pending = self.running[part.index].pending().iter().copied();
                part.checked = pending.chain(guesses).collect();
                part.guesser = Some(ProposerKind::Model);
            }
        }
        Ok(true)
    }

    /// Proposes from the sequences' own texts. Returns the expected gain over a step without
    /// drafts, and the draft length of each sequence.
    fn propose_from_text(&mut self, plan: &mut [PlannedRows]) -> (f64, Vec<usize>) {
        let (kept, bounds, pressed) = (
            self.reserved_positions(),
            self.bounds(plan),
            self.throttled_clients(),
        );
        for part in &mut *plan {
            let sequence = &mut self.running[part.index];
            if sequence.pending().len() > 1 || pressed.contains(&sequence.order.client) {
                continue; // forced tokens need no logits; throttled clients get no draft rows
            }
            part.guesses = match &mut sequence.guide {
                Some(guide) if !guide.is_free() => guide.guesses(bounds.most),
                _ => sequence.drafts.propose(&sequence.tokens, &[], bounds.most),
            };
        }
        let candidate = |part: &PlannedRows| {
            let sequence = &self.running[part.index];
            let room = sequence.draft_room().saturating_sub(kept);
            DraftCandidate {
                drafts: &sequence.drafts,
                guesses: part.guesses.len().min(room),
            }
        };
        let candidates: Vec<DraftCandidate<'_>> = plan.iter().map(candidate).collect();
        let best = depths(&candidates, bounds, &self.costs);
        match &candidates[..] {
            [only] if only.guesses > 0 && self.may_be_followed(plan) => {
                let shape = self.shape_of_text(only.drafts.acceptance());
                match shape.windows > 1 && shape.gain > best.0 {
                    true => (shape.gain, vec![only.guesses.min(shape.rows - 1)]),
                    false => best,
                }
            }
            _ => best,
        }
    }

    /// Adds `depths` n-gram draft tokens to the rows of each sequence.
    fn check(&self, plan: &mut [PlannedRows], depths: &[usize]) {
        let parts = plan.iter_mut().zip(depths);
        for (part, depth) in parts.filter(|(_, depth)| **depth > 0) {
            let pending = self.running[part.index].pending().iter().copied();
            part.checked = pending
                .chain(part.guesses[..*depth].iter().copied())
                .collect();
            part.guesser = Some(ProposerKind::Text);
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

    fn shape_of_text(&self, acceptance: f64) -> WindowShape {
        let pass = 0.0; // a table lookup
        self.shape(ProposerStats { acceptance, pass })
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
        let shape = match guesser {
            ProposerKind::Text => self.shape_of_text(sequence.drafts.acceptance()),
            ProposerKind::Model => {
                let plain = self.costs.seconds(1)?;
                self.shape(self.proposer.as_ref()?.chance(sequence.id, plain))
            }
        };
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
        let sequence = &mut self.running[index];
        let (tokens, ahead) = (&sequence.tokens, &sequence.ahead);
        let own = sequence.drafts.propose(tokens, ahead, room + 1);
        let sequence = &self.running[index];
        let checked = match (sequence.guesser, &mut self.proposer) {
            (Some(ProposerKind::Model), Some(drafter)) => drafter.propose_ahead(sequence, room)?,
            _ => own.iter().take(room).copied().collect(),
        };
        if checked.is_empty() {
            return Ok(None);
        }
        // The text's prediction for the tokens after the first row, if its first token is the same.
        let is_alike = own.first() == checked.first();
        let guesses = own.into_iter().skip(1).filter(|_| is_alike).collect();
        self.draft_counters.add_window();
        Ok(Some(PlannedRows {
            guesses,
            checked,
            is_behind: true,
            ..PlannedRows::new(index, 1, false)
        }))
    }
}
