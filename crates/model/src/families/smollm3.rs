//! SmolLM3: Llama without rotation in every fourth layer. Source: `src/models/smollm3.cpp` of
//! llama.cpp, `modeling_smollm3.py` of transformers.

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

/// Rotary set of layers without rotation, in [`Config::ropes`].
const STILL: usize = 1;

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::SmolLm3, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 2_000_000.0);
    let rope = fields.rope(&config, rope)?;
    config.ropes = vec![rope.clone(), rope.without_turning()];
    let rotated = fields.rotated_layers(config.layers.len())?;
    for (layer, rotated) in config.layers.iter_mut().zip(rotated) {
        layer.rope = if rotated { 0 } else { STILL };
    }
    Ok(config)
}
