//! Workers that are started again when one of them fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use paceline_base::{Bytes, lock};
use paceline_engine::{Failure, Request, Service, Sink, State, Status, Ticket};

use crate::loaded::Opened;
use crate::output::tell;
use crate::steered::Steered;

/// Wait before workers are started again: doubled with each failure, and back to the first once
/// they have lived for [`LIVED`].
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const LIVED: Duration = Duration::from_secs(60);

/// Tickets of one set of workers; more than a set gives out in a lifetime.
const TICKETS: u64 = 1 << 48;

/// A service whose workers are replaced when they fail. Requests that were under way are lost;
/// those that come in between are told to try again.
pub(super) struct Revived {
    opened: Opened,
    now: Mutex<Now>,
    restarts: AtomicU64,
}

/// The workers that there are.
struct Now {
    workers: Option<Arc<Steered>>,
    /// Counts sets of workers, so that a ticket of one never means another's request.
    generation: u64,
    state: State,
    since: Instant,
    wait: Duration,
}

impl Revived {
    /// Nothing is started yet.
    pub(super) fn new(opened: Opened) -> Self {
        Self {
            opened,
            now: Mutex::new(Now {
                workers: None,
                generation: 0,
                state: State::Loading,
                since: Instant::now(),
                wait: FIRST_WAIT,
            }),
            restarts: AtomicU64::new(0),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        lock(&self.now)
    }

    /// Starts workers and waits until they are ready.
    ///
    /// # Errors
    /// Which worker failed, and how.
    pub(super) fn start(&self) -> anyhow::Result<()> {
        let workers = self.opened.start_workers(|change| tell(change.line()))?;
        self.opened.tell_split(&workers);
        if let Some(tok_s) = workers.predicted() {
            tell(format_args!(
                "an answer alone is predicted to get {tok_s:.1} tokens/s"
            ));
        }
        let mut now = self.now();
        now.generation += 1;
        now.state = State::Ready;
        now.workers = Some(Arc::new(workers));
        now.since = Instant::now();
        Ok(())
    }

    /// Looks after the workers: notices that they failed, and starts others when it is time.
    pub(super) fn look(&self) {
        let workers = self.now().workers.clone();
        if let Some(workers) = workers {
            if let State::Failed(reason) = workers.status().state {
                self.now().fail(reason);
            }
            return;
        }
        {
            let mut now = self.now();
            if now.since.elapsed() < now.wait {
                return;
            }
            now.state = State::Loading;
        }
        self.restarts.fetch_add(1, Ordering::Relaxed);
        match self.start() {
            Ok(()) => tell("the workers are ready again"),
            Err(error) => self.now().fail(format!("{error:#}")),
        }
    }

    /// Number of nodes.
    pub(super) fn nodes(&self) -> u32 {
        self.opened.split.ranks()
    }

    /// Times that workers were started again.
    pub(super) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Bytes that the workers have sent to one another.
    pub(super) fn sent(&self) -> Option<Bytes> {
        Some(self.workers()?.moved()?.sent)
    }

    /// Times that the workers that there are changed their split.
    pub(super) fn changes(&self) -> u32 {
        self.workers().map_or(0, |workers| workers.count())
    }

    /// Decode tokens a second of an answer alone: predicted, measured.
    pub(super) fn decode_tok_s(&self) -> [Option<f64>; 2] {
        self.workers().map_or([None; 2], |workers| {
            [workers.predicted(), workers.measured()]
        })
    }

    fn workers(&self) -> Option<Arc<Steered>> {
        self.now().workers.clone()
    }

    /// The workers that there are, and the first of their tickets.
    fn ready(&self) -> Result<(Arc<Steered>, u64), Failure> {
        let now = self.now();
        let first = now.generation * TICKETS;
        let workers = now.workers.clone().map(|workers| (workers, first));
        workers.ok_or_else(|| Failure::Unavailable {
            reason: match &now.state {
                State::Failed(reason) => format!("{reason}; the workers are being started again"),
                _ => "its workers are being started".to_owned(),
            },
        })
    }
}

impl Now {
    /// Gives the workers up until it is time to start others.
    fn fail(&mut self, reason: String) {
        self.wait = if self.workers.is_some() && self.since.elapsed() > LIVED {
            FIRST_WAIT
        } else {
            (self.wait * 2).min(LONGEST_WAIT)
        };
        tell(format_args!(
            "error: {reason}; starting the workers again in {:.1} s",
            self.wait.as_secs_f64()
        ));
        self.state = State::Failed(reason);
        self.workers = None;
        self.since = Instant::now();
    }
}

impl std::fmt::Debug for Revived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "workers of {} ranks", self.nodes())
    }
}

impl Service for Revived {
    fn submit(&self, request: Request, sink: Sink) -> Result<Ticket, Failure> {
        let (workers, first) = self.ready()?;
        let Ticket(own) = workers.submit(request, sink)?;
        Ok(Ticket(first + own))
    }

    fn cancel(&self, ticket: Ticket) {
        if let Ok((workers, first)) = self.ready()
            && let Some(own) = ticket.0.checked_sub(first)
        {
            workers.cancel(Ticket(own));
        }
    }

    fn status(&self) -> Status {
        let (workers, state) = {
            let now = self.now();
            (now.workers.clone(), now.state.clone())
        };
        workers.map_or(
            Status {
                state,
                running: 0,
                waiting: 0,
            },
            |workers| workers.status(),
        )
    }
}
