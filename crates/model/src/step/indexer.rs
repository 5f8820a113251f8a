//! Sparse attention by a lightning indexer: the positions that each row attends to.
//!
//! ```text
//! x (T, C) -> index keys (T, X) = turned norm, to the cache; weights (T, I)
//! compressed query (T, A) -> index queries (T, I, X), turned
//! pools: gates (T, X), to the cache; a pool's last position gets the weighted mean of its keys
//! scores of all positions -> selected (T, top_k), ascending; used up to the next indexer
//! ```
//!
//! Every rank with heads computes the whole selection, from rows that all ranks have.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionRows, AttentionScratch, AttentionStep, Choice, IndexStep, Kernels,
    KvCache, SparseScratch,
};

use super::BatchSize;
use super::latent::LatentInputs;
use super::rows::{add_bias, product, whole};
use crate::config::{Indexer, Selection};
use crate::model::Model;
use crate::weights;

/// Added to the variance of index keys: the constant of `DeepseekV32Indexer`.
const EPS: f64 = 1e-6;

/// Buffers of an indexer; all indexers of a model have equal sizes.
#[derive(Debug)]
pub(super) struct IndexBuffers {
    of: Indexer,
    /// `(T, I X)`
    queries: RegisteredMemory<f32>,
    /// `(T, X)`
    keys: RegisteredMemory<f32>,
    /// `(T, X)` and `(T, 2 X)`: gates of a pool's inputs, and these with their gates.
    gates: RegisteredMemory<f32>,
    rows: RegisteredMemory<f32>,
    /// `(T, I)`
    weights: RegisteredMemory<f32>,
    /// For contexts beyond the selection.
    pub(super) selected: Option<SelectedPositions>,
}

/// Positions that the rows of a step attend to, of one layer at a time.
#[derive(Debug)]
pub(super) struct SelectedPositions {
    choice: Choice,
    /// `(T, room)`
    positions: Vec<u32>,
    scratch: SparseScratch,
}

impl SelectedPositions {
    /// For steps of up to `size` over layers like `layer`, with up to `heads` heads here. `None`
    /// where all positions of the context are chosen, or there are no heads.
    pub(super) fn new(
        model: &Model,
        (layer, heads): (usize, usize),
        choice: Choice,
        size: BatchSize,
    ) -> Option<Self> {
        if heads == 0 || !choice.is_sparse(size.context) {
            return None;
        }
        let lens = (choice, size.context);
        let scratch = SparseScratch::new(model.kernels(), model.store(layer), heads, lens);
        Some(Self {
            choice,
            positions: vec![0; size.rows * choice.room()],
            scratch: scratch.expect("address space for a few rows of selected keys"),
        })
    }

    /// Whether a row of `sequences` does not attend to all of its positions.
    pub(super) fn is_sparse(&self, sequences: &[AttentionRows<'_>]) -> bool {
        sequences.iter().any(|s| is_sparse(self.choice, s))
    }

    /// Attention of the heads of KV head `nth` over the positions selected for it, which in rows
    /// with few are all.
    pub(super) fn attend_head(
        &mut self,
        kernels: &Kernels,
        step: &AttentionStep<'_>,
        nth: usize,
        out: &mut [f32],
    ) {
        self.scratch.set_head(nth);
        kernels.sparse_attention(step, &self.positions, &mut self.scratch, out);
    }

    /// Attention over the selected positions; sequences with few positions attend to all.
    pub(super) fn attend(
        &mut self,
        kernels: &Kernels,
        step: &AttentionStep<'_>,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) {
        let shape = step.cache.rows(step.layer);
        let [query, value] = [shape.head_dim, shape.value_dim].map(|n| n * step.heads);
        let (choice, mut first) = (self.choice, 0);
        let alike = |a: &AttentionRows<'_>, b: &AttentionRows<'_>| {
            is_sparse(choice, a) == is_sparse(choice, b)
        };
        for sequences in step.sequences.chunk_by(alike) {
            let rows: usize = sequences.iter().map(|s| s.rows).sum();
            let part = AttentionStep {
                queries: &step.queries[first * query..(first + rows) * query],
                sequences,
                ..*step
            };
            let out = &mut out[first * value..(first + rows) * value];
            match is_sparse(choice, &sequences[0]) {
                true => {
                    let positions = &self.positions[first * choice.room()..];
                    kernels.sparse_attention(&part, positions, &mut self.scratch, out);
                }
                false => kernels.attention(&part, scratch, out),
            }
            first += rows;
        }
    }
}

/// Whether the last row of a sequence does not attend to all of its positions.
const fn is_sparse(choice: Choice, sequence: &AttentionRows<'_>) -> bool {
    choice.is_sparse(sequence.position + sequence.rows)
}

/// Selects the positions of each row of `step`, where a sequence has more than are chosen.
pub(super) fn select(kernels: &Kernels, step: &IndexStep<'_>, own: Option<&mut SelectedPositions>) {
    let Some(own) = own.filter(|own| own.is_sparse(step.sequences)) else {
        return; // a context beyond the selection has buffers
    };
    kernels.select(step, &mut own.scratch, &mut own.positions);
}

impl IndexBuffers {
    /// For steps of up to `size`; `None` for models without an indexer.
    pub(super) fn new(model: &Model, size: BatchSize) -> Option<Self> {
        let Selection::Own(of) = model.config().latent?.selection else {
            return None;
        };
        let memory = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let shard = model.shard();
        let own = |layer: &usize| {
            let latent = model.config().layers[*layer].latent;
            matches!(latent.map(|of| of.selection), Some(Selection::Own(_)))
        };
        let layer = shard.layers.clone().find(own);
        let heads = shard.each_layer().map(|cut| cut.heads.len()).max();
        let heads = heads.unwrap_or(0);
        let choice = Choice {
            top_k: of.top_k,
            pool: of.pool,
            local: 0,
        };
        let gated = usize::from(of.pool > 1);
        let selected =
            layer.and_then(|layer| SelectedPositions::new(model, (layer, heads), choice, size));
        Some(Self {
            of,
            queries: memory(of.heads * of.dim),
            keys: memory(of.dim),
            gates: memory(gated * of.dim),
            rows: memory(2 * gated * of.dim),
            weights: memory(of.heads),
            selected,
        })
    }

    /// x, compressed queries -> index keys, queries and weights
    pub(super) fn project(
        &mut self,
        place: &LatentInputs<'_>,
        w: &weights::Indexer,
        x: &Activations,
        compressed: &Activations,
    ) {
        let (of, rows, kernels) = (self.of, x.rows(), place.kernels);
        let keys = product(&mut self.keys, &w.key, rows);
        let gates = w.gate.as_ref();
        let gates = gates.map(|(matrix, _)| whole(matrix, &mut self.gates, rows));
        let outs = [keys, product(&mut self.weights, &w.weights, rows)];
        kernels.products(x, outs.into_iter().chain(gates));
        kernels.products(compressed, [product(&mut self.queries, &w.query, rows)]);
        add_bias(&mut self.keys, w.key.bias.as_deref(), rows);
        add_bias(&mut self.queries, w.query.bias.as_deref(), rows);
        let scale = 1.0 / ((of.heads * of.dim) as f32).sqrt();
        let [keys, queries, weights] = [
            (&mut self.keys, of.dim),
            (&mut self.queries, of.heads * of.dim),
            (&mut self.weights, of.heads),
        ]
        .map(|(values, n)| DisjointMut::new(&mut values[..rows * n], n));
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (key, query, weights) = unsafe { (keys.part(t), queries.part(t), weights.part(t)) };
            layer_norm(key, &w.norm);
            kernels.rope(key, of.dim, place.angles_of(t), of.pairs);
            kernels.rope(query, of.dim, place.angles_of(t), of.pairs);
            weights.iter_mut().for_each(|weight| *weight *= scale);
        });
    }

    /// Writes index keys to the cache and selects the positions of each row, where a sequence has
    /// more than an indexer chooses.
    pub(super) fn select(
        &mut self,
        place: &LatentInputs<'_>,
        w: &weights::Indexer,
        (cache, layer): (&Mutex<&mut KvCache>, usize),
        sequences: &[AttentionRows<'_>],
    ) {
        let mut cache = lock(cache);
        let kernels = place.kernels;
        match &w.gate {
            None => kernels.write_index(&mut cache, layer, sequences, &self.keys),
            Some((_, biases)) => {
                self.join_gates(sequences.iter().map(|sequence| sequence.rows).sum());
                kernels.write_index(&mut cache, layer, sequences, &self.rows);
                let pools = (sequences, self.of.pool);
                kernels.weigh_pools(&mut cache, layer, pools, &mut self.rows, biases);
            }
        }
        let step = IndexStep {
            cache: &cache,
            layer,
            heads: self.of.heads,
            queries: &self.queries,
            weights: &self.weights,
            sequences,
        };
        select(kernels, &step, self.selected.as_mut());
    }
}

impl IndexBuffers {
    /// keys, gates (T, X) -> rows (T, 2 X)
    fn join_gates(&mut self, rows: usize) {
        let n = self.of.dim;
        let parts = self.keys.chunks_exact(n).zip(self.gates.chunks_exact(n));
        let outs = self.rows.chunks_exact_mut(2 * n).take(rows);
        for (out, (key, gates)) in outs.zip(parts) {
            out[..n].copy_from_slice(key);
            out[n..].copy_from_slice(gates);
        }
    }
}

/// `(x - mean) / sqrt(variance + EPS) * weight + bias` in place, summed in f64 in order.
fn layer_norm(x: &mut [f32], [weight, bias]: &[Vec<f32>; 2]) {
    let n = x.len() as f64;
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let square = |x: &f32| (f64::from(*x) - mean) * (f64::from(*x) - mean);
    let factor = 1.0 / (x.iter().map(square).sum::<f64>() / n + EPS).sqrt();
    for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = ((f64::from(*x) - mean) * factor) as f32 * weight + bias;
    }
}
