//! A step: a batch of rows through all layers of this rank, in buffers that are allocated once.
//!
//! [`Workspace`] has the buffers. [`Step`] implements the operations of `families::LayerStep` on
//! the CPU kernels. [`Model`] drives it; the submodules have the operations with buffers of their
//! own.

use std::ops::Range;
use std::sync::Mutex;

use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{Activations, AttentionRows, AttentionScratch, Kernels, KvCache};

use crate::families::Half;
use crate::model::Model;
use crate::weights::{Alternation, HeadStreams, LayerShard, Linear};
use crate::{Error, LayerCut, LayerShape, Rope};

mod adapter_products;
mod alternating;
mod attended;
mod attention;
mod batch;
mod blocks;
mod both_ways;
mod compressed;
mod constrained;
mod cutoff;
mod delta_net;
mod draw;
mod experts;
pub(crate) mod halves;
mod indexer;
mod inputs;
mod latent;
mod layer;
mod ngrams;
mod per_layer;
mod pooled;
mod projections;
mod rounded;
mod routing;
mod rows;
mod softcap;
mod streams;
mod sums;
mod workspace;

pub use batch::PlanLimits;
pub use batch::{Batch, BatchSequence, BatchSize, Logits, TopLogits, WindowPages};
pub use draw::{ForbiddenTokens, TokenDraw};

use adapter_products::AdapterRows;
use alternating::AlternatingRows;
use attended::AttendedRows;
use blocks::BlockBuffers;
use compressed::CompressedRows;
use constrained::ConstrainedRows;
use cutoff::GateCutoffs;
use delta_net::Mixer;
use experts::ExpertBuffers;
use halves::HalfTurn;
use indexer::IndexBuffers;
use inputs::Inputs;
use latent::LatentBuffers;
use ngrams::NgramRows;
use per_layer::PerLayerRows;
use pooled::PoolBuffers;
use projections::Projections;
use rows::{norm_row, product};
use streams::StreamRows;
use sums::Sums;

/// Buffers of [`Model::forward`], for batches up to a size; allocated once.
///
/// H, K, F and V are this rank's heads, KV heads, feed-forward columns and rows of the head. D and
/// E are the sizes of a key and of a value. If layers differ, the largest product counts.
#[derive(Debug)]
pub struct Workspace {
    size: BatchSize,
    /// `(T, S, C)` of S streams, then `(captures so far, T, C)`, then `(T, S)` late weights; sent
    /// to and received from other stages.
    residual: RegisteredMemory<f32>,
    /// `(T, captures, C)` of the last step, at the leader.
    captured: Vec<f32>,
    sums: Sums,
    /// `(T, C)`, quantised
    x: Activations,
    /// `(T, H D)`
    q: RegisteredMemory<f32>,
    /// `(T, K D)`
    k: RegisteredMemory<f32>,
    /// `(T, K E)`
    v: RegisteredMemory<f32>,
    /// `(T, H E)`: attention output, then quantised
    attended: Inputs,
    /// `(T, F)` each
    gate: RegisteredMemory<f32>,
    up: RegisteredMemory<f32>,
    /// `(T, F)`, quantised
    hidden: Inputs,
    /// For gated residual streams.
    streams: Option<StreamRows>,
    /// For constrained residual streams.
    constrained: Option<ConstrainedRows>,
    /// For attention to residuals.
    attended_streams: Option<AttendedRows>,
    /// For alternating residual streams.
    alternating: Option<AlternatingRows>,
    /// For gates that are cut.
    cutoffs: Option<GateCutoffs>,
    /// For norms over all heads.
    projections: Option<Projections>,
    /// For latent attention.
    latents: Option<LatentBuffers>,
    /// For attention to compressed keys.
    compressed: Option<CompressedRows>,
    /// For lightning indexers.
    index: Option<IndexBuffers>,
    /// For indexers of pools.
    pools: Option<PoolBuffers>,
    /// For indexers of blocks.
    blocks: Option<BlockBuffers>,
    /// For gated heads and gated delta nets.
    mixer: Option<Mixer>,
    /// For layers with experts.
    experts: Option<ExpertBuffers>,
    /// `(T, C)`: output of the dense feed-forward in layers with parallel experts; otherwise empty.
    aside: RegisteredMemory<f32>,
    per_layer: Option<PerLayerRows>,
    /// For memories of n-grams.
    ngrams: Option<NgramRows>,
    /// [`Config::ropes`](crate::Config::ropes) for the context of `size`.
    ropes: Vec<Rope>,
    /// `(rope, T, pairs)`
    angles: Vec<Vec<(f32, f32)>>,
    /// `(R, C)`, quantised: the rows that need logits
    head_x: Activations,
    /// `(R, V)`; empty when this rank has all of the vocabulary.
    own_logits: RegisteredMemory<f32>,
    /// `(R, vocabulary)`; at the leader.
    logits: Vec<f32>,
    /// Logits of one rank; at the leader.
    received: RegisteredMemory<f32>,
    wanted: Vec<usize>,
    /// Whether rows are normed only, without logits.
    is_headless: bool,
    /// Whether the caller writes the residual stream before each step.
    is_given: bool,
    /// The step's plan, to send or received.
    words: Vec<u32>,
    /// Empty between steps: memory for the sequences of a step.
    sequences: Vec<AttentionRows<'static>>,
    scratch: AttentionScratch,
    /// For the second half of a step, with overlap.
    pub(crate) second: Option<Box<Self>>,
}

/// Embedding of a token, `(C,)`, with the model's scale.
pub(crate) fn embed_token(model: &Model, token: u32, out: &mut [f32]) {
    model.embedding().row(token, out);
    let scale = model.config().embedding_scale;
    if scale != 1.0 {
        out.iter_mut().for_each(|x| *x *= scale);
    }
}

/// The sequences of a batch, repeated for each of `layer_kinds` kinds of layers, in the memory of
/// `empty`.
fn attention_rows<'b>(
    batch: &Batch<'b>,
    kinds: usize,
    empty: &mut Vec<AttentionRows<'static>>,
) -> Vec<AttentionRows<'b>> {
    let mut sequences = without_rows(std::mem::take(empty));
    let of = |kind| batch.sequences.iter().map(move |s| s.rows_of(kind));
    sequences.extend((0..kinds).flat_map(of));
    sequences
}

/// Clears a vector and reuses its memory for elements of another lifetime: collecting in place does
/// not allocate.
fn without_rows<'b>(mut rows: Vec<AttentionRows<'_>>) -> Vec<AttentionRows<'b>> {
    rows.clear();
    rows.into_iter()
        .map(|_| -> AttentionRows<'b> { unreachable!("it was emptied") })
        .collect()
}

/// A running step: the state that a family's layer code operates on.
#[derive(Debug)]
pub(crate) struct ForwardStep<'m, 'b> {
    model: &'m Model,
    batch: &'b Batch<'b>,
    ws: &'b mut Workspace,
    /// The halves lock it in turn.
    cache: &'b Mutex<&'m mut KvCache>,
    /// The sequences of the batch, for each kind of layers.
    sequences: Vec<AttentionRows<'b>>,
    rows: usize,
    adapted: Vec<AdapterRows>,
    turn: Option<HalfTurn<'b>>,
    /// Current layer of the model.
    index: usize,
}

impl<'m, 'b> ForwardStep<'m, 'b> {
    /// Starts a step: embeds the tokens or receives the residual of the previous stage, and
    /// computes the rotation angles.
    pub(crate) fn new(
        model: &'m Model,
        batch: &'b Batch<'b>,
        ws: &'b mut Workspace,
        cache: &'b Mutex<&'m mut KvCache>,
        turn: Option<HalfTurn<'b>>,
    ) -> Result<Self, Error> {
        let (rows, size) = (batch.rows(), ws.size);
        let adapters = model.adapters().ids().len();
        assert!(
            batch.adapters() <= adapters
                && rows <= size.rows
                && batch.sequences.len() <= size.sequences
                && batch.logit_rows() <= size.logit_rows,
            "{rows} rows of {} sequences, {} rows of logits, in a workspace for {size:?} with \
             {adapters} adapters",
            batch.sequences.len(),
            batch.logit_rows()
        );
        let inputs = ws.attended.buffers.iter_mut().chain(&mut ws.hidden.buffers);
        inputs.chain([&mut ws.x]).for_each(|x| x.resize(rows));
        let mut step = Self {
            model,
            batch,
            sequences: attention_rows(batch, model.kinds().len(), &mut ws.sequences),
            ws,
            cache,
            rows,
            adapted: adapter_products::runs(batch),
            turn,
            index: 0,
        };
        match model.links() {
            Some(links) if !model.shard().embeds() => {
                let first = model.shard().layers.start;
                let captures = captures_before(model, first);
                let n = rows * model.config().sent_width(captures);
                let ws = &mut *step.ws;
                links.receive_residual(model.shard(), &mut ws.residual[..n])?;
                if let Some(streams) = &mut ws.constrained {
                    let late = streams.late(rows);
                    late.copy_from_slice(&ws.residual[n - late.len()..n]);
                }
            }
            _ => {
                if !step.ws.is_given {
                    step.embed();
                }
                if let Some(streams) = &mut step.ws.constrained {
                    streams.begin();
                }
            }
        }
        step.prepare_per_layer();
        step.prepare_angles();
        Ok(step)
    }

    /// Sets the current layer to `index` of the model.
    pub(crate) const fn enter(&mut self, index: usize) {
        self.index = index;
    }

    /// Copies the residual stream before the current layer, if the model captures it.
    pub(crate) fn capture(&mut self) {
        let captures = self.model.captures();
        if let Some(nth) = captures.iter().position(|layer| *layer == self.index) {
            let n = self.rows * self.model.config().width;
            self.ws.residual.copy_within(..n, (1 + nth) * n);
        }
    }

    /// Copies the rows after the output norm behind the other captured ones.
    fn capture_normed(&mut self, norm: &[f32]) {
        let (model, c) = (self.model, norm.len());
        let (n, nth) = (self.rows * c, model.captures().len() - 1);
        let (residual, captured) = self.ws.residual.split_at_mut(n);
        let out = DisjointMut::new(&mut captured[nth * n..(nth + 1) * n], c);
        model.kernels().for_rows(self.rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { out.part(t) };
            norm_row(model, &residual[t * c..(t + 1) * c], norm, row);
        });
    }

    /// Interleaves the captured rows for [`Workspace::captured`].
    fn take_captures(&mut self, norm: &[f32]) {
        if self.model.captures().last() == Some(&self.model.config().layers.len()) {
            self.capture_normed(norm);
        }
        let (n, width) = (self.model.captures().len(), self.model.config().width);
        let (rows, ws) = (self.rows, &mut *self.ws);
        ws.captured.clear();
        for (t, nth) in (0..rows).flat_map(|t| (0..n).map(move |nth| (t, nth))) {
            let at = ((1 + nth) * rows + t) * width;
            ws.captured.extend_from_slice(&ws.residual[at..at + width]);
        }
    }

    /// Shape of the current layer, and this rank's part of it.
    fn layer(&self) -> (&'m LayerShape, &'m LayerCut) {
        let model = self.model;
        (
            &model.config().layers[self.index],
            model.shard().layer(self.index),
        )
    }

    /// Index of a layer among those of this rank.
    fn held(&self, layer: usize) -> usize {
        layer - self.model.shard().layers.start
    }

    /// The batch's sequences for the kind of the current layer.
    fn sequences(&self) -> Range<usize> {
        let n = self.batch.sequences.len();
        let kind = self.model.kinds().of(self.index);
        kind * n..(kind + 1) * n
    }

    /// residual (T, S, C) -> x (T, C), the input of a half, by attention to all streams
    fn attend_streams(&mut self, w: &LayerShard, streams: AttendedRows, half: Half) {
        let which = usize::from(half != Half::Attention);
        let scores = w.streams.as_ref().expect("loaded for this family").scores();
        let norm = [&w.attention_norm, &w.ffn_norm][which].as_deref();
        let norm = norm.expect("loaded for this family");
        let (config, kernels) = (self.model.config(), self.model.kernels());
        let (all, ws) = (config.residual_width(), &mut *self.ws);
        let residual = &ws.residual;
        let row = |t: usize| &residual[t * all..(t + 1) * all];
        let begun = streams.begun(self.index, half);
        let weights = (&*scores[which], norm);
        streams.mix((kernels, config.norm_eps), weights, begun, row, &mut ws.x);
        if half == Half::Attention {
            let residual = &mut ws.residual[..self.rows * all];
            streams.begin(kernels, self.index, residual);
        }
    }

    /// Runs `compute` on the alternating streams, the residual and x.
    fn alternate(
        &mut self,
        w: &LayerShard,
        compute: impl FnOnce(
            &mut AlternatingRows,
            (&Kernels, f32),
            &Alternation,
            &mut [f32],
            &mut Activations,
        ),
    ) {
        let own = w.streams.as_ref().and_then(|streams| streams.alternation());
        let (model, ws) = (self.model, &mut *self.ws);
        let streams = ws.alternating.as_mut().expect("made for these streams");
        let place = (model.kernels(), model.config().norm_eps);
        let residual = &mut ws.residual[..self.rows * model.config().residual_width()];
        let own = own.expect("loaded for this family");
        compute(streams, place, own, residual, &mut ws.x);
    }

    /// tokens -> residual (T, S, C)
    fn embed(&mut self) {
        let (width, all) = (
            self.model.config().width,
            self.model.config().residual_width(),
        );
        let tokens = self.batch.sequences.iter().flat_map(|s| s.tokens);
        for (out, &token) in self.ws.residual.chunks_exact_mut(all).zip(tokens) {
            embed_token(self.model, token, &mut out[..width]);
            (width..all)
                .step_by(width)
                .for_each(|at| out.copy_within(..width, at));
        }
        if let Some(alternating) = &mut self.ws.alternating {
            let (ends, kernels) = (self.model.first_streams(), self.model.kernels());
            let residual = &mut self.ws.residual[..self.rows * all];
            alternating.expand(kernels, ends, residual, &mut self.ws.x);
        }
    }

    /// tokens -> inputs of the per-layer embeddings
    fn prepare_per_layer(&mut self) {
        let model = self.model;
        let (Some(weights), Some(buffers)) = (model.per_layer(), &mut self.ws.per_layer) else {
            return;
        };
        let tokens = self.batch.sequences.iter().flat_map(|s| s.tokens);
        buffers.tokens.clear();
        buffers.tokens.extend(tokens);
        let (x, tokens) = (&mut self.ws.x, &buffers.tokens);
        let embed = |t: usize, out: &mut [f32]| embed_token(model, tokens[t], out);
        model.kernels().fill_rows(x, embed);
        buffers.prepare(model, weights, x);
    }

    fn prepare_angles(&mut self) {
        let ws = &mut *self.ws;
        for (rope, out) in ws.ropes.iter().zip(&mut ws.angles) {
            out.clear();
            for s in self.batch.sequences {
                rope.angles(s.position..s.position + s.tokens.len(), out);
            }
        }
    }

    /// Sends the residual stream (T, C) to the next stage, or computes the requested logits (R, V)
    /// at the leader; returns R there.
    pub(crate) fn finish(mut self) -> Result<usize, Error> {
        self.ws.sequences = without_rows(std::mem::take(&mut self.sequences));
        let (model, shard) = (self.model, self.model.shard());
        match model.head() {
            Some((norm, output)) => {
                self.take_captures(norm);
                self.logits(norm, output)
            }
            None => {
                let captures = captures_before(model, shard.layers.end);
                let n = self.rows * model.config().sent_width(captures);
                if let Some(streams) = &mut self.ws.constrained {
                    let late = streams.late(self.rows);
                    self.ws.residual[n - late.len()..n].copy_from_slice(late);
                }
                let links = model.links().expect("an earlier stage has links");
                links.send_residual(shard, &self.ws.residual[..n])?;
                Ok(0)
            }
        }
    }

    /// Logits of the requested rows, at the leader.
    fn logits(self, norm: &[f32], output: &Linear) -> Result<usize, Error> {
        let (model, ws) = (self.model, &mut *self.ws);
        let rows = Self::raw_logits(model, self.batch, ws, norm, output)?;
        if let Some(cap) = model.config().softcap {
            let logits = &mut ws.logits[..rows * model.config().vocab];
            softcap::softcap(model.kernels(), cap, logits);
        }
        Ok(rows)
    }

    /// As [`logits`](Self::logits), before the soft cap.
    fn raw_logits(
        model: &Model,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        norm: &[f32],
        output: &Linear,
    ) -> Result<usize, Error> {
        batch.wanted(&mut ws.wanted);
        let rows = ws.wanted.len();
        if rows == 0 {
            return Ok(0);
        }
        ws.head_x.resize(rows);
        let kernels = model.kernels();
        let (width, wanted) = (model.config().residual_width(), &ws.wanted);
        let residual = &ws.residual;
        let row = |i: usize| &residual[wanted[i] * width..][..width];
        match model.head_streams() {
            Some(HeadStreams::Gated(w)) => {
                let streams = ws.streams.as_mut().expect("made for several streams");
                streams.mix((kernels, model.config().norm_eps), w, row, &mut ws.head_x);
            }
            Some(HeadStreams::Constrained(mix)) => {
                let streams = ws.constrained.as_mut().expect("made for these streams");
                let place = (kernels, model.config().norm_eps);
                let mix = (mix.as_deref(), norm);
                streams.mix_wanted(place, mix, (row, wanted), &mut ws.head_x);
            }
            Some(HeadStreams::Attended(scores)) => {
                let streams = ws.attended_streams.expect("made for these streams");
                let place = (kernels, model.config().norm_eps);
                streams.mix(place, (scores, norm), usize::MAX, row, &mut ws.head_x);
            }
            Some(HeadStreams::Alternating(ends)) => {
                ws.x.resize(rows);
                let streams = ws.alternating.as_mut().expect("made for these streams");
                let all = streams.collapse(kernels, ends, row, &mut ws.x);
                let row = |i: usize| &all[i * norm.len()..][..norm.len()];
                kernels.fill_rows(&mut ws.head_x, |i, out| norm_row(model, row(i), norm, out));
            }
            None => kernels.fill_rows(&mut ws.head_x, |i, out| norm_row(model, row(i), norm, out)),
        }
        if ws.is_headless {
            return Ok(rows);
        }
        let (shard, vocab) = (model.shard(), model.config().vocab);
        let Some(links) = model.links().filter(|_| shard.vocab().len() < vocab) else {
            let out = product(&mut ws.logits, output, rows);
            kernels.products(&ws.head_x, [out]);
            return Ok(rows);
        };
        let out = product(&mut ws.own_logits, output, rows);
        kernels.products(&ws.head_x, [out]);
        let extents = batch.extents();
        let mine = &ws.own_logits[..rows * output.matrix.rows()];
        let all = if shard.leads() {
            &mut ws.logits[..rows * vocab]
        } else {
            &mut []
        };
        links.gather_logits(shard, &extents, mine, all, &mut ws.received)?;
        Ok(if shard.leads() { rows } else { 0 })
    }

    /// The residual stream, `(T, C)`.
    #[cfg(test)]
    pub(crate) fn residual(&self) -> &[f32] {
        &self.ws.residual[..self.rows * self.model.config().residual_width()]
    }
}

/// Captures of the layers before `layer`.
fn captures_before(model: &Model, layer: usize) -> usize {
    model
        .captures()
        .partition_point(|captured| *captured < layer)
}

#[cfg(test)]
mod tests;
