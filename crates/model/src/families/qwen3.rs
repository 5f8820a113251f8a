//! Qwen 3, dense, and the text part of Qwen3-VL. It is Llama without biases, with an RMS norm on
//! every query and key head before the rotation of halves. The head size is a separate field.
//! Source: Yang et al. 2025; `src/models/qwen3.cpp` of llama.cpp, `modeling_qwen3_vl.py` of
//! transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 10_000.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen3, fields)?;
    let mut kind = ROPE;
    if fields.is_type("qwen3_vl_text") {
        kind.hf_base = 500_000.0;
    }
    config.ropes = vec![fields.rope(&config, kind)?];
    fields.set_qwen_windows(&mut config)?;
    Ok(config)
}
