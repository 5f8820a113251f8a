//! Messages of remote workers, read by a thread for each and received by the instance's.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::workers::Event;
use paceline_worker::messages::{FromWorker, ToWorker};

use super::super::connection::{
    ConnectionError, MessageConnection, SilenceTimer, receive_message, send_message,
};
use super::super::host::{BEAT, FromHost, SILENCE, ToHost};
use super::HELD_MAX;
use super::spare::Packing;

/// Received events that `receive` has not returned yet.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) state: Mutex<InboxState>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct InboxState {
    pub(super) events: VecDeque<(u64, Event<FromWorker>)>,
    /// By rank: number of its current worker. Events of earlier workers are dropped.
    pub(super) workers: Vec<u64>,
    pub(super) woken: bool,
    /// Nodes whose connection broke under a rank's worker: routes to them may be broken too.
    pub(super) doubted: BTreeSet<NodeId>,
    /// Whether a worker reported a failed epoch.
    pub(super) failed: bool,
    /// Ranks that reported one, and those that they blamed.
    pub(super) blamed: BTreeSet<(Rank, Rank)>,
}

/// State of the thread that receives a worker's messages.
pub(super) struct MessageReader {
    pub(super) line: Arc<dyn MessageConnection>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) packing: Arc<Mutex<Packing>>,
    pub(super) place: String,
    pub(super) node: NodeId,
    pub(super) rank: Rank,
    pub(super) worker: u64,
}

impl MessageReader {
    /// Puts the worker's events into the inbox until its connection ends, and sends heartbeats to
    /// its host.
    pub(super) fn run(&self) {
        let lost = self.receive_all();
        self.line.close();
        let reason = format!("{}: {lost}", self.place);
        let rank = self.rank;
        let gone = Event::Gone { rank, reason };
        self.inbox.doubt(self.worker, rank, self.node);
        self.inbox.put(self.worker, rank, gone);
    }

    /// Receives until the connection ends; returns the reason.
    fn receive_all(&self) -> ConnectionError {
        let mut told = Instant::now();
        let mut quiet = SilenceTimer::new(told, BEAT);
        loop {
            if told.elapsed() >= BEAT {
                if let Err(broken) = send_message(&*self.line, &ToHost::<ToWorker>::Beat) {
                    return broken;
                }
                told = Instant::now();
            }
            match receive_message::<FromHost>(&*self.line, BEAT) {
                Ok(Some(news)) => {
                    quiet.heard(Instant::now());
                    self.handle_message(news);
                }
                Ok(None) => {
                    if let Some(silence) = quiet.exceeds(SILENCE, Instant::now()) {
                        let silence = silence.as_secs_f64();
                        return ConnectionError::new(format!("no sign of life for {silence:.1} s"));
                    }
                }
                Err(broken) => return broken,
            }
        }
    }

    fn handle_message(&self, news: FromHost) {
        lock(&self.packing).hear(&news);
        if matches!(news, FromHost::Message(FromWorker::Prepared)) {
            return; // not for the instance
        }
        if let Some(event) = news.event(self.rank, &self.place) {
            self.inbox.put(self.worker, self.rank, event);
        }
    }
}

impl Inbox {
    /// Drops the events of a rank's worker; returns the number of the next worker.
    pub(super) fn next_worker(&self, rank: Rank) -> u64 {
        let mut held = lock(&self.state);
        let worker = &mut held.workers[rank.0 as usize];
        *worker += 1;
        let worker = *worker;
        held.events.retain(|(_, event)| event.rank() != rank);
        drop(held);
        self.changed.notify_all();
        worker
    }

    /// Replaces a rank's worker by the one with this number.
    pub(super) fn adopt(&self, rank: Rank, worker: u64) {
        let mut held = lock(&self.state);
        held.workers[rank.0 as usize] = worker;
        held.events.retain(|(_, event)| event.rank() != rank);
    }

    /// Marks a node whose connection broke, unless it was closed because its worker was replaced.
    fn doubt(&self, worker: u64, rank: Rank, node: NodeId) {
        let mut held = lock(&self.state);
        if held.workers[rank.0 as usize] == worker {
            held.doubted.insert(node);
        }
    }

    /// The doubted nodes since the last call, and whether a worker reported a failed epoch.
    pub(super) fn drain_suspects(&self) -> (BTreeSet<NodeId>, bool) {
        let mut held = lock(&self.state);
        let doubted = std::mem::take(&mut held.doubted);
        (doubted, std::mem::take(&mut held.failed))
    }

    /// Queues an event unless its worker was replaced. Waits while the queue is full.
    pub(super) fn put(&self, worker: u64, rank: Rank, event: Event<FromWorker>) {
        let mut held = lock(&self.state);
        while held.workers[rank.0 as usize] == worker && held.events.len() >= HELD_MAX {
            let waited = self.changed.wait(held);
            held = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if held.workers[rank.0 as usize] == worker {
            if let Event::Message {
                message: FromWorker::Failed { blamed, .. },
                ..
            } = &event
            {
                held.failed = true;
                let ranks = held.workers.len();
                let blamed = blamed.filter(|blamed| (*blamed as usize) < ranks);
                let blamed = blamed.map(|blamed| (rank, Rank(blamed)));
                held.blamed.extend(blamed);
            }
            held.events.push_back((worker, event));
        }
        drop(held);
        self.changed.notify_all();
    }

    pub(super) fn take(&self, wait: Duration) -> Option<Event<FromWorker>> {
        let end = Instant::now() + wait;
        let mut held = lock(&self.state);
        loop {
            if let Some((_, event)) = held.events.pop_front() {
                self.changed.notify_all();
                return Some(event);
            }
            let left = end.saturating_duration_since(Instant::now());
            if std::mem::take(&mut held.woken) || left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
