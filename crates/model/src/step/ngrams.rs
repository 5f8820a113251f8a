//! Memory of n-grams: every residual stream reads rows that the last tokens choose from a table.
//!
//! ```text
//! tokens (T, N), newest first -> rows of the table, e (T, E)
//! k (T, S, C) = norm(keys e)      q (T, S, C) = norm of each stream      v (T, C) = values e
//! z (T, S) = k q / sqrt C         gate (T, S) = sigmoid(sign(z) sqrt |z|)
//! residual[s] += gate[s] * v, + silu(convolution of norm(gate[s] * v)) in Qwen4-Exp
//! ```
//!
//! Tokens and inputs of the convolution are in the cache, in pages of the layer's own kind. So they
//! come and go with its states. Every rank of a stage has the whole residual and computes all of
//! it, so a split changes no bits. The tokens of a step are in its plan, for every stage.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, AttentionRows, Kernels, KvCache, ShortConvStep};

use super::rows::{activations, sigmoid, whole};
use crate::config::{MAX_COLUMNS, MAX_STREAMS, NgramTable, Ngrams};
use crate::model::Model;
use crate::weights::NgramMemory;

/// Values per call of the exponential kernel.
const RUN: usize = 64;

/// Smallest absolute value of a gate's input before the root, as in both definitions.
const LEAST: f32 = 1e-6;

/// Buffers; all memories of a model have equal sizes.
#[derive(Debug)]
pub(super) struct NgramRows {
    /// `(T,)`: tokens of the step.
    own: Vec<u32>,
    /// `(T, N)`
    tokens: Vec<u32>,
    /// `(T, E)`
    rows: Activations,
    /// `(T, S C)`: keys, then inputs of the convolution.
    keys: RegisteredMemory<f32>,
    /// `(T, C)`
    values: RegisteredMemory<f32>,
    /// `(T, S)`
    gates: Vec<f32>,
    /// `(T, S C)`: normed streams, then the output of the convolution.
    streams: RegisteredMemory<f32>,
}

/// Memory and rows of a layer in a step.
pub(super) struct NgramInputs<'a, 'c> {
    pub(super) kernels: &'a Kernels,
    pub(super) eps: f32,
    pub(super) of: (&'a Ngrams, &'a NgramTable),
    /// Keys of tokens, where n-grams are of these.
    pub(super) keys: Option<&'a [u32]>,
    pub(super) weights: &'a NgramMemory,
    pub(super) sequences: &'a [AttentionRows<'a>],
    /// The cache, and the memory's layer there.
    pub(super) cache: (&'a Mutex<&'c mut KvCache>, usize),
}

impl NgramRows {
    /// For steps of up to `rows` rows; `None` for ranks without such memories.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let config = model.config();
        let of = config.ngrams.as_ref()?;
        let memories = || {
            model
                .layers()
                .iter()
                .filter_map(|layer| layer.ngrams.as_deref())
        };
        memories().next()?;
        let (all, matrices) = (
            config.residual_width(),
            memories().flat_map(NgramMemory::matrices),
        );
        let memory = |n: usize| RegisteredMemory::new(None, rows * n);
        Some(Self {
            own: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(rows * of.longest),
            rows: activations(model, rows, of.width(), matrices),
            keys: memory(all),
            values: memory(config.width),
            gates: vec![0.0; rows * all / config.width],
            streams: memory(all),
        })
    }

    /// Adds what the rows of a step read to `residual`, `(T, S, C)`. The rows have `tokens`.
    pub(super) fn add<'t>(
        &mut self,
        place: &NgramInputs<'_, '_>,
        tokens: impl Iterator<Item = &'t u32>,
        residual: &mut [f32],
    ) {
        self.own.clear();
        self.own.extend(tokens);
        self.read(place);
        let (rows, kernels) = (self.own.len(), place.kernels);
        let [keys, values] = place.weights.matrices();
        let outs = [
            whole(keys, &mut self.keys, rows),
            whole(values, &mut self.values, rows),
        ];
        kernels.products(&self.rows, outs);
        self.gate(place, residual);
        if let Some((_, taps)) = &place.weights.conv {
            let step = ShortConvStep {
                layer: place.cache.1,
                taps,
                stride: place.of.0.longest,
                inputs: &self.keys[..rows * keys.rows()],
                sequences: place.sequences,
            };
            kernels.short_conv(&step, &mut lock(place.cache.0), &mut self.streams);
        }
        self.add_gated(place, residual);
    }

    /// tokens, cache -> rows of the table
    fn read(&mut self, place: &NgramInputs<'_, '_>) {
        let ((of, table), (cache, layer)) = (place.of, place.cache);
        self.tokens.clear();
        self.tokens.resize(self.own.len() * of.longest, 0);
        let own = (place.sequences, &*self.own);
        lock(cache).token_history(layer, own, of.longest, &mut self.tokens);
        self.rows.resize(self.own.len());
        let (tokens, keys) = (&self.tokens, place.keys);
        let key =
            |token: u32| keys.map_or(token, |keys| keys.get(token as usize).copied().unwrap_or(0));
        place.kernels.fill_rows(&mut self.rows, |t, out| {
            let mut chosen = [0; MAX_COLUMNS];
            let chosen = &mut chosen[..of.columns()];
            of.choose(table, &tokens[t * of.longest..][..of.longest], key, chosen);
            for (row, out) in chosen.iter().zip(out.chunks_exact_mut(of.dim)) {
                place.weights.row(*row, out);
            }
        });
    }

    /// keys, values, residual -> gates, and inputs of the convolution in place of keys
    fn gate(&mut self, place: &NgramInputs<'_, '_>, residual: &[f32]) {
        let (w, kernels, eps) = (place.weights, place.kernels, place.eps);
        let (all, width, rows) = (w.keys.rows(), w.values.rows(), self.own.len());
        let (count, root) = (all / width, 1.0 / (width as f32).sqrt());
        let keys = DisjointMut::new(&mut self.keys[..rows * all], all);
        let streams = DisjointMut::new(&mut self.streams[..rows * all], all);
        let gates = DisjointMut::new(&mut self.gates[..rows * count], count);
        let values = &self.values;
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (keys, streams) = unsafe { (keys.part(t), streams.part(t)) };
            // SAFETY: as above.
            let gates = unsafe { gates.part(t) };
            let mut inputs = [0.0; MAX_STREAMS];
            for (s, input) in inputs[..count].iter_mut().enumerate() {
                let own = s * width..(s + 1) * width;
                let (key, query) = (&mut keys[own.clone()], &mut streams[own.clone()]);
                kernels.rms_norm_in_place(key, &w.key_norm[own.clone()], eps);
                let stream = &residual[t * all..][own.clone()];
                kernels.rms_norm(stream, &w.query_norm[own], eps, query);
                let z = kernels.dot(key, query) * root;
                *input = z.abs().max(LEAST).sqrt().copysign(z);
            }
            sigmoid(kernels, &inputs[..count], 1.0, gates);
            let Some((norm, _)) = &w.conv else {
                return;
            };
            let value = &values[t * width..(t + 1) * width];
            let each = keys.chunks_exact_mut(width).zip(norm.chunks_exact(width));
            for ((input, norm), gate) in each.zip(&*gates) {
                let pairs = input.iter_mut().zip(value);
                pairs.for_each(|(input, value)| *input = gate * value);
                kernels.rms_norm_in_place(input, norm, eps);
            }
        });
    }

    /// residual += gated values, with the output of the convolution
    fn add_gated(&self, place: &NgramInputs<'_, '_>, residual: &mut [f32]) {
        let (w, kernels) = (place.weights, place.kernels);
        let (all, width) = (w.keys.rows(), w.values.rows());
        let count = all / width;
        let residual = DisjointMut::new(residual, all);
        kernels.for_rows(residual.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { residual.part(t) };
            let value = &self.values[t * width..(t + 1) * width];
            let gates = &self.gates[t * count..(t + 1) * count];
            let mixed = self.streams[t * all..(t + 1) * all].chunks_exact(width);
            for ((stream, mixed), gate) in row.chunks_exact_mut(width).zip(mixed).zip(gates) {
                let mixed = w.conv.is_some().then_some(mixed);
                add_stream(kernels, stream, (*gate, value), mixed);
            }
        });
    }
}

/// `stream += gate * value + silu(mixed)`, `(C,)` each.
fn add_stream(
    kernels: &Kernels,
    stream: &mut [f32],
    (gate, value): (f32, &[f32]),
    mixed: Option<&[f32]>,
) {
    for (i, (out, value)) in stream.chunks_mut(RUN).zip(value.chunks(RUN)).enumerate() {
        let mut more = [0.0; RUN];
        let more = &mut more[..out.len()];
        if let Some(mixed) = mixed.map(|mixed| &mixed[i * RUN..][..more.len()]) {
            sigmoid(kernels, mixed, 1.0, more);
            more.iter_mut()
                .zip(mixed)
                .for_each(|(x, mixed)| *x *= mixed);
        }
        let pairs = out.iter_mut().zip(value).zip(more);
        pairs.for_each(|((out, value), more)| *out += gate * value + *more);
    }
}
