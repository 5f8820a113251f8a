//! Order of training examples: a function of seed and step.

use std::ops::Range;

use crate::random;

/// The order of a run's examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExampleOrder {
    /// Chooses the order.
    pub seed: u64,
    /// Examples that there are, at least one.
    pub examples: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Sequences of a leaf; the last of a step may have fewer.
    pub leaf: usize,
}

impl ExampleOrder {
    /// Leaves of a step.
    pub const fn leaves(&self) -> usize {
        self.batch.div_ceil(self.leaf)
    }

    /// The examples of step `step` (from 0): epoch after epoch, each in an order of its own.
    pub fn step(&self, step: u64) -> Vec<usize> {
        let first = step * self.batch as u64;
        let n = self.examples as u64;
        let mut shuffled = (u64::MAX, Vec::new());
        let nth = |at: u64| {
            let (epoch, place) = (at / n, (at % n) as usize);
            if shuffled.0 != epoch {
                shuffled = (epoch, self.epoch(epoch));
            }
            shuffled.1[place]
        };
        (first..first + self.batch as u64).map(nth).collect()
    }

    /// The places of leaf `leaf` in its step.
    pub fn places(&self, leaf: usize) -> Range<usize> {
        leaf * self.leaf..((leaf + 1) * self.leaf).min(self.batch)
    }

    fn epoch(&self, epoch: u64) -> Vec<usize> {
        let key = |i: usize| random::bits([self.seed, random::ORDER, epoch, i as u64]);
        let mut order: Vec<(u64, usize)> = (0..self.examples).map(|i| (key(i), i)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, i)| i).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_sees_each_example_once_and_steps_go_on_over_its_end() {
        let order = ExampleOrder {
            seed: 3,
            examples: 10,
            batch: 4,
            leaf: 3,
        };
        let all: Vec<usize> = (0..5).flat_map(|step| order.step(step)).collect();
        for epoch in all.chunks(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(all[..10], all[10..], "epochs have orders of their own");
        assert_eq!(order.leaves(), 2);
        assert_eq!([order.places(0), order.places(1)], [0..3, 3..4]);
    }
}
