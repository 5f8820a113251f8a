//! Sparse attention by a lightning indexer: the positions that each row attends to.
//!
//! ```text
//! x (T, C) -> index keys (T, X) = turned norm, to the cache; weights (T, I)
//! compressed query (T, A) -> index queries (T, I, X), turned
//! scores of all positions -> selected (T, top_k), ascending; used up to the next indexer
//! ```
//!
//! Every rank with heads computes the whole selection, from rows that all ranks have.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionRows, AttentionScratch, AttentionStep, IndexStep, Kernels, KvCache,
    SparseScratch,
};

use super::latent::LatentInputs;
use super::{BatchSize, add_bias, product};
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
    /// `(T, I)`
    weights: RegisteredMemory<f32>,
    /// For contexts beyond the selection.
    selected: Option<SelectedPositions>,
}

#[derive(Debug)]
struct SelectedPositions {
    /// `(T, top_k)`
    positions: Vec<u32>,
    scratch: SparseScratch,
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
        let store = shard
            .layers
            .clone()
            .find(own)
            .map(|layer| model.store(layer));
        let heads = shard.each_layer().map(|cut| cut.heads.len()).max();
        let selected = store.filter(|_| size.context > of.top_k && heads > Some(0));
        let selected = selected.map(|store| {
            let lens = (of.top_k, size.context);
            let scratch = SparseScratch::new(model.kernels(), store, heads.unwrap_or(0), lens);
            SelectedPositions {
                positions: vec![0; size.rows * of.top_k],
                scratch: scratch.expect("address space for a few rows of selected keys"),
            }
        });
        Some(Self {
            of,
            queries: memory(of.heads * of.dim),
            keys: memory(of.dim),
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
        kernels.products(x, [keys, product(&mut self.weights, &w.weights, rows)]);
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
        (cache, layer): (&Mutex<&mut KvCache>, usize),
        sequences: &[AttentionRows<'_>],
    ) {
        let mut cache = lock(cache);
        let kernels = place.kernels;
        kernels.write_index(&mut cache, layer, sequences, &self.keys);
        if !self.is_sparse(sequences) {
            return;
        }
        let Some(selected) = &mut self.selected else {
            unreachable!("contexts beyond the selection have buffers");
        };
        let step = IndexStep {
            cache: &cache,
            layer,
            heads: self.of.heads,
            queries: &self.queries,
            weights: &self.weights,
            sequences,
        };
        kernels.select(&step, &mut selected.scratch, &mut selected.positions);
    }

    /// Whether a row of `sequences` has more positions than an indexer chooses.
    pub(super) fn is_sparse(&self, sequences: &[AttentionRows<'_>]) -> bool {
        let top_k = self.of.top_k;
        sequences.iter().any(|s| s.position + s.rows > top_k)
    }

    /// Attention over the selected positions; sequences with few positions attend to all.
    pub(super) fn attend(
        &mut self,
        kernels: &Kernels,
        step: &AttentionStep<'_>,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) {
        let selected = self.selected.as_mut().expect("the rows were selected");
        let shape = step.cache.rows(step.layer);
        let [query, value] = [shape.head_dim, shape.value_dim].map(|n| n * step.heads);
        let top_k = self.of.top_k;
        let mut first = 0;
        let is_sparse = |s: &AttentionRows<'_>| s.position + s.rows > top_k;
        let alike = |a: &AttentionRows<'_>, b: &AttentionRows<'_>| is_sparse(a) == is_sparse(b);
        for sequences in step.sequences.chunk_by(alike) {
            let rows: usize = sequences.iter().map(|s| s.rows).sum();
            let part = AttentionStep {
                queries: &step.queries[first * query..(first + rows) * query],
                sequences,
                ..*step
            };
            let out = &mut out[first * value..(first + rows) * value];
            match is_sparse(&sequences[0]) {
                true => {
                    let positions = &selected.positions[first * top_k..];
                    kernels.sparse_attention(&part, positions, &mut selected.scratch, out);
                }
                false => kernels.attention(&part, scratch, out),
            }
            first += rows;
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
