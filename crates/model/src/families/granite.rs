//! Granite 3 and 4, dense: Llama with factors of the embedding, of scores, of each half's output
//! and of logits. Source: `src/models/granite.cpp` of llama.cpp, `modeling_granite.py` of
//! transformers.

use super::{ConfigFields, Half, LayerStep, ModelFamily, RopeKind};
use crate::{Config, Error};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Granite, fields)?;
    let rope = RopeKind::plain(fields.permuted_pairs(), 10_000.0);
    config.ropes = vec![fields.rope(&config, rope)?];
    fields.set_granite_factors(&mut config)?;
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_qkv(w)?; //                   x (T, C) -> q (T, H D), k, v (T, K D)
    step.rotate(index)?; //                    q, k in place
    step.attend(w, index)?; //                 q, cache -> attended (T, H D)
    step.project_attention(w)?; //             attended (T, H D) -> delta (T, C)
    step.scale_delta()?; //                    delta *= the model's factor
    step.add_delta()?; //                      residual += delta
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    step.project_gate_up(w)?; //               x (T, C) -> gate, up (T, F)
    step.activate()?; //                       silu(gate) * up -> hidden (T, F)
    step.project_down(w)?; //                  hidden (T, F) -> delta (T, C)
    step.scale_delta()?; //                    delta *= the model's factor
    step.add_delta() //                        residual += delta
}
