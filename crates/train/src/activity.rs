//! Finds a rank whose computation hangs: a device may hang while the process sends heartbeats, and
//! all other ranks of the group wait for it.
//!
//! A rank computes and waits for others in turn ([`Activity`]). Its watch thread measures what it
//! computes between two waits. After one whole step it knows the usual time of steps, and after one
//! evaluation that of evaluations. It tells the parent when a computation takes [`TIMES`] times the
//! longest of its kind before it. The parent ends the process, so
//! the others' connections close, and the group is formed again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::stage::LeafSet;

/// Shortest limit: other programs or the disk may hold a small model's step for seconds.
pub(crate) const FLOOR_S: f64 = 30.0;

/// Limit as a multiple of the longest computation of before. Rows differ by as much as 4 in their
/// length, and a busy machine takes twice its time.
pub(crate) const TIMES: f64 = 10.0;

/// Interval of the watch thread's looks. A longer one is a suspension of this process.
const LOOK: Duration = Duration::from_millis(500);

/// Whether a rank computes. The number is odd while it does, and grows with each change.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    changes: AtomicU64,
    /// Whether it evaluates.
    is_valid: AtomicBool,
    /// Whether a whole step, and a whole evaluation, was measured.
    is_measured: [AtomicBool; 2],
    /// Microseconds of waits since the last question.
    waited_us: AtomicU64,
}

impl Activity {
    /// Runs `work`, a step or an evaluation, which computes but for its calls of
    /// [`wait`](Self::wait).
    pub(crate) fn compute<T, E>(
        &self,
        set: LeafSet,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let is_valid = set == LeafSet::Valid;
        self.is_valid.store(is_valid, Ordering::Relaxed);
        let done = self.between(work)?;
        self.is_measured[usize::from(is_valid)].store(true, Ordering::Relaxed);
        Ok(done)
    }

    /// Counts a wait.
    pub(crate) fn waited(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.waited_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Seconds of all waits since the last call.
    pub(crate) fn take_waited_s(&self) -> f64 {
        self.waited_us.swap(0, Ordering::Relaxed) as f64 / 1e6
    }

    /// Waits for other ranks by `work`.
    pub(crate) fn wait<T>(&self, work: impl FnOnce() -> T) -> T {
        self.between(work)
    }

    /// Runs `work` between two changes.
    fn between<T>(&self, work: impl FnOnce() -> T) -> T {
        self.changes.fetch_add(1, Ordering::Relaxed);
        let done = work();
        self.changes.fetch_add(1, Ordering::Relaxed);
        done
    }

    /// Starts the watch thread, which lives as long as the process. It calls `tell` once with the
    /// limit in seconds that a computation has exceeded.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn watch(
        self: &Arc<Self>,
        tell: impl FnOnce(f64) + Send + 'static,
    ) -> std::io::Result<()> {
        let own = Arc::clone(self);
        let run = move || {
            let mut times = [Times::default(), Times::default()];
            let limit_s = loop {
                std::thread::sleep(LOOK);
                let changes = own.changes.load(Ordering::Relaxed);
                let kind = usize::from(own.is_valid.load(Ordering::Relaxed));
                let is_measured = own.is_measured[kind].load(Ordering::Relaxed);
                if let Some(limit_s) = times[kind].look(changes, is_measured) {
                    break limit_s;
                }
            };
            tell(limit_s);
        };
        let thread = std::thread::Builder::new().name("activity".to_owned());
        thread.spawn(run).map(drop)
    }
}

/// Times of computations of a kind, as far as looks see them.
#[derive(Debug, Default)]
struct Times {
    changes: u64,
    /// Seconds of the computation under way, and of the longest before it.
    now_s: f64,
    longest_s: f64,
}

impl Times {
    /// Looks once. Gives the limit if the computation under way has exceeded it.
    fn look(&mut self, changes: u64, is_measured: bool) -> Option<f64> {
        if changes != self.changes || changes.is_multiple_of(2) {
            self.longest_s = self.longest_s.max(self.now_s);
            (self.changes, self.now_s) = (changes, 0.0);
            return None;
        }
        self.now_s += LOOK.as_secs_f64();
        let limit_s = (TIMES * self.longest_s).max(FLOOR_S);
        (is_measured && self.now_s > limit_s).then_some(limit_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds after which a computation without an end is reported.
    fn told(times: &mut Times, is_measured: bool) -> Option<f64> {
        let looks = (1..1000).map(|look| f64::from(look) * LOOK.as_secs_f64());
        let mut over = looks.filter(|_| times.look(7, is_measured).is_some());
        over.next()
    }

    #[test]
    fn a_computation_has_a_multiple_of_the_longest_before_it() {
        assert_eq!(told(&mut Times::default(), false), None, "no step was done");
        let mut times = Times::default();
        for _ in 0..9 {
            times.look(3, true); // 4 s, then a wait
        }
        times.look(4, true);
        assert_eq!(told(&mut times, true), Some(41.0));
        assert_eq!(told(&mut Times::default(), true), Some(31.0), "the floor");
        let mut waits = Times::default();
        assert!((0..1000).all(|_| waits.look(8, true).is_none()), "a wait");
        let activity = Activity::default();
        let seen = || activity.changes.load(Ordering::Relaxed) % 2;
        let work = || Ok::<_, ()>((seen(), activity.wait(seen), seen()));
        assert_eq!(activity.compute(LeafSet::Train, work), Ok((1, 0, 1)));
        assert_eq!(seen(), 0);
    }
}
