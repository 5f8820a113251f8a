//! Gates, steps, decays and norms of gated attention heads and gated delta nets. Queries, keys and
//! values are in `step`.
//!
//! ```text
//! attention      wide (T, H, 2 D): of each head the query, then its gate
//!                attended (T, H D) *= sigmoid(gate)
//! delta net      wide (T, H E): gates of values
//!                step = sigmoid(W_step x)   decay = scale * softplus(W_decay x + bias)
//!                attended (T, H, E) = norm(attended over E) * silu(gate)
//! Kimi           W_decay and the matrix of gates are products of two; each element of a key has a
//!                decay; sigmoid in place of silu
//! Mamba 2        step = softplus(W_step x + bias)   decay = scale * step
//!                attended = norm(attended * silu(gate) over the heads of a group)
//! ```
//!
//! The softplus is computed in f64 and rounded once, because a state accumulates the product of its
//! decays.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels, Product};

use super::rows::activations;
use crate::model::Model;
use crate::weights::{DeltaNet, DeltaVectors, Linear};
use crate::{LayerCache, LayerCut, LayerShape};

/// Values per call of the exponential kernel.
const RUN: usize = 64;

/// Buffers for layers with gates. T rows, H this rank's heads, D and E elements of a query and of a
/// value.
#[derive(Debug)]
pub(super) struct Mixer {
    /// `(T, H 2 D)` of attention, `(T, H E)` of a delta net.
    pub(super) wide: RegisteredMemory<f32>,
    /// `(T, channels)`
    pub(super) mixed: RegisteredMemory<f32>,
    /// `(T, H)`
    pub(super) steps: RegisteredMemory<f32>,
    /// `(T, H)`; `(T, H D)` where each element of a key has a decay.
    pub(super) decays: RegisteredMemory<f32>,
    /// `(T, D)`: inputs of gates and of decays, where these are products.
    lows: [Option<(RegisteredMemory<f32>, Activations)>; 2],
}

impl Mixer {
    /// For steps of up to `rows` rows; `None` if no layer has gates.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let (config, shard) = (model.config(), model.shard());
        let layers = || config.layers[shard.layers.clone()].iter();
        let is_net = |shape: &LayerShape| matches!(shape.cache, LayerCache::Delta(_));
        if !layers().any(|shape| shape.gated || is_net(shape)) {
            return None;
        }
        let most = |len: fn(&LayerShape, &LayerCut) -> usize| {
            let lens = layers().zip(shard.each_layer());
            let lens = lens.map(|(shape, cut)| len(shape, cut));
            RegisteredMemory::new(None, rows * lens.max().unwrap_or(0))
        };
        let heads = |_: &LayerShape, cut: &LayerCut| cut.heads.len();
        let decays = |shape: &LayerShape, cut: &LayerCut| match shape.cache {
            LayerCache::Delta(net) => cut.heads.len() * net.rule.decays(shape.head_dim),
            _ => 0,
        };
        Some(Self {
            wide: most(|shape, cut| cut.heads.len() * shape.value_dim.max(2 * shape.head_dim)),
            mixed: most(|shape, cut| {
                let keys = 2 * cut.kv_heads.len() * shape.head_dim;
                keys + cut.heads.len() * shape.value_dim
            }),
            steps: most(heads),
            decays: most(decays),
            lows: [0, 1].map(|of| low(model, of, rows)),
        })
    }

    /// Copies the queries `(T, H, D)` out of the products that also contain their gates.
    pub(super) fn take_queries(&self, dim: usize, rows: usize, query: &Linear, q: &mut [f32]) {
        let heads = self.wide[..rows * query.matrix.rows()].chunks_exact(2 * dim);
        for (q, head) in q.chunks_exact_mut(dim).zip(heads) {
            q.copy_from_slice(&head[..dim]);
        }
    }

    /// `x *= sigmoid(gate)` for `rows` rows of heads of `dim`.
    pub(super) fn gate(&self, kernels: &Kernels, dim: usize, rows: usize, x: &mut [f32]) {
        let width = x.len() / rows.max(1) / dim * dim;
        let parts = DisjointMut::new(&mut x[..rows * width], width.max(1));
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            let heads = row.chunks_exact_mut(dim);
            let gates = self.wide[2 * t * width..].chunks_exact(2 * dim);
            for (head, gates) in heads.zip(gates) {
                times_sigmoid(kernels, head, &gates[dim..]);
            }
        });
    }

    /// Products of a delta net for gates, steps and decays.
    pub(super) fn products<'a>(
        &'a mut self,
        net: &'a DeltaNet,
        rows: usize,
    ) -> impl Iterator<Item = Product<'a>> {
        let of = |low: &'a mut Option<_>, whole, down: &Option<_>| match (low, down) {
            (Some((low, _)), Some(_)) => low,
            _ => whole,
        };
        let ([gate, decay], [gates, decays]) = (&mut self.lows, &net.downs);
        let gate: &mut RegisteredMemory<f32> = of(gate, &mut self.wide, gates);
        let outs = [gate, &mut self.steps, of(decay, &mut self.decays, decays)];
        let products = net.matrices().zip(outs);
        products.map(move |(weights, out)| Product {
            weights,
            first_col: 0,
            out: &mut out[..rows * weights.rows()],
        })
    }

    /// Converts products to steps and decays.
    pub(super) fn finish_gates(&mut self, kernels: &Kernels, net: &DeltaNet, rows: usize) {
        let heads = net.key_heads.len();
        if net.decay.is_none() {
            return self.finish_steps(kernels, net, rows);
        }
        self.expand(kernels, net, rows);
        for steps in self.steps[..rows * heads].chunks_mut(RUN) {
            let mut exp = [0.0; RUN];
            let exp = &mut exp[..steps.len()];
            kernels.exp_scaled(steps, 0.0, -1.0, exp);
            let pairs = steps.iter_mut().zip(exp);
            pairs.for_each(|(step, e)| *step = 1.0 / (1.0 + *e));
        }
        let DeltaVectors { bias, scale, .. } = &net.vectors;
        let (all, each) = (bias.len(), bias.len().checked_div(heads).unwrap_or(1));
        let decays = DisjointMut::new(&mut self.decays[..rows * all], all.max(1));
        kernels.for_rows(decays.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { decays.part(t) };
            for (i, (x, bias)) in row.iter_mut().zip(bias).enumerate() {
                let (sum, scale) = (*x + bias, scale[i / each]);
                *x = match net.least_decay {
                    Some(least) => bounded(least, scale * sum),
                    None => scale * softplus(sum),
                };
            }
        });
    }

    /// Gates and decays, where their inputs are products.
    fn expand(&mut self, kernels: &Kernels, net: &DeltaNet, rows: usize) {
        let outs = [&mut self.wide, &mut self.decays];
        let lows = self.lows.iter_mut().zip(net.of_downs()).zip(outs);
        for ((low, weights), out) in lows {
            let (Some((low, x)), Some(weights)) = (low, weights) else {
                continue;
            };
            let n = weights.cols();
            x.resize(rows);
            kernels.fill_rows(x, |t, row| row.copy_from_slice(&low[t * n..][..n]));
            let out = &mut out[..rows * weights.rows()];
            let first_col = 0;
            kernels.products(
                x,
                [Product {
                    weights,
                    first_col,
                    out,
                }],
            );
        }
    }

    /// Converts products to steps and decays of Mamba 2.
    fn finish_steps(&mut self, kernels: &Kernels, net: &DeltaNet, rows: usize) {
        let DeltaVectors { bias, scale, .. } = &net.vectors;
        let heads = bias.len().max(1);
        let [steps, decays] = [&mut self.steps, &mut self.decays]
            .map(|all| DisjointMut::new(&mut all[..rows * bias.len()], heads));
        kernels.for_rows(steps.len(), |t| {
            // SAFETY: each row is visited once.
            let (steps, decays) = unsafe { (steps.part(t), decays.part(t)) };
            let both = steps.iter_mut().zip(decays);
            for ((step, decay), (bias, scale)) in both.zip(bias.iter().zip(scale)) {
                *step = softplus(*step + bias);
                *decay = scale * *step;
            }
        });
    }

    /// Multiplies `x` `(T, H E)` by silu of its gates and norms each run of `group` elements.
    pub(super) fn gate_and_norm(
        &self,
        (kernels, eps): (&Kernels, f32),
        net: &DeltaNet,
        group: usize,
        x: &mut [f32],
    ) {
        let norm = &net.vectors.norm;
        let width = norm.len();
        let parts = DisjointMut::new(x, width);
        kernels.for_rows(parts.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            let gates = self.wide[t * width..(t + 1) * width].chunks(group);
            let groups = row.chunks_mut(group).zip(gates).zip(norm.chunks(group));
            for ((group, gates), norm) in groups {
                for (x, gate) in group.chunks_mut(RUN).zip(gates.chunks(RUN)) {
                    let mut out = [0.0; RUN];
                    let out = &mut out[..x.len()];
                    kernels.silu_mul(gate, x, out);
                    x.copy_from_slice(out);
                }
                kernels.rms_norm_in_place(group, norm, eps);
            }
        });
    }

    /// Norms each head of `x` `(T, H, E)` and multiplies it by silu of its gate, or by its sigmoid.
    pub(super) fn norm_and_gate(
        &self,
        (kernels, eps): (&Kernels, f32),
        net: &DeltaNet,
        dim: usize,
        x: &mut [f32],
    ) {
        let width = net.key_heads.len() * dim;
        let parts = DisjointMut::new(x, width);
        kernels.for_rows(parts.len(), |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { parts.part(t) };
            let gates = self.wide[t * width..(t + 1) * width].chunks_exact(dim);
            for (head, gates) in row.chunks_exact_mut(dim).zip(gates) {
                kernels.rms_norm_in_place(head, &net.vectors.norm, eps);
                if net.sigmoid_gates {
                    times_sigmoid(kernels, head, gates);
                    continue;
                }
                for (x, gate) in head.chunks_mut(RUN).zip(gates.chunks(RUN)) {
                    let mut out = [0.0; RUN];
                    let out = &mut out[..x.len()];
                    kernels.silu_mul(gate, x, out);
                    x.copy_from_slice(out);
                }
            }
        });
    }
}

/// `x *= sigmoid(gate)`
pub(super) fn times_sigmoid(kernels: &Kernels, x: &mut [f32], gates: &[f32]) {
    for (x, gate) in x.chunks_mut(RUN).zip(gates.chunks(RUN)) {
        let mut exp = [0.0; RUN];
        let exp = &mut exp[..x.len()];
        kernels.exp_scaled(gate, 0.0, -1.0, exp);
        x.iter_mut().zip(exp).for_each(|(x, e)| *x /= 1.0 + *e);
    }
}

/// Buffers for the inputs of gates, or of decays; `None` where no layer has such.
fn low(model: &Model, of: usize, rows: usize) -> Option<(RegisteredMemory<f32>, Activations)> {
    let layers = model.layers().iter();
    let matrices = layers.filter_map(|layer| layer.delta_net.as_ref()?.of_downs()[of]);
    let cols = matrices.clone().next()?.cols();
    let x = activations(model, rows, cols, matrices);
    Some((RegisteredMemory::new(None, rows * cols), x))
}

/// `least * sigmoid(-x)`
fn bounded(least: f32, x: f32) -> f32 {
    (f64::from(least) / (1.0 + libm::exp(f64::from(x)))) as f32
}

/// `ln(1 + exp(x))`; from 20 on x itself, as in transformers and llama.cpp.
fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        return x;
    }
    libm::log1p(libm::exp(f64::from(x))) as f32
}
