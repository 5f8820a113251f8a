//! Load on an API of OpenAI's kind, and how the server answers under it.
//!
//! ```text
//! Load --jobs (drawn by seed)--> closed loop: N clients, each asks again when it has its answer
//!                           \--> Poisson: requests at random times, whatever became of the others
//! Outcome of each request --> Report: time to first token, gaps, throughput, goodput, errors
//! ```
//!
//! The client speaks `POST /v1/chat/completions` as a stream of server-sent events and nothing
//! else, so that other servers are measured by the same program. A request is one thread, which
//! blocks in reads; at most [`IN_FLIGHT_MAX`] are under way.
//!
//! Prompts are random English words from a seed, so no prompt begins like another one unless
//! [`Load::shared_prefix`] says so. A word is about one token; the report has the tokens as the
//! server counts them.

mod client;
mod jobs;
mod report;
mod shown;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use client::{Client, Outcome};
use jobs::Job;

pub(crate) use client::parse;
pub use client::{Predicted, Server, trust};
pub use jobs::{Lengths, Span};
pub use report::{Goals, Report, Times};
pub use shown::{object, table};

/// Requests that are under way at most: each is a thread and a connection. More is an error of the
/// request in the report.
pub const IN_FLIGHT_MAX: usize = 512;

/// Between looks whether the run was cancelled.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why no load can be put on a server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server does not say which model it has.
    #[error("no answer from {url}: {reason}")]
    NoServer {
        /// The URL that was asked.
        url: String,
        /// Why there is no answer.
        reason: String,
    },
    #[error("{url} lists no model")]
    NoModel {
        /// Its list of models.
        url: String,
    },
    /// Not a number of tokens or a range of them.
    #[error("length is {got:?}, expected N or A..B, from 1 to {most}")]
    Length {
        got: String,
        /// The largest number.
        most: u32,
    },
    #[error("line {line} is {got:?}, expected PROMPT OUTPUT, two numbers of tokens")]
    Line {
        /// From 1.
        line: usize,
        got: String,
    },
    #[error("the list of lengths is empty")]
    NoLengths,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// So many clients, each of which asks again as soon as it has its answer.
    Closed {
        /// 1 to [`IN_FLIGHT_MAX`].
        clients: usize,
    },
    /// At random times, independent of each other and of answers.
    Poisson {
        /// Requests a second, on average; above 0.
        per_s: f64,
    },
}

/// The requests to send.
#[derive(Clone, Debug)]
pub struct Load {
    /// Where to.
    pub server: Server,
    /// When.
    pub arrivals: Arrivals,
    /// How many requests.
    pub requests: usize,
    /// How long prompts and answers are.
    pub lengths: Lengths,
    /// Words that all prompts begin with, before their own.
    pub shared_prefix: u32,
    /// Asks the server to go on when the model would end its answer. Not all servers know the
    /// field `ignore_eos`.
    pub ignore_eos: bool,
    /// Decides prompts, lengths and arrivals.
    pub seed: u64,
    /// Which answers are good.
    pub goals: Goals,
    /// Longest time of one request.
    pub timeout: Duration,
}

/// Puts `load` on its server and returns when all requests have ended, or soon after
/// `is_cancelled`. No more requests are sent then, and those under way are given up with their
/// process. `now` is the clock.
pub fn run(load: &Load, now: fn() -> Instant, is_cancelled: &(dyn Fn() -> bool + Sync)) -> Report {
    let jobs = jobs::draw(load);
    let run = Run {
        client: Client::new(load, now),
        now,
        is_cancelled,
        outcomes: Mutex::default(),
    };
    let began = now();
    match load.arrivals {
        Arrivals::Closed { clients } => run.closed(&jobs, clients),
        Arrivals::Poisson { .. } => run.open(&jobs, began),
    }
    let outcomes = run.outcomes.into_inner();
    let outcomes = outcomes.unwrap_or_else(std::sync::PoisonError::into_inner);
    Report::of(&outcomes, now().duration_since(began), load.goals)
}

/// A run under way.
struct Run<'a> {
    client: Client<'a>,
    now: fn() -> Instant,
    is_cancelled: &'a (dyn Fn() -> bool + Sync),
    outcomes: Mutex<Vec<Outcome>>,
}

impl Run<'_> {
    fn closed(&self, jobs: &[Job], clients: usize) {
        let next = AtomicUsize::new(0);
        let client = || {
            while !(self.is_cancelled)() {
                let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    return;
                };
                self.keep(self.client.send(job));
            }
        };
        thread::scope(|scope| {
            for _ in 0..clients.clamp(1, IN_FLIGHT_MAX) {
                scope.spawn(client);
            }
        });
    }

    fn open(&self, jobs: &[Job], began: Instant) {
        let in_flight = AtomicUsize::new(0);
        thread::scope(|scope| {
            for job in jobs {
                if !self.wait_until(began + job.at) {
                    return;
                }
                if in_flight.load(Ordering::Relaxed) >= IN_FLIGHT_MAX {
                    let reason = format!("not sent: {IN_FLIGHT_MAX} requests are under way");
                    self.keep(Err(reason));
                    continue;
                }
                in_flight.fetch_add(1, Ordering::Relaxed);
                scope.spawn(|| {
                    self.keep(self.client.send(job));
                    in_flight.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
    }

    /// Sleeps until `at`; `false` when the run was cancelled.
    fn wait_until(&self, at: Instant) -> bool {
        loop {
            if (self.is_cancelled)() {
                return false;
            }
            let left = at.saturating_duration_since((self.now)());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
    }

    fn keep(&self, outcome: Outcome) {
        let outcomes = self.outcomes.lock();
        let mut outcomes = outcomes.unwrap_or_else(std::sync::PoisonError::into_inner);
        outcomes.push(outcome);
    }
}
