//! DBRX. Norms subtract the mean. Queries, keys and values are one matrix and are clamped. The
//! router is a softmax; the weights of the chosen experts are scaled to sum 1. Source:
//! `src/models/dbrx.cpp` of llama.cpp, `modeling_dbrx.py` of transformers.

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(10_000.0);

pub(super) const NAMES: FileNames = FileNames {
    gguf_ffn_norm: "attn_output_norm", // despite its name, before the feed-forward
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Dbrx, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    config.clamp_qkv = fields.clamp_qkv()?;
    let normalised = fields.dbrx_normalises()?;
    let experts = fields.experts("moe_num_experts", config.ffn, normalised)?;
    config
        .layers
        .iter_mut()
        .for_each(|layer| layer.experts = Some(experts));
    Ok(config)
}
