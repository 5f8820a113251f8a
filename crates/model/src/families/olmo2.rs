//! `OLMo` 2 and 3. Norms are on the outputs of both halves of a layer, not before them, and over
//! all query heads and all key heads. Three of four layers of `OLMo` 3 have a sliding window and
//! are never stretched. Source: `src/models/olmo2.cpp` of llama.cpp, `modeling_olmo2.py` and
//! `modeling_olmo3.py` of transformers.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind};
use crate::{Config, Error};

/// Every fourth layer attends to all positions.
const PATTERN: usize = 4;

/// Rotary set of layers with a window, in [`Config::ropes`].
const WINDOWED: usize = 1;

const ROPE: RopeKind = RopeKind::halves(10_000.0);
const OLMO3_BASE: f64 = 500_000.0;

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Olmo2, fields)?;
    let Some(window) = fields.olmo_window()? else {
        config.ropes = vec![fields.rope(&config, ROPE)?];
        return Ok(config);
    };
    let kind = RopeKind {
        hf_base: OLMO3_BASE,
        ..ROPE
    };
    let full = fields.rope(&config, kind)?;
    config.ropes = vec![full, fields.olmo_window_rope(&config, kind)?];
    let windowed = fields.windowed(config.layers.len(), PATTERN)?;
    for (layer, windowed) in config.layers.iter_mut().zip(windowed) {
        if windowed {
            (layer.window, layer.rope) = (Some(window), WINDOWED);
        }
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.take_residual()?; //                  residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_projections(w)?; //              q in place over H D, k over K D of all ranks
    step.rotate(index)?; //                    q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D), window or all
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.norm_delta(w, Half::Attention)?; //   delta (T, C) in place
    step.add_delta()?; //                      residual += delta
    step.take_residual()?; //                  residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       silu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.norm_delta(w, Half::FeedForward)?; // delta (T, C) in place
    step.add_delta() //                        residual += delta
}
