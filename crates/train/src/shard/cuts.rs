//! Which trained values each rank has: a slice of every part, so that all have as much to send.

use std::ops::Range;

use crate::optimiser::blocks;
use crate::params::Layout;
use crate::weights::Parts;

/// The slices of all ranks. They end where the blocks of the gradient's norm end.
///
/// Two ranks, a part of blocks of 4, 4 and 2 numbers: rank 0 has 0..4, rank 1 has 4..10.
#[derive(Clone, Debug)]
pub(crate) struct ShardCuts {
    /// By part and rank: ranges in the vector of trained values.
    slices: Vec<Vec<Range<usize>>>,
    /// The part whose values a part has: itself, but for a head that is the table of tokens.
    owners: Vec<usize>,
    blocks: Vec<Range<usize>>,
}

impl ShardCuts {
    /// Slices of `ranks` ranks, at least one.
    pub(crate) fn new(layout: &Layout, parts: &Parts, ranks: usize) -> Self {
        let blocks = blocks(layout);
        let slices = parts.values.iter().map(|part| cut(part, &blocks, ranks));
        let owner = |part: usize| match parts.values[part] == parts.values[0] {
            true => 0,
            false => part,
        };
        Self {
            slices: slices.collect(),
            owners: (0..parts.count()).map(owner).collect(),
            blocks,
        }
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.slices[0].len()
    }

    /// The slices of a part in the vector of trained values, by rank.
    pub(crate) fn slices(&self, part: usize) -> &[Range<usize>] {
        &self.slices[part]
    }

    /// Lengths of the slices of a part, by rank.
    pub(crate) fn counts(&self, part: usize) -> Vec<usize> {
        self.slices[part].iter().map(Range::len).collect()
    }

    /// A rank's shard: its slices, one behind the other.
    pub(crate) fn shard(&self, rank: usize) -> Vec<Range<usize>> {
        let own = self.owners.iter().enumerate();
        let own = own.filter(|(part, owner)| part == *owner);
        own.map(|(part, _)| self.slices[part][rank].clone())
            .collect()
    }

    /// Numbers of a rank's shard.
    pub(crate) fn len(&self, rank: usize) -> usize {
        self.shard(rank).iter().map(Range::len).sum()
    }

    /// Where the slice of a part lies in a rank's shard.
    pub(crate) fn place(&self, part: usize, rank: usize) -> Range<usize> {
        let owner = self.owners[part];
        let before = (0..owner).filter(|part| self.owners[*part] == *part);
        let start: usize = before.map(|part| self.slices[part][rank].len()).sum();
        start..start + self.slices[owner][rank].len()
    }

    /// The pieces of a range of the vector of trained values, in order: a rank, and the range in
    /// its shard.
    pub(crate) fn pieces(&self, range: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut found = Vec::new();
        for (part, owner) in self.owners.iter().enumerate() {
            for rank in 0..self.ranks() {
                let slice = &self.slices[part][rank];
                let start = range.start.max(slice.start);
                let end = range.end.min(slice.end);
                if part == *owner && start < end {
                    let place = self.place(part, rank).start;
                    found.push((rank, place + start - slice.start..place + end - slice.start));
                }
            }
        }
        found
    }

    /// Lengths of the blocks of a rank's shard.
    pub(crate) fn block_lens(&self, rank: usize) -> Vec<usize> {
        let of = |slice| within(slice, &self.blocks).iter().map(Range::len);
        self.shard(rank).iter().flat_map(of).collect()
    }

    /// Numbers by block, which ranks have in the order of their shards, in the order of blocks.
    pub(crate) fn in_order(&self, by_rank: &[f32]) -> Vec<f32> {
        let mut ordered = vec![0.0; self.blocks.len()];
        let mut next = by_rank.iter();
        for rank in 0..self.ranks() {
            for slice in self.shard(rank) {
                let first = self
                    .blocks
                    .partition_point(|block| block.start < slice.start);
                let own = within(&slice, &self.blocks).len();
                let places = ordered[first..first + own].iter_mut();
                places.zip(&mut next).for_each(|(place, x)| *place = *x);
            }
        }
        ordered
    }
}

fn within<'a>(slice: &Range<usize>, blocks: &'a [Range<usize>]) -> &'a [Range<usize>] {
    let first = blocks.partition_point(|block| block.start < slice.start);
    let end = blocks.partition_point(|block| block.start < slice.end);
    &blocks[first..end.max(first)]
}

/// Slices of a part, each cut at the first end of a block behind an even cut.
fn cut(part: &Range<usize>, blocks: &[Range<usize>], ranks: usize) -> Vec<Range<usize>> {
    let own = within(part, blocks);
    let mut start = part.start;
    let slice = |rank: usize| {
        let even = part.start + part.len() * (rank + 1) / ranks;
        let at = own.partition_point(|block| block.end < even);
        let end = own.get(at).map_or(part.end, |block| block.end);
        let slice = start..end.clamp(start, part.end);
        start = slice.end;
        slice
    };
    (0..ranks).map(slice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimiser::{norm, squares};

    /// A table, two layers, a norm and a head, which is the table if `is_tied`.
    fn model(is_tied: bool) -> (Layout, Parts) {
        let mut layout = Layout::default();
        let mut ends = vec![0];
        let parts: [&[usize]; 5] = [&[9000], &[5000, 7, 4096], &[5000, 7, 4096], &[3], &[9000]];
        for (part, sizes) in parts.into_iter().enumerate() {
            for (i, size) in sizes.iter().enumerate() {
                if !is_tied || part < 4 {
                    layout.add(format!("{part}.{i}"), vec![*size]);
                }
            }
            ends.push(layout.len());
        }
        (layout, Parts::new(&ends, is_tied))
    }

    #[test]
    fn shards_cover_every_value_once_and_norms_are_those_of_one_process() {
        for is_tied in [false, true] {
            let (layout, parts) = model(is_tied);
            let grads: Vec<f32> = (0..layout.len()).map(|i| (i % 37) as f32 - 11.0).collect();
            let all: Vec<usize> = blocks(&layout).iter().map(Range::len).collect();
            let whole = squares(&all, &grads);
            for ranks in [1, 2, 3, 4, 7] {
                let cuts = ShardCuts::new(&layout, &parts, ranks);
                let mut seen = vec![0; layout.len()];
                let mut gathered = Vec::new();
                for rank in 0..ranks {
                    let shard = cuts.shard(rank);
                    let own: Vec<f32> = shard
                        .iter()
                        .flat_map(|slice| &grads[slice.clone()])
                        .copied()
                        .collect();
                    shard.iter().cloned().flatten().for_each(|i| seen[i] += 1);
                    assert_eq!(own.len(), cuts.len(rank));
                    for part in 0..parts.count() {
                        let place = cuts.place(part, rank);
                        assert_eq!(own[place], grads[cuts.slices(part)[rank].clone()]);
                    }
                    gathered.extend(squares(&cuts.block_lens(rank), &own));
                }
                assert!(seen.iter().all(|times| *times == 1), "{is_tied} {ranks}");
                assert_eq!(cuts.in_order(&gathered), whole);
            }
            assert!(norm(&layout, &whole) > 0.0);
        }
    }
}
