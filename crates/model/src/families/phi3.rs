//! Phi 3 and 4 (not Phi 4 with pictures): Llama with one matrix of queries, keys and values and one
//! of gate and up. Some have a sliding window, rotate a part of each head, or use `LongRoPE`.
//! Source: `src/models/phi3.cpp` of llama.cpp, `modeling_phi3.py` of transformers.

use super::{ConfigFields, FileNames, ModelFamily, RopeKind};
use crate::{Config, Error};

const ROPE: RopeKind = RopeKind::halves(10_000.0).of_part(1.0);

pub(super) const NAMES: FileNames = FileNames {
    qkv: Some("self_attn.qkv_proj"),
    gate_up: Some("mlp.gate_up_proj"),
    ..FileNames::USUAL
};

pub(super) fn config(fields: &ConfigFields<'_>) -> Result<Config, Error> {
    let mut config = Config::base(ModelFamily::Phi3, fields)?;
    config.ropes = vec![fields.rope(&config, ROPE)?];
    let window = fields.opt_window()?;
    for layer in &mut config.layers {
        layer.window = window;
    }
    Ok(config)
}
