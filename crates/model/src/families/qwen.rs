//! Qwen 1.5 to 3 and the text part of Qwen3-VL, dense and with experts: Llama's layer with rotation
//! of halves.
//!
//! - Qwen 2 and 2.5, and Qwen 1.5 and 2 with experts: biases on queries, keys and values. Expert
//!   weights are those of the softmax over all experts; the shared expert has a sigmoid gate.
//! - Qwen 3, dense and with experts: no biases, and an RMS norm on every query and key head before
//!   the rotation. The head size is a separate field. If the file does not say, only GGUF files
//!   scale the weights of the chosen experts to sum 1, as llama.cpp does.
//!
//! Sources: Yang et al. 2024 and 2025; `src/models/qwen2.cpp`, `qwen2moe.cpp`, `qwen3.cpp` and
//! `qwen3moe.cpp` of llama.cpp, and their `modeling` files of transformers.

use super::{ConfigFields, ModelFamily, QWEN3_VL_MOE, RopeKind};
use crate::{Config, Error};

pub(super) fn config(family: ModelFamily, fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(family, fields)?;
    let is_vl = fields.is_type("qwen3_vl_text") || fields.is_type(QWEN3_VL_MOE);
    let mut rope = RopeKind::halves(10_000.0);
    if is_vl {
        rope.hf_base = 500_000.0;
    }
    config.ropes = vec![fields.rope(&config, rope)?];
    fields.set_qwen_windows(&mut config)?;
    let normalised = match family {
        ModelFamily::Qwen2Moe => fields.normalises_experts(false)?,
        ModelFamily::Qwen3Moe => is_vl || fields.normalises_experts(true)?,
        _ => return Ok(config),
    };
    let mut experts = fields.experts("num_experts", config.ffn, normalised)?;
    if family == ModelFamily::Qwen2Moe {
        experts.shared = fields.shared_expert()?;
    }
    fields.set_sparse_layers(&mut config, experts)?;
    Ok(config)
}
