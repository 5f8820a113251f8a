//! Two halves of a step in turns: while the sums of one are exchanged, the other is computed.
//!
//! ```text
//! first    compute | exchange . . . | compute | exchange . . . |
//! second             compute | exchange . . . | compute | exchange . . .
//! ```
//!
//! Two orders are fixed, whatever the times: which half computes next, and which exchanges next. So
//! all ranks exchange the same in the same order, and the second half finds the keys and values of
//! the first in the cache.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paceline_base::lock;
use paceline_tensor::BLOCK;

use super::{Batch, BatchSequence};
use crate::Error;

/// Rows from which a step is cut in two: halves have a block of the kernels then. A block of a
/// small model (width 576) is some ms of work in each layer. The thread of a half takes some tens
/// of microseconds to start, once in a step.
pub(crate) const HALVES_FROM: usize = 2 * BLOCK;

/// Rows of the first half of `rows`: whole blocks, so that no more blocks are begun than in one.
const fn first_rows(rows: usize) -> usize {
    (rows / 2 + BLOCK / 2) / BLOCK * BLOCK
}

/// The most rows that a second half has in steps of up to `rows`.
pub(crate) const fn most_second_rows(rows: usize) -> usize {
    rows / 2 + BLOCK / 2
}

/// The sequences of both halves of a batch of at least [`HALVES_FROM`] rows.
pub(crate) fn cut<'b>(batch: &Batch<'b>) -> [Vec<BatchSequence<'b>>; 2] {
    let mut left = first_rows(batch.rows());
    let mut halves = [Vec::new(), Vec::new()];
    for &whole in batch.sequences {
        let rows = left.min(whole.tokens.len());
        left -= rows;
        let (first, second) = whole.tokens.split_at(rows);
        let logits = match second.is_empty() {
            true => whole.logits,
            false => whole.logits.before_the_last(),
        };
        let parts = [(first, 0, logits), (second, rows, whole.logits)];
        for (half, (tokens, after, logits)) in halves.iter_mut().zip(parts) {
            half.extend((!tokens.is_empty()).then_some(BatchSequence {
                tokens,
                position: whole.position + after,
                logits,
                ..whole
            }));
        }
    }
    halves
}

/// State that both halves look at.
#[derive(Debug)]
pub(crate) struct Turns {
    /// The longest wait of a half for the other.
    limit: Duration,
    next: Mutex<Next>,
    changed: Condvar,
}

/// Turns are numbered: the first half's are even.
#[derive(Debug, Default)]
struct Next {
    compute: u64,
    exchange: u64,
    /// A half has ended: the other waits for no turn.
    alone: bool,
}

/// A half's place in the order.
#[derive(Debug)]
pub(crate) struct Turn<'t> {
    turns: &'t Turns,
    number: u64,
}

impl Turns {
    /// For two halves, each of which computes and exchanges a part of its step within `limit`.
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            next: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The first half's turn, and the second's.
    pub(crate) fn both(&self) -> [Turn<'_>; 2] {
        [0, 1].map(|number| Turn {
            turns: self,
            number,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Next> {
        lock(&self.next)
    }

    fn change(&self, change: impl FnOnce(&mut Next)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Whether it has `come`, or the other half has ended, before the limit.
    fn wait(&self, come: impl Fn(&Next) -> bool) -> bool {
        let early = |next: &mut Next| !(next.alone || come(next));
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), self.limit, early);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Turn<'_> {
    fn wait(&self, come: impl Fn(&Next) -> bool) -> Result<(), Error> {
        if self.turns.wait(come) {
            return Ok(());
        }
        let (limit, is_first) = (self.turns.limit, self.number.is_multiple_of(2));
        let half = if is_first { "second" } else { "first" };
        Err(Error::HalfLate { half, limit })
    }

    /// Waits until this half is to compute.
    ///
    /// # Errors
    /// [`Error::HalfLate`].
    pub(crate) fn begin(&self) -> Result<(), Error> {
        self.wait(|next| next.compute == self.number)
    }

    /// Lets the other half compute, exchanges when it is this half's turn to, and waits until it is
    /// to compute again.
    ///
    /// # Errors
    /// [`Error::HalfLate`]; that of `exchange`.
    pub(crate) fn exchange<R>(
        &mut self,
        exchange: impl FnOnce() -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.turns.change(|next| next.compute += 1);
        self.wait(|next| next.exchange == self.number)?;
        let result = exchange()?;
        self.turns.change(|next| next.exchange += 1);
        self.number += 2;
        self.begin()?;
        Ok(result)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.change(|next| next.alone = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Logits;

    #[test]
    fn halves_are_whole_blocks_first() {
        for rows in HALVES_FROM..2000 {
            let first = first_rows(rows);
            assert!(first >= BLOCK && first.is_multiple_of(BLOCK), "{rows}");
            assert!(rows - first >= BLOCK - 1, "{rows}");
            assert!(rows - first <= most_second_rows(rows), "{rows}");
        }
    }

    #[test]
    fn sequences_are_cut_where_the_first_half_ends() {
        let tokens: Vec<u32> = (0..300).collect();
        let sequence = |tokens, position, logits| BatchSequence {
            tokens,
            position,
            pages: &[],
            windows: &[],
            adapter: 0,
            logits,
        };
        let sequences = [
            sequence(&tokens[..100], 7, Logits::Last),
            sequence(&tokens[100..], 1000, Logits::Last),
        ];
        let batch = Batch {
            sequences: &sequences,
        };
        let told = cut(&batch).map(|half| -> Vec<_> {
            let told = |s: &BatchSequence<'_>| (s.tokens[0], s.tokens.len(), s.position, s.logits);
            half.iter().map(told).collect()
        });
        assert_eq!(
            told,
            [
                vec![(0, 100, 7, Logits::Last), (100, 28, 1000, Logits::None)],
                vec![(128, 172, 1028, Logits::Last)],
            ]
        );
    }

    /// Whatever takes long, the order is the same.
    #[test]
    fn halves_take_turns() {
        let turns = Turns::new(Duration::from_secs(60));
        let seen = Mutex::new([vec![], vec![]]);
        let note = |what: usize, half: usize| {
            seen.lock().unwrap()[what].push(half);
            Ok(())
        };
        std::thread::scope(|scope| {
            for (half, mut turn) in turns.both().into_iter().enumerate().rev() {
                scope.spawn(move || {
                    turn.begin().unwrap();
                    for _ in 0..50 {
                        note(0, half).unwrap();
                        turn.exchange(|| note(1, half)).unwrap();
                    }
                    note(0, half).unwrap();
                });
            }
        });
        let in_turn = |n: usize| -> Vec<usize> { (0..n).map(|i| i % 2).collect() };
        assert_eq!(seen.into_inner().unwrap(), [in_turn(102), in_turn(100)]);
    }

    /// Whichever half never comes, and wherever the other waits for it.
    #[test]
    fn a_half_that_never_comes_is_told_by_name() {
        let late = |result: Result<(), Error>, half: &str| {
            let error = result.unwrap_err().to_string();
            let expected = format!("the {half} half of the step did not come within 0.02 s");
            assert_eq!(error, expected);
        };
        let turns = Turns::new(Duration::from_millis(20));
        let [mut first, second] = turns.both();
        late(second.begin(), "first");
        first.begin().unwrap();
        late(first.exchange(|| Ok(())), "second");

        let turns = Turns::new(Duration::from_millis(20));
        let [first, mut second] = turns.both();
        first.begin().unwrap();
        // As if the first had computed and were in its exchange.
        turns.change(|next| next.compute += 1);
        second.begin().unwrap();
        late(second.exchange(|| panic!("it is not its turn")), "first");
        drop(first);
        second.begin().expect("who is alone waits for nobody");
    }

    /// The other half hears of it, and need not wait for its own limit.
    #[test]
    fn a_half_that_fails_leaves_the_other_alone() {
        let turns = Turns::new(Duration::from_secs(600));
        let [mut first, second] = turns.both();
        let result = first.exchange(|| Err::<(), _>(Error::Gone));
        assert!(matches!(result, Err(Error::Gone)));
        drop(first);
        second.begin().unwrap();
    }
}
