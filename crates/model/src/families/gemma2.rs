//! Gemma 2. Every second layer has a sliding window. Each half of a layer has norms before and
//! after. Embeddings are scaled, the activation is GELU, scores and logits have soft caps. Source:
//! Gemma Team 2024; `src/models/gemma2.cpp` of llama.cpp, `modeling_gemma2.py` of transformers.

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

/// Every second layer attends to all positions.
const PATTERN: usize = 2;

const ROPE: RopeKind = RopeKind::halves(10_000.0);

pub(super) const NAMES: FileNames = FileNames {
    hf_ffn_norm: "pre_feedforward_layernorm",
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Gemma2, fields)?;
    config.embedding_scale = (config.width as f32).sqrt();
    config.norm_offset = fields.gemma_norm_offset();
    config.softcap = fields.gemma2_cap("final_logit_softcapping", 30.0)?;
    config.attention_cap = fields.gemma2_cap("attn_logit_softcapping", 50.0)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    let query_scale = 1.0 / fields.gemma2_query_scalar(&config)?.sqrt();
    let window = fields.window()?;
    let windowed = fields.windowed(config.layers.len(), PATTERN)?;
    for (layer, windowed) in config.layers.iter_mut().zip(windowed) {
        layer.query_scale = query_scale;
        layer.window = windowed.then_some(window);
    }
    Ok(config)
}
