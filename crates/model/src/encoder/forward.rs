//! A forward pass of BERT. T rows of all texts of the step, C width, H heads of D, F feed-forward
//! width.
//!
//! Every sum has a fixed order: products that of [`paceline_tensor::matmul`], norms and pooling
//! that of the row in f64, attention that of the keys.

use std::ops::Range;

use paceline_tensor::{Activations, Kernels, PackedMatrix, Precision, Product};

use super::config::{Bert, EncoderActivation, Pooling};
use super::weights::{EncoderLayer, EncoderLinear, EncoderWeights, Norm};

/// A step with its buffers.
pub(super) struct EncoderPass<'a> {
    config: &'a Bert,
    weights: &'a EncoderWeights,
    kernels: &'a Kernels,
    /// Rows of each text.
    texts: Vec<Range<usize>>,
    /// The text of each row.
    text_of: Vec<usize>,
    /// `(T, C)`: residual stream.
    x: Activations,
    /// `(T, C)`: attention output.
    heads: Activations,
    /// `(T, F)`: hidden rows of the feed-forward.
    middle: Activations,
    /// `(T, C)`
    queries: Vec<f32>,
    /// `(T, C)`; then transposed per text, `(C, its rows)`.
    keys: Vec<f32>,
    /// `(T, C)`
    values: Vec<f32>,
    /// `(T, C)` or `(T, F)`: product output.
    out: Vec<f32>,
}

impl<'a> EncoderPass<'a> {
    /// Starts with the embeddings of `texts`, which the caller has checked.
    pub(super) fn new(
        config: &'a Bert,
        weights: &'a EncoderWeights,
        kernels: &'a Kernels,
        texts: &[&[u32]],
    ) -> Self {
        let rows = texts.iter().map(|text| text.len()).sum();
        let (c, f) = (config.width, config.ffn);
        let layers = &weights.layers;
        let of = |cols, pick: fn(&EncoderLayer) -> Vec<&PackedMatrix>| {
            let read = layers.iter().flat_map(pick);
            kernels.activations(rows, cols, Precision::Fifteen, read)
        };
        let mut step = Self {
            config,
            weights,
            kernels,
            texts: ranges(texts),
            text_of: Vec::with_capacity(rows),
            x: of(c, read_of_stream),
            heads: of(c, |layer| vec![&layer.output.matrix]),
            middle: of(f, |layer| vec![&layer.down.matrix]),
            queries: vec![0.0; rows * c],
            keys: vec![0.0; rows * c],
            values: vec![0.0; rows * c],
            out: vec![0.0; rows * c.max(f)],
        };
        for (i, range) in step.texts.iter().enumerate() {
            step.text_of.extend(range.clone().map(|_| i));
        }
        step.embed(texts);
        step
    }

    fn embed(&mut self, texts: &[&[u32]]) {
        let (texts_of, ranges) = (&self.text_of, &self.texts);
        let (weights, first) = (self.weights, self.config.first_position);
        let eps = self.config.eps;
        self.kernels.fill_rows(&mut self.x, |t, row| {
            let text = texts_of[t];
            let at = t - ranges[text].start;
            weights.embedding(texts[text][at], first + at, row);
            weights.norm.apply(row, eps);
        });
    }

    /// Pooled rows of the texts.
    pub(super) fn run(mut self) -> Vec<Vec<f64>> {
        for layer in &self.weights.layers {
            self.attention(layer);
            self.feed_forward(layer);
        }
        let pool = |rows: &Range<usize>| self.pooled(rows.clone());
        self.texts.iter().map(pool).collect()
    }

    /// `x = norm(x + attention(x))`
    fn attention(&mut self, layer: &EncoderLayer) {
        let kernels = self.kernels;
        let products = [
            (&layer.query, &mut self.queries),
            (&layer.key, &mut self.keys),
            (&layer.value, &mut self.values),
        ];
        kernels.products(&self.x, products.map(|(linear, out)| product(linear, out)));
        add_bias(&mut self.queries, &layer.query.bias);
        add_bias(&mut self.keys, &layer.key.bias);
        add_bias(&mut self.values, &layer.value.bias);
        let c = self.config.width;
        let mut turned = Vec::new();
        for text in &self.texts {
            let keys = &mut self.keys[text.start * c..text.end * c];
            transpose(keys, c, &mut turned);
        }
        let look = RowAttention {
            head: self.config.head(),
            kernels,
            queries: &self.queries,
            keys: &self.keys,
            values: &self.values,
        };
        let (texts, text_of) = (&self.texts, &self.text_of);
        kernels.fill_rows(&mut self.heads, |t, row| {
            look.at(t, texts[text_of[t]].clone(), row);
        });
        let out = &mut self.out[..text_of.len() * c];
        let norm = |row: &mut [f32]| layer.attention_norm.apply(row, self.config.eps);
        add_product(
            kernels,
            (&self.heads, &layer.output),
            out,
            &mut self.x,
            norm,
        );
    }

    /// `x = norm(x + down(bend(up(x))))`
    fn feed_forward(&mut self, layer: &EncoderLayer) {
        let (kernels, config) = (self.kernels, self.config);
        let rows = self.text_of.len();
        let (up, f) = (&mut self.out[..rows * config.ffn], config.ffn);
        kernels.products(&self.x, [product(&layer.up, up)]);
        let (up, bias) = (&self.out, &layer.up.bias);
        kernels.fill_rows(&mut self.middle, |t, row| {
            for ((y, x), bias) in row.iter_mut().zip(&up[t * f..]).zip(bias) {
                *y = config.bend.of(x + bias);
            }
        });
        let out = &mut self.out[..rows * config.width];
        let norm = |row: &mut [f32]| layer.ffn_norm.apply(row, config.eps);
        add_product(kernels, (&self.middle, &layer.down), out, &mut self.x, norm);
    }

    /// A text's rows as one.
    fn pooled(&self, rows: Range<usize>) -> Vec<f64> {
        let n = rows.len() as f64;
        let mut sums: Vec<f64> = vec![0.0; self.config.width];
        match self.config.pooling {
            Pooling::First => return doubles(self.x.row(rows.start)),
            Pooling::Last => return doubles(self.x.row(rows.end - 1)),
            Pooling::Mean => {
                for t in rows {
                    let pairs = sums.iter_mut().zip(self.x.row(t));
                    pairs.for_each(|(sum, x)| *sum += f64::from(*x));
                }
                sums.iter_mut().for_each(|sum| *sum /= n);
            }
        }
        sums
    }
}

fn doubles(row: &[f32]) -> Vec<f64> {
    row.iter().copied().map(f64::from).collect()
}

/// Matrices that read the residual stream.
fn read_of_stream(layer: &EncoderLayer) -> Vec<&PackedMatrix> {
    let all = [&layer.query, &layer.key, &layer.value, &layer.up];
    all.map(|linear| &linear.matrix).to_vec()
}

/// Row range of each text.
fn ranges(texts: &[&[u32]]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |text: &&[u32]| {
        let start = end;
        end += text.len();
        start..end
    };
    texts.iter().map(range).collect()
}

fn product<'a>(linear: &'a EncoderLinear, out: &'a mut [f32]) -> Product<'a> {
    Product {
        weights: &linear.matrix,
        first_col: 0,
        out,
    }
}

/// `x = norm(x + from W^T + bias)`; `out` is scratch for the product.
fn add_product(
    kernels: &Kernels,
    (from, linear): (&Activations, &EncoderLinear),
    out: &mut [f32],
    x: &mut Activations,
    norm: impl Fn(&mut [f32]) + Sync,
) {
    kernels.products(from, [product(linear, out)]);
    let c = linear.bias.len();
    let out = &*out;
    kernels.fill_rows(x, |t, row| {
        for ((x, y), bias) in row.iter_mut().zip(&out[t * c..]).zip(&linear.bias) {
            // The order of `modeling_bert.py`.
            *x += y + bias;
        }
        norm(row);
    });
}

fn add_bias(rows: &mut [f32], bias: &[f32]) {
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
    }
}

/// Transposes `(n, c)` to `(c, n)`; `room` is reused scratch.
fn transpose(rows: &mut [f32], c: usize, room: &mut Vec<f32>) {
    room.clear();
    room.extend_from_slice(rows);
    let n = rows.len() / c;
    for (j, row) in room.chunks_exact(c).enumerate() {
        for (i, x) in row.iter().enumerate() {
            rows[i * n + j] = *x;
        }
    }
}

/// Attention of single rows over all rows of their text.
struct RowAttention<'a> {
    /// D
    head: usize,
    kernels: &'a Kernels,
    /// `(T, C)`
    queries: &'a [f32],
    /// `(C, n)` of each text of n rows.
    keys: &'a [f32],
    /// `(T, C)`
    values: &'a [f32],
}

impl RowAttention<'_> {
    /// Fills `out`, `(C,)`, for row `t` of the text at `rows`.
    fn at(&self, t: usize, rows: Range<usize>, out: &mut [f32]) {
        let (c, n, d) = (out.len(), rows.len(), self.head);
        let queries = &self.queries[t * c..(t + 1) * c];
        let keys = &self.keys[rows.start * c..rows.end * c];
        let values = &self.values[rows.start * c..rows.end * c];
        let scale = 1.0 / (d as f32).sqrt();
        let (mut scores, mut weights) = (vec![0.0_f32; n], vec![0.0_f32; n]);
        for (h, out) in out.chunks_exact_mut(d).enumerate() {
            scores.fill(0.0);
            for (i, query) in queries.iter().enumerate().skip(h * d).take(d) {
                let keys = &keys[i * n..(i + 1) * n];
                let pairs = scores.iter_mut().zip(keys);
                pairs.for_each(|(s, key)| *s += query * key);
            }
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let kernels = self.kernels;
            kernels.exp_scaled(&scores, largest, scale, &mut weights);
            let sum: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
            out.fill(0.0);
            for (weight, row) in weights.iter().zip(values.chunks_exact(c)) {
                let pairs = out.iter_mut().zip(&row[h * d..(h + 1) * d]);
                pairs.for_each(|(y, value)| *y += weight * value);
            }
            let divided = |y: &mut f32| *y = (f64::from(*y) / sum) as f32;
            out.iter_mut().for_each(divided);
        }
    }
}

impl Norm {
    /// `(x - mean) / sqrt(variance + eps) * weight + bias`, in f64.
    fn apply(&self, row: &mut [f32], eps: f64) {
        let n = row.len() as f64;
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let square = |x: &f32| (f64::from(*x) - mean) * (f64::from(*x) - mean);
        let variance = row.iter().map(square).sum::<f64>() / n;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((x, weight), bias) in row.iter_mut().zip(&self.weight).zip(&self.bias) {
            let normed = (f64::from(*x) - mean) * scale;
            *x = (normed * f64::from(*weight) + f64::from(*bias)) as f32;
        }
    }
}

impl EncoderActivation {
    /// Uses `libm` for equal bits on every platform.
    fn of(self, x: f32) -> f32 {
        const ROOT_2_OVER_PI: f32 = 0.797_884_6;
        match self {
            Self::Gelu => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => {
                let inner = ROOT_2_OVER_PI * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + libm::tanhf(inner))
            }
            Self::Relu => x.max(0.0),
        }
    }
}
