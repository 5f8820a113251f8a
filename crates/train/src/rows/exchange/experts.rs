//! Rows and gradients of experts that several ranks have a part of each.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::LeafRows;
use super::RowSeat;
use crate::error::Error;
use crate::shard::share;

/// Rows of each block that chose each expert of a layer.
pub(crate) type ExpertUses = Vec<Vec<usize>>;

/// Values of a block's rows that chose an expert, by both.
pub(crate) type ExpertParts = BTreeMap<(usize, usize), Vec<f32>>;

impl RowSeat {
    /// The experts of a rank, of `count`.
    pub(crate) fn experts_of(&self, rank: usize, count: usize) -> Range<usize> {
        share(0..count, rank, self.of)
    }

    /// The uses of `count` experts in all blocks, from those in the blocks that are here.
    ///
    /// # Errors
    /// [`Error::Comm`] of the other ranks.
    pub(crate) fn uses(
        &self,
        rows: &LeafRows,
        own: Vec<f32>,
        count: usize,
    ) -> Result<ExpertUses, Error> {
        let all: Vec<Vec<usize>> = (0..self.of)
            .map(|rank| self.blocks_of(rows, rank))
            .collect();
        let counts = all.iter().map(|blocks| blocks.len() * count).collect();
        let got = self.calls.gather(own, counts)?;
        let mut uses = vec![Vec::new(); rows.blocks.len()];
        for (block, own) in all.into_iter().flatten().zip(got.chunks(count)) {
            uses[block] = own.iter().map(|n| *n as usize).collect();
        }
        Ok(uses)
    }

    /// Sends the rows of this rank's blocks, `width` numbers each, to the ranks of their experts,
    /// and gets those for its own experts. With `is_back` the other way.
    ///
    /// # Errors
    /// [`Error::Comm`] of the other ranks.
    pub(crate) fn swap_experts(
        &self,
        rows: &LeafRows,
        uses: &ExpertUses,
        parts: &ExpertParts,
        (width, is_back): (usize, bool),
    ) -> Result<ExpertParts, Error> {
        let len = |key: &(usize, usize)| uses[key.0][key.1] * width;
        let (mut sent, mut due, mut counts) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        for rank in 0..self.of {
            let out = self.routes(rows, uses, self.rank, rank);
            let back = self.routes(rows, uses, rank, self.rank);
            let (sends, gets) = if is_back { (back, out) } else { (out, back) };
            for (counts, keys) in counts.iter_mut().zip([&sends, &gets]) {
                counts.push(keys.iter().map(len).sum());
            }
            sent.extend(sends.iter().flat_map(|key| &parts[key]));
            due.extend(gets);
        }
        let got = self.calls.swap(sent, counts)?;
        let mut next = got.as_slice();
        let part = |key: (usize, usize)| {
            let (own, rest) = next.split_at(len(&key));
            next = rest;
            (key, own.to_vec())
        };
        Ok(due.into_iter().map(part).collect())
    }

    /// The blocks of rank `from` and the experts of rank `to` that their rows chose.
    fn routes(
        &self,
        rows: &LeafRows,
        uses: &ExpertUses,
        from: usize,
        to: usize,
    ) -> Vec<(usize, usize)> {
        let blocks = self.blocks_of(rows, from).into_iter();
        let of_block = |block: usize| {
            let own = self.experts_of(to, uses[block].len());
            let chosen = own.filter(move |expert| uses[block][*expert] > 0);
            chosen.map(move |expert| (block, expert))
        };
        blocks.flat_map(of_block).collect()
    }

    /// Puts the gradients of a block's experts into its gradient `part`, on rank 0, which the other
    /// ranks send theirs.
    pub(super) fn sum_experts(
        &self,
        rows: &LeafRows,
        sums: &mut ExpertSums,
        block: usize,
        part: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        let number = rows.blocks.len() + block;
        let Some(part) = part else {
            let own = sums.take(block, self.experts_of(self.rank, sums.ranges.len()));
            return match own.is_empty() {
                true => Ok(()),
                false => self.calls.give(own, number),
            };
        };
        for rank in 0..self.of {
            let experts = self.experts_of(rank, sums.ranges.len());
            let ranges = sums.chosen(block, experts.clone());
            let n: usize = ranges.iter().map(Range::len).sum();
            let values = match rank {
                _ if n == 0 => continue,
                0 => sums.take(block, experts),
                _ => self.calls.get(n, rank, number)?,
            };
            let mut next = values.as_slice();
            for range in ranges {
                let (own, rest) = next.split_at(range.len());
                part[range].copy_from_slice(own);
                next = rest;
            }
        }
        Ok(())
    }
}

/// Gradients of the experts of this rank, by block.
#[derive(Debug)]
pub(crate) struct ExpertSums {
    /// Ranges of each expert's trained values in their part.
    ranges: Vec<Vec<Range<usize>>>,
    uses: ExpertUses,
    /// Of a whole part, zeros between two additions.
    part: Vec<f32>,
    found: ExpertParts,
}

impl ExpertSums {
    /// For a part of `len` numbers.
    pub(crate) fn new(ranges: Vec<Vec<Range<usize>>>, uses: ExpertUses, len: usize) -> Self {
        Self {
            ranges,
            uses,
            part: vec![0.0; len],
            found: ExpertParts::new(),
        }
    }

    /// Has `work` add to the gradient of an expert for the rows of a block.
    pub(crate) fn add<T>(&mut self, key: (usize, usize), work: impl FnOnce(&mut [f32]) -> T) -> T {
        let done = work(&mut self.part);
        let mut own = Vec::new();
        for range in &self.ranges[key.1] {
            own.extend_from_slice(&self.part[range.clone()]);
            self.part[range.clone()].fill(0.0);
        }
        self.found.insert(key, own);
        done
    }

    /// Ranges of those of some experts that rows of a block chose.
    fn chosen(&self, block: usize, experts: Range<usize>) -> Vec<Range<usize>> {
        let chosen = experts.filter(|expert| self.uses[block][*expert] > 0);
        chosen
            .flat_map(|expert| self.ranges[expert].clone())
            .collect()
    }

    /// The gradients of the same, one behind the other.
    fn take(&mut self, block: usize, experts: Range<usize>) -> Vec<f32> {
        let own = experts.filter_map(|expert| self.found.remove(&(block, expert)));
        own.flatten().collect()
    }
}
