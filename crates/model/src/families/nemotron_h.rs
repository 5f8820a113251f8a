//! Nemotron-H and Nemotron 3 Nano: Mamba 2, and a few layers of attention without rotation.
//!
//! A layer is one or two blocks of the file ([`blocks`](super::blocks)). Feed-forwards and experts
//! have no gate; their activation is the square of values above 0. Source: Dao and Gu 2024; NVIDIA
//! 2025 (Nemotron-H); `src/models/nemotron-h.cpp` of llama.cpp, `modeling_nemotron_h.py` of
//! transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::role::{LayerRole, Role};
use crate::{Config, Error};

pub(super) const NAMES: FileNames = FileNames {
    block: "mixer",
    expert: ["up_proj", "none", "down_proj"],
    router: "mixer.gate",
    choice: "mixer.gate.e_score_correction_bias",
    mlx_experts: "mixer.switch_mlp",
    hf_own,
    gguf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    Some(match role {
        Role::TokenEmbedding => "embeddings",
        Role::OutputNorm => "norm_f",
        Role::Layer(_, part) => match part {
            LayerRole::AttentionNorm | LayerRole::FfnNorm => "norm",
            LayerRole::Query => "mixer.q_proj",
            LayerRole::Key => "mixer.k_proj",
            LayerRole::Value => "mixer.v_proj",
            LayerRole::AttentionOutput => "mixer.o_proj",
            LayerRole::Gate => "mixer.up_proj",
            LayerRole::Down => "mixer.down_proj",
            LayerRole::SharedGate => "mixer.shared_experts.up_proj",
            LayerRole::SharedDown => "mixer.shared_experts.down_proj",
            LayerRole::MambaInput => "mixer.in_proj",
            LayerRole::MambaSkip => "mixer.D",
            LayerRole::DeltaConv => "mixer.conv1d",
            LayerRole::DeltaBias => "mixer.dt_bias",
            LayerRole::DeltaScale => "mixer.A_log",
            LayerRole::DeltaNorm => "mixer.norm",
            LayerRole::DeltaOutput => "mixer.out_proj",
            _ => return None,
        },
        _ => return None,
    })
}

const fn gguf_own(role: Role) -> Option<&'static str> {
    Some(match role {
        Role::Layer(_, LayerRole::FfnNorm) => "attn_norm",
        Role::Layer(_, LayerRole::Gate) => "ffn_up",
        Role::Layer(_, LayerRole::ExpertGate(_)) => "ffn_up_exps",
        Role::Layer(_, LayerRole::SharedGate) => "ffn_up_shexp",
        _ => return None,
    })
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::NemotronH, fields)?;
    let rope = RopeKind::halves(10_000.0);
    config.ropes = vec![fields.rope(&config, rope)?.without_turning()];
    let blocks = fields.nemotron_layers()?;
    let mamba = fields.mamba(&config.usual_layer())?;
    let has_experts = blocks.iter().any(|layer| layer.feed_forward == Some(true));
    let experts = has_experts.then(|| fields.nemotron_experts(config.ffn));
    let experts = experts.transpose()?;
    for (layer, blocks) in config.layers.iter_mut().zip(blocks) {
        let ffn = layer.ffn;
        if blocks.is_mamba {
            *layer = mamba;
        }
        layer.ffn = if blocks.feed_forward.is_some() {
            ffn
        } else {
            0
        };
        layer.experts = experts.filter(|_| blocks.feed_forward == Some(true));
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
        step.project_qkv(w)?; //               x (T, C) -> q (T, H D), k, v (T, K D)
        step.rotate(index)?; //                scales q, turns nothing
        step.attend(w, index)?; //             q, cache -> attended (T, H D)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    if step.has_feed_forward(w) {
        feed_forward(step, w)?; //             residual += ffn or experts(norm(residual))
    }
    Ok(())
}
