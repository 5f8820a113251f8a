//! One step: a batch of rows through all layers, in buffers that were allocated once.

use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::Memory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, KvCache, PAGE, Packed, Product, vector,
};

use crate::config::Activation;
use crate::families::{Half, LayerStep};
use crate::model::Model;
use crate::weights::{Layer, Linear};
use crate::{Error, Links};

pub(crate) mod halves;
mod sums;

use halves::Turn;
use sums::Sums;

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

impl BatchSequence<'_> {
    /// The pages that hold its positions up to the last token's.
    pub(crate) fn pages_in_use(&self) -> &[u32] {
        &self.pages[..(self.position + self.tokens.len()).div_ceil(PAGE)]
    }
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
    pub(crate) fn wanted(&self, out: &mut Vec<usize>) {
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

/// The largest batch that a [`Workspace`] is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Rows of all sequences.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub logit_rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Positions of a sequence.
    pub context: usize,
}

impl BatchSize {
    /// For one sequence of up to `context` positions, `rows` of them at a time, of which the last
    /// gives logits.
    pub const fn single(rows: usize, context: usize) -> Self {
        Self {
            rows,
            logit_rows: 1,
            sequences: 1,
            context,
        }
    }
}

/// What a plan from another rank may ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) rows: usize,
    pub(crate) logit_rows: usize,
    pub(crate) sequences: usize,
    pub(crate) context: usize,
    pub(crate) pages: usize,
    pub(crate) vocab: usize,
}

impl Limits {
    pub(crate) const fn new(size: BatchSize, pages: usize, vocab: usize) -> Self {
        Self {
            rows: size.rows,
            logit_rows: size.logit_rows,
            sequences: size.sequences,
            context: size.context,
            pages,
            vocab,
        }
    }
}

/// Working memory of [`Model::forward`], for batches up to a size; allocated once.
///
/// H, K, F and V are this rank's heads, KV heads, feed-forward columns and rows of the head.
#[derive(Debug)]
pub struct Workspace {
    size: BatchSize,
    /// `(T, C)`; exchanged with other stages.
    residual: Memory<f32>,
    sums: Sums,
    /// `(T, C)`, quantised
    x: Activations,
    /// `(T, H D)`
    q: Memory<f32>,
    /// `(T, K D)` each
    k: Memory<f32>,
    v: Memory<f32>,
    /// `(T, H D)`, as attention leaves it, then quantised
    attended: Activations,
    /// `(T, F)` each
    gate: Memory<f32>,
    up: Memory<f32>,
    /// `(T, F)`, quantised
    hidden: Activations,
    /// `(rope, T, pairs)`
    angles: Vec<Vec<(f32, f32)>>,
    /// `(R, C)`, quantised: the rows whose logits are wanted
    head_x: Activations,
    /// `(R, V)`; empty when this rank has all of the vocabulary.
    own_logits: Memory<f32>,
    /// `(R, vocabulary)`; at the leader.
    logits: Vec<f32>,
    /// One rank's logits; at the leader.
    received: Memory<f32>,
    wanted: Vec<usize>,
    /// The plan of the step, for the other ranks or from the leader.
    words: Vec<u32>,
    /// Empty: memory that each step describes its sequences in.
    sequences: Vec<AttentionRows<'static>>,
    scratch: AttentionScratch,
    /// For the second half of a step, where halves overlap.
    pub(crate) second: Option<Box<Self>>,
}

impl Workspace {
    /// For batches of up to `size`.
    pub fn new(model: &Model, size: BatchSize) -> Self {
        let overlap = model.links().is_some_and(|links| links.overlap);
        let second = (overlap && size.rows >= halves::HALVES_FROM).then(|| {
            let rows = halves::most_second_rows(size.rows);
            let logit_rows = size.logit_rows.min(rows);
            Box::new(Self::whole(
                model,
                BatchSize {
                    rows,
                    logit_rows,
                    ..size
                },
            ))
        });
        Self {
            second,
            ..Self::whole(model, size)
        }
    }

    fn whole(model: &Model, size: BatchSize) -> Self {
        let (c, shard) = (model.config(), model.shard());
        let (q, kv) = (
            shard.heads.len() * c.head_dim,
            shard.kv_heads.len() * c.head_dim,
        );
        let (ffn, vocab) = (shard.ffn().len(), shard.vocab().len());
        let layers = model.layers();
        let attention_outputs = layers.iter().flat_map(|l| l.attention_output.matrices());
        let downs = layers.iter().flat_map(|l| l.down.matrices());
        let head = model.head().map(|(_, output)| &output.matrix);
        // Results of products begin at cache lines, whole ones of which are stored.
        let rows = |n: usize| Memory::new(None, size.rows * n);
        let logits = |n: usize| vec![0.0f32; size.logit_rows * n];
        Self {
            size,
            residual: exchanged(model, size.rows * c.width),
            sums: Sums::new(model, size.rows),
            x: activations(
                model,
                size.rows,
                c.width,
                layers.iter().flat_map(Layer::of_normed),
            ),
            q: rows(q),
            k: rows(kv),
            v: rows(kv),
            attended: activations(model, size.rows, q, attention_outputs),
            gate: rows(ffn),
            up: rows(ffn),
            hidden: activations(model, size.rows, ffn, downs),
            angles: angle_buffers(model, size.rows),
            head_x: activations(model, size.logit_rows, c.width, head),
            own_logits: exchanged(
                model,
                size.logit_rows * if vocab == c.vocab { 0 } else { vocab },
            ),
            logits: logits(if shard.leads() { c.vocab } else { 0 }),
            received: exchanged(model, Links::logits_room(shard, size.logit_rows)),
            wanted: Vec::with_capacity(size.logit_rows),
            words: Vec::new(),
            sequences: Vec::with_capacity(size.sequences),
            scratch: model.kernels().attention_scratch(
                size.sequences,
                shard.heads.len(),
                c.head_dim,
                size.context,
            ),
            second: None,
        }
    }

    /// The largest batch.
    pub const fn size(&self) -> BatchSize {
        self.size
    }

    pub(crate) const fn words_mut(&mut self) -> &mut Vec<u32> {
        &mut self.words
    }

    /// Puts the first `second` rows of logits in `of` behind the `first` that are here.
    pub(crate) fn take_logits(&mut self, first: usize, of: &Self, second: usize) {
        let vocab = of.logits.len() / of.size.logit_rows.max(1);
        let to = &mut self.logits[first * vocab..(first + second) * vocab];
        to.copy_from_slice(&of.logits[..second * vocab]);
    }

    /// Row `i` of the logits that the last step gave, `(vocabulary,)`, in the order of the batch.
    pub fn logits_mut(&mut self, i: usize, vocab: usize) -> &mut [f32] {
        &mut self.logits[i * vocab..(i + 1) * vocab]
    }
}

/// Inputs of products with `matrices`, as these read them.
fn activations<'a>(
    model: &Model,
    max_rows: usize,
    cols: usize,
    matrices: impl IntoIterator<Item = &'a Packed>,
) -> Activations {
    let kernels = model.kernels();
    kernels.activations(max_rows, cols, model.precision(), matrices)
}

/// Memory for `len` values that ranks send to each other or receive: registered with their groups,
/// so that devices that can do so move it without a copy.
fn exchanged(model: &Model, len: usize) -> Memory<f32> {
    Memory::new(model.links().map(|links| &*links.world), len)
}

fn angle_buffers(model: &Model, max_rows: usize) -> Vec<Vec<(f32, f32)>> {
    let room = |rope: &crate::Rope| Vec::with_capacity(max_rows * rope.frequencies.len());
    model.config().ropes.iter().map(room).collect()
}

/// The sequences of a batch, in the memory of `empty`.
fn attention_rows<'b>(
    batch: &Batch<'b>,
    empty: &mut Vec<AttentionRows<'static>>,
) -> Vec<AttentionRows<'b>> {
    let mut sequences = without_rows(std::mem::take(empty));
    sequences.extend(batch.sequences.iter().map(|s| AttentionRows {
        rows: s.tokens.len(),
        position: s.position,
        pages: s.pages,
    }));
    sequences
}

/// Empties a vector and keeps its memory for elements of another lifetime: collecting in place
/// does not allocate.
fn without_rows<'b>(mut rows: Vec<AttentionRows<'_>>) -> Vec<AttentionRows<'b>> {
    rows.clear();
    rows.into_iter()
        .map(|_| -> AttentionRows<'b> { unreachable!("it was emptied") })
        .collect()
}

/// A step in progress: what the layers of a family work on.
#[derive(Debug)]
pub(crate) struct Step<'m, 'b> {
    model: &'m Model,
    batch: &'b Batch<'b>,
    ws: &'b mut Workspace,
    /// Used by one half at a time, in turn.
    cache: &'b Mutex<&'m mut KvCache>,
    sequences: Vec<AttentionRows<'b>>,
    rows: usize,
    /// Of this half, where it is one.
    turn: Option<Turn<'b>>,
    /// Layer of the model.
    index: usize,
}

impl<'m, 'b> Step<'m, 'b> {
    /// Starts a step: embeds the tokens or takes the residual from the stage before, and prepares
    /// the rotations.
    pub(crate) fn new(
        model: &'m Model,
        batch: &'b Batch<'b>,
        ws: &'b mut Workspace,
        cache: &'b Mutex<&'m mut KvCache>,
        turn: Option<Turn<'b>>,
    ) -> Result<Self, Error> {
        let (rows, size) = (batch.rows(), ws.size);
        assert!(
            rows <= size.rows
                && batch.sequences.len() <= size.sequences
                && batch.logit_rows() <= size.logit_rows,
            "{rows} rows of {} sequences, {} rows of logits, in a workspace for {size:?}",
            batch.sequences.len(),
            batch.logit_rows()
        );
        for x in [&mut ws.x, &mut ws.attended, &mut ws.hidden] {
            x.resize(rows);
        }
        let mut step = Self {
            model,
            batch,
            sequences: attention_rows(batch, &mut ws.sequences),
            ws,
            cache,
            rows,
            turn,
            index: 0,
        };
        match model.links() {
            Some(links) if !model.shard().embeds() => {
                let n = rows * model.config().width;
                links.receive_residual(model.shard(), &mut step.ws.residual[..n])?;
            }
            _ => step.embed(),
        }
        step.prepare_angles();
        Ok(step)
    }

    /// tokens -> residual (T, C)
    fn embed(&mut self) {
        let (width, scale) = (
            self.model.config().width,
            self.model.config().embedding_scale,
        );
        let embedding = self.model.embedding();
        let tokens = self.batch.sequences.iter().flat_map(|s| s.tokens);
        for (out, &token) in self.ws.residual.chunks_exact_mut(width).zip(tokens) {
            embedding.row(token, out);
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

    /// Sends the residual stream (T, C) to the next stage, or turns its wanted rows into logits
    /// (R, V) at the leader; returns R there.
    pub(crate) fn finish(mut self) -> Result<usize, Error> {
        self.ws.sequences = without_rows(std::mem::take(&mut self.sequences));
        let (model, shard) = (self.model, self.model.shard());
        match model.head() {
            Some((norm, output)) => self.logits(norm, output),
            None => {
                let n = self.rows * model.config().width;
                let links = model.links().expect("an earlier stage has links");
                links.send_residual(shard, &self.ws.residual[..n])?;
                Ok(0)
            }
        }
    }

    fn logits(self, norm: &[f32], output: &Linear) -> Result<usize, Error> {
        let ws = &mut *self.ws;
        self.batch.wanted(&mut ws.wanted);
        let rows = ws.wanted.len();
        if rows == 0 {
            return Ok(0);
        }
        ws.head_x.resize(rows);
        let (kernels, eps) = (self.model.kernels(), self.model.config().norm_eps);
        let (width, residual, wanted) = (norm.len(), &ws.residual, &ws.wanted);
        kernels.fill_rows(&mut ws.head_x, |i, out| {
            let t = wanted[i];
            kernels.rms_norm(&residual[t * width..(t + 1) * width], norm, eps, out);
        });
        let (shard, vocab) = (self.model.shard(), self.model.config().vocab);
        let Some(links) = self.model.links().filter(|_| shard.vocab().len() < vocab) else {
            let out = product(&mut ws.logits, output, rows);
            kernels.products(&ws.head_x, [out]);
            return Ok(rows);
        };
        let out = product(&mut ws.own_logits, output, rows);
        kernels.products(&ws.head_x, [out]);
        let mine = &ws.own_logits[..rows * output.matrix.rows()];
        let all = if shard.leads() {
            &mut ws.logits[..rows * vocab]
        } else {
            &mut []
        };
        links.gather_logits(shard, rows, mine, all, &mut ws.received)?;
        Ok(if shard.leads() { rows } else { 0 })
    }

    /// The residual stream, `(T, C)`.
    #[cfg(test)]
    pub(crate) fn residual(&self) -> &[f32] {
        &self.ws.residual[..self.rows * self.model.config().width]
    }
}

impl<'b> LayerStep for Step<'_, 'b> {
    type Layer = Layer;

    fn norm(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => &w.attention_norm,
            Half::FeedForward => &w.ffn_norm,
        };
        let (kernels, eps) = (self.model.kernels(), self.model.config().norm_eps);
        let (width, residual) = (weight.len(), &self.ws.residual);
        kernels.fill_rows(&mut self.ws.x, |t, out| {
            kernels.rms_norm(&residual[t * width..(t + 1) * width], weight, eps, out);
        });
        Ok(())
    }

    fn project_qkv(&mut self, w: &Layer) -> Result<(), Error> {
        let rows = self.rows;
        let ws = &mut *self.ws;
        let [q, k, v] = [
            (&mut ws.q, &w.query),
            (&mut ws.k, &w.key),
            (&mut ws.v, &w.value),
        ]
        .map(|(out, linear)| product(out, linear, rows));
        self.model.kernels().products(&ws.x, [q, k, v]);
        add_bias(&mut ws.q, w.query.bias.as_deref(), rows);
        add_bias(&mut ws.k, w.key.bias.as_deref(), rows);
        add_bias(&mut ws.v, w.value.bias.as_deref(), rows);
        Ok(())
    }

    fn norm_heads(&mut self, w: &Layer) -> Result<(), Error> {
        let (shard, dim) = (self.model.shard(), self.model.config().head_dim);
        let pairs = [
            (&mut self.ws.q, &w.query_norm, shard.heads.len()),
            (&mut self.ws.k, &w.key_norm, shard.kv_heads.len()),
        ];
        for (x, weight, heads) in pairs {
            let weight = weight.as_deref().expect("loaded for this family");
            let x = &mut x[..self.rows * heads * dim];
            norm_in_place(self.model, x, weight);
        }
        Ok(())
    }

    fn rotate(&mut self, layer: usize) -> Result<(), Error> {
        let c = self.model.config();
        let rope = &c.ropes[c.layers[layer].rope];
        let (angles, pairs) = (
            &self.ws.angles[c.layers[layer].rope],
            rope.frequencies.len(),
        );
        let shard = self.model.shard();
        let (q_len, k_len) = (
            shard.heads.len() * c.head_dim,
            shard.kv_heads.len() * c.head_dim,
        );
        let q = DisjointMut::new(&mut self.ws.q, q_len.max(1));
        let k = DisjointMut::new(&mut self.ws.k, k_len.max(1));
        let kernels = self.model.kernels();
        kernels.for_rows(self.rows, |t| {
            let angles = &angles[t * pairs..(t + 1) * pairs];
            // SAFETY: each row is visited once.
            let (q, k) = unsafe { (q.part(t), k.part(t)) };
            kernels.rope(q, c.head_dim, angles, rope.pairs);
            q.iter_mut().for_each(|x| *x *= c.query_scale);
            kernels.rope(k, c.head_dim, angles, rope.pairs);
        });
        Ok(())
    }

    fn attend(&mut self, layer: usize) -> Result<(), Error> {
        let (c, shard) = (self.model.config(), self.model.shard());
        self.index = layer;
        if shard.heads.is_empty() {
            return Ok(());
        }
        let mut cache = lock(self.cache);
        let held = layer - shard.layers.start;
        let kernels = self.model.kernels();
        let (k, v) = (&self.ws.k, &self.ws.v);
        kernels.write_kv(&mut cache, held, &self.sequences, k, v);
        let group = c.heads / c.kv_heads;
        let step = Attention {
            cache: &cache,
            layer: held,
            heads: shard.heads.len(),
            group,
            skipped: shard.heads.start % group,
            window: c.layers[layer].window,
            queries: &self.ws.q,
            sequences: &self.sequences,
        };
        let out = self.ws.attended.values_mut();
        kernels.attention(&step, &mut self.ws.scratch, out);
        Ok(())
    }

    fn project_attention(&mut self, w: &Layer) -> Result<(), Error> {
        let ws = &mut *self.ws;
        self.model.kernels().quantise(&mut ws.attended);
        let cut = &self.model.shard().attention;
        let (place, turn) = ((self.model, self.index), self.turn.as_mut());
        let weights = &w.attention_output;
        ws.sums.compute(place, weights, cut, &ws.attended, turn)
    }

    fn norm_delta(&mut self, w: &Layer, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_deref(),
            Half::FeedForward => w.post_ffn_norm.as_deref(),
        };
        let weight = weight.expect("loaded for this family");
        let delta = &mut self.ws.sums.delta[..self.rows * weight.len()];
        norm_in_place(self.model, delta, weight);
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        let (rows, width) = (self.rows, self.model.config().width);
        let delta = &self.ws.sums.delta;
        let residual = DisjointMut::new(&mut self.ws.residual[..rows * width], width);
        self.model.kernels().for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { residual.part(t) };
            vector::add_assign(row, &delta[t * width..(t + 1) * width]);
        });
        Ok(())
    }

    fn project_gate_up(&mut self, w: &Layer) -> Result<(), Error> {
        let (ws, rows) = (&mut *self.ws, self.rows);
        let outs = [
            product(&mut ws.gate, &w.gate, rows),
            product(&mut ws.up, &w.up, rows),
        ];
        self.model.kernels().products(&ws.x, outs);
        add_bias(&mut ws.gate, w.gate.bias.as_deref(), rows);
        add_bias(&mut ws.up, w.up.bias.as_deref(), rows);
        Ok(())
    }

    fn activate(&mut self) -> Result<(), Error> {
        let kernels = self.model.kernels();
        let ws = &mut *self.ws;
        let ffn = ws.hidden.cols();
        let (gate, up, activation) = (&ws.gate, &ws.up, self.model.config().activation);
        kernels.fill_rows(&mut ws.hidden, |t, out| {
            let part = t * ffn..(t + 1) * ffn;
            match activation {
                Activation::Silu => kernels.silu_mul(&gate[part.clone()], &up[part], out),
                Activation::GeluTanh => kernels.gelu_mul(&gate[part.clone()], &up[part], out),
            }
        });
        Ok(())
    }

    fn project_down(&mut self, w: &Layer) -> Result<(), Error> {
        let (ws, cut) = (&mut *self.ws, &self.model.shard().feed_forward);
        let (place, turn) = ((self.model, self.index), self.turn.as_mut());
        ws.sums.compute(place, &w.down, cut, &ws.hidden, turn)
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

fn add_bias(out: &mut [f32], bias: Option<&[f32]>, rows: usize) {
    if let Some(bias) = bias.filter(|bias| !bias.is_empty()) {
        out.chunks_exact_mut(bias.len())
            .take(rows)
            .for_each(|row| vector::add_assign(row, bias));
    }
}

/// RMS norm of every run of `weight.len()` values.
fn norm_in_place(model: &Model, x: &mut [f32], weight: &[f32]) {
    let (kernels, eps) = (model.kernels(), model.config().norm_eps);
    let parts = DisjointMut::new(x, weight.len());
    let runs = parts.len();
    kernels.for_rows(runs, |i| {
        // SAFETY: each run is visited once.
        let run = unsafe { parts.part(i) };
        kernels.rms_norm_in_place(run, weight, eps);
    });
}

#[cfg(test)]
mod tests;
