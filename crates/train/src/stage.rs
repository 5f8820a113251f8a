//! Stages of a pipeline: consecutive layers, cut so that no stage is much larger than another.

use std::ops::Range;

use paceline_model::Config;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::weights::layer_numbers;

/// A part of a model: stage `index` of `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStage {
    /// From 0.
    pub index: usize,
    /// Number of stages, at least one.
    pub of: usize,
}

/// Data set of leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LeafSet {
    Train,
    Valid,
}

impl ModelStage {
    /// All of a model.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// Whether it begins with tokens.
    pub const fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether it ends with the loss.
    pub const fn is_last(self) -> bool {
        self.index + 1 == self.of
    }

    /// Its layers.
    ///
    /// # Errors
    /// [`Error::Option`] when there are more stages than layers.
    pub fn layers(self, config: &Config) -> Result<Range<usize>, Error> {
        let costs = costs(config);
        if self.of > costs.len() || self.index >= self.of {
            return Err(Error::Option {
                option: "--stages",
                got: self.of.to_string(),
                expected: format!("1 to the model's {} layers", costs.len()),
            });
        }
        Ok(cuts(&costs, self.of)[self.index].clone())
    }
}

/// Weights of each layer; the last one has the head too.
fn costs(config: &Config) -> Vec<u64> {
    let layers = config.layers.iter();
    let mut costs: Vec<u64> = layers
        .map(|shape| layer_numbers(config.width, shape).0)
        .collect();
    if let Some(last) = costs.last_mut() {
        *last += (config.vocab * config.width) as u64;
    }
    costs
}

/// Neighbouring ranges that each have at least one of `costs`, and about the same sum.
fn cuts(costs: &[u64], of: usize) -> Vec<Range<usize>> {
    let total: u64 = costs.iter().sum();
    let (mut start, mut sum) = (0, 0);
    let cut = |i: usize| {
        let behind = of - i - 1;
        let goal = total * (i as u64 + 1) / of as u64;
        let first = start;
        sum += costs[start];
        start += 1;
        while start + behind < costs.len() && (behind == 0 || 2 * sum + costs[start] <= 2 * goal) {
            sum += costs[start];
            start += 1;
        }
        first..start
    };
    (0..of).map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_cover_all_layers_and_the_head_counts() {
        assert_eq!(cuts(&[1; 6], 3), [0..2, 2..4, 4..6]);
        assert_eq!(cuts(&[1, 1, 1, 5], 2), [0..3, 3..4]);
        assert_eq!(cuts(&[9, 1, 1], 3), [0..1, 1..2, 2..3]);
        assert_eq!(cuts(&[1, 1, 9], 3), [0..1, 1..2, 2..3]);
        assert_eq!(cuts(&[2, 3], 1), std::slice::from_ref(&(0..2)));
    }
}
