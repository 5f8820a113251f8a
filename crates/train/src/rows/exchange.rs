//! Exchange of keys and gradients among ranks that have some blocks of every row each.
//!
//! Ranks that have some experts of every layer also exchange the rows of these.

mod experts;

use std::fmt::Debug;

use super::LeafRows;
use crate::error::Error;
pub(crate) use experts::{ExpertParts, ExpertSums, ExpertUses};

/// The calls of a group that computes rows together. All ranks make them in the same order.
pub(crate) trait RowCalls: Debug + Send + Sync {
    /// All ranks' values, in rank order; `counts` are their lengths.
    fn gather(&self, own: Vec<f32>, counts: Vec<usize>) -> Result<Vec<f32>, Error>;
    /// The same of losses.
    fn gather_losses(&self, own: Vec<f64>, counts: Vec<usize>) -> Result<Vec<f64>, Error>;
    /// Sends `counts[0][r]` of `values` to rank r, and gets `counts[1][r]` from it.
    fn swap(&self, values: Vec<f32>, counts: [Vec<usize>; 2]) -> Result<Vec<f32>, Error>;
    /// Sends a block's gradient, or that of its experts, to rank 0 under a number.
    fn give(&self, values: Vec<f32>, number: usize) -> Result<(), Error>;
    /// Gets the `n` numbers of such a gradient from a rank.
    fn get(&self, n: usize, rank: usize, number: usize) -> Result<Vec<f32>, Error>;
}

/// A rank of a group that computes rows together.
#[derive(Debug)]
pub(crate) struct RowSeat {
    pub(crate) calls: Box<dyn RowCalls>,
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) of: usize,
    /// Whether ranks have parts of the experts of each layer.
    pub(crate) cuts_experts: bool,
}

impl RowSeat {
    /// Whether this rank has a block.
    pub(super) const fn has(&self, block: usize) -> bool {
        self.owner(block) == self.rank
    }

    /// The rank of a block: 0, 1, 1, 0 and so on for two ranks, since later blocks take longer.
    const fn owner(&self, block: usize) -> usize {
        let turn = block % (2 * self.of);
        if turn < self.of {
            turn
        } else {
            2 * self.of - 1 - turn
        }
    }

    fn blocks_of(&self, rows: &LeafRows, rank: usize) -> Vec<usize> {
        let all = 0..rows.blocks.len();
        all.filter(|block| self.owner(*block) == rank).collect()
    }

    /// See [`LeafRows::keys`].
    pub(super) fn keys(
        &self,
        rows: &LeafRows,
        own: &[[Vec<f32>; 2]],
        widths: [usize; 2],
    ) -> Result<[Vec<f32>; 2], Error> {
        let sent = [0, 1].map(|n| own.iter().flat_map(move |two| &two[n]));
        let sent: Vec<f32> = sent.into_iter().flatten().copied().collect();
        let len = |block: usize| rows.blocks[block].rows.len();
        let count = |rank: usize| {
            self.blocks_of(rows, rank)
                .into_iter()
                .map(len)
                .sum::<usize>()
        };
        let counts = (0..self.of).map(|rank| count(rank) * (widths[0] + widths[1]));
        let got = self.calls.gather(sent, counts.collect())?;
        let mut all = widths.map(|n| vec![0.0; rows.tokens() * n]);
        let mut next = got.as_slice();
        for rank in 0..self.of {
            for (all, n) in all.iter_mut().zip(widths) {
                for block in self.blocks_of(rows, rank) {
                    let place = &rows.blocks[block].rows;
                    let (own, rest) = next.split_at(place.len() * n);
                    all[place.start * n..place.end * n].copy_from_slice(own);
                    next = rest;
                }
            }
        }
        Ok(all)
    }

    /// See [`LeafRows::key_gradients`]. Every block sends to each block before it what it has for
    /// that one's rows.
    pub(super) fn key_gradients(
        &self,
        rows: &LeafRows,
        own: &[[Vec<f32>; 2]],
        widths: [usize; 2],
    ) -> Result<Vec<[Vec<f32>; 2]>, Error> {
        let size = |block: usize| rows.blocks[block].rows.len() * (widths[0] + widths[1]);
        let (mut sent, mut counts) = (Vec::new(), [Vec::new(), Vec::new()]);
        for rank in 0..self.of {
            let mut sizes = 0;
            for (nth, _, to) in self.pairs(rows, self.rank, rank) {
                let place = &rows.blocks[to].rows;
                for (all, n) in own[nth].iter().zip(widths) {
                    sent.extend_from_slice(&all[place.start * n..place.end * n]);
                }
                sizes += size(to);
            }
            let received = self.pairs(rows, rank, self.rank).into_iter();
            counts[0].push(sizes);
            counts[1].push(received.map(|(_, _, to)| size(to)).sum());
        }
        let got = self.calls.swap(sent, counts)?;
        let mut parts: Vec<(usize, usize, &[f32])> = Vec::new();
        let mut next = got.as_slice();
        for rank in 0..self.of {
            for (_, from, to) in self.pairs(rows, rank, self.rank) {
                let (part, rest) = next.split_at(size(to));
                parts.push((from, to, part));
                next = rest;
            }
        }
        parts.sort_by_key(|(from, _, _)| *from);
        let of_block = |block: usize| {
            let n = rows.blocks[block].rows.len();
            let mut sums = widths.map(|width| vec![0.0; n * width]);
            for (_, _, part) in parts.iter().filter(|(_, to, _)| *to == block) {
                let (keys, values) = part.split_at(n * widths[0]);
                for (sum, part) in sums.iter_mut().zip([keys, values]) {
                    rows.add_block(sum, part);
                }
            }
            sums
        };
        Ok(self
            .blocks_of(rows, self.rank)
            .into_iter()
            .map(of_block)
            .collect())
    }

    /// The pairs of a block of rank `from`, also by its place among them, and a block of rank `to`
    /// that is not behind it.
    fn pairs(&self, rows: &LeafRows, from: usize, to: usize) -> Vec<(usize, usize, usize)> {
        let to = self.blocks_of(rows, to);
        let own = self.blocks_of(rows, from).into_iter().enumerate();
        let of = |(nth, block)| {
            let before = to.iter().take_while(move |to| **to <= block);
            before.map(move |to| (nth, block, *to))
        };
        own.flat_map(of).collect()
    }

    /// Losses of all blocks, from those that are here.
    pub(super) fn losses(&self, rows: &LeafRows, own: Vec<f64>) -> Result<Vec<f64>, Error> {
        let all = (0..self.of).map(|rank| self.blocks_of(rows, rank));
        let all: Vec<Vec<usize>> = all.collect();
        let got = self
            .calls
            .gather_losses(own, all.iter().map(Vec::len).collect())?;
        let mut losses = vec![0.0; rows.blocks.len()];
        let blocks = all.into_iter().flatten();
        blocks
            .zip(got)
            .for_each(|(block, loss)| losses[block] = loss);
        Ok(losses)
    }

    /// Adds to `sum` the gradients of all blocks in their order, on rank 0. Those of cut experts
    /// come from the experts' ranks.
    pub(super) fn sum(
        &self,
        rows: &LeafRows,
        (own, mut experts): (Vec<Vec<f32>>, Option<ExpertSums>),
        sum: &mut [f32],
    ) -> Result<(), Error> {
        if sum.is_empty() {
            return Ok(());
        }
        let mut own = own.into_iter();
        for block in 0..rows.blocks.len() {
            let owner = self.owner(block);
            let mut part = if owner == self.rank { own.next() } else { None };
            if self.rank == 0 && owner > 0 {
                part = Some(self.calls.get(sum.len(), owner, block)?);
            } else if self.rank > 0
                && let Some(part) = part.take()
            {
                self.calls.give(part, block)?;
            }
            if let Some(experts) = &mut experts {
                self.sum_experts(rows, experts, block, part.as_deref_mut())?;
            }
            if let Some(part) = part {
                rows.add_block(sum, &part);
            }
        }
        Ok(())
    }
}
