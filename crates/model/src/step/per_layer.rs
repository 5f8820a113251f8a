//! Per-layer embeddings (Gemma 4): their inputs, computed once, and their addition to the residual
//! in each layer.
//!
//! ```text
//! once      e (T, L P) = (norm(project(embedding) / sqrt C) + own embedding * sqrt P) / sqrt 2
//! a layer   residual += norm(output(gelu(gate residual) * e[layer]))
//! ```
//!
//! Every rank computes the inputs of its own layers from the tokens. So a pipeline stage needs
//! nothing from the previous stage, and ranks that share a layer exchange nothing.

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, Kernels};

use super::rows::{activations, norm_in_place, whole};
use crate::model::Model;
use crate::weights::{PerLayer, PerLayerInputs};

/// Buffers. L is the number of layers of the model, N of those on this rank.
#[derive(Debug)]
pub(super) struct PerLayerRows {
    /// P
    width: usize,
    /// N
    held: usize,
    /// Tokens of the step.
    pub(super) tokens: Vec<u32>,
    /// `(T, L P)`: the tokens' own embeddings.
    own: RegisteredMemory<f32>,
    /// `(T, N P)`: inputs of the layers.
    inputs: RegisteredMemory<f32>,
    /// `(T, P)`
    gate: RegisteredMemory<f32>,
    /// `(T, P)`, quantised.
    hidden: Activations,
}

impl PerLayerRows {
    /// For steps of up to `rows` rows; `None` without per-layer embeddings.
    pub(super) fn new(model: &Model, rows: usize) -> Option<Self> {
        let (c, held) = (model.config(), model.shard().layers.len());
        model.per_layer()?;
        let outputs = model
            .layers()
            .iter()
            .filter_map(|layer| layer.per_layer.as_ref());
        let memory = |n: usize| RegisteredMemory::new(None, rows * n);
        Some(Self {
            width: c.per_layer,
            held,
            tokens: Vec::with_capacity(rows),
            own: memory(c.layers.len() * c.per_layer),
            inputs: memory(held * c.per_layer),
            gate: memory(c.per_layer),
            hidden: activations(model, rows, c.per_layer, outputs.map(|own| &own.output)),
        })
    }

    /// tokens, x = their embeddings (T, C) -> inputs of this rank's layers.
    pub(super) fn prepare(&mut self, model: &Model, weights: &PerLayerInputs, x: &Activations) {
        let (kernels, c) = (model.kernels(), model.config());
        let (rows, p, first) = (x.rows(), self.width, model.shard().layers.start);
        let (all, mine, tokens) = (c.layers.len() * p, self.held * p, &self.tokens);
        let inputs = &mut self.inputs[..rows * mine];
        kernels.products(x, [whole(&weights.projection, inputs, rows)]);
        let own = DisjointMut::new(&mut self.own[..rows * all], all);
        let inputs = DisjointMut::new(inputs, mine);
        let (root, own_root) = (1.0 / (c.width as f32).sqrt(), (p as f32).sqrt());
        kernels.for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let (own, inputs) = unsafe { (own.part(t), inputs.part(t)) };
            let has_own = (tokens[t] as usize) < c.per_layer_vocab;
            let token = if has_own { tokens[t] } else { 0 };
            weights.embedding.row(token, own);
            inputs.iter_mut().for_each(|x| *x *= root);
            let parts = inputs
                .chunks_exact_mut(p)
                .zip(own[first * p..].chunks_exact(p));
            for (input, own) in parts {
                kernels.rms_norm_in_place(input, &weights.norm, c.norm_eps);
                let pairs = input.iter_mut().zip(own);
                pairs.for_each(|(x, own)| *x = (*x + own * own_root) * HALF_ROOT);
            }
        });
    }

    /// x = the residual (T, C) -> the addition of this rank's layer `held`, `(T, C)`.
    pub(super) fn layer(
        &mut self,
        kernels: &Kernels,
        weights: &PerLayer,
        held: usize,
        x: &Activations,
        out: &mut [f32],
    ) {
        let (rows, p) = (x.rows(), self.width);
        let gate = &mut self.gate[..rows * p];
        kernels.products(x, [whole(&weights.gate, gate, rows)]);
        self.hidden.resize(rows);
        let (gate, inputs, all) = (&*gate, &self.inputs, self.held);
        kernels.fill_rows(&mut self.hidden, |t, out| {
            let input = &inputs[(t * all + held) * p..][..p];
            kernels.gelu_mul(&gate[t * p..(t + 1) * p], input, out);
        });
        kernels.products(&self.hidden, [whole(&weights.output, out, rows)]);
    }
}

/// 1 / sqrt 2, rounded to f32.
const HALF_ROOT: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// Norm of the per-layer output, delta (T, C), in place.
pub(super) fn norm(model: &Model, weights: &PerLayer, delta: &mut [f32]) {
    norm_in_place(model, delta, &weights.norm);
}
