//! Dropout of adapters' inputs. The choice of an element depends on seed, step, leaf, matrix, row
//! and column, and on nothing else.

use crate::random;

/// The chance of one leaf.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    rate: f32,
    key: u64,
    /// The row that the first one here is.
    first: usize,
}

impl Dropout {
    /// The dropout of a leaf; `None` for a rate of 0.
    pub(crate) fn of(rate: f32, [seed, step, leaf]: [u64; 3]) -> Option<Self> {
        let key = random::bits([seed, random::DROPOUT, step, leaf]);
        let first = 0;
        (rate > 0.0).then_some(Self { rate, key, first })
    }

    /// The same for rows from `first` on.
    pub(crate) const fn starting_at(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// Factor of an input of a pair.
    fn factor(self, pair: u64, row: usize, col: usize) -> f32 {
        let row = (self.first + row) as u64;
        let chance = random::unit([self.key, pair, row, col as u64]);
        if chance < f64::from(self.rate) {
            0.0
        } else {
            1.0 / (1.0 - self.rate)
        }
    }

    /// A row of inputs as the pair sees it.
    pub(crate) fn apply(self, pair: u64, row: usize, x: &mut [f32]) {
        for (col, x) in x.iter_mut().enumerate() {
            *x *= self.factor(pair, row, col);
        }
    }

    /// Adds the gradient through the adapter to a row's gradient.
    pub(crate) fn add(self, pair: u64, row: usize, through: &[f32], dx: &mut [f32]) {
        for (col, (dx, d)) in dx.iter_mut().zip(through).enumerate() {
            *dx += d * self.factor(pair, row, col);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_left_out_as_asked_for_and_the_mean_stays() {
        assert!(Dropout::of(0.0, [1, 2, 3]).is_none());
        let dropout = Dropout::of(0.25, [1, 2, 3]).unwrap();
        let mut x = vec![1.0; 1 << 14];
        dropout.apply(5, 7, &mut x);
        let left_out = x.iter().filter(|x| **x == 0.0).count() as f64 / x.len() as f64;
        assert!((left_out - 0.25).abs() < 0.02, "{left_out}");
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        let mut dx = vec![0.0; x.len()];
        dropout.add(5, 7, &vec![1.0; x.len()], &mut dx);
        assert!(x == dx, "the gradient goes where the input went");
        let mut other = vec![1.0; x.len()];
        dropout.apply(6, 7, &mut other);
        assert!(x != other, "matrices have chances of their own");
    }
}
