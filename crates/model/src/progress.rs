//! Where a rank is in a step, for whoever watches that it goes on.
//!
//! The thread that computes counts every layer and every exchange; another thread looks. A rank
//! that computes and counts nothing hangs in a kernel or a driver. One that waits for another rank
//! does not: that one hangs, or is found silent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Activity of a rank at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It waits for the next step.
    Nothing,
    /// It computes a layer.
    Computing,
    /// It waits for other ranks.
    Exchanging,
}

/// Where a rank was at a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Layers and exchanges so far.
    pub count: u64,
    /// The rank's activity.
    pub doing: Doing,
    /// Layer of the model, counted from 0.
    pub layer: u32,
    /// Rows of the step.
    pub rows: u32,
}

/// Counts layers and exchanges. Cost: some nanoseconds each.
#[derive(Debug, Default)]
pub struct Progress {
    /// The count, and in the lowest two bits what is done.
    word: AtomicU64,
    /// The layer, and in the lower half the rows.
    place: AtomicU64,
    /// Nanoseconds of a layer for each row, exchanges included: the most of late; 0 before the
    /// first step.
    row_ns: AtomicU64,
}

const NOTHING: u64 = 0;
const COMPUTING: u64 = 1;
const EXCHANGING: u64 = 2;

impl Progress {
    /// Where it is.
    pub fn look(&self) -> Place {
        let (word, place) = (
            self.word.load(Ordering::Relaxed),
            self.place.load(Ordering::Relaxed),
        );
        Place {
            count: word >> 2,
            doing: match word & 3 {
                COMPUTING => Doing::Computing,
                EXCHANGING => Doing::Exchanging,
                _ => Doing::Nothing,
            },
            layer: (place >> 32) as u32,
            rows: place as u32,
        }
    }

    /// How long a layer takes for each row of a step, at most, as the last steps did; `None` before
    /// the first.
    pub fn row_time(&self) -> Option<Duration> {
        match self.row_ns.load(Ordering::Relaxed) {
            0 => None,
            ns => Some(Duration::from_nanos(ns)),
        }
    }

    fn note(&self, doing: u64) {
        let next = |word: u64| Some((word & !3).wrapping_add(4) | doing);
        let _ = self
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next); // it always has one
    }

    /// A step of `rows` rows through `layers` layers begins; it ends when the result is dropped.
    pub(crate) fn step(&self, rows: usize, layers: usize) -> Stepping<'_> {
        self.place.store(rows as u64, Ordering::Relaxed);
        self.note(COMPUTING);
        Stepping {
            progress: self,
            begun: Instant::now(),
            parts: (rows * layers).max(1) as u64,
        }
    }

    /// Layer `index` begins.
    pub(crate) fn enter(&self, index: usize) {
        let rows = self.place.load(Ordering::Relaxed) as u32;
        let place = (index as u64) << 32 | u64::from(rows);
        self.place.store(place, Ordering::Relaxed);
        self.note(COMPUTING);
    }

    /// An exchange begins; it ends when the result is dropped.
    pub(crate) fn exchange(&self) -> Exchanging<'_> {
        let before = self.word.load(Ordering::Relaxed) & 3;
        self.note(EXCHANGING);
        Exchanging {
            progress: self,
            before,
        }
    }
}

/// A step under way.
#[derive(Debug)]
pub(crate) struct Stepping<'p> {
    progress: &'p Progress,
    begun: Instant,
    /// Layers times rows.
    parts: u64,
}

impl Drop for Stepping<'_> {
    fn drop(&mut self) {
        let took = self.begun.elapsed().as_nanos() as u64 / self.parts;
        let old = self.progress.row_ns.load(Ordering::Relaxed);
        // Slow steps are forgotten over some dozens of faster ones.
        let most = took.max(old - old / 64).max(1);
        self.progress.row_ns.store(most, Ordering::Relaxed);
        self.progress.note(NOTHING);
    }
}

/// An exchange under way.
#[derive(Debug)]
pub(crate) struct Exchanging<'p> {
    progress: &'p Progress,
    before: u64,
}

impl Drop for Exchanging<'_> {
    fn drop(&mut self) {
        // Of two halves of a step the other may be exchanging too.
        let before = if self.before == EXCHANGING {
            COMPUTING
        } else {
            self.before
        };
        self.progress.note(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_exchanges_are_counted_and_a_step_has_an_end() {
        let progress = Progress::default();
        let seen = |progress: &Progress| {
            let place = progress.look();
            (place.count, place.doing, place.layer)
        };
        assert_eq!(seen(&progress), (0, Doing::Nothing, 0));
        drop(progress.exchange());
        assert_eq!(seen(&progress), (2, Doing::Nothing, 0), "between steps");
        assert_eq!(progress.row_time(), None);
        let step = progress.step(7, 2);
        progress.enter(3);
        assert_eq!(seen(&progress), (4, Doing::Computing, 3));
        assert_eq!(progress.look().rows, 7);
        let exchange = progress.exchange();
        assert_eq!(seen(&progress), (5, Doing::Exchanging, 3));
        drop(exchange);
        assert_eq!(seen(&progress), (6, Doing::Computing, 3));
        drop(step);
        assert_eq!(seen(&progress), (7, Doing::Nothing, 3));
        assert!(progress.row_time().is_some());
    }
}
