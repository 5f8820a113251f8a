//! Qwen 1.5 and 2 with experts. Attention is Qwen 2's. Expert weights are those of the softmax over
//! all experts. The shared expert has a sigmoid gate. Source: `src/models/qwen2moe.cpp` of
//! llama.cpp, `modeling_qwen2_moe.py` of transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 10_000.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen2Moe, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    fields.set_qwen_windows(&mut config)?;
    let mut experts =
        fields.experts("num_experts", config.ffn, fields.normalises_experts(false)?)?;
    experts.shared = fields.shared_expert()?;
    fields.set_sparse_layers(&mut config, experts)?;
    Ok(config)
}
