//! Gates cut by their mean and deviation over the whole feed-forward (Gemma 3n), which several
//! ranks may share.
//!
//! ```text
//! every rank      sums (its leaves, T, 2): of its gates and of their squares
//!                 exchanged, which takes 8 T leaves bytes
//! each row        gate = max(gate - (mean + cutoff * deviation), 0)
//! ```

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;

use super::halves::HalfTurn;
use super::rows::exchanged;
use crate::Error;
use crate::model::Model;

/// Buffers of [`cut`](Self::cut).
#[derive(Debug)]
pub(super) struct GateCutoffs {
    /// `(leaves, T, 2)`: sums over each leaf of the feed-forward.
    sums: RegisteredMemory<f32>,
    /// Values that each rank sends.
    counts: Vec<usize>,
}

impl GateCutoffs {
    /// For steps of up to `rows` rows; `None` for models without cutoffs.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let (layers, shard) = (&model.config().layers, model.shard());
        layers.iter().find_map(|layer| layer.gate_cutoff)?;
        let leaves = shard.each_layer().map(|cut| cut.dense().leaves).max();
        Some(Self {
            sums: exchanged(model, rows * 2 * leaves.unwrap_or(0)),
            counts: Vec::with_capacity(shard.stage_ranks().len()),
        })
    }

    /// Cuts this rank's gates of `rows` rows in place, at `cutoff` deviations above their mean.
    pub(super) fn cut(
        &mut self,
        (model, index): (&Model, usize),
        (cutoff, gates): (f32, &mut [f32]),
        rows: usize,
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let cut = model.shard().layer(index).dense();
        let (mine, each) = (cut.columns().len(), 2 * rows);
        let first = cut.leaf_ranges()[..cut.place()].iter().map(|of| of.len());
        let first: usize = first.sum();
        let own = self.sums[first * each..].chunks_exact_mut(each);
        for (leaf, sums) in own.take(mine.div_ceil(cut.leaf_cols)).enumerate() {
            let columns = leaf * cut.leaf_cols..((leaf + 1) * cut.leaf_cols).min(mine);
            for (t, out) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *out = sums_of(&gates[t * mine..(t + 1) * mine][columns.clone()]);
            }
        }
        self.exchange((model, index), rows, turn)?;
        let ffn = model.config().layers[index].ffn as f64;
        let (all, sums) = (cut.leaves, &self.sums);
        let gates = DisjointMut::new(&mut gates[..rows * mine], mine.max(1));
        model.kernels().for_rows(gates.len(), |t| {
            let of = |part: usize| -> f64 {
                let leaves = (0..all).map(|leaf| f64::from(sums[leaf * each + 2 * t + part]));
                leaves.sum::<f64>() / ffn
            };
            let mean = of(0);
            let deviation = (of(1) - mean * mean).max(0.0).sqrt();
            let least = (mean + f64::from(cutoff) * deviation) as f32;
            // SAFETY: each row is visited once.
            let row = unsafe { gates.part(t) };
            row.iter_mut().for_each(|x| *x = (*x - least).max(0.0));
        });
        Ok(())
    }

    /// Completes the sums by those of the other ranks.
    fn exchange(
        &mut self,
        (model, index): (&Model, usize),
        rows: usize,
        turn: Option<&mut HalfTurn<'_>>,
    ) -> Result<(), Error> {
        let ranges = model.shard().layer(index).dense().leaf_ranges();
        let Some(links) = model.links().filter(|_| ranges.len() > 1) else {
            return Ok(());
        };
        let Self { sums, counts } = self;
        counts.clear();
        counts.extend(ranges.iter().map(|leaves| leaves.len() * 2 * rows));
        let total = counts.iter().sum();
        let mut exchange = || links.gather(index, &mut sums[..total], counts);
        match turn {
            Some(turn) => links.in_turn(turn, index, exchange),
            None => exchange(),
        }
    }
}

/// Sum and sum of squares, in f64 in the order of the values.
fn sums_of(gates: &[f32]) -> [f32; 2] {
    let of = |sums: [f64; 2], x: &f32| [sums[0] + f64::from(*x), sums[1] + f64::from(x * x)];
    gates.iter().fold([0.0; 2], of).map(|sum| sum as f32)
}
