//! The caller's clock.

use std::time::Instant;

/// The time source; the crate reads no clock of its own.
#[derive(Clone, Copy, Debug)]
pub struct TimeSource {
    /// For intervals.
    pub now: fn() -> Instant,
    /// Seconds since 1970, UTC.
    pub unix_s: fn() -> u64,
}
