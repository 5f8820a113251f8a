//! One step: a batch of rows through all layers, in buffers that were allocated once.

use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, KvCache, PAGE, Packed, Product, vector,
};

use crate::config::Activation;
use crate::model::Model;
use crate::weights::{Layer, Linear};

/// Which positions of a sequence give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of the prompt follows.
    None,
    /// The last row's.
    Last,
    /// All rows'.
    All,
}

/// One sequence's share of a batch: consecutive rows at consecutive positions.
#[derive(Clone, Copy, Debug)]
pub struct BatchSequence<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub position: usize,
    /// The sequence's pages in order of position; covers all positions up to the last token's.
    pub pages: &'a [u32],
    /// What is wanted.
    pub logits: Logits,
}

/// What a step computes: sequences that need not know of one another.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// In the order of their rows.
    pub sequences: &'a [BatchSequence<'a>],
}

impl Batch<'_> {
    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }

    /// Rows whose logits are wanted, in order.
    fn wanted(&self, out: &mut Vec<usize>) {
        out.clear();
        let mut first = 0;
        for sequence in self.sequences {
            let end = first + sequence.tokens.len();
            match sequence.logits {
                Logits::None => {}
                Logits::Last => out.push(end - 1),
                Logits::All => out.extend(first..end),
            }
            first = end;
        }
    }

    pub(crate) fn logit_rows(&self) -> usize {
        let rows = |s: &BatchSequence<'_>| match s.logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => s.tokens.len(),
        };
        self.sequences.iter().map(rows).sum()
    }
}

/// Working memory of [`Model::forward`], for batches up to a size; allocated once.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) max_rows: usize,
    pub(crate) max_logit_rows: usize,
    max_sequences: usize,
    /// `(T, C)`
    residual: Vec<f32>,
    /// `(T, C)`
    delta: Vec<f32>,
    /// `(T, C)`, quantised
    x: Activations,
    /// `(T, H D)`
    q: Vec<f32>,
    /// `(T, K D)` each
    k: Vec<f32>,
    v: Vec<f32>,
    /// `(T, H D)`
    attended: Vec<f32>,
    /// `(T, H D)`, quantised
    attended_x: Activations,
    /// `(T, F)` each
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `(T, F)`, quantised
    hidden: Activations,
    /// `(rope, T, pairs)`
    angles: Vec<Vec<(f32, f32)>>,
    /// `(R, C)`, quantised: the rows whose logits are wanted
    head_x: Activations,
    /// `(R, V)`
    logits: Vec<f32>,
    wanted: Vec<usize>,
    scratch: AttentionScratch,
}

impl Workspace {
    /// For up to `max_rows` rows of up to `max_sequences` sequences, `max_logit_rows` rows of
    /// logits, and positions below `context`.
    pub fn new(
        model: &Model,
        max_rows: usize,
        max_logit_rows: usize,
        max_sequences: usize,
        context: usize,
    ) -> Self {
        let c = model.config();
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let integers = model.integer_inputs();
        let precision = |integers: bool| integers.then(|| model.precision());
        let rows = |n: usize| vec![0.0f32; max_rows * n];
        Self {
            max_rows,
            max_logit_rows,
            max_sequences,
            residual: rows(c.width),
            delta: rows(c.width),
            x: Activations::new(max_rows, c.width, precision(integers.normed)),
            q: rows(q),
            k: rows(kv),
            v: rows(kv),
            attended: rows(q),
            attended_x: Activations::new(max_rows, q, precision(integers.attended)),
            gate: rows(c.ffn),
            up: rows(c.ffn),
            hidden: Activations::new(max_rows, c.ffn, precision(integers.hidden)),
            angles: angle_buffers(model, max_rows),
            head_x: Activations::new(max_logit_rows, c.width, precision(integers.head)),
            logits: vec![0.0; max_logit_rows * c.vocab],
            wanted: Vec::with_capacity(max_logit_rows),
            scratch: AttentionScratch::new(max_sequences, c.heads, c.head_dim, context),
        }
    }

    /// Most rows of a batch.
    pub const fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Row `i` of the logits that the last step gave, `(vocabulary,)`, in the order of the batch.
    pub fn logits_mut(&mut self, i: usize, vocab: usize) -> &mut [f32] {
        &mut self.logits[i * vocab..(i + 1) * vocab]
    }
}

fn angle_buffers(model: &Model, max_rows: usize) -> Vec<Vec<(f32, f32)>> {
    let room = |rope: &crate::Rope| Vec::with_capacity(max_rows * rope.frequencies.len());
    model.config().ropes.iter().map(room).collect()
}

/// A step in progress: what the layers of a family work on.
#[derive(Debug)]
pub(crate) struct Step<'m, 'b> {
    model: &'m Model,
    batch: &'b Batch<'b>,
    ws: &'b mut Workspace,
    cache: &'b mut KvCache,
    rows: usize,
}

impl<'m, 'b> Step<'m, 'b> {
    /// Starts a step: embeds the tokens and prepares the rotations.
    pub(crate) fn new(
        model: &'m Model,
        batch: &'b Batch<'b>,
        ws: &'b mut Workspace,
        cache: &'b mut KvCache,
    ) -> Self {
        let rows = batch.rows();
        assert!(
            rows <= ws.max_rows,
            "{rows} rows in a workspace for {}",
            ws.max_rows
        );
        assert!(
            batch.sequences.len() <= ws.max_sequences,
            "{} sequences",
            batch.sequences.len()
        );
        assert!(
            batch.logit_rows() <= ws.max_logit_rows,
            "{} rows of logits",
            batch.logit_rows()
        );
        for x in [&mut ws.x, &mut ws.attended_x, &mut ws.hidden] {
            x.resize(rows);
        }
        let mut step = Self {
            model,
            batch,
            ws,
            cache,
            rows,
        };
        step.embed();
        step.prepare_angles();
        step
    }

    /// tokens -> residual (T, C)
    fn embed(&mut self) {
        let (width, scale) = (
            self.model.config().width,
            self.model.config().embedding_scale,
        );
        let tokens = self.batch.sequences.iter().flat_map(|s| s.tokens);
        for (out, &token) in self.ws.residual.chunks_exact_mut(width).zip(tokens) {
            self.model.embedding().row(token, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }

    fn prepare_angles(&mut self) {
        for (rope, out) in self.model.config().ropes.iter().zip(&mut self.ws.angles) {
            out.clear();
            for s in self.batch.sequences {
                rope.angles(s.position..s.position + s.tokens.len(), out);
            }
        }
    }

    /// residual (T, C) -> x (T, C)
    pub(crate) fn norm(&mut self, weight: &[f32]) {
        let (kernels, eps) = (self.model.kernels(), self.model.config().norm_eps);
        let (width, residual) = (weight.len(), &self.ws.residual);
        kernels.fill_rows(&mut self.ws.x, |t, out| {
            kernels.rms_norm(&residual[t * width..(t + 1) * width], weight, eps, out);
        });
    }

    /// x (T, C) -> q (T, H D), k, v (T, K D)
    pub(crate) fn project_qkv(&mut self, w: &Layer) {
        let rows = self.rows;
        let ws = &mut *self.ws;
        let [q, k, v] = [
            (&mut ws.q, &w.query),
            (&mut ws.k, &w.key),
            (&mut ws.v, &w.value),
        ]
        .map(|(out, linear)| product(out, linear, rows));
        self.model.kernels().products(&ws.x, [q, k, v]);
        add_bias(&mut ws.q, &w.query, rows);
        add_bias(&mut ws.k, &w.key, rows);
        add_bias(&mut ws.v, &w.value, rows);
    }

    /// Norms every head of q (T, H, D) and k (T, K, D) in place.
    pub(crate) fn norm_heads(&mut self, w: &Layer) {
        let c = self.model.config();
        let pairs = [
            (&mut self.ws.q, &w.query_norm, c.heads),
            (&mut self.ws.k, &w.key_norm, c.kv_heads),
        ];
        for (x, weight, heads) in pairs {
            let weight = weight.as_deref().expect("loaded for this family");
            let x = &mut x[..self.rows * heads * c.head_dim];
            norm_in_place(self.model, x, weight);
        }
    }

    /// Rotates and scales q, rotates k, by the positions of the rows.
    pub(crate) fn rotate(&mut self, layer: usize) {
        let c = self.model.config();
        let rope = &c.ropes[c.layers[layer].rope];
        let (angles, pairs) = (
            &self.ws.angles[c.layers[layer].rope],
            rope.frequencies.len(),
        );
        let (q_len, k_len) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        for t in 0..self.rows {
            let angles = &angles[t * pairs..(t + 1) * pairs];
            let q = &mut self.ws.q[t * q_len..(t + 1) * q_len];
            vector::rope(q, c.head_dim, angles, rope.pairs);
            q.iter_mut().for_each(|x| *x *= c.query_scale);
            let k = &mut self.ws.k[t * k_len..(t + 1) * k_len];
            vector::rope(k, c.head_dim, angles, rope.pairs);
        }
    }

    /// Writes k and v to the cache, then q (T, H D) -> attended (T, H D).
    pub(crate) fn attend(&mut self, layer: usize) {
        self.write_cache(layer);
        let c = self.model.config();
        let rows_of = |s: &BatchSequence<'b>| AttentionRows {
            rows: s.tokens.len(),
            position: s.position,
            pages: s.pages,
        };
        let sequences: Vec<_> = self.batch.sequences.iter().map(rows_of).collect();
        let step = Attention {
            cache: self.cache,
            layer,
            heads: c.heads,
            group: c.heads / c.kv_heads,
            skipped: 0,
            window: c.layers[layer].window,
            queries: &self.ws.q,
            sequences: &sequences,
        };
        self.model
            .kernels()
            .attention(&step, &mut self.ws.scratch, &mut self.ws.attended);
    }

    fn write_cache(&mut self, layer: usize) {
        let c = self.model.config();
        let len = c.kv_heads * c.head_dim;
        let mut t = 0;
        for s in self.batch.sequences {
            for position in s.position..s.position + s.tokens.len() {
                let part = t * len..(t + 1) * len;
                let (k, v) = (&self.ws.k[part.clone()], &self.ws.v[part]);
                self.cache
                    .write(layer, s.pages[position / PAGE], position % PAGE, k, v);
                t += 1;
            }
        }
    }

    /// attended (T, H D) -> delta (T, C)
    pub(crate) fn project_attention(&mut self, w: &Layer) {
        let ws = &mut *self.ws;
        let attended = &ws.attended;
        let len = ws.attended_x.cols();
        let kernels = self.model.kernels();
        kernels.fill_rows(&mut ws.attended_x, |t, out| {
            out.copy_from_slice(&attended[t * len..(t + 1) * len]);
        });
        let out = product(&mut ws.delta, &w.attention_output, self.rows);
        kernels.products(&ws.attended_x, [out]);
        add_bias(&mut ws.delta, &w.attention_output, self.rows);
    }

    /// Norms delta (T, C) in place.
    pub(crate) fn norm_delta(&mut self, weight: Option<&[f32]>) {
        let weight = weight.expect("loaded for this family");
        let delta = &mut self.ws.delta[..self.rows * weight.len()];
        norm_in_place(self.model, delta, weight);
    }

    /// residual (T, C) += delta (T, C)
    pub(crate) fn add_delta(&mut self) {
        let n = self.rows * self.model.config().width;
        vector::add_assign(&mut self.ws.residual[..n], &self.ws.delta[..n]);
    }

    /// x (T, C) -> gate, up (T, F)
    pub(crate) fn project_gate_up(&mut self, w: &Layer) {
        let (ws, rows) = (&mut *self.ws, self.rows);
        let outs = [
            product(&mut ws.gate, &w.gate, rows),
            product(&mut ws.up, &w.up, rows),
        ];
        self.model.kernels().products(&ws.x, outs);
        add_bias(&mut ws.gate, &w.gate, rows);
        add_bias(&mut ws.up, &w.up, rows);
    }

    /// activation(gate) * up -> hidden (T, F)
    pub(crate) fn activate(&mut self) {
        let (kernels, ffn) = (self.model.kernels(), self.model.config().ffn);
        let ws = &mut *self.ws;
        let (gate, up, activation) = (&ws.gate, &ws.up, self.model.config().activation);
        kernels.fill_rows(&mut ws.hidden, |t, out| {
            let part = t * ffn..(t + 1) * ffn;
            match activation {
                Activation::Silu => kernels.silu_mul(&gate[part.clone()], &up[part], out),
                Activation::GeluTanh => kernels.gelu_mul(&gate[part.clone()], &up[part], out),
            }
        });
    }

    /// hidden (T, F) -> delta (T, C)
    pub(crate) fn project_down(&mut self, w: &Layer) {
        let ws = &mut *self.ws;
        let out = product(&mut ws.delta, &w.down, self.rows);
        self.model.kernels().products(&ws.hidden, [out]);
        add_bias(&mut ws.delta, &w.down, self.rows);
    }

    /// residual (T, C) of the wanted rows -> logits (R, V); returns R.
    pub(crate) fn finish(self, norm: &[f32], output: &Linear) -> usize {
        let ws = &mut *self.ws;
        self.batch.wanted(&mut ws.wanted);
        let rows = ws.wanted.len();
        if rows == 0 {
            return 0;
        }
        ws.head_x.resize(rows);
        let (kernels, eps) = (self.model.kernels(), self.model.config().norm_eps);
        let (width, residual, wanted) = (norm.len(), &ws.residual, &ws.wanted);
        kernels.fill_rows(&mut ws.head_x, |i, out| {
            let t = wanted[i];
            kernels.rms_norm(&residual[t * width..(t + 1) * width], norm, eps, out);
        });
        let out = product(&mut ws.logits, output, rows);
        kernels.products(&ws.head_x, [out]);
        rows
    }

    /// The residual stream, `(T, C)`.
    #[cfg(test)]
    pub(crate) fn residual(&self) -> &[f32] {
        &self.ws.residual[..self.rows * self.model.config().width]
    }
}

fn product<'a>(out: &'a mut [f32], linear: &'a Linear, rows: usize) -> Product<'a> {
    let weights: &Packed = &linear.matrix;
    Product {
        weights,
        first_col: 0,
        out: &mut out[..rows * weights.rows()],
    }
}

fn add_bias(out: &mut [f32], linear: &Linear, rows: usize) {
    if let Some(bias) = &linear.bias {
        out.chunks_exact_mut(bias.len())
            .take(rows)
            .for_each(|row| vector::add_assign(row, bias));
    }
}

/// RMS norm of every run of `weight.len()` values.
fn norm_in_place(model: &Model, x: &mut [f32], weight: &[f32]) {
    let (kernels, eps) = (model.kernels(), model.config().norm_eps);
    let parts = paceline_tensor::pool::DisjointMut::new(x, weight.len());
    let runs = parts.len();
    kernels.for_rows(runs, |i| {
        // SAFETY: each run is visited once.
        let run = unsafe { parts.part(i) };
        kernels.rms_norm_in_place(run, weight, eps);
    });
}

#[cfg(test)]
mod tests;
