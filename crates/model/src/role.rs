//! Roles of weights: names independent of the file format.
//!
//! `source` maps a [`Role`] to the tensor name in GGUF and Hugging Face files.

/// A weight of a model, by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `(vocabulary, width)`
    TokenEmbedding,
    /// `(width,)`
    OutputNorm,
    /// `(vocabulary, width)`; absent when tied to the embedding.
    Output,
    /// `(head_dim / 2,)`: divisors of the rotary frequencies; absent in most files.
    RopeFactors,
    /// The same for contexts up to the original one (`LongRoPE`).
    ShortRopeFactors,
    /// The same for longer contexts.
    LongRopeFactors,
    /// `(vocabulary, layers * P)`: per-layer embeddings.
    PerLayerEmbedding,
    /// `(layers * P, width)`: projection of the token embedding onto them.
    PerLayerProjection,
    /// `(P,)`: norm of each layer's part of the projection.
    PerLayerNorm,
    /// The residual streams behind the embedding and before the output head.
    Streams(StreamPart),
    Layer(usize, LayerRole),
}

/// A weight of S residual streams. Matrices of a gated mix have rank R.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamPart {
    /// `(S C,)`: the norms of all streams.
    Norm,
    /// `(R, S C)`
    Down,
    /// `(S C, R)`: weights of the streams in the mix.
    Up,
    /// `(S, S C)`: weights of the half's output in the streams; none before the output head.
    Inject,
    /// `(C,)`, of alternating streams, like all variants that follow.
    RouterNorm,
    /// `(S, C)`
    Router,
    /// `(S S, S)`
    Predict,
    /// `(S, S)`
    Correct,
    /// `(C,)`: factors of the corrected first stream.
    OutputScale,
    /// `(C, C)`: from the embedding to stream i + 1.
    Expand(usize),
    /// `(C, C)`: from stream i + 1 to the output.
    Collapse(usize),
    /// `(1, C)`, of attended streams, like the next: scores.
    Scores,
    /// `(C,)`: norm of the input of these.
    ScoreNorm,
    /// `(2 S + S S, S C)`, of constrained streams, like all variants that follow. Weights of the
    /// half's input and output, and of the mix; `(S, S C)` before the output head.
    Weigh,
    /// `(2 S + S S,)`: bias of each; `(S,)` before the output head.
    WeighBias,
    /// `(3,)`: factor of each kind; `(1,)` before the output head.
    WeighScale,
}

/// Index of an expert or a head, and how many the layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nth {
    pub index: usize,
    pub of: usize,
}

/// A weight of a layer, by role. C is the width, H heads, K KV heads, D head size, F feed-forward
/// width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerRole {
    /// `(C,)`, before attention.
    AttentionNorm,
    /// The mix of residual streams before attention.
    AttentionStreams(StreamPart),
    /// The same before the feed-forward.
    FfnStreams(StreamPart),
    /// `(R, C)`: the low-rank path parallel to attention (Gemma 3n).
    LaurelDown,
    /// `(C, R)`
    LaurelUp,
    /// `(C,)`
    LaurelNorm,
    /// `(H D, C)`
    Query,
    /// `(K D, C)`
    Key,
    /// `(K D, C)`
    Value,
    /// `(C, H D)`
    AttentionOutput,
    /// `(H E, C)`: gates of the attention output, in a matrix of their own (Kimi K3).
    AttentionGate,
    /// `(D,)`, per head; `(H D,)` over all heads (MiniMax).
    QueryNorm,
    /// `(D,)`, per head; `(K D,)` over all heads (MiniMax).
    KeyNorm,
    /// `(H,)`: attention sink, a score of each head without a value (gpt-oss).
    Sinks,
    /// `(C,)`, on the attention output (gemma).
    PostAttentionNorm,
    /// `(C,)`, before the feed-forward.
    FfnNorm,
    /// `(F, C)`
    Gate,
    /// `(F, C)`
    Up,
    /// `(C, F)`
    Down,
    /// `(C,)`, on the feed-forward output (gemma).
    PostFfnNorm,
    /// `(experts, C)`
    Router,
    /// `(experts,)`: bias of the router for the choice only.
    RouterChoice,
    /// `(expert F, C)`, of one expert; GGUF files stack all of them.
    ExpertGate(Nth),
    /// As `ExpertGate`.
    ExpertUp(Nth),
    /// `(C, expert F)`, as `ExpertGate`.
    ExpertDown(Nth),
    /// `(1, C)`, or `(C,)` in GGUF files: the gate of the shared expert.
    SharedRouter,
    /// `(shared F, C)`
    SharedGate,
    /// `(shared F, C)`
    SharedUp,
    /// `(C, shared F)`
    SharedDown,
    /// `(L, C)`: input of routed experts of width L (Kimi K3).
    ExpertsDown,
    /// `(L,)`: norm of their sum.
    ExpertsNorm,
    /// `(C, L)`: output of their sum.
    ExpertsUp,
    /// `(compressed, C)`: compression of queries.
    QueryDown,
    /// `(compressed,)`
    QueryDownNorm,
    /// `(H (plain + turned), compressed)`
    QueryUp,
    /// `(latent + turned, C)`: the vector of a position that all heads share.
    LatentDown,
    /// `(latent,)`
    LatentNorm,
    /// `(H (plain + value), latent)`: expansion to keys and values, key then value of each head.
    /// Newer GGUF files and MLX folders have the next two instead.
    LatentUp,
    /// `(latent, plain)` of one head: expansion to keys, transposed.
    KeyUp(Nth),
    /// `(value, latent)` of one head.
    ValueUp(Nth),
    /// `(I X, compressed)`: index queries, I of X elements; `((I + 1) X, C)` with the key (Qwen 4).
    IndexerQuery,
    /// `(X, C)`: index key.
    IndexerKey,
    /// `(X,)`, with a bias: norm of index keys. Without one where these are of pools.
    IndexerNorm,
    /// `(X,)`: norm of index queries.
    IndexerQueryNorm,
    /// `(I, C)`: weights of index queries.
    IndexerWeights,
    /// `(X, C)`: gates of a pool's inputs, where index keys are of pools of positions (GLM 5.3).
    IndexerGate,
    /// `(pool, X)`: biases of these.
    IndexerGateBias,
    /// `(G R, H D / G)`: the output of each group of heads, compressed (DeepSeek V4).
    GroupOutput,
    /// `(N D, C)`: inputs of compressed keys, or with `true` of compressed index keys.
    RunInput(bool),
    /// `(N D, C)`: gates of these.
    RunGate(bool),
    /// `(run, N D)`: bias of each position's gate.
    RunBias(bool),
    /// `(D,)`: norm of compressed keys.
    RunNorm(bool),
    /// `(vocabulary, used experts)`, integers: the experts of each token.
    ExpertTable,
    /// `(C,)`: norm of the router's input (Gemma 4).
    RouterScale,
    /// `(experts,)`: factor of each expert's weight (Gemma 4).
    ExpertScales,
    /// `(C,)`: norm of the dense feed-forward's output, in layers with parallel experts.
    DenseNorm,
    /// `(C,)`: norm of the input of parallel experts.
    BesideNorm,
    /// `(C,)`: norm of the output of parallel experts.
    PostBesideNorm,
    /// `(P, C)`, on the residual; P is the width of the per-layer embeddings.
    PerLayerGate,
    /// `(C, P)`, back to the residual.
    PerLayerOutput,
    /// `(C,)`: norm of the per-layer output.
    PostPerLayerNorm,
    /// `(1,)`: factor of the residual after the layer.
    OutputScale,
    /// `(rows, D)`: table of a memory of n-grams, like all variants up to its taps.
    NgramTable,
    /// Rows of it: this part of several.
    NgramTablePart(usize),
    /// `(S C, E)`; in some files the first rows of a matrix with values behind them.
    NgramKey,
    /// `(C, E)`
    NgramValue,
    /// `(S C,)`, of streams.
    NgramQueryNorm,
    /// `(S C,)`
    NgramKeyNorm,
    /// `(S C,)`: norm of the convolution's inputs.
    NgramConvNorm,
    /// `(S C, taps)`, with a dimension of 1.
    NgramTaps,
    /// Gated delta net, like all variants that follow. `(2 K D + H E, C)`: queries, keys and
    /// values.
    DeltaQkv,
    /// `(H E, C)`: output gates.
    DeltaGate,
    /// `(2 K D + 2 H E, C)`: per key head query, key, values and gates.
    DeltaQkvGate,
    /// `(H, C)`: beta, the fraction of a difference written to the state.
    DeltaStep,
    /// `(H, C)`: decay of the state.
    DeltaDecay,
    /// `(2 H, C)`: per key head steps and decays.
    DeltaStepDecay,
    /// `(2 K D + H E, taps)`, in some files with a dimension of 1.
    DeltaConv,
    /// `(H,)`: bias of the decay's input.
    DeltaBias,
    /// `(H,)`: factor of the decay in GGUF files; its logarithm otherwise.
    DeltaScale,
    /// `(E,)`: norm of each head's output.
    DeltaNorm,
    /// `(C, H E)`
    DeltaOutput,
    /// `(D, C)` of Kimi delta attention: inputs of gates, whose matrix has D columns.
    DeltaGateDown,
    /// `(D, C)`: the same of decays.
    DeltaDecayDown,
    /// `(K D, taps)`: the convolution of queries, where each has its own.
    DeltaQueryConv,
    /// `(K D, taps)`: of keys.
    DeltaKeyConv,
    /// `(H E, taps)`: of values.
    DeltaValueConv,
    /// `(2 H E + 2 K D + H, C)` of Mamba 2: gates, values, keys, queries and steps. Its other
    /// weights are those of a gated delta net.
    MambaInput,
    /// `(H,)`: factor of the value in the result.
    MambaSkip,
    /// Short convolution, like all variants that follow. `(C, C)`: gates of its result.
    ConvQuery,
    /// `(C, C)`: gates of its input.
    ConvKey,
    /// `(C, C)`: its input.
    ConvValue,
    /// `(C, taps)`, in some files with a dimension of 1.
    ConvTaps,
    /// `(C, C)`
    ConvOutput,
}

impl LayerRole {
    /// Gate, up and down of an expert. Index `of` is that of the shared one.
    pub const fn of_expert(nth: Nth) -> [Self; 3] {
        if nth.index == nth.of {
            return [Self::SharedGate, Self::SharedUp, Self::SharedDown];
        }
        [
            Self::ExpertGate(nth),
            Self::ExpertUp(nth),
            Self::ExpertDown(nth),
        ]
    }

    /// The expert whose matrix this is. The shared one is behind `count` others.
    pub const fn expert_among(self, count: usize) -> Option<usize> {
        match self {
            Self::ExpertGate(nth) | Self::ExpertUp(nth) | Self::ExpertDown(nth) => Some(nth.index),
            Self::SharedGate | Self::SharedUp | Self::SharedDown => Some(count),
            _ => None,
        }
    }

    /// The same matrix of another routed expert.
    pub fn of_other(self, other: impl Fn(Nth) -> Nth) -> Self {
        match self {
            Self::ExpertGate(nth) => Self::ExpertGate(other(nth)),
            Self::ExpertUp(nth) => Self::ExpertUp(other(nth)),
            Self::ExpertDown(nth) => Self::ExpertDown(other(nth)),
            same => same,
        }
    }

    /// The same part of a layer whose number of experts is unknown, as names in files have it.
    pub(crate) fn uncounted(self) -> Self {
        self.of_other(|nth| Nth { of: 0, ..nth })
    }
}
