//! The order of turns: the waiting request that gets the next place, and the prompt that is read
//! first.
//!
//! ```text
//! passed over too often > priority > client with the fewest places > what had a place before
//!                       > least served client > earliest deadline > oldest
//! ```
//!
//! Clients have equally many places, as far as each wants them. A place that is free goes to the
//! client that has the fewest. Where none is free, the client with the most gives one up to a
//! client that has two fewer ([`gives_way`]). So no number of requests of one client keeps
//! another's waiting, and a client that is alone has all places. A client that has given one up
//! keeps at least one, for its oldest sequence: each ends.
//!
//! Of clients with as many places, the client that was served least is next; so it is of clients
//! whose prompts are read. Each computed row counts for its client. A client that comes after it
//! had nothing to do begins at the least count of those that are there. So nobody saves up.
//! Priorities are strict, but a request that others passed [`PASSED_MAX`] times goes before all. So
//! nothing starves. A request passes none of a client that has more places than its own. Else a
//! client with many requests would soon have some that go before those of all others. All of this
//! is pure; it decides when a row is computed, never what it gives.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The properties that decide a request's turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Requests of a higher priority get their places before others.
    pub priority: i32,
    /// Milliseconds from now until the answer ends with what there is of it; the engine counts the
    /// time of its steps. Of equal priority the request that is due first goes first.
    pub deadline_ms: Option<u32>,
    /// Whose request it is: clients are served alike. 0 where nobody says.
    pub client: u64,
}

/// How often younger requests may be admitted before a waiting one, or rows of others be computed
/// while a prompt gets none. With 4 places and answers of 200 tokens of 20 ms these are a minute.
pub(crate) const PASSED_MAX: u32 = 64;

/// A waiting request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// How often others went before it.
    pub(crate) passed: u32,
    pub(crate) priority: i32,
    /// Places of its client; 0 where all have one.
    pub(crate) places: usize,
    /// Whether it had a place before and gave it up, or had one elsewhere.
    pub(crate) resumes: bool,
    /// Rows that were computed for its client.
    pub(crate) served: u64,
    /// In the time that the engine counts.
    pub(crate) due: Option<Duration>,
}

impl Turn {
    /// The least goes first; of equal ones the oldest.
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

/// The place of the one whose turn it is, of those that wait, oldest first.
pub(crate) fn next(turns: impl Iterator<Item = Turn>) -> Option<usize> {
    let first = turns.enumerate().min_by_key(|(_, turn)| turn.key());
    first.map(|(place, _)| place)
}

/// The places of all that wait, oldest first, in the order of their turns.
pub(crate) fn in_order(turns: impl Iterator<Item = Turn>) -> Vec<usize> {
    let mut keys: Vec<_> = turns.map(Turn::key).enumerate().collect();
    keys.sort_by_key(|(_, key)| *key); // stable: of equal ones the oldest first
    keys.into_iter().map(|(place, _)| place).collect()
}

/// Index of the one of the `running` sequences, oldest first, that gives its place to the one that
/// is `next`. It is the youngest of the client with the most places, of no higher priority. `None`
/// while that would not be fairer. The sequence that gives way comes behind `next` in the order of
/// turns.
pub(crate) fn gives_way(running: &[Order], next: Order) -> Option<usize> {
    let places = |client: u64| running.iter().filter(|of| of.client == client).count();
    let most = running.iter().map(|of| places(of.client)).max()?;
    let is_of_most = |of: &Order| of.priority <= next.priority && places(of.client) == most;
    let is_fairer = most >= places(next.client) + 2;
    is_fairer.then(|| running.iter().rposition(is_of_most))?
}

/// Whether the `older` request of two is passed over when the `next` one gets a place. It is not
/// where its client has more places: it gets its turn when one of these is free. `places` are those
/// that a client has, without the one that `next` gets.
pub(crate) fn passes(next: Order, older: Order, places: impl Fn(u64) -> usize) -> bool {
    next.priority > older.priority || places(next.client) >= places(older.client)
}

/// How many rows were computed for each client that has requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares {
    served: BTreeMap<u64, u64>,
}

impl Shares {
    pub(crate) fn of(&self, client: u64) -> u64 {
        self.served.get(&client).copied().unwrap_or(0)
    }

    /// A request of `client` comes, beside open requests of `clients`. Others are forgotten unless
    /// they were served more.
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
