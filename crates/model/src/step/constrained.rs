//! Manifold-constrained hyper-connections: a half of a layer reads a weighted sum of the residual
//! streams. Its output goes to every stream with a weight, and the streams themselves through a
//! matrix whose rows and columns sum to 1.
//!
//! ```text
//! residual (T, S, C) -> n (T, S C) = x / rms(x)      z (T, 2 S + S S) = fn n, in f32
//! before (T, S) = sigmoid(a z + b) + eps             x (T, C) = sum of before[s] * residual[s]
//! after (T, S) = 2 sigmoid(a z + b)                  mix (T, S, S) = sinkhorn(softmax(a z + b))
//! residual[d] = after[d] * delta (T, C) + sum over s of mix[s][d] * residual[s]
//! ```
//!
//! Every rank of a stage has the whole residual and computes all of it, so a split changes no bits.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels};

use super::rows::{activations, sigmoid, whole};
use crate::config::{Constraint, MAX_STREAMS, StreamRule};
use crate::model::Model;
use crate::weights::{ConstrainedMix, HeadStreams};

/// Values per call of the exponential kernel, and channels that are mixed together.
const RUN: usize = 64;

/// Buffers of the mixes; all mixes of a model have equal sizes.
#[derive(Debug)]
pub(super) struct ConstrainedRows {
    count: usize,
    of: Constraint,
    /// `(S C,)`: ones.
    ones: Vec<f32>,
    /// `(T, S C)`, after the norm.
    normed: Activations,
    /// `(T, 2 S + S S)`, or `(T, S)` before the output head: products, then weights.
    weights: RegisteredMemory<f32>,
    /// `(T, S)`: weights of the sum that the next half reads, where these are late.
    late: Vec<f32>,
}

impl ConstrainedRows {
    /// For steps of up to `rows` rows; `None` for models without such streams.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let streams = model.config().streams?;
        let StreamRule::Constrained(of) = streams.rule else {
            return None;
        };
        let (count, all) = (streams.count, model.config().residual_width());
        let layers = model.layers().iter().flat_map(|layer| &layer.streams);
        let mixes = layers.flat_map(|streams| streams.constrained());
        let mixes = mixes.chain(model.head_streams().and_then(HeadStreams::constrained));
        Some(Self {
            normed: activations(model, rows, all, mixes.map(|mix| &mix.matrix)),
            weights: RegisteredMemory::new(None, rows * (2 + count) * count),
            late: vec![0.0; if of.is_late { rows * count } else { 0 }],
            ones: vec![1.0; all],
            count,
            of,
        })
    }

    /// Starts a step in the first stage: late weights are those of the first stream.
    pub(super) fn begin(&mut self) {
        for weights in self.late.chunks_exact_mut(self.count) {
            weights.fill(0.0);
            weights[0] = 1.0;
        }
    }

    /// The late weights of the first `rows` rows, which go from stage to stage; empty where weights
    /// are not late.
    pub(super) fn late(&mut self, rows: usize) -> &mut [f32] {
        let n = self.late.len().min(rows * self.count);
        &mut self.late[..n]
    }

    /// As [`mix`](Self::mix) before the output head, for the rows `wanted` of the step.
    pub(super) fn mix_wanted<'r>(
        &mut self,
        place: (&Kernels, f32),
        (mix, norm): (Option<&ConstrainedMix>, &[f32]),
        (row, wanted): (impl Fn(usize) -> &'r [f32] + Sync, &[usize]),
        x: &mut Activations,
    ) {
        if !self.of.is_late {
            return self.mix(place, (mix, norm), row, x);
        }
        let (late, count) = (&self.late, self.count);
        place.0.fill_rows(x, |i, out| {
            sum(row(i), &late[wanted[i] * count..][..count], out);
            place.0.rms_norm_in_place(out, norm, place.1);
        });
    }

    /// Weights of `x.rows()` rows, `row(t)` `(S, C)` each, and the norm of their weighted sum in
    /// `x`. Without a mix, as before the output head of GLM 5.3, the sum is the mean.
    pub(super) fn mix<'r>(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        (mix, norm): (Option<&ConstrainedMix>, &[f32]),
        row: impl Fn(usize) -> &'r [f32] + Sync,
        x: &mut Activations,
    ) {
        let each = mix.map_or(self.count, |mix| mix.base.len());
        match mix {
            Some(mix) => self.weigh((kernels, eps), mix, &row, x.rows()),
            None => self.weights[..x.rows() * each].fill(1.0 / self.count as f32),
        }
        let (weights, late, count) = (&self.weights, &self.late, self.count);
        kernels.fill_rows(x, |t, out| {
            let weights = match self.of.is_late {
                true => &late[t * count..][..count],
                false => &weights[t * each..][..count],
            };
            sum(row(t), weights, out);
            kernels.rms_norm_in_place(out, norm, eps);
        });
        let own = self.weights.chunks_exact(each);
        for (late, own) in self.late.chunks_exact_mut(count).zip(own).take(x.rows()) {
            late.copy_from_slice(&own[..count]);
        }
    }

    /// Weights of `rows` rows.
    fn weigh<'r>(
        &mut self,
        (kernels, eps): (&Kernels, f32),
        mix: &ConstrainedMix,
        row: &(impl Fn(usize) -> &'r [f32] + Sync),
        rows: usize,
    ) {
        let (normed, ones) = (&mut self.normed, &self.ones);
        normed.resize(rows);
        kernels.fill_rows(normed, |t, out| kernels.rms_norm(row(t), ones, eps, out));
        kernels.products(normed, [whole(&mix.matrix, &mut self.weights, rows)]);
        let (count, of, each) = (self.count, self.of, mix.base.len());
        let weights = DisjointMut::new(&mut self.weights[..rows * each], each);
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let weights = unsafe { weights.part(t) };
            for (i, (weight, base)) in weights.iter_mut().zip(&mix.base).enumerate() {
                *weight = *weight * mix.scale[(i / count).min(2)] + base;
            }
            let (before, behind) = weights.split_at_mut(count);
            let mut each = [0.0; MAX_STREAMS];
            sigmoid(kernels, before, 1.0, &mut each[..count]);
            let pairs = before.iter_mut().zip(each);
            pairs.for_each(|(weight, x)| *weight = x + of.eps);
            if let Some((after, mix)) = behind.split_at_mut_checked(count) {
                sigmoid(kernels, after, 1.0, &mut each[..count]);
                let pairs = after.iter_mut().zip(each);
                pairs.for_each(|(weight, x)| *weight = 2.0 * x);
                constrain(kernels, of, count, mix);
            }
        });
    }

    /// Mixes the streams of `residual` `(T, S, C)` and adds `delta` `(T, C)` to each.
    pub(super) fn add(&self, kernels: &Kernels, delta: &[f32], residual: &mut [f32]) {
        let count = self.count;
        let (width, each) = (self.ones.len() / count, (2 + count) * count);
        let parts = DisjointMut::new(residual, count * width);
        kernels.for_rows(parts.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            let delta = &delta[t * width..(t + 1) * width];
            let (after, mix) = self.weights[t * each..][count..each].split_at(count);
            for first in (0..width).step_by(RUN) {
                let n = RUN.min(width - first);
                let mut streams = [[0.0; RUN]; MAX_STREAMS];
                for (s, stream) in streams[..count].iter_mut().enumerate() {
                    stream[..n].copy_from_slice(&row[s * width + first..][..n]);
                }
                for (d, after) in after.iter().enumerate() {
                    let out = &mut row[d * width + first..][..n];
                    let delta = &delta[first..first + n];
                    let pairs = out.iter_mut().zip(delta);
                    pairs.for_each(|(out, delta)| *out = after * delta);
                    for (s, stream) in streams[..count].iter().enumerate() {
                        let weight = mix[s * count + d];
                        let pairs = out.iter_mut().zip(stream);
                        pairs.for_each(|(out, x)| *out += weight * x);
                    }
                }
            }
        });
    }
}

/// The weighted sum of the streams of a row, `(S, C)`.
fn sum(row: &[f32], weights: &[f32], out: &mut [f32]) {
    let streams = row.chunks_exact(out.len());
    out.fill(0.0);
    for (stream, weight) in streams.zip(weights) {
        let pairs = out.iter_mut().zip(stream);
        pairs.for_each(|(out, x)| *out += weight * x);
    }
}

/// Softmax of each row of `mix` `(S, S)`. Its columns and rows are then divided by their sums in
/// turn, columns last. Source: Sinkhorn and Knopp 1967.
fn constrain(kernels: &Kernels, of: Constraint, count: usize, mix: &mut [f32]) {
    for row in mix.chunks_exact_mut(count) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut exp = [0.0; MAX_STREAMS];
        kernels.exp_scaled(row, largest, 1.0, &mut exp[..count]);
        let sum: f32 = exp[..count].iter().sum();
        let pairs = row.iter_mut().zip(exp);
        pairs.for_each(|(weight, exp)| *weight = exp / sum + of.eps);
    }
    let mut divide = |step: usize, next: usize| {
        for line in 0..count {
            let at = |i: usize| line * next + i * step;
            let sum = (0..count).map(|i| mix[at(i)]).sum::<f32>() + of.eps;
            (0..count).for_each(|i| mix[at(i)] /= sum);
        }
    };
    divide(count, 1);
    for _ in 1..of.rounds {
        divide(1, count);
        divide(count, 1);
    }
}
