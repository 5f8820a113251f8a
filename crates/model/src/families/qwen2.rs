//! Qwen 2 and 2.5: Llama with biases on queries, keys and values, and rotation of halves. Source:
//! Yang et al. 2024; `src/models/qwen2.cpp` of llama.cpp.

use paceline_tensor::RopePairs;

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 10_000.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen2, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    fields.set_qwen_windows(&mut config)?;
    Ok(config)
}
