//! A shard's values and moments, and the file in which they travel between a run and a rank.

use std::ops::Range;

use crate::optimiser::Optimiser;

/// A shard.
#[derive(Clone, Debug)]
pub(crate) struct ShardState {
    pub(crate) params: Vec<f32>,
    pub(crate) optimiser: Optimiser,
}

/// The file of a shard: its values, its first moments, its second ones, as f32 in little-endian.
/// Rules without moments have the values alone.
pub(crate) struct ShardFile;

impl ShardFile {
    /// The file that a run gives a rank, with the state before a step.
    pub(crate) fn given(step: u64, rank: usize) -> String {
        format!("{step}/shard-{rank}")
    }

    /// The file that a rank gives its run for a checkpoint; the next one replaces it.
    pub(crate) fn saved(rank: usize) -> String {
        format!("saved/shard-{rank}")
    }
}

impl ShardState {
    /// Values and moments, as they lie in the file.
    pub(crate) fn vectors(&self) -> [&[f32]; 3] {
        [&self.params, &self.optimiser.first, &self.optimiser.second]
    }

    /// All of them, one behind the other.
    pub(crate) fn flat(&self) -> Vec<f32> {
        self.vectors().concat()
    }

    /// A shard of what [`flat`](Self::flat) gave; `fresh` has as many moments.
    pub(crate) fn of_flat(flat: &[f32], fresh: Optimiser) -> Self {
        let moments = fresh.first.len();
        let (params, rest) = flat.split_at(flat.len() - 2 * moments);
        let mut optimiser = fresh;
        optimiser.first.copy_from_slice(&rest[..moments]);
        optimiser.second.copy_from_slice(&rest[moments..]);
        let params = params.to_vec();
        Self { params, optimiser }
    }
}

/// The part of `all` that `rank` of `of` has: neighbours have neighbouring parts of about the same
/// size.
pub(crate) fn share(all: Range<usize>, rank: usize, of: usize) -> Range<usize> {
    let at = |rank: usize| all.start + all.len() * rank / of;
    at(rank)..at(rank + 1)
}
