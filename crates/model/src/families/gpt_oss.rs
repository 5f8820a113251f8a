//! gpt-oss. Every second layer has a sliding window; heads have attention sinks; `YaRN`; all
//! matrices have biases. Expert weights are a softmax over the chosen experts, and experts have a
//! clamped gate. Source: OpenAI 2025; `src/models/openai-moe.cpp` of llama.cpp,
//! `modeling_gpt_oss.py` of transformers.

use super::{ConfigFields, ExpertLayout, FileNames, ModelFamily, RopeKind};
use crate::config::Gating;
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(150_000.0);

pub(super) const NAMES: FileNames = FileNames {
    gguf_ffn_norm: "post_attention_norm", // despite its name, before the feed-forward
    router: "mlp.router",
    mlx_experts: "mlp.experts",
    stacks: ExpertLayout::Alternate,
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::GptOss, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    let mut experts = fields.experts("num_local_experts", config.ffn, false)?;
    experts.gating = Gating::OfChosen;
    experts.clamp = Some(fields.gpt_oss_clamp()?);
    let window = fields.window()?;
    let windowed = fields.windowed(config.layers.len(), 2)?;
    for (layer, windowed) in config.layers.iter_mut().zip(windowed) {
        layer.experts = Some(experts);
        layer.window = windowed.then_some(window);
    }
    Ok(config)
}
