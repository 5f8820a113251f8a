//! Overlap of compute and exchange: a step runs as two halves in alternation, one computes while
//! the sums of the other are exchanged.
//!
//! ```text
//! first    compute | exchange . . . | compute | exchange . . . |
//! second             compute | exchange . . . | compute | exchange . . .
//! ```
//!
//! The order of computing halves and the order of exchanges are fixed, independent of timing. So
//! all ranks exchange in the same order. The second half finds the keys and values of the first in
//! the cache.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use paceline_base::lock;
use paceline_tensor::BLOCK;

use super::{Batch, BatchSequence};
use crate::Error;

/// Minimum rows of a step with two halves: each half then fills a block of the kernels. A block of
/// a small model (width 576) is some ms of work per layer. Starting the thread of a half takes some
/// tens of microseconds, once per step.
pub(crate) const HALVES_FROM: usize = 2 * BLOCK;

/// Rows of the first half of `rows`: whole blocks, so that two halves take no more blocks than one
/// step.
const fn first_rows(rows: usize) -> usize {
    (rows / 2 + BLOCK / 2) / BLOCK * BLOCK
}

/// Maximum rows of the second half in steps of up to `rows`.
pub(crate) const fn most_second_rows(rows: usize) -> usize {
    rows / 2 + BLOCK / 2
}

/// Divides a batch of at least [`HALVES_FROM`] rows into the sequences of two halves.
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

/// Shared schedule of both halves.
#[derive(Debug)]
pub(crate) struct HalfSchedule {
    /// Timeout of a half that waits for the other.
    limit: Duration,
    next: Mutex<NextTurns>,
    changed: Condvar,
}

/// Next turns to compute and to exchange. The first half has the even numbers.
#[derive(Debug, Default)]
struct NextTurns {
    compute: u64,
    exchange: u64,
    /// A half has ended: the other does not wait for turns.
    alone: bool,
}

/// A half's turn in the schedule.
#[derive(Debug)]
pub(crate) struct HalfTurn<'t> {
    turns: &'t HalfSchedule,
    number: u64,
}

impl HalfSchedule {
    /// Each half computes or exchanges for at most `limit` at a time.
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            next: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Turns of the first and the second half.
    pub(crate) fn both(&self) -> [HalfTurn<'_>; 2] {
        [0, 1].map(|number| HalfTurn {
            turns: self,
            number,
        })
    }

    fn lock(&self) -> MutexGuard<'_, NextTurns> {
        lock(&self.next)
    }

    fn change(&self, change: impl FnOnce(&mut NextTurns)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `come` holds or the other half has ended; `false` after the timeout.
    fn wait(&self, come: impl Fn(&NextTurns) -> bool) -> bool {
        let early = |next: &mut NextTurns| !(next.alone || come(next));
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), self.limit, early);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl HalfTurn<'_> {
    fn wait(&self, come: impl Fn(&NextTurns) -> bool) -> Result<(), Error> {
        if self.turns.wait(come) {
            return Ok(());
        }
        let (limit, is_first) = (self.turns.limit, self.number.is_multiple_of(2));
        let half = if is_first { "second" } else { "first" };
        Err(Error::HalfLate { half, limit })
    }

    /// Waits for this half's turn to compute.
    ///
    /// # Errors
    /// [`Error::HalfLate`].
    pub(crate) fn begin(&self) -> Result<(), Error> {
        self.wait(|next| next.compute == self.number)
    }

    /// Passes the compute turn to the other half, runs `exchange` in this half's exchange turn, and
    /// waits for its next turn to compute.
    ///
    /// # Errors
    /// [`Error::HalfLate`]; the error of `exchange`.
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

impl Drop for HalfTurn<'_> {
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
        let sequence =
            |tokens, position, logits| BatchSequence::plain(tokens, position, &[], logits);
        let sequences = [
            sequence(&tokens[..100], 7, Logits::Last),
            sequence(&tokens[100..], 1000, Logits::Last),
        ];
        let batch = Batch::new(&sequences);
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

    /// The order is the same whichever operation is slow.
    #[test]
    fn halves_take_turns() {
        let turns = HalfSchedule::new(Duration::from_secs(60));
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

    /// Either half is missing, at each point where the other waits for it.
    #[test]
    fn a_half_that_never_comes_is_told_by_name() {
        let late = |result: Result<(), Error>, half: &str| {
            let error = result.unwrap_err().to_string();
            let expected = format!("the {half} half of the step did not come within 0.02 s");
            assert_eq!(error, expected);
        };
        let turns = HalfSchedule::new(Duration::from_millis(20));
        let [mut first, second] = turns.both();
        late(second.begin(), "first");
        first.begin().unwrap();
        late(first.exchange(|| Ok(())), "second");

        let turns = HalfSchedule::new(Duration::from_millis(20));
        let [first, mut second] = turns.both();
        first.begin().unwrap();
        // The state after the first half has computed and started its exchange.
        turns.change(|next| next.compute += 1);
        second.begin().unwrap();
        late(second.exchange(|| panic!("it is not its turn")), "first");
        drop(first);
        second.begin().expect("who is alone waits for nobody");
    }

    /// The other half continues without its timeout.
    #[test]
    fn a_half_that_fails_leaves_the_other_alone() {
        let turns = HalfSchedule::new(Duration::from_secs(600));
        let [mut first, second] = turns.both();
        let result = first.exchange(|| Err::<(), _>(Error::Gone));
        assert!(matches!(result, Err(Error::Gone)));
        drop(first);
        second.begin().unwrap();
    }
}
