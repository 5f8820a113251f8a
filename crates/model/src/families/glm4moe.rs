//! GLM 4.5 to 4.7. The first layers are dense. The router is a sigmoid with a choice bias, and the
//! shared expert has no gate. Half of each head is rotated; some models have norms on heads.
//! Source: GLM-4.5 Team 2025; `src/models/glm4-moe.cpp` of llama.cpp, `modeling_glm4_moe.py` of
//! transformers.

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(10_000.0).of_part(0.5);

pub(super) const NAMES: FileNames = FileNames {
    gguf_ffn_norm: "post_attention_norm", // despite its name, before the feed-forward
    shared: "mlp.shared_experts",
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Glm4Moe, fields)?;
    config
        .layers
        .truncate(fields.decoder_layers(config.layers.len())?);
    config.head_norms = fields.glm_head_norms()?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    let experts = fields.sigmoid_experts("n_routed_experts", config.ffn)?;
    let experts = fields.with_ungated_shared(experts)?;
    let dense = fields.dense_layers(1)?;
    for layer in config.layers.iter_mut().skip(dense) {
        layer.experts = Some(experts);
    }
    Ok(config)
}
