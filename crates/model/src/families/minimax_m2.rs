//! MiniMax M2 to M2.7. One norm is over all query heads and one over all key heads. A part of each
//! head is rotated. Every layer has a sigmoid router with a choice bias. Source:
//! `src/models/minimax-m2.cpp` of llama.cpp, `modeling_minimax_m2.py` of transformers.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(5_000_000.0).of_part(1.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    fields.check_minimax()?;
    let mut config = Config::base(ModelFamily::MiniMaxM2, fields)?;
    config
        .layers
        .truncate(fields.decoder_layers(config.layers.len())?);
    config.ropes = vec![fields.rope(&config, ROPE)?];
    let mut experts = fields.sigmoid_experts("num_local_experts", config.ffn)?;
    experts.normalised = true;
    for layer in &mut config.layers {
        layer.experts = Some(experts);
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_projections(w)?; //              q in place over H D, k over K D of all ranks
    step.rotate(index)?; //                    the first part of each head of q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D)
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += experts(norm(residual))
}
