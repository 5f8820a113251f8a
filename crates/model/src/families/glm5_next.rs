//! GLM 5.3 Flash, text only.
//!
//! - Halves of a layer are between constrained residual streams.
//! - Most layers are Kimi delta attention with a bound of decays.
//! - Every fourth is latent attention without rotation, whose rows attend to pools of positions
//!   that an indexer chooses.
//! - Experts are those of DeepSeek V3, with clamped gates.
//!
//! Source: `modeling_glm5_next.py` of transformers 5.24.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, deepseek, kimi_linear};
use crate::role::Role;
use crate::rope::Rope;
use crate::{Config, Error};

/// Names on the hub.
pub(super) const NAMES: FileNames = FileNames {
    shared: "mlp.shared_experts",
    hf_own,
    ..FileNames::USUAL
};

const fn hf_own(role: Role) -> Option<&'static str> {
    match role {
        Role::Layer(_, part) => kimi_linear::delta_name(part),
        _ => None,
    }
}

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Glm5Next, fields)?;
    let latent = config.latent.expect("read for this family");
    config.streams = Some(fields.constrained_streams(false, false)?);
    config.ropes = vec![Rope::still()];
    config.dense_clamp = Some(fields.silu_clamp()?);
    let mut experts = fields.latent_experts(&config)?;
    (experts.corrected, experts.clamp) = (true, config.dense_clamp);
    let dense = fields.dense_of(config.layers.len())?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        layer.query_scale = 1.0 / (latent.query_dim() as f32).sqrt();
        layer.experts = (!dense).then_some(experts);
    }
    fields.set_kimi_nets(&mut config)?;
    if let Some(indexer) = fields.indexer(&latent)? {
        let own = fields.own_indexers(config.layers.len())?;
        deepseek::set_selections(&mut config, indexer, &own);
    }
    Ok(config)
}

/// Computes a layer; shapes of one batch of T rows with S streams. R latent elements, V of an
/// expanded value.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.mix_streams(w, Half::Attention)?; //  residual (T, S, C) -> x (T, C)
    if step.is_delta_net(w) {
        step.project_delta_net(w)?; //         x (T, C) -> q, k (T, H D), v, gates (T, H E), ...
        step.delta_net(w, index)?; //          q, k, v, states -> attended (T, H E)
    } else {
        step.project_latent(w)?; //            x (T, C) -> q (T, H, R), k (T, R)
        step.select_positions(w, index)?; //   x, index rows -> positions of each row
        step.attend_latent(w, index)?; //      q, cache -> attended (T, H V)
    }
    step.project_attention(w)?; //             attended (T, H E) -> delta (T, C)
    step.add_to_streams()?; //                 residual (T, S, C) = mix of it + weights * delta
    step.mix_streams(w, Half::FeedForward)?; // residual (T, S, C) -> x (T, C)
    if step.has_experts(w) {
        step.experts(w)?; //                   x (T, C) -> delta (T, C)
    } else {
        step.project_gate_up(w)?; //           x (T, C) -> gate, up (T, F)
        step.activate()?; //                   silu(clamped gate) * clamped up -> hidden (T, F)
        step.project_down(w)?; //              hidden (T, F) -> delta (T, C)
    }
    step.add_to_streams() //                   residual (T, S, C) = mix of it + weights * delta
}
