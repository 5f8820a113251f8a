//! The shape of an EAGLE-3 head, from its `config.json`.

use paceline_tensor::RopePairs;
use serde_json::Value;

use crate::families::{RopeKind, head_rope};
use crate::{Config, Error, ModelSource, Rope};

/// Base of rotations if the file has none (`LlamaConfig` of transformers).
const ROPE_BASE: f64 = 10_000.0;

/// Sizes and captured layers of a draft head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadConfig {
    /// C: width of the residual stream, as in the model.
    pub width: usize,
    /// H query heads, K key and value heads, of D elements.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// F: width of the feed-forward.
    pub ffn: usize,
    /// Tokens that the head can propose.
    pub draft_vocab: usize,
    pub norm_eps: f32,
    pub rope: Rope,
    /// Whether the residual stream of the layer begins after the feature's norm.
    pub norms_residual: bool,
    /// Layers of the model whose input it reads, in ascending order.
    pub captures: Vec<usize>,
}

impl HeadConfig {
    /// The layers that a head reads if its file does not say: near the start, in the middle and
    /// near the end. Source: `get_eagle3_aux_hidden_state_layers` of vLLM.
    pub fn usual_captures(layers: usize) -> Vec<usize> {
        let mut captures = vec![2, layers / 2, layers.saturating_sub(3)];
        captures.retain(|layer| *layer < layers);
        captures.sort_unstable();
        captures.dedup();
        captures
    }

    /// Whether a `config.json` is that of an EAGLE-3 head.
    pub(super) fn is_head(json: &Value) -> bool {
        let names = json["architectures"].as_array().into_iter().flatten();
        let mut names = names.filter_map(Value::as_str);
        json["speculators_model_type"] == "eagle3" || names.any(|name| name.contains("Eagle3"))
    }

    /// The configuration of the head in `source` for `model`; `None` if that is no head.
    ///
    /// # Errors
    /// Names the field that is missing or does not fit.
    pub fn of(source: &ModelSource, model: &Config) -> Result<Option<Self>, Error> {
        match source {
            ModelSource::Hf(folder) if Self::is_head(folder.config()) => {
                Self::read(folder.config(), model).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// # Errors
    /// As [`of`](Self::of).
    pub(super) fn read(json: &Value, model: &Config) -> Result<Self, Error> {
        if !Self::is_head(json) {
            return Err(wrong(
                "architectures",
                &json["architectures"],
                "an EAGLE-3 head",
            ));
        }
        let layer = layer_of(json);
        let fixed = [
            ("model_type", layer, "llama".into()),
            ("hidden_act", layer, "silu".into()),
            ("num_hidden_layers", layer, 1.into()),
            ("attention_bias", layer, false.into()),
            ("mlp_bias", layer, false.into()),
            ("norm_before_fc", json, false.into()),
            ("fc_norm", json, false.into()),
            ("norm_output", json, false.into()),
        ];
        check_fixed(&fixed)?;
        Ok(Self {
            norms_residual: json["norm_before_residual"].as_bool().unwrap_or(false),
            ..Self::of_layer(json, model, captures(json, model.layers.len())?)?
        })
    }

    /// Sizes of a head with layers of this form.
    pub(crate) fn of_layer(
        json: &Value,
        model: &Config,
        captures: Vec<usize>,
    ) -> Result<Self, Error> {
        let layer = layer_of(json);
        let size = |field: &'static str| {
            let got = &layer[field];
            let size = got.as_u64().filter(|n| (1..=MAX_SIZE).contains(n));
            let size = size.ok_or_else(|| wrong(field, got, "1 to 1048576"))?;
            Ok::<_, Error>(size as usize)
        };
        let (width, heads) = (size("hidden_size")?, size("num_attention_heads")?);
        if width != model.width {
            let expected = format!("{}, as of the model", model.width);
            return Err(wrong("hidden_size of the draft head", width, expected));
        }
        let head_dim = match &layer["head_dim"] {
            Value::Null => width / heads,
            _ => size("head_dim")?,
        };
        let kv_heads = match &layer["num_key_value_heads"] {
            Value::Null => heads,
            _ => size("num_key_value_heads")?,
        };
        if !heads.is_multiple_of(kv_heads) || !head_dim.is_multiple_of(16) {
            let got = format!("{heads} heads of {head_dim}, {kv_heads} of keys");
            return Err(wrong(
                "heads of the draft head",
                got,
                "whole groups, of a multiple of 16",
            ));
        }
        let (own, vocab) = (&json["draft_vocab_size"], model.vocab as u64);
        let draft_vocab = own.as_u64().filter(|n| (1..=vocab).contains(n));
        let draft_vocab = match own {
            Value::Null => size("vocab_size")?,
            _ => draft_vocab
                .ok_or_else(|| wrong("draft_vocab_size", own, format!("1 to {vocab}")))?
                as usize,
        };
        let eps = layer["rms_norm_eps"].as_f64().unwrap_or(1e-6);
        Ok(Self {
            rope: head_rope(
                layer,
                head_dim,
                RopeKind::plain(RopePairs::Halves, ROPE_BASE),
            )?,
            norms_residual: false,
            captures,
            ffn: size("intermediate_size")?,
            norm_eps: eps as f32,
            width,
            heads,
            kv_heads,
            head_dim,
            draft_vocab,
        })
    }
}

/// Largest size that a file may claim: memory is reserved by it.
pub(crate) const MAX_SIZE: u64 = 1 << 20;

/// The configuration of a head's layers.
pub(crate) fn layer_of(json: &Value) -> &Value {
    match &json["transformer_layer_config"] {
        Value::Null => json,
        layer => layer,
    }
}

/// Refuses values of fields that change what the head computes: a field, its object, and the value
/// that is computed.
pub(crate) fn check_fixed(fixed: &[(&'static str, &Value, Value)]) -> Result<(), Error> {
    for (field, of, expected) in fixed {
        let got = &of[*field];
        if !got.is_null() && got != expected {
            return Err(wrong(field, got, format!("{expected} in a draft head")));
        }
    }
    Ok(())
}

fn captures(json: &Value, layers: usize) -> Result<Vec<usize>, Error> {
    const FIELD: &str = "eagle_aux_hidden_state_layer_ids";
    let inner = &json["eagle_config"][FIELD];
    let stated = if json[FIELD].is_null() {
        inner
    } else {
        &json[FIELD]
    };
    let Some(list) = stated.as_array() else {
        return Ok(HeadConfig::usual_captures(layers));
    };
    let expected = || format!("ascending layers below {layers}");
    let layer = |value: &Value| value.as_u64().filter(|layer| *layer < layers as u64);
    let found: Option<Vec<usize>> = list.iter().map(|v| layer(v).map(|v| v as usize)).collect();
    let found = found.filter(|found| !found.is_empty() && found.is_sorted_by(|a, b| a < b));
    found.ok_or_else(|| wrong(FIELD, stated, expected()))
}

pub(crate) fn wrong(
    field: &'static str,
    got: impl ToString,
    expected: impl Into<std::borrow::Cow<'static, str>>,
) -> Error {
    Error::Value {
        field,
        got: got.to_string().chars().take(100).collect(),
        expected: expected.into(),
    }
}
