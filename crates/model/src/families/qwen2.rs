//! Qwen 2 and 2.5: Llama with biases on queries, keys and values, and rotation of halves. Source:
//! Yang et al. 2024; `src/models/qwen2.cpp` of llama.cpp.

use paceline_tensor::RopePairs;

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::plain(RopePairs::Halves, 10_000.0);

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Qwen2, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    fields.set_qwen_windows(&mut config)?;
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
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       silu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    Ok(())
}
