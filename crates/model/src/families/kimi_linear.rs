//! Kimi Linear and Kimi K3, text only. Most layers are Kimi delta attention: a gated delta net with
//! a decay for each element of a key. Every fourth is latent attention without rotation. Experts
//! are those of DeepSeek V3.
//!
//! Kimi K3 differs by its fields:
//!
//! - Halves of a layer attend to the residuals of earlier blocks of layers.
//! - Decays have a bound; latent attention has output gates.
//! - Routed experts read and write compressed rows; gates have bounds.
//!
//! Source: Kimi Team 2025 (Kimi Linear); `modeling_kimi_linear.py` of transformers, `kimi_k3.py` of
//! mlx-lm 0.32.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily};
use crate::role::{LayerRole, Role, StreamPart};
use crate::{Config, Error};

pub(super) const NAMES: FileNames = FileNames {
    block: "block_sparse_moe",
    expert: ["w1", "w3", "w2"],
    router: "block_sparse_moe.gate",
    choice: "block_sparse_moe.gate.e_score_correction_bias",
    shared: "block_sparse_moe.shared_experts",
    hf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    let part = match role {
        Role::Streams(StreamPart::Scores) => return Some("output_attn_res_proj"),
        Role::Streams(StreamPart::ScoreNorm) => return Some("output_attn_res_norm"),
        Role::Layer(_, part) => part,
        _ => return None,
    };
    match part {
        LayerRole::AttentionStreams(StreamPart::Scores) => Some("self_attention_res_proj"),
        LayerRole::AttentionStreams(StreamPart::ScoreNorm) => Some("self_attention_res_norm"),
        LayerRole::FfnStreams(StreamPart::Scores) => Some("mlp_res_proj"),
        LayerRole::FfnStreams(StreamPart::ScoreNorm) => Some("mlp_res_norm"),
        part => delta_name(part),
    }
}

/// Names of Kimi delta attention.
pub(super) const fn delta_name(part: LayerRole) -> Option<&'static str> {
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
    config.streams = fields.attended_streams(config.layers.len())?;
    config.activation = fields.situ()?.unwrap_or(config.activation);
    let mut experts = fields.kimi_experts(&config)?;
    let beside = experts
        .compressed
        .map(|_| std::mem::take(&mut experts.shared));
    let dense = fields.dense_of(config.layers.len())?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        layer.query_scale = 1.0 / (latent.query_dim() as f32).sqrt();
        layer.experts = (!dense).then_some(experts);
        if let (Some(shared), false) = (beside, dense) {
            (layer.ffn, layer.dense_beside) = (shared, true);
        }
    }
    fields.set_kimi_nets(&mut config)?;
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows with S streams, 1 in Kimi Linear. R latent
/// elements, V of an expanded value.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.mix_streams(w, Half::Attention)?; //  residual (T, S, C) -> x (T, C)
    if step.is_delta_net(w) {
        step.project_delta_net(w)?; //         x (T, C) -> q, k (T, H D), v, gates (T, H E), ...
        step.delta_net(w, index)?; //          q, k, v, states -> attended (T, H E)
    } else {
        step.project_latent(w)?; //            x (T, C) -> q (T, H, R + P), k (T, R + P)
        step.attend_latent(w, index)?; //      q, cache -> attended (T, H V)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_to_streams()?; //                 residual += delta
    step.mix_streams(w, Half::FeedForward)?; // residual (T, S, C) -> x (T, C)
    let has_experts = step.has_experts(w);
    let is_beside = step.has_dense_beside(w);
    if is_beside || !has_experts {
        step.project_gate_up(w)?; //           x (T, C) -> gate, up (T, F)
        step.activate()?; //                   activation(gate) * up -> hidden (T, F)
        step.project_down(w)?; //              hidden (T, F) -> delta (T, C)
    }
    if is_beside {
        step.set_aside(w)?; //                 delta (T, C) -> aside (T, C), of the shared expert
    }
    if has_experts {
        step.experts(w)?; //                   x (T, C) -> delta (T, C)
    }
    if is_beside {
        step.add_aside()?; //                  delta += aside
    }
    step.add_to_streams() //                   residual += delta
}
