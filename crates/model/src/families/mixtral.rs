//! Mixtral: Llama's attention; a softmax router, with the weights of the chosen experts scaled to
//! sum 1. Source: Jiang et al. 2024; `src/models/llama.cpp` of llama.cpp, `modeling_mixtral.py` of
//! transformers.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::{Config, Error};

/// GGUF files have the architecture `llama`, with query and key rows permuted as there.
pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Mixtral, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 1_000_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    let experts = fields.experts("num_local_experts", config.ffn, true)?;
    config
        .layers
        .iter_mut()
        .for_each(|layer| layer.experts = Some(experts));
    fields.refuse_window()?;
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.rotate(index)?; //                    q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D)
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += experts(norm(residual))
}
