//! Workers that are started again when one of them fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_engine::{Failure, Request, Service, Sink, State, Status, Ticket};
use paceline_node::Instance;

use crate::loaded::Opened;
use crate::output::tell;

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
    instance: Option<Arc<Instance>>,
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
                instance: None,
                generation: 0,
                state: State::Loading,
                since: Instant::now(),
                wait: FIRST_WAIT,
            }),
            restarts: AtomicU64::new(0),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts workers and waits until they are ready.
    ///
    /// # Errors
    /// Which worker failed, and how.
    pub(super) fn start(&self) -> anyhow::Result<()> {
        let instance = Arc::new(self.opened.start_workers()?);
        let weights: Vec<Bytes> = instance.facts().iter().map(|rank| rank.weights).collect();
        self.opened.tell_split(&weights);
        let mut now = self.now();
        now.generation += 1;
        now.state = State::Ready;
        now.instance = Some(instance);
        now.since = Instant::now();
        Ok(())
    }

    /// Looks after the workers: notices that they failed, and starts others when it is time.
    pub(super) fn look(&self) {
        let instance = self.now().instance.clone();
        if let Some(instance) = instance {
            if let State::Failed(reason) = instance.status().state {
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
        let instance = self.now().instance.clone();
        Some(instance?.moved()?.sent)
    }

    /// The workers that there are, and the first of their tickets.
    fn instance(&self) -> Result<(Arc<Instance>, u64), Failure> {
        let now = self.now();
        let first = now.generation * TICKETS;
        let instance = now.instance.clone().map(|instance| (instance, first));
        instance.ok_or_else(|| Failure::Unavailable {
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
        self.wait = if self.instance.is_some() && self.since.elapsed() > LIVED {
            FIRST_WAIT
        } else {
            (self.wait * 2).min(LONGEST_WAIT)
        };
        tell(format_args!(
            "error: {reason}; starting the workers again in {:.1} s",
            self.wait.as_secs_f64()
        ));
        self.state = State::Failed(reason);
        self.instance = None;
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
        let (instance, first) = self.instance()?;
        let Ticket(own) = instance.submit(request, sink)?;
        Ok(Ticket(first + own))
    }

    fn cancel(&self, ticket: Ticket) {
        if let Ok((instance, first)) = self.instance()
            && let Some(own) = ticket.0.checked_sub(first)
        {
            instance.cancel(Ticket(own));
        }
    }

    fn status(&self) -> Status {
        let (instance, state) = {
            let now = self.now();
            (now.instance.clone(), now.state.clone())
        };
        instance.map_or(
            Status {
                state,
                running: 0,
                waiting: 0,
            },
            |instance| instance.status(),
        )
    }
}
