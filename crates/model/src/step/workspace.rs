//! The buffers of a step, as large as this rank's part of the model asks.

use paceline_comm::RegisteredMemory;
use paceline_tensor::AttentionScratch;

use super::alternating::AlternatingRows;
use super::attended::AttendedRows;
use super::blocks::BlockBuffers;
use super::compressed::CompressedRows;
use super::constrained::ConstrainedRows;
use super::cutoff::GateCutoffs;
use super::delta_net::Mixer;
use super::experts::ExpertBuffers;
use super::indexer::IndexBuffers;
use super::inputs::Inputs;
use super::latent::LatentBuffers;
use super::ngrams::NgramRows;
use super::per_layer::PerLayerRows;
use super::pooled::PoolBuffers;
use super::projections::Projections;
use super::rows::{activations, exchanged};
use super::streams::StreamRows;
use super::sums::Sums;
use super::{BatchSize, Workspace, halves};
use crate::model::Model;
use crate::split::LeafCut;
use crate::weights::{HeadStreams, LayerShard, Summed};
use crate::{LayerCache, LayerCut, LayerShape, Links, Rope};

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

    fn whole(model: &Model, size: BatchSize) -> Self {
        let (c, shard) = (model.config(), model.shard());
        let vocab = shard.vocab().len();
        let own_vocab = if vocab == c.vocab { 0 } else { vocab };
        let layers = model.layers();
        let of = |sum: fn(&LayerShard) -> Option<&Summed>, cut: fn(&LayerCut) -> &LeafCut| {
            let sums = layers.iter().map(sum);
            Inputs::new(model, size.rows, sums.zip(shard.each_layer().map(cut)))
        };
        let head = model.head().map(|(_, output)| &output.matrix);
        let inputs = model.per_layer().map(|inputs| &inputs.projection);
        let ends = model.head_streams().map_or(&[][..], HeadStreams::of_width);
        let inputs = inputs.into_iter().chain(ends).chain(model.first_streams());
        let normed = layers.iter().flat_map(LayerShard::of_normed).chain(inputs);
        let has_beside = c.layers.iter().any(|layer| layer.dense_beside);
        // Products store whole cache lines, so their outputs begin at cache lines.
        let rows = |n: usize| RegisteredMemory::new(None, size.rows * n);
        let of_layers = |len| rows(widest(model, len));
        let logits = |n: usize| vec![0.0f32; size.logit_rows * n];
        Self {
            size,
            residual: exchanged(model, size.rows * c.sent_width(model.captures().len())),
            captured: Vec::new(),
            sums: Sums::new(model, size.rows),
            x: activations(model, size.rows, c.width, normed),
            q: of_layers(of_queries),
            k: of_layers(|shape, cut| cut.kv_heads.len() * shape.head_dim),
            v: of_layers(of_values),
            attended: of(|layer| Some(&layer.attention_output), |cut| &cut.attention),
            gate: of_layers(of_dense),
            up: of_layers(of_dense),
            hidden: of(|layer| layer.feed_forward.down(), LayerCut::dense),
            streams: StreamRows::new(model, size.rows),
            constrained: ConstrainedRows::new(model, size.rows),
            attended_streams: AttendedRows::new(model),
            alternating: AlternatingRows::new(model, size.rows),
            cutoffs: GateCutoffs::new(model, size.rows),
            projections: Projections::new(model, size.rows),
            latents: LatentBuffers::new(model, size.rows),
            compressed: CompressedRows::new(model, size),
            index: IndexBuffers::new(model, size),
            pools: PoolBuffers::new(model, size),
            blocks: BlockBuffers::new(model, size),
            mixer: Mixer::new(model, size.rows),
            experts: c
                .experts()
                .map(|experts| ExpertBuffers::new(model, experts, size.rows)),
            aside: rows(if has_beside { c.width } else { 0 }),
            per_layer: PerLayerRows::new(model, size.rows),
            ngrams: NgramRows::new(model, size.rows),
            ropes: c
                .ropes
                .iter()
                .map(|rope| rope.for_context(size.context))
                .collect(),
            angles: angle_buffers(model, size.rows),
            head_x: activations(model, size.logit_rows, c.width, head),
            own_logits: exchanged(model, size.logit_rows * own_vocab),
            logits: logits(if shard.leads() { c.vocab } else { 0 }),
            received: exchanged(model, Links::logits_room(shard, size.logit_rows)),
            wanted: Vec::with_capacity(size.logit_rows),
            is_headless: false,
            is_given: false,
            words: Vec::new(),
            sequences: Vec::with_capacity(size.sequences * model.kinds().len()),
            scratch: scratch(model, size),
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

fn angle_buffers(model: &Model, max_rows: usize) -> Vec<Vec<(f32, f32)>> {
    let room = |rope: &Rope| Vec::with_capacity(max_rows * rope.frequencies.len());
    model.config().ropes.iter().map(room).collect()
}

/// Elements of a row in a layer, of this rank.
type Width = fn(&LayerShape, &LayerCut) -> usize;

/// Elements of the widest row in the layers of a rank.
fn widest(model: &Model, width: Width) -> usize {
    let shard = model.shard();
    let shapes = model.config().layers[shard.layers.clone()].iter();
    let widths = shapes
        .zip(shard.each_layer())
        .map(|(shape, cut)| width(shape, cut));
    widths.max().unwrap_or(0)
}

fn of_queries(shape: &LayerShape, cut: &LayerCut) -> usize {
    match shape.cache {
        LayerCache::Delta(_) => cut.kv_heads.len() * shape.head_dim,
        _ => cut.heads.len() * shape.head_dim,
    }
}

fn of_values(shape: &LayerShape, cut: &LayerCut) -> usize {
    match (shape.cache, shape.latent) {
        (LayerCache::Delta(_), _) => cut.heads.len() * shape.value_dim,
        (_, Some(_)) => 0, // part of the keys
        _ => cut.kv_heads.len() * shape.value_dim,
    }
}

fn of_dense(shape: &LayerShape, cut: &LayerCut) -> usize {
    let columns = cut.dense().columns().len();
    if shape.has_dense() { columns } else { 0 }
}

fn scratch(model: &Model, size: BatchSize) -> AttentionScratch {
    model.kernels().attention_scratch(
        size.sequences,
        widest(model, |_, cut| cut.heads.len()),
        (
            widest(model, |shape, _| shape.head_dim),
            widest(model, |shape, _| shape.value_dim),
        ),
        size.context,
    )
}
