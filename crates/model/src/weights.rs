//! Weights in memory: packed matrices, norms and biases, checked against the configuration.
//!
//! [`Loader`] reads the parts of one rank from a [`ModelSource`](crate::Source) and packs them for
//! the kernels. [`WeightReader`] is the unpacked, checked access, which MLX loading shares.

mod latent;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use paceline_base::{BlockType, Bytes, KernelClass, lock};
use paceline_tensor::{PackOptions, PackedMatrix, StoredMatrix, ThreadPool, UNIT, storage};
use paceline_weights::mlx::{BLOCK_BYTES_MAX, Quantised};
use paceline_weights::tensor::{MappedBytes, Tensor};

use crate::config::StreamRule;
use crate::packed_file::PackedFile;
use crate::rope::{LongContext, LongFrequencies, MIN_DIVISOR};
use crate::split::{LeafCut, Shard};
use crate::streaming::StreamUnit;
use crate::{Config, Error, LayerCache, LayerRole, ModelFamily, ModelSource, Nth, Role, config};

mod alternating;
mod delta_net;
mod indexer;
mod pooled;
mod sampled_experts;
mod streams;

pub(crate) use delta_net::DeltaNet;
pub use delta_net::{DeltaRowLayout, MatrixRows};

pub(crate) use alternating::Alternation;
pub(crate) use indexer::Indexer;
pub(crate) use latent::Latent;
pub(crate) use pooled::PoolIndexer;
pub(crate) use streams::{HeadStreams, LayerStreams, StreamMix};

/// A matrix with an optional bias: `(out, in)`, or this rank's rows of it.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) matrix: PackedMatrix,
    pub(crate) bias: Option<Vec<f32>>,
}

/// A matrix whose inputs are divided over the ranks of a stage: `(C, in)`.
#[derive(Debug)]
pub(crate) struct Summed {
    /// One matrix for each root of this rank's leaves, with its first column in this rank's input.
    pub(crate) roots: Vec<(usize, PackedMatrix)>,
    /// `(C,)`: added to the sum over all ranks.
    pub(crate) bias: Option<Vec<f32>>,
}

impl Summed {
    fn bytes(&self) -> u64 {
        self.matrices().map(|matrix| matrix.bytes().0).sum()
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.roots.iter().map(|(_, matrix)| matrix)
    }
}

/// A rank's weights of one layer; [`Part`] has the whole shapes.
#[derive(Debug)]
pub(crate) struct LayerShard {
    /// For several residual streams.
    pub(crate) streams: Option<Box<LayerStreams>>,
    pub(crate) attention_norm: Option<Vec<f32>>,
    /// From the compressed query, if the layer compresses.
    pub(crate) query: Linear,
    /// `None` if it uses another layer's keys and values.
    pub(crate) key: Option<Linear>,
    pub(crate) value: Option<Linear>,
    /// For latent attention.
    pub(crate) latent: Option<Box<Latent>>,
    pub(crate) attention_output: Summed,
    pub(crate) query_norm: Option<Vec<f32>>,
    pub(crate) key_norm: Option<Vec<f32>>,
    /// Of this rank's heads.
    pub(crate) sinks: Option<Vec<f32>>,
    /// For attention to pools of positions.
    pub(crate) pooled: Option<Box<PoolIndexer>>,
    /// Additional weights of a gated delta net.
    pub(crate) delta_net: Option<Box<DeltaNet>>,
    /// `(taps, H D)`: taps of a short convolution.
    pub(crate) conv_taps: Option<Vec<f32>>,
    pub(crate) post_attention_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Option<Vec<f32>>,
    pub(crate) feed_forward: FeedForward,
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
    /// `(E,)`: ones, for values with a norm.
    pub(crate) value_norm: Option<Vec<f32>>,
    /// For a dense feed-forward with parallel experts.
    pub(crate) beside: Option<ParallelExpertNorms>,
    /// For per-layer embeddings.
    pub(crate) per_layer: Option<PerLayer>,
    /// Factor of the residual after the layer.
    pub(crate) output_scale: Option<f32>,
}

/// Norms of a dense feed-forward and of its parallel experts, `(C,)` each.
#[derive(Debug)]
pub(crate) struct ParallelExpertNorms {
    /// After the feed-forward.
    pub(crate) dense: Vec<f32>,
    /// Before the experts.
    pub(crate) before: Vec<f32>,
    /// After the experts.
    pub(crate) after: Vec<f32>,
}

/// Path of the per-layer embeddings into the residual; whole on every rank.
#[derive(Debug)]
pub(crate) struct PerLayer {
    /// `(P, C)`
    pub(crate) gate: PackedMatrix,
    /// `(C, P)`
    pub(crate) output: PackedMatrix,
    /// `(C,)`: norm of the output.
    pub(crate) norm: Vec<f32>,
}

/// Per-layer embeddings, and the projection of the token embedding onto them.
#[derive(Debug)]
pub(crate) struct PerLayerInputs {
    /// `(vocabulary, layers * P)`
    pub(crate) embedding: StoredTensor,
    /// `(this rank's layers * P, C)`
    pub(crate) projection: PackedMatrix,
    /// `(P,)`
    pub(crate) norm: Vec<f32>,
}

/// Feed-forward part of a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Dense),
    Experts(Box<Experts>),
    /// Dense feed-forward and experts on the same rows, each with its own norms.
    Both(Dense, Box<Experts>),
    /// Nothing: the layer has only its first half.
    Nothing,
}

/// Gate, up and down.
#[derive(Debug)]
pub(crate) struct Dense {
    /// The only matrix before the activation in families without gates.
    pub(crate) gate: Linear,
    pub(crate) up: Option<Linear>,
    pub(crate) down: Summed,
}

/// The router, and this rank's experts.
#[derive(Debug)]
pub(crate) struct Experts {
    /// `(experts, C)`, in f32.
    pub(crate) router: Linear,
    /// `(experts,)`: bias of the router for the choice only.
    pub(crate) choice: Option<Vec<f32>>,
    /// `(C,)`: norm of the router's input, if it differs from the experts' input.
    pub(crate) router_norm: Option<Vec<f32>>,
    /// `(experts,)`: factors of the experts' weights.
    pub(crate) scales: Option<Vec<f32>>,
    /// `(1, C)`, in f32: gate of the shared expert, if this rank has both.
    pub(crate) shared_router: Option<PackedMatrix>,
    /// Index of this rank's first expert.
    pub(crate) first: usize,
    /// This rank's experts, the shared one last.
    pub(crate) experts: Vec<Arc<Expert>>,
}

/// Matrices of an expert.
#[derive(Debug)]
pub(crate) struct Expert {
    /// As [`Dense::gate`].
    pub(crate) gate: Linear,
    pub(crate) up: Option<Linear>,
    pub(crate) down: Linear,
}

/// The matrices of gate and up.
pub(crate) fn of_both<'a>(
    gate: &'a Linear,
    up: Option<&'a Linear>,
) -> impl Iterator<Item = &'a PackedMatrix> {
    [gate].into_iter().chain(up).map(|linear| &linear.matrix)
}

impl Experts {
    /// Indices of this rank's experts.
    pub(crate) fn own(&self) -> Range<usize> {
        self.first..self.first + self.experts.len()
    }

    /// Matrices whose input is a normed row.
    fn of_normed(&self) -> impl Iterator<Item = &PackedMatrix> {
        let experts = self.experts.iter();
        let experts = experts.flat_map(|expert| of_both(&expert.gate, expert.up.as_ref()));
        let routers = [Some(&self.router.matrix), self.shared_router.as_ref()];
        experts.chain(routers.into_iter().flatten())
    }
}

impl FeedForward {
    /// Matrices whose input is a normed row.
    fn of_normed(&self) -> Vec<&PackedMatrix> {
        let dense = self.opt_dense().into_iter();
        let dense = dense.flat_map(|dense| of_both(&dense.gate, dense.up.as_ref()));
        let experts = self.experts().into_iter().flat_map(Experts::of_normed);
        dense.chain(experts).collect()
    }

    /// Bytes of the down projections.
    fn down_bytes(&self) -> u64 {
        let experts = self.experts().into_iter().flat_map(|own| &own.experts);
        let experts: u64 = experts.map(|expert| expert.down.matrix.bytes().0).sum();
        self.down().map_or(0, Summed::bytes) + experts
    }

    /// The dense down projection, if there is one.
    pub(crate) fn down(&self) -> Option<&Summed> {
        self.opt_dense().map(|dense| &dense.down)
    }

    const fn opt_dense(&self) -> Option<&Dense> {
        match self {
            Self::Dense(dense) | Self::Both(dense, _) => Some(dense),
            Self::Experts(_) | Self::Nothing => None,
        }
    }

    /// # Panics
    /// If it has only experts.
    pub(crate) const fn dense(&self) -> &Dense {
        self.opt_dense().expect("a layer with experts only")
    }

    /// `None` without experts.
    pub(crate) const fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Dense(_) | Self::Nothing => None,
            Self::Experts(experts) | Self::Both(_, experts) => Some(experts),
        }
    }
}

/// A matrix in the mapped files. Embeddings are read from it row by row.
#[derive(Debug)]
pub enum StoredTensor {
    /// One tensor of rows.
    Whole(Tensor),
    /// Separate values and scales, in MLX's layout or in another.
    Mlx(Quantised),
}

impl StoredTensor {
    /// The name in the file.
    fn name(&self) -> &str {
        match self {
            Self::Whole(tensor) => &tensor.name,
            Self::Mlx(matrix) => &matrix.name,
        }
    }

    /// The rows `rows`, without a copy.
    ///
    /// # Panics
    /// If the matrix has fewer.
    pub fn row_range(&self, rows: Range<usize>) -> Self {
        match self {
            Self::Whole(tensor) => {
                let row = tensor.bytes.len() / tensor.rows();
                let own = tensor.bytes.slice(rows.start * row..rows.end * row);
                Self::Whole(Tensor {
                    name: tensor.name.clone(),
                    shape: vec![rows.len(), tensor.cols()],
                    bytes: own.expect("the rows are of the matrix"),
                    ..*tensor
                })
            }
            Self::Mlx(matrix) => {
                let own = matrix.row_range(rows);
                Self::Mlx(own.expect("the rows are of the matrix"))
            }
        }
    }

    /// The same with separate parts only as MLX has them; others are joined in memory.
    pub fn for_mlx(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Mlx(matrix) if !matrix.scheme.mode.is_mlx() => Self::Whole(matrix.joined()?),
            other => other,
        })
    }

    /// Waits until all of it is downloaded, so that later reads do not block.
    pub fn arrived(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Whole(tensor) => Self::Whole(Tensor {
                bytes: tensor.bytes.arrived()?,
                ..tensor
            }),
            Self::Mlx(matrix) => Self::Mlx(matrix.arrived()?),
        })
    }

    /// The first scale, or float weight, that is infinite or NaN.
    fn not_finite(&self, pool: &ThreadPool) -> Option<f32> {
        match self {
            Self::Whole(tensor) => not_finite(tensor.block_type, &tensor.bytes, pool),
            Self::Mlx(matrix) if !matrix.scheme.mode.is_mlx() => joined_not_finite(matrix, pool),
            Self::Mlx(matrix) => {
                let scales = match (&matrix.biases, is_bf16(matrix.block_type)) {
                    (None, _) => return matrix.scales.contains(&u8::MAX).then_some(f32::NAN),
                    (_, true) => BlockType::BF16,
                    (_, false) => BlockType::F16,
                };
                let parts = [Some(&matrix.scales), matrix.biases.as_ref()];
                let mut parts = parts.into_iter().flatten();
                parts.find_map(|part| not_finite(scales, part, pool))
            }
        }
    }

    /// Writes the stored embedding of `token`, `(width,)`.
    pub fn row(&self, token: u32, out: &mut [f32]) {
        match self {
            Self::Whole(tensor) => {
                let bytes = tensor.block_type.row_bytes(out.len());
                let bytes = bytes.expect("checked at load");
                let row = &tensor.bytes[token as usize * bytes..][..bytes];
                storage::dequantise(tensor.block_type, row, out);
            }
            Self::Mlx(matrix) => {
                let mut block = [0; BLOCK_BYTES_MAX];
                let block = &mut block[..matrix.block_type.bytes()];
                let len = matrix.block_type.len();
                for (i, values) in out.chunks_exact_mut(len).enumerate() {
                    matrix.block(token as usize, i, block);
                    storage::dequantise(matrix.block_type, block, values);
                }
            }
        }
    }
}

/// Reads a model's weights by role, checked against its configuration.
#[derive(Clone, Copy, Debug)]
pub struct WeightReader<'a> {
    pub source: &'a ModelSource,
    pub config: &'a Config,
}

impl WeightReader<'_> {
    fn family(&self) -> ModelFamily {
        self.config.family
    }

    /// A matrix `(out, in)` without a copy. Waits until all of it is downloaded, so that later
    /// reads do not block.
    pub fn as_stored(&self, role: Role, shape: [usize; 2]) -> Result<StoredTensor, Error> {
        self.located(role, shape)?.arrived()
    }

    /// As [`as_stored`](Self::as_stored), without waiting for a download.
    pub fn located(&self, role: Role, shape: [usize; 2]) -> Result<StoredTensor, Error> {
        if let Some(matrix) = self.source.quantised(self.family(), role)? {
            let got = [matrix.rows, matrix.cols];
            check_sizes(&matrix.name, &got, &shape)?;
            return Ok(StoredTensor::Mlx(matrix));
        }
        self.matrix(role, shape).map(StoredTensor::Whole)
    }

    /// A matrix `(out, in)` as one tensor; MLX's parts are joined in memory.
    pub(crate) fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<Tensor, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        check_shape(&tensor, &shape)?;
        Ok(tensor)
    }

    /// Bias `(n,)` of a matrix. Required for queries, keys and values of qwen2 and for more of
    /// gpt-oss; optional in other files.
    pub fn bias(&self, role: Role, n: usize) -> Result<Option<Vec<f32>>, Error> {
        let needed = match role {
            Role::Layer(_, LayerRole::Query | LayerRole::Key | LayerRole::Value) => {
                self.family().has_qkv_biases()
            }
            Role::Layer(_, LayerRole::AttentionOutput | LayerRole::Router) => {
                self.family().has_sinks_and_biases()
            }
            _ => false,
        };
        let bias = if needed {
            Some(self.source.bias(self.family(), role)?)
        } else {
            self.source.opt_bias(self.family(), role)?
        };
        bias.map(|bias| vector(&bias, n)).transpose()
    }

    /// Bias `(n,)` of one expert's matrix.
    pub fn expert_bias(&self, role: Role, nth: Nth, n: usize) -> Result<Option<Vec<f32>>, Error> {
        let Some((biases, first, step)) = self.source.expert_biases(self.family(), role)? else {
            return match self.family().has_sinks_and_biases() {
                true => self.source.bias(self.family(), role).map(|_| None),
                false => Ok(None),
            };
        };
        check_shape(&biases, &[nth.of, n * step])?;
        let mut all = vec![0.0; n * step];
        let row = biases.bytes.len() / nth.of;
        let own = biases.bytes.slice(nth.index * row..(nth.index + 1) * row);
        let own = own.expect("a row of the matrix").arrived()?;
        storage::dequantise(biases.block_type, &own, &mut all);
        Ok(Some(all.into_iter().skip(first).step_by(step).collect()))
    }

    /// A vector `(n,)` of finite numbers.
    pub fn finite(&self, role: Role, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        let values = vector(&tensor, n)?;
        match values.iter().find(|value| !value.is_finite()) {
            None => Ok(values),
            Some(bad) => Err(Error::NotFinite {
                name: tensor.name,
                got: *bad,
            }),
        }
    }

    /// Refuses a router `(experts, C)` with weights or biases that are not finite: its choice would
    /// depend on the processor.
    pub fn check_router(&self, role: Role, shape: [usize; 2]) -> Result<(), Error> {
        let stored = self.as_stored(role, shape)?;
        let bad = |values: &[f32]| values.iter().copied().find(|x| !x.is_finite());
        let mut row = vec![0.0; shape[1]];
        let rows = (0..shape[0] as u32).map(|expert| {
            stored.row(expert, &mut row);
            bad(&row)
        });
        let weight = rows.flatten().next();
        let bias = self.bias(role, shape[0])?;
        match weight.or_else(|| bad(bias.as_deref().unwrap_or(&[]))) {
            None => Ok(()),
            Some(got) => Err(Error::NotFinite {
                name: stored.name().to_owned(),
                got,
            }),
        }
    }

    /// Whether heads have norms.
    pub fn norms_heads(&self, layer: usize) -> Result<bool, Error> {
        match self.config.head_norms {
            Some(norms) => Ok(norms),
            None => {
                let role = Role::Layer(layer, LayerRole::QueryNorm);
                Ok(self.source.opt_weight(self.family(), role)?.is_some())
            }
        }
    }

    /// Weights `(n,)` of a norm.
    pub fn norm(&self, role: Role, n: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.weight(self.family(), role)?;
        let mut weights = vector(&tensor, n)?;
        if self.config.norm_offset != 0.0 {
            weights
                .iter_mut()
                .for_each(|w| *w += self.config.norm_offset);
        }
        if role == Role::OutputNorm && self.config.logit_scale != 1.0 {
            let scale = self.config.logit_scale;
            weights.iter_mut().for_each(|w| *w *= scale);
        }
        Ok(weights)
    }

    /// Weights and biases `(n,)` of a norm that subtracts the mean.
    pub fn layer_norm(&self, role: Role, n: usize) -> Result<[Vec<f32>; 2], Error> {
        let bias = self.bias(role, n)?.unwrap_or_else(|| vec![0.0; n]);
        Ok([self.norm(role, n)?, bias])
    }

    /// Weights of the router's own norm, with its divisor.
    pub fn router_norm(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let width = self.config.width;
        let scale = self.finite(Role::Layer(layer, LayerRole::RouterScale), width)?;
        let root = 1.0 / (width as f32).sqrt();
        Ok(scale.into_iter().map(|x| x * root).collect())
    }

    /// Factor of a layer's residual, if the file has one.
    pub fn output_scale(&self, layer: usize) -> Result<Option<f32>, Error> {
        let role = Role::Layer(layer, LayerRole::OutputScale);
        match self.source.opt_weight(self.family(), role)? {
            None => Ok(None),
            Some(_) => Ok(self.finite(role, 1)?.first().copied()),
        }
    }

    /// Whether the output head is the embedding.
    pub fn is_tied(&self) -> Result<bool, Error> {
        match self.config.tied {
            Some(tied) => Ok(tied),
            None => {
                let own = self.source.opt_weight(self.family(), Role::Output)?;
                Ok(own.is_none())
            }
        }
    }
}

/// Whether MLX stores scales as bfloat16.
fn is_bf16(block_type: BlockType) -> bool {
    block_type.name().ends_with("BF16")
}

/// Bytes per task of the search for non-finite values: large against the cost of a task.
const LOOKED_AT: usize = 1 << 18;

/// As [`stored::not_finite`], on all threads. With several non-finite values, the reported one may
/// vary.
fn not_finite(block_type: BlockType, bytes: &[u8], pool: &ThreadPool) -> Option<f32> {
    let part = LOOKED_AT / block_type.bytes() * block_type.bytes();
    let found = Mutex::new(None);
    pool.run(bytes.len().div_ceil(part), &|i| {
        let part = &bytes[i * part..bytes.len().min((i + 1) * part)];
        if let Some(bad) = storage::not_finite(block_type, part) {
            *lock(&found) = Some(bad);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// As [`not_finite`], of a matrix that is joined for it, some rows at a time.
fn joined_not_finite(matrix: &Quantised, pool: &ThreadPool) -> Option<f32> {
    let found = Mutex::new(None);
    pool.run(matrix.rows.div_ceil(ROWS_JOINED), &|i| {
        let first = i * ROWS_JOINED;
        let rows = ROWS_JOINED.min(matrix.rows - first);
        let blocks = rows * matrix.cols / matrix.block_type.len();
        let mut joined = vec![0; blocks * matrix.block_type.bytes()];
        matrix.join(first, &(0..matrix.cols), &mut joined);
        if let Some(bad) = storage::not_finite(matrix.block_type, &joined) {
            *lock(&found) = Some(bad);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Rows per task when joining: a hundred kilobytes of an 8B model, and many tasks per matrix.
const ROWS_JOINED: usize = 64;

/// Loads and packs one rank's weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardLoader<'a> {
    pub(crate) names: WeightReader<'a>,
    pub(crate) config: &'a Config,
    pub(crate) shard: &'a Shard,
    pub(crate) class: KernelClass,
    pub(crate) pool: &'a ThreadPool,
    /// Whether only as many experts of a layer are packed as a row uses; every row is then routed
    /// to these.
    pub(crate) few_experts: bool,
    /// Packed weights on disk.
    pub(crate) packed: Option<&'a PackedFile>,
}

impl ShardLoader<'_> {
    pub(crate) fn embedding(&self) -> Result<StoredTensor, Error> {
        let shape = [self.config.vocab, self.config.width];
        self.names.as_stored(Role::TokenEmbedding, shape)
    }

    /// Per-layer embeddings of the model, with the projection for this rank's layers; `None`
    /// without.
    pub(crate) fn per_layer_inputs(&self) -> Result<Option<PerLayerInputs>, Error> {
        let (c, held) = (self.config, &self.shard.layers);
        let (p, all) = (c.per_layer, c.per_layer * c.layers.len());
        if p == 0 {
            return Ok(None);
        }
        let mine = held.start * p..held.end * p;
        let projection = self.rows(Role::PerLayerProjection, [all, c.width], mine)?;
        Ok(Some(PerLayerInputs {
            embedding: self
                .names
                .as_stored(Role::PerLayerEmbedding, [c.per_layer_vocab, all])?,
            projection: projection.matrix,
            norm: self.names.norm(Role::PerLayerNorm, p)?,
        }))
    }

    /// Per-layer embedding weights of a layer.
    fn per_layer(&self, layer: usize) -> Result<Option<PerLayer>, Error> {
        let (p, width) = (self.config.per_layer, self.config.width);
        if p == 0 {
            return Ok(None);
        }
        let role = |part| Role::Layer(layer, part);
        Ok(Some(PerLayer {
            gate: self.whole(role(LayerRole::PerLayerGate), [p, width], false)?,
            output: self.whole(role(LayerRole::PerLayerOutput), [width, p], false)?,
            norm: self.names.norm(role(LayerRole::PostPerLayerNorm), width)?,
        }))
    }

    /// Norms of a dense feed-forward with parallel experts.
    fn beside(&self, layer: usize) -> Result<Option<ParallelExpertNorms>, Error> {
        if !self.config.layers[layer].dense_beside {
            return Ok(None);
        }
        let norm = |part| self.names.norm(Role::Layer(layer, part), self.config.width);
        Ok(Some(ParallelExpertNorms {
            dense: norm(LayerRole::DenseNorm)?,
            before: norm(LayerRole::BesideNorm)?,
            after: norm(LayerRole::PostBesideNorm)?,
        }))
    }

    /// Feed-forward part of a layer.
    fn feed_forward(&self, layer: usize) -> Result<FeedForward, Error> {
        let (shape, cut) = (&self.config.layers[layer], self.shard.layer(layer));
        if !shape.has_feed_forward() {
            return Ok(FeedForward::Nothing);
        }
        let experts = shape.experts;
        let experts = experts.map(|of| self.experts(layer, of, cut.ffn()));
        Ok(match experts.transpose()?.map(Box::new) {
            None => FeedForward::Dense(self.dense(layer)?),
            Some(experts) if shape.dense_beside => FeedForward::Both(self.dense(layer)?, experts),
            Some(experts) => FeedForward::Experts(experts),
        })
    }

    /// Gate, up and down of a layer.
    fn dense(&self, layer: usize) -> Result<Dense, Error> {
        let (width, ffn) = (self.config.width, self.config.layers[layer].ffn);
        let cut = self.shard.layer(layer).dense();
        let role = |part| Role::Layer(layer, part);
        let rows = |part| self.rows(role(part), [ffn, width], cut.columns());
        Ok(Dense {
            gate: rows(LayerRole::Gate)?,
            up: self.gated(|| rows(LayerRole::Up))?,
            down: self.summed(role(LayerRole::Down), ffn, cut)?,
        })
    }

    /// `up` of a feed-forward or expert, in families with gates.
    fn gated(&self, up: impl FnOnce() -> Result<Linear, Error>) -> Result<Option<Linear>, Error> {
        self.config.family.has_gates().then(up).transpose()
    }

    pub(crate) fn output(&self, tied: bool) -> Result<Linear, Error> {
        self.output_rows(tied, self.shard.vocab())
    }

    /// Some rows of the output head.
    pub(crate) fn output_rows(&self, tied: bool, rows: Range<usize>) -> Result<Linear, Error> {
        let role = if tied {
            Role::TokenEmbedding
        } else {
            Role::Output
        };
        let shape = [self.config.vocab, self.config.width];
        self.rows(role, shape, rows)
    }

    /// Norm before the output head; empty in models of gated residual streams.
    pub(crate) fn output_norm(&self) -> Result<Vec<f32>, Error> {
        match self.config.streams {
            // The mix of gated streams has norms.
            Some(of) if of.rule == StreamRule::Gated => Ok(Vec::new()),
            _ => self.names.norm(Role::OutputNorm, self.config.width),
        }
    }

    /// Says what the next matrices belong to, for streaming.
    fn set_unit(&self, unit: Option<StreamUnit>) {
        if let Some(packed) = self.packed {
            packed.set_unit(unit);
        }
    }

    pub(crate) fn layer(&self, i: usize) -> Result<LayerShard, Error> {
        self.set_unit(Some(StreamUnit::Layer(i)));
        let layer = self.layer_matrices(i);
        self.set_unit(None);
        layer
    }

    fn layer_matrices(&self, i: usize) -> Result<LayerShard, Error> {
        let (c, shape, cut) = (self.config, &self.config.layers[i], self.shard.layer(i));
        let k = shape.kv_heads * shape.head_dim;
        let (out, v) = (
            shape.heads * shape.output_dim(),
            shape.kv_heads * shape.value_dim,
        );
        let role = |part| Role::Layer(i, part);
        let rows = |part, all, mine| self.rows(role(part), [all, c.width], mine);
        let latent = shape.latent.map(|latent| self.latent(i, latent));
        let of_heads = |heads: &Range<usize>, dim| heads.start * dim..heads.end * dim;
        let of_kv = |there: bool, part, all, dim| {
            let mine = || rows(part, all, of_heads(&cut.kv_heads, dim));
            there.then(mine).transpose()
        };
        let norm = |part, n| self.names.norm(role(part), n);
        let opt_norm = |there: bool, part, n| there.then(|| norm(part, n)).transpose();
        let [before, after] = [
            c.family.norms_before_halves(),
            c.family.norms_after_halves(),
        ];
        let [query_norm, key_norm] = self.query_key_norms(i)?;
        let ([query, key, value], delta_net) = match (shape.cache, shape.latent) {
            (LayerCache::Delta(net), _) => {
                let ([q, k, v], net) = self.delta_net(i, net)?;
                ([Some(q), Some(k), Some(v)], Some(Box::new(net)))
            }
            (_, Some(latent)) => {
                let query = self.latent_query(i, latent)?;
                ([Some(query), None, None], None)
            }
            _ => {
                let [query, key, value] = shape.input_roles();
                let each = (1 + usize::from(shape.gated)) * shape.head_dim;
                let all = shape.heads * each;
                let of = [
                    Some(rows(query, all, of_heads(&cut.heads, each))?),
                    of_kv(shape.has_keys(), key, k, shape.head_dim)?,
                    of_kv(shape.has_values(), value, v, shape.value_dim)?,
                ];
                (of, None)
            }
        };
        Ok(LayerShard {
            streams: self.layer_streams(i)?.map(Box::new),
            attention_norm: opt_norm(before, LayerRole::AttentionNorm, c.width)?,
            query: query.expect("every layer has queries"),
            key,
            value,
            latent: latent.transpose()?.map(Box::new),
            pooled: self.pool_indexer(i)?.map(Box::new),
            delta_net,
            conv_taps: self.conv_taps(i)?,
            attention_output: self.summed(role(shape.output_role()), out, &cut.attention)?,
            query_norm,
            key_norm,
            sinks: self.sinks(i)?,
            post_attention_norm: opt_norm(after, LayerRole::PostAttentionNorm, c.width)?,
            ffn_norm: opt_norm(
                before && shape.has_feed_forward(),
                LayerRole::FfnNorm,
                c.width,
            )?,
            feed_forward: self.feed_forward(i)?,
            post_ffn_norm: opt_norm(after, LayerRole::PostFfnNorm, c.width)?,
            value_norm: shape.value_norm.then(|| vec![1.0; shape.value_dim]),
            beside: self.beside(i)?,
            per_layer: self.per_layer(i)?,
            output_scale: self.names.output_scale(i)?,
        })
    }

    /// Norms of queries and keys: per head, or this rank's part of a norm over all heads.
    fn query_key_norms(&self, layer: usize) -> Result<[Option<Vec<f32>>; 2], Error> {
        let (c, shape, cut) = (
            self.config,
            &self.config.layers[layer],
            self.shard.layer(layer),
        );
        let norm = |part, n| self.names.norm(Role::Layer(layer, part), n);
        let dim = shape.head_dim;
        if c.family.norms_projections() {
            let of = |part, all: usize, mine: &Range<usize>| {
                let whole = norm(part, all * dim)?;
                Ok::<_, Error>(Some(whole[mine.start * dim..mine.end * dim].to_vec()))
            };
            return Ok([
                of(LayerRole::QueryNorm, shape.heads, &cut.heads)?,
                of(LayerRole::KeyNorm, shape.kv_heads, &cut.kv_heads)?,
            ]);
        }
        if matches!(shape.cache, LayerCache::Delta(_) | LayerCache::Conv(_)) {
            return Ok([None, None]);
        }
        let there = self.names.norms_heads(layer)?;
        let of = |there: bool, part| there.then(|| norm(part, dim)).transpose();
        Ok([
            of(there, LayerRole::QueryNorm)?,
            of(there && shape.has_kv(), LayerRole::KeyNorm)?,
        ])
    }

    /// Attention sinks of this rank's heads.
    fn sinks(&self, layer: usize) -> Result<Option<Vec<f32>>, Error> {
        if !self.config.family.has_sinks_and_biases() {
            return Ok(None);
        }
        let heads = self.shard.layer(layer).heads.clone();
        let role = Role::Layer(layer, LayerRole::Sinks);
        let all = self.names.finite(role, self.config.layers[layer].heads)?;
        Ok(Some(all[heads].to_vec()))
    }

    /// Expert `e` of a layer; the index after the last is the shared one.
    fn expert(&self, layer: usize, of: config::Experts, e: usize) -> Result<Expert, Error> {
        let width = self.config.width;
        let nth = Nth {
            index: e,
            of: of.count,
        };
        let routed = (e < of.count).then_some(nth);
        let linear = |part, shape: [usize; 2]| {
            let role = Role::Layer(layer, part);
            let bias = routed.map(|nth| self.names.expert_bias(role, nth, shape[0]));
            self.check_finite(role, shape)?;
            Ok::<_, Error>(Linear {
                matrix: self.whole(role, shape, false)?,
                bias: bias.transpose()?.flatten(),
            })
        };
        let ([gate, up, down], ffn) = match routed {
            Some(nth) => (
                [
                    LayerRole::ExpertGate,
                    LayerRole::ExpertUp,
                    LayerRole::ExpertDown,
                ]
                .map(|part| part(nth)),
                of.width,
            ),
            None => (
                [
                    LayerRole::SharedGate,
                    LayerRole::SharedUp,
                    LayerRole::SharedDown,
                ],
                of.shared,
            ),
        };
        Ok(Expert {
            gate: linear(gate, [ffn, width])?,
            up: self.gated(|| linear(up, [ffn, width]))?,
            down: linear(down, [width, ffn])?,
        })
    }

    /// Experts `mine` of a layer; the index after the last is the shared one.
    fn experts(
        &self,
        layer: usize,
        of: config::Experts,
        mine: Range<usize>,
    ) -> Result<Experts, Error> {
        let width = self.config.width;
        let role = |part| Role::Layer(layer, part);
        let router = |part, rows| {
            let shape = [rows, width];
            self.names.check_router(role(part), shape)?;
            self.whole(role(part), shape, true)
        };
        let expert = |e| {
            self.set_unit(Some(StreamUnit::Expert(layer, e)));
            let expert = self.expert(layer, of, e);
            self.set_unit(Some(StreamUnit::Layer(layer)));
            expert
        };
        let gated = of.shared > 0 && of.shared_gate;
        let has_gate = gated && mine.end == of.leaves() && !mine.is_empty();
        Ok(Experts {
            router: Linear {
                matrix: router(LayerRole::Router, of.count)?,
                bias: match self.few_experts {
                    false => self.names.bias(role(LayerRole::Router), of.count)?,
                    true => Some(sampled_experts::preferring(of)),
                },
            },
            // It could outweigh the bias that selects the packed few.
            choice: (of.corrected && !self.few_experts)
                .then(|| self.names.finite(role(LayerRole::RouterChoice), of.count))
                .transpose()?,
            router_norm: of
                .scaled
                .then(|| self.names.router_norm(layer))
                .transpose()?,
            scales: of
                .scaled
                .then(|| self.names.finite(role(LayerRole::ExpertScales), of.count))
                .transpose()?,
            shared_router: has_gate
                .then(|| router(LayerRole::SharedRouter, 1))
                .transpose()?,
            first: mine.start,
            experts: match self.few_experts {
                false => mine
                    .map(|e| expert(e).map(Arc::new))
                    .collect::<Result<_, _>>()?,
                true => sampled_experts::experts(of, mine, expert)?,
            },
        })
    }

    /// Refuses an expert's matrix with values that are not finite. A row routed to it would become
    /// NaN, while all other rows, even in the same batch, would look right.
    fn check_finite(&self, role: Role, shape: [usize; 2]) -> Result<(), Error> {
        if self.packed.is_some_and(PackedFile::is_complete) {
            return Ok(()); // checked when they were packed
        }
        let stored = self.names.as_stored(role, shape)?;
        match stored.not_finite(self.pool) {
            None => Ok(()),
            Some(got) => Err(Error::NotFinite {
                name: stored.name().to_owned(),
                got,
            }),
        }
    }

    /// Packs a whole matrix; `as_f32` overrides the class.
    fn whole(&self, role: Role, shape: [usize; 2], as_f32: bool) -> Result<PackedMatrix, Error> {
        let part = (0..shape[0], 0..shape[1]);
        self.packed(role, shape, part, |stored, mut options| {
            options.as_f32 |= as_f32;
            self.matrix(stored, 0..stored.cols, options)
        })
    }

    /// Packs the rows `mine` of a matrix and releases its file pages.
    fn rows(&self, role: Role, shape: [usize; 2], mine: Range<usize>) -> Result<Linear, Error> {
        let bias = self.names.bias(role, shape[0])?;
        let bias = bias.map(|bias| bias[mine.clone()].to_vec());
        let part = (mine, 0..shape[1]);
        let matrix = self.packed(role, shape, part, |stored, options| {
            self.matrix(stored, 0..stored.cols, options)
        })?;
        Ok(Linear { matrix, bias })
    }

    /// Packs this rank's columns of a matrix, each root separately.
    fn summed(&self, role: Role, cols: usize, cut: &LeafCut) -> Result<Summed, Error> {
        let width = self.config.width;
        let bias = self.names.bias(role, width)?;
        let mine = cut.columns();
        // Extended to whole units: the packed form of a column depends on its whole unit.
        let held = mine.start / UNIT * UNIT..mine.end.next_multiple_of(UNIT).min(cols);
        let held = if mine.is_empty() { mine.clone() } else { held };
        let part = (0..width, held.clone());
        let roots = self.packed(role, [width, cols], part, |stored, mut options| {
            options.leaf_cols = cut.leaf_cols;
            // A matrix from the file has all columns, a joined one only those of `held`.
            let before = if stored.cols == cols { 0 } else { held.start };
            let root = |columns: Range<usize>| {
                let first_col = columns.start - mine.start;
                let columns = columns.start - before..columns.end - before;
                Ok((first_col, self.matrix(stored, columns, options)?))
            };
            cut.root_columns().into_iter().map(root).collect()
        })?;
        Ok(Summed { roots, bias })
    }

    /// Finds a matrix, checks its shape, packs the rows of `part` and releases the file's pages.
    /// The packed matrix has all columns, or those of `part` if it had to be joined.
    fn packed<T>(
        &self,
        role: Role,
        shape: [usize; 2],
        (rows, cols): (Range<usize>, Range<usize>),
        pack: impl Fn(StoredMatrix<'_>, PackOptions) -> Result<T, paceline_tensor::Error>,
    ) -> Result<T, Error> {
        let options = PackOptions {
            leaf_cols: 0,
            as_f32: self.class == KernelClass::CpuF32,
        };
        match self.names.located(role, shape)? {
            StoredTensor::Whole(tensor) => {
                // While the file downloads, only these rows must have arrived.
                let row = tensor.bytes.len().checked_div(shape[0]).unwrap_or(0);
                let mine = tensor.bytes.slice(rows.start * row..rows.end * row);
                let mine = mine.expect("the rows are of the matrix").arrived()?;
                let part = StoredMatrix {
                    block_type: tensor.block_type,
                    rows: rows.len(),
                    cols: shape[1],
                    bytes: &mine,
                };
                let packed = pack(part, options);
                tensor.bytes.discard();
                packed.map_err(|source| pack_error(&tensor.name, source))
            }
            StoredTensor::Mlx(matrix) => {
                let mut part = StoredMatrix {
                    block_type: matrix.block_type,
                    rows: rows.len(),
                    cols: cols.len(),
                    bytes: &[],
                };
                // A damaged record needs the stored bytes after all.
                if self.packed.is_some_and(PackedFile::is_complete)
                    && let Ok(packed) = pack(part, options)
                {
                    return Ok(packed);
                }
                let joined = self.joined(&matrix, rows.clone(), &cols)?;
                part.bytes = &joined;
                let packed = pack(part, options);
                packed.map_err(|source| pack_error(&matrix.name, source))
            }
        }
    }

    /// Packs columns of a matrix, or reads them from the packed weights on disk.
    fn matrix(
        &self,
        stored: StoredMatrix<'_>,
        columns: Range<usize>,
        options: PackOptions,
    ) -> Result<PackedMatrix, paceline_tensor::Error> {
        let pack = || PackedMatrix::of_columns(stored, columns.clone(), options, self.pool);
        match self.packed {
            Some(file) => file.matrix(stored, (columns.clone(), options), self.pool, pack),
            None => pack(),
        }
    }

    /// Joins a part of a matrix that is stored in separate tensors, on all threads.
    fn joined(
        &self,
        matrix: &Quantised,
        rows: Range<usize>,
        cols: &Range<usize>,
    ) -> Result<MappedBytes, Error> {
        // While the file downloads, only these rows must have arrived.
        let own = matrix.row_range(rows.clone());
        let own = own.expect("the rows are of the matrix").arrived()?;
        let row_bytes = cols.len() / matrix.block_type.len() * matrix.block_type.bytes();
        let len = rows.len() * row_bytes; // 0 for a rank without a part; maps are never empty
        let bytes = MappedBytes::filled(len.max(1), |out| {
            let out = &mut out[..len];
            let n = rows.len().div_ceil(ROWS_JOINED);
            let parts = out.chunks_mut((ROWS_JOINED * row_bytes).max(1));
            let parts = Mutex::new(parts.enumerate());
            self.pool.run(n, &|_| {
                let next = lock(&parts).next();
                if let Some((i, part)) = next {
                    own.join(i * ROWS_JOINED, cols, part);
                }
            });
        });
        matrix.discard();
        let bytes = bytes.map(|bytes| bytes.slice(0..len).expect("all but the filling"));
        bytes.map_err(|error| {
            let tensor = matrix.name.clone();
            paceline_weights::hf::Error::Memory { tensor, error }.into()
        })
    }
}

pub(crate) fn pack_error(name: &str, source: paceline_tensor::Error) -> Error {
    Error::Pack {
        name: name.to_owned(),
        source,
    }
}

/// Divides the frequencies of full attention by the file's factors, if it has them: `rope_freqs`,
/// or `LongRoPE`'s factors of short and of long contexts.
pub fn read_rope_factors(source: &ModelSource, config: &mut Config) -> Result<(), Error> {
    let [usual, short, long] = [
        Role::RopeFactors,
        Role::ShortRopeFactors,
        Role::LongRopeFactors,
    ]
    .map(|role| rope_factors(source, config, role));
    let mut rope = config.ropes[0].clone();
    if let (Some(short), Some(long), Some(context)) = (short?, long?, rope.long.take()) {
        let frequencies = rope.clone().with_factors(&long).frequencies;
        rope = rope.with_factors(&short);
        rope.long = Some(LongContext {
            frequencies: LongFrequencies::Fixed(frequencies),
            ..context
        });
        config.ropes[0] = rope;
    } else if let Some(factors) = usual? {
        config.ropes[0] = rope.with_factors(&factors);
    }
    Ok(())
}

/// Factors of the frequencies of full attention, if the file has them.
fn rope_factors(
    source: &ModelSource,
    config: &Config,
    role: Role,
) -> Result<Option<Vec<f32>>, Error> {
    let Some(tensor) = source.opt_weight(config.family, role)? else {
        return Ok(None);
    };
    let pairs = config.ropes[0].frequencies.len();
    let factors = vector(&tensor, pairs)?;
    let usable = |factor: &f32| factor.is_finite() && f64::from(*factor) >= MIN_DIVISOR;
    if let Some(bad) = factors.iter().find(|factor| !usable(factor)) {
        return Err(Error::Value {
            field: "rope factor",
            got: bad.to_string(),
            expected: Cow::Borrowed("0.001 or more"),
        });
    }
    Ok(Some(factors))
}

pub(crate) fn check_shape(tensor: &Tensor, expected: &[usize]) -> Result<(), Error> {
    check_sizes(&tensor.name, &tensor.shape, expected)
}

fn check_sizes(name: &str, got: &[usize], expected: &[usize]) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape {
        name: name.to_owned(),
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

pub(crate) fn vector(tensor: &Tensor, n: usize) -> Result<Vec<f32>, Error> {
    check_shape(tensor, &[n])?;
    let bytes = tensor.bytes.clone().arrived()?;
    let mut out = vec![0.0; n];
    storage::dequantise(tensor.block_type, &bytes, &mut out);
    Ok(out)
}

impl LayerShard {
    pub(crate) fn bytes(&self) -> Bytes {
        let rows = self.of_normed().into_iter().map(|matrix| matrix.bytes().0);
        let latent = self.latent.iter().flat_map(|latent| {
            let query = latent.query_down.is_some().then_some(&self.query.matrix);
            let index = latent.indexer.iter().map(|own| &own.query.matrix);
            let expanded = latent.keys.iter().chain(&latent.values);
            expanded.chain(query).chain(index)
        });
        let own = self.per_layer.iter().map(|own| &own.output);
        let net = self
            .delta_net
            .iter()
            .flat_map(|net| net.of_downs())
            .flatten();
        let mixes = self.streams.as_ref().map_or(0, |streams| streams.bytes());
        let more: u64 = latent
            .chain(own)
            .chain(net)
            .map(|matrix| matrix.bytes().0)
            .sum();
        Bytes(
            rows.sum::<u64>()
                + more
                + mixes
                + self.attention_output.bytes()
                + self.feed_forward.down_bytes(),
        )
    }

    /// Matrices whose input is as wide as the residual.
    pub(crate) fn of_normed(&self) -> Vec<&PackedMatrix> {
        let Self {
            query,
            key,
            value,
            latent,
            pooled,
            delta_net,
            feed_forward,
            per_layer,
            streams,
            ..
        } = self;
        let compressed = latent
            .as_ref()
            .and_then(|latent| latent.query_down.as_ref());
        let query = compressed.map_or(query, |(down, _)| down);
        let down = latent.as_ref().map(|latent| &latent.down);
        let more = [key.as_ref(), value.as_ref(), down].into_iter().flatten();
        let linears = [query].into_iter().chain(more).map(|linear| &linear.matrix);
        let net = delta_net.iter().flat_map(|net| net.matrices());
        let index = latent.iter().flat_map(|latent| &latent.indexer);
        let index = index.flat_map(|own| [&own.key.matrix, &own.weights.matrix]);
        let pools = pooled
            .iter()
            .flat_map(|own| [Some(&own.query_key), own.key.as_ref()]);
        let pools = pools.flatten().map(|linear| &linear.matrix);
        let gate = per_layer.iter().map(|own| &own.gate);
        let alternation = streams.iter().filter_map(|streams| streams.alternation());
        linears
            .chain(net)
            .chain(index)
            .chain(pools)
            .chain(feed_forward.of_normed())
            .chain(gate)
            .chain(alternation.flat_map(Alternation::of_width))
            .collect()
    }
}
