//! Gemma 4, text only.
//!
//! - Layers with a sliding window and layers with full attention have different head sizes.
//! - Values have a norm without weights.
//! - The last layers use the KV caches of earlier ones.
//! - Some models have per-layer embeddings, and experts in parallel to the feed-forward.
//! - Logits have a soft cap.
//!
//! Source: `src/models/gemma4.cpp` of llama.cpp, `modeling_gemma4.py` of transformers.

use super::{ConfigFields, ExpertLayout, FileNames, Half, LayerStep, ModelFamily, RopeKind};
use crate::{Config, Error, LayerCache, LayerShape};

/// Every sixth layer attends to all positions.
const PATTERN: usize = 6;

/// Rotary sets in [`Config::ropes`].
const FULL: usize = 0;
const WINDOWED: usize = 1;

const ROPE: RopeKind = RopeKind {
    proportional: Some(0.25),
    ..RopeKind::halves(1_000_000.0)
};

pub(super) const NAMES: FileNames = FileNames {
    hf_ffn_norm: "pre_feedforward_layernorm",
    router: "router.proj",
    mlx_experts: "experts.switch_glu",
    stacks: ExpertLayout::Behind,
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    fields.check_gemma4()?;
    let mut config = Config::base(ModelFamily::Gemma4, fields)?;
    config.embedding_scale = (config.width as f32).sqrt();
    config.softcap = fields.final_softcap()?;
    config.per_layer = fields.per_layer_width()?;
    let (window, n) = (fields.window()?, config.layers.len());
    let windowed = fields.windowed(n, PATTERN)?;
    let heads = fields.gemma4_heads(&config)?;
    let experts = fields.gemma4_experts()?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        let (own, window, rope) = match windowed[i] {
            true => (heads.windowed, Some(window), WINDOWED),
            false => (heads.full, None, FULL),
        };
        (layer.window, layer.rope, layer.query_scale) = (window, rope, 1.0);
        (layer.head_dim, layer.value_dim, layer.value_norm) = (own.size, own.size, true);
        layer.kv_heads = own.kv_heads.unwrap_or(layer.kv_heads);
        layer.keys_as_values = fields.has_keys_as_values(i, windowed[i]);
        (layer.experts, layer.dense_beside) = (experts, experts.is_some());
    }
    share_caches(&mut config, fields, &windowed)?;
    config.head_dim = heads.full.size;
    let full = fields.rope(&config, ROPE)?;
    config.head_dim = heads.windowed.size;
    config.ropes = vec![full, fields.gemma_window_rope(&config)?];
    // The sizes of the first layer are the model's defaults.
    let LayerShape {
        head_dim,
        kv_heads,
        ffn,
        ..
    } = config.layers[0];
    (config.head_dim, config.kv_heads, config.ffn) = (head_dim, kv_heads, ffn);
    Ok(config)
}

/// Gives the last layers the cache of the last earlier layer of their kind.
pub(super) fn share_caches(
    config: &mut Config,
    fields: &ConfigFields<'_>,
    windowed: &[bool],
) -> Result<(), Error> {
    let shared = fields.shared_caches(config.layers.len())?;
    let own = config.layers.len() - shared.count;
    for i in own..config.layers.len() {
        let of = (0..own).rev().find(|of| windowed[*of] == windowed[i]);
        let layer = &mut config.layers[i];
        layer.cache = LayerCache::Of(of.ok_or_else(|| shared.without_keeper(i))?);
        if shared.doubles_width {
            layer.ffn *= 2;
        }
        layer.keys_as_values = false;
    }
    Ok(())
}

/// Computes a layer of Gemma 2, 3 and 4; shapes of one batch of T rows. An operation whose weights
/// a family lacks does nothing.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    if step.norms_heads(w) {
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
    }
    step.norm_values(w)?; //                   v (T, K, D) in place, over D
    step.rotate(index)?; //                    q, k in place, by the layer's own base
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.norm_delta(w, Half::Attention)?; //   delta (T, C) in place
    step.add_delta()?; //                      residual += delta
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       gelu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    if step.has_experts(w) {
        step.set_aside(w)?; //                 norm(delta) -> aside (T, C)
        step.norm(w, Half::ParallelExperts)?; //        residual (T, C) -> x (T, C)
        step.experts(w)?; //                   x, residual for the router -> delta (T, C)
        step.norm_delta(w, Half::ParallelExperts)?; //  delta (T, C) in place
        step.add_aside()?; //                  delta += aside
    }
    step.norm_delta(w, Half::FeedForward)?; // delta (T, C) in place
    step.add_delta()?; //                      residual += delta
    step.add_per_layer(w, index)?; //          residual += norm(project(gelu(gate residual) * own))
    step.scale_residual(w) //                  residual *= the layer's factor
}
