//! Mistral, Ministral and Ministral 3 (the text part of Mistral 3): Llama with a sliding window in
//! all layers, in some, or in none. Queries of Ministral 3 grow with their position. Source: Jiang
//! et al. 2023; `src/models/mistral3.cpp` of llama.cpp, `modeling_mistral.py` and
//! `modeling_ministral3.py` of transformers.

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Mistral, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 10_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    if let ConfigFields::Gguf { .. } = fields {
        config.ropes[0].magnitude = 1.0; // both factors of YaRN are equal
    }
    config.query_growth = fields.growth()?;
    fields.set_mistral_windows(&mut config)?;
    Ok(config)
}
