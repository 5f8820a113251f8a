//! The engine over our own kernels: every sum is one chain or has the order of `ops`.
//!
//! Letters: T tokens, C width, H query heads, K KV heads, D their size, F feed-forward, r rank.

mod attention;
mod delta;
mod experts;
mod latent;
mod linear;
mod mixer;

use paceline_model::{Activation, Config};
use paceline_tensor::Kernels;

use crate::dropout::Dropout;
use crate::engine::{LayerEngine, LeafRows};
use crate::error::Error;
use crate::ops::{self, Gate, Norm};
use crate::pool;
use crate::weights::{StageWeights, VectorParameter};
use experts::RoutedRows;
use mixer::MixerKept;

/// Computes layers on this machine's threads.
pub(crate) struct Cpu<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a StageWeights,
    /// Factor of the pairs' products.
    pub(crate) scale: f32,
    /// Dropout of adapters' inputs.
    pub(crate) dropout: Option<Dropout>,
    /// Factor of the routers' auxiliary loss in the gradient: see [`experts`].
    pub(crate) balance: f32,
}

/// Values that a layer's forward pass leaves for its backward pass.
#[derive(Debug)]
pub(crate) struct Activations {
    /// (T, C) after the norm before attention.
    normed: Vec<f32>,
    mixer: MixerKept,
    /// (T, H E)
    attended: Vec<f32>,
    /// (T, C) before the norm after attention, if there is one.
    attention_delta: Option<Vec<f32>>,
    /// (T, C) between the halves.
    middle: Vec<f32>,
    ffn_normed: Vec<f32>,
    ffn: FeedForward,
    ffn_delta: Option<Vec<f32>>,
}

/// Values that the second half of a layer leaves.
#[derive(Debug)]
enum FeedForward {
    /// (T, F) each.
    Dense {
        gate: Vec<f32>,
        up: Vec<f32>,
        hidden: Vec<f32>,
    },
    Routed(RoutedRows),
}

/// Indices into the matrices of a layer.
const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const OUT: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

impl LayerEngine for Cpu<'_> {
    type Kept = Activations;

    fn forward(
        &self,
        params: &[f32],
        layer: usize,
        rows: &LeafRows,
        x: &[f32],
    ) -> Result<(Vec<f32>, Activations), Error> {
        let w = self.weights.layer(layer);
        let normed = self.norm(&w.attention_norm, params, x);
        let (attended, mixer) = self.mix((layer, rows), params, &normed);
        let delta = self.linear(&w.matrices[OUT], params, &attended);
        let (delta, attention_delta) = self.after(w.post_attention_norm.as_ref(), params, delta);
        let middle = self.plus(x, &delta);
        let ffn_normed = self.norm(&w.ffn_norm, params, &middle);
        let (delta, ffn) = self.feed_forward(layer, params, &ffn_normed);
        let (delta, ffn_delta) = self.after(w.post_ffn_norm.as_ref(), params, delta);
        let y = self.plus(&middle, &delta);
        let kept = Activations {
            normed,
            mixer,
            attended,
            attention_delta,
            middle,
            ffn_normed,
            ffn,
            ffn_delta,
        };
        Ok((y, kept))
    }

    fn backward(
        &self,
        params: &[f32],
        (layer, rows, x): (usize, &LeafRows, &[f32]),
        kept: Option<Activations>,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Result<Vec<f32>, Error> {
        let kept = match kept {
            Some(kept) => kept,
            None => self.forward(params, layer, rows, x)?.1,
        };
        let w = self.weights.layer(layer);
        let (kept, d_middle) = self.backward_ffn(params, layer, kept, dy, grads);
        let post = w.post_attention_norm.as_ref();
        let d_delta = self.before(
            post,
            params,
            kept.attention_delta.as_deref(),
            &d_middle,
            grads,
        );
        let mut d_attended = vec![0.0; kept.attended.len()];
        let out = (&w.matrices[OUT], kept.attended.as_slice());
        self.linear_back(out, params, &d_delta, (&mut d_attended, false), grads);
        let at = (kept.normed.as_slice(), kept.mixer);
        let d_normed = self.mix_back((layer, rows), params, at, d_attended, grads);
        let mut dx = d_middle;
        self.norm_back(&w.attention_norm, params, (x, &d_normed), &mut dx, grads);
        Ok(dx)
    }
}

impl Cpu<'_> {
    /// The second half of a layer without its norms: (T, C), and what it leaves.
    fn feed_forward(&self, layer: usize, params: &[f32], x: &[f32]) -> (Vec<f32>, FeedForward) {
        let w = self.weights.layer(layer);
        if let (Some(of), Some(weights)) = (self.config.layers[layer].experts, &w.experts) {
            let (y, routed) = self.experts((of, weights), params, x);
            return (y, FeedForward::Routed(routed));
        }
        let gate = self.linear(&w.matrices[GATE], params, x);
        let up = self.linear(&w.matrices[UP], params, x);
        let hidden = self.gated(self.gate(), (&gate, &up), w.matrices[GATE].rows);
        let y = self.linear(&w.matrices[DOWN], params, &hidden);
        (y, FeedForward::Dense { gate, up, hidden })
    }

    /// The gate's function times `up`, rows of `n` numbers.
    fn gated(&self, kind: Gate, (gate, up): (&[f32], &[f32]), n: usize) -> Vec<f32> {
        let mut hidden = vec![0.0; gate.len()];
        pool::chunks(self.kernels.pool(), &mut hidden, n, |i, hidden| {
            let at = i * n..i * n + hidden.len();
            kind.forward(&gate[at.clone()], &up[at], hidden);
        });
        hidden
    }

    /// Turns gate and up into their gradients.
    fn gated_back(
        &self,
        kind: Gate,
        (gate, up): (&mut [f32], &mut [f32]),
        d_hidden: &[f32],
        n: usize,
    ) {
        let mut rows: Vec<_> = gate.chunks_mut(n).zip(up.chunks_mut(n)).collect();
        pool::chunks(self.kernels.pool(), &mut rows, 1, |i, row| {
            let (gate, up) = &mut row[0];
            let d_hidden = &d_hidden[i * n..(i + 1) * n];
            kind.backward(gate, up, d_hidden);
        });
    }

    /// The second half of a layer, backwards; gives the gradient between the halves.
    fn backward_ffn(
        &self,
        params: &[f32],
        layer: usize,
        mut kept: Activations,
        dy: &[f32],
        grads: &mut [f32],
    ) -> (Activations, Vec<f32>) {
        let w = self.weights.layer(layer);
        let post = w.post_ffn_norm.as_ref();
        let d_delta = self.before(post, params, kept.ffn_delta.as_deref(), dy, grads);
        let x = kept.ffn_normed.as_slice();
        let none = FeedForward::Dense {
            gate: Vec::new(),
            up: Vec::new(),
            hidden: Vec::new(),
        };
        let d_normed = match std::mem::replace(&mut kept.ffn, none) {
            FeedForward::Dense {
                mut gate,
                mut up,
                hidden,
            } => {
                let mut d_hidden = vec![0.0; hidden.len()];
                let down = (&w.matrices[DOWN], hidden.as_slice());
                self.linear_back(down, params, &d_delta, (&mut d_hidden, false), grads);
                let both = (gate.as_mut_slice(), up.as_mut_slice());
                self.gated_back(self.gate(), both, &d_hidden, w.matrices[GATE].rows);
                let mut d_normed = vec![0.0; x.len()];
                for (n, d) in [(GATE, &gate), (UP, &up)] {
                    let at = (&w.matrices[n], x);
                    self.linear_back(at, params, d, (&mut d_normed, n != GATE), grads);
                }
                d_normed
            }
            FeedForward::Routed(routed) => {
                let of = self.config.layers[layer].experts;
                let (of, weights) = of.zip(w.experts.as_ref()).expect("routed by experts");
                self.experts_back((of, weights), params, (x, routed, &d_delta), grads)
            }
        };
        let mut d_middle = dy.to_vec();
        self.norm_back(
            &w.ffn_norm,
            params,
            (&kept.middle, &d_normed),
            &mut d_middle,
            grads,
        );
        (kept, d_middle)
    }

    fn gate(&self) -> Gate {
        match self.config.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
            Activation::ReluSquared => unreachable!("no family with gradients has it"),
        }
    }

    fn norm_of<'a>(
        &self,
        (weight, eps): (&'a VectorParameter, f32),
        params: &'a [f32],
    ) -> Norm<'a> {
        Norm {
            weight: weight.get(params),
            offset: self.config.norm_offset,
            eps,
        }
    }

    /// Norms every run of as many elements as there are weights.
    pub(crate) fn norm(&self, weight: &VectorParameter, params: &[f32], x: &[f32]) -> Vec<f32> {
        self.norm_with((weight, self.config.norm_eps), params, x)
    }

    /// The same with another addend of the mean square.
    fn norm_with(&self, weight: (&VectorParameter, f32), params: &[f32], x: &[f32]) -> Vec<f32> {
        let norm = self.norm_of(weight, params);
        let n = norm.weight.len();
        let mut out = vec![0.0; x.len()];
        pool::chunks(self.kernels.pool(), &mut out, n, |i, out| {
            norm.forward(&x[i * n..(i + 1) * n], out);
        });
        out
    }

    /// Adds to `dx` the gradient of a norm at `x`.
    pub(crate) fn norm_back(
        &self,
        weight: &VectorParameter,
        params: &[f32],
        at: (&[f32], &[f32]),
        dx: &mut [f32],
        grads: &mut [f32],
    ) {
        self.norm_back_with((weight, self.config.norm_eps), params, at, dx, grads);
    }

    fn norm_back_with(
        &self,
        (weight, eps): (&VectorParameter, f32),
        params: &[f32],
        (x, dy): (&[f32], &[f32]),
        dx: &mut [f32],
        grads: &mut [f32],
    ) {
        let norm = self.norm_of((weight, eps), params);
        let n = norm.weight.len();
        match weight.grads(grads) {
            None => pool::chunks(self.kernels.pool(), dx, n, |i, dx| {
                let at = i * n..(i + 1) * n;
                norm.backward(&x[at.clone()], &dy[at], dx, None);
            }),
            Some(dw) => {
                // The weights' gradient is a sum over rows, in their order.
                for (i, dx) in dx.chunks_mut(n).enumerate() {
                    let at = i * n..(i + 1) * n;
                    norm.backward(&x[at.clone()], &dy[at], dx, Some(dw));
                }
            }
        }
    }

    /// A half's result through the norm after it, if there is one, and what it was before.
    fn after(
        &self,
        norm: Option<&VectorParameter>,
        params: &[f32],
        delta: Vec<f32>,
    ) -> (Vec<f32>, Option<Vec<f32>>) {
        match norm {
            None => (delta, None),
            Some(norm) => (self.norm(norm, params, &delta), Some(delta)),
        }
    }

    /// The gradient before the norm after a half.
    fn before(
        &self,
        norm: Option<&VectorParameter>,
        params: &[f32],
        delta: Option<&[f32]>,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let (Some(norm), Some(delta)) = (norm, delta) else {
            return dy.to_vec();
        };
        let mut out = vec![0.0; dy.len()];
        self.norm_back(norm, params, (delta, dy), &mut out, grads);
        out
    }

    fn plus(&self, a: &[f32], b: &[f32]) -> Vec<f32> {
        a.iter().zip(b).map(|(a, b)| a + b).collect()
    }

    /// The sequences' tokens -> x (T, C)
    pub(crate) fn embed(&self, params: &[f32], tokens: &[u32]) -> Vec<f32> {
        let c = self.config.width;
        let mut x = vec![0.0; tokens.len() * c];
        pool::chunks(self.kernels.pool(), &mut x, c, |i, out| {
            self.weights.table().row(params, tokens[i] as usize, out);
            if self.config.embedding_scale != 1.0 {
                out.iter_mut()
                    .for_each(|x| *x *= self.config.embedding_scale);
            }
        });
        x
    }

    /// Adds what the embedding gets, token by token.
    pub(crate) fn embed_back(&self, tokens: &[u32], dx: &[f32], grads: &mut [f32]) {
        let crate::weights::MatrixStorage::Trained(range) = &self.weights.table().kept else {
            return;
        };
        let c = self.config.width;
        let table = &mut grads[range.clone()];
        for (token, dx) in tokens.iter().zip(dx.chunks(c)) {
            let row = &mut table[*token as usize * c..][..c];
            for (g, d) in row.iter_mut().zip(dx) {
                *g += d * self.config.embedding_scale;
            }
        }
    }

    /// The head and its loss over the rows that have a target. Gives the sum of their negative log
    /// likelihoods, and with `grads` the gradient of that sum times `weight` at `x` (T, C).
    /// `params` and `grads` are of the norm before the head, and of the head.
    pub(crate) fn head(
        &self,
        params: [&[f32]; 2],
        x: &[f32],
        targets: &[Option<u32>],
        weight: f32,
        mut grads: Option<[&mut [f32]; 2]>,
    ) -> (f64, Vec<f32>) {
        let c = self.config.width;
        let mut dx = vec![0.0; if grads.is_some() { x.len() } else { 0 }];
        let wanted = targets.iter().enumerate();
        let wanted: Vec<(usize, usize)> = wanted
            .filter_map(|(row, t)| t.map(|t| (row, t as usize)))
            .collect();
        let mut loss = 0.0;
        for block in wanted.chunks(HEAD_ROWS) {
            let rows: Vec<f32> = block
                .iter()
                .flat_map(|(row, _)| x[row * c..][..c].iter().copied())
                .collect();
            let (norm, matrix) = self.weights.head();
            let normed = self.norm(norm, params[0], &rows);
            let mut logits = self.linear(matrix, params[1], &normed);
            let losses = pool::chunks_map(
                self.kernels.pool(),
                &mut logits,
                self.config.vocab,
                |i, logits| ops::cross_entropy(logits, block[i].1, weight),
            );
            loss = losses.iter().fold(loss, |sum, loss| sum + loss);
            let Some([of_norm, of_head]) = &mut grads else {
                continue;
            };
            let mut d_normed = vec![0.0; rows.len()];
            let at = (matrix, normed.as_slice());
            self.linear_back(at, params[1], &logits, (&mut d_normed, false), of_head);
            let mut d_rows = vec![0.0; rows.len()];
            self.norm_back(norm, params[0], (&rows, &d_normed), &mut d_rows, of_norm);
            for ((row, _), d) in block.iter().zip(d_rows.chunks(c)) {
                dx[row * c..][..c].copy_from_slice(d);
            }
        }
        (loss, dx)
    }
}

/// Rows whose logits are there at once: 48 MiB for a vocabulary of 49,152.
pub(crate) const HEAD_ROWS: usize = 256;
