//! Deadlines, and what clients were served.

use std::time::Duration;

use super::{Engine, PlannedRows};
use crate::sequence::Sequence;
use crate::{Event, Finish};

impl Engine {
    /// A sequence comes in: its deadline begins to count.
    pub(super) fn enter(&mut self, mut sequence: Sequence) -> Sequence {
        let open = self.running.iter().chain(&self.resuming);
        let open = open.chain(&self.waiting).map(|s| s.order.client);
        self.shares.enter(sequence.order.client, open);
        let limit = sequence.order.deadline_ms;
        let limit = limit.map(|ms| Duration::from_millis(ms.into()));
        sequence.due = limit.map(|limit| self.elapsed + limit);
        sequence
    }

    /// Ends the sequences whose deadline is over, with what they have.
    pub(super) fn end_late(&mut self) -> Vec<Event> {
        let now = self.elapsed;
        let mut events = Vec::new();
        for index in (0..self.running.len()).rev() {
            let sequence = &self.running[index];
            if sequence.is_late(now) && sequence.flights == 0 {
                let mut sequence = self.stop_running(index);
                events.push(sequence.finish(Finish::Deadline));
            }
        }
        for queue in [&mut self.resuming, &mut self.waiting] {
            queue.retain_mut(|sequence| {
                let is_late = sequence.is_late(now);
                if is_late {
                    events.push(sequence.finish(Finish::Deadline));
                }
                !is_late
            });
        }
        events
    }

    /// Counts the rows of a step for their clients. A prompt that got none beside others that did
    /// was passed.
    pub(super) fn charge(&mut self, plan: &[PlannedRows]) {
        let mut has_rows = vec![false; self.running.len()];
        let mut reads = false;
        for part in plan {
            let sequence = &mut self.running[part.index];
            has_rows[part.index] = true;
            reads |= sequence.pending().len() > 1;
            sequence.passed = 0;
            self.shares.charge(sequence.order.client, part.rows);
        }
        for (sequence, has_rows) in self.running.iter_mut().zip(has_rows) {
            if reads && !has_rows {
                sequence.passed = sequence.passed.saturating_add(1);
            }
        }
    }
}
