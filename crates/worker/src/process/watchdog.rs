//! Detects a rank that hangs while it computes.
//!
//! A rank counts layers and exchanges. One that computes and counts nothing for [`TIMES`] times
//! what a layer takes, and for [`LEAST`] at least, hangs. Its node ends the worker, and the epoch
//! fails as if the worker had died.

use std::time::{Duration, Instant};

use paceline_base::AwakeTime;
use paceline_model::{ProgressSnapshot, StepActivity, StepProgress};

use super::LOOK_EVERY;
use crate::Error;

/// A layer below this time never counts as a hang.
const LEAST: Duration = Duration::from_secs(2);

/// A layer that takes this multiple of its expected time is a hang.
const TIMES: u32 = 8;

/// Limit before a first step with these weights has given a layer's time. The first step may read
/// pages of the model file from a cold disk.
const FIRST: Duration = Duration::from_secs(30);

/// Watches a rank's progress and reports a hang once.
pub(super) struct Watchdog {
    awake: AwakeTime,
    last: u64,
    /// Time without progress, not counting suspension.
    stalled: Duration,
    told: bool,
    /// Time of a row of a layer in the previous epoch, with the same weights.
    before: Option<Duration>,
}

impl Watchdog {
    /// `before` is the time of a row of a layer in the previous epoch, with the same weights.
    pub(super) fn new(now: Instant, before: Option<Duration>) -> Self {
        Self {
            before,
            awake: AwakeTime::new(now, 2 * LOOK_EVERY),
            last: 0,
            stalled: Duration::ZERO,
            told: false,
        }
    }

    /// Call it about every [`LOOK_EVERY`]. Returns the hang, if there is one.
    pub(super) fn look(&mut self, now: Instant, progress: &StepProgress) -> Option<Error> {
        let place = progress.snapshot();
        self.judge(now, place, self.row_time(progress))
    }

    /// Time of a row of a layer: in this epoch, else in the previous one.
    pub(super) fn row_time(&self, progress: &StepProgress) -> Option<Duration> {
        progress.row_time().or(self.before)
    }

    fn judge(
        &mut self,
        now: Instant,
        place: ProgressSnapshot,
        row_time: Option<Duration>,
    ) -> Option<Error> {
        let passed = self.awake.tick(now);
        if place.activity != StepActivity::Computing || place.count != self.last {
            (self.last, self.stalled) = (place.count, Duration::ZERO);
            return None;
        }
        self.stalled += passed;
        let limit = row_time.map_or(FIRST, |row| (row * place.rows.max(1) * TIMES).max(LEAST));
        if self.stalled <= limit || std::mem::replace(&mut self.told, true) {
            return None;
        }
        Some(Error::Hang {
            layer: place.layer,
            stalled: self.stalled,
            limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(count: u64, doing: StepActivity) -> ProgressSnapshot {
        let (layer, rows) = (3, 10);
        ProgressSnapshot {
            count,
            activity: doing,
            layer,
            rows,
        }
    }

    /// Milliseconds until a hang is reported, with a poll every 100 ms.
    fn told_after(
        row_time: Option<Duration>,
        mut at: impl FnMut(u64) -> ProgressSnapshot,
    ) -> Option<u64> {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(start, None);
        let mut looks = (0..100_000).step_by(100);
        looks.find(|ms| {
            let now = start + Duration::from_millis(*ms);
            watchdog.judge(now, at(*ms), row_time).is_some()
        })
    }

    #[test]
    fn an_epoch_goes_by_the_one_before_until_it_has_a_step() {
        let (before, progress) = (Some(Duration::from_millis(7)), StepProgress::default());
        let row_time = |before| Watchdog::new(Instant::now(), before).row_time(&progress);
        assert_eq!((row_time(before), row_time(None)), (before, None));
    }

    #[test]
    fn only_a_rank_that_computes_and_counts_nothing_hangs() {
        let row = Some(Duration::from_millis(1));
        assert_eq!(
            told_after(row, |_| place(5, StepActivity::Computing)),
            Some(2100)
        );
        assert_eq!(
            told_after(row, |ms| place(ms / 1900, StepActivity::Computing)),
            None
        );
        assert_eq!(
            told_after(row, |_| place(5, StepActivity::Exchanging)),
            None
        );
        assert_eq!(told_after(row, |_| place(5, StepActivity::Nothing)), None);
        // Ten rows of 500 ms in a layer: 40 s are eight times that.
        let slow = Some(Duration::from_millis(500));
        assert_eq!(
            told_after(slow, |_| place(5, StepActivity::Computing)),
            Some(40_100)
        );
        assert_eq!(
            told_after(None, |_| place(5, StepActivity::Computing)),
            Some(30_100)
        );
    }

    #[test]
    fn time_in_which_the_whole_process_slept_hardly_counts() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(start, None);
        let at = |ms| start + Duration::from_millis(ms);
        let row = Some(Duration::from_millis(1));
        for ms in [100, 200, 60_000, 60_100] {
            let judged = watchdog.judge(at(ms), place(5, StepActivity::Computing), row);
            assert!(judged.is_none(), "at {ms}");
        }
    }
}
