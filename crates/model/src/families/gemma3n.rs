//! Gemma 3n, text only.
//!
//! - A layer computes the first of several alternating residual streams.
//! - A low-rank path runs parallel to attention; values have a norm without weights.
//! - Gates of the first layers are cut by their mean and deviation.
//! - The last layers use the KV caches of earlier ones; every layer has embeddings of its own.
//!
//! Source: `modeling_gemma3n.py` of transformers; `src/models/gemma3n.cpp` of llama.cpp.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, RopeKind, gemma4};
use crate::role::{LayerRole, Role, StreamPart};
use crate::{Config, Error};

/// Every fifth layer attends to all positions.
const PATTERN: usize = 5;

/// Rotary sets in [`Config::ropes`].
const FULL: usize = 0;
const WINDOWED: usize = 1;

const ROPE: RopeKind = RopeKind::halves(1_000_000.0);

pub(super) const NAMES: FileNames = FileNames {
    hf_ffn_norm: "pre_feedforward_layernorm",
    hf_own,
    gguf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::Layer(_, LayerRole::AttentionStreams(part)) => Some(match part {
            StreamPart::RouterNorm => "altup.router_norm",
            StreamPart::Router => "altup.modality_router",
            StreamPart::Predict => "altup.prediction_coefs",
            StreamPart::Correct => "altup.correction_coefs",
            _ => "altup.correct_output_scale",
        }),
        _ => None,
    }
}

/// The matrices between streams are one tensor each, `(S - 1, C, C)`.
const fn gguf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::Streams(StreamPart::Expand(_)) => Some("altup_proj"),
        Role::Streams(StreamPart::Collapse(_)) => Some("altup_unembd_proj"),
        Role::Layer(_, LayerRole::AttentionStreams(part)) => Some(match part {
            StreamPart::RouterNorm => "altup_router_norm",
            StreamPart::Router => "altup_router",
            StreamPart::Predict => "altup_predict_coef",
            StreamPart::Correct => "altup_correct_coef",
            _ => "altup_correct_scale",
        }),
        _ => None,
    }
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Gemma3n, fields)?;
    config.embedding_scale = (config.width as f32).sqrt();
    config.softcap = fields.gemma3n_softcap()?;
    config.per_layer = fields.per_layer_width()?;
    config.per_layer_vocab = fields.per_layer_vocab(config.vocab)?;
    config.streams = Some(fields.alternating_streams()?);
    let full = fields.rope(&config, ROPE)?;
    config.ropes = vec![full, fields.gemma_window_rope(&config)?];
    let (window, n) = (fields.window()?, config.layers.len());
    let windowed = fields.windowed(n, PATTERN)?;
    let cutoffs = fields.gate_cutoffs(n)?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        (layer.query_scale, layer.value_norm) = (1.0, true);
        layer.gate_cutoff = cutoffs[i];
        (layer.window, layer.rope) = match windowed[i] {
            true => (Some(window), WINDOWED),
            false => (None, FULL),
        };
    }
    gemma4::share_caches(&mut config, fields, &windowed)?;
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows with S streams. Norms and additions are of the
/// first stream.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.predict_streams(w)?; //               residual (T, S, C) in place, its first -> active
    step.norm(w, Half::Attention)?; //         active (T, C) -> x (T, C)
    step.project_laurel(w)?; //                x (T, C) -> laurel (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_heads(w)?; //                    q (T, H, D), k (T, K, D) in place, over D
    step.norm_values(w)?; //                   v (T, K, D) in place, over D
    step.rotate(index)?; //                    q, k in place, by the layer's own base
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.norm_delta(w, Half::Attention)?; //   delta (T, C) in place
    step.add_delta()?; //                      active += delta
    step.add_laurel()?; //                     active = (active + laurel) / sqrt 2
    step.norm(w, Half::FeedForward)?; //       active (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       gelu(cut gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.norm_delta(w, Half::FeedForward)?; // delta (T, C) in place
    step.add_delta()?; //                      active += delta
    step.correct_streams(w)?; //               residual (T, S, C) += factors * (active - its first)
    step.add_per_layer(w, index) //            further streams += norm(project(gelu(gate) * own))
}
