//! The rows of a leaf: its sequences, and the blocks that they are cut into.
//!
//! A block has [`BLOCK_ROWS`] rows at most: whole sequences, or a piece of a long one. Sums over
//! the rows of a leaf are sums over its blocks, in their order. So ranks that have some of the
//! blocks each ([`exchange`]) compute the bits of one process.
//!
//! ```text
//! rows   0      1024      2048      3072      4096      a row of 4096 tokens over two ranks:
//!        | rank 0 | rank 1 | rank 1 | rank 0 |          later blocks attend to more keys
//! ```
//! - Queries of a block attend to the keys of all blocks before it, which all ranks gather.
//! - Each block has gradients of the keys before it. The sum of a key's is over later blocks.
//! - Each block has a gradient of the weights.

mod exchange;

use std::ops::Range;
use std::sync::Arc;

use paceline_model::Rope;

use crate::error::Error;
use exchange::ExpertSums;
pub(crate) use exchange::{ExpertParts, ExpertUses, RowCalls, RowSeat};

/// Most rows of a block. Products over as many rows are as fast as longer ones, and the scores of a
/// head over 8,192 keys are 32 MiB.
pub(crate) const BLOCK_ROWS: usize = 1024;

/// The tokens of a leaf by their sequences: what attention may see, and their angles.
#[derive(Clone, Debug)]
pub struct LeafRows {
    /// Length of each sequence; they lie one after the other, and never see one another.
    pub lengths: Vec<usize>,
    /// For each of the model's rotations: `(cos, sin)` of each pair, by position in a sequence.
    angles: Vec<Vec<(f32, f32)>>,
    blocks: Vec<RowBlock>,
    /// The ranks that have the blocks; none where all of them are here.
    ranks: Option<Arc<RowSeat>>,
}

/// Neighbouring rows of a leaf.
#[derive(Clone, Debug, PartialEq)]
struct RowBlock {
    /// In the leaf.
    rows: Range<usize>,
    pieces: Vec<Piece>,
    /// Rows with a target.
    judged: usize,
}

/// Rows of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    /// Where its sequence begins in the leaf.
    pub(crate) first: usize,
    /// Positions in the sequence.
    pub(crate) at: Range<usize>,
}

impl LeafRows {
    /// Sequences of these lengths, whose rows have `targets`, turned by `ropes`. Without `is_cut`
    /// they are one block.
    pub(crate) fn new(
        lengths: Vec<usize>,
        targets: &[Option<u32>],
        ropes: &[Rope],
        (is_cut, ranks): (bool, Option<Arc<RowSeat>>),
    ) -> Self {
        let most = if is_cut { BLOCK_ROWS } else { usize::MAX };
        let mut blocks = blocks(&lengths, most);
        for block in &mut blocks {
            let targets = targets.get(block.rows.clone());
            block.judged = targets.unwrap_or_default().iter().flatten().count();
        }
        let mut rows = Self {
            lengths,
            angles: Vec::with_capacity(ropes.len()),
            blocks,
            ranks,
        };
        for rope in ropes {
            let mut angles = Vec::new();
            rope.angles(0..rows.longest(), &mut angles);
            rows.angles.push(angles);
        }
        rows
    }

    /// Length of the longest sequence.
    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The first token and the length of each sequence.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (usize, usize)> {
        firsts(&self.lengths)
    }

    /// The blocks that are here.
    pub(crate) fn own(&self) -> impl Iterator<Item = BlockRows<'_>> {
        let is_own = |number: usize| self.ranks.as_ref().is_none_or(|seat| seat.has(number));
        let own = (0..self.blocks.len()).filter(move |number| is_own(*number));
        own.scan(0, |next, number| {
            let start = *next;
            *next += self.blocks[number].rows.len();
            Some(BlockRows {
                rows: self,
                number,
                here: start..*next,
            })
        })
    }

    /// Ranges of the rows that are here, in the leaf.
    pub(crate) fn own_rows(&self) -> impl Iterator<Item = Range<usize>> {
        self.own().map(|block| block.block().rows.clone())
    }

    /// The ranks, where they have parts of the experts of each layer.
    pub(crate) fn cut_experts(&self) -> Option<&RowSeat> {
        self.ranks.as_deref().filter(|seat| seat.cuts_experts)
    }

    /// The first row of any block.
    pub(crate) fn first_of(&self, block: usize) -> usize {
        self.blocks[block].rows.start
    }

    /// Keys and values, (T, n) each for `widths` n, of all rows, from those of each block that is
    /// here.
    ///
    /// # Errors
    /// [`Error::Comm`] of the ranks with other blocks.
    pub(crate) fn keys(
        &self,
        mut own: Vec<[Vec<f32>; 2]>,
        widths: [usize; 2],
    ) -> Result<[Vec<f32>; 2], Error> {
        match &self.ranks {
            Some(seat) => seat.keys(self, &own, widths),
            None if own.len() == 1 => Ok(own.pop().unwrap_or_default()),
            None => Ok([0, 1].map(|n| own.iter().flat_map(|two| &two[n]).copied().collect())),
        }
    }

    /// Gradients of keys and values of each block that is here, from those (T, n) that each such
    /// block has for all rows.
    ///
    /// # Errors
    /// [`Error::Comm`] of the ranks with other blocks.
    pub(crate) fn key_gradients(
        &self,
        own: Vec<[Vec<f32>; 2]>,
        widths: [usize; 2],
    ) -> Result<Vec<[Vec<f32>; 2]>, Error> {
        if let Some(seat) = &self.ranks {
            return seat.key_gradients(self, &own, widths);
        }
        if own.len() == 1 {
            return Ok(own);
        }
        let mut sums = widths.map(|n| vec![0.0; self.tokens() * n]);
        for block in &own {
            for (sum, part) in sums.iter_mut().zip(block) {
                self.add_block(sum, part);
            }
        }
        let of = |block: &RowBlock| {
            let part =
                |n: usize| &sums[n][block.rows.start * widths[n]..block.rows.end * widths[n]];
            [part(0).to_vec(), part(1).to_vec()]
        };
        Ok(self.blocks.iter().map(of).collect())
    }

    /// Adds a block's part of a sum. Leaves of one block have no sum, so its zeros keep their sign.
    fn add_block(&self, sum: &mut [f32], part: &[f32]) {
        match self.blocks.len() {
            1 => sum.copy_from_slice(part),
            _ => sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
        }
    }

    /// The sum of what blocks have, in their order: of losses.
    ///
    /// # Errors
    /// [`Error::Comm`] of the ranks with other blocks.
    pub(crate) fn sum(&self, own: Vec<f64>) -> Result<f64, Error> {
        let all = match &self.ranks {
            Some(seat) => seat.losses(self, own)?,
            None => own,
        };
        Ok(all.iter().sum())
    }
}

/// A block that is here.
#[derive(Clone, Debug)]
pub(crate) struct BlockRows<'a> {
    rows: &'a LeafRows,
    number: usize,
    /// Range among the rows that are here.
    pub(crate) here: Range<usize>,
}

impl<'a> BlockRows<'a> {
    fn block(&self) -> &'a RowBlock {
        &self.rows.blocks[self.number]
    }

    /// Its place among the blocks of the leaf.
    pub(crate) const fn number(&self) -> usize {
        self.number
    }

    /// Its first row in the leaf.
    pub(crate) fn first(&self) -> usize {
        self.block().rows.start
    }

    /// Rows with a target.
    pub(crate) fn judged(&self) -> usize {
        self.block().judged
    }

    pub(crate) const fn leaf(&self) -> &'a LeafRows {
        self.rows
    }

    /// Its rows by sequence.
    pub(crate) fn pieces(&self) -> &'a [Piece] {
        &self.block().pieces
    }

    /// The position of each row in its sequence.
    pub(crate) fn positions(&self) -> impl Iterator<Item = usize> {
        self.block()
            .pieces
            .iter()
            .flat_map(|piece| piece.at.clone())
    }

    /// `(cos, sin)` of the pairs of a rotation, by position, and how many pairs there are.
    pub(crate) fn angles(&self, rope: usize) -> (&'a [(f32, f32)], usize) {
        let angles = &self.rows.angles[rope];
        (angles, angles.len() / self.rows.longest().max(1))
    }

    /// Its rows among those that are here, of `n` numbers each.
    pub(crate) fn of<'x, T>(&self, x: &'x [T], n: usize) -> &'x [T] {
        &x[self.here.start * n..self.here.end * n]
    }
}

/// Sums of the gradients of blocks, in the order of blocks.
pub(crate) struct BlockSums<'a> {
    rows: &'a LeafRows,
    /// Of the block under way, or with ranks of each block that is here.
    each: Vec<Vec<f32>>,
    /// Of experts that this rank has, where ranks have parts of them.
    experts: Option<ExpertSums>,
    sum: &'a mut [f32],
}

impl<'a> BlockSums<'a> {
    /// Sums that are added to `sum`, all zeros.
    pub(crate) fn new(rows: &'a LeafRows, sum: &'a mut [f32]) -> Self {
        let count = match (&rows.ranks, rows.blocks.len()) {
            (None, 1) => 0,
            (None, _) => 1,
            (Some(_), _) => rows.own().count(),
        };
        let each = vec![vec![0.0; sum.len()]; count];
        let experts = None;
        Self {
            rows,
            each,
            experts,
            sum,
        }
    }

    /// Has `work` add to the gradient of the `nth` block that is here.
    pub(crate) fn add<T>(&mut self, nth: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
        if self.rows.ranks.is_some() {
            return work(&mut self.each[nth]);
        }
        let Some(own) = self.each.first_mut() else {
            return work(self.sum);
        };
        let done = work(own);
        self.rows.add_block(self.sum, own);
        own.fill(0.0);
        done
    }

    /// Has gradients of routed experts, by whose trained `ranges` and `uses` in each block, come
    /// from the ranks of the experts.
    pub(crate) fn begin_experts(&mut self, ranges: Vec<Vec<Range<usize>>>, uses: ExpertUses) {
        self.experts = Some(ExpertSums::new(ranges, uses, self.sum.len()));
    }

    /// Has `work` add to the gradient of an expert of this rank, for the rows of a block.
    pub(crate) fn add_expert<T>(
        &mut self,
        (block, expert): (usize, usize),
        work: impl FnOnce(&mut [f32]) -> T,
    ) -> T {
        let sums = self.experts.as_mut().expect("begun before");
        sums.add((block, expert), work)
    }

    /// Ends the sums. With ranks, the first one has them.
    ///
    /// # Errors
    /// [`Error::Comm`] of the ranks with other blocks.
    pub(crate) fn finish(self) -> Result<(), Error> {
        match &self.rows.ranks {
            Some(seat) => seat.sum(self.rows, (self.each, self.experts), self.sum),
            None => Ok(()),
        }
    }
}

/// The first token and the length of each sequence.
fn firsts(lengths: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    lengths.iter().scan(0, |next, len| {
        let first = *next;
        *next += len;
        Some((first, *len))
    })
}

/// Blocks of at most `most` rows: a sequence begins a block where it does not fit into the last.
fn blocks(lengths: &[usize], most: usize) -> Vec<RowBlock> {
    let mut blocks: Vec<RowBlock> = Vec::new();
    for (first, len) in firsts(lengths) {
        let mut start = 0;
        while start < len {
            let end = start.saturating_add(most).min(len);
            let piece = Piece {
                first,
                at: start..end,
            };
            match blocks.last_mut() {
                Some(last) if last.rows.len() + piece.at.len() <= most => {
                    last.rows.end += piece.at.len();
                    last.pieces.push(piece);
                }
                _ => blocks.push(RowBlock {
                    rows: first + start..first + end,
                    pieces: Vec::from([piece]),
                    judged: 0,
                }),
            }
            start = end;
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use paceline_tensor::Kernels;

    use super::*;
    use crate::class::TrainingClass;
    use crate::engine::LayerEngine;
    use crate::net::{TrainableModel, Trained};
    use crate::params::Lora;
    use crate::weights::Method;

    /// A layer over 1,500 tokens in three blocks and in one: the same values, and gradients but for
    /// the order of sums.
    #[test]
    fn blocks_give_what_the_whole_gives() {
        let golden = "../../tests-data/golden/hf/llama-tied";
        let trained = Trained {
            model: Path::new(env!("CARGO_MANIFEST_DIR")).join(golden),
            method: Method::Full,
            lora: Lora {
                rank: 2,
                alpha: 4.0,
            },
            targets: Vec::new(),
            layers: None,
            dropout: 0.0,
            balance: 0.0,
            class: TrainingClass::Cpu,
        };
        let net = TrainableModel::load(&trained, Kernels::new(2).unwrap()).unwrap();
        let params = net.first_values(1);
        let params = &params[net.parts().values[1].clone()];
        let (n, c) = (1500, net.config().width);
        let numbers = |k: usize| (0..n * c).map(move |i| ((i * k) % 997) as f32 / 997.0 - 0.5);
        let (x, dy): (Vec<f32>, Vec<f32>) = (numbers(7919).collect(), numbers(104_729).collect());
        let both = [true, false].map(|is_cut| {
            let (lengths, ropes) = (Vec::from([40, n - 40]), &net.config().ropes);
            let rows = LeafRows::new(lengths, &[], ropes, (is_cut, None));
            let (cpu, mut grads) = (net.cpu(None), vec![0.0; params.len()]);
            let (y, kept) = cpu.forward(params, 0, &rows, &x).unwrap();
            let at = (0, &rows, x.as_slice());
            let dx = cpu
                .backward(params, at, Some(kept), &dy, &mut grads)
                .unwrap();
            (rows.blocks.len(), y, [dx, grads])
        });
        let [(3, y, found), (1, expected, whole)] = both else {
            panic!("another number of blocks");
        };
        assert!(y == expected);
        for (found, whole) in found.iter().zip(&whole) {
            let largest = whole.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * largest;
            assert!(found.iter().zip(whole).all(near));
        }
    }

    #[test]
    fn blocks_are_whole_sequences_or_pieces_of_long_ones() {
        let of = |lengths: &[usize]| {
            let blocks = blocks(lengths, 10);
            let text = |block: &RowBlock| format!("{:?} {}", block.rows, block.pieces.len());
            blocks.iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(of(&[3, 4, 3, 2]), ["0..10 3", "10..12 1"]);
        assert_eq!(of(&[25]), ["0..10 1", "10..20 1", "20..25 1"]);
        assert_eq!(of(&[4, 12, 3]), ["0..4 1", "4..14 1", "14..19 2"]);
        assert_eq!(of(&[]), [""; 0]);
        let piece = Piece {
            first: 4,
            at: 10..12,
        };
        assert_eq!(blocks(&[4, 12, 3], 10)[2].pieces[0], piece);
    }
}
