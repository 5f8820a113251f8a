//! An EAGLE-3 head in training: drafts of several tokens from every position, and their gradients.
//!
//! Row i begins a draft behind token i. Its first step reads the captured rows of position i and
//! token i + 1, and predicts token i + 2. Step k reads the output of step k - 1 and token i + k. So
//! the head learns from its own outputs, as it meets them when it proposes (training-time test).
//!
//! Letters: T rows, C width, n captured layers, H, K, D, F as in the model's layers, V draft
//! vocabulary.

use std::ops::Range;

use paceline_model::Rope;
use paceline_tensor::chain::{ProductOutput, Sizes, Strided};
use paceline_tensor::{Kernels, RopePairs};

use super::attention::{DraftAttention, KeyAndValue};
use crate::ops::{self, Gate, Norm};
use crate::params::Layout;
use crate::pool;

/// Weight of a step in the loss relative to the step before it. Source: Li et al. 2025.
const STEP_DECAY: f32 = 0.8;

/// Rows whose logits are there at once: 32 MiB for 8,192 tokens.
const LOGIT_ROWS: usize = 1024;

/// Base of the head's rotations: the default of `LlamaConfig`.
pub(super) const ROPE_BASE: f64 = 10_000.0;

/// Sizes of a head.
#[derive(Clone, Debug)]
pub(super) struct HeadShape {
    pub(super) width: usize,
    pub(super) captures: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) ffn: usize,
    pub(super) draft_vocab: usize,
    pub(super) norm_eps: f32,
}

/// Ranges of the trained tensors.
#[derive(Clone, Debug)]
struct Slots {
    fuse: Range<usize>,
    token_norm: Range<usize>,
    feature_norm: Range<usize>,
    query: Range<usize>,
    key: Range<usize>,
    value: Range<usize>,
    output: Range<usize>,
    ffn_norm: Range<usize>,
    gate: Range<usize>,
    up: Range<usize>,
    down: Range<usize>,
    last_norm: Range<usize>,
    logits: Range<usize>,
}

/// A head and what computes it.
#[derive(Debug)]
pub(super) struct HeadNetwork<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) shape: HeadShape,
    pub(super) layout: Layout,
    slots: Slots,
}

/// A sequence for a pass.
#[derive(Clone, Debug, Default)]
pub(super) struct DraftRows {
    /// (T,)
    pub(super) tokens: Vec<u32>,
    /// (T,): the draft token that follows each token; `None` where it does not count.
    pub(super) targets: Vec<Option<Target>>,
    /// (T, n C)
    pub(super) captured: Vec<f32>,
    /// (T, C): rows of the tokens in the model's embedding.
    pub(super) embedded: Vec<f32>,
}

/// The token that follows, as the head names it; `None` if the head cannot propose it.
pub(super) type Target = Option<u32>;

/// Values of a step for its backward pass.
struct Step {
    /// (T, C): the input.
    feature: Vec<f32>,
    /// (T, C): embeddings of this step's tokens.
    embedded: Vec<f32>,
    /// (T, 2 C)
    input: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    middle: Vec<f32>,
    normed: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    hidden: Vec<f32>,
    /// (T, C)
    out: Vec<f32>,
}

impl<'a> HeadNetwork<'a> {
    pub(super) fn new(kernels: &'a Kernels, shape: HeadShape) -> Self {
        let mut layout = Layout::default();
        let (c, f) = (shape.width, shape.ffn);
        let (q, k) = (
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
        );
        let mut add =
            |name: &str, sizes: &[usize]| layout.add(format!("{name}.weight"), sizes.to_vec());
        let slots = Slots {
            fuse: add("fc", &[c, shape.captures * c]),
            token_norm: add("layers.0.input_layernorm", &[c]),
            feature_norm: add("layers.0.hidden_norm", &[c]),
            query: add("layers.0.self_attn.q_proj", &[q, 2 * c]),
            key: add("layers.0.self_attn.k_proj", &[k, 2 * c]),
            value: add("layers.0.self_attn.v_proj", &[k, 2 * c]),
            output: add("layers.0.self_attn.o_proj", &[c, q]),
            ffn_norm: add("layers.0.post_attention_layernorm", &[c]),
            gate: add("layers.0.mlp.gate_proj", &[f, c]),
            up: add("layers.0.mlp.up_proj", &[f, c]),
            down: add("layers.0.mlp.down_proj", &[c, f]),
            last_norm: add("norm", &[c]),
            logits: add("lm_head", &[shape.draft_vocab, c]),
        };
        Self {
            kernels,
            shape,
            layout,
            slots,
        }
    }

    /// Values before the first step. `fuse` passes the last captured layer on. `output` are the
    /// rows of the model's head, (V, C); `norm` are the weights of the norm before it, (C,).
    pub(super) fn first_values(&self, seed: u64, (norm, output): (&[f32], &[f32])) -> Vec<f32> {
        let mut values = vec![0.0; self.layout.len()];
        for (number, slot) in self.layout.slots().iter().enumerate() {
            let own = &mut values[slot.range.clone()];
            match slot.shape[..] {
                [_, cols] => {
                    let bound = 1.0 / libm::sqrt(cols as f64);
                    for (i, value) in own.iter_mut().enumerate() {
                        let key = [seed, crate::random::INIT, number as u64, i as u64];
                        *value = ((crate::random::unit(key) * 2.0 - 1.0) * bound) as f32;
                    }
                }
                _ => own.fill(1.0),
            }
        }
        let (c, n) = (self.shape.width, self.shape.captures);
        for (i, row) in values[self.slots.fuse.clone()]
            .chunks_mut(n * c)
            .enumerate()
        {
            row.iter_mut().for_each(|x| *x *= FUSE_NOISE);
            row[(n - 1) * c + i] += 1.0;
        }
        values[self.slots.last_norm.clone()].copy_from_slice(norm);
        values[self.slots.logits.clone()].copy_from_slice(output);
        values
    }

    /// The loss over all steps, divided by `judged`, and its gradient, which is added to `grads`.
    pub(super) fn gradient(
        &self,
        params: &[f32],
        rows: &DraftRows,
        (depth, judged): (usize, usize),
        grads: &mut [f32],
    ) -> f64 {
        let steps = self.forward(params, rows, depth);
        let mut loss = 0.0;
        let zeros = |like: &[f32]| vec![0.0; like.len()];
        let mut d_keys: Vec<_> = steps
            .iter()
            .map(|step| (zeros(&step.key), zeros(&step.value)))
            .collect();
        let mut d_out = zeros(&steps[0].out);
        for k in (0..depth).rev() {
            let weight = STEP_DECAY.powi(k as i32) / judged.max(1) as f32;
            let targets = self.targets(rows, k);
            let at = (&steps[k].out[..], &targets[..]);
            loss += f64::from(weight) * self.logits_back(params, at, weight, &mut d_out, grads);
            d_out = self.step_back(params, rows, (&steps[..=k], &mut d_keys), &d_out, grads);
        }
        let captured = (&rows.captured[..], self.shape.captures * self.shape.width);
        self.weight_back(&self.slots.fuse, captured, &d_out, grads);
        loss
    }

    /// For each row with a first target: how many draft tokens in a row are right, at most `depth`.
    pub(super) fn accepted(&self, params: &[f32], rows: &DraftRows, depth: usize) -> Vec<usize> {
        let steps = self.forward(params, rows, depth);
        let mut live: Vec<Option<usize>> = vec![None; rows.tokens.len()];
        for (k, step) in steps.iter().enumerate() {
            let targets = self.targets(rows, k);
            let wanted: Vec<usize> = (0..live.len())
                .filter(|i| targets[*i].is_some() && (k == 0 || live[*i] == Some(k)))
                .collect();
            for block in wanted.chunks(LOGIT_ROWS) {
                let (_, logits) = self.logits(params, &step.out, block);
                for (i, logits) in block.iter().zip(logits.chunks(self.shape.draft_vocab)) {
                    let is_right = targets[*i].flatten() == Some(largest(logits));
                    live[*i] = Some(k + usize::from(is_right));
                }
            }
        }
        live.into_iter().flatten().collect()
    }

    /// The targets of step `k`, from 0, of each row.
    fn targets(&self, rows: &DraftRows, k: usize) -> Vec<Option<Target>> {
        let n = rows.targets.len();
        let read = rows.targets.iter().skip(k + 1).copied();
        read.chain(std::iter::repeat(None)).take(n).collect()
    }

    fn forward(&self, params: &[f32], rows: &DraftRows, depth: usize) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::with_capacity(depth);
        let width = self.shape.captures * self.shape.width;
        let mut feature = self.linear(params, &self.slots.fuse, (&rows.captured, width));
        for k in 0..depth {
            let step = self.step(params, rows, (k, feature), &steps);
            feature = step.out.clone();
            steps.push(step);
        }
        steps
    }

    fn step(
        &self,
        params: &[f32],
        rows: &DraftRows,
        (k, feature): (usize, Vec<f32>),
        before: &[Step],
    ) -> Step {
        let (c, s) = (self.shape.width, &self.slots);
        // Row i reads token i + k + 1; zeros behind the sequence.
        let read = rows.embedded.get((k + 1) * c..).unwrap_or_default();
        let mut embedded = read.to_vec();
        embedded.resize(feature.len(), 0.0);
        let mut input = vec![0.0; 2 * feature.len()];
        let (token, normed) = (
            self.norm(params, &s.token_norm),
            self.norm(params, &s.feature_norm),
        );
        pool::chunks(self.kernels.pool(), &mut input, 2 * c, |i, out| {
            let row = i * c..(i + 1) * c;
            token.forward(&embedded[row.clone()], &mut out[..c]);
            normed.forward(&feature[row], &mut out[c..]);
        });
        let of_input = (&input[..], 2 * c);
        let mut query = self.linear(params, &s.query, of_input);
        let mut key = self.linear(params, &s.key, of_input);
        let value = self.linear(params, &s.value, of_input);
        self.rotate(k, [&mut query, &mut key], false);
        let mut keys: Vec<(&[f32], &[f32])> = before
            .iter()
            .map(|step| (&step.key[..], &step.value[..]))
            .collect();
        keys.push((&key, &value));
        let attended = self.attention(rows).forward(&query, &keys);
        let (q, f) = (self.shape.heads * self.shape.head_dim, self.shape.ffn);
        let mut middle = self.linear(params, &s.output, (&attended, q));
        let residual = input.chunks(2 * c).flat_map(|row| &row[c..]);
        middle.iter_mut().zip(residual).for_each(|(m, r)| *m += r);
        let mut normed = vec![0.0; middle.len()];
        let norm = self.norm(params, &s.ffn_norm);
        pool::chunks(self.kernels.pool(), &mut normed, c, |i, out| {
            norm.forward(&middle[i * c..(i + 1) * c], out);
        });
        let gate = self.linear(params, &s.gate, (&normed, c));
        let up = self.linear(params, &s.up, (&normed, c));
        let mut hidden = vec![0.0; gate.len()];
        pool::chunks(self.kernels.pool(), &mut hidden, f, |i, out| {
            let row = i * f..(i + 1) * f;
            Gate::Silu.forward(&gate[row.clone()], &up[row], out);
        });
        let mut out = self.linear(params, &s.down, (&hidden, f));
        out.iter_mut().zip(&middle).for_each(|(o, m)| *o += m);
        Step {
            feature,
            embedded,
            input,
            query,
            key,
            value,
            attended,
            middle,
            normed,
            gate,
            up,
            hidden,
            out,
        }
    }

    /// The gradient at the input of the last of `steps`. `d_keys` has those of the keys and values
    /// of all steps so far.
    fn step_back(
        &self,
        params: &[f32],
        rows: &DraftRows,
        (steps, d_keys): (&[Step], &mut [KeyAndValue]),
        d_out: &[f32],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let (k, s, c) = (steps.len() - 1, &self.slots, self.shape.width);
        let step = &steps[k];
        let d_middle = self.ffn_back(params, step, d_out, grads);
        let mut d_attended = vec![0.0; step.attended.len()];
        let q = self.shape.heads * self.shape.head_dim;
        let at = (&step.attended[..], q);
        self.linear_back(
            params,
            (&s.output, at),
            &d_middle,
            (&mut d_attended, false),
            grads,
        );
        let keys: Vec<(&[f32], &[f32])> = steps
            .iter()
            .map(|step| (&step.key[..], &step.value[..]))
            .collect();
        let attention = self.attention(rows);
        let mut dq = attention.backward(&step.query, &keys, &d_attended, &mut d_keys[..=k]);
        let (dk, dv) = &mut d_keys[k];
        self.rotate(k, [&mut dq, dk], true);
        let mut d_input = vec![0.0; step.input.len()];
        for (slot, d) in [(&s.query, &dq), (&s.key, &*dk), (&s.value, &*dv)] {
            let at = (slot, (&step.input[..], 2 * c));
            let goes_on = slot.start != s.query.start;
            self.linear_back(params, at, d, (&mut d_input, goes_on), grads);
        }
        // The residual stream begins with the normed feature.
        for (d, residual) in d_input.chunks_mut(2 * c).zip(d_middle.chunks(c)) {
            d[c..].iter_mut().zip(residual).for_each(|(d, r)| *d += r);
        }
        let mut d_feature = vec![0.0; step.feature.len()];
        let (token, feature) = (
            self.norm(params, &s.token_norm),
            self.norm(params, &s.feature_norm),
        );
        let mut unused = vec![0.0; c];
        for (i, (d, dx)) in d_input
            .chunks(2 * c)
            .zip(d_feature.chunks_mut(c))
            .enumerate()
        {
            let row = i * c..(i + 1) * c;
            let dw = &mut grads[s.token_norm.clone()];
            token.backward(&step.embedded[row.clone()], &d[..c], &mut unused, Some(dw));
            let dw = &mut grads[s.feature_norm.clone()];
            feature.backward(&step.feature[row], &d[c..], dx, Some(dw));
        }
        d_feature
    }

    /// The gradient before the feed-forward of a step.
    fn ffn_back(&self, params: &[f32], step: &Step, d_out: &[f32], grads: &mut [f32]) -> Vec<f32> {
        let (s, c, f) = (&self.slots, self.shape.width, self.shape.ffn);
        let mut d_hidden = vec![0.0; step.hidden.len()];
        let at = (&s.down, (&step.hidden[..], f));
        self.linear_back(params, at, d_out, (&mut d_hidden, false), grads);
        let (mut gate, mut up) = (step.gate.clone(), step.up.clone());
        let mut pairs: Vec<_> = gate.chunks_mut(f).zip(up.chunks_mut(f)).collect();
        pool::chunks(self.kernels.pool(), &mut pairs, 1, |i, pair| {
            let (gate, up) = &mut pair[0];
            Gate::Silu.backward(gate, up, &d_hidden[i * f..(i + 1) * f]);
        });
        let mut d_normed = vec![0.0; step.normed.len()];
        let normed = (&step.normed[..], c);
        self.linear_back(
            params,
            (&s.gate, normed),
            &gate,
            (&mut d_normed, false),
            grads,
        );
        self.linear_back(params, (&s.up, normed), &up, (&mut d_normed, true), grads);
        let mut d_middle = d_out.to_vec();
        let norm = self.norm(params, &s.ffn_norm);
        for (i, dx) in d_middle.chunks_mut(c).enumerate() {
            let row = i * c..(i + 1) * c;
            let dw = &mut grads[s.ffn_norm.clone()];
            norm.backward(&step.middle[row.clone()], &d_normed[row], dx, Some(dw));
        }
        d_middle
    }

    /// The rows of `block` after the last norm, (rows, C), and their logits, (rows, V).
    fn logits(&self, params: &[f32], out: &[f32], block: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let c = self.shape.width;
        let mut normed = vec![0.0; block.len() * c];
        let norm = self.norm(params, &self.slots.last_norm);
        pool::chunks(self.kernels.pool(), &mut normed, c, |i, to| {
            norm.forward(&out[block[i] * c..(block[i] + 1) * c], to);
        });
        let logits = self.linear(params, &self.slots.logits, (&normed, c));
        (normed, logits)
    }

    /// The loss of a step's logits. Adds its gradient times `weight` to `d_out`.
    fn logits_back(
        &self,
        params: &[f32],
        (out, targets): (&[f32], &[Option<Target>]),
        weight: f32,
        d_out: &mut [f32],
        grads: &mut [f32],
    ) -> f64 {
        let (c, s) = (self.shape.width, &self.slots);
        let wanted: Vec<(usize, usize)> = targets
            .iter()
            .enumerate()
            .filter_map(|(i, target)| Some((i, target.flatten()? as usize)))
            .collect();
        let norm = self.norm(params, &s.last_norm);
        let mut loss = 0.0;
        for block in wanted.chunks(LOGIT_ROWS) {
            let rows: Vec<usize> = block.iter().map(|(i, _)| *i).collect();
            let (normed, mut logits) = self.logits(params, out, &rows);
            let losses = pool::chunks_map(
                self.kernels.pool(),
                &mut logits,
                self.shape.draft_vocab,
                |i, logits| ops::cross_entropy(logits, block[i].1, weight),
            );
            loss += losses.iter().sum::<f64>();
            let mut d_normed = vec![0.0; normed.len()];
            let at = (&s.logits, (&normed[..], c));
            self.linear_back(params, at, &logits, (&mut d_normed, false), grads);
            for (i, d) in rows.iter().zip(d_normed.chunks(c)) {
                let row = i * c..(i + 1) * c;
                let dw = &mut grads[s.last_norm.clone()];
                norm.backward(&out[row.clone()], d, &mut d_out[row], Some(dw));
            }
        }
        loss
    }

    fn norm<'p>(&self, params: &'p [f32], slot: &Range<usize>) -> Norm<'p> {
        Norm {
            weight: &params[slot.clone()],
            offset: 0.0,
            eps: self.shape.norm_eps,
        }
    }

    fn attention(&self, rows: &DraftRows) -> DraftAttention<'_> {
        DraftAttention {
            kernels: self.kernels,
            heads: self.shape.heads,
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            rows: rows.tokens.len(),
        }
    }

    /// Turns queries and keys of step `k`, from 0, by their positions, or back.
    fn rotate(&self, k: usize, [query, key]: [&mut Vec<f32>; 2], back: bool) {
        let d = self.shape.head_dim;
        let rope = Rope::new(RopePairs::Halves, d, ROPE_BASE, 1.0);
        let rows = query.len() / (self.shape.heads * d);
        let mut angles = Vec::new();
        rope.angles(k..k + rows, &mut angles);
        for (x, heads) in [(query, self.shape.heads), (key, self.shape.kv_heads)] {
            pool::chunks(self.kernels.pool(), x, heads * d, |row, x| {
                let angles = &angles[row * d / 2..][..d / 2];
                x.chunks_mut(d)
                    .for_each(|head| ops::rotate(head, angles, back));
            });
        }
    }

    /// x (T, in) -> x W^T (T, out)
    fn linear(&self, params: &[f32], slot: &Range<usize>, (x, cols): (&[f32], usize)) -> Vec<f32> {
        let (m, n) = (x.len() / cols, slot.len() / cols);
        let mut y = vec![0.0; m * n];
        let w = Strided::rows(&params[slot.clone()], cols).t();
        let sizes = Sizes { m, n, k: cols };
        let out = ProductOutput::rows(&mut y, n);
        self.kernels.chains(sizes, Strided::rows(x, cols), w, out);
        y
    }

    /// dy (T, out) -> dx (T, in), from 0 or added to its values, and the weights' gradient.
    fn linear_back(
        &self,
        params: &[f32],
        (slot, (x, cols)): (&Range<usize>, (&[f32], usize)),
        dy: &[f32],
        (dx, goes_on): (&mut [f32], bool),
        grads: &mut [f32],
    ) {
        let (m, n) = (x.len() / cols, slot.len() / cols);
        let w = Strided::rows(&params[slot.clone()], cols);
        let out = ProductOutput {
            values: dx,
            stride: cols,
            goes_on,
        };
        let sizes = Sizes { m, n: cols, k: n };
        self.kernels.chains(sizes, Strided::rows(dy, n), w, out);
        self.weight_back(slot, (x, cols), dy, grads);
    }

    fn weight_back(
        &self,
        slot: &Range<usize>,
        (x, cols): (&[f32], usize),
        dy: &[f32],
        grads: &mut [f32],
    ) {
        let (m, n) = (x.len() / cols, slot.len() / cols);
        let out = ProductOutput::rows(&mut grads[slot.clone()], cols).more();
        let sizes = Sizes {
            m: n,
            n: cols,
            k: m,
        };
        self.kernels
            .chains(sizes, Strided::rows(dy, n).t(), Strided::rows(x, cols), out);
    }
}

/// Share of the even first values that `fuse` begins with, next to the identity.
const FUSE_NOISE: f32 = 0.1;

/// Index of the largest value, the first among equals.
pub(super) fn largest(values: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, n: usize) -> Vec<f32> {
        let of = |i| (crate::random::unit([seed, 9, 9, i]) * 2.0 - 1.0) as f32;
        (0..n as u64).map(of).collect()
    }

    /// Every tensor's gradient against differences of the loss, over three steps.
    #[test]
    fn gradients_are_the_slopes_of_the_loss() {
        let kernels = Kernels::new(2).unwrap();
        let shape = HeadShape {
            width: 32,
            captures: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 48,
            draft_vocab: 20,
            norm_eps: 1e-5,
        };
        let net = HeadNetwork::new(&kernels, shape);
        let rows = DraftRows {
            tokens: vec![0; 12],
            targets: (0..12)
                .map(|i| (i % 5 != 1).then_some(Some(i % 20)))
                .collect(),
            captured: noise(1, 12 * 64),
            embedded: noise(2, 12 * 32),
        };
        let params = net.first_values(3, (&noise(4, 32), &noise(5, 20 * 32)));
        let loss = |params: &[f32]| {
            let mut unused = vec![0.0; params.len()];
            net.gradient(params, &rows, (3, 9), &mut unused)
        };
        let mut grads = vec![0.0; params.len()];
        net.gradient(&params, &rows, (3, 9), &mut grads);
        for slot in net.layout.slots() {
            // Along the gradient itself the loss changes most.
            let own = &grads[slot.range.clone()];
            let norm = ops::dot(own, own).sqrt();
            assert!(norm > 0.0, "{} has no gradient", slot.name);
            let h = 2e-3;
            let moved = |sign: f32| {
                let mut params = params.clone();
                let values = params[slot.range.clone()].iter_mut();
                values.zip(own).for_each(|(p, g)| *p += sign * h * g / norm);
                loss(&params)
            };
            let slope = (moved(1.0) - moved(-1.0)) / (2.0 * f64::from(h));
            let off = (slope - f64::from(norm)).abs() / f64::from(norm);
            assert!(off < 0.02, "{}: {slope}, expected {norm}", slot.name);
        }
    }
}
