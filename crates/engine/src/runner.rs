//! An engine on a thread of its own, for callers on any thread.
//!
//! ```text
//! callers --submit, cancel, inspect--> inbox --all of it, between two steps--> engine
//!    ^                                                                            |
//!    +------------------------------ sinks, outside of any lock ------------------+
//! ```
//!
//! A request is checked on the caller's thread, before the engine sees it. A request takes a place
//! of [`EngineConfig::max_waiting`](crate::EngineConfig::max_waiting) from
//! [`submit`](Service::submit) on, so the inbox needs no bound of its own.
//!
//! When the engine fails or panics, or the runner is dropped, every request that is open gets
//! [`Failure::Lost`]: nobody waits for ever. The runner measures how long a step takes, by
//! the clock that its owner gives, and tells the engine, which keeps its pace by that.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{Engine, Failure, Request, Service, Sink, Snapshot, Status, Ticket};

mod core;
mod driver;
mod worker;

use driver::Driver;

/// How often an engine without work is given a moment for [`Engine::idle`], unless told otherwise.
/// Costs a wake of some microseconds each time; short beside any deadline of a network.
const IDLE_INTERVAL: Duration = Duration::from_millis(250);

/// The current time, for durations.
pub(crate) type Now = fn() -> Instant;

/// The time at which a runner's last step ended, for sinks: all tokens of a step have the same.
#[derive(Clone, Debug, Default)]
pub struct StepClock(Arc<AtomicU64>);

impl StepClock {
    /// Microseconds from the runner's start to the end of its last step; 0 before the first.
    pub fn last_us(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, since_start: Duration) {
        let us = u64::try_from(since_start.as_micros()).unwrap_or(u64::MAX);
        self.0.store(us, Ordering::Relaxed);
    }
}

/// An engine on its own thread. Dropping it waits for the step that runs and ends the thread.
pub struct Runner {
    driver: Driver<Engine>,
}

impl Runner {
    /// Starts the thread. Should the system refuse one, requests are refused with its reason.
    /// `now` is the clock that measures steps.
    pub fn start(engine: Engine, now: fn() -> Instant) -> Self {
        Self::with_idle(engine, now, IDLE_INTERVAL)
    }

    /// As [`start`](Self::start), with [`Engine::idle`] called at least every `interval` while
    /// there is nothing to compute.
    pub fn with_idle(engine: Engine, now: fn() -> Instant, interval: Duration) -> Self {
        Self {
            driver: Driver::start(engine, now, interval),
        }
    }

    /// Lets `look` see the engine between two steps and returns what it says. Blocks for up to a
    /// step; requests wait while `look` runs.
    ///
    /// # Errors
    /// [`Failure::Unavailable`] when the engine is gone, `look` panics, or the caller is a sink,
    /// which runs on the engine's thread and would wait for itself.
    pub fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Engine) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.driver.inspect(look)
    }

    pub fn clock(&self) -> StepClock {
        self.driver.clock().clone()
    }

    /// Takes every request out between two steps, with the state to go on from elsewhere, in the
    /// order they came in. No reply comes any more to the sinks that they had, which are dropped;
    /// all replies until then were given. Blocks for up to a step.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, Failure> {
        self.driver.take_all()
    }

    /// Goes on with a request that was taken out of a runner of the same model. Errors of a
    /// snapshot come as [`Reply::Failed`](crate::Reply::Failed).
    ///
    /// # Errors
    /// [`Failure::Unavailable`] when the engine is gone.
    pub fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, Failure> {
        self.driver.resume(snapshot, sink)
    }

    /// Goes on with a request of whose answer the caller has `tokens` already. The tokens that
    /// follow are the same as without the interruption. [`Engine::resume`] says how. Errors of the
    /// request come as [`Reply::Failed`](crate::Reply::Failed).
    ///
    /// # Errors
    /// [`Failure::Unavailable`] when the engine is gone.
    pub fn resume_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure> {
        self.driver.resume_after(request, tokens, sink)
    }
}

impl Service for Runner {
    fn submit(&self, request: Request, sink: Sink) -> Result<Ticket, Failure> {
        self.driver.submit(request, sink)
    }

    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure> {
        match tokens.is_empty() {
            true => self.driver.submit(request, sink),
            false => self.driver.resume_after(request, tokens, sink),
        }
    }

    fn cancel(&self, ticket: Ticket) {
        self.driver.cancel(ticket);
    }

    fn status(&self) -> Status {
        self.driver.status()
    }
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
