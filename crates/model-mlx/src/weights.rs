//! A rank's weights as MLX's arrays.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_mlx::{Array, DeviceKind, Dtype, Stream};
use paceline_model::backend::{StoredTensor, WeightReader};
use paceline_model::{
    Config, Error, LayerCache, LayerRole, LayerShape, LeafCut, ModelFamily, ModelSource, Role,
    Shard, StreamRule,
};
use paceline_weights::tensor::MappedBytes;

use super::matrix::{Linear, Matrix};
use super::stored::{Stored, float, floats, nearest};

mod attention;
mod compressed;
mod delta_net;
mod experts;
mod indexer;
mod latent;
mod per_layer;
mod planned;
mod pooled;
mod ring;
mod slots;
mod streams;

pub(super) use attention::Attention;
pub(super) use compressed::{Compressed, KeySeries};
pub(super) use delta_net::{DeltaNet, ShortConv, Taps};
pub(super) use experts::{Experts, Routed, Shared, Stack};
pub(super) use indexer::Indexer;
pub(super) use latent::Latent;
pub(super) use per_layer::{PerLayer, PerLayerInputs};
pub(super) use planned::planned;
pub(super) use pooled::PoolIndexer;
pub(super) use ring::{BLOCKS, Ring, RingPlan, RingWriter};
pub(super) use slots::{ShardFiles, Slots};
pub(super) use streams::{Alternation, ConstrainedMix, HeadStreams, LayerStreams, StreamMix};

/// A matrix that the ranks of a stage share by its input dimension, or by its outputs: see
/// [`Loader::by_outputs`].
#[derive(Debug)]
pub(super) struct Summed {
    /// This rank's columns, or rows; none when it has no part in it.
    pub(super) mine: Option<Linear>,
    /// `(C,)`: added to the sum over all ranks.
    pub(super) bias: Option<Array>,
}

/// A rank's weights of one layer; whole shapes in [`Part`].
#[derive(Debug)]
pub(super) struct Layer {
    /// `None` with one residual stream.
    pub(super) streams: Option<LayerStreams>,
    pub(super) attention_norm: Option<Array>,
    pub(super) mixer: Mixer,
    pub(super) attention_output: Summed,
    pub(super) post_attention_norm: Option<Array>,
    pub(super) ffn_norm: Option<Array>,
    /// Where there are not only experts.
    pub(super) dense: Option<Dense>,
    /// Where the router chooses.
    pub(super) experts: Option<Box<Experts>>,
    pub(super) post_ffn_norm: Option<Array>,
    /// Norms of a feed-forward with parallel experts.
    pub(super) beside: Option<Beside>,
    /// Where a layer has embeddings of its own.
    pub(super) per_layer: Option<PerLayer>,
    /// A factor of the residual behind the layer.
    pub(super) output_scale: Option<Array>,
}

/// Mixer of the positions.
#[derive(Debug)]
pub(super) enum Mixer {
    /// A rank without heads.
    Nothing,
    Attention(Box<Attention>),
    Latent(Box<Latent>),
    Compressed(Box<Compressed>),
    Delta(Box<DeltaNet>),
    Conv(Box<ShortConv>),
}

/// Gate, up and down; no up in families without gates.
#[derive(Debug)]
pub(super) struct Dense {
    /// None for a rank without columns of it.
    pub(super) gate_up: Option<(Linear, Option<Linear>)>,
    pub(super) down: Summed,
}

/// The norms of a feed-forward and of its parallel experts, `(C,)` each.
#[derive(Debug)]
pub(super) struct Beside {
    /// On the result of the feed-forward.
    pub(super) dense: Array,
    /// Before the experts.
    pub(super) before: Array,
    /// On their result.
    pub(super) after: Array,
}

impl Mixer {
    fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Attention(own) => own.arrays(),
            Self::Latent(own) => own.arrays(),
            Self::Compressed(own) => own.arrays(),
            Self::Delta(own) => own.arrays(),
            Self::Conv(own) => own.arrays(),
        }
    }
}

impl Dense {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let inputs = self.gate_up.iter();
        let inputs = inputs.flat_map(|(gate, up)| [gate].into_iter().chain(up));
        inputs.flat_map(Linear::arrays).chain(self.down.arrays())
    }
}

impl Summed {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let mine = self.mine.iter().flat_map(Linear::arrays);
        mine.chain(&self.bias)
    }
}

impl Layer {
    fn arrays(&self) -> Vec<&Array> {
        let norms = [
            self.attention_norm.as_ref(),
            self.ffn_norm.as_ref(),
            self.post_attention_norm.as_ref(),
            self.post_ffn_norm.as_ref(),
            self.output_scale.as_ref(),
        ];
        let beside = self.beside.iter();
        let mut all = self.mixer.arrays();
        all.extend(self.streams.iter().flat_map(LayerStreams::arrays));
        all.extend(norms.into_iter().flatten());
        all.extend(self.attention_output.arrays());
        all.extend(self.dense.iter().flat_map(Dense::arrays));
        all.extend(self.experts.iter().flat_map(|own| own.arrays()));
        all.extend(beside.flat_map(|own| [&own.dense, &own.before, &own.after]));
        all.extend(self.per_layer.iter().flat_map(PerLayer::arrays));
        all
    }
}

/// All of a rank's weights.
#[derive(Debug)]
pub(super) struct Weights {
    /// In the first stage; in all where layers have embeddings of their own, which come from it.
    pub(super) embedding: Option<Linear>,
    /// Where layers have embeddings of their own.
    pub(super) per_layer: Option<PerLayerInputs>,
    pub(super) layers: Vec<Layer>,
    /// Layers that a limit of memory keeps on disk.
    pub(super) ring: Option<Ring>,
    /// Norm and this rank's rows of the output head, in the last stage.
    pub(super) head: Option<(Array, Linear)>,
    /// From the embedding to each residual stream but the first; empty where all begin alike.
    pub(super) first_streams: Vec<Linear>,
    /// From several residual streams to the output head.
    pub(super) head_streams: Option<HeadStreams>,
}

impl Weights {
    /// The weights of residual streams at the ends of the model.
    fn stream_ends(&self) -> impl Iterator<Item = &Array> {
        let first = self.first_streams.iter().flat_map(Linear::arrays);
        first.chain(self.head_streams.iter().flat_map(HeadStreams::arrays))
    }

    /// Every array once, but the head's where it is the embedding.
    fn bytes(&self, tied: bool) -> Bytes {
        let head = self
            .head
            .iter()
            .filter(|_| !tied || self.embedding.is_none());
        let arrays = self.layers.iter().flat_map(Layer::arrays);
        let tables = self.embedding.iter().chain(head.map(|(_, head)| head));
        let all = arrays.chain(tables.flat_map(Linear::arrays));
        let all = all.chain(self.per_layer.iter().flat_map(PerLayerInputs::arrays));
        let all = all.chain(self.stream_ends());
        let slots = self.layers.iter().flat_map(|layer| &layer.experts);
        let slots: u64 = slots.map(|experts| experts.slot_bytes()).sum();
        Bytes(all.map(Array::n_bytes).sum::<u64>() + slots)
    }
}

/// The type of activations: that of the weights, where they are floats; of the scales, where these
/// are; else of the norms of a folder. GGUF's blocks have halves, which are too narrow for the
/// activations of gemma.
pub(super) fn activations(
    names: &WeightReader<'_>,
    family: ModelFamily,
    class: KernelClass,
) -> Result<Dtype, Error> {
    if class == KernelClass::MlxF32 {
        return Ok(Dtype::F32);
    }
    let (role, shape) = first_matrix(names.config);
    let query = names.located(role, shape)?;
    let dtype = match floats(&query) {
        Some(dtype) => dtype,
        None => {
            let norm = names.source.weight(family, Role::OutputNorm)?;
            float(norm.block_type)
                .filter(|_| matches!(names.source, ModelSource::Hf(_)))
                .unwrap_or(Dtype::F16)
        }
    };
    let narrow = dtype == Dtype::F16 && matches!(names.source, ModelSource::Gguf(_));
    Ok(if narrow && family.needs_wide_activations() {
        Dtype::F32
    } else {
        dtype
    })
}

/// A matrix that the first layer has, by the kind of its attention.
fn first_matrix(c: &Config) -> (Role, [usize; 2]) {
    let shape = &c.layers[0];
    let (part, shape) = match (shape.cache, shape.latent) {
        (LayerCache::Delta(_) | LayerCache::Conv(_), _) => {
            let sizes = [c.width, shape.heads * shape.value_dim];
            (shape.output_role(), sizes)
        }
        (LayerCache::Compressed(_), _) => (LayerRole::Key, [shape.head_dim, c.width]),
        (_, Some(latent)) => (LayerRole::LatentDown, [latent.key_dim(), c.width]),
        _ => (LayerRole::Query, [query_rows(shape, shape.heads), c.width]),
    };
    (Role::Layer(0, part), shape)
}

/// Rows of `heads` heads of a layer's query projection, their gates included.
const fn query_rows(shape: &LayerShape, heads: usize) -> usize {
    let each = if shape.gated { 2 } else { 1 };
    each * shape.head_dim * heads
}

/// Loads weights of one model.
pub(super) struct Loader<'a> {
    pub(super) stream: &'a Stream,
    pub(super) names: WeightReader<'a>,
    pub(super) config: &'a Config,
    pub(super) shard: &'a Shard,
    /// Of activations.
    pub(super) dtype: Dtype,
    /// Whether ranks have rows of every matrix, so that each of their products is whole.
    pub(super) by_outputs: bool,
    pub(super) files: &'a Arc<ShardFiles>,
    /// Arrays that others are converted from, until they are. MLX would write the results to their
    /// memory when nothing else holds them, and that is the file's.
    pub(super) kept: RefCell<Vec<Array>>,
    /// Matrices of types that MLX has no form for, by type.
    pub(super) nearest: RefCell<BTreeMap<&'static str, Nearest>>,
}

/// Matrices of a type that MLX has no form for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nearest {
    /// Name of the form that they are held in.
    form: &'static str,
    matrices: usize,
}

impl Loader<'_> {
    /// `array` in the type of activations.
    fn converted(&self, array: Array) -> Result<Array, Error> {
        let converted = self.stream.astype(&array, self.dtype)?;
        self.kept.borrow_mut().push(array);
        Ok(converted)
    }

    pub(super) fn eval<'a>(
        &self,
        arrays: impl IntoIterator<Item = &'a Array>,
    ) -> Result<(), Error> {
        self.stream.eval(arrays)?;
        self.kept.borrow_mut().clear();
        Ok(())
    }

    /// Loads all of the shard, its layers through `ring` if not all fit into memory. Calls
    /// `progress(done, of)` after each layer.
    pub(super) fn load(
        &self,
        tied: bool,
        mut ring: Option<RingWriter>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<(Weights, Bytes), Error> {
        let (c, shard) = (self.config, self.shard);
        let n = shard.layers.len();
        let table = |role, mine| self.rows(role, [c.vocab, c.width], mine);
        let embedding = (shard.embeds() || c.per_layer > 0)
            .then(|| table(Role::TokenEmbedding, 0..c.vocab))
            .transpose()?;
        let mut layers = Vec::with_capacity(n);
        for i in shard.layers.clone() {
            let layer = self.layer(i)?;
            self.eval(layer.arrays())?;
            if let Some(ring) = &mut ring {
                ring.keep(self.stream, (i, &layer))?;
            }
            layers.push(layer);
            progress(layers.len(), n + 1);
        }
        let head = || {
            let output = match &embedding {
                Some(table) if tied && shard.vocab() == (0..c.vocab) => table.clone(),
                _ if tied => table(Role::TokenEmbedding, shard.vocab())?,
                _ => table(Role::Output, shard.vocab())?,
            };
            // The mix of gated streams has norms.
            let is_normed = c.streams.is_some_and(|of| of.rule == StreamRule::Gated);
            let norm = match is_normed {
                true => self.floats(&vec![1.0; c.width])?,
                false => self.norm(Role::OutputNorm, c.width)?,
            };
            Ok::<_, Error>((norm, output))
        };
        let head = shard.has_head().then(head).transpose()?;
        let weights = Weights {
            per_layer: self.per_layer_inputs()?,
            embedding,
            layers,
            ring: ring.map(RingWriter::finish).transpose()?,
            head,
            first_streams: self.first_streams()?,
            head_streams: self.head_streams()?,
        };
        let tables = weights
            .embedding
            .iter()
            .chain(weights.head.iter().map(|(_, head)| head));
        let own = weights.per_layer.iter().flat_map(PerLayerInputs::arrays);
        let own = own.chain(weights.stream_ends());
        self.eval(tables.flat_map(Linear::arrays).chain(own))?;
        progress(n + 1, n + 1);
        let bytes = weights.bytes(tied && shard.vocab() == (0..c.vocab));
        Ok((weights, bytes))
    }

    fn layer(&self, i: usize) -> Result<Layer, Error> {
        let (c, shape, cut) = (self.config, &self.config.layers[i], self.shard.layer(i));
        let role = |part| Role::Layer(i, part);
        let norm = |part| self.norm(role(part), c.width);
        let opt = |there: bool, part| there.then(|| norm(part)).transpose();
        let [before, after] = [
            c.family.norms_before_halves(),
            c.family.norms_after_halves(),
        ];
        let outputs = shape.heads * shape.output_dim();
        let experts = shape.experts.map(|of| self.experts(i, of));
        let is_compressed = shape.experts.is_some_and(|of| of.compressed.is_some());
        let beside = || {
            Ok::<_, Error>(Beside {
                dense: norm(LayerRole::DenseNorm)?,
                before: norm(LayerRole::BesideNorm)?,
                after: norm(LayerRole::PostBesideNorm)?,
            })
        };
        let scale = self.names.output_scale(i)?;
        let scale = scale.map(|scale| self.stream.scalar(scale, self.dtype));
        Ok(Layer {
            streams: self.layer_streams(i)?,
            attention_norm: opt(before, LayerRole::AttentionNorm)?,
            mixer: self.mixer(i)?,
            attention_output: self.summed(role(shape.output_role()), outputs, &cut.attention)?,
            post_attention_norm: opt(after, LayerRole::PostAttentionNorm)?,
            ffn_norm: opt(before && shape.has_feed_forward(), LayerRole::FfnNorm)?,
            dense: shape.has_dense().then(|| self.dense(i)).transpose()?,
            experts: experts.transpose()?.map(Box::new),
            post_ffn_norm: opt(after, LayerRole::PostFfnNorm)?,
            beside: (shape.dense_beside && !is_compressed)
                .then(beside)
                .transpose()?,
            per_layer: self.per_layer(i)?,
            output_scale: scale.transpose()?,
        })
    }

    fn mixer(&self, i: usize) -> Result<Mixer, Error> {
        let (shape, cut) = (&self.config.layers[i], self.shard.layer(i));
        if cut.heads.is_empty() {
            return Ok(Mixer::Nothing);
        }
        Ok(match (shape.cache, shape.latent) {
            (LayerCache::Delta(net), _) => Mixer::Delta(Box::new(self.delta_net(i, net)?)),
            (LayerCache::Conv(taps), _) => Mixer::Conv(Box::new(self.short_conv(i, taps)?)),
            (LayerCache::Compressed(of), _) => Mixer::Compressed(Box::new(self.compressed(i, of)?)),
            (_, Some(latent)) => Mixer::Latent(Box::new(self.latent(i, latent)?)),
            _ => Mixer::Attention(Box::new(self.attention(i)?)),
        })
    }

    /// Gate, up and down of a layer.
    fn dense(&self, i: usize) -> Result<Dense, Error> {
        let (width, ffn) = (self.config.width, self.config.layers[i].ffn);
        let cut = self.shard.layer(i).dense();
        let rows = |part| self.rows(Role::Layer(i, part), [ffn, width], cut.columns());
        let [gate, up, down] = self.config.layers[i].dense_roles();
        let gate_up = || Ok::<_, Error>((rows(gate)?, self.gated(|| rows(up))?));
        let mine = !cut.columns().is_empty();
        Ok(Dense {
            gate_up: mine.then(gate_up).transpose()?,
            down: self.summed(Role::Layer(i, down), ffn, cut)?,
        })
    }

    /// `up` of a feed-forward or expert, in families with gates.
    fn gated(&self, up: impl FnOnce() -> Result<Linear, Error>) -> Result<Option<Linear>, Error> {
        self.config.family.has_gates().then(up).transpose()
    }

    /// Notes a matrix of a type that MLX has no form for.
    fn note(&self, matrix: &StoredTensor) {
        let StoredTensor::Whole(tensor) = matrix else {
            return;
        };
        if let Some(form) = nearest(tensor.block_type) {
            let mut all = self.nearest.borrow_mut();
            let own = all.entry(tensor.block_type.name());
            own.or_insert(Nearest { form, matrices: 0 }).matrices += 1;
        }
    }

    /// Notes on the model's numbers and their speed for the caller that loads it, a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        let nearest = self.nearest.borrow();
        let lines = nearest.iter().map(|(name, Nearest { form, matrices })| {
            format!("mlx has no form for {name}: {matrices} matrices are held as {form}")
        });
        let cpu = matches!(self.stream.device(), DeviceKind::Cpu).then(|| {
            "mlx computes on the CPU here: a test bed, far slower than engine cpu".to_owned()
        });
        cpu.into_iter().chain(lines).collect()
    }

    /// The rows `mine` of a matrix.
    fn rows(&self, role: Role, shape: [usize; 2], mine: Range<usize>) -> Result<Linear, Error> {
        let bias = match self.names.bias(role, shape[0])? {
            Some(bias) => Some(self.floats(&bias[mine.clone()])?),
            None => None,
        };
        let matrix = self.matrix(role, shape, mine, 0..shape[1])?;
        Ok(Linear { matrix, bias })
    }

    /// This rank's columns of a matrix, or its rows.
    fn summed(&self, role: Role, cols: usize, cut: &LeafCut) -> Result<Summed, Error> {
        let width = self.config.width;
        let (rows, columns) = if self.by_outputs {
            (self.shard.outputs[self.shard.index].clone(), 0..cols)
        } else {
            (0..width, cut.columns())
        };
        let bias = self.names.bias(role, width)?;
        let bias = bias.map(|bias| self.floats(&bias)).transpose()?;
        let mine = || {
            let matrix = self.matrix(role, [width, cols], rows.clone(), columns.clone())?;
            Ok::<_, Error>(Linear { matrix, bias: None })
        };
        let empty = rows.is_empty() || columns.is_empty();
        let mine = (!empty).then(mine).transpose()?;
        Ok(Summed { mine, bias })
    }

    fn matrix(
        &self,
        role: Role,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Matrix, Error> {
        // While the file downloads, only these rows must have arrived.
        let matrix = self.names.located(role, shape)?;
        let matrix = matrix.row_range(rows.clone()).arrived()?;
        self.check_readable(&matrix)?;
        let matrix = matrix.for_mlx()?;
        self.note(&matrix);
        let (stored, rows) = Stored::new(&matrix, 0..rows.len());
        let converted = |array| self.converted(array);
        let made = Matrix::of(self.stream, (&stored, role), (rows, cols), &converted)?;
        // The arrays are copies: the file's pages would be there twice.
        matrix.parts().into_iter().for_each(MappedBytes::discard);
        Ok(made)
    }

    /// Has the system read a matrix's pages, so that a failed disk is an error.
    fn check_readable(&self, matrix: &StoredTensor) -> Result<(), Error> {
        let mut parts = matrix.parts().into_iter();
        parts
            .try_for_each(MappedBytes::check_readable)
            .map_err(|error| {
                let name = matrix.name();
                let file = self.names.source.file_of(name);
                Error::Streaming {
                    path: file.unwrap_or(Path::new("")).to_owned(),
                    reason: format!("{name}: {error}"),
                }
            })
    }

    /// Rows of a matrix of `shape`, in f32 for every type of activations, transposed: `(in, rows)`.
    fn wide_rows(
        &self,
        role: Role,
        shape: [usize; 2],
        rows: &[Range<usize>],
    ) -> Result<Array, Error> {
        let stored = self.names.located(role, shape)?;
        let n: usize = rows.iter().map(Range::len).sum();
        let mut values = vec![0.0; n * shape[1]];
        let mut all = values.chunks_exact_mut(shape[1]);
        for rows in rows {
            let own = stored.row_range(rows.clone()).arrived()?;
            for (row, out) in (0..rows.len()).zip(&mut all) {
                own.row(row as u32, out);
            }
        }
        let sizes = [n as i32, shape[1] as i32];
        let wide = self.stream.array_f32(&values, &sizes)?;
        Ok(self.stream.transpose(&wide, &[1, 0])?)
    }

    /// A vector in the type of activations.
    fn floats(&self, values: &[f32]) -> Result<Array, Error> {
        let array = self.stream.array_f32(values, &[values.len() as i32])?;
        Ok(self.stream.astype(&array, self.dtype)?)
    }

    fn norm(&self, role: Role, n: usize) -> Result<Array, Error> {
        self.floats(&self.names.norm(role, n)?)
    }
}
