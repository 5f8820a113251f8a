//! Llama: grouped-query attention with rotary positions, SwiGLU feed-forward, RMS norms before
//! each half. Source: Touvron et al. 2023; `src/models/llama.cpp` of llama.cpp.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::{Config, Error};

/// GGUF files hold query and key rows permuted for rotation of adjacent pairs; the Hugging Face
/// layout rotates the two halves of a head.
pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Llama, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 10_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    Ok(config)
}

/// Computes a layer of Llama and its relatives; shapes of one batch of T rows. An operation whose
/// weights or limits a family lacks does nothing.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D), with biases
    step.clamp_qkv()?; //                      q, k, v in place
    if step.norms_heads(w) {
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
    }
    step.rotate(index)?; //                    q, k in place, or the first part of each head
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C), with bias
    step.scale_delta()?; //                    delta *= the model's factor
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += ffn or experts(norm(residual))
}
