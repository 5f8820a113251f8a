//! Takes the results of a step: scores, tokens, and pages for the prefix cache.

use super::Engine;
use super::planning::PlannedRows;
use crate::constraint::Guide;
use crate::{Event, Reply};

impl Engine {
    /// Takes out the guides whose token mask is needed at the end of this step.
    pub(super) fn take_due(&mut self, plan: &[PlannedRows]) -> Vec<(usize, Box<Guide>)> {
        let mut due = Vec::new();
        for part in plan {
            let sequence = &mut self.running[part.index];
            let is_last = part.rows == sequence.pending().len();
            let guide = sequence.guide.take_if(|guide| is_last && guide.is_due());
            due.extend(guide.map(|guide| (part.index, guide)));
        }
        due
    }

    /// Samples a token for every sequence whose tokens are all in the cache.
    pub(super) fn take_results(&mut self, plan: &[PlannedRows], events: &mut Vec<Event>) {
        self.charge(plan);
        for part in plan {
            let mut logits_row = part.logits_row;
            if part.is_scored {
                logits_row += self.score(part, logits_row);
            }
            self.running[part.index].computed += part.rows;
            if self.running[part.index].pending().is_empty() {
                let right = self.choose(part, logits_row, events);
                let first = usize::from(part.is_behind); // its first row is a right draft token
                self.draft_counters.add(part.guessed(), first + right);
                let own = &mut self.running[part.index];
                own.drafts.add(part.guessed(), first + right);
                if let Some(Event { id, reply }) = events.last_mut()
                    && let Reply::Finished { drafts, .. } = reply
                    && *id == own.id
                {
                    *drafts = own.drafts; // with those of this step
                }
            }
            self.keep(part.index);
            let last = events.last();
            let id = self.running[part.index].id;
            if last.is_some_and(|event| event.is_last() && event.id == id) {
                self.running[part.index].gone = true; // until its in-flight rows complete
            }
        }
    }

    /// Scores prompt tokens by the logits from `row` on; returns how many.
    fn score(&mut self, part: &PlannedRows, row: usize) -> usize {
        let sequence = &mut self.running[part.index];
        let n = part.rows.min(sequence.unscored());
        for row in row..row + n {
            let logits = self.compute.logits_mut(row);
            sequence.score(self.model.kernels(), logits, &mut self.scratch);
        }
        n
    }

    /// Caches a sequence's full pages, and releases pages outside its windows.
    fn keep(&mut self, index: usize) {
        let sequence = &mut self.running[index];
        let (computed, known) = (
            &sequence.tokens[..sequence.computed],
            sequence.pages.n_known(),
        );
        self.pages.register(computed, &mut sequence.pages);
        self.note_kept(index, known);
        let sequence = &mut self.running[index];
        let (computed, prompt) = (sequence.computed, sequence.prompt_len());
        self.pages
            .release_windows(&mut sequence.pages, computed, prompt);
    }

    /// Samples the next token of a sequence from the logits in `row`, and further tokens from the
    /// following rows as long as draft tokens match. Then appends forced tokens. Returns the
    /// accepted draft tokens.
    fn choose(&mut self, part: &PlannedRows, row: usize, events: &mut Vec<Event>) -> usize {
        let sequence = &mut self.running[part.index];
        let mut right = 0;
        for i in 0..=part.drafted() {
            let logits = self.compute.logits_mut(row + i);
            if sequence.must_go_on() {
                forbid(logits, self.tokenizer.end_of_generation());
            }
            let choice = sequence.next_token(self.model.kernels(), logits, &mut self.scratch);
            let chosen = choice.as_ref().ok().map(|choice| choice.token);
            sequence.accept(choice, &self.tokenizer, events);
            if events.last().is_some_and(Event::is_last) {
                return i;
            }
            right = i;
            if part.checked.get(i + 1).copied() != chosen || i == part.drafted() {
                break;
            }
            sequence.computed += 1; // the next row was computed for this token
        }
        sequence.settle(part.drafted(), right);
        // In MLX, a row computed with others has other bits than alone.
        if !self.model.class().is_mlx() {
            let vocab = self.model.config().vocab;
            sequence.take_forced(vocab, &self.tokenizer, events);
        }
        right
    }
}

/// Sets the logits of `tokens` to minus infinity.
fn forbid(logits: &mut [f32], tokens: &[u32]) {
    for token in tokens {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
