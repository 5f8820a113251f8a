//! Plans a batch: rows and pages of each running sequence.

use std::ops::Range;

use paceline_tensor::PAGE;

use super::Engine;
use crate::pages::follows;
use crate::prefill_budget::{Composition, share};
use crate::queue_order;
use crate::sequence::Sequence;

/// Rows of a running sequence in a step.
#[derive(Clone, Debug)]
pub(super) struct PlannedRows {
    /// Index among the running sequences.
    pub(super) index: usize,
    /// Rows of its own tokens.
    pub(super) rows: usize,
    /// Whether all rows have logits, to score prompt tokens.
    pub(super) is_scored: bool,
    /// The pending token and the draft tokens that this step checks; empty without a draft.
    pub(super) checked: Vec<u32>,
    /// Number of the draft's proposer.
    pub(super) guesser: Option<usize>,
    /// Whether it is a speculation window after in-flight ones: all its tokens are draft tokens.
    pub(super) is_behind: bool,
    /// The sequence's [course](Sequence::course) when it was planned.
    pub(super) course: u32,
    /// Index of its first row of logits.
    pub(super) logits_row: usize,
    /// Its rows in the batch.
    pub(super) span: Range<usize>,
    /// Position of the first of them.
    pub(super) position: usize,
}

impl PlannedRows {
    pub(super) const fn new(index: usize, rows: usize, is_scored: bool) -> Self {
        Self {
            index,
            rows,
            is_scored,
            checked: Vec::new(),
            guesser: None,
            is_behind: false,
            course: 0,
            logits_row: 0,
            span: 0..0,
            position: 0,
        }
    }

    /// Draft tokens that this step checks, after its first row.
    pub(super) const fn drafted(&self) -> usize {
        self.checked.len().saturating_sub(1)
    }

    /// Draft tokens among its rows.
    pub(super) const fn guessed(&self) -> usize {
        match self.is_behind {
            true => self.checked.len(),
            false => self.drafted(),
        }
    }
}

impl Engine {
    /// Plans the rows of a step and allocates their pages. Empty if nothing runs, and if every
    /// sequence to decode was preempted.
    pub(super) fn plan(&mut self) -> Vec<PlannedRows> {
        (0..self.running.len()).for_each(|index| self.adopt_cached_pages(index));
        let mut plan = Vec::with_capacity(self.running.len());
        for (index, rows) in self.wanted_rows().into_iter().enumerate() {
            // Preemption removes from the end, so earlier indices stay valid.
            if rows > 0 && self.get_pages(index, rows) {
                let is_scored = self.running[index].is_scored_next();
                plan.push(PlannedRows::new(index, rows, is_scored));
            }
        }
        plan
    }

    /// Adopts pages that another sequence has computed since this one was admitted.
    pub(super) fn adopt_cached_pages(&mut self, index: usize) {
        let reads_all = self.reads_all();
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        if at != sequence.pages.len() * PAGE
            || reads_all
            || sequence.is_scoring()
            || !sequence.pages.is_known()
            || !self.pages.is_next_known(&sequence.tokens, &sequence.pages)
        {
            return;
        }
        self.rematch_prefix(index);
    }

    /// Replaces a sequence's pages by the longest cached prefix. Its own pages stay cached when
    /// released, so the match includes them.
    pub(super) fn rematch_prefix(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let at = sequence.computed;
        self.pages.release(&mut sequence.pages);
        sequence.computed = self.pages.reuse(&sequence.tokens, &mut sequence.pages);
        let more = sequence.computed.saturating_sub(at);
        self.count_reused(index, more);
    }

    /// Counts `tokens` more tokens that a sequence did not compute.
    pub(super) fn count_reused(&mut self, index: usize, tokens: usize) {
        self.running[index].reused += tokens;
        self.reused += tokens as u64;
    }

    /// Whether a sequence waits for a page that an older one is about to compute. Of several
    /// answers to one prompt, the first computes the page.
    pub(super) fn waits(&self, index: usize) -> bool {
        let own = &self.running[index];
        let is_at_page = own.computed == own.pages.len() * PAGE && own.pages.is_known();
        if own.is_scoring() {
            return false;
        }
        let goes_before = |older: &Sequence| {
            let is_reading = !older.is_decoding();
            let (client, of_older) = (own.order.client, older.order.client);
            // A throttled client's prompt is held back, so waiting for its pages would be long.
            is_reading
                && follows((&own.tokens, &own.pages), (&older.tokens, &older.pages))
                && (client == of_older || !self.throttled_clients().contains(&of_older))
        };
        is_at_page && self.running[..index].iter().any(goes_before)
    }

    /// Rows of each running sequence. Decoding ones get a row each, so that long prompts do not
    /// stall them; then forced tokens, then prompts.
    fn wanted_rows(&mut self) -> Vec<usize> {
        let mut spare = self.config.spare_logit_rows();
        let pending = |index: usize| {
            let sequence = &self.running[index];
            match sequence.is_to_end(self.elapsed) || sequence.holds || self.waits(index) {
                true => 0,
                false => sequence.next_rows(&mut spare),
            }
        };
        let mut rows: Vec<usize> = (0..self.running.len()).map(pending).collect();
        self.defer_prompts(&mut rows);
        let live = self.withhold(&mut rows);
        self.deal(&mut rows, live);
        let prompts = self.prompts(&rows);
        let decoding = rows.iter().filter(|rows| **rows > 0).count() - prompts.len();
        let room = self.config.max_rows.saturating_sub(decoding);
        let room = self
            .grant_forced(&mut rows, room)
            .min(self.stage_rows(&prompts));
        let (now, budget) = self.select_prompts(&prompts, (decoding, room));
        let left: Vec<usize> = now.iter().map(|index| rows[*index]).collect();
        prompts.iter().for_each(|index| rows[*index] = 0);
        for (index, share) in now.into_iter().zip(share(&left, budget)) {
            rows[index] = share;
        }
        rows
    }

    /// Rows of these prompts in a step that fills the stages of a pipeline. All of each prompt
    /// counts, so that its chunks are alike.
    fn stage_rows(&self, prompts: &[usize]) -> usize {
        let of = |index: &usize| self.running[*index].unread();
        let prompt = prompts.iter().map(of).sum();
        self.config.stage_rows(prompt, self.compute.depth())
    }

    /// Limits a batch to its share of the `live` sequences, if several batches are in flight.
    /// Sequences without in-flight rows have precedence. Otherwise the chunks of a long prompt
    /// would take a share of every batch.
    fn deal(&self, rows: &mut [usize], live: usize) {
        let most = live.div_ceil(self.compute.depth());
        let mut wanting: Vec<usize> = (0..rows.len()).filter(|at| rows[*at] > 0).collect();
        wanting.sort_by_key(|at| self.running[*at].n_in_flight); // stable: the oldest first
        wanting.iter().skip(most).for_each(|at| rows[*at] = 0);
    }

    /// Grants rows for forced tokens to decoding sequences, out of `room`. Returns the remaining
    /// room.
    fn grant_forced(&self, rows: &mut [usize], mut room: usize) -> usize {
        let is_forced = |(rows, s): &(&mut usize, &Sequence)| **rows > 1 && s.is_decoding();
        for (rows, _) in rows.iter_mut().zip(&self.running).filter(is_forced) {
            *rows = 1 + room.min(*rows - 1);
            room -= *rows - 1;
        }
        room
    }

    /// Indices of the running sequences with prompt rows to compute, in scheduling order.
    fn prompts(&self, rows: &[usize]) -> Vec<usize> {
        let reads = |i: &usize| rows[*i] > 1 && !self.running[*i].is_decoding();
        let places: Vec<usize> = (0..rows.len()).filter(reads).collect();
        let turn_of = |index: &usize| {
            let sequence = &self.running[*index];
            sequence.turn(self.shares.of(sequence.order.client))
        };
        let order = queue_order::in_order(places.iter().map(turn_of));
        order.into_iter().map(|place| places[place]).collect()
    }

    pub(super) fn composition_of(&self, plan: &[PlannedRows]) -> Composition {
        let mut composition = Composition::default();
        for part in plan {
            match self.running[part.index].is_decoding() {
                true => {
                    composition.decoding += 1;
                    composition.drafted += part.rows - 1 + part.drafted();
                }
                false => composition.prompt += part.rows,
            }
        }
        composition
    }

    /// Allocates pages for `rows` more rows of a running sequence, preempting younger ones if
    /// needed. `false` if the sequence itself was preempted.
    fn get_pages(&mut self, index: usize, rows: usize) -> bool {
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            let pages = (sequence.computed + sequence.rows_in_flight + rows).div_ceil(PAGE);
            if self.pages.grow(&mut sequence.pages, pages) {
                return true;
            }
            if self.running.last().is_some_and(|s| s.n_in_flight > 0) {
                self.starves = true;
                return false;
            }
            let youngest = self.stop_running(self.running.len() - 1);
            self.resuming.push_front(youngest);
        }
        false
    }
}
