//! Qwen 3 with experts, and the text part of Qwen3-VL with experts: Qwen 3's attention, no shared
//! expert. If the file does not say, only GGUF files scale the weights of the chosen experts to sum
//! 1, as llama.cpp does. Source: Yang et al. 2025; `src/models/qwen3moe.cpp` of llama.cpp,
//! `modeling_qwen3_moe.py` and `modeling_qwen3_vl_moe.py` of transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, ModelFamily, QWEN3_VL_MOE, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 10_000.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen3Moe, fields)?;
    let is_vl = fields.is_type(QWEN3_VL_MOE);
    let mut kind = ROPE;
    if is_vl {
        kind.hf_base = 500_000.0;
    }
    config.ropes = vec![fields.rope(&config, kind)?];
    fields.set_qwen_windows(&mut config)?;
    let normalised = is_vl || fields.normalises_experts(true)?;
    let experts = fields.experts("num_experts", config.ffn, normalised)?;
    fields.set_sparse_layers(&mut config, experts)?;
    Ok(config)
}
