//! LFM2, dense and with experts. Most layers are short convolutions: of three projections, the
//! product of two is convolved over the last positions and multiplied by the third. The others are
//! attention with normed heads. Source: `src/models/lfm2.cpp` of llama.cpp, `modeling_lfm2.py` and
//! `modeling_lfm2_moe.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::role::{LayerRole, Role};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(1_000_000.0);

pub(super) const NAMES: FileNames = FileNames {
    block: "feed_forward",
    expert: ["w1", "w3", "w2"],
    router: "feed_forward.gate",
    choice: "feed_forward.expert_bias",
    mlx_experts: "feed_forward.switch_mlp",
    hf_own,
    gguf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    Some(match role {
        Role::OutputNorm => "embedding_norm",
        Role::Layer(_, part) => match part {
            LayerRole::AttentionNorm => "operator_norm",
            LayerRole::FfnNorm => "ffn_norm",
            LayerRole::AttentionOutput => "self_attn.out_proj",
            LayerRole::QueryNorm => "self_attn.q_layernorm",
            LayerRole::KeyNorm => "self_attn.k_layernorm",
            LayerRole::Gate => "feed_forward.w1",
            LayerRole::Up => "feed_forward.w3",
            LayerRole::Down => "feed_forward.w2",
            _ => return None,
        },
        _ => return None,
    })
}

const fn gguf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::OutputNorm => Some("token_embd_norm"),
        _ => None,
    }
}

pub(super) fn config(family: ModelFamily, fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(family, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    fields.set_short_convs(&mut config)?;
    if family == ModelFamily::Lfm2Moe {
        let mut experts = fields.sigmoid_experts("num_experts", config.ffn)?;
        experts.corrected = fields.corrects_lfm2_choices()?;
        let dense = fields.lfm2_dense_layers()?;
        for (i, layer) in config.layers.iter_mut().enumerate() {
            layer.experts = (i >= dense).then_some(experts);
        }
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    if step.is_short_conv(w) {
        step.short_conv(w, index)?; //         q * convolution of k * v -> attended (T, H D)
    } else {
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
        step.rotate(index)?; //                q, k in place
        step.attend(w, index)?; //             q, cache -> attended (T, H D)
    }
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += ffn or experts(norm(residual))
}
