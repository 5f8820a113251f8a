//! Scheduling order: which queued request gets the next slot, and which prompt is computed first.
//!
//! ```text
//! passed too often > priority > client with the fewest slots > resuming before new
//!                  > least served client > earliest deadline > oldest
//! ```
//!
//! Clients get equally many slots, as far as each wants them. A free slot goes to the client with
//! the fewest. If none is free, the client with the most is preempted for a client with at least
//! two fewer ([`gives_way`]). So no number of requests of one client delays another's indefinitely,
//! and a lone client has all slots. A preempted client keeps at least one slot, for its oldest
//! sequence, so each sequence ends.
//!
//! Among clients with equal slots, the least served client is next, also for prompts. Each computed
//! row counts for its client. A client that returns from idle starts at the lowest count of the
//! active ones, so idle time earns no credit. Priorities are strict, but a request passed
//! [`PASSED_MAX`] times precedes all, so nothing starves. A request never counts as passing one of
//! a client with more slots. Otherwise a client with many requests would soon have some that
//! precede all others. All of this is pure; it decides when a row is computed, never its result.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Scheduling parameters of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulingParams {
    /// Requests of a higher priority are admitted first.
    pub priority: i32,
    /// Milliseconds until the answer ends with its tokens so far, on the clock of the engine's
    /// steps. Among equal priorities the earliest deadline is first.
    pub deadline_ms: Option<u32>,
    /// Client id: clients are served equally. 0 if unknown.
    pub client: u64,
}

/// Maximum admissions of younger requests before a waiting one, or steps with others' rows while a
/// prompt gets none. With 4 slots and answers of 200 tokens of 20 ms this is a minute.
pub(crate) const PASSED_MAX: u32 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueKey {
    /// How often others preceded it.
    pub(crate) passed: u32,
    pub(crate) priority: i32,
    /// Slots of its client; 0 if all have one.
    pub(crate) places: usize,
    /// Whether it had a slot before, here or on another engine.
    pub(crate) resumes: bool,
    /// Computed rows of its client.
    pub(crate) served: u64,
    /// Deadline on the engine's clock.
    pub(crate) due: Option<Duration>,
}

impl QueueKey {
    /// The lowest key is first; among equals the oldest.
    fn key(self) -> (Reverse<bool>, Reverse<i32>, usize, bool, u64, Duration) {
        let due = self.due.unwrap_or(Duration::MAX);
        match self.passed >= PASSED_MAX {
            true => (Reverse(true), Reverse(0), 0, false, 0, Duration::ZERO),
            false => {
                let (priority, is_new) = (Reverse(self.priority), !self.resumes);
                let Self { places, served, .. } = self;
                (Reverse(false), priority, places, is_new, served, due)
            }
        }
    }
}

/// Index of the next one among the queued, oldest first.
pub(crate) fn next(turns: impl Iterator<Item = QueueKey>) -> Option<usize> {
    let first = turns.enumerate().min_by_key(|(_, turn)| turn.key());
    first.map(|(place, _)| place)
}

/// Indices of the queued, oldest first, in scheduling order.
pub(crate) fn in_order(turns: impl Iterator<Item = QueueKey>) -> Vec<usize> {
    let mut keys: Vec<_> = turns.map(QueueKey::key).enumerate().collect();
    keys.sort_by_key(|(_, key)| *key); // stable: the oldest first among equals
    keys.into_iter().map(|(place, _)| place).collect()
}

/// Index of the `running` sequence, oldest first, to preempt for the `next` one. It is the youngest
/// of the client with the most slots, of no higher priority. `None` if that would not be fairer.
/// The preempted sequence queues after `next`.
pub(crate) fn preemption_victim(
    running: &[SchedulingParams],
    next: SchedulingParams,
) -> Option<usize> {
    let places = |client: u64| running.iter().filter(|of| of.client == client).count();
    let most = running.iter().map(|of| places(of.client)).max()?;
    let is_of_most =
        |of: &SchedulingParams| of.priority <= next.priority && places(of.client) == most;
    let is_fairer = most >= places(next.client) + 2;
    is_fairer.then(|| running.iter().rposition(is_of_most))?
}

/// Whether admitting `next` counts as passing the `older` request. It does not if the older one's
/// client has more slots: that client waits for one of its own slots. `places` are a client's slots
/// without the one of `next`.
pub(crate) fn passes(
    next: SchedulingParams,
    older: SchedulingParams,
    places: impl Fn(u64) -> usize,
) -> bool {
    next.priority > older.priority || places(next.client) >= places(older.client)
}

/// Computed rows of each client with requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServedRows {
    served: BTreeMap<u64, u64>,
}

impl ServedRows {
    pub(crate) fn of(&self, client: u64) -> u64 {
        self.served.get(&client).copied().unwrap_or(0)
    }

    /// Registers a request of `client`, with open requests of `clients`. Other clients are dropped
    /// unless they were served more than the least served one.
    pub(crate) fn enter(&mut self, client: u64, clients: impl Iterator<Item = u64>) {
        let open: BTreeMap<u64, u64> = clients.map(|client| (client, self.of(client))).collect();
        let Some(least) = open.values().min().copied() else {
            self.served = BTreeMap::from([(client, 0)]);
            return;
        };
        self.served
            .retain(|client, served| *served > least || open.contains_key(client));
        let served = self.served.entry(client).or_insert(least);
        *served = least.max(*served);
    }

    pub(crate) fn charge(&mut self, client: u64, rows: usize) {
        *self.served.entry(client).or_insert(0) += rows as u64;
    }
}

#[cfg(test)]
mod tests;
