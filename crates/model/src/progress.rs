//! Progress counters of a rank within a step, for a watchdog that detects hung kernels and drivers.
//!
//! The computing threads count every layer and every exchange; the watchdog thread polls the
//! counters. A rank that is computing without counting hangs in a kernel or a driver. A rank that
//! waits for another rank does not hang: the groups detect the other rank.
//!
//! A step of many rows runs as two [halves](crate::step::halves) on two threads. The rank counts as
//! computing while at least one half computes. It counts as waiting only while every running half
//! is in an exchange, or waits for its turn.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepActivity {
    Nothing,
    Computing,
    /// It waits for other ranks.
    Exchanging,
}

/// A rank's counters at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// Layers and exchanges so far.
    pub count: u64,
    pub activity: StepActivity,
    /// Layer of the model, counted from 0.
    pub layer: u32,
    /// Rows of the step.
    pub rows: u32,
}

/// Counts layers and exchanges. Cost: some nanoseconds each.
#[derive(Debug, Default)]
pub struct StepProgress {
    /// All counts share one word, so that one load sees one moment. From the lowest bits: open
    /// exchanges, running halves and steps (0 or 1), of [`FIELD_BITS`] each, then the count.
    word: AtomicU64,
    /// The layer in the upper half, the rows in the lower.
    place: AtomicU64,
    /// Recent maximum of nanoseconds per layer and row, exchanges included; 0 before the first
    /// step.
    row_ns: AtomicU64,
    /// Nanoseconds within exchanges.
    waited_ns: AtomicU64,
    /// Of steps of few rows: nanoseconds that they took, exchanges left out, and their number.
    busy_ns: AtomicU64,
    busy_steps: AtomicU64,
    /// See [`halt`](Self::halt).
    halted: AtomicBool,
}

/// Time that steps of a few rows, which decode, computed for since the rank was linked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeTime {
    /// Nanoseconds without exchanges.
    pub ns: u64,
    pub steps: u64,
}

/// Maximum rows of a step that counts for [`ComputeTime`]: such steps read all weights and run as
/// one half.
const FEW_ROWS: usize = 8;

/// Bits of a field of the word. At most two halves run, with one exchange each.
const FIELD_BITS: u32 = 4;

const FIELD: u64 = (1 << FIELD_BITS) - 1;

/// Increments of the fields of the word.
const EXCHANGE: u64 = 1;
const HALF: u64 = 1 << FIELD_BITS;
const STEP: u64 = 1 << (2 * FIELD_BITS);
const COUNT: u64 = 1 << (3 * FIELD_BITS);

impl StepProgress {
    /// Reads the counters.
    pub fn snapshot(&self) -> ProgressSnapshot {
        let (word, place) = (
            self.word.load(Ordering::Relaxed),
            self.place.load(Ordering::Relaxed),
        );
        ProgressSnapshot {
            count: word / COUNT,
            activity: doing(word),
            layer: (place >> 32) as u32,
            rows: place as u32,
        }
    }

    /// Recent maximum of the time per layer and row; `None` before the first step.
    pub fn row_time(&self) -> Option<Duration> {
        match self.row_ns.load(Ordering::Relaxed) {
            0 => None,
            ns => Some(Duration::from_nanos(ns)),
        }
    }

    /// Compute time so far.
    pub fn busy(&self) -> ComputeTime {
        ComputeTime {
            ns: self.busy_ns.load(Ordering::Relaxed),
            steps: self.busy_steps.load(Ordering::Relaxed),
        }
    }

    /// Fault injection: the rank hangs within the next layer until its process ends, as in a kernel
    /// or a driver. For tests of the watchdog.
    pub fn halt(&self) {
        self.halted.store(true, Ordering::Relaxed);
    }

    /// Counts one event and opens a `field`.
    fn open(&self, field: u64) -> ProgressGuard<'_> {
        self.word.fetch_add(COUNT + field, Ordering::Relaxed);
        ProgressGuard {
            progress: self,
            field,
            begun: None,
        }
    }

    /// Starts a step of `rows` rows through `layers` layers, until the guard is dropped.
    pub(crate) fn step(&self, rows: usize, layers: usize) -> StepGuard<'_> {
        self.place.store(rows as u64, Ordering::Relaxed);
        StepGuard {
            open: self.open(STEP),
            begun: Instant::now(),
            parts: (rows * layers).max(1) as u64,
            waited_ns: (rows <= FEW_ROWS).then(|| self.waited_ns.load(Ordering::Relaxed)),
        }
    }

    /// Starts a half of the step, or a step that is not divided, until the guard is dropped. A half
    /// that waits for its first turn does not run yet.
    pub(crate) fn half(&self) -> ProgressGuard<'_> {
        self.open(HALF)
    }

    /// Counts the start of layer `index`.
    pub(crate) fn enter(&self, index: usize) {
        let rows = self.place.load(Ordering::Relaxed) as u32;
        let place = (index as u64) << 32 | u64::from(rows);
        self.place.store(place, Ordering::Relaxed);
        self.word.fetch_add(COUNT, Ordering::Relaxed);
        while self.halted.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Starts an exchange of this half, or its wait for a turn, until the guard is dropped. A half
    /// has at most one open: a second would count as the other half's.
    pub(crate) fn exchange(&self) -> ProgressGuard<'_> {
        let mut open = self.open(EXCHANGE);
        open.begun = Some(Instant::now());
        open
    }
}

const fn doing(word: u64) -> StepActivity {
    let exchanges = word & FIELD;
    let halves = (word / HALF) & FIELD;
    let steps = (word / STEP) & FIELD;
    if exchanges > 0 && exchanges >= halves {
        StepActivity::Exchanging
    } else if steps > 0 {
        StepActivity::Computing
    } else {
        StepActivity::Nothing
    }
}

/// Guard of an open step, half or exchange.
#[derive(Debug)]
pub(crate) struct ProgressGuard<'p> {
    progress: &'p StepProgress,
    field: u64,
    /// Start of an exchange.
    begun: Option<Instant>,
}

impl Drop for ProgressGuard<'_> {
    fn drop(&mut self) {
        let change = COUNT - self.field;
        self.progress.word.fetch_add(change, Ordering::Relaxed);
        if let Some(begun) = self.begun {
            let waited = begun.elapsed().as_nanos() as u64;
            self.progress.waited_ns.fetch_add(waited, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
pub(crate) struct StepGuard<'p> {
    open: ProgressGuard<'p>,
    begun: Instant,
    /// Layers times rows.
    parts: u64,
    /// Total exchange time at its start; `None` if the step does not count for [`ComputeTime`].
    waited_ns: Option<u64>,
}

impl Drop for StepGuard<'_> {
    fn drop(&mut self) {
        let progress = self.open.progress;
        let row_ns = &progress.row_ns;
        let elapsed = self.begun.elapsed().as_nanos() as u64;
        if let Some(before) = self.waited_ns {
            let waited = progress.waited_ns.load(Ordering::Relaxed) - before;
            let busy = elapsed.saturating_sub(waited);
            progress.busy_ns.fetch_add(busy, Ordering::Relaxed);
            progress.busy_steps.fetch_add(1, Ordering::Relaxed);
        }
        let took = elapsed / self.parts;
        let old = row_ns.load(Ordering::Relaxed);
        // The maximum decays: some dozens of faster steps replace a slow one.
        let most = took.max(old - old / 64).max(1);
        row_ns.store(most, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_exchanges_are_counted_and_a_step_has_an_end() {
        let progress = StepProgress::default();
        let seen = |progress: &StepProgress| {
            let place = progress.snapshot();
            (place.count, place.activity, place.layer)
        };
        assert_eq!(seen(&progress), (0, StepActivity::Nothing, 0));
        drop(progress.exchange());
        assert_eq!(
            seen(&progress),
            (2, StepActivity::Nothing, 0),
            "between steps"
        );
        assert_eq!(progress.row_time(), None);
        let step = progress.step(7, 2);
        progress.enter(3);
        assert_eq!(seen(&progress), (4, StepActivity::Computing, 3));
        assert_eq!(progress.snapshot().rows, 7);
        let exchange = progress.exchange();
        assert_eq!(seen(&progress), (5, StepActivity::Exchanging, 3));
        drop(exchange);
        assert_eq!(seen(&progress), (6, StepActivity::Computing, 3));
        drop(step);
        assert_eq!(seen(&progress), (7, StepActivity::Nothing, 3));
        assert!(progress.row_time().is_some());
    }

    #[test]
    fn exchanges_are_no_time_of_computing() {
        let progress = StepProgress::default();
        let begun = Instant::now();
        let step = progress.step(1, 2);
        let exchange = progress.exchange();
        let waits = Instant::now();
        while waits.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        drop(exchange);
        drop(step);
        let (busy, took) = (progress.busy(), begun.elapsed());
        assert_eq!(busy.steps, 1);
        let waited = took.saturating_sub(Duration::from_nanos(busy.ns));
        assert!(
            waited >= Duration::from_millis(20),
            "{waited:?} of {took:?}"
        );
        drop(progress.step(FEW_ROWS + 1, 2));
        assert_eq!(progress.busy(), busy, "a prompt does not count");
    }

    #[test]
    fn two_halves_compute_while_one_of_them_does() {
        let progress = StepProgress::default();
        let doing = || progress.snapshot().activity;
        let step = progress.step(7, 2);
        let first = progress.half();
        let first_exchanges = progress.exchange();
        assert_eq!(
            doing(),
            StepActivity::Exchanging,
            "the second waits for a turn"
        );
        let second = progress.half();
        let before = progress.snapshot().count;
        progress.enter(3);
        assert_eq!(doing(), StepActivity::Computing, "the second, in its layer");
        assert_eq!(progress.snapshot().count, before + 1);
        let second_waits = progress.exchange();
        assert_eq!(doing(), StepActivity::Exchanging, "nobody computes");
        drop(first_exchanges);
        assert_eq!(doing(), StepActivity::Computing, "the first continues");
        drop(first);
        assert_eq!(doing(), StepActivity::Exchanging, "one half is left");
        drop((second_waits, second));
        assert_eq!(doing(), StepActivity::Computing, "the step has not ended");
        drop(step);
        assert_eq!(doing(), StepActivity::Nothing);
    }
}
