//! Mixtral: Llama's attention; a softmax router, with the weights of the chosen experts scaled to
//! sum 1. Source: Jiang et al. 2024; `src/models/llama.cpp` of llama.cpp, `modeling_mixtral.py` of
//! transformers.

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

/// GGUF files have the architecture `llama`, with query and key rows permuted as there.
pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Mixtral, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 1_000_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    let experts = fields.experts("num_local_experts", config.ffn, true)?;
    config
        .layers
        .iter_mut()
        .for_each(|layer| layer.experts = Some(experts));
    fields.refuse_window()?;
    Ok(config)
}
