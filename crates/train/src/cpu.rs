//! The engine over our own kernels: every sum is one chain or has the order of `ops`.
//!
//! Letters: T tokens, C width, H query heads, K KV heads, D their size, F feed-forward, r rank.

mod attention;
mod delta;
mod experts;
mod head;
mod latent;
mod linear;
mod mixer;

use paceline_model::{Activation, Config, Experts};
use paceline_tensor::Kernels;

use crate::dropout::Dropout;
use crate::engine::LayerEngine;
use crate::error::Error;
use crate::ops::{Gate, Norm};
use crate::pool;
use crate::rows::{BlockRows, BlockSums, LeafRows};
use crate::weights::{ExpertWeights, StageWeights, VectorParameter};
use experts::{GuestRows, RoutedRows};
pub(crate) use head::HEAD_ROWS;
use mixer::{Mixed, MixerGradients, MixerKept};

/// Computes layers on this machine's threads.
#[derive(Clone, Copy)]
pub(crate) struct Cpu<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a StageWeights,
    /// Factor of the pairs' products.
    pub(crate) scale: f32,
    /// Dropout of adapters' inputs.
    pub(crate) dropout: Option<Dropout>,
    /// Factor of the routers' auxiliary loss in the gradient: see [`experts`]. That of a step's
    /// `judged` targets; of a block in [`of_block`](Self::of_block).
    pub(crate) balance: f32,
    pub(crate) judged: u64,
}

/// Values that a layer's forward pass leaves for its backward pass.
#[derive(Debug)]
pub(crate) struct LayerKept {
    /// (S, K D) and (S, K E) of all rows of the leaf.
    keys: [Vec<f32>; 2],
    /// Of the blocks that are here.
    blocks: Vec<Activations>,
    /// Of rows of any block, where ranks have parts of the experts.
    guests: GuestRows,
}

/// A block whose backward pass has come to its attention.
struct BlockHalf {
    kept: Activations,
    d: MixerGradients,
    /// (T, C) between the halves.
    d_middle: Vec<f32>,
}

/// Values of a block.
#[derive(Debug)]
struct Activations {
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

/// y (T, C) of a block's feed-forward, and what it leaves.
type ForwardedRows = (Vec<f32>, FeedForward);

impl FeedForward {
    /// Holds the place of a block's values before they are computed and after they were taken.
    const fn none() -> Self {
        Self::Dense {
            gate: Vec::new(),
            up: Vec::new(),
            hidden: Vec::new(),
        }
    }
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
    type Kept = LayerKept;

    fn forward(
        &self,
        params: &[f32],
        layer: usize,
        rows: &LeafRows,
        x: &[f32],
    ) -> Result<(Vec<f32>, LayerKept), Error> {
        let (w, c) = (self.weights.layer(layer), self.config.width);
        let (mut begun, mut keys) = (Vec::new(), Vec::new());
        for block in rows.own() {
            let cpu = self.of_block(&block);
            let normed = cpu.norm(&w.attention_norm, params, block.of(x, c));
            let mut mixed = cpu.mix((layer, &block), params, &normed);
            keys.push(std::mem::take(&mut mixed.keys));
            begun.push((normed, mixed));
        }
        let keys = rows.keys(keys, self.key_widths(layer))?;
        let begun = rows.own().zip(begun).map(|(block, begun)| {
            let at = (block.of(x, c), &keys);
            self.of_block(&block)
                .attended((layer, &block), params, at, begun)
        });
        let mut blocks: Vec<Activations> = begun.collect();
        let inputs: Vec<&[f32]> = blocks.iter().map(|own| &*own.ffn_normed).collect();
        let (deltas, guests) = self.feed_forwards((layer, rows), params, &inputs)?;
        let mut y = Vec::with_capacity(x.len());
        for (own, (delta, ffn)) in blocks.iter_mut().zip(deltas) {
            let (delta, ffn_delta) = self.after(w.post_ffn_norm.as_ref(), params, delta);
            y.extend(self.plus(&own.middle, &delta));
            (own.ffn, own.ffn_delta) = (ffn, ffn_delta);
        }
        let kept = LayerKept {
            keys,
            blocks,
            guests,
        };
        Ok((y, kept))
    }

    fn backward(
        &self,
        params: &[f32],
        (layer, rows, x): (usize, &LeafRows, &[f32]),
        kept: Option<LayerKept>,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Result<Vec<f32>, Error> {
        let LayerKept {
            keys,
            mut blocks,
            guests,
        } = match kept {
            Some(kept) => kept,
            None => self.forward(params, layer, rows, x)?.1,
        };
        let c = self.config.width;
        let mut sums = BlockSums::new(rows, grads);
        let apart = self.apart_back((layer, rows), params, (&mut blocks, guests, dy), &mut sums)?;
        let mut apart = apart.into_iter();
        let (mut halves, mut d_keys) = (Vec::new(), Vec::new());
        for (nth, (block, kept)) in rows.own().zip(blocks).enumerate() {
            let (cpu, dy) = (self.of_block(&block), block.of(dy, c));
            let at = ((layer, &block), apart.next());
            let (half, keys) = sums.add(nth, |grads| {
                cpu.backward_attention(at, params, (kept, &keys, dy), grads)
            });
            halves.push(half);
            d_keys.push(keys);
        }
        let d_keys = rows.key_gradients(d_keys, self.key_widths(layer))?;
        let mut dx = Vec::with_capacity(x.len());
        for (nth, ((block, half), d_keys)) in rows.own().zip(halves).zip(d_keys).enumerate() {
            let (cpu, x) = (self.of_block(&block), block.of(x, c));
            let (at, w) = ((layer, &block), self.weights.layer(layer));
            let BlockHalf { kept, d, d_middle } = half;
            dx.extend(sums.add(nth, |grads| {
                let inputs = (kept.normed.as_slice(), &kept.mixer);
                let d_normed = cpu.mix_back(at, params, inputs, (d, d_keys), grads);
                let mut dx = d_middle;
                cpu.norm_back(&w.attention_norm, params, (x, &d_normed), &mut dx, grads);
                dx
            }));
        }
        sums.finish()?;
        Ok(dx)
    }
}

impl Cpu<'_> {
    /// The same for a block of a leaf.
    fn of_block(&self, block: &BlockRows<'_>) -> Self {
        Self {
            balance: self.balance * block.judged() as f32 / self.judged as f32,
            ..self.of_rows(block.first())
        }
    }

    /// The same for rows from `first` on.
    fn of_rows(&self, first: usize) -> Self {
        Self {
            dropout: self.dropout.map(|chance| chance.starting_at(first)),
            ..*self
        }
    }

    /// A block from its attention to the norm before its feed-forward.
    fn attended(
        &self,
        (layer, rows): (usize, &BlockRows<'_>),
        params: &[f32],
        (x, keys): (&[f32], &[Vec<f32>; 2]),
        (normed, mixed): (Vec<f32>, Mixed),
    ) -> Activations {
        let w = self.weights.layer(layer);
        let (attended, mixer) = self.attend((layer, rows), params, mixed, keys);
        let delta = self.linear(&w.matrices[OUT], params, &attended);
        let (delta, attention_delta) = self.after(w.post_attention_norm.as_ref(), params, delta);
        let middle = self.plus(x, &delta);
        Activations {
            normed,
            mixer,
            attended,
            attention_delta,
            ffn_normed: self.norm(&w.ffn_norm, params, &middle),
            middle,
            ffn: FeedForward::none(),
            ffn_delta: None,
        }
    }

    /// The feed-forwards of the blocks that are here, without norms, and what they leave.
    fn feed_forwards(
        &self,
        (layer, rows): (usize, &LeafRows),
        params: &[f32],
        inputs: &[&[f32]],
    ) -> Result<(Vec<ForwardedRows>, GuestRows), Error> {
        if let (Some(at), Some(seat)) = (self.experts_of(layer), rows.cut_experts()) {
            return self.experts_apart((at, (rows, seat)), params, inputs);
        }
        let own = rows.own().zip(inputs);
        let each = own.map(|(block, x)| self.of_block(&block).feed_forward(layer, params, x));
        Ok((each.collect(), GuestRows::default()))
    }

    /// The gradients at the feed-forwards' inputs of the blocks that are here, where ranks have
    /// parts of the experts; none elsewhere.
    fn apart_back(
        &self,
        (layer, rows): (usize, &LeafRows),
        params: &[f32],
        (blocks, guests, dy): (&mut [Activations], GuestRows, &[f32]),
        sums: &mut BlockSums<'_>,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let (Some(at), Some(seat)) = (self.experts_of(layer), rows.cut_experts()) else {
            return Ok(Vec::new());
        };
        let mut own = Vec::with_capacity(blocks.len());
        for (block, kept) in rows.own().zip(blocks) {
            let ffn = std::mem::replace(&mut kept.ffn, FeedForward::none());
            if let FeedForward::Routed(routed) = ffn {
                let dy = block.of(dy, self.config.width);
                own.push((kept.ffn_normed.as_slice(), routed, dy));
            }
        }
        self.experts_back_apart((at, (rows, seat)), params, own, guests, sums)
    }

    /// The experts of a layer that has some.
    fn experts_of(&self, layer: usize) -> Option<(Experts, &ExpertWeights)> {
        let weights = self.weights.layer(layer).experts.as_ref()?;
        Some((self.config.layers[layer].experts?, weights))
    }

    /// A block back to its attention, and the gradients of the leaf's keys and values. `apart`: the
    /// gradient at the input of its experts, where ranks have parts of them.
    fn backward_attention(
        &self,
        ((layer, rows), apart): ((usize, &BlockRows<'_>), Option<Vec<f32>>),
        params: &[f32],
        (mut kept, keys, dy): (Activations, &[Vec<f32>; 2], &[f32]),
        grads: &mut [f32],
    ) -> (BlockHalf, [Vec<f32>; 2]) {
        let w = self.weights.layer(layer);
        let d_normed = match apart {
            Some(d_normed) => d_normed,
            None => self.backward_ffn(params, layer, &mut kept, dy, grads),
        };
        let (mut d_middle, at) = (dy.to_vec(), (kept.middle.as_slice(), d_normed.as_slice()));
        self.norm_back(&w.ffn_norm, params, at, &mut d_middle, grads);
        let (post, before) = (
            w.post_attention_norm.as_ref(),
            kept.attention_delta.as_deref(),
        );
        let d_delta = self.before(post, params, before, &d_middle, grads);
        let mut d_attended = vec![0.0; kept.attended.len()];
        let out = (&w.matrices[OUT], kept.attended.as_slice());
        self.linear_back(out, params, &d_delta, (&mut d_attended, false), grads);
        let mixer = (&kept.mixer, keys);
        let (d, d_keys) = self.attend_back((layer, rows), params, mixer, d_attended, grads);
        (BlockHalf { kept, d, d_middle }, d_keys)
    }

    /// The second half of a layer without its norms: (T, C), and what it leaves.
    fn feed_forward(&self, layer: usize, params: &[f32], x: &[f32]) -> (Vec<f32>, FeedForward) {
        if let Some(at) = self.experts_of(layer) {
            let (y, routed) = self.experts(at, params, x);
            return (y, FeedForward::Routed(routed));
        }
        let w = self.weights.layer(layer);
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

    /// The gradient at the input of a block's feed-forward.
    fn backward_ffn(
        &self,
        params: &[f32],
        layer: usize,
        kept: &mut Activations,
        dy: &[f32],
        grads: &mut [f32],
    ) -> Vec<f32> {
        let w = self.weights.layer(layer);
        let post = w.post_ffn_norm.as_ref();
        let d_delta = self.before(post, params, kept.ffn_delta.as_deref(), dy, grads);
        let x = kept.ffn_normed.as_slice();
        match std::mem::replace(&mut kept.ffn, FeedForward::none()) {
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
                let at = self.experts_of(layer).expect("routed by experts");
                self.experts_back(at, params, (x, routed, &d_delta), grads)
            }
        }
    }

    fn gate(&self) -> Gate {
        match self.config.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
            Activation::ReluSquared => unreachable!("no family with gradients has it"),
            Activation::Situ { .. } => unreachable!("no family with gradients has it"),
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

    /// Adds what the embedding gets, block by block.
    ///
    /// # Errors
    /// [`Error::Comm`] of ranks with other blocks.
    pub(crate) fn embed_rows_back(
        &self,
        rows: &LeafRows,
        (tokens, dx): (&[u32], &[f32]),
        grads: &mut [f32],
    ) -> Result<(), Error> {
        let mut sums = BlockSums::new(rows, grads);
        for (nth, block) in rows.own().enumerate() {
            let at = (block.of(tokens, 1), block.of(dx, self.config.width));
            sums.add(nth, |grads| self.embed_back(at.0, at.1, grads));
        }
        sums.finish()
    }

    /// Adds what the embedding gets, token by token.
    fn embed_back(&self, tokens: &[u32], dx: &[f32], grads: &mut [f32]) {
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
}
