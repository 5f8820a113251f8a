//! Fair scheduling between clients: admission, preemption, rows and deadlines.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Engine;
use super::planning::PlannedRows;
use crate::fairness::{self, RowDemand};
use crate::queue_order::{self, PASSED_MAX, QueueKey};
use crate::sequence::Sequence;
use crate::{Event, Finish, SchedulingParams};

impl Engine {
    /// Registers a new sequence and starts its deadline.
    pub(super) fn enter(&mut self, mut sequence: Sequence) -> Sequence {
        let open = self.running.iter().chain(&self.resuming);
        let open = open.chain(&self.waiting).map(|s| s.order.client);
        self.shares.enter(sequence.order.client, open);
        let limit = sequence.order.deadline_ms;
        let limit = limit.map(|ms| Duration::from_millis(ms.into()));
        sequence.due = limit.map(|limit| self.elapsed + limit);
        sequence
    }

    /// Admits sequences in scheduling order ([`queue_order`]) while all their tokens fit into
    /// available pages. Pages in use, or promised to running sequences, are not available. Cached
    /// prefix pages are shared. If no slot is free, clients with many sequences may be preempted
    /// for those with few.
    pub(crate) fn admit(&mut self) {
        self.fill();
        while self.preempt_for_fairness() {
            self.fill();
        }
    }

    /// Admits sequences to free slots.
    fn fill(&mut self) {
        let reads_all = self.reads_all();
        while self.running.len() < self.config.max_running {
            let Some(place) = self.next_queued() else {
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
            let order = next.order;
            (next.passed, next.ticket) = (0, self.tickets); // after others of its client
            self.running.extend(queue.remove(at));
            self.note_known();
            self.pass(order, place);
        }
    }

    /// Counts which of the first `n` queued sequences were passed by the one just admitted.
    fn pass(&mut self, next: SchedulingParams, n: usize) {
        let places = |client: u64| {
            let own = self.running.iter().filter(|s| s.order.client == client);
            own.count() - usize::from(client == next.client)
        };
        let queued = self.resuming.iter_mut().chain(&mut self.waiting);
        for older in queued.take(n) {
            let is_passed = queue_order::passes(next, older.order, places);
            older.passed = older.passed.saturating_add(u32::from(is_passed));
        }
    }

    /// Index of the next sequence to admit, over the resuming and the waiting queue.
    fn next_queued(&self) -> Option<usize> {
        let turn_of = |(sequence, resumes): (&Sequence, bool)| {
            let client = sequence.order.client;
            let own = self.running.iter().filter(|s| s.order.client == client);
            QueueKey {
                places: own.count(),
                resumes,
                ..sequence.turn(self.shares.of(client))
            }
        };
        let resuming = self.resuming.iter().map(|sequence| (sequence, true));
        let waiting = self.waiting.iter().map(|sequence| (sequence, false));
        queue_order::next(resuming.chain(waiting).map(turn_of))
    }

    /// If no slot is free, preempts the client with the most slots where that is fairer to the next
    /// sequence. The client's youngest sequence returns to the queue; if it has in-flight rows,
    /// these complete first. Returns whether a slot is free now. Each preemption evens out the
    /// slots, so it terminates.
    fn preempt_for_fairness(&mut self) -> bool {
        let is_full = self.running.len() >= self.config.max_running;
        if !is_full || self.running.iter().any(|s| s.gone) {
            return false;
        }
        let Some(place) = self.next_queued() else {
            return false;
        };
        let mut queued = self.resuming.iter().chain(&self.waiting);
        let next = queued.nth(place).map(|s| s.order);
        let running: Vec<SchedulingParams> = self.running.iter().map(|s| s.order).collect();
        let Some(at) = next.and_then(|next| queue_order::preemption_victim(&running, next)) else {
            return false;
        };
        if self.running[at].n_in_flight > 0 {
            self.starves = true;
            return false;
        }
        let mut youngest = self.stop_running(at);
        youngest.passed = 0; // it queues after the one that preempted it
        self.resuming.push_back(youngest);
        true
    }

    /// Clients with sequences whose rows are withheld in favour of others.
    pub(super) fn throttled_clients(&self) -> BTreeSet<u64> {
        let withheld = self.running.iter().filter(|s| s.withheld);
        withheld.map(|s| s.order.client).collect()
    }

    /// Defers prompts that [`read_now`](Self::read_now) would not select, so that they do not count
    /// against the decoding rows of their client.
    pub(super) fn defer_prompts(&self, rows: &mut [usize]) {
        let pressed = self.throttled_clients();
        let is_pressed = |s: &Sequence| pressed.contains(&s.order.client);
        let reads = |(s, rows): (&Sequence, &usize)| *rows > 0 && !s.is_decoding();
        let mut others = self.running.iter().zip(&*rows);
        if pressed.is_empty() || !others.any(|(s, rows)| reads((s, rows)) && !is_pressed(s)) {
            return;
        }
        for (sequence, rows) in self.running.iter().zip(rows) {
            let is_due = sequence.passed >= PASSED_MAX;
            if !sequence.is_decoding() && is_pressed(sequence) && !is_due {
                *rows = 0;
            }
        }
    }

    /// Withholds rows of sequences in favour of other clients ([`fairness`]). Returns the number of
    /// sequences with rows in this step or in flight. A client with withheld sequences gets no
    /// forced-token rows.
    pub(super) fn withhold(&mut self, rows: &mut [usize]) -> usize {
        let wish = |(sequence, rows): (&Sequence, &usize)| RowDemand {
            client: sequence.order.client,
            wants: *rows > 0,
            is_under_way: sequence.n_in_flight > 0 && !sequence.gone,
            ticket: sequence.ticket,
        };
        let wishes: Vec<RowDemand> = self.running.iter().zip(&*rows).map(wish).collect();
        let depth = self.compute.depth(); // a batch of a pipeline has its share of the rows
        let beyond = |equal: usize| {
            let of_batch = self.row_costs.beyond(equal.div_ceil(depth));
            of_batch.saturating_mul(depth)
        };
        let granted = fairness::grant(&wishes, beyond);
        for ((sequence, rows), granted) in self.running.iter_mut().zip(&mut *rows).zip(&granted) {
            if *rows > 0 && !granted {
                *rows = 0;
                sequence.withheld = true;
            }
        }
        let pressed = self.throttled_clients();
        let is_bound = |s: &Sequence| s.is_decoding() && pressed.contains(&s.order.client);
        for (sequence, rows) in self.running.iter().zip(rows) {
            if is_bound(sequence) {
                *rows = (*rows).min(1);
            }
        }
        granted.into_iter().filter(|granted| *granted).count()
    }

    /// Moves the sequences of a plan behind the others of their clients, in their previous order.
    pub(super) fn note_rows(&mut self, plan: &[PlannedRows]) {
        let mut places: Vec<usize> = plan.iter().map(|part| part.index).collect();
        places.sort_by_key(|index| self.running[*index].ticket);
        for index in places {
            self.tickets += 1;
            let sequence = &mut self.running[index];
            (sequence.withheld, sequence.ticket) = (false, self.tickets);
        }
    }

    /// Selects the `prompts` to compute in the next step, in scheduling order, and their row budget
    /// out of `room` after `decoding` rows. Prompts of throttled clients come after those of
    /// others, with a reduced budget.
    pub(super) fn select_prompts(
        &self,
        prompts: &[usize],
        (decoding, room): (usize, usize),
    ) -> (Vec<usize>, usize) {
        let pressed = self.throttled_clients();
        let is_free = |index: &usize| {
            let sequence = &self.running[*index];
            sequence.passed >= PASSED_MAX || !pressed.contains(&sequence.order.client)
        };
        let free: Vec<usize> = prompts.iter().copied().filter(is_free).collect();
        match free.is_empty() {
            true => (
                prompts.to_vec(),
                self.prefill_budget.reduced_budget(decoding, room),
            ),
            false => (free, self.prefill_budget.budget(decoding, room)),
        }
    }

    /// Finishes the sequences whose deadline has passed, with the tokens they have.
    pub(super) fn finish_expired(&mut self) -> Vec<Event> {
        let now = self.elapsed;
        let mut events = Vec::new();
        for index in (0..self.running.len()).rev() {
            let sequence = &self.running[index];
            if sequence.is_late(now) && sequence.n_in_flight == 0 {
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

    /// Charges the rows of a step to the clients. A prompt without rows in a step with prompt rows
    /// counts as passed.
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
            if reads && !has_rows && !sequence.is_decoding() {
                sequence.passed = sequence.passed.saturating_add(1);
            }
        }
    }
}
