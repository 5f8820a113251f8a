//! The shape of a DFlash or DSpark head, from its `config.json`.
//!
//! z-lab and DeepSpec add their own fields to those of Qwen 3. `speculators` has the layers' fields
//! in `transformer_layer_config`. The first two count captured layers by their outputs, the last by
//! their inputs.

use serde_json::{Value, json};

use super::markov::{self, MarkovKind};
use crate::eagle::{MAX_SIZE, check_fixed, layer_of, wrong};
use crate::{Config, Error, HeadConfig, ModelSource};

/// Longest block: published ones have 7 to 16 places.
const BLOCK_MAX: u64 = 64;

/// Sizes, captured layers and blocks of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockConfig {
    /// Sizes of a layer, vocabulary and captures.
    pub shape: HeadConfig,
    pub layers: usize,
    /// Places of a block: the last token and masks.
    pub block: usize,
    /// The token of a masked place.
    pub mask: u32,
    /// Whether the first place predicts a token too.
    pub is_anchored: bool,
    /// Form and rank of the bias by the tokens before, if there is one.
    pub(super) markov: Option<(MarkovKind, usize)>,
    /// Rows of context that each layer sees; `None` for all.
    pub(super) windows: Vec<Option<usize>>,
    /// Whether a place sees only those before it, in layers with a window.
    pub(super) is_causal: bool,
}

impl BlockConfig {
    /// Draft tokens of a block.
    pub const fn drafts(&self) -> usize {
        self.block - self.first()
    }

    /// The first place that predicts a token.
    pub(super) const fn first(&self) -> usize {
        if self.is_anchored { 0 } else { 1 }
    }

    /// The configuration of the head in `source` for `model`; `None` if that is no such head.
    ///
    /// # Errors
    /// Names the field that is missing or does not fit.
    pub fn of(source: &ModelSource, model: &Config) -> Result<Option<Self>, Error> {
        match source {
            ModelSource::Hf(folder) if is_dspark(folder.config()).is_some() => {
                Self::read(folder.config(), model).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// # Errors
    /// As [`of`](Self::of).
    pub(super) fn read(json: &Value, model: &Config) -> Result<Self, Error> {
        let Some(is_dspark) = is_dspark(json) else {
            let got = &json["architectures"];
            return Err(wrong("architectures", got, "a DFlash or DSpark head"));
        };
        let layer = layer_of(json);
        check_fixed(&[
            ("model_type", layer, "qwen3".into()),
            ("hidden_act", layer, "silu".into()),
            ("attention_bias", layer, false.into()),
        ])?;
        let number = |field: &'static str, of: &Value, most: u64| {
            let fits = of.as_u64().filter(|n| (1..=most).contains(n));
            fits.ok_or_else(|| wrong(field, of, format!("1 to {most}")))
        };
        let layers = number("num_hidden_layers", &layer["num_hidden_layers"], MAX_SIZE)? as usize;
        let own = &json["dflash_config"];
        let mask = match &json["mask_token_id"] {
            Value::Null => &own["mask_token_id"],
            mask => mask,
        };
        let fits = mask.as_u64().filter(|mask| *mask < model.vocab as u64);
        let expected = || format!("a token below {}", model.vocab);
        Ok(Self {
            block: number("block_size", &json["block_size"], BLOCK_MAX)?.max(2) as usize,
            mask: fits.ok_or_else(|| wrong("mask_token_id", mask, expected()))? as u32,
            is_anchored: json["sample_from_anchor"].as_bool().unwrap_or(is_dspark),
            shape: HeadConfig::of_layer(json, model, captures(json, model.layers.len())?)?,
            markov: markov::of_config(json)?,
            windows: windows(json, layers)?,
            is_causal: json["sliding_window_non_causal"] != json!(true),
            layers,
        })
    }
}

/// The windows of layers. Files of `speculators` alone say what the places of a block then see.
fn windows(json: &Value, layers: usize) -> Result<Vec<Option<usize>>, Error> {
    const FIELD: &str = "layer_types";
    let (layer, own) = (layer_of(json), &json["transformer_layer_config"]);
    let Some(types) = layer[FIELD].as_array() else {
        return Ok(vec![None; layers]);
    };
    let size = &layer["sliding_window"];
    let window = size.as_u64().filter(|n| (1..=MAX_SIZE).contains(n));
    let of = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if !own.is_null() => match window {
            Some(window) => Ok(Some(window as usize)),
            None => Err(wrong("sliding_window", size, format!("1 to {MAX_SIZE}"))),
        },
        _ => Err(wrong(FIELD, kind, "full_attention in a draft head")),
    };
    match types.len() == layers {
        true => types.iter().map(of).collect(),
        false => Err(wrong(FIELD, types.len(), format!("{layers}"))),
    }
}

/// Whether a `config.json` is of DSpark; `None` if it is of neither.
fn is_dspark(json: &Value) -> Option<bool> {
    let names = json["architectures"].as_array().into_iter().flatten();
    let names = names.chain([&json["speculators_model_type"]]);
    let mut names = names.filter_map(Value::as_str).map(str::to_lowercase);
    names.find_map(|name| {
        let is_dflash = name.contains("dflash") && !name.contains("dflash2");
        let is_dspark = name.contains("dspark");
        (is_dflash || is_dspark).then_some(is_dspark)
    })
}

fn captures(json: &Value, layers: usize) -> Result<Vec<usize>, Error> {
    const INPUTS: &str = "aux_hidden_state_layer_ids";
    const OUTPUTS: &str = "target_layer_ids";
    let (field, stated, behind) = match (&json[INPUTS], &json["dflash_config"][OUTPUTS]) {
        (Value::Null, Value::Null) => (OUTPUTS, &json[OUTPUTS], 1),
        (Value::Null, outputs) => (OUTPUTS, outputs, 1),
        (inputs, _) => (INPUTS, inputs, 0),
    };
    let input = |value: &Value| usize::try_from(value.as_i64()? + behind).ok();
    let list = stated.as_array().into_iter().flatten();
    let found: Option<Vec<usize>> = list.map(input).collect();
    let is_fit = |found: &Vec<usize>| {
        let is_ascending = found.is_sorted_by(|a, b| a < b);
        is_ascending && found.last().is_some_and(|last| *last < layers)
    };
    let expected = || format!("ascending layers below {layers}");
    found
        .filter(is_fit)
        .ok_or_else(|| wrong(field, stated, expected()))
}
