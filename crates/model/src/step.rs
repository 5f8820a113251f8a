//! A step: a batch of rows through all layers of this rank, in buffers that are allocated once.
//!
//! [`Workspace`] has the buffers. [`Step`] implements the operations of `families::LayerStep` on
//! the CPU kernels. [`Model`] drives it; the submodules have the operations with buffers of their
//! own.

use std::ops::Range;
use std::sync::Mutex;

use paceline_base::lock;
use paceline_comm::RegisteredMemory;
use paceline_tensor::pool::DisjointMut;
use paceline_tensor::{
    Activations, AttentionRows, AttentionScratch, AttentionStep, DeltaStep, Kernels, KvCache,
    PackedMatrix, Product, Recurrence, Recurrent, ShortConvStep, StateRule, vector,
};

use crate::families::{Half, LayerStep};
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::{self, Alternation, HeadStreams, LayerShard, Linear, Summed};
use crate::{Error, LayerCache, LayerCut, LayerRole, LayerShape, Links, Rope};

mod adapter_products;
mod alternating;
mod batch;
mod blocks;
mod both_ways;
mod cutoff;
mod delta_net;
mod draw;
mod experts;
pub(crate) mod halves;
mod indexer;
mod inputs;
mod latent;
mod per_layer;
mod pooled;
mod projections;
mod softcap;
mod streams;
mod sums;

pub use batch::PlanLimits;
pub use batch::{Batch, BatchSequence, BatchSize, Logits, TopLogits, WindowPages};
pub use draw::{ForbiddenTokens, TokenDraw};

use adapter_products::{AdapterProducts, AdapterRows};
use alternating::AlternatingRows;
use blocks::BlockBuffers;
use cutoff::GateCutoffs;
use delta_net::Mixer;
use experts::ExpertBuffers;
use halves::HalfTurn;
use indexer::IndexBuffers;
use inputs::Inputs;
use latent::{LatentBuffers, LatentInputs};
use per_layer::PerLayerRows;
use pooled::{PoolBuffers, PoolInputs};
use projections::{Projected, Projections};
use streams::StreamRows;
use sums::Sums;

/// Buffers of [`Model::forward`], for batches up to a size; allocated once.
///
/// H, K, F and V are this rank's heads, KV heads, feed-forward columns and rows of the head. D and
/// E are the sizes of a key and of a value. If layers differ, the largest product counts.
#[derive(Debug)]
pub struct Workspace {
    size: BatchSize,
    /// `(T, S, C)` of S streams, then `(captures so far, T, C)`; sent to and received from other
    /// stages.
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
    /// For alternating residual streams.
    alternating: Option<AlternatingRows>,
    /// For gates that are cut.
    cutoffs: Option<GateCutoffs>,
    /// For norms over all heads.
    projections: Option<Projections>,
    /// For latent attention.
    latents: Option<LatentBuffers>,
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
    /// For per-layer embeddings.
    per_layer: Option<PerLayerRows>,
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

    /// As [`new`](Self::new), for steps that give [normed rows](Self::normed) instead of logits.
    /// The model must not be split.
    pub(crate) fn headless(model: &Model, size: BatchSize) -> Self {
        let logit_rows = 0;
        let head = model.head().map(|(_, output)| &output.matrix);
        Self {
            size,
            is_headless: true,
            head_x: activations(model, size.logit_rows, model.config().width, head),
            wanted: Vec::with_capacity(size.logit_rows),
            ..Self::whole(model, BatchSize { logit_rows, ..size })
        }
    }

    /// As [`new`](Self::new), for steps whose residual stream the caller
    /// [gives](Self::residual_mut) in place of the tokens' embeddings.
    pub(crate) fn given(model: &Model, size: BatchSize) -> Self {
        Self {
            is_given: true,
            ..Self::new(model, size)
        }
    }

    /// The residual stream, `(T, C)`: before a step that is given it, and after each step.
    pub(crate) fn residual_mut(&mut self) -> &mut [f32] {
        &mut self.residual
    }

    /// Requested row `i` of the last step after the output norm, `(C,)`.
    pub(crate) fn normed(&self, i: usize) -> &[f32] {
        self.head_x.row(i)
    }

    #[expect(clippy::too_many_lines, reason = "one line for each buffer")]
    fn whole(model: &Model, size: BatchSize) -> Self {
        let (c, shard) = (model.config(), model.shard());
        let of_layers = |len: fn(&LayerShape, &LayerCut) -> usize| {
            let shapes = c.layers[shard.layers.clone()].iter();
            let lens = shapes
                .zip(shard.each_layer())
                .map(|(shape, cut)| len(shape, cut));
            lens.max().unwrap_or(0)
        };
        let vocab = shard.vocab().len();
        let layers = model.layers();
        let of = |sum: fn(&LayerShard) -> Option<&Summed>, cut: fn(&LayerCut) -> &LeafCut| {
            let sums = layers.iter().map(sum);
            Inputs::new(model, size.rows, sums.zip(shard.each_layer().map(cut)))
        };
        let dense_ffn = |shape: &LayerShape, cut: &LayerCut| {
            let columns = cut.dense().columns().len();
            if shape.has_dense() { columns } else { 0 }
        };
        let head = model.head().map(|(_, output)| &output.matrix);
        let inputs = model.per_layer().map(|inputs| &inputs.projection);
        let ends = model.head_streams().map_or(&[][..], HeadStreams::of_width);
        let inputs = inputs.into_iter().chain(ends).chain(model.first_streams());
        let has_beside = c.layers.iter().any(|layer| layer.dense_beside);
        // Products store whole cache lines, so their outputs begin at cache lines.
        let rows = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let logits = |n: usize| vec![0.0f32; size.logit_rows * n];
        Self {
            size,
            residual: exchanged(
                model,
                size.rows * c.residual_width() * (1 + model.captures().len()),
            ),
            captured: Vec::new(),
            sums: Sums::new(model, size.rows),
            x: activations(
                model,
                size.rows,
                c.width,
                layers.iter().flat_map(LayerShard::of_normed).chain(inputs),
            ),
            q: rows(of_layers(|shape, cut| match shape.cache {
                LayerCache::Delta(_) => cut.kv_heads.len() * shape.head_dim,
                _ => cut.heads.len() * shape.head_dim,
            })),
            k: rows(of_layers(|shape, cut| cut.kv_heads.len() * shape.head_dim)),
            v: rows(of_layers(|shape, cut| match (shape.cache, shape.latent) {
                (LayerCache::Delta(_), _) => cut.heads.len() * shape.value_dim,
                (_, Some(_)) => 0, // part of the keys
                _ => cut.kv_heads.len() * shape.value_dim,
            })),
            attended: of(|layer| Some(&layer.attention_output), |cut| &cut.attention),
            gate: rows(of_layers(dense_ffn)),
            up: rows(of_layers(dense_ffn)),
            hidden: of(|layer| layer.feed_forward.down(), LayerCut::dense),
            streams: StreamRows::new(model, size.rows),
            alternating: AlternatingRows::new(model, size.rows),
            cutoffs: GateCutoffs::new(model, size.rows),
            projections: Projections::new(model, size.rows),
            latents: LatentBuffers::new(model, size.rows),
            index: IndexBuffers::new(model, size),
            pools: PoolBuffers::new(model, size),
            blocks: BlockBuffers::new(model, size),
            mixer: Mixer::new(model, size.rows),
            experts: c
                .experts()
                .map(|experts| ExpertBuffers::new(model, experts, size.rows)),
            aside: rows(if has_beside { c.width } else { 0 }),
            per_layer: PerLayerRows::new(model, size.rows),
            ropes: c
                .ropes
                .iter()
                .map(|rope| rope.for_context(size.context))
                .collect(),
            angles: angle_buffers(model, size.rows),
            head_x: activations(model, size.logit_rows, c.width, head),
            own_logits: exchanged(
                model,
                size.logit_rows * if vocab == c.vocab { 0 } else { vocab },
            ),
            logits: logits(if shard.leads() { c.vocab } else { 0 }),
            received: exchanged(model, Links::logits_room(shard, size.logit_rows)),
            wanted: Vec::with_capacity(size.logit_rows),
            is_headless: false,
            is_given: false,
            words: Vec::new(),
            sequences: Vec::with_capacity(size.sequences * model.kinds().len()),
            scratch: model.kernels().attention_scratch(
                size.sequences,
                of_layers(|_, cut| cut.heads.len()),
                (
                    of_layers(|shape, _| shape.head_dim),
                    of_layers(|shape, _| shape.value_dim),
                ),
                size.context,
            ),
            second: None,
        }
    }

    pub const fn size(&self) -> BatchSize {
        self.size
    }

    pub(crate) const fn words_mut(&mut self) -> &mut Vec<u32> {
        &mut self.words
    }

    /// Copies the first `second` rows of logits of `of` behind the `first` rows here.
    pub(crate) fn take_logits(&mut self, first: usize, of: &Self, second: usize) {
        let vocab = of.logits.len() / of.size.logit_rows.max(1);
        let to = &mut self.logits[first * vocab..(first + second) * vocab];
        to.copy_from_slice(&of.logits[..second * vocab]);
    }

    /// Appends the captured rows of `of`, the second half of a step.
    pub(crate) fn take_captured(&mut self, of: &Self) {
        self.captured.extend_from_slice(&of.captured);
    }

    /// The captured rows of the last step, `(T, captures, C)`, in the order of the batch.
    pub(crate) fn captured(&self) -> &[f32] {
        &self.captured
    }

    /// Row `i` of the logits that the last step gave, `(vocabulary,)`, in the order of the batch.
    pub fn logits_mut(&mut self, i: usize, vocab: usize) -> &mut [f32] {
        &mut self.logits[i * vocab..(i + 1) * vocab]
    }
}

/// Input buffer for products with `matrices`, in the format these read.
fn activations<'a>(
    model: &Model,
    max_rows: usize,
    cols: usize,
    matrices: impl IntoIterator<Item = &'a PackedMatrix>,
) -> Activations {
    let kernels = model.kernels();
    kernels.activations(max_rows, cols, model.precision(), matrices)
}

/// Memory for `len` values that ranks exchange. It is registered with their groups, so that RDMA
/// devices transfer it without a copy.
fn exchanged(model: &Model, len: usize) -> RegisteredMemory<f32> {
    RegisteredMemory::new(model.links().map(|links| &*links.world), len)
}

fn angle_buffers(model: &Model, max_rows: usize) -> Vec<Vec<(f32, f32)>> {
    let room = |rope: &Rope| Vec::with_capacity(max_rows * rope.frequencies.len());
    model.config().ropes.iter().map(room).collect()
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
    /// Rows with adapters.
    adapted: Vec<AdapterRows>,
    /// Turn of this half, if the step has halves.
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
                let n = rows * model.config().residual_width() * (1 + captures);
                links.receive_residual(model.shard(), &mut step.ws.residual[..n])?;
            }
            _ if step.ws.is_given => {}
            _ => step.embed(),
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

    /// q, k, v -> attended (T, H E), by recurrent states
    fn recur(&mut self, recurrence: &'static dyn Recurrence) {
        let (shape, cut) = self.layer();
        let (held, sequences) = (self.held(self.index), self.sequences());
        let (group, ws) = (shape.heads / shape.kv_heads, &mut *self.ws);
        let step = Recurrent {
            recurrence,
            layer: held,
            heads: cut.heads.len(),
            group,
            skipped: cut.heads.start % group,
            queries: &ws.q,
            keys: &ws.k,
            values: &ws.v,
            sequences: &self.sequences[sequences],
        };
        let out = ws.attended.of(held).values_mut();
        let mut cache = lock(self.cache);
        self.model.kernels().recurrent(&step, &mut cache, out);
    }

    /// x (T, C) -> index queries and rows, to the cache, and the positions that rows attend to
    fn select_pools(&mut self, w: &weights::PoolIndexer, layer: usize) {
        let (shape, held) = (self.layer().0, self.held(layer));
        let sequences = &self.sequences[self.sequences()];
        let ws = &mut *self.ws;
        let place = PoolInputs {
            kernels: self.model.kernels(),
            eps: self.model.config().norm_eps,
            rope: &ws.ropes[shape.rope],
            angles: &ws.angles[shape.rope],
            sequences,
        };
        match &mut ws.blocks {
            Some(blocks) => blocks.project(&place, w, &ws.x, (self.cache, held)),
            None => {
                let pools = ws.pools.as_mut().expect("made for this family");
                pools.select(&place, w, &ws.x, (self.cache, held));
            }
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
                let n = self.rows * model.config().residual_width() * (1 + captures);
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

impl<'b> LayerStep for ForwardStep<'_, 'b> {
    type Layer = LayerShard;

    fn norm(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.attention_norm.as_deref(),
            Half::FeedForward => w.ffn_norm.as_deref(),
            Half::ParallelExperts => Some(&*beside(w).before),
        };
        let weight = weight.expect("loaded for this family");
        let model = self.model;
        let (width, ws) = (weight.len(), &mut *self.ws);
        let alternating = ws.alternating.as_ref();
        let residual = alternating.map_or(&ws.residual, |streams| &streams.active);
        model.kernels().fill_rows(&mut ws.x, |t, out| {
            norm_row(model, &residual[t * width..(t + 1) * width], weight, out);
        });
        Ok(())
    }

    fn mix_streams(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let mixes = w.streams.as_ref().expect("loaded for this family").mixes();
        let mix = &mixes[usize::from(half != Half::Attention)];
        let (config, ws) = (self.model.config(), &mut *self.ws);
        let (width, residual) = (config.residual_width(), &ws.residual);
        let row = |t: usize| &residual[t * width..(t + 1) * width];
        let streams = ws.streams.as_mut().expect("made for several streams");
        let place = (self.model.kernels(), config.norm_eps);
        streams.mix(place, mix, row, &mut ws.x);
        Ok(())
    }

    fn add_to_streams(&mut self) -> Result<(), Error> {
        let (config, ws) = (self.model.config(), &mut *self.ws);
        let delta = &ws.sums.delta[..self.rows * config.width];
        let residual = &mut ws.residual[..self.rows * config.residual_width()];
        let streams = ws.streams.as_ref().expect("made for several streams");
        streams.add(self.model.kernels(), delta, residual);
        Ok(())
    }

    fn predict_streams(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, residual, x| {
            streams.predict(place, w, residual, x);
        });
        Ok(())
    }

    fn project_laurel(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, _, x| {
            streams.project_laurel(place, w, x)
        });
        Ok(())
    }

    fn add_laurel(&mut self) -> Result<(), Error> {
        let n = self.rows * self.model.config().width;
        let streams = self.ws.alternating.as_mut();
        streams.expect("made for these streams").add_laurel(n);
        Ok(())
    }

    fn correct_streams(&mut self, w: &LayerShard) -> Result<(), Error> {
        self.alternate(w, |streams, place, w, residual, x| {
            streams.correct(place, w, residual, x);
        });
        Ok(())
    }

    fn take_residual(&mut self) -> Result<(), Error> {
        let (width, residual) = (self.model.config().width, &self.ws.residual);
        self.model.kernels().fill_rows(&mut self.ws.x, |t, out| {
            out.copy_from_slice(&residual[t * width..(t + 1) * width]);
        });
        Ok(())
    }

    fn project_qkv(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (rows, shape) = (self.rows, self.layer().0);
        let ws = &mut *self.ws;
        let gates = ws.mixer.as_mut().filter(|_| shape.gated);
        let linears = [Some(&w.query), w.key.as_ref(), w.value.as_ref()];
        let q = match gates {
            Some(mixer) => &mut mixer.wide,
            None => &mut ws.q,
        };
        let outs = [&mut *q, &mut ws.k, &mut ws.v].into_iter().zip(linears);
        let products = outs.filter_map(|(out, linear)| Some(product(out, linear?, rows)));
        self.model.kernels().products(&ws.x, products);
        let parts = [LayerRole::Query, LayerRole::Key, LayerRole::Value];
        let outs = [q, &mut ws.k, &mut ws.v].into_iter().zip(linears);
        for ((out, linear), part) in outs.zip(parts) {
            add_bias(out, linear.and_then(|linear| linear.bias.as_deref()), rows);
            if let Some(beside) = AdapterProducts::of(self.model, (self.index, part), &self.adapted)
            {
                beside.add(&ws.x, out);
            }
        }
        if let (Some(key), None) = (&w.key, &w.value) {
            let n = rows * key.matrix.rows();
            ws.v[..n].copy_from_slice(&ws.k[..n]); // keys as values
        }
        if let Some(mixer) = ws.mixer.as_ref().filter(|_| shape.gated) {
            mixer.take_queries(shape.head_dim, rows, &w.query, &mut ws.q);
        }
        Ok(())
    }

    fn clamp_qkv(&mut self) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let limit = self.model.config().clamp_qkv;
        let Some(limit) = limit.filter(|_| !cut.heads.is_empty()) else {
            return Ok(());
        };
        let (rows, kernels) = (self.rows, self.model.kernels());
        let ws = &mut *self.ws;
        for (values, n) in [
            (&mut ws.q, cut.heads.len() * shape.head_dim),
            (&mut ws.k, cut.kv_heads.len() * shape.head_dim),
            (&mut ws.v, cut.kv_heads.len() * shape.value_dim),
        ] {
            let values = DisjointMut::new(&mut values[..rows * n], n);
            kernels.for_rows(rows, |t| {
                // SAFETY: each row is visited once.
                let row = unsafe { values.part(t) };
                row.iter_mut().for_each(|x| *x = x.clamp(-limit, limit));
            });
        }
        Ok(())
    }

    fn norm_heads(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let dim = shape.head_dim;
        let pairs = [
            (&mut self.ws.q, &w.query_norm, cut.heads.len()),
            (&mut self.ws.k, &w.key_norm, cut.kv_heads.len()),
        ];
        for (x, weight, heads) in pairs.into_iter().take(1 + usize::from(shape.has_kv())) {
            let weight = weight.as_deref().expect("loaded for this family");
            let x = &mut x[..self.rows * heads * dim];
            norm_in_place(self.model, x, weight);
        }
        Ok(())
    }

    fn norm_values(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if let Some(weight) = w.value_norm.as_deref().filter(|_| shape.has_kv()) {
            let n = self.rows * cut.kv_heads.len() * shape.value_dim;
            norm_in_place(self.model, &mut self.ws.v[..n], weight);
        }
        Ok(())
    }

    fn norms_heads(&self, w: &LayerShard) -> bool {
        w.query_norm.is_some()
    }

    fn norm_projections(&mut self, w: &LayerShard) -> Result<(), Error> {
        let ws = &mut *self.ws;
        let projections = ws.projections.as_mut().expect("made for this family");
        let parts = [(&mut ws.q, &w.query_norm), (&mut ws.k, &w.key_norm)];
        let parts = parts.map(|(values, norm)| Projected {
            values,
            weight: norm.as_deref().expect("loaded for this family"),
        });
        let place = (self.model, self.index);
        projections.norm(place, self.rows, parts, self.turn.as_mut())
    }

    fn rotate(&mut self, _: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let rope = &self.model.config().ropes[shape.rope];
        let (angles, pairs) = (&self.ws.angles[shape.rope], rope.frequencies.len());
        let (dim, has_kv) = (shape.head_dim, shape.has_kv());
        let (q_len, k_len) = (cut.heads.len() * dim, cut.kv_heads.len() * dim);
        let q = DisjointMut::new(&mut self.ws.q, q_len.max(1));
        let k = DisjointMut::new(&mut self.ws.k, k_len.max(1));
        let (kernels, growth) = (self.model.kernels(), self.model.config().query_growth);
        let sequences = &self.sequences[..self.batch.sequences.len()];
        kernels.for_rows(self.rows, |t| {
            let angles = &angles[t * pairs..(t + 1) * pairs];
            // SAFETY: each row is visited once.
            let q = unsafe { q.part(t) };
            kernels.rope(q, dim, angles, rope.pairs);
            let scale = growth.map_or(shape.query_scale, |growth| {
                shape.query_scale * growth.at(position_of(sequences, t))
            });
            q.iter_mut().for_each(|x| *x *= scale);
            if has_kv {
                // SAFETY: as above.
                kernels.rope(unsafe { k.part(t) }, dim, angles, rope.pairs);
            }
        });
        Ok(())
    }

    fn attend(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(layer);
        let keeper = match shape.cache {
            LayerCache::State(recurrence) => {
                self.recur(recurrence);
                return Ok(());
            }
            LayerCache::Of(of) => self.held(of),
            LayerCache::Rows | LayerCache::Delta(_) | LayerCache::Conv(_) => held,
        };
        let mut cache = lock(self.cache);
        let kernels = self.model.kernels();
        let kept = cache.rows(keeper);
        let heads = [cut.heads.len(), cut.kv_heads.len()];
        if let Some(part) = kept.rotated() {
            let of = [heads[0] * kept.head_dim, heads[1] * kept.head_dim];
            let rows = self.rows;
            let rotate = |x: &mut [f32], len: usize| {
                kernels.rotate_heads(&mut x[..rows * len], len, part);
            };
            rotate(&mut self.ws.q, of[0]);
            if keeper == held {
                rotate(&mut self.ws.k, of[1]);
                rotate(&mut self.ws.v, heads[1] * kept.value_dim);
            }
        }
        let sequences = &self.sequences[self.sequences()];
        let (k, v) = (&self.ws.k, &self.ws.v);
        if keeper == held {
            kernels.write_kv(&mut cache, held, sequences, k, v);
        }
        let group = shape.heads / shape.kv_heads;
        let step = AttentionStep {
            cache: &cache,
            layer: keeper,
            heads: cut.heads.len(),
            group,
            skipped: cut.heads.start % group,
            window: shape.window,
            sinks: w.sinks.as_deref(),
            cap: self.model.config().attention_cap,
            queries: &self.ws.q,
            sequences,
        };
        let out = self.ws.attended.of(held).values_mut();
        let scratch = &mut self.ws.scratch;
        if self.model.config().bidirectional {
            let query_len = cut.heads.len() * shape.head_dim;
            let out = &mut out[..self.rows * cut.heads.len() * shape.value_dim];
            both_ways::attention(kernels, &step, query_len, scratch, out);
        } else if let Some(blocks) = self.ws.blocks.as_mut().filter(|_| shape.pooled.is_some()) {
            blocks.attend(kernels, &step, cut.kv_heads.clone(), scratch, out);
        } else {
            let pools = self.ws.pools.as_mut().filter(|_| shape.pooled.is_some());
            let selected = pools.and_then(|pools| pools.selected.as_mut());
            match selected.filter(|own| own.is_sparse(sequences)) {
                Some(own) => own.attend(kernels, &step, scratch, out),
                None => kernels.attention(&step, scratch, out),
            }
        }
        if let Some(part) = kept.rotated() {
            let len = heads[0] * kept.value_dim;
            kernels.rotate_heads(&mut out[..self.rows * len], len, part);
        }
        Ok(())
    }

    fn project_latent(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let config = self.model.config();
        let rope = &config.ropes[shape.rope];
        let ws = &mut *self.ws;
        let place = LatentInputs {
            kernels: self.model.kernels(),
            shape,
            rope,
            angles: &ws.angles[shape.rope],
            batch: self.batch,
        };
        let latents = ws.latents.as_mut().expect("made for this family");
        latents.project(&place, w, &ws.x, [&mut ws.q, &mut ws.k]);
        Ok(())
    }

    fn select_positions(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if let Some(own) = w.pooled.as_deref().filter(|_| !cut.heads.is_empty()) {
            self.select_pools(own, layer);
        }
        let own = w.latent.as_deref().and_then(|own| own.indexer.as_ref());
        let Some(own) = own.filter(|_| !cut.heads.is_empty()) else {
            return Ok(());
        };
        let (held, sequences) = (self.held(layer), &self.sequences[self.sequences()]);
        let ws = &mut *self.ws;
        let place = LatentInputs {
            kernels: self.model.kernels(),
            shape,
            rope: &ws.ropes[shape.rope],
            angles: &ws.angles[shape.rope],
            batch: self.batch,
        };
        let latents = ws.latents.as_ref().expect("made for this family");
        let index = ws.index.as_mut().expect("made for this family");
        index.project(&place, own, &ws.x, latents.compressed());
        index.select(&place, (self.cache, held), sequences);
        Ok(())
    }

    fn attend_latent(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(layer);
        let sequences = &self.sequences[self.sequences()];
        let kernels = self.model.kernels();
        let ws = &mut *self.ws;
        let latents = ws.latents.as_mut().expect("made for this family");
        {
            let mut cache = lock(self.cache);
            let kept = cache.rows(held);
            let dims = [kept.head_dim, kept.value_dim].map(|dim| cut.heads.len() * dim);
            let rotate = |x: &mut [f32], len: usize| {
                if let Some(part) = kept.rotated() {
                    kernels.rotate_heads(&mut x[..self.rows * len], len, part);
                }
            };
            rotate(&mut ws.k, kept.head_dim);
            rotate(&mut ws.q, dims[0]);
            kernels.write_kv(&mut cache, held, sequences, &ws.k, &[]);
            let step = AttentionStep {
                cache: &cache,
                layer: held,
                heads: cut.heads.len(),
                group: shape.heads,
                skipped: cut.heads.start,
                window: shape.window,
                sinks: None,
                cap: None,
                queries: &ws.q,
                sequences,
            };
            let out = latents.read(self.rows);
            let selected = ws.index.as_mut().and_then(|index| index.selected.as_mut());
            match selected.filter(|own| own.is_sparse(sequences)) {
                Some(own) => own.attend(kernels, &step, &mut ws.scratch, out),
                None => kernels.attention(&step, &mut ws.scratch, out),
            }
            rotate(out, dims[1]);
        }
        latents.expand(kernels, w, ws.attended.of(held).values_mut());
        Ok(())
    }

    fn gate_attention(&mut self, _: &LayerShard) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(self.index);
        let mixer = self.ws.mixer.as_mut().expect("made for gated heads");
        let out = self.ws.attended.of(held).values_mut();
        mixer.gate(self.model.kernels(), shape.head_dim, self.rows, out);
        Ok(())
    }

    fn is_short_conv(&self, w: &LayerShard) -> bool {
        w.conv_taps.is_some()
    }

    fn short_conv(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        let n = cut.heads.len() * shape.head_dim;
        if n == 0 {
            return Ok(());
        }
        let (held, rows) = (self.held(layer), self.rows);
        let sequences = &self.sequences[self.sequences()];
        let (kernels, ws) = (self.model.kernels(), &mut *self.ws);
        multiply(&mut ws.v[..rows * n], &ws.k);
        let step = ShortConvStep {
            layer: held,
            taps: w.conv_taps.as_deref().expect("the family asked"),
            inputs: &ws.v[..rows * n],
            sequences,
        };
        let out = ws.attended.of(held).values_mut();
        kernels.short_conv(&step, &mut lock(self.cache), out);
        multiply(&mut out[..rows * n], &ws.q);
        Ok(())
    }

    fn is_delta_net(&self, w: &LayerShard) -> bool {
        w.delta_net.is_some()
    }

    fn project_delta_net(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (rows, ws) = (self.rows, &mut *self.ws);
        let net = w.delta_net.as_ref().expect("the family asked");
        let mixer = ws.mixer.as_mut().expect("made for delta nets");
        let [key, value] = [&w.key, &w.value].map(|linear| linear.as_ref().expect("loaded"));
        let qkv = [
            product(&mut ws.q, &w.query, rows),
            product(&mut ws.k, key, rows),
            product(&mut ws.v, value, rows),
        ];
        let kernels = self.model.kernels();
        let gates = mixer.products(net, rows);
        kernels.products(&ws.x, qkv.into_iter().chain(gates));
        mixer.finish_gates(kernels, net, rows);
        Ok(())
    }

    fn delta_net(&mut self, w: &LayerShard, layer: usize) -> Result<(), Error> {
        let (shape, cut) = self.layer();
        if cut.heads.is_empty() {
            return Ok(());
        }
        let held = self.held(layer);
        let sequences = &self.sequences[self.sequences()];
        let ws = &mut *self.ws;
        let mixer = ws.mixer.as_mut().expect("made for delta nets");
        let net = w.delta_net.as_ref().expect("the family asked");
        let (kernels, out) = (self.model.kernels(), ws.attended.of(held).values_mut());
        let step = DeltaStep {
            layer: held,
            key_heads: &net.key_heads,
            rule: net.rule,
            conv: &net.conv,
            conv_bias: &net.conv_bias,
            skip: &net.skip,
            queries: &ws.q,
            keys: &ws.k,
            values: &ws.v,
            steps: &mixer.steps,
            decays: &mixer.decays,
            sequences,
        };
        kernels.delta(&step, &mut lock(self.cache), &mut mixer.mixed, out);
        let eps = self.model.config().norm_eps;
        let group = shape.value_dim * (shape.heads / shape.kv_heads);
        let out = &mut out[..self.rows * cut.heads.len() * shape.value_dim];
        match net.rule {
            StateRule::Difference | StateRule::Channels => {
                mixer.norm_and_gate((kernels, eps), net, shape.value_dim, out);
            }
            StateRule::Sum => mixer.gate_and_norm((kernels, eps), net, group, out),
        }
        Ok(())
    }

    fn project_attention(&mut self, w: &LayerShard) -> Result<(), Error> {
        let (held, cut) = (self.held(self.index), &self.layer().1.attention);
        let ws = &mut *self.ws;
        let attended = ws.attended.of(held);
        self.model.kernels().quantise(attended);
        let place = (self.model, self.index, &*self.adapted);
        let weights = (&w.attention_output, LayerRole::AttentionOutput);
        ws.sums
            .compute(place, weights, cut, attended, self.turn.as_mut())
    }

    fn norm_delta(&mut self, w: &LayerShard, half: Half) -> Result<(), Error> {
        let weight = match half {
            Half::Attention => w.post_attention_norm.as_deref(),
            Half::FeedForward => w.post_ffn_norm.as_deref(),
            Half::ParallelExperts => Some(&*beside(w).after),
        };
        let weight = weight.expect("loaded for this family");
        let delta = &mut self.ws.sums.delta[..self.rows * weight.len()];
        norm_in_place(self.model, delta, weight);
        Ok(())
    }

    fn scale_delta(&mut self) -> Result<(), Error> {
        let scale = self.model.config().residual_scale;
        if scale != 1.0 {
            let n = self.rows * self.model.config().width;
            let delta = self.ws.sums.delta[..n].iter_mut();
            delta.for_each(|x| *x *= scale);
        }
        Ok(())
    }

    fn add_delta(&mut self) -> Result<(), Error> {
        let (rows, width) = (self.rows, self.model.config().width);
        let ws = &mut *self.ws;
        let delta = &ws.sums.delta;
        let alternating = ws.alternating.as_mut();
        let residual = alternating.map_or(&mut ws.residual, |streams| &mut streams.active);
        let residual = DisjointMut::new(&mut residual[..rows * width], width);
        self.model.kernels().for_rows(rows, |t| {
            // SAFETY: each row is visited once.
            let row = unsafe { residual.part(t) };
            vector::add_assign(row, &delta[t * width..(t + 1) * width]);
        });
        Ok(())
    }

    fn project_gate_up(&mut self, w: &LayerShard) -> Result<(), Error> {
        let w = w.feed_forward.dense();
        let (ws, rows) = (&mut *self.ws, self.rows);
        let outs = [product(&mut ws.gate, &w.gate, rows)].into_iter();
        let up = w.up.as_ref().map(|up| product(&mut ws.up, up, rows));
        self.model.kernels().products(&ws.x, outs.chain(up));
        let both = [
            (&mut ws.gate, Some(&w.gate), LayerRole::Gate),
            (&mut ws.up, w.up.as_ref(), LayerRole::Up),
        ];
        for (out, linear, part) in both {
            let Some(linear) = linear else { continue };
            add_bias(out, linear.bias.as_deref(), rows);
            if let Some(beside) = AdapterProducts::of(self.model, (self.index, part), &self.adapted)
            {
                beside.add(&ws.x, out);
            }
        }
        Ok(())
    }

    fn has_feed_forward(&self, w: &LayerShard) -> bool {
        !matches!(w.feed_forward, weights::FeedForward::Nothing)
    }

    fn has_experts(&self, w: &LayerShard) -> bool {
        w.feed_forward.experts().is_some()
    }

    fn experts(&mut self, w: &LayerShard) -> Result<(), Error> {
        let weights = w.feed_forward.experts().expect("the family asked");
        let cut = &self.layer().1.feed_forward;
        let (rows, ws) = (self.rows, &mut *self.ws);
        let routed = ws.experts.as_mut().expect("the model has experts");
        let width = self.model.config().width;
        routed.norm(self.model, weights, &ws.residual[..rows * width]);
        let first = self.model.links().map_or(0, |_| cut.roots_before());
        let n = self.rows * self.model.config().width;
        let delta = &mut ws.sums.delta[first * n..];
        let place = (self.model, self.index);
        let x = (&ws.x, &ws.residual[..rows * width]);
        routed.compute(place, (weights, cut), x, delta)?;
        ws.sums.exchange(place, cut, n, self.turn.as_mut())
    }

    fn activate(&mut self) -> Result<(), Error> {
        let cutoff = self.layer().0.gate_cutoff;
        let (kernels, held) = (self.model.kernels(), self.held(self.index));
        let ws = &mut *self.ws;
        if let (Some(cutoff), Some(cutoffs)) = (cutoff, &mut ws.cutoffs) {
            let place = (self.model, self.index);
            cutoffs.cut(place, (cutoff, &mut ws.gate), self.rows, self.turn.as_mut())?;
        }
        let hidden = ws.hidden.of(held);
        let ffn = hidden.cols();
        let (gate, up, config) = (&ws.gate, &ws.up, self.model.config());
        kernels.fill_rows(hidden, |t, out| {
            let part = t * ffn..(t + 1) * ffn;
            let (gate, up) = (&gate[part.clone()], up.get(part).unwrap_or_default());
            experts::activate(
                kernels,
                (config.dense_clamp, config.activation),
                [gate, up],
                out,
            );
        });
        Ok(())
    }

    fn project_down(&mut self, w: &LayerShard) -> Result<(), Error> {
        let down = &w.feed_forward.dense().down;
        let (held, cut) = (self.held(self.index), self.layer().1.dense());
        let place = (self.model, self.index, &*self.adapted);
        let (weights, turn) = ((down, LayerRole::Down), self.turn.as_mut());
        let ws = &mut *self.ws;
        ws.sums
            .compute(place, weights, cut, ws.hidden.of(held), turn)
    }

    fn set_aside(&mut self, w: &LayerShard) -> Result<(), Error> {
        let weight = &beside(w).dense;
        let n = self.rows * weight.len();
        let ws = &mut *self.ws;
        ws.aside[..n].copy_from_slice(&ws.sums.delta[..n]);
        norm_in_place(self.model, &mut ws.aside[..n], weight);
        Ok(())
    }

    fn add_aside(&mut self) -> Result<(), Error> {
        let n = self.rows * self.model.config().width;
        let ws = &mut *self.ws;
        vector::add_assign(&mut ws.sums.delta[..n], &ws.aside[..n]);
        Ok(())
    }

    fn add_per_layer(&mut self, w: &LayerShard, index: usize) -> Result<(), Error> {
        let Some(weights) = &w.per_layer else {
            return Ok(());
        };
        let (held, model, width) = (self.held(index), self.model, self.model.config().width);
        let (n, ws) = (self.rows * width, &mut *self.ws);
        let (residual, all) = (&ws.residual, model.config().residual_width());
        let alternation = w.streams.as_ref().and_then(|streams| streams.alternation());
        let kernels = model.kernels();
        kernels.fill_rows(&mut ws.x, |t, out| {
            out.copy_from_slice(&residual[t * all..][..width]);
            if let Some(own) = alternation {
                multiply(out, &own.scale);
            }
        });
        let buffers = ws
            .per_layer
            .as_mut()
            .expect("the model has such embeddings");
        let delta = &mut ws.sums.delta[..n];
        buffers.layer(kernels, weights, held, &ws.x, delta);
        per_layer::norm(model, weights, delta);
        if alternation.is_none() {
            return self.add_delta();
        }
        let rows = ws.residual[..self.rows * all].chunks_exact_mut(all);
        for (row, delta) in rows.zip(ws.sums.delta.chunks_exact(width)) {
            let further = row[width..].chunks_exact_mut(width);
            further.for_each(|stream| vector::add_assign(stream, delta));
        }
        Ok(())
    }

    fn scale_residual(&mut self, w: &LayerShard) -> Result<(), Error> {
        if let Some(scale) = w.output_scale {
            let n = self.rows * self.model.config().width;
            let residual = self.ws.residual[..n].iter_mut();
            residual.for_each(|x| *x *= scale);
        }
        Ok(())
    }
}

/// Captures of the layers before `layer`.
fn captures_before(model: &Model, layer: usize) -> usize {
    model
        .captures()
        .partition_point(|captured| *captured < layer)
}

/// `x *= y`; as many as `x` has.
fn multiply(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
}

/// Position of row `t` of a batch.
fn position_of(sequences: &[AttentionRows<'_>], mut t: usize) -> usize {
    for sequence in sequences {
        if t < sequence.rows {
            return sequence.position + t;
        }
        t -= sequence.rows;
    }
    unreachable!("row {t} behind all sequences")
}

/// # Panics
/// If the layer has no parallel experts.
const fn beside(w: &LayerShard) -> &weights::ParallelExpertNorms {
    w.beside.as_ref().expect("loaded for this family")
}

fn product<'a>(out: &'a mut [f32], linear: &'a Linear, rows: usize) -> Product<'a> {
    whole(&linear.matrix, out, rows)
}

/// Product of `rows` rows with a whole matrix.
fn whole<'a>(weights: &'a PackedMatrix, out: &'a mut [f32], rows: usize) -> Product<'a> {
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

/// Norm of a row of the residual, `(C,)`, in the family's form. A subtracted mean is summed in f64
/// in the order of the row.
fn norm_row(model: &Model, row: &[f32], weight: &[f32], out: &mut [f32]) {
    let (kernels, eps) = (model.kernels(), model.config().norm_eps);
    if model.config().family.centres_norms() {
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / row.len() as f64;
        for (out, x) in out.iter_mut().zip(row) {
            *out = (f64::from(*x) - mean) as f32;
        }
        kernels.rms_norm_in_place(out, weight, eps);
    } else {
        kernels.rms_norm(row, weight, eps, out);
    }
}

/// RMS norm of each run of `weight.len()` values.
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
