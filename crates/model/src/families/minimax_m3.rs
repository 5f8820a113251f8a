//! MiniMax M3, text only. Every head has a norm, and a part of it is rotated. Gates are clamped as
//! those of gpt-oss, in dense layers and shared experts too. An indexer chooses blocks of positions
//! for each KV head; only contexts in which it chooses all of them are computed. Source:
//! `modeling_minimax_m3_vl.py` of transformers.

use paceline_tensor::RopePairs;

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind {
    partial: Some(1.0),
    ..RopeKind::plain(RopePairs::Halves, 5_000_000.0)
};

pub(super) const NAMES: FileNames = FileNames {
    shared: "block_sparse_moe.shared_experts",
    ..FileNames::MIXTRAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::MiniMaxM3, fields)?;
    config.norm_offset = fields.gemma_norm_offset();
    config.ropes = vec![fields.rope(&config, ROPE)?];
    config.dense_clamp = Some(fields.gpt_oss_clamp()?);
    config.indexed = fields.minimax_indexed(config.layers.len())?;
    let most = config.indexed.unwrap_or(config.context);
    config.context = config.context.min(most);
    let experts = fields.minimax_experts(&config)?;
    let dense = fields.minimax_dense(config.layers.len())?;
    let wide = fields.minimax_dense_width()?;
    for (layer, dense) in config.layers.iter_mut().zip(dense) {
        match dense {
            true => layer.ffn = wide,
            false => layer.experts = Some(experts),
        }
    }
    Ok(config)
}
