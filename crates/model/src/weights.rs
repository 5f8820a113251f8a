//! Weights in memory: packed matrices, norms and biases, checked against the configuration.
//!
//! [`ShardLoader`] reads the parts of one rank from a [`ModelSource`](crate::ModelSource) and packs
//! them for the kernels. [`WeightReader`] is the unpacked, checked access, which MLX shares.

use std::ops::Range;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_tensor::PackedMatrix;

mod alternating;
mod compressed;
mod delta_net;
mod indexer;
mod latent;
mod loader;
mod ngrams;
mod packing;
mod pooled;
mod reader;
mod sampled_experts;
mod stored;
mod streams;

pub(crate) use delta_net::DeltaNet;
pub use delta_net::{DeltaMatrices, DeltaRowLayout, DeltaVectors, MatrixRows};
pub use reader::{WeightReader, read_rope_factors};
pub use stored::StoredTensor;

pub(crate) use alternating::Alternation;
pub(crate) use compressed::Compressed;
pub(crate) use indexer::Indexer;
pub(crate) use latent::Latent;
pub(crate) use loader::ShardLoader;
pub(crate) use ngrams::NgramMemory;
pub(crate) use packing::pack_error;
pub(crate) use pooled::PoolIndexer;
use reader::finite_vector;
pub(crate) use reader::{check_shape, vector};
pub(crate) use streams::{ConstrainedMix, HeadStreams, LayerStreams, StreamMix};

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
    /// For attention to compressed keys.
    pub(crate) compressed: Option<Box<Compressed>>,
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
    /// For a memory of n-grams.
    pub(crate) ngrams: Option<Box<NgramMemory>>,
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
    /// `(vocabulary, k)`: the experts of each token, where the router does not choose.
    pub(crate) table: Option<Vec<u32>>,
    /// `(C,)`: norm of the router's input, if it differs from the experts' input.
    pub(crate) router_norm: Option<Vec<f32>>,
    /// `(experts,)`: factors of the experts' weights.
    pub(crate) scales: Option<Vec<f32>>,
    /// `(1, C)`, in f32: gate of the shared expert, if this rank has both.
    pub(crate) shared_router: Option<PackedMatrix>,
    /// To compressed rows and back; whole on every rank.
    pub(crate) compression: Option<Box<ExpertCompression>>,
    /// Index of this rank's first expert.
    pub(crate) first: usize,
    /// This rank's experts, the shared one last.
    pub(crate) experts: Vec<Arc<Expert>>,
}

/// Matrices around experts of compressed rows.
#[derive(Debug)]
pub(crate) struct ExpertCompression {
    /// `(L, C)`
    pub(crate) down: PackedMatrix,
    /// `(L,)`: norm of the sum over experts.
    pub(crate) norm: Option<Vec<f32>>,
    /// `(C, L)`
    pub(crate) up: PackedMatrix,
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
        let compression = self.compression.as_ref().map(|own| &own.down);
        let experts = self.experts.iter().filter(move |_| compression.is_none());
        let experts = experts.flat_map(|expert| of_both(&expert.gate, expert.up.as_ref()));
        let router = Some(&self.router.matrix);
        let others = [router, self.shared_router.as_ref(), compression];
        experts.chain(others.into_iter().flatten())
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

    /// Bytes of the down projections, and of what else reads no normed row.
    fn down_bytes(&self) -> u64 {
        let own = self.experts();
        let compression = own.and_then(|own| own.compression.as_ref());
        let experts = own.into_iter().flat_map(|own| &own.experts);
        let inner = experts.clone().filter(|_| compression.is_some());
        let inner = inner.flat_map(|expert| of_both(&expert.gate, expert.up.as_ref()));
        let downs = experts.map(|expert| &expert.down.matrix);
        let more = downs.chain(inner).chain(compression.map(|own| &own.up));
        let more: u64 = more.map(|matrix| matrix.bytes().0).sum();
        self.down().map_or(0, Summed::bytes) + more
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

impl LayerShard {
    pub(crate) fn bytes(&self) -> Bytes {
        let rows = self.of_normed().into_iter().map(|matrix| matrix.bytes().0);
        let latent = self.latent.iter().flat_map(|latent| {
            let query = latent.query_down.is_some().then_some(&self.query.matrix);
            let index = latent.indexer.iter().map(|own| &own.query.matrix);
            let expanded = latent.keys.iter().chain(&latent.values);
            expanded.chain(query).chain(index)
        });
        let compressed = self.compressed.iter().flat_map(|own| {
            let queries = own.of_query().chain([&self.query.matrix]);
            queries.chain(&own.outputs)
        });
        let latent = latent.chain(compressed);
        let own = self.per_layer.iter().map(|own| &own.output);
        let net = self
            .delta_net
            .iter()
            .flat_map(|net| net.of_downs())
            .flatten();
        let ngrams = self.ngrams.iter().flat_map(|own| own.matrices());
        let mixes = self.streams.as_ref().map_or(0, |streams| streams.bytes());
        let more: u64 = latent
            .chain(own)
            .chain(net)
            .chain(ngrams)
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
            compressed: runs,
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
        let query = match runs {
            Some(_) => None, // from compressed queries
            None => Some(query),
        };
        let runs = runs.iter().flat_map(|own| own.of_width());
        let down = latent.as_ref().map(|latent| &latent.down);
        let gates = latent.as_ref().and_then(|latent| latent.gate.as_ref());
        let more = [key.as_ref(), value.as_ref(), down, gates];
        let more = more.into_iter().flatten();
        let linears = query.into_iter().chain(more).map(|linear| &linear.matrix);
        let net = delta_net.iter().flat_map(|net| net.matrices());
        let index = latent.iter().flat_map(|latent| &latent.indexer);
        let index = index.flat_map(|own| {
            let gate = own.gate.iter().map(|(matrix, _)| matrix);
            [&own.key.matrix, &own.weights.matrix]
                .into_iter()
                .chain(gate)
        });
        let pools = pooled
            .iter()
            .flat_map(|own| [Some(&own.query_key), own.key.as_ref()]);
        let pools = pools.flatten().map(|linear| &linear.matrix);
        let gate = per_layer.iter().map(|own| &own.gate);
        let alternation = streams.iter().filter_map(|streams| streams.alternation());
        linears
            .chain(net)
            .chain(index)
            .chain(runs)
            .chain(pools)
            .chain(feed_forward.of_normed())
            .chain(gate)
            .chain(alternation.flat_map(Alternation::of_width))
            .collect()
    }
}
