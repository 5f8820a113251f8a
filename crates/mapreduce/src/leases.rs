//! Leases of parts: each is given to one holder, and those of a lost holder are leased again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A range of rows, computed as one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowPartition {
    /// Its number, from 0.
    pub id: u64,
    /// First row.
    pub start: u64,
    pub rows: u64,
}

/// Fewest rows of a part, unless there are fewer: below, a lease costs more than the work.
const ROWS_MIN: u64 = 1 << 16;

/// Most rows of a part: what a lost worker costs.
const ROWS_MAX: u64 = 1 << 23;

/// Parts that a thread gets in the course of a job, so that all end together.
const PARTS_PER_THREAD: u64 = 8;

/// The parts of a job: free, leased to a holder, or done. Pure.
#[derive(Debug)]
pub struct Leases {
    rows: u64,
    part_rows: u64,
    /// Parts that were never leased, of each holder that has some of its own; others get from
    /// these in turn.
    fresh: Vec<Range<u64>>,
    /// Parts whose holder was lost.
    returned: VecDeque<RowPartition>,
    /// Leased parts and their holders.
    held: BTreeMap<u64, (RowPartition, u32)>,
    /// Parts that were done before the job began.
    before: BTreeSet<u64>,
    /// Rows of parts that are done.
    done: u64,
}

impl Leases {
    /// Rows of a part when `threads` threads in all compute `rows` rows. How a job is cut never
    /// changes its result.
    pub fn part_rows(rows: u64, threads: u64) -> u64 {
        let even = rows.div_ceil((threads * PARTS_PER_THREAD).max(1));
        even.clamp(ROWS_MIN, ROWS_MAX)
    }

    /// Cuts `rows` rows into parts of `part_rows`, the last one shorter.
    ///
    /// # Panics
    /// If `part_rows` is 0.
    pub fn of(rows: u64, part_rows: u64) -> Self {
        assert!(part_rows > 0, "parts without rows");
        Self {
            rows,
            part_rows,
            fresh: Self::segments(rows.div_ceil(part_rows), 1),
            returned: VecDeque::new(),
            held: BTreeMap::new(),
            before: BTreeSet::new(),
            done: 0,
        }
    }

    /// The same, where each of `holders` holders has a range of parts of its own. It gets others
    /// only behind it.
    #[must_use]
    pub fn by_holder(mut self, holders: u64) -> Self {
        self.fresh = Self::segments(self.rows.div_ceil(self.part_rows), holders);
        self
    }

    /// `parts` cut into ranges of equal numbers, at least one.
    pub(crate) fn segments(parts: u64, count: u64) -> Vec<Range<u64>> {
        let count = count.max(1);
        let first = |at: u64| (u128::from(parts) * u128::from(at) / u128::from(count)) as u64;
        (0..count).map(|at| first(at)..first(at + 1)).collect()
    }

    /// The next part for `holder`; `None` when all are leased or done.
    pub fn lease(&mut self, holder: u32) -> Option<RowPartition> {
        let part = self.returned.pop_front().or_else(|| self.fresh(holder))?;
        self.held.insert(part.id, (part, holder));
        Some(part)
    }

    fn fresh(&mut self, holder: u32) -> Option<RowPartition> {
        let left = |range: &Range<u64>| range.end.saturating_sub(range.start);
        loop {
            let own = holder as usize % self.fresh.len();
            let at = match left(&self.fresh[own]) {
                0 => (0..self.fresh.len()).max_by_key(|at| left(&self.fresh[*at]))?,
                _ => own,
            };
            let id = self.fresh[at].next()?;
            let part = self.part(id)?;
            if !self.before.contains(&part.id) {
                return Some(part);
            }
        }
    }

    fn part(&self, id: u64) -> Option<RowPartition> {
        let start = id.checked_mul(self.part_rows)?;
        let rows = self.rows.checked_sub(start).filter(|rows| *rows > 0)?;
        Some(RowPartition {
            id,
            start,
            rows: rows.min(self.part_rows),
        })
    }

    /// Notes that a part was done before; whether it counts: there is such a part, and it was not
    /// noted yet. Only before the first lease.
    pub fn skip(&mut self, id: u64) -> bool {
        let Some(part) = self.part(id) else {
            return false;
        };
        let is_new = self.before.insert(id);
        self.done += if is_new { part.rows } else { 0 };
        is_new
    }

    /// Notes that `holder` has computed a part. Whether it counts: not if the part was taken from
    /// that holder, which was believed lost.
    pub fn finish(&mut self, id: u64, holder: u32) -> bool {
        match self.held.get(&id) {
            Some((part, of)) if *of == holder => {
                self.done += part.rows;
                self.held.remove(&id);
                true
            }
            _ => false,
        }
    }

    /// The part of this number, if `holder` has it now.
    pub fn held(&self, id: u64, holder: u32) -> Option<RowPartition> {
        let (part, of) = self.held.get(&id)?;
        (*of == holder).then_some(*part)
    }

    /// The parts that `holder` has now. Cost: all parts that are leased.
    pub fn held_by(&self, holder: u32) -> impl Iterator<Item = RowPartition> {
        let held = self.held.values();
        held.filter_map(move |(part, of)| (*of == holder).then_some(*part))
    }

    /// Frees the parts of a lost holder; returns their number.
    pub fn lose(&mut self, holder: u32) -> usize {
        let of_it = |_: &u64, held: &mut (RowPartition, u32)| held.1 == holder;
        let before = self.returned.len();
        let lost = self.held.extract_if(.., of_it).map(|(_, (part, _))| part);
        self.returned.extend(lost);
        self.returned.len() - before
    }

    /// Rows of parts that are done.
    pub const fn rows_done(&self) -> u64 {
        self.done
    }

    /// Rows of the job.
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Whether all parts are done.
    pub const fn is_done(&self) -> bool {
        self.done == self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_each_row_once_whoever_is_lost() {
        for (rows, own) in [
            (0, 1),
            (1, 3),
            (9, 1),
            (10, 1),
            (11, 3),
            (1000, 1),
            (1000, 3),
        ] {
            let mut leases = Leases::of(rows, 10).by_holder(own);
            let mut seen = vec![0; rows as usize];
            let mut turn = 0;
            while !leases.is_done() {
                turn += 1;
                let holder = turn % 3;
                let Some(part) = leases.lease(holder) else {
                    panic!("nothing to do, but not done");
                };
                if turn % 5 == 0 {
                    assert_eq!(leases.lose(holder), 1);
                    assert!(!leases.finish(part.id, holder));
                    continue;
                }
                assert!(leases.finish(part.id, holder));
                assert!(!leases.finish(part.id, holder));
                let range = part.start as usize..(part.start + part.rows) as usize;
                seen[range].iter_mut().for_each(|count| *count += 1);
            }
            assert!(seen.iter().all(|count| *count == 1), "{rows} rows");
            assert_eq!(leases.lease(0), None);
        }
    }

    #[test]
    fn a_holder_has_its_own_range_first() {
        let mut leases = Leases::of(60, 10).by_holder(2);
        let mut ids = |holder| leases.lease(holder).map(|part| part.id);
        let taken = [0, 1, 1, 1, 1, 0, 0].map(&mut ids);
        assert_eq!(
            taken,
            [0, 3, 4, 5, 1, 2, u64::MAX].map(|id| (id < 9).then_some(id))
        );
    }

    #[test]
    fn parts_that_were_done_before_are_not_leased() {
        let mut leases = Leases::of(35, 10);
        assert!(leases.skip(1) && leases.skip(3) && !leases.skip(1) && !leases.skip(4));
        assert_eq!(leases.rows_done(), 15);
        let ids: Vec<u64> = std::iter::from_fn(|| leases.lease(0))
            .map(|part| part.id)
            .collect();
        assert_eq!(ids, [0, 2]);
        assert!(leases.finish(0, 0) && leases.finish(2, 0) && leases.is_done());
    }

    #[test]
    fn a_late_answer_of_a_lost_worker_does_not_count() {
        let mut leases = Leases::of(10, 10);
        let part = leases.lease(0).unwrap();
        leases.lose(0);
        assert_eq!(leases.lease(1), Some(part));
        assert!(!leases.finish(part.id, 0));
        assert!(leases.finish(part.id, 1));
        assert!(leases.is_done());
    }
}
