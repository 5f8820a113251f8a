//! Latent attention in its absorbed form: queries are mapped into the latent space that all heads
//! share. The attention output in latent space is expanded to each head's value.
//!
//! ```text
//! x (T, C) -> k (T, R + P) = norm(latent) | turned
//! x (T, C) -> compressed (T, A) -> norm -> queries (T, H, N + P)
//! queries  -> q (T, H, R + P) = keys[h] (R, N) plain | turned, both scaled
//! read (T, H, R) by attention over k -> attended (T, H, V) = values[h] (V, R) read
//! ```
//!
//! H counts the heads of this rank, A the elements of a compressed query. N counts query elements
//! without rotation, P rotated ones. R counts latent elements, V the elements of a value. A head's
//! products are over one leaf: whole rows of its own matrices. So a head has the same bits on every
//! split.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, MAX_PRODUCTS, PackedMatrix, Product};

use super::Batch;
use super::delta_net::times_sigmoid;
use super::rows::{activations, add_bias, product};
use crate::config::Latent;
use crate::model::Model;
use crate::weights::{self, LayerShard};
use crate::{LayerShape, Rope};

/// Buffers of latent attention; all such layers have equal sizes.
#[derive(Debug)]
pub(super) struct LatentBuffers {
    of: Latent,
    heads: usize,
    /// `(T, A)`
    compressed: RegisteredMemory<f32>,
    /// `(T, A)`, after the norm
    query_x: Activations,
    /// `(T, H, N + P)`
    queries: RegisteredMemory<f32>,
    /// `(T, H, N)`
    plain: Activations,
    /// `(T, H, R)`
    read: Activations,
    /// `(H, T, R)` or `(H, T, V)`: products of each head.
    by_head: RegisteredMemory<f32>,
    /// `(T,)`: factors of queries.
    factors: Vec<f32>,
    /// `(T, H, V)`: gates of the attention output; empty where it has none.
    gates: RegisteredMemory<f32>,
}

/// Layer and rows of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentInputs<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) shape: &'a LayerShape,
    pub(super) rope: &'a Rope,
    /// `(T, P / 2)`
    pub(super) angles: &'a [(f32, f32)],
    pub(super) batch: &'a Batch<'a>,
}

impl LatentBuffers {
    /// For steps of up to `rows` rows; `None` for models without latent attention.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let of = model.config().latent?;
        let shapes = model.config().layers[model.shard().layers.clone()].iter();
        let cuts = shapes.zip(model.shard().each_layer());
        let heads = cuts.filter(|(shape, _)| shape.latent.is_some());
        let heads = heads.map(|(_, cut)| cut.heads.len()).max()?;
        let layers = || {
            let layers = model.layers().iter();
            layers.filter_map(|layer| Some((layer, layer.latent.as_deref()?)))
        };
        let memory = |n: usize| RegisteredMemory::new(None, rows * n);
        let (rank, plain) = (of.query_rank.unwrap_or(0), heads * of.plain);
        let queries = layers().map(|(layer, _)| &layer.query.matrix);
        let queries = queries.filter(|_| rank > 0);
        let index = layers().flat_map(|(_, own)| &own.indexer);
        let queries = queries.chain(index.map(|own| &own.query.matrix));
        Some(Self {
            compressed: memory(rank),
            query_x: activations(model, rows, rank, queries),
            queries: memory(heads * of.query_dim()),
            plain: activations(model, rows, plain, layers().flat_map(|(_, w)| &w.keys)),
            read: activations(
                model,
                rows,
                heads * of.rank,
                layers().flat_map(|(_, w)| &w.values),
            ),
            by_head: memory(heads * of.rank.max(of.value_dim)),
            factors: Vec::with_capacity(rows),
            gates: memory(if of.gated { heads * of.value_dim } else { 0 }),
            heads,
            of,
        })
    }

    /// x -> q, k
    pub(super) fn project(
        &mut self,
        place: &LatentInputs<'_>,
        w: &LayerShard,
        x: &Activations,
        [q, k]: [&mut [f32]; 2],
    ) {
        let own = w.latent.as_deref().expect("loaded for this family");
        self.make_factors(place);
        self.make_queries(place.kernels, (w, own), x, k);
        if let Some(gate) = &own.gate {
            let gates = product(&mut self.gates, gate, x.rows());
            place.kernels.products(x, [gates]);
        }
        self.finish_keys(place, own, &mut k[..x.rows() * self.of.key_dim()]);
        let (of, heads, queries) = (self.of, self.heads, &self.queries);
        self.plain.resize(x.rows());
        let row = heads * of.query_dim();
        place.kernels.fill_rows(&mut self.plain, |t, out| {
            let queries = queries[t * row..(t + 1) * row].chunks_exact(of.query_dim());
            for (out, query) in out.chunks_exact_mut(of.plain).zip(queries) {
                out.copy_from_slice(&query[..of.plain]);
            }
        });
        let by_head = &mut self.by_head[..x.rows() * heads * of.rank];
        of_each_head(place.kernels, &own.keys, &self.plain, by_head);
        self.finish_queries(place, x.rows(), q);
    }

    /// The scale of queries, times their growth with position.
    fn make_factors(&mut self, place: &LatentInputs<'_>) {
        let (scale, growth) = (place.shape.query_scale, self.of.growth);
        self.factors.clear();
        for sequence in place.batch.sequences {
            let positions = sequence.position..sequence.position + sequence.tokens.len();
            let factors = positions.map(|position| match growth {
                Some(growth) => scale * growth.at(position),
                None => scale,
            });
            self.factors.extend(factors);
        }
    }

    /// x -> queries (T, H, N + P), k before norm and rotation
    fn make_queries(
        &mut self,
        kernels: &Kernels,
        (w, own): (&LayerShard, &weights::Latent),
        x: &Activations,
        k: &mut [f32],
    ) {
        let rows = x.rows();
        let Some((down, norm)) = &own.query_down else {
            let outs = [
                product(&mut self.queries, &w.query, rows),
                product(k, &own.down, rows),
            ];
            kernels.products(x, outs);
            add_bias(&mut self.queries, w.query.bias.as_deref(), rows);
            return add_bias(k, own.down.bias.as_deref(), rows);
        };
        let compressed = &mut self.compressed;
        let outs = [product(compressed, down, rows), product(k, &own.down, rows)];
        kernels.products(x, outs);
        add_bias(compressed, down.bias.as_deref(), rows);
        add_bias(k, own.down.bias.as_deref(), rows);
        let (n, eps) = (norm.len(), self.of.norm_eps);
        self.query_x.resize(rows);
        kernels.fill_rows(&mut self.query_x, |t, out| {
            kernels.rms_norm(&compressed[t * n..(t + 1) * n], norm, eps, out);
        });
        let out = product(&mut self.queries, &w.query, rows);
        kernels.products(&self.query_x, [out]);
        add_bias(&mut self.queries, w.query.bias.as_deref(), rows);
    }

    /// Norms the latent elements of k and rotates the others.
    fn finish_keys(&self, place: &LatentInputs<'_>, own: &weights::Latent, k: &mut [f32]) {
        let (of, kernels) = (self.of, place.kernels);
        let keys = DisjointMut::new(k, of.key_dim());
        kernels.for_rows(keys.len(), |t| {
            // SAFETY: each row is visited once.
            let (latent, turned) = unsafe { keys.part(t) }.split_at_mut(of.rank);
            kernels.rms_norm_in_place(latent, &own.norm, of.norm_eps);
            if of.turned > 0 {
                kernels.rope(turned, of.turned, place.angles_of(t), place.rope.pairs);
            }
        });
    }

    /// Combines `by_head` with the rotated part of each query, both scaled.
    fn finish_queries(&self, place: &LatentInputs<'_>, rows: usize, q: &mut [f32]) {
        let (of, heads, kernels) = (self.of, self.heads, place.kernels);
        let q = DisjointMut::new(&mut q[..rows * heads * of.key_dim()], heads * of.key_dim());
        let row = heads * of.query_dim();
        kernels.for_rows(rows, |t| {
            let queries = self.queries[t * row..(t + 1) * row].chunks_exact(of.query_dim());
            // SAFETY: each row is visited once.
            let own = unsafe { q.part(t) }.chunks_exact_mut(of.key_dim());
            for (head, (out, query)) in own.zip(queries).enumerate() {
                let (latent, turned) = out.split_at_mut(of.rank);
                latent.copy_from_slice(&self.by_head[(head * rows + t) * of.rank..][..of.rank]);
                turned.copy_from_slice(&query[of.plain..]);
                if of.turned > 0 {
                    kernels.rope(turned, of.turned, place.angles_of(t), place.rope.pairs);
                }
                let factor = self.factors[t];
                out.iter_mut().for_each(|x| *x *= factor);
            }
        });
    }

    /// Compressed queries of the layer, after the norm.
    pub(super) const fn compressed(&self) -> &Activations {
        &self.query_x
    }

    /// Buffer for each head's attention output in latent space, `(T, H, R)`.
    pub(super) fn read(&mut self, rows: usize) -> &mut [f32] {
        self.read.resize(rows);
        self.read.values_mut()
    }

    /// Expands the attention output to attended `(T, H, V)`, times the sigmoid of its gates.
    pub(super) fn expand(&mut self, kernels: &Kernels, w: &LayerShard, attended: &mut [f32]) {
        let own = w.latent.as_deref().expect("loaded for this family");
        kernels.quantise(&mut self.read);
        let (rows, dim) = (self.read.rows(), self.of.value_dim);
        let by_head = &mut self.by_head[..rows * self.heads * dim];
        of_each_head(kernels, &own.values, &self.read, by_head);
        let (by_head, all) = (&*by_head, self.heads * dim);
        let gates = own.gate.is_some().then_some(&self.gates);
        let attended = DisjointMut::new(attended, all);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { attended.part(t) };
            for (head, out) in row.chunks_exact_mut(dim).enumerate() {
                out.copy_from_slice(&by_head[(head * rows + t) * dim..][..dim]);
            }
            if let Some(gates) = gates {
                times_sigmoid(kernels, row, &gates[t * all..(t + 1) * all]);
            }
        });
    }
}

impl LatentInputs<'_> {
    pub(super) fn angles_of(&self, t: usize) -> &[(f32, f32)] {
        let pairs = self.rope.frequencies.len();
        &self.angles[t * pairs..(t + 1) * pairs]
    }
}

/// Each head's columns of `x` times that head's matrix; the outputs of the heads follow each other
/// in `out`.
pub(super) fn of_each_head(
    kernels: &Kernels,
    matrices: &[PackedMatrix],
    x: &Activations,
    out: &mut [f32],
) {
    let Some(first) = matrices.first() else {
        return;
    };
    let (len, cols) = (x.rows() * first.rows(), first.cols());
    let heads = out.chunks_exact_mut(len).zip(matrices).enumerate();
    let mut products = heads.map(|(head, (out, weights))| Product {
        weights,
        first_col: head * cols,
        out,
    });
    let mut left = matrices.len();
    while left > 0 {
        let n = left.min(MAX_PRODUCTS);
        kernels.products(x, products.by_ref().take(n));
        left -= n;
    }
}
