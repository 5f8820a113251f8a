//! Qwen 3, dense, and the text part of Qwen3-VL. It is Llama without biases, with an RMS norm on
//! every query and key head before the rotation of halves. The head size is a separate field.
//! Source: Yang et al. 2025; `src/models/qwen3.cpp` of llama.cpp, `modeling_qwen3_vl.py` of
//! transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind};
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

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.norm_heads(w)?; //                    q (T, H, D), k (T, K, D) in place, over D
    step.rotate(index)?; //                    q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D)
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       silu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    Ok(())
}
