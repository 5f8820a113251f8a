//! Hyper-connections: a half of a layer reads a mix of the residual streams and adds its output,
//! with a weight, to every one.
//!
//! ```text
//! residual (T, S, C) -> n (T, S, C) = norm of each stream
//! mix (T, S, C) = sigmoid(up silu(down n / S))     x (T, C) = mean over S of mix * n
//! weights (T, S) = 2 sigmoid(inject n / S)         residual[s] += weights[s] * delta (T, C)
//! ```
//!
//! Every rank of a stage has the whole residual and computes all of it, so a split changes no bits.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels};

use super::rows::{activations, sigmoid, whole};
use crate::config::{StreamRule, Streams};
use crate::model::Model;
use crate::weights::{HeadStreams, StreamMix};

/// Values per call of the exponential kernel.
const RUN: usize = 64;

/// Buffers of the mixes; all mixes of a model have equal sizes.
#[derive(Debug)]
pub(super) struct StreamRows {
    of: Streams,
    /// `(T, S C)`, after the norms
    normed: Activations,
    /// `(T, R)`, before and after the activation
    low: RegisteredMemory<f32>,
    low_x: Activations,
    /// `(T, S C)`
    mix: RegisteredMemory<f32>,
    /// `(T, S)`: weights of the half's output.
    weights: RegisteredMemory<f32>,
}

impl StreamRows {
    /// For steps of up to `rows` rows; `None` for models without gated streams.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let of = model
            .config()
            .streams
            .filter(|of| of.rule == StreamRule::Gated)?;
        let all = model.config().residual_width();
        let layers = model.layers().iter().flat_map(|layer| &layer.streams);
        let mixes = || {
            let layers = layers.clone().flat_map(|streams| streams.mixes());
            layers.chain(model.head_streams().and_then(HeadStreams::mix))
        };
        let memory = |n: usize| RegisteredMemory::new(None, rows * n);
        Some(Self {
            normed: activations(model, rows, all, mixes().flat_map(StreamMix::of_normed)),
            low: memory(of.rank),
            low_x: activations(model, rows, of.rank, mixes().map(|mix| &mix.up)),
            mix: memory(all),
            weights: memory(of.count),
            of,
        })
    }

    /// Mixes the streams of `x.rows()` rows, `row(t)` `(S, C)` each, and keeps their weights.
    pub(super) fn mix<'r>(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        w: &StreamMix,
        row: impl Fn(usize) -> &'r [f32] + Sync,
        x: &mut Activations,
    ) {
        let (rows, count) = (x.rows(), self.of.count);
        let (normed, width) = (&mut self.normed, x.cols());
        normed.resize(rows);
        kernels.fill_rows(normed, |t, out| {
            let streams = row(t).chunks_exact(width).zip(w.norm.chunks_exact(width));
            for (out, (stream, norm)) in out.chunks_exact_mut(width).zip(streams) {
                kernels.rms_norm(stream, norm, eps, out);
            }
        });
        let inject = w.inject.as_ref();
        let inject = inject.map(|inject| whole(inject, &mut self.weights, rows));
        let outs = [whole(&w.down, &mut self.low, rows)];
        kernels.products(normed, outs.into_iter().chain(inject));
        let (low, rank, part) = (&self.low, self.of.rank, 1.0 / count as f32);
        self.low_x.resize(rows);
        kernels.fill_rows(&mut self.low_x, |t, out| {
            let low = &low[t * rank..(t + 1) * rank];
            sigmoid(kernels, low, part, out);
            let pairs = out.iter_mut().zip(low);
            pairs.for_each(|(out, low)| *out *= low * part);
        });
        kernels.products(&self.low_x, [whole(&w.up, &mut self.mix, rows)]);
        let (normed, mix, all) = (&self.normed, &self.mix, count * width);
        kernels.fill_rows(x, |t, out| {
            let mix = mix[t * all..(t + 1) * all].chunks_exact(width);
            summed(kernels, normed.row(t).chunks_exact(width).zip(mix), out);
            out.iter_mut().for_each(|x| *x *= part);
        });
        let injected = if w.inject.is_some() { rows * count } else { 0 };
        for run in self.weights[..injected].chunks_mut(RUN) {
            let mut out = [0.0; RUN];
            sigmoid(kernels, run, part, &mut out[..run.len()]);
            run.iter_mut().zip(out).for_each(|(x, y)| *x = 2.0 * y);
        }
    }

    /// Adds `delta` `(T, C)` to the streams of `residual` `(T, S, C)`.
    pub(super) fn add(&self, kernels: &Kernels, delta: &[f32], residual: &mut [f32]) {
        let (count, width) = (self.of.count, self.normed.cols() / self.of.count);
        let parts = DisjointMut::new(residual, count * width);
        kernels.for_rows(parts.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            let delta = &delta[t * width..(t + 1) * width];
            let weights = &self.weights[t * count..(t + 1) * count];
            for (stream, weight) in row.chunks_exact_mut(width).zip(weights) {
                let pairs = stream.iter_mut().zip(delta);
                pairs.for_each(|(x, delta)| *x += weight * delta);
            }
        });
    }
}

/// Sum over streams of `x * sigmoid(mix)`, in the order of the streams.
fn summed<'s>(
    kernels: &Kernels,
    streams: impl Iterator<Item = (&'s [f32], &'s [f32])>,
    out: &mut [f32],
) {
    out.fill(0.0);
    for (x, mix) in streams {
        let runs = out.chunks_mut(RUN).zip(x.chunks(RUN).zip(mix.chunks(RUN)));
        for (out, (x, mix)) in runs {
            let mut factors = [0.0; RUN];
            sigmoid(kernels, mix, 1.0, &mut factors[..x.len()]);
            let triples = out.iter_mut().zip(x).zip(factors);
            triples.for_each(|((out, x), factor)| *out += x * factor);
        }
    }
}
