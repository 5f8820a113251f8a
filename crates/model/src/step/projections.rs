//! Norms over all query heads and over all key heads, which several ranks may share.
//!
//! ```text
//! every rank      squares (T, its heads + its KV heads): a sum over each head
//!                 exchanged, which takes 4 T (heads + KV heads) bytes
//! each row        the tree over all heads -> one factor for q, one for k
//! ```
//!
//! Two ranks that hold the same KV head both send its sum, with equal values.

use paceline_comm::RegisteredMemory;
use paceline_tensor::Kernels;
use paceline_tensor::pool::DisjointMut;

use super::halves::HalfTurn;
use super::rows::exchanged;
use crate::model::Model;
use crate::split::HeadRanges;
use crate::{Error, LayerShape};

/// Buffers of [`norm`](Self::norm), for models with such norms.
#[derive(Debug)]
pub(super) struct Projections {
    /// `(ranks, T, heads + KV heads)`: sums over each rank's heads.
    squares: RegisteredMemory<f32>,
    /// `(T, heads + KV heads)`: sums of the whole layer.
    all: Vec<f32>,
    /// Values that each rank sends.
    counts: Vec<usize>,
}

/// A rank's queries or keys, `(T, its heads, D)`, and the weights of their norm.
#[derive(Debug)]
pub(super) struct Projected<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) weight: &'a [f32],
}

impl Projections {
    /// For steps of up to `rows` rows.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let (config, shard) = (model.config(), model.shard());
        if !config.family.norms_projections() {
            return None;
        }
        let held = shard.each_layer().map(|cut| {
            let each = cut.heads_by_rank.iter();
            each.map(HeadRanges::total).sum::<usize>()
        });
        let layers = config.layers[shard.layers.clone()].iter();
        let all = layers.map(|shape| shape.heads + shape.kv_heads).max();
        Some(Self {
            squares: exchanged(model, rows * held.max().unwrap_or(0)),
            all: vec![0.0; rows * all.unwrap_or(0)],
            counts: Vec::with_capacity(shard.stage_ranks().len()),
        })
    }

    /// Norms this rank's queries and keys of `rows` rows in place.
    pub(super) fn norm(
        &mut self,
        (model, index): (&Model, usize),
        rows: usize,
        [q, k]: [Projected<'_>; 2],
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let shape = &model.config().layers[index];
        let cut = model.shard().layer(index);
        let by_rank = &cut.heads_by_rank[..];
        let mine = cut.heads_place();
        let before: usize = by_rank[..mine].iter().map(HeadRanges::total).sum();
        let held = &by_rank[mine];
        let kernels = model.kernels();
        let own = &mut self.squares[before * rows..(before + held.total()) * rows];
        squares(kernels, shape.head_dim, held, [&*q.values, &*k.values], own);
        self.exchange((model, index), by_rank, rows, turn)?;
        self.collect(shape, by_rank, rows);
        let (all, n) = (&mut self.all, shape.heads + shape.kv_heads);
        for row in all.chunks_exact_mut(n).take(rows) {
            let (heads, kv_heads) = row.split_at_mut(shape.heads);
            for sums in [heads, kv_heads] {
                let elements = (sums.len() * shape.head_dim) as f32;
                let mean = tree_sum(sums) / elements;
                sums[0] = 1.0 / (mean + model.config().norm_eps).sqrt();
            }
        }
        for (part, first) in [(q, 0), (k, shape.heads)] {
            if !part.weight.is_empty() {
                scale(kernels, rows, part, |t| all[t * n + first]);
            }
        }
        Ok(())
    }

    fn exchange(
        &mut self,
        (model, index): (&Model, usize),
        by_rank: &[HeadRanges],
        rows: usize,
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let Some(links) = model.links().filter(|_| by_rank.len() > 1) else {
            return Ok(());
        };
        let Self {
            squares, counts, ..
        } = self;
        counts.clear();
        counts.extend(by_rank.iter().map(|held| held.total() * rows));
        let total = counts.iter().sum();
        let mut exchange = || links.gather(index, &mut squares[..total], counts);
        match turn {
            Some(turn) => links.in_turn(turn, index, exchange),
            None => exchange(),
        }
    }

    /// Sorts the sums of all ranks by heads, KV heads last.
    fn collect(&mut self, shape: &LayerShape, by_rank: &[HeadRanges], rows: usize) {
        let n = shape.heads + shape.kv_heads;
        let mut rest = &self.squares[..];
        for held in by_rank.iter().filter(|held| held.total() > 0) {
            let (part, behind) = rest.split_at(held.total() * rows);
            rest = behind;
            let rows = part.chunks_exact(held.total());
            for (row, all) in rows.zip(self.all.chunks_exact_mut(n)) {
                let (heads, kv_heads) = row.split_at(held.heads.len());
                all[held.heads.clone()].copy_from_slice(heads);
                all[shape.heads..][held.kv_heads.clone()].copy_from_slice(kv_heads);
            }
        }
    }
}

/// Sum of squares of each head of each row.
fn squares(
    kernels: &Kernels,
    head_dim: usize,
    held: &HeadRanges,
    parts: [&[f32]; 2],
    out: &mut [f32],
) {
    if out.is_empty() {
        return;
    }
    let counts = [held.heads.len(), held.kv_heads.len()];
    let out = DisjointMut::new(out, held.total());
    kernels.for_rows(out.len(), |t| {
        // SAFETY: each row is visited once.
        let mut sums = unsafe { out.part(t) }.iter_mut();
        for (part, count) in parts.iter().zip(counts) {
            let row = &part[t * count * head_dim..(t + 1) * count * head_dim];
            for (head, sum) in row.chunks_exact(head_dim).zip(&mut sums) {
                *sum = kernels.square_sum(head);
            }
        }
    });
}

/// The sum over the tree with leaves `values`, which it overwrites, in the order of
/// [`paceline_base::tree`].
fn tree_sum(values: &mut [f32]) -> f32 {
    let mut apart = 1;
    while apart < values.len() {
        for left in (0..values.len() - apart).step_by(2 * apart) {
            values[left] += values[left + apart];
        }
        apart *= 2;
    }
    values[0]
}

/// `x * factor * weight`, with a factor per row.
fn scale(
    kernels: &Kernels,
    rows: usize,
    part: Projected<'_>,
    factor: impl Fn(usize) -> f32 + Sync,
) {
    let (n, weight) = (part.weight.len(), part.weight);
    let values = DisjointMut::new(&mut part.values[..rows * n], n);
    kernels.for_rows(rows, |t| {
        // SAFETY: each row is visited once.
        let row = unsafe { values.part(t) };
        let factor = factor(t);
        for (x, w) in row.iter_mut().zip(weight) {
            *x = *x * factor * w;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::tree_sum;
    use paceline_base::tree;

    #[test]
    fn the_sum_is_that_of_the_tree() {
        let values: Vec<f32> = (0..48).map(|i| (i as f32 * 1.37).sin() * 1e3).collect();
        for n in 1..=values.len() {
            let leaves: Vec<&[f32]> = values[..n].chunks(1).collect();
            let mut own = values[..n].to_vec();
            assert_eq!(tree_sum(&mut own), tree::sum_all(&leaves)[0], "{n} leaves");
        }
    }
}
