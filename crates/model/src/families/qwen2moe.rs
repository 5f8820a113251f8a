//! Qwen 1.5 and 2 with experts. Attention is Qwen 2's. Expert weights are those of the softmax over
//! all experts. The shared expert has a sigmoid gate. Source: `src/models/qwen2moe.cpp` of
//! llama.cpp, `modeling_qwen2_moe.py` of transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind, feed_forward};
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

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D), with biases
    step.rotate(index)?; //                    q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D)
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += experts(norm(residual))
}
