//! The shape of an encoder, read from its files and checked.

use std::borrow::Cow;

use paceline_formats::hf::HfFolder;
use serde_json::Value;

use crate::{Error, Source};

/// Largest accepted sizes: several times those of published encoders.
const MAX_WIDTH: u64 = 1 << 14;
const MAX_FFN: u64 = 1 << 15;
const MAX_LAYERS: u64 = 1 << 8;
const MAX_VOCAB: u64 = 1 << 22;
const MAX_POSITIONS: u64 = 1 << 14;

/// Encoders that are computed, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderFamily {
    /// Positions count from 0 (Devlin et al. 2018).
    Bert,
    /// The same layers; positions count from the padding token's id + 1 (Liu et al. 2019).
    Roberta,
}

/// How the rows of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all tokens.
    Mean,
    /// The row of the first token, `[CLS]`.
    First,
}

/// The function between the two products of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bend {
    /// `x Phi(x)` with the error function.
    Gelu,
    /// Its approximation with tanh.
    GeluTanh,
    /// `max(x, 0)`
    Relu,
}

/// The shape of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Which.
    pub family: EncoderFamily,
    /// Numbers of a row, and of the vector that comes out.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Attention heads, which divide the width.
    pub heads: usize,
    /// Numbers between the two products of a feed-forward.
    pub ffn: usize,
    /// Tokens that there are.
    pub vocab: usize,
    /// Most tokens of a text, those that begin and end it included.
    pub context: usize,
    /// How rows become a vector.
    pub pooling: Pooling,
    /// Rows of the table of positions.
    pub(super) positions: usize,
    /// Row of the first token.
    pub(super) first_position: usize,
    /// Rows of the table of token types.
    pub(super) types: usize,
    pub(super) eps: f64,
    pub(super) bend: Bend,
}

impl EncoderFamily {
    /// Its name: `bert`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
        }
    }

    /// The family of a `model_type`.
    fn of(model_type: &str) -> Option<Self> {
        match model_type {
            "bert" => Some(Self::Bert),
            "roberta" | "xlm-roberta" | "camembert" => Some(Self::Roberta),
            _ => None,
        }
    }
}

impl EncoderConfig {
    /// Whether `source` is an encoder: a Hugging Face folder of a known `model_type`.
    pub fn is_encoder(source: &Source) -> bool {
        let Source::Hf(folder) = source else {
            return false;
        };
        let model_type = folder.config()["model_type"].as_str();
        model_type.is_some_and(|name| EncoderFamily::of(name).is_some())
    }

    /// # Errors
    /// [`Error::Architecture`] for what is no encoder, and the first field that is missing or
    /// cannot be computed with, by name.
    pub fn read(folder: &HfFolder) -> Result<Self, Error> {
        let config = folder.config();
        let name = text(config, "model_type")?.ok_or(missing("model_type"))?;
        let family = EncoderFamily::of(name).ok_or_else(|| Error::Architecture {
            architecture: name.chars().take(64).collect(),
            supported: "bert, roberta, xlm-roberta, camembert".to_owned(),
        })?;
        refuse_what_differs(config)?;
        let width = size(config, "hidden_size", 1..=MAX_WIDTH)?;
        let heads = size(config, "num_attention_heads", 1..=width as u64)?;
        if !width.is_multiple_of(heads) {
            let expected = format!("a divisor of the width {width}");
            return Err(wrong("num_attention_heads", heads, expected));
        }
        let positions = size(config, "max_position_embeddings", 2..=MAX_POSITIONS)?;
        let first_position = match family {
            EncoderFamily::Bert => 0,
            EncoderFamily::Roberta => size(config, "pad_token_id", 0..=positions as u64 - 2)? + 1,
        };
        let usable = positions - first_position;
        Ok(Self {
            family,
            width,
            heads,
            positions,
            first_position,
            layers: size(config, "num_hidden_layers", 1..=MAX_LAYERS)?,
            ffn: size(config, "intermediate_size", 1..=MAX_FFN)?,
            vocab: size(config, "vocab_size", 1..=MAX_VOCAB)?,
            types: size(config, "type_vocab_size", 1..=1 << 10)?,
            context: longest(folder)?.unwrap_or(usable).min(usable),
            pooling: pooling(folder)?,
            eps: eps(config)?,
            bend: bend(config)?,
        })
    }

    /// Numbers of a head.
    pub const fn head(&self) -> usize {
        self.width / self.heads
    }
}

/// Refuses settings that would be computed wrongly.
fn refuse_what_differs(config: &Value) -> Result<(), Error> {
    let kind = text(config, "position_embedding_type")?.unwrap_or("absolute");
    if kind != "absolute" {
        return Err(wrong("position_embedding_type", kind, "absolute"));
    }
    for field in ["is_decoder", "add_cross_attention"] {
        if config[field] == true {
            return Err(wrong(field, true, "false"));
        }
    }
    Ok(())
}

fn eps(config: &Value) -> Result<f64, Error> {
    const FIELD: &str = "layer_norm_eps";
    let eps = config[FIELD].as_f64().ok_or(missing(FIELD))?;
    if !(0.0..=1e-2).contains(&eps) {
        return Err(wrong(FIELD, eps, "0 to 0.01"));
    }
    Ok(eps)
}

fn bend(config: &Value) -> Result<Bend, Error> {
    const FIELD: &str = "hidden_act";
    match text(config, FIELD)?.ok_or(missing(FIELD))? {
        "gelu" => Ok(Bend::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Bend::GeluTanh),
        "relu" => Ok(Bend::Relu),
        other => Err(wrong(FIELD, other, "gelu, gelu_new or relu")),
    }
}

/// Most tokens of a text by sentence-transformers, where the folder has its files.
fn longest(folder: &HfFolder) -> Result<Option<usize>, Error> {
    const FIELD: &str = "max_seq_length";
    let settings = folder.settings("sentence_bert_config.json")?;
    let settings = settings.filter(|settings| !settings[FIELD].is_null());
    let longest = settings.map(|settings| size(&settings, FIELD, 2..=MAX_POSITIONS));
    longest.transpose()
}

/// How sentence-transformers pools; by the mean where the folder does not say, as it does too.
fn pooling(folder: &HfFolder) -> Result<Pooling, Error> {
    const KNOWN: &str = "pooling_mode_mean_tokens or pooling_mode_cls_token, alone";
    let Some(settings) = folder.settings("1_Pooling/config.json")? else {
        return Ok(Pooling::Mean);
    };
    let modes = settings.as_object().into_iter().flatten();
    let is_on = |(name, value): &(&String, &Value)| {
        name.starts_with("pooling_mode_") && **value == Value::Bool(true)
    };
    let names: Vec<&str> = modes.filter(is_on).map(|(name, _)| name.as_str()).collect();
    match names.as_slice() {
        ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
        ["pooling_mode_cls_token"] => Ok(Pooling::First),
        other => Err(wrong("1_Pooling", format!("{other:?}"), KNOWN)),
    }
}

fn text<'a>(config: &'a Value, field: &'static str) -> Result<Option<&'a str>, Error> {
    match &config[field] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        other => Err(Error::FieldType {
            field: field.to_owned(),
            expected: "a string",
            got: other.to_string().chars().take(64).collect(),
        }),
    }
}

fn size(
    config: &Value,
    field: &'static str,
    range: std::ops::RangeInclusive<u64>,
) -> Result<usize, Error> {
    let value = match &config[field] {
        Value::Null => return Err(missing(field)),
        value => value,
    };
    let number = value.as_u64().filter(|number| range.contains(number));
    number.map(|number| number as usize).ok_or_else(|| {
        let got: String = value.to_string().chars().take(64).collect();
        wrong(field, got, format!("{} to {}", range.start(), range.end()))
    })
}

const fn missing(field: &'static str) -> Error {
    Error::MissingField { field }
}

fn wrong(field: &'static str, got: impl ToString, expected: impl Into<Cow<'static, str>>) -> Error {
    Error::Value {
        field,
        got: got.to_string(),
        expected: expected.into(),
    }
}
