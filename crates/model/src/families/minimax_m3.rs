//! MiniMax M3, text only. Every head has a norm, and a part of it is rotated. Gates are clamped as
//! those of gpt-oss, in dense layers and shared experts too. An indexer chooses blocks of positions
//! for each KV head. Source: `modeling_minimax_m3_vl.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::role::{LayerRole, Role};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(5_000_000.0).of_part(1.0);

pub(super) const NAMES: FileNames = FileNames {
    shared: "block_sparse_moe.shared_experts",
    hf_own,
    ..FileNames::MIXTRAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::Layer(_, LayerRole::IndexerQuery) => Some("self_attn.index_q_proj"),
        Role::Layer(_, LayerRole::IndexerKey) => Some("self_attn.index_k_proj"),
        Role::Layer(_, LayerRole::IndexerQueryNorm) => Some("self_attn.index_q_norm"),
        Role::Layer(_, LayerRole::IndexerNorm) => Some("self_attn.index_k_norm"),
        _ => None,
    }
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::MiniMaxM3, fields)?;
    config.norm_offset = fields.gemma_norm_offset();
    config.ropes = vec![fields.rope(&config, ROPE)?];
    config.dense_clamp = Some(fields.gpt_oss_clamp()?);
    let indexers = fields.block_indexers(&config)?;
    let experts = fields.minimax_experts(&config)?;
    let dense = fields.minimax_dense(config.layers.len())?;
    let wide = fields.minimax_dense_width()?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        match dense {
            true => layer.ffn = wide,
            false => layer.experts = Some(experts),
        }
    }
    for (layer, pooled) in config.layers.iter_mut().zip(indexers) {
        layer.pooled = pooled;
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_heads(w)?; //                    q (T, H, D), k (T, K, D) in place, over D
    step.rotate(index)?; //                    a part of each head of q, k in place
    step.select_positions(w, index)?; //       x -> index queries, index keys to the cache
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), chosen blocks
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   dense or experts
}
