//! Qwen3-Next and Qwen 3.5 to 3.8, text only. Every fourth layer is attention with gated heads and
//! partial rotation; the others are gated delta nets. The feed-forward is dense, or experts with a
//! shared one. Vision is not supported. Source: Yang, Kautz and Hatamizadeh 2024;
//! `src/models/qwen3next.cpp` and `qwen35.cpp` of llama.cpp, `modeling_qwen3_next.py` and
//! `modeling_qwen3_5.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(10_000.0).of_part(0.25);

pub(super) const NAMES: FileNames = FileNames {
    gguf_ffn_norm: "post_attention_norm", // despite its name, before the feed-forward
    ..FileNames::USUAL
};

pub(super) fn config(family: ModelFamily, fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(family, fields)?;
    config
        .layers
        .truncate(fields.decoder_layers(config.layers.len())?);
    config.norm_offset = fields.gemma_norm_offset();
    config.ropes = vec![fields.rope(&config, ROPE)?];
    fields.set_delta_nets(&mut config)?;
    match family {
        ModelFamily::Qwen35 => {}
        ModelFamily::Qwen3Next => {
            let normalised = fields.normalises_experts_or(true)?;
            let mut experts = fields.experts("num_experts", config.ffn, normalised)?;
            experts.shared = fields.shared_expert()?;
            fields.set_sparse_layers(&mut config, experts)?;
        }
        _ => {
            let mut experts = fields.experts("num_experts", config.ffn, true)?;
            experts.shared = fields.shared_expert()?;
            for layer in &mut config.layers {
                layer.experts = Some(experts);
            }
        }
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    if step.is_delta_net(w) {
        step.project_delta_net(w)?; //         x (T, C) -> q, k (T, K D), v, gates (T, H E), ...
        step.delta_net(w, index)?; //          q, k, v, states -> attended (T, H E)
    } else {
        step.project_qkv(w)?; //               x (T, C) -> q, gates (T, H D), k, v (T, K D)
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
        step.rotate(index)?; //                a quarter of each head of q, k in place
        step.attend(w, index)?; //             q, cache -> attended (T, H D)
        step.gate_attention(w)?; //            attended *= sigmoid(gates)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += ffn or experts(norm(residual))
}
