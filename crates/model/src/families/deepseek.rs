//! DeepSeek V2, V3, R1 and V3.2, Kimi K2, GLM 4.7 Flash, GLM 5 and Mistral 4.
//!
//! - All heads share one latent vector per position. Queries are expanded into the latent space
//!   (the absorbed form, for every row).
//! - The first layers are dense.
//! - Shared experts have no gate; some routers choose groups first.
//! - Rows of DeepSeek V3.2 and GLM 5 attend to the positions that an indexer chooses.
//!
//! Source: DeepSeek-AI 2024 (DeepSeek-V2, V3); `src/models/deepseek2.cpp` of llama.cpp;
//! `modeling_deepseek_v3.py`, `modeling_deepseek_v2.py`, `modeling_mistral4.py` of transformers.

use super::{ConfigFields, FileNames, Half, LayerStep, ModelFamily, feed_forward};
use crate::config::{Indexer, Latent, Selection};
use crate::{Config, Error};

pub(super) const NAMES: FileNames = FileNames {
    shared: "mlp.shared_experts",
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::DeepSeek, fields)?;
    let latent = config.latent.expect("read for this family");
    let n = fields.decoder_layers(config.layers.len())?;
    config.layers.truncate(n);
    let (rope, scale) = fields.latent_rope(&latent)?;
    config.ropes = vec![rope];
    if let Some(indexer) = fields.indexer(&latent)? {
        set_selections(&mut config, indexer, &fields.own_indexers(n)?);
    }
    let experts = fields.latent_experts(&config)?;
    let dense = fields.dense_of(config.layers.len())?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        layer.query_scale = (scale / (latent.query_dim() as f64).sqrt()) as f32;
        layer.experts = (!dense).then_some(experts);
    }
    Ok(config)
}

/// Sets the positions that rows of each layer attend to; layers with `own` have an indexer.
pub(super) fn set_selections(config: &mut Config, indexer: Indexer, own: &[bool]) {
    let set = |latent: &mut Option<Latent>, selection| {
        if let Some(latent) = latent {
            latent.selection = selection;
        }
    };
    set(&mut config.latent, Selection::Own(indexer));
    for (layer, own) in config.layers.iter_mut().zip(own) {
        let selection = match own {
            true => Selection::Own(indexer),
            false => Selection::Before,
        };
        set(&mut layer.latent, selection);
    }
}

/// Computes a layer; shapes of one batch of T rows. R latent elements, P rotated ones, V of an
/// expanded value.
pub(super) fn layer<S: LayerStep>(step: &mut S, w: &S::Layer, index: usize) -> Result<(), Error> {
    step.norm(w, Half::Attention)?; //         residual (T, C) -> x (T, C)
    step.project_latent(w)?; //                x (T, C) -> q (T, H, R + P), k (T, R + P)
    step.select_positions(w, index)?; //       x, index keys -> positions of each row
    step.attend_latent(w, index)?; //          q, cache -> attended (T, H V)
    step.project_attention(w)?; //             attended (T, H V) -> delta (T, C)
    step.add_delta()?; //                      residual += delta
    feed_forward(step, w) //                   residual += experts(norm(residual))
}
