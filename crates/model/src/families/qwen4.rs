//! Qwen4-Exp, text only: layers of Qwen 3.5 with experts, between hyper-connections of several
//! residual streams. Rows of its attention layers attend to pools of positions that an indexer
//! chooses. Some layers read embeddings of n-grams first. Source: Zhu et al. 2024
//! (Hyper-Connections); `modeling_qwen4_exp.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind};
use crate::role::{LayerRole, Role};
use crate::{Config, Error, LayerCache};

const ROPE: RopeKind = RopeKind::halves(10_000.0).of_part(1.0);

pub(super) const NAMES: FileNames = FileNames {
    hf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::Layer(_, LayerRole::IndexerQuery) => Some("self_attn.indexer.index_qk_proj"),
        Role::Layer(_, LayerRole::IndexerQueryNorm) => Some("self_attn.indexer.q_layernorm"),
        Role::Layer(_, LayerRole::IndexerNorm) => Some("self_attn.indexer.k_layernorm"),
        Role::Layer(_, LayerRole::NgramTable) => Some("ple.ple_embedding.ngram_embedding"),
        Role::Layer(_, LayerRole::NgramKey) => Some("ple.key_proj"),
        Role::Layer(_, LayerRole::NgramValue) => Some("ple.value_proj"),
        Role::Layer(_, LayerRole::NgramQueryNorm) => Some("ple.norm_query"),
        Role::Layer(_, LayerRole::NgramKeyNorm) => Some("ple.norm_key"),
        Role::Layer(_, LayerRole::NgramConvNorm) => Some("ple.norm_conv"),
        Role::Layer(_, LayerRole::NgramTaps) => Some("ple.conv1d"),
        _ => None,
    }
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen4Exp, fields)?;
    config.norm_offset = fields.gemma_norm_offset();
    config.ropes = vec![fields.rope(&config, ROPE)?];
    config.streams = Some(fields.streams()?);
    fields.set_delta_nets(&mut config)?;
    config.ngrams = fields.ngram_embeddings(&config)?;
    let pooled = fields.pool_indexer(config.ropes[0].frequencies.len())?;
    let normalised = fields.normalises_experts_or(true)?;
    let mut experts = fields.experts("num_experts", config.ffn, normalised)?;
    experts.shared = fields.shared_expert()?;
    for layer in &mut config.layers {
        layer.experts = Some(experts);
        if layer.cache == LayerCache::Rows {
            layer.pooled = Some(pooled);
        }
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows with S streams.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.add_ngrams(w, index)?; //             residual (T, S, C) += memory of the last tokens
    step.mix_streams(w, Half::Attention)?; //  residual (T, S, C) -> x (T, C), weights (T, S)
    if step.is_delta_net(w) {
        step.project_delta_net(w)?; //         x (T, C) -> q, k (T, K D), v, gates (T, H E), ...
        step.delta_net(w, index)?; //          q, k, v, states -> attended (T, H E)
    } else {
        step.project_qkv(w)?; //               x (T, C) -> q, gates (T, H D), k, v (T, K D)
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
        step.rotate(index)?; //                a part of each head of q, k in place
        step.select_positions(w, index)?; //   x, index keys -> positions of each row
        step.attend(w, index)?; //             q, cache -> attended (T, H D)
        step.gate_attention(w)?; //            attended *= sigmoid(gates)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_to_streams()?; //                 residual (T, S, C) += weights * delta
    step.mix_streams(w, Half::FeedForward)?; // residual (T, S, C) -> x (T, C), weights (T, S)
    step.experts(w)?; //                       x (T, C) -> delta (T, C)
    step.add_to_streams() //                   residual (T, S, C) += weights * delta
}
