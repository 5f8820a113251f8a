//! Granite 3 and 4, dense: Llama with factors of the embedding, of scores, of each half's output
//! and of logits. Source: `src/models/granite.cpp` of llama.cpp, `modeling_granite.py` of
//! transformers.

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Granite, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 10_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    fields.set_granite_factors(&mut config)?;
    Ok(config)
}
