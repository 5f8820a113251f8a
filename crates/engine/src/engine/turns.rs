//! Places, deadlines, and the rows that clients were served.

use std::time::Duration;

use super::{Engine, PlannedRows};
use crate::sequence::Sequence;
use crate::turn::{self, Turn};
use crate::{Event, Finish, Order};

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

    /// Moves sequences to the running ones, in the order of their turns ([`turn`]), while all their
    /// tokens fit in the pages that are left. Pages that are taken, or still needed for tokens of
    /// running sequences, are not left. Pages that another sequence filled with the same beginning
    /// are shared.
    pub(crate) fn admit(&mut self) {
        self.make_way();
        let reads_all = self.reads_all();
        while self.running.len() < self.config.max_running {
            let Some(place) = self.next_in_line() else {
                return;
            };
            let (queue, at) = match place.checked_sub(self.resuming.len()) {
                Some(at) => (&mut self.waiting, at),
                None => (&mut self.resuming, place),
            };
            let Some(next) = queue.get_mut(at) else {
                return;
            };
            let (tokens, pages) = next.reusable();
            let reused = match reads_all {
                true => 0,
                false => self.pages.reuse(tokens, pages),
            };
            let promised: usize = self.running.iter().map(Sequence::pages_missing).sum();
            if promised + next.pages_missing() > self.pages.available() {
                return self.pages.release(&mut next.pages);
            }
            (next.computed, next.reused) = (reused, reused);
            self.reused += reused as u64;
            next.passed = 0;
            self.running.extend(queue.remove(at));
            self.note_known();
            let queued = self.resuming.iter_mut().chain(&mut self.waiting);
            let passed = queued.take(place);
            passed.for_each(|older| older.passed = older.passed.saturating_add(1));
        }
    }

    /// Which sequence is next, counted through those that resume and those that wait.
    fn next_in_line(&self) -> Option<usize> {
        let turn_of = |(sequence, resumes): (&Sequence, bool)| {
            let client = sequence.order.client;
            let own = self.running.iter().filter(|s| s.order.client == client);
            Turn {
                places: own.count(),
                resumes,
                ..sequence.turn(self.shares.of(client))
            }
        };
        let resuming = self.resuming.iter().map(|sequence| (sequence, true));
        let waiting = self.waiting.iter().map(|sequence| (sequence, false));
        turn::next(resuming.chain(waiting).map(turn_of))
    }

    /// Where all places are taken, takes one from the client with the most if that is fairer to the
    /// one that is next. The youngest sequence of that client waits like one that gave up its
    /// pages; while it has rows under way, these are ended first. One at a time.
    fn make_way(&mut self) {
        let is_full = self.running.len() >= self.config.max_running;
        if !is_full || self.running.iter().any(|s| s.gone) {
            return;
        }
        let Some(place) = self.next_in_line() else {
            return;
        };
        let mut queued = self.resuming.iter().chain(&self.waiting);
        let next = queued.nth(place).map(|s| s.order);
        let running: Vec<Order> = self.running.iter().map(|s| s.order).collect();
        let Some(at) = next.and_then(|next| turn::gives_way(&running, next)) else {
            return;
        };
        if self.running[at].flights > 0 {
            self.starves = true;
            return;
        }
        let mut youngest = self.stop_running(at);
        youngest.passed = 0; // it goes behind the one that it makes way for
        self.resuming.push_back(youngest);
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
            reads |= !sequence.is_decoding();
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
