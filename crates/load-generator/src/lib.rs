//! Load generator for OpenAI-compatible APIs: latency, throughput and goodput.
//!
//! ```text
//! Load --jobs (drawn by seed)--> closed loop: N clients, each asks again when it has its answer
//!                           \--> Poisson: requests at random times, independent of the others
//! Outcome of each request --> Report: time to first token, gaps, throughput, goodput, errors
//! ```
//!
//! The client uses only streamed `POST /v1/chat/completions`, so that other servers are measured by
//! the same program. A request is one blocking thread; at most [`IN_FLIGHT_MAX`] run.
//!
//! Prompts are random English words from a seed, so no prompt shares a prefix with another unless
//! [`LoadProfile::shared_prefix`] asks for it. A word is about one token; the report counts tokens
//! as the server does.

mod client;
mod jobs;
mod output;
mod report;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use client::{LoadClient, LoadOutcome};
use jobs::TimedRequest;

pub use client::parse;
pub use client::{PredictedSpeed, TargetServer, trust};
pub use jobs::{RequestLengths, TokenRange};
pub use output::{object, table};
pub use report::{GoodputLimits, LatencySummary, Report};

/// Maximum requests in flight: each is a thread and a connection. Further ones count as errors in
/// the report.
pub const IN_FLIGHT_MAX: usize = 512;

/// Interval of checks for cancellation.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why a run cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no answer from {url}: {reason}")]
    NoServer { url: String, reason: String },
    #[error("{url} lists no model")]
    NoModel { url: String },
    /// Not a number of tokens or a range of them.
    #[error("length is {got:?}, expected N or A..B, from 1 to {most}")]
    Length { got: String, most: u32 },
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
    /// Concurrent clients; each sends the next request when its response is complete.
    Closed {
        /// 1 to [`IN_FLIGHT_MAX`].
        clients: usize,
    },
    /// At random times, independent of each other and of responses.
    Poisson {
        /// Requests a second, on average; above 0.
        per_s: f64,
    },
}

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct LoadProfile {
    pub server: TargetServer,
    pub arrivals: Arrivals,
    pub requests: usize,
    /// Lengths of prompts and responses.
    pub lengths: RequestLengths,
    /// Length of the common prefix of all prompts, in words.
    pub shared_prefix: u32,
    /// Sets `ignore_eos`, so that responses reach their length. Not all servers support it.
    pub ignore_eos: bool,
    /// Seed of prompts, lengths and arrivals.
    pub seed: u64,
    pub goals: GoodputLimits,
    pub timeout: Duration,
}

/// Runs `load` and returns when all requests have ended, or soon after `is_cancelled`. A cancelled
/// run sends no more requests, and abandons those in flight to the end of the process. `now` is the
/// clock.
pub fn run(
    load: &LoadProfile,
    now: fn() -> Instant,
    is_cancelled: &(dyn Fn() -> bool + Sync),
) -> Report {
    let jobs = jobs::draw(load);
    let run = LoadRun {
        client: LoadClient::new(load, now),
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

struct LoadRun<'a> {
    client: LoadClient<'a>,
    now: fn() -> Instant,
    is_cancelled: &'a (dyn Fn() -> bool + Sync),
    outcomes: Mutex<Vec<LoadOutcome>>,
}

impl LoadRun<'_> {
    fn closed(&self, jobs: &[TimedRequest], clients: usize) {
        let next = AtomicUsize::new(0);
        let client = || {
            while !(self.is_cancelled)() {
                let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    return;
                };
                self.record(self.client.send(job));
            }
        };
        thread::scope(|scope| {
            for _ in 0..clients.clamp(1, IN_FLIGHT_MAX) {
                scope.spawn(client);
            }
        });
    }

    fn open(&self, jobs: &[TimedRequest], began: Instant) {
        let in_flight = AtomicUsize::new(0);
        thread::scope(|scope| {
            for job in jobs {
                if !self.wait_until(began + job.at) {
                    return;
                }
                if in_flight.load(Ordering::Relaxed) >= IN_FLIGHT_MAX {
                    let reason = format!("not sent: {IN_FLIGHT_MAX} requests are under way");
                    self.record(Err(reason));
                    continue;
                }
                in_flight.fetch_add(1, Ordering::Relaxed);
                scope.spawn(|| {
                    self.record(self.client.send(job));
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

    fn record(&self, outcome: LoadOutcome) {
        let outcomes = self.outcomes.lock();
        let mut outcomes = outcomes.unwrap_or_else(std::sync::PoisonError::into_inner);
        outcomes.push(outcome);
    }
}
