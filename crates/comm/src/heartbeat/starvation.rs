//! Starvation of this machine, by how late the timers of one of its threads fire.
//!
//! A starved machine also keeps its other processes waiting. So ranks on it may live in silence.

use std::time::{Duration, Instant};

/// Lateness of a starved machine. During a build on both of two cores timers fired up to 4 ms late.
/// With four busy threads a core it was 28 ms (Linux, November 2026).
const STARVED: Duration = Duration::from_millis(50);

/// A longer absence is a suspension, which [`AwakeTime`](paceline_base::AwakeTime) leaves out.
const ABSENT: Duration = Duration::from_secs(1);

/// How long a late timer counts: longer than a limit that it stretches.
const REMEMBERED: Duration = Duration::from_secs(5);

/// Most times that a limit is stretched: a dead rank is still named within some seconds.
const STRETCH_MAX: u32 = 4;

/// Lateness of a thread's timers, and the limits for others' silence by it.
#[derive(Clone, Copy, Debug)]
pub struct Starvation {
    worst: Duration,
    until: Instant,
}

impl Starvation {
    /// No timer was late before `now`.
    pub const fn new(now: Instant) -> Self {
        Self {
            worst: Duration::ZERO,
            until: now,
        }
    }

    /// A timer that was due at `due` fired at `now`.
    pub fn fired(&mut self, due: Instant, now: Instant) {
        if now >= self.until {
            self.worst = Duration::ZERO;
        }
        let late = now.saturating_duration_since(due);
        if (STARVED..ABSENT).contains(&late) && late >= self.worst {
            (self.worst, self.until) = (late, now + REMEMBERED);
        }
    }

    /// `limit`, or a multiple of it while the machine is starved: twice, and once more for each
    /// further [`STARVED`] that a timer was late.
    pub fn stretched(&self, limit: Duration, now: Instant) -> Duration {
        if now >= self.until {
            return limit;
        }
        let more = self.worst.as_millis() / STARVED.as_millis();
        let times = u32::try_from(more).unwrap_or(STRETCH_MAX).saturating_add(1);
        limit * times.min(STRETCH_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_stretch_while_own_timers_are_late() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let limit = Duration::from_millis(1500);
        let mut starved = Starvation::new(start);
        let mut after = |late_ms, now_ms| {
            starved.fired(at(now_ms - late_ms), at(now_ms));
            starved.stretched(limit, at(now_ms)).as_millis()
        };
        assert_eq!(after(0, 100), 1500);
        assert_eq!(after(49, 200), 1500);
        assert_eq!(after(50, 300), 3000);
        assert_eq!(after(30, 400), 3000, "it was starved a moment ago");
        assert_eq!(after(120, 500), 4500);
        assert_eq!(after(999, 1500), 6000);
        assert_eq!(after(0, 6499), 6000);
        assert_eq!(after(0, 6500), 1500, "no longer");
        assert_eq!(after(5000, 12_000), 1500, "asleep");
    }
}
