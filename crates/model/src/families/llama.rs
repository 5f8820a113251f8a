//! Llama and families whose configuration differs from Llama's by a few fields. Llama has
//! grouped-query attention with rotary positions, a SwiGLU feed-forward, and RMS norms before each
//! half.
//!
//! - Granite 3 and 4, dense: factors of the embedding, of scores, of each half's output, of logits.
//! - Mistral, Ministral, Ministral 3 (the text part of Mistral 3): a sliding window in all layers,
//!   in some, or in none. Queries of Ministral 3 grow with their position.
//! - SmolLM3: no rotation in every fourth layer.
//! - Mixtral: a softmax router; the weights of the chosen experts are scaled to sum 1.
//!
//! Sources: Touvron et al. 2023; Jiang et al. 2023 and 2024; `src/models/llama.cpp`, `granite.cpp`,
//! `mistral3.cpp` and `smollm3.cpp` of llama.cpp, and their `modeling` files of transformers.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
use crate::{Config, Error};

/// Rotary set of SmolLM3's layers without rotation, in [`Config::ropes`].
const STILL: usize = 1;

/// GGUF files hold query and key rows permuted for rotation of adjacent pairs; the Hugging Face
/// layout rotates the two halves of a head.
pub(super) fn config(family: ModelFamily, fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(family, fields)?;
    let base = match family {
        ModelFamily::SmolLm3 => 2_000_000.0,
        ModelFamily::Mixtral => 1_000_000.0,
        _ => 10_000.0,
    };
    let rope = RopeKind::plain(fields.permuted_pairs(), base);
    config.ropes = vec![fields.rope(&config, rope)?];
    match family {
        ModelFamily::Granite => fields.set_granite_factors(&mut config)?,
        ModelFamily::Mistral => {
            if let ConfigFields::Gguf { .. } = fields {
                config.ropes[0].magnitude = 1.0; // both factors of YaRN are equal
            }
            config.query_growth = fields.growth()?;
            fields.set_mistral_windows(&mut config)?;
        }
        ModelFamily::SmolLm3 => {
            config.ropes.push(config.ropes[0].clone().without_turning());
            let rotated = fields.rotated_layers(config.layers.len())?;
            for (layer, rotated) in config.layers.iter_mut().zip(rotated) {
                layer.rope = if rotated { 0 } else { STILL };
            }
        }
        ModelFamily::Mixtral => {
            let experts = fields.experts("num_local_experts", config.ffn, true)?;
            for layer in &mut config.layers {
                layer.experts = Some(experts);
            }
            fields.refuse_window()?;
        }
        _ => {}
    }
    Ok(config)
}

/// Computes a layer of Llama and its relatives; shapes of one batch of T rows. An operation whose
/// weights or limits a family lacks does nothing.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D), with biases
    step.clamp_qkv()?; //                      q, k, v in place
    if step.norms_heads(w) {
        step.norm_heads(w)?; //                q (T, H, D), k (T, K, D) in place, over D
    }
    step.rotate(index)?; //                    q, k in place, or the first part of each head
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C), with bias
    step.scale_delta()?; //                    delta *= the model's factor
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += ffn or experts(norm(residual))
}
