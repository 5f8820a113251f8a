//! Operations of a layer, which each backend implements and each family orders.

use crate::Error;

/// Half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Queries, keys, values and their projection.
    Attention,
    /// Gate, up and down.
    FeedForward,
    /// Experts in parallel to the dense feed-forward, with their own norms.
    ParallelExperts,
}

/// Operations of a layer, implemented by each backend. The implementor is a running step with this
/// rank's rows; the family's code calls the operations in order.
///
/// Operations fail only for reasons of the backend: on the CPU, only those that exchange with other
/// ranks.
pub trait LayerStep {
    /// A rank's weights of one layer.
    type Layer;

    /// residual (T, C) -> x (T, C), by the norm before a half
    fn norm(&mut self, w: &Self::Layer, half: Half) -> Result<(), Error>;

    /// residual (T, S, C) += what the last tokens choose from a table, by a gate of each stream.
    /// Nothing in layers without a memory of n-grams. Never on a backend without such memories.
    fn add_ngrams(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("the model has no memory of n-grams")
    }

    /// residual (T, S, C) -> x (T, C), by the mix before a half, with its norm, and weights (T, S)
    /// for its output. Constrained streams also get their next mix (T, S, S). As `norm` where the
    /// residual is one stream. Never on a backend without several streams.
    fn mix_streams(&mut self, _: &Self::Layer, _: Half) -> Result<(), Error> {
        unreachable!("the residual is one stream")
    }

    /// residual (T, S, C) += weights (T, S) * delta (T, C), after the mix if there is one; as
    /// `add_delta` for one stream
    fn add_to_streams(&mut self) -> Result<(), Error> {
        unreachable!("the residual is one stream")
    }

    /// residual (T, S, C) -> predicted streams in place; the layer then works on a copy of the
    /// first.
    fn predict_streams(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("the residual is one stream")
    }

    /// x (T, C) -> laurel (T, C): x and its low-rank path, normed
    fn project_laurel(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("the layer has no path parallel to attention")
    }

    /// first stream (T, C) = (first stream + laurel) / sqrt 2
    fn add_laurel(&mut self) -> Result<(), Error> {
        unreachable!("the layer has no path parallel to attention")
    }

    /// residual (T, S, C) += factors (T, S) * (first stream - its prediction)
    fn correct_streams(&mut self, _: &Self::Layer) -> Result<(), Error> {
        unreachable!("the residual is one stream")
    }

    /// residual (T, C) -> x (T, C), without a norm
    fn take_residual(&mut self) -> Result<(), Error>;

    /// x (T, C) -> q (T, H D), k, v (T, K D)
    fn project_qkv(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Clamps q, k and v in place, if the model has a limit.
    fn clamp_qkv(&mut self) -> Result<(), Error>;

    /// Norms every head of q (T, H, D) and k (T, K, D) in place.
    fn norm_heads(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the weights of head norms are present, in families that vary.
    fn norms_heads(&self, w: &Self::Layer) -> bool;

    /// Norms every head of v (T, K, D) in place, without weights.
    fn norm_values(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Norms q (T, H D) over all heads, and k (T, K D) over all of its heads, in place. Exchanges
    /// sums of squares with the ranks of the stage.
    fn norm_projections(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Rotates and scales q, rotates k, by the positions of the rows.
    fn rotate(&mut self, index: usize) -> Result<(), Error>;

    /// Writes k and v to the cache, then q (T, H D) -> attended (T, H D).
    fn attend(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// Latent attention: x (T, C) -> q (T, H, R + P), k (T, R + P). R latent elements, P rotated by
    /// the positions of the rows. q is scaled.
    fn project_latent(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// x (T, C), compressed queries if any -> index keys, to the cache, and the positions that rows
    /// attend to; nothing in layers without an indexer.
    fn select_positions(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// Writes k to the cache, then q -> attended (T, H V): each head's attention output in the
    /// latent space, expanded.
    fn attend_latent(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// Attention to a window and to compressed keys. x (T, C) -> keys, to the cache, and queries;
    /// these -> attended (T, G R), the compressed output of each group of heads.
    fn attend_compressed(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("the layer has no compressed keys")
    }

    /// attended (T, H D) *= sigmoid(gate of each head), if the layer has gates.
    fn gate_attention(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the layer is a short convolution; never on a backend without these.
    fn is_short_conv(&self, _: &Self::Layer) -> bool {
        false
    }

    /// Writes k * v to the cache, then q * convolution of these -> attended (T, H D).
    fn short_conv(&mut self, _: &Self::Layer, _: usize) -> Result<(), Error> {
        unreachable!("the layer is no short convolution")
    }

    /// Whether the layer is a gated delta net.
    fn is_delta_net(&self, w: &Self::Layer) -> bool;

    /// x (T, C) -> q, k (T, K D), v, gates (T, H E), and per head its step and its decay (T, H)
    fn project_delta_net(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Updates the states with q, k, v, reads them, norms and gates each head -> attended (T, H E).
    fn delta_net(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// attended (T, H D) -> delta (T, C), summed over the ranks of the stage
    fn project_attention(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Norms delta (T, C) in place, by the norm after a half.
    fn norm_delta(&mut self, w: &Self::Layer, half: Half) -> Result<(), Error>;

    /// delta (T, C) *= the model's factor, if it has one.
    fn scale_delta(&mut self) -> Result<(), Error>;

    /// residual (T, C) += delta (T, C)
    fn add_delta(&mut self) -> Result<(), Error>;

    /// x (T, C) -> gate, up (T, F)
    fn project_gate_up(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// activation(gate) * up -> hidden (T, F)
    fn activate(&mut self) -> Result<(), Error>;

    /// hidden (T, F) -> delta (T, C), summed over the ranks of the stage
    fn project_down(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the layer has a feed-forward or experts; only some families have layers without.
    fn has_feed_forward(&self, _: &Self::Layer) -> bool {
        true
    }

    /// Whether the layer has experts instead of a feed-forward.
    fn has_experts(&self, w: &Self::Layer) -> bool;

    /// Whether a dense feed-forward runs in parallel to the experts; only some families ask.
    fn has_dense_beside(&self, _: &Self::Layer) -> bool {
        false
    }

    /// x (T, C) -> delta (T, C), by the routed experts of each row, summed over the ranks of the
    /// stage
    fn experts(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// delta (T, C) -> aside (T, C), by the norm after a dense feed-forward with parallel experts,
    /// if it has one.
    fn set_aside(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// delta (T, C) += aside (T, C)
    fn add_aside(&mut self) -> Result<(), Error>;

    /// residual (T, C) += output of the per-layer embeddings; nothing without them.
    fn add_per_layer(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// residual (T, C) *= the layer's factor, if it has one.
    fn scale_residual(&mut self, w: &Self::Layer) -> Result<(), Error>;
}
