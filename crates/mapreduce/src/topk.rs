//! The k largest or smallest values, and the rows that have them.
//!
//! Ties go to the lowest row, so that the result does not depend on parts. NaN is never among
//! them, but counted; -0 lies below 0.

use serde::{Deserialize, Serialize};

use crate::order::{order, ordered, whole_order};
use crate::{Dtype, ResultValue, Values};

/// Largest k.
pub const K_MAX: u32 = 1 << 20;

/// Selection of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pick {
    /// Number of values, up to [`K_MAX`].
    pub k: u32,
    pub largest: bool,
    /// Type of the values.
    pub dtype: Dtype,
}

/// The best values so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Top {
    pick: Pick,
    /// Scores and rows: the highest score is the best.
    found: Vec<(i64, u64)>,
    /// A score that has to be exceeded, once `k` are found.
    bar: Option<i64>,
    /// Values that are NaN.
    nan: u64,
}

impl Top {
    pub const fn new(pick: Pick) -> Self {
        Self {
            pick,
            found: Vec::new(),
            bar: None,
            nan: 0,
        }
    }

    /// Number of NaN values.
    pub const fn nan(&self) -> u64 {
        self.nan
    }

    /// Adds a block; its rows follow those before it.
    pub fn take(&mut self, values: &Values<'_>, first_row: u64) {
        match values {
            Values::Floats(floats) => {
                for (value, row) in floats.iter().zip(first_row..) {
                    if value.is_nan() {
                        self.nan += 1;
                        continue;
                    }
                    let score = self.score(order(self.pick.dtype, *value));
                    self.offer(score, row);
                }
            }
            Values::Wide(wide) => {
                for (value, row) in wide.iter().zip(first_row..) {
                    let score = self.score(whole_order(self.pick.dtype, *value));
                    self.offer(score, row);
                }
            }
        }
    }

    /// The score of a place in the order of values, and the place of a score.
    const fn score(&self, order: i64) -> i64 {
        if self.pick.largest { order } else { !order }
    }

    fn offer(&mut self, score: i64, row: u64) {
        if self.bar.is_some_and(|bar| score <= bar) {
            return;
        }
        self.found.push((score, row));
        if self.found.len() >= 2 * self.pick.k as usize {
            self.settle();
        }
    }

    /// Keeps the best `k`, in order.
    fn settle(&mut self) {
        let k = self.pick.k as usize;
        self.found
            .sort_unstable_by_key(|(score, row)| (!*score, *row));
        self.found.truncate(k);
        // Rows are added in order: a later one needs a higher score than the last of the selection.
        if self.found.len() == k {
            self.bar = self.found.last().map(|(score, _)| *score);
        }
    }

    /// Adds the selection of other rows.
    pub fn merge(&mut self, other: Self) {
        self.found.extend(other.found);
        self.nan += other.nan;
        self.settle();
    }

    /// The best values and their rows, best first.
    pub fn values(mut self) -> Vec<(ResultValue, u64)> {
        self.settle();
        let value = |score: i64| ordered(self.pick.dtype, self.score(score));
        self.found
            .iter()
            .map(|(score, row)| (value(*score), *row))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Philox;

    #[test]
    fn the_best_of_any_cut_are_those_of_a_full_sort() {
        let random = Philox::new(5);
        let values: Vec<f64> = (0..5000)
            .map(|i| match i % 97 {
                0 => f64::NAN,
                1 => -0.0,
                _ => (random.uniform(i, 0) * 300.0).floor() - 150.0,
            })
            .collect();
        for (k, largest) in [(1, true), (10, false), (300, true), (6000, false)] {
            let pick = Pick {
                k,
                largest,
                dtype: Dtype::F64,
            };
            let mut rows: Vec<u64> = (0..5000)
                .filter(|i| !values[*i as usize].is_nan())
                .collect();
            rows.sort_by(|a, b| {
                let order = values[*a as usize].total_cmp(&values[*b as usize]);
                (if largest { order.reverse() } else { order }).then(a.cmp(b))
            });
            rows.truncate(k as usize);
            for cut in [5000, 700, 64] {
                let mut all = Top::new(pick);
                for (number, part) in values.chunks(cut).enumerate().rev() {
                    let mut top = Top::new(pick);
                    top.take(&Values::Floats(part), (number * cut) as u64);
                    all.merge(top);
                }
                assert_eq!(all.nan(), 52, "{k} of {cut}");
                let got: Vec<u64> = all.values().iter().map(|(_, row)| *row).collect();
                assert_eq!(got, rows, "{k} of {cut}");
            }
        }
    }

    #[test]
    fn integers_keep_all_digits() {
        for (dtype, values) in [
            (Dtype::U64, [u64::MAX.into(), 0, 1i128 << 63]),
            (Dtype::I64, [i64::MAX.into(), i64::MIN.into(), 0]),
        ] {
            let mut top = Top::new(Pick {
                k: 3,
                largest: true,
                dtype,
            });
            top.take(&Values::Wide(&values), 0);
            let mut sorted = values;
            sorted.sort_by(|a, b| b.cmp(a));
            let got: Vec<ResultValue> = top.values().into_iter().map(|(value, _)| value).collect();
            assert_eq!(got, sorted.map(ResultValue::Int));
        }
    }
}
