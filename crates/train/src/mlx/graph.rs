//! A layer and the head as graphs of MLX's operations, in the order of the CPU's engine.
//!
//! Letters: T tokens, n of one sequence, C width, H query heads, K KV heads, D their size, F
//! feed-forward, r rank, V vocabulary.

pub(super) mod slots;

use std::ops::Range;

use paceline_mlx::{Array, Dtype, Mask, Stream};
use paceline_model::{Activation, Config, LayerShape};
use paceline_model_mlx::MlxMatrix;

use crate::dropout::Dropout;
use crate::weights::{AdapterFactors, LayerWeights, Matrix, MatrixStorage, VectorParameter};
use slots::TensorSlot;

pub(super) type ArrayResult = Result<Array, paceline_mlx::Error>;

/// sqrt(2 / pi) and the cubic factor of GELU's tanh form.
const GELU: (f32, f32) = (0.797_884_6, 0.044_715);

/// Ingredients of a graph.
pub(super) struct Graph<'a> {
    pub(super) stream: &'a Stream,
    pub(super) config: &'a Config,
    /// Type of activations.
    pub(super) dtype: Dtype,
    /// Factor of pairs.
    pub(super) scale: f32,
    /// Positions per radian, for each of the model's rotations.
    pub(super) periods: &'a [Array],
    /// Dropout of adapters' inputs.
    pub(super) dropout: Option<Dropout>,
    pub(super) slots: &'a [TensorSlot],
    /// Trained tensors, f32, in the order of `slots`.
    pub(super) trained: &'a [Array],
}

/// A layer's weights: their description, and its fixed matrices.
pub(super) struct MlxLayer<'a> {
    pub(super) shape: &'a LayerShape,
    pub(super) layer: &'a LayerWeights,
    /// None where a matrix is trained.
    pub(super) matrices: &'a [Option<MlxMatrix>; 7],
}

impl Graph<'_> {
    /// x (T, C) -> y (T, C), both f32.
    pub(super) fn layer(&self, held: &MlxLayer<'_>, lengths: &[usize], x: &Array) -> ArrayResult {
        let (s, w) = (self.stream, held.layer);
        let linear = |n: usize, x: &Array| {
            let fixed = held.matrices[n].as_ref();
            self.linear(&w.matrices[n], fixed, x)
        };
        let x = s.astype(x, self.dtype)?;
        let normed = self.norm(&w.attention_norm, &x)?;
        let [q, k, v] = [
            linear(0, &normed)?,
            linear(1, &normed)?,
            linear(2, &normed)?,
        ];
        let q = self.heads(held.shape, &q, w.query_norm.as_ref())?;
        let k = self.heads(held.shape, &k, w.key_norm.as_ref())?;
        let v = self.heads(held.shape, &v, None)?;
        let attended = self.attention(held.shape, lengths, [&q, &k, &v])?;
        let delta = linear(3, &attended)?;
        let delta = self.after(w.post_attention_norm.as_ref(), delta)?;
        let middle = s.add(&x, &delta)?;
        let normed = self.norm(&w.ffn_norm, &middle)?;
        let (gate, up) = (linear(4, &normed)?, linear(5, &normed)?);
        let hidden = s.multiply(&self.activated(&gate)?, &up)?;
        let delta = linear(6, &hidden)?;
        let delta = self.after(w.post_ffn_norm.as_ref(), delta)?;
        s.astype(&s.add(&middle, &delta)?, Dtype::F32)
    }

    /// x (n, C) in f32 -> the negative log likelihood of each row's target, (n, 1) in f32.
    pub(super) fn losses(
        &self,
        (norm, matrix): (&VectorParameter, &Matrix),
        fixed: Option<&MlxMatrix>,
        (x, targets): (&Array, &Array),
    ) -> ArrayResult {
        let s = self.stream;
        let normed = self.norm(norm, &s.astype(x, self.dtype)?)?;
        let logits = s.astype(&self.linear(matrix, fixed, &normed)?, Dtype::F32)?;
        let total = s.log_sum_exp(&logits, 1)?;
        s.subtract(&total, &s.take_along(&logits, targets, 1)?)
    }

    /// The trained tensor of a place in all that is trained, f32.
    fn trained(&self, range: &Range<usize>) -> &Array {
        let nth = self.slots.iter().position(|slot| slot.range == *range);
        &self.trained[nth.expect("every trained tensor of a layer has a slot")]
    }

    /// (n,)
    fn vector(&self, vector: &VectorParameter) -> ArrayResult {
        let values = match vector {
            VectorParameter::Fixed(values) => {
                self.stream.array_f32(values, &[values.len() as i32])?
            }
            VectorParameter::Trained(range) => self.trained(range).clone(),
        };
        self.stream.astype(&values, self.dtype)
    }

    /// Norms the last axis; the model's offset is added to the weights in f32.
    fn norm(&self, weight: &VectorParameter, x: &Array) -> ArrayResult {
        let (s, c) = (self.stream, self.config);
        if c.norm_offset == 0.0 {
            return s.rms_norm(x, &self.vector(weight)?, c.norm_eps);
        }
        let wide = match weight {
            VectorParameter::Fixed(values) => s.array_f32(values, &[values.len() as i32])?,
            VectorParameter::Trained(range) => self.trained(range).clone(),
        };
        let wide = s.add(&wide, &s.scalar(c.norm_offset, Dtype::F32)?)?;
        s.rms_norm(x, &s.astype(&wide, self.dtype)?, c.norm_eps)
    }

    /// A half's result through the norm after it, if there is one.
    fn after(&self, norm: Option<&VectorParameter>, delta: Array) -> ArrayResult {
        match norm {
            Some(norm) => self.norm(norm, &delta),
            None => Ok(delta),
        }
    }

    /// A trained matrix (rows, cols), across: (cols, rows).
    fn across(&self, range: &Range<usize>) -> ArrayResult {
        let whole = self.stream.astype(self.trained(range), self.dtype)?;
        self.stream.transpose(&whole, &[1, 0])
    }

    /// x (T, in) -> y (T, out) = x W^T + s (x A^T) B^T + bias
    fn linear(&self, matrix: &Matrix, fixed: Option<&MlxMatrix>, x: &Array) -> ArrayResult {
        let s = self.stream;
        let mut y = match (&matrix.kept, fixed) {
            (MatrixStorage::Trained(range), _) => s.matmul(x, &self.across(range)?)?,
            (_, fixed) => fixed.expect("fixed matrices are loaded").apply(s, x)?,
        };
        if let Some(pair) = &matrix.pair {
            let inner = s.matmul(&self.inputs(pair, x)?, &self.across(&pair.a)?)?;
            let inner = s.multiply(&inner, &s.scalar(self.scale, self.dtype)?)?;
            y = s.add(&y, &s.matmul(&inner, &self.across(&pair.b)?)?)?;
        }
        match &matrix.bias {
            Some(bias) => s.add(&y, &self.vector(bias)?),
            None => Ok(y),
        }
    }

    /// The inputs of a pair: those of its matrix, but for those that chance leaves out.
    fn inputs(&self, pair: &AdapterFactors, x: &Array) -> ArrayResult {
        let Some(dropout) = self.dropout else {
            return Ok(x.clone());
        };
        let shape = x.shape();
        let cols = shape[1] as usize;
        let mut factors = vec![1.0; shape[0] as usize * cols];
        for (row, factors) in factors.chunks_mut(cols).enumerate() {
            dropout.apply(pair.number, row, factors);
        }
        let factors = self.stream.array_f32(&factors, &shape)?;
        let factors = self.stream.astype(&factors, self.dtype)?;
        self.stream.multiply(x, &factors)
    }

    /// x (T, heads D) -> (T, heads, D), normed where heads have a norm.
    fn heads(&self, shape: &LayerShape, x: &Array, norm: Option<&VectorParameter>) -> ArrayResult {
        let rows = x.shape()[0];
        let heads = self.stream.reshape(x, &[rows, -1, shape.head_dim as i32])?;
        self.after(norm, heads)
    }

    /// q (T, H, D), k, v (T, K, D) -> (T, H D), sequence by sequence.
    fn attention(&self, shape: &LayerShape, lengths: &[usize], qkv: [&Array; 3]) -> ArrayResult {
        let s = self.stream;
        let mut first = 0;
        let mut parts = Vec::with_capacity(lengths.len());
        for n in lengths {
            let end = first + *n as i32;
            let [q, k, v] = qkv.map(|x| self.sequence(x, first..end));
            let (q, k) = (self.turned(shape, &q?)?, self.turned(shape, &k?)?);
            let window = self.window(shape, *n)?;
            let mask = match &window {
                _ if *n == 1 => Mask::None,
                Some(window) => Mask::Array(window),
                None => Mask::Causal,
            };
            let attended = s.attention([&q, &k, &v?], shape.query_scale, mask, None)?;
            let rows = s.transpose(&attended, &[0, 2, 1, 3])?;
            parts.push(s.reshape(&rows, &[*n as i32, -1])?);
            first = end;
        }
        match &parts[..] {
            [one] => Ok(one.clone()),
            more => s.concatenate(&more.iter().collect::<Vec<_>>(), 0),
        }
    }

    /// Rows of (T, heads, D) as (1, heads, n, D).
    fn sequence(&self, x: &Array, rows: Range<i32>) -> ArrayResult {
        let (s, shape) = (self.stream, x.shape());
        let (heads, dim) = (shape[1], shape[2]);
        let part = s.slice(x, &[rows.start, 0, 0], &[rows.end, heads, dim])?;
        let part = s.reshape(&part, &[1, rows.end - rows.start, heads, dim])?;
        s.transpose(&part, &[0, 2, 1, 3])
    }

    /// Turns (1, heads, n, D) by its positions. The loader has put pairs into halves.
    fn turned(&self, shape: &LayerShape, x: &Array) -> ArrayResult {
        let (s, rope) = (self.stream, &self.config.ropes[shape.rope]);
        let turned = s.rope(x, &self.periods[shape.rope], false, 0)?;
        if rope.magnitude == 1.0 {
            return Ok(turned);
        }
        s.multiply(&turned, &s.scalar(rope.magnitude as f32, self.dtype)?)
    }

    /// Truth values (n, n) where a sequence is longer than the layer's window.
    fn window(&self, shape: &LayerShape, n: usize) -> Result<Option<Array>, paceline_mlx::Error> {
        let Some(window) = shape.window.filter(|window| n > *window) else {
            return Ok(None);
        };
        let sees = |query: usize, key: usize| key <= query && query < key + window;
        let bytes = (0..n).flat_map(|query| (0..n).map(move |key| u8::from(sees(query, key))));
        let bytes: Vec<u8> = bytes.collect();
        let sizes = [n as i32, n as i32];
        self.stream.array(&bytes, &sizes, Dtype::Bool).map(Some)
    }

    /// The function on the gate.
    fn activated(&self, gate: &Array) -> ArrayResult {
        let s = self.stream;
        let number = |value: f32| s.scalar(value, self.dtype);
        let z = match self.config.activation {
            Activation::Silu => gate.clone(),
            Activation::ReluSquared => unreachable!("no family with gradients has it"),
            Activation::Situ { .. } => unreachable!("no family with gradients has it"),
            Activation::GeluTanh => {
                // (1 + tanh z) / 2 = 1 / (1 + exp(-2 z))
                let square = s.multiply(gate, gate)?;
                let inner = s.add(&s.multiply(&square, &number(GELU.1)?)?, &number(1.0)?)?;
                s.multiply(&s.multiply(gate, &inner)?, &number(2.0 * GELU.0)?)?
            }
        };
        s.multiply(gate, &s.sigmoid(&z)?)
    }
}
