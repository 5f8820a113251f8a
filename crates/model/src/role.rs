//! Weights by their purpose, whatever files call them.

/// A weight of a model, by its purpose.
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
    /// `(vocabulary, layers * P)`: the embeddings that each layer has of its own.
    PerLayerEmbedding,
    /// `(layers * P, width)`: what a token's embedding adds to these.
    PerLayerProjection,
    /// `(P,)`, on each layer's part of what that gives.
    PerLayerNorm,
    /// A weight of a layer.
    Layer(usize, Part),
}

/// An expert or a head of a layer, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nth {
    /// Which, from 0.
    pub index: usize,
    /// How many there are.
    pub of: usize,
}

/// A weight of a layer, by its purpose. C is the width, H heads, K KV heads, D their size, F the
/// feed-forward width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `(C,)`, before attention.
    AttentionNorm,
    /// `(H D, C)`
    Query,
    /// `(K D, C)`
    Key,
    /// `(K D, C)`
    Value,
    /// `(C, H D)`
    AttentionOutput,
    /// `(D,)`, per head; `(H D,)` over all heads (MiniMax).
    QueryNorm,
    /// `(D,)`, per head; `(K D,)` over all heads (MiniMax).
    KeyNorm,
    /// `(H,)`: a score of each head without a value (gpt-oss).
    Sinks,
    /// `(C,)`, on the attention's result (gemma).
    PostAttentionNorm,
    /// `(C,)`, before the feed-forward.
    FfnNorm,
    /// `(F, C)`
    Gate,
    /// `(F, C)`
    Up,
    /// `(C, F)`
    Down,
    /// `(C,)`, on the feed-forward's result (gemma).
    PostFfnNorm,
    /// `(experts, C)`
    Router,
    /// `(experts,)`: added to weights for the choice alone.
    RouterChoice,
    /// `(expert F, C)`, of one expert; all of them lie behind each other in GGUF files.
    ExpertGate(Nth),
    /// As the gate.
    ExpertUp(Nth),
    /// `(C, expert F)`, as the gate.
    ExpertDown(Nth),
    /// `(1, C)`, or `(C,)` in GGUF files: the gate of the shared expert.
    SharedRouter,
    /// `(shared F, C)`
    SharedGate,
    /// `(shared F, C)`
    SharedUp,
    /// `(C, shared F)`
    SharedDown,
    /// `(compressed, C)`: of queries, where these are compressed first.
    QueryDown,
    /// `(compressed,)`
    QueryDownNorm,
    /// `(H (plain + turned), compressed)`
    QueryUp,
    /// `(latent + turned, C)`: what all heads share of a position.
    LatentDown,
    /// `(latent,)`
    LatentNorm,
    /// `(H (plain + value), latent)`: the expansion to keys and values, behind each other for each
    /// head. Newer GGUF files and MLX's have it as the next two instead.
    LatentUp,
    /// `(latent, plain)` of one head: its part of the expansion to keys, turned.
    KeyUp(Nth),
    /// `(value, latent)` of one head.
    ValueUp(Nth),
    /// `(C,)`, on what goes into the router (Gemma 4).
    RouterScale,
    /// `(experts,)`: a factor of the weight of each (Gemma 4).
    ExpertScales,
    /// `(C,)`, on the result of a feed-forward that has experts beside it.
    DenseNorm,
    /// `(C,)`, before experts that have a feed-forward beside them.
    BesideNorm,
    /// `(C,)`, on the result of these.
    PostBesideNorm,
    /// `(P, C)`, on the residual; P is the width of a layer's own embeddings.
    PerLayerGate,
    /// `(C, P)`, back to the residual.
    PerLayerOutput,
    /// `(C,)`, on what that gives.
    PostPerLayerNorm,
    /// `(1,)`: a factor of the residual behind the layer.
    OutputScale,
    /// Of a gated delta net, as all that follow: `(2 K D + H E, C)`, queries, keys and values.
    DeltaQkv,
    /// `(H E, C)`: gates of the values.
    DeltaGate,
    /// `(2 K D + 2 H E, C)`: for each key head query, key, values and gates.
    DeltaQkvGate,
    /// `(H, C)`: how much of a difference is taken in.
    DeltaStep,
    /// `(H, C)`: how much of the state goes.
    DeltaDecay,
    /// `(2 H, C)`: for each key head steps and decays.
    DeltaStepDecay,
    /// `(2 K D + H E, taps)`, or with a 1 between.
    DeltaConv,
    /// `(H,)`: added to what the decay comes from.
    DeltaBias,
    /// `(H,)`: the decay's factor, in GGUF files; its logarithm otherwise.
    DeltaScale,
    /// `(E,)`: the norm of each head's result.
    DeltaNorm,
    /// `(C, H E)`
    DeltaOutput,
}
