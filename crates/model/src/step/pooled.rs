//! Sparse attention over pools of positions (Qwen4-Exp): an index key stands for a pool.
//!
//! ```text
//! x (T, C) -> index queries (T, I, X) = turned norm, index rows (T, X), to the cache
//! last row of a pool -> index key = turned norm of the mean of its rows, to the cache
//! scores of whole pools -> selected (T, top_k + tail), ascending
//! ```
//!
//! Every rank with heads computes the whole selection, from rows that all ranks have.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, AttentionRows, IndexStep, Kernels, KvCache};

use super::BatchSize;
use super::indexer::{SelectedPositions, select};
use super::rows::product;
use crate::config::PoolIndexer;
use crate::model::Model;
use crate::weights;
use crate::{LayerShape, Rope};

/// Buffers; all indexers of a model have equal sizes.
#[derive(Debug)]
pub(super) struct PoolBuffers {
    of: PoolIndexer,
    /// `(T, (I + 1) X)`: queries, then the key.
    both: RegisteredMemory<f32>,
    /// `(T, I X)`
    queries: RegisteredMemory<f32>,
    /// `(T, X)`
    keys: RegisteredMemory<f32>,
    /// `(T, I)`: the same for all queries.
    weights: Vec<f32>,
    /// Angles of the first positions of pools that end in the step, `(T, pairs)`.
    angles: Vec<(f32, f32)>,
    /// For contexts beyond the selection.
    pub(super) selected: Option<SelectedPositions>,
}

/// Layer and rows of a step.
pub(super) struct PoolInputs<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) eps: f32,
    pub(super) rope: &'a Rope,
    /// `(T, pairs)`
    pub(super) angles: &'a [(f32, f32)],
    pub(super) sequences: &'a [AttentionRows<'a>],
}

impl PoolBuffers {
    /// For steps of up to `size`; `None` for models without such indexers.
    pub(super) fn new(model: &Model, size: BatchSize) -> Option<Self> {
        let (c, own) = (model.config(), model.shard().layers.clone());
        let is_pooled = |layer: &usize| {
            let own = c.layers[*layer].pooled;
            own.is_some_and(|own| own.choice.local == 0)
        };
        let layer = own.clone().find(is_pooled)?;
        let shape: &LayerShape = &c.layers[layer];
        let of = shape.pooled.expect("it was found");
        let memory = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let pairs = c.ropes[shape.rope].frequencies.len();
        let heads = model.shard().layer(layer).heads.len();
        Some(Self {
            both: memory((of.heads + 1) * of.dim),
            queries: memory(of.heads * of.dim),
            keys: memory(of.dim),
            weights: vec![1.0 / (of.dim as f32).sqrt(); size.rows * of.heads],
            angles: Vec::with_capacity(size.rows * pairs),
            selected: SelectedPositions::new(model, (layer, heads), of.choice, size),
            of,
        })
    }

    /// x -> index queries, and rows and keys in the cache; then the positions of each row, where a
    /// sequence has more than are selected.
    pub(super) fn select(
        &mut self,
        place: &PoolInputs<'_>,
        w: &weights::PoolIndexer,
        x: &Activations,
        (cache, layer): (&Mutex<&mut KvCache>, usize),
    ) {
        self.project(place, w, x);
        self.find_angles(place);
        let mut cache = lock(cache);
        let (of, kernels, sequences) = (self.of, place.kernels, place.sequences);
        kernels.write_index(&mut cache, layer, sequences, &self.keys);
        let (angles, pairs) = (&self.angles, place.rope.frequencies.len());
        let finish = |t: usize, key: &mut [f32]| {
            kernels.rms_norm_in_place(key, &w.key_norm, place.eps);
            let angles = &angles[t * pairs..(t + 1) * pairs];
            kernels.rope(key, of.dim, angles, place.rope.pairs);
        };
        let pools = (sequences, of.choice.pool);
        kernels.pool_index(&mut cache, layer, pools, &mut self.keys, finish);
        let step = IndexStep {
            cache: &cache,
            layer,
            heads: of.heads,
            queries: &self.queries,
            weights: &self.weights,
            sequences,
        };
        select(kernels, &step, self.selected.as_mut());
    }

    /// x -> queries, normed and turned, and rows of the keys.
    fn project(&mut self, place: &PoolInputs<'_>, w: &weights::PoolIndexer, x: &Activations) {
        let (of, rows, kernels) = (self.of, x.rows(), place.kernels);
        kernels.products(x, [product(&mut self.both, &w.query_key, rows)]);
        let (n, pairs) = (of.heads * of.dim, place.rope.frequencies.len());
        let both = &self.both;
        let queries = DisjointMut::new(&mut self.queries[..rows * n], n);
        let keys = DisjointMut::new(&mut self.keys[..rows * of.dim], of.dim);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (query, key) = unsafe { (queries.part(t), keys.part(t)) };
            let (own, own_key) = both[t * (n + of.dim)..(t + 1) * (n + of.dim)].split_at(n);
            key.copy_from_slice(own_key);
            for (out, query) in query.chunks_exact_mut(of.dim).zip(own.chunks_exact(of.dim)) {
                kernels.rms_norm(query, &w.query_norm, place.eps, out);
            }
            let angles = &place.angles[t * pairs..(t + 1) * pairs];
            kernels.rope(query, of.dim, angles, place.rope.pairs);
        });
    }

    /// Angles of the first position of each row's pool.
    fn find_angles(&mut self, place: &PoolInputs<'_>) {
        self.angles.clear();
        for s in place.sequences {
            for position in s.position..s.position + s.rows {
                let first = position / self.of.choice.pool * self.of.choice.pool;
                place.rope.angles(first..first + 1, &mut self.angles);
            }
        }
    }
}
