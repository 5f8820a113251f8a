//! The instant at which a call fails.

use std::time::{Duration, Instant};

/// The instant after which a call that still waits fails.
///
/// The caller takes it from its own clock; there is no default. A deadline in the past is allowed:
/// the call then succeeds only if it need not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Deadline(Instant);

impl Deadline {
    pub const fn at(instant: Instant) -> Self {
        Self(instant)
    }

    /// Time left at `now`; zero once the deadline has passed.
    pub fn left(self, now: Instant) -> Duration {
        self.0.saturating_duration_since(now)
    }

    /// The instant itself.
    pub const fn instant(self) -> Instant {
        self.0
    }
}

/// The clock of waiting ranks: the only place where this crate reads the time.
pub fn now() -> Instant {
    Instant::now()
}
