//! Runs an engine on its own thread, for callers on any thread.
//!
//! ```text
//! callers --submit, cancel, inspect--> inbox --all of it, between two steps--> engine
//!    ^                                                                            |
//!    +------------------------------ sinks, outside of any lock ------------------+
//! ```
//!
//! A request is checked on the caller's thread, before the engine sees it. It occupies a place of
//! [`EngineConfig::max_waiting`](crate::EngineConfig::max_waiting) from [`submit`](Service::submit)
//! on, so the inbox needs no bound of its own.
//!
//! If the engine fails or panics, or the runner is dropped, every open request gets
//! [`RequestFailure::Lost`]; none waits forever. The runner measures step times with the owner's
//! clock and reports them to the engine for its prefill token budget.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use paceline_model::{Split, numbers_name};

use crate::{Engine, RequestFailure, Service, ServiceStatus, Sink, Snapshot, Submission, Ticket};

mod core;
mod driver;
mod worker;

use driver::Driver;

/// Default interval of [`Engine::idle`] calls on an idle engine. Each costs a wake-up of some
/// microseconds; short against network deadlines.
const IDLE_INTERVAL: Duration = Duration::from_millis(250);

/// Monotonic clock for durations.
pub(crate) type Now = fn() -> Instant;

/// End time of a runner's last step, for sinks: all tokens of a step share it.
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

/// An engine on its own thread. Dropping it waits for the current step and ends the thread.
pub struct Runner {
    driver: Driver<Engine>,
    /// See [`Service::numbers`].
    numbers: Option<String>,
}

impl Runner {
    /// Starts the thread. If the system refuses one, requests are refused with its reason. `now` is
    /// the clock for step times.
    pub fn start(engine: Engine, now: fn() -> Instant) -> Self {
        Self::with_idle(engine, now, IDLE_INTERVAL)
    }

    /// As [`start`](Self::start), with [`Engine::idle`] called at least every `interval` on an idle
    /// engine.
    pub fn with_idle(engine: Engine, now: fn() -> Instant, interval: Duration) -> Self {
        let model = engine.model();
        let whole = Split::whole(model.config());
        Self {
            numbers: numbers_name(&whole, &[(model.class(), &model.device())]),
            driver: Driver::start(engine, now, interval),
        }
    }

    /// Calls `look` with the engine between two steps and returns its result. Blocks for up to a
    /// step; requests wait while `look` runs.
    ///
    /// # Errors
    /// [`RequestFailure::Unavailable`] if the engine is gone, `look` panics, or the caller is a
    /// sink: sinks run on the engine's thread and would deadlock.
    pub fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Engine) -> T + Send + 'static,
    ) -> Result<T, RequestFailure> {
        self.driver.inspect(look)
    }

    pub fn clock(&self) -> StepClock {
        self.driver.clock().clone()
    }

    /// Removes all requests between two steps and returns their snapshots, in order of arrival. All
    /// replies so far have been delivered; the sinks are dropped without further replies. Blocks
    /// for up to a step.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, RequestFailure> {
        self.driver.take_all()
    }

    /// Continues a snapshot taken from a runner of the same model. Errors of the snapshot arrive as
    /// [`Reply::Failed`](crate::Reply::Failed).
    ///
    /// # Errors
    /// [`RequestFailure::Unavailable`] if the engine is gone.
    pub fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, RequestFailure> {
        self.driver.resume(snapshot, sink)
    }
}

impl Service for Runner {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        self.driver.accept(submission, sink)
    }

    fn cancel(&self, ticket: Ticket) {
        self.driver.cancel(ticket);
    }

    fn status(&self) -> ServiceStatus {
        self.driver.status()
    }

    fn numbers(&self) -> Option<String> {
        self.numbers.clone()
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
