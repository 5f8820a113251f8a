//! Time decisions without a clock: how long a child was silent, and the stage of stopping.

use std::time::Duration;

/// Measures a child's silence.
///
/// Silence is the time in which the monitor was awake ([`Awake`](paceline_base::Awake)) and
/// received nothing.
#[derive(Debug)]
pub(super) struct SilenceClock {
    limit: Duration,
    silence: Duration,
    accused: bool,
}

impl SilenceClock {
    /// Nothing was received yet; allowed for `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            silence: Duration::ZERO,
            accused: false,
        }
    }

    /// Something was received; from now on silence is allowed for `limit`.
    pub(super) fn heard(&mut self, limit: Duration) {
        *self = Self::new(limit);
    }

    /// No more silence is allowed.
    pub(super) fn run_out(&mut self) {
        self.limit = self.limit.min(self.silence);
    }

    /// Advances the time. Returns the silence when it exceeds the limit, once until something is
    /// received.
    pub(super) fn pass(&mut self, awake: Duration) -> Option<Duration> {
        self.silence += awake;
        if self.accused || self.silence < self.limit {
            return None;
        }
        self.accused = true;
        Some(self.silence)
    }

    /// Whether it is silent for too long.
    pub(super) fn is_accused(&self) -> bool {
        self.accused
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StopStage {
    /// The channels are closed.
    Asked,
    /// SIGTERM was sent.
    Terminated,
    /// SIGKILL was sent.
    Killed,
}

impl StopStage {
    /// The stage that is due some time after the order to stop.
    pub(super) fn due(elapsed: Duration, grace: Duration) -> Self {
        if elapsed >= grace {
            Self::Killed
        } else if elapsed >= grace / 2 {
            Self::Terminated
        } else {
            Self::Asked
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn silence_is_reported_once() {
        let mut clock = SilenceClock::new(ms(100));
        assert_eq!(clock.pass(ms(99)), None);
        assert_eq!(clock.pass(ms(1)), Some(ms(100)));
        assert_eq!(clock.pass(ms(1000)), None);
        assert!(clock.is_accused());
        clock.heard(ms(50));
        assert!(!clock.is_accused());
        assert_eq!(clock.pass(ms(49)), None);
        clock.heard(ms(50));
        assert_eq!(clock.pass(ms(49)), None);
        assert_eq!(clock.pass(ms(2)), Some(ms(51)));
    }

    #[test]
    fn a_clock_that_has_run_out_reports_the_silence_so_far() {
        let mut clock = SilenceClock::new(ms(10_000));
        assert_eq!(clock.pass(ms(1500)), None);
        clock.run_out();
        assert_eq!(clock.pass(ms(50)), Some(ms(1550)));
        assert_eq!(clock.pass(ms(50)), None);
    }

    #[test]
    fn stopping_gets_harder() {
        for (elapsed, grace, stage) in [
            (0, 0, StopStage::Killed),
            (0, 10, StopStage::Asked),
            (4, 10, StopStage::Asked),
            (5, 10, StopStage::Terminated),
            (9, 10, StopStage::Terminated),
            (10, 10, StopStage::Killed),
        ] {
            assert_eq!(
                StopStage::due(ms(elapsed), ms(grace)),
                stage,
                "{elapsed} {grace}"
            );
        }
        let order = [StopStage::Asked, StopStage::Terminated, StopStage::Killed];
        assert!(order.is_sorted());
    }
}
