//! Gemma 3, text only. Most layers have a sliding window and their own rotary base. Query and key
//! heads have norms, and each half of a layer has norms before and after. Embeddings are scaled;
//! the activation is GELU. Source: Gemma Team 2025; `src/models/gemma3.cpp` of llama.cpp,
//! `modeling_gemma3.py` of transformers.

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

/// Every sixth layer attends to all positions.
const PATTERN: usize = 6;

/// Rotary sets in [`Config::ropes`].
const FULL: usize = 0;
const WINDOWED: usize = 1;

const ROPE: RopeKind = RopeKind::halves(1_000_000.0);

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
