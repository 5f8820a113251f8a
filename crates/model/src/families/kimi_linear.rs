//! Kimi Linear. Most layers are Kimi delta attention: a gated delta net with a decay for each
//! element of a key. Every fourth is latent attention without rotation. Experts are those of
//! DeepSeek V3.
//!
//! Source: Kimi Team 2025 (Kimi Linear); `modeling_kimi_linear.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, feed_forward};
use crate::role::{LayerRole, Role};
use crate::{Config, Error};

pub(super) const NAMES: FileNames = FileNames {
    block: "block_sparse_moe",
    expert: ["w1", "w3", "w2"],
    router: "block_sparse_moe.gate",
    choice: "block_sparse_moe.gate.e_score_correction_bias",
    shared: "block_sparse_moe.shared_experts",
    mlx_experts: "block_sparse_moe.switch_mlp",
    hf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    let Role::Layer(_, part) = role else {
        return None;
    };
    match part {
        LayerRole::DeltaGate => Some("self_attn.g_b_proj"),
        LayerRole::DeltaDecay => Some("self_attn.f_b_proj"),
        LayerRole::DeltaStep => Some("self_attn.b_proj"),
        LayerRole::DeltaBias => Some("self_attn.dt_bias"),
        LayerRole::DeltaScale => Some("self_attn.A_log"),
        LayerRole::DeltaNorm => Some("self_attn.o_norm"),
        LayerRole::DeltaOutput => Some("self_attn.o_proj"),
        _ => None,
    }
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::KimiLinear, fields)?;
    let latent = config.latent.expect("read for this family");
    fields.check_kimi()?;
    config.ropes = vec![fields.latent_rope(&latent)?.0.without_turning()];
    let experts = fields.kimi_experts(&config)?;
    let dense = fields.dense_of(config.layers.len())?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        layer.query_scale = 1.0 / (latent.query_dim() as f32).sqrt();
        layer.experts = (!dense).then_some(experts);
    }
    fields.set_kimi_nets(&mut config)?;
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows. R latent elements, V of an expanded value.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    if step.is_delta_net(w) {
        step.project_delta_net(w)?; //         x (T, C) -> q, k (T, H D), v, gates (T, H E), ...
        step.delta_net(w, index)?; //          q, k, v, states -> attended (T, H E)
    } else {
        step.project_latent(w)?; //            x (T, C) -> q (T, H, R + P), k (T, R + P)
        step.attend_latent(w, index)?; //      q, cache -> attended (T, H V)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += ffn or experts(norm(residual))
}
