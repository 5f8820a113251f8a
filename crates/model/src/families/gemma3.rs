//! Gemma 3, text only. Most layers have a sliding window and their own rotary base. Query and key
//! heads have norms, and each half of a layer has norms before and after. Embeddings are scaled;
//! the activation is GELU. Source: Gemma Team 2025; `src/models/gemma3.cpp` of llama.cpp,
//! `modeling_gemma3.py` of transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind};
use crate::{Config, Error};

/// Every sixth layer attends to all positions.
const PATTERN: usize = 6;

/// Rotary sets in [`Config::ropes`].
const FULL: usize = 0;
const WINDOWED: usize = 1;

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 1_000_000.0);

/// Norms before and after each half of a layer.
pub(super) const NAMES: FileNames = FileNames {
    hf_ffn_norm: "pre_feedforward_layernorm",
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Gemma3, fields)?;
    config.embedding_scale = (config.width as f32).sqrt();
    config.norm_offset = fields.gemma_norm_offset();
    let query_scale = 1.0 / fields.gemma_query_scalar(&config)?.sqrt();
    let full = fields.rope(&config, ROPE)?;
    config.ropes = vec![full, fields.gemma_window_rope(&config)?];
    config.bidirectional = fields.is_bidirectional()?;
    let window = match (fields.window()?, config.bidirectional) {
        (window, true) => window / 2 + 1, // to each side, the position itself included
        (window, false) => window,
    };
    for (i, windowed) in fields
        .windowed(config.layers.len(), PATTERN)?
        .into_iter()
        .enumerate()
    {
        let layer = &mut config.layers[i];
        layer.query_scale = query_scale;
        (layer.window, layer.rope) = if windowed {
            (Some(window), WINDOWED)
        } else {
            (None, FULL)
        };
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_heads(w)?; //                    q (T, H, D), k (T, K, D) in place, over D
    step.rotate(index)?; //                    q, k in place, by the layer's own base
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.norm_delta(w, Half::Attention)?; //   delta (T, C) in place
    step.add_delta()?; //                      residual += delta
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       gelu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.norm_delta(w, Half::FeedForward)?; // delta (T, C) in place
    step.add_delta()?; //                      residual += delta
    Ok(())
}
