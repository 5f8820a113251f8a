//! Elapsed time without the observer's own suspension.

use std::time::{Duration, Instant};

/// Counts the time in which its owner, which looks at least so often, was awake.
///
/// An absence of the owner adds only a short time, whether it was suspended, asleep with its
/// machine or without a core. Others may have been away with it, and are heard when they are back.
/// So no peer is accused of the owner's own absence. `Awake` reads no clock: the caller passes the
/// time.
#[derive(Clone, Copy, Debug)]
pub struct Awake {
    looked: Instant,
    most: Duration,
    total: Duration,
}

impl Awake {
    /// From `now` on; `most` is the longest time between two looks of an owner that is awake.
    pub fn new(now: Instant, most: Duration) -> Self {
        Self {
            looked: now,
            most,
            total: Duration::ZERO,
        }
    }

    /// It is `now`, and whatever arrived before is about to be read. Time awake since the look
    /// before.
    pub fn look(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.looked).min(self.most);
        self.looked = now;
        self.total += passed;
        passed
    }

    /// Time awake between the start and the last look.
    pub fn total(&self) -> Duration {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_away_hardly_counts() {
        let (start, most) = (Instant::now(), Duration::from_millis(300));
        let mut awake = Awake::new(start, most);
        for (at_ms, passed_ms, total_ms) in [
            (0, 0, 0),
            (100, 100, 100),
            (101, 1, 101),
            (400, 299, 400),
            (700, 300, 700),
            (4000, 300, 1000),
            (4100, 100, 1100),
            (3_600_000, 300, 1400),
            (3_600_050, 50, 1450),
        ] {
            let passed = awake.look(start + Duration::from_millis(at_ms));
            assert_eq!(passed, Duration::from_millis(passed_ms), "at {at_ms} ms");
            let total = Duration::from_millis(total_ms);
            assert_eq!(awake.total(), total, "at {at_ms} ms");
        }
        let before = awake.total();
        assert_eq!(awake.look(start), Duration::ZERO, "a clock that goes back");
        assert_eq!(awake.total(), before);
    }
}
