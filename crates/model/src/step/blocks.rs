//! Block-sparse attention (MiniMax M3): each KV head attends to blocks of positions that a query
//! of its own chooses.
//!
//! ```text
//! x (T, C) -> index queries (I, T, X), index keys (T, X), normed and turned; keys to the cache
//! a KV head: best score of each block -> selected (T, top_k), ascending -> attention of its heads
//! ```
//!
//! The kernels of indexers leave out scores below 0. So a query stands there twice, the second
//! time negated and with weight -1: `max(s, 0) - max(-s, 0)` is s.
//!
//! A rank selects for its own KV heads, from rows that all ranks have.

use std::ops::Range;
use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, AttentionScratch, AttentionStep, IndexStep, Kernels, KvCache};

use super::BatchSize;
use super::indexer::{SelectedPositions, select};
use super::pooled::PoolInputs;
use super::rows::product;
use crate::config::PoolIndexer;
use crate::model::Model;
use crate::weights;

/// Buffers; all indexers of a model have equal sizes. G heads of a KV head have D elements.
#[derive(Debug)]
pub(super) struct BlockBuffers {
    of: PoolIndexer,
    /// `(T, I X)`
    rows: RegisteredMemory<f32>,
    /// `(I, T, 2 X)`
    queries: RegisteredMemory<f32>,
    /// `(T, X)`
    keys: RegisteredMemory<f32>,
    /// `(T, 2)`: 1 and -1.
    weights: Vec<f32>,
    /// `(T, G D)` each: queries and results of one KV head's heads.
    own_queries: Vec<f32>,
    own_out: Vec<f32>,
    /// For contexts beyond the selection.
    selected: Option<SelectedPositions>,
}

impl BlockBuffers {
    /// For steps of up to `size`; `None` for models without such indexers.
    pub(super) fn new(model: &Model, size: BatchSize) -> Option<Self> {
        let (c, mut own) = (model.config(), model.shard().layers.clone());
        let layer = own.find(|layer| c.layers[*layer].block_indexer().is_some())?;
        let shape = &c.layers[layer];
        let of = shape.block_indexer().expect("it was found");
        let group = shape.heads / shape.kv_heads;
        let memory = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let heads = model.shard().layer(layer).heads.len().min(group);
        let selected = SelectedPositions::new(model, (layer, heads), of.choice, size);
        let room = selected.as_ref().map_or(0, |_| size.rows * group);
        Some(Self {
            rows: memory(of.heads * of.dim),
            queries: memory(of.heads * 2 * of.dim),
            keys: memory(of.dim),
            weights: [1.0, -1.0].repeat(size.rows),
            own_queries: vec![0.0; room * shape.head_dim],
            own_out: vec![0.0; room * shape.value_dim],
            selected,
            of,
        })
    }

    /// x -> index queries, and index keys in the cache.
    pub(super) fn project(
        &mut self,
        place: &PoolInputs<'_>,
        w: &weights::PoolIndexer,
        x: &Activations,
        (cache, layer): (&Mutex<&mut KvCache>, usize),
    ) {
        let (of, rows, kernels) = (self.of, x.rows(), place.kernels);
        let key = w.key.as_ref().expect("loaded for this family");
        let queries = product(&mut self.rows, &w.query_key, rows);
        kernels.products(x, [queries, product(&mut self.keys, key, rows)]);
        let (dim, pairs) = (of.dim, place.rope.frequencies.len());
        let from = &self.rows;
        let queries = DisjointMut::new(&mut self.queries[..rows * of.heads * 2 * dim], 2 * dim);
        let keys = DisjointMut::new(&mut self.keys[..rows * dim], dim);
        kernels.for_rows(rows, |t| {
            let angles = &place.angles[t * pairs..(t + 1) * pairs];
            // SAFETY: each row is visited once.
            let key = unsafe { keys.part(t) };
            kernels.rms_norm_in_place(key, &w.key_norm, place.eps);
            kernels.rope(key, dim, angles, place.rope.pairs);
            for head in 0..of.heads {
                // SAFETY: each head of a row is visited once.
                let both = unsafe { queries.part(head * rows + t) };
                let (query, negated) = both.split_at_mut(dim);
                let row = &from[(t * of.heads + head) * dim..][..dim];
                kernels.rms_norm(row, &w.query_norm, place.eps, query);
                kernels.rope(query, dim, angles, place.rope.pairs);
                negated
                    .iter_mut()
                    .zip(&*query)
                    .for_each(|(out, x)| *out = -x);
            }
        });
        kernels.write_index(&mut lock(cache), layer, place.sequences, &self.keys);
    }

    /// Attention of this rank's heads, those of the KV heads `kv_heads`. Sequences with few
    /// positions attend to all.
    pub(super) fn attend(
        &mut self,
        kernels: &Kernels,
        step: &AttentionStep<'_>,
        kv_heads: Range<usize>,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) {
        let own = self
            .selected
            .as_ref()
            .filter(|own| own.is_sparse(step.sequences));
        if own.is_none() {
            return kernels.attention(step, scratch, out);
        }
        for (nth, kv_head) in kv_heads.enumerate() {
            let first = (nth * step.group).saturating_sub(step.skipped);
            let end = ((nth + 1) * step.group - step.skipped).min(step.heads);
            self.attend_head(kernels, step, (nth, kv_head), first..end, out);
        }
    }

    /// Attention of the heads `heads`: those of KV head `nth` here, `kv_head` of the layer.
    fn attend_head(
        &mut self,
        kernels: &Kernels,
        step: &AttentionStep<'_>,
        (nth, kv_head): (usize, usize),
        heads: Range<usize>,
        out: &mut [f32],
    ) {
        let shape = step.cache.rows(step.layer);
        let rows: usize = step.sequences.iter().map(|s| s.rows).sum();
        let each = rows * 2 * self.of.dim;
        let index = IndexStep {
            cache: step.cache,
            layer: step.layer,
            heads: 2,
            queries: &self.queries[kv_head * each..(kv_head + 1) * each],
            weights: &self.weights,
            sequences: step.sequences,
        };
        select(kernels, &index, self.selected.as_mut());
        let of_row = |t: usize, dim: usize| {
            (t * step.heads + heads.start) * dim..(t * step.heads + heads.end) * dim
        };
        let (query, value) = (shape.head_dim, shape.value_dim);
        let own = self.own_queries.chunks_exact_mut(heads.len() * query);
        for (t, own) in own.take(rows).enumerate() {
            own.copy_from_slice(&step.queries[of_row(t, query)]);
        }
        let part = AttentionStep {
            heads: heads.len(),
            skipped: 0,
            queries: &self.own_queries,
            ..*step
        };
        let selected = self.selected.as_mut().expect("the caller saw it");
        selected.attend_head(kernels, &part, nth, &mut self.own_out);
        let own = self.own_out.chunks_exact(heads.len() * value);
        for (t, own) in own.take(rows).enumerate() {
            out[of_row(t, value)].copy_from_slice(own);
        }
    }
}
