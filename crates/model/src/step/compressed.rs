//! Attention to a window and to compressed keys of earlier positions.
//!
//! ```text
//! x (T, C) -> compressed query (T, A) -> norm -> q (T, H, D), normed, its end turned, scaled
//! x -> row: key (T, D), normed, its end turned; inputs and gates of compressed keys; to the cache
//! last row of a run -> compressed key and index key, normed, turned by the run's first position
//! compressed query -> index queries (T, I, X), turned; weights (T, I) -> chosen keys of each row
//! read (T, H, D) by attention, its end turned back -> attended (T, G, R) = outputs[g] read
//! ```
//!
//! H and G count the heads and groups of this rank. A group's products are over one leaf. Every
//! rank with heads computes all keys and the whole choice, from rows that all ranks have.

use std::ops::Range;
use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionRows, AttentionStep, Kernels, KvCache, RunScratch, RunStep,
};

use super::BatchSize;
use super::latent::of_each_head;
use super::rounded;
use super::rows::{activations, product};
use crate::config::{Compressed, PoolIndexer};
use crate::model::Model;
use crate::weights::{self, LayerShard};
use crate::{LayerCache, LayerShape, Rope};

/// Buffers of such attention; all layers have equal sizes of queries.
#[derive(Debug)]
pub(super) struct CompressedRows {
    /// `(T, A)`
    compressed: RegisteredMemory<f32>,
    /// `(T, A)`, after the norm.
    query_x: Activations,
    /// `(T, row)`: what the cache keeps of a position.
    rows: RegisteredMemory<f32>,
    /// `(T, N D)`: a product, before it is in `rows`.
    part: RegisteredMemory<f32>,
    /// `(T, D)`: compressed keys of runs that end in the step, if index keys are made of them.
    latent: Option<Activations>,
    /// `(T, H D)`: attention output.
    read: Activations,
    /// `(G, T, R)`: products of each group.
    by_group: RegisteredMemory<f32>,
    /// `(T, I X)`
    index_queries: RegisteredMemory<f32>,
    /// `(T, I)`
    index_weights: RegisteredMemory<f32>,
    /// `(T, top_k)`
    selected: Vec<u32>,
    /// `(D,)`: ones.
    ones: Vec<f32>,
    /// Angles of the first position of each row's run, then those that turn outputs back,
    /// `(T, pairs)`.
    angles: Vec<(f32, f32)>,
    scratch: RunScratch,
}

/// Layer and rows of a step.
pub(super) struct CompressedInputs<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) eps: f32,
    pub(super) shape: &'a LayerShape,
    pub(super) of: Compressed,
    /// Heads of this rank.
    pub(super) heads: Range<usize>,
    pub(super) rope: &'a Rope,
    /// `(T, pairs)`
    pub(super) angles: &'a [(f32, f32)],
    /// The layer of rows in the cache, and that of entries.
    pub(super) layers: [usize; 2],
    /// Sequences with their pages of either.
    pub(super) sequences: [&'a [AttentionRows<'a>]; 2],
}

impl CompressedRows {
    /// For steps of up to `size`; `None` for models without such attention.
    pub(super) fn new(model: &Model, size: BatchSize) -> Option<Self> {
        let (c, shard) = (model.config(), model.shard());
        let own = c.layers[shard.layers.clone()]
            .iter()
            .zip(shard.each_layer());
        let own = own.filter_map(|(shape, cut)| match shape.cache {
            LayerCache::Compressed(of) => Some((shape, of, cut.heads.len())),
            _ => None,
        });
        let own: Vec<(&LayerShape, Compressed, usize)> = own.collect();
        let &(shape, of, _) = own.first()?;
        let (dim, rank) = (shape.head_dim, of.query_rank);
        let heads = own.iter().map(|own| own.2).max().unwrap_or(0);
        let runs = || own.iter().filter_map(|own| own.1.runs(dim));
        let row = own.iter().map(|own| own.1.row(dim)).max().unwrap_or(0);
        let part = runs().map(|runs| runs.series() * runs.dim.max(runs.index_dim));
        let index = own.iter().find_map(|own| own.1.runs?.indexer);
        let entries = own.iter().filter_map(|own| {
            let runs = own.1.runs?;
            let all = size.context / runs.len;
            let most = index.filter(|_| runs.index_dim > 0);
            Some(most.map_or(all, |own| all.min(own.choice.top_k)))
        });
        let room = of.window + entries.max().unwrap_or(0);
        let keys = own.iter().filter_map(|own| {
            own.1
                .runs
                .filter(|runs| runs.indexer.is_some())
                .map(|runs| size.context / runs.len)
        });
        let indexed = index.map(|own| (own.choice, own.dim, keys.max().unwrap_or(0)));
        let layers = || {
            let layers = model.layers().iter();
            layers.filter_map(|layer| Some((layer, layer.compressed.as_deref()?)))
        };
        let queries = layers().flat_map(|(layer, own)| own.of_query().chain([&layer.query.matrix]));
        let memory = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let (n, pairs) = (index.map_or(0, |own| own.heads), of.turned / 2);
        let scratch = RunScratch::new(model.kernels(), (heads, dim, room), indexed);
        Some(Self {
            compressed: memory(rank),
            query_x: activations(model, size.rows, rank, queries),
            rows: memory(row),
            part: memory(part.max().unwrap_or(0).max(dim)),
            latent: of.is_rounded.then(|| {
                let keys = layers().flat_map(|(_, own)| &own.index_key);
                activations(model, size.rows, dim, keys.map(|(key, _)| &key.matrix))
            }),
            read: activations(
                model,
                size.rows,
                heads * dim,
                layers().flat_map(|(_, own)| &own.outputs),
            ),
            by_group: memory(heads * shape.output_dim()),
            index_queries: memory(index.map_or(0, |own| own.heads * own.dim)),
            index_weights: memory(n),
            selected: vec![0; size.rows * index.map_or(0, |own| own.choice.top_k)],
            ones: vec![1.0; dim],
            angles: Vec::with_capacity(size.rows * pairs),
            scratch: scratch.expect("address space for a few rows of keys"),
        })
    }

    /// x -> q, and rows, compressed keys and the choice of them, all but q in the cache.
    pub(super) fn project(
        &mut self,
        place: &CompressedInputs<'_>,
        (layer, w): (&LayerShard, &weights::Compressed),
        x: &Activations,
        q: &mut [f32],
        cache: &Mutex<&mut KvCache>,
    ) {
        let (kernels, rows) = (place.kernels, x.rows());
        let (down, norm) = &w.query_down;
        kernels.products(x, [product(&mut self.compressed, down, rows)]);
        let (compressed, n) = (&self.compressed, norm.len());
        self.query_x.resize(rows);
        kernels.fill_rows(&mut self.query_x, |t, out| {
            kernels.rms_norm(&compressed[t * n..(t + 1) * n], norm, place.eps, out);
        });
        kernels.products(&self.query_x, [product(q, &layer.query, rows)]);
        let (dim, ones, scale) = (place.shape.head_dim, &self.ones, place.shape.query_scale);
        let heads = DisjointMut::new(
            &mut q[..rows * place.heads.len() * dim],
            place.heads.len() * dim,
        );
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            for head in unsafe { heads.part(t) }.chunks_exact_mut(dim) {
                if !place.of.is_rounded {
                    kernels.rms_norm_in_place(head, ones, place.eps);
                }
                place.turn(place.angles_of(t), head);
                head.iter_mut().for_each(|x| *x *= scale);
            }
        });
        self.make_rows(place, w, x);
        let mut cache = lock(cache);
        let n = rows * place.of.row(dim);
        kernels.write_rows(&mut cache, &place.step(), &self.rows[..n]);
        self.compress(place, w, &mut cache);
        if let (Some(own), Some(indexer)) = (&w.indexer, place.indexer()) {
            self.select(place, (own, indexer), x, &cache);
        }
    }

    /// x -> what the cache keeps of each position
    fn make_rows(
        &mut self,
        place: &CompressedInputs<'_>,
        w: &weights::Compressed,
        x: &Activations,
    ) {
        let (kernels, rows) = (place.kernels, x.rows());
        let row = place.of.row(place.shape.head_dim);
        let (key, norm) = &w.key;
        let linears = w.series.iter().flat_map(|own| &own.linears);
        let mut at = 0;
        if w.series.iter().any(|own| own.linears.len() == 1) {
            self.rows[..rows * row].fill(0.0); // gates that the file lacks
        }
        for (i, linear) in [key].into_iter().chain(linears).enumerate() {
            kernels.products(x, [product(&mut self.part, linear, rows)]);
            let (n, part) = (linear.matrix.rows(), &self.part);
            let out = DisjointMut::new(&mut self.rows[..rows * row], row);
            kernels.for_rows(rows, |t| {
                // SAFETY: each row is visited once.
                let out = &mut unsafe { out.part(t) }[at..at + n];
                out.copy_from_slice(&part[t * n..(t + 1) * n]);
                if i == 0 {
                    kernels.rms_norm_in_place(out, norm, place.eps);
                    place.turn(place.angles_of(t), out);
                    place.round(rounded::to_8_bits, out);
                }
            });
            at += n;
        }
    }

    /// Compresses the runs that end in the step.
    fn compress(
        &mut self,
        place: &CompressedInputs<'_>,
        w: &weights::Compressed,
        cache: &mut KvCache,
    ) {
        let Some(runs) = place.of.runs.filter(|runs| runs.of.is_none()) else {
            return;
        };
        self.angles.clear();
        for s in place.sequences[0] {
            for position in s.position..s.position + s.rows {
                let first = position / runs.len * runs.len;
                place.rope.angles(first..first + 1, &mut self.angles);
            }
        }
        let (kernels, angles) = (place.kernels, &self.angles);
        let pairs = place.rope.frequencies.len();
        let angles_of = |t: usize| &angles[t * pairs..(t + 1) * pairs];
        let bias = |which: usize| w.series.get(which).map_or(&[][..], |own| &own.bias);
        let rows = self.query_x.rows();
        let plain = self.latent.as_mut().filter(|_| w.index_key.is_some());
        let plain = plain.map(|latent| {
            latent.resize(rows);
            latent.values_mut().fill(0.0);
            DisjointMut::new(latent.values_mut(), place.shape.head_dim)
        });
        kernels.compress(cache, &place.step(), [bias(0), bias(1)], |which, t, key| {
            kernels.rms_norm_in_place(key, &w.series[which].norm, place.eps);
            if let Some(plain) = &plain {
                // SAFETY: each row is visited once.
                unsafe { plain.part(t) }.copy_from_slice(key);
            }
            place.turn(angles_of(t), key);
            place.round(rounded::to_scaled_4_bits, key);
        });
        let (Some((linear, norm)), Some(latent)) = (&w.index_key, &mut self.latent) else {
            return;
        };
        kernels.quantise(latent);
        kernels.products(latent, [product(&mut self.part, linear, rows)]);
        let n = norm.len();
        let keys = DisjointMut::new(&mut self.part[..rows * n], n);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let key = unsafe { keys.part(t) };
            kernels.rms_norm_in_place(key, norm, place.eps);
            place.turn(angles_of(t), key);
            place.round(rounded::to_4_bits, key);
        });
        kernels.write_index_keys(cache, &place.step(), &self.part);
    }

    /// Chooses the keys of each row that sees more than the indexer chooses.
    fn select(
        &mut self,
        place: &CompressedInputs<'_>,
        ([queries, weights], of): (&[weights::Linear; 2], PoolIndexer),
        x: &Activations,
        cache: &KvCache,
    ) {
        let (kernels, rows) = (place.kernels, x.rows());
        kernels.products(x, [product(&mut self.index_weights, weights, rows)]);
        kernels.products(
            &self.query_x,
            [product(&mut self.index_queries, queries, rows)],
        );
        let scale = 1.0 / ((of.heads * of.dim) as f32).sqrt();
        let [queries, weights] = [
            (&mut self.index_queries, of.heads * of.dim),
            (&mut self.index_weights, of.heads),
        ]
        .map(|(values, n)| DisjointMut::new(&mut values[..rows * n], n));
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (queries, weights) = unsafe { (queries.part(t), weights.part(t)) };
            let each = queries.chunks_exact_mut(of.dim);
            each.for_each(|query| {
                place.turn(place.angles_of(t), query);
                place.round(rounded::to_4_bits, query);
            });
            weights.iter_mut().for_each(|weight| *weight *= scale);
        });
        let queries = (of.heads, &*self.index_queries, &*self.index_weights);
        let (step, selected) = (place.step(), &mut self.selected);
        kernels.select_entries(cache, &step, queries, &mut self.scratch, selected);
    }

    /// q, cache -> attended (T, G, R)
    pub(super) fn attend(
        &mut self,
        place: &CompressedInputs<'_>,
        (layer, w): (&LayerShard, &weights::Compressed),
        q: &[f32],
        cache: &Mutex<&mut KvCache>,
        attended: &mut [f32],
    ) {
        let (kernels, dim) = (place.kernels, place.shape.head_dim);
        let rows = self.query_x.rows();
        self.read.resize(rows);
        let cache = lock(cache);
        let step = AttentionStep {
            cache: &cache,
            layer: place.layers[0],
            heads: place.heads.len(),
            group: place.shape.heads,
            skipped: place.heads.start,
            window: None,
            sinks: layer.sinks.as_deref(),
            cap: None,
            queries: q,
            sequences: &[],
        };
        let out = self.read.values_mut();
        let of = (&**cache, &place.step());
        kernels.attend_runs(of, &step, &self.selected, &mut self.scratch, out);
        drop(cache);
        let (n, pairs) = (place.heads.len() * dim, place.rope.frequencies.len());
        self.angles.clear();
        let angles = place.angles.iter();
        self.angles.extend(angles.map(|(cos, sin)| (*cos, -*sin)));
        let back = &self.angles;
        let out = DisjointMut::new(&mut out[..rows * n], n);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let heads = unsafe { out.part(t) }.chunks_exact_mut(dim);
            heads.for_each(|head| place.turn(&back[t * pairs..(t + 1) * pairs], head));
        });
        kernels.quantise(&mut self.read);
        let rank = place.of.group_rank;
        let by_group = &mut self.by_group[..rows * rank * w.outputs.len()];
        of_each_head(kernels, &w.outputs, &self.read, by_group);
        let by_group = &*by_group;
        let attended = DisjointMut::new(attended, rank * w.outputs.len());
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let groups = unsafe { attended.part(t) }
                .chunks_exact_mut(rank)
                .enumerate();
            for (group, out) in groups {
                out.copy_from_slice(&by_group[(group * rows + t) * rank..][..rank]);
            }
        });
    }
}

impl CompressedInputs<'_> {
    fn angles_of(&self, t: usize) -> &[(f32, f32)] {
        let pairs = self.rope.frequencies.len();
        &self.angles[t * pairs..(t + 1) * pairs]
    }

    /// Turns the end of a query or key.
    fn turn(&self, angles: &[(f32, f32)], x: &mut [f32]) {
        let turned = self.of.turned;
        let first = x.len() - turned;
        self.kernels
            .rope(&mut x[first..], turned, angles, self.rope.pairs);
    }

    /// Rounds a key or query where the model was trained so.
    fn round(&self, round: fn(&mut [f32]), x: &mut [f32]) {
        if self.of.is_rounded {
            round(x);
        }
    }

    const fn indexer(&self) -> Option<PoolIndexer> {
        match self.of.runs {
            Some(runs) => runs.indexer,
            None => None,
        }
    }

    fn step(&self) -> RunStep<'_> {
        RunStep {
            layers: self.layers,
            sequences: self.sequences,
            row: self.of.row(self.shape.head_dim),
            runs: self.of.runs(self.shape.head_dim),
            window: self.of.window,
        }
    }
}
