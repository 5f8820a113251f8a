//! Elapsed time without the observer's own suspension.

use std::time::{Duration, Instant};

/// Accumulates the time in which its owner was awake. The owner calls [`look`](Self::look) at least
/// every `most`.
///
/// An absence of the owner adds at most `most`, whether it was suspended, asleep with its machine
/// or without a core. Peers may have been suspended too, and their messages arrive later. So no
/// peer times out because of the owner's own absence. `AwakeTime` reads no clock: the caller passes
/// the time.
#[derive(Clone, Copy, Debug)]
pub struct AwakeTime {
    looked: Instant,
    most: Duration,
    total: Duration,
}

impl AwakeTime {
    /// Starts at `now`; `most` is the longest interval between two calls of an awake owner.
    pub fn new(now: Instant, most: Duration) -> Self {
        Self {
            looked: now,
            most,
            total: Duration::ZERO,
        }
    }

    /// Advances to `now`; call it before reading the messages that arrived until now. Returns the
    /// time awake since the last call.
    pub fn tick(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.looked).min(self.most);
        self.looked = now;
        self.total += passed;
        passed
    }

    /// Time awake between the start and the last call.
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
        let mut awake = AwakeTime::new(start, most);
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
            let passed = awake.tick(start + Duration::from_millis(at_ms));
            assert_eq!(passed, Duration::from_millis(passed_ms), "at {at_ms} ms");
            let total = Duration::from_millis(total_ms);
            assert_eq!(awake.total(), total, "at {at_ms} ms");
        }
        let before = awake.total();
        assert_eq!(awake.tick(start), Duration::ZERO, "a clock that goes back");
        assert_eq!(awake.total(), before);
    }
}
