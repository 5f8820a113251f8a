//! The checked shape of an encoder, from GGUF metadata or a folder's `config.json`.

use std::borrow::Cow;

use paceline_weights::gguf::Gguf;
use paceline_weights::hf::HfFolder;
use serde_json::Value;

use super::decoder;
use super::dense::{self, EncoderDense};
use crate::{Error, ModelFamily, ModelSource};

/// Largest accepted sizes: several times those of published encoders.
const MAX_WIDTH: u64 = 1 << 14;
const MAX_FFN: u64 = 1 << 15;
const MAX_LAYERS: u64 = 1 << 8;
const MAX_VOCAB: u64 = 1 << 22;
const MAX_POSITIONS: u64 = 1 << 14;
/// Maximum text length of a decoder: 32768 in E5-Mistral.
const MAX_LONGEST: u64 = 1 << 20;

/// Supported encoders, by `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderFamily {
    /// Positions count from 0 (Devlin et al. 2018).
    Bert,
    /// BERT's layers; positions count from the padding token's id + 1 (Liu et al. 2019).
    Roberta,
    /// A decoder trained for embeddings (Qwen3 Embedding).
    Decoder(ModelFamily),
}

/// How a text's rows become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all tokens.
    Mean,
    /// The row of the first token, `[CLS]`.
    First,
    /// The row of the last token, the only row of a decoder that attends to the whole text.
    Last,
}

/// Activation of the feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EncoderActivation {
    /// `x Phi(x)` with the error function.
    Gelu,
    /// Its approximation with tanh.
    GeluTanh,
    /// `max(x, 0)`
    Relu,
}

/// Public properties of an encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderConfig {
    pub family: EncoderFamily,
    /// Elements of the embedding vector.
    pub width: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Maximum tokens of a text, including begin and end tokens.
    pub context: usize,
    pub pooling: Pooling,
}

/// The shape of BERT's layers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bert {
    pub(super) width: usize,
    pub(super) layers: usize,
    /// Attention heads, which divide the width.
    pub(super) heads: usize,
    /// Width of the feed-forward.
    pub(super) ffn: usize,
    pub(super) vocab: usize,
    pub(super) pooling: Pooling,
    /// Rows of the position table.
    pub(super) positions: usize,
    /// Row of the first token's position.
    pub(super) first_position: usize,
    /// Rows of the token type table.
    pub(super) types: usize,
    pub(super) eps: f64,
    pub(super) bend: EncoderActivation,
}

impl EncoderFamily {
    /// Name, for example `bert`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::Decoder(family) => family.name(),
        }
    }

    /// Family of a `model_type`.
    fn of(model_type: &str) -> Option<Self> {
        match model_type {
            "bert" => Some(Self::Bert),
            "roberta" | "xlm-roberta" | "camembert" => Some(Self::Roberta),
            _ => None,
        }
    }
}

impl EncoderConfig {
    /// Whether `source` is an encoder: by a known `model_type` or architecture, or a decoder with
    /// last-token pooling or attention in both directions.
    pub fn is_encoder(source: &ModelSource) -> bool {
        let is_bert = match source {
            ModelSource::Hf(folder) => {
                let model_type = folder.config()["model_type"].as_str();
                model_type.is_some_and(|name| EncoderFamily::of(name).is_some())
            }
            ModelSource::Gguf(file) => file
                .metadata()
                .str(ARCHITECTURE)
                .is_ok_and(|name| name == BERT),
        };
        is_bert || decoder::is_embedder(source)
    }

    /// # Errors
    /// [`Error::Architecture`] for other models; otherwise the first field that is missing or not
    /// supported, by name.
    pub fn read(source: &ModelSource) -> Result<Self, Error> {
        Ok(Self::with_dense(source)?.0)
    }

    /// As [`read`](Self::read), with the products behind the pooling.
    pub(super) fn with_dense(source: &ModelSource) -> Result<(Self, Vec<EncoderDense>), Error> {
        let mut config = match decoder::is_embedder(source) {
            true => decoder::read(source)?,
            false => Bert::read(source)?.0,
        };
        let dense = dense::read(source, config.width)?;
        config.width = dense.last().map_or(config.width, EncoderDense::outputs);
        Ok((config, dense))
    }
}

/// GGUF key of the architecture, and the only supported encoder architecture.
pub(super) const ARCHITECTURE: &str = "general.architecture";
const BERT: &str = "bert";

impl Bert {
    /// The public and the internal part of a configuration.
    ///
    /// # Errors
    /// As [`EncoderConfig::read`].
    pub(super) fn read(source: &ModelSource) -> Result<(EncoderConfig, Self), Error> {
        match source {
            ModelSource::Hf(folder) => Self::of_folder(folder),
            ModelSource::Gguf(file) => Self::of_file(file),
        }
    }

    /// Reads the keys that `convert_hf_to_gguf.py` of llama.cpp writes.
    fn of_file(file: &Gguf) -> Result<(EncoderConfig, Self), Error> {
        let metadata = file.metadata();
        let name = metadata.str(ARCHITECTURE)?;
        if name != BERT {
            return Err(Error::Architecture {
                architecture: name.chars().take(64).collect(),
                supported: BERT.to_owned(),
            });
        }
        let size = |key: &'static str, most: u64| {
            let got = metadata.u64(key)?;
            let fits = (1..=most).contains(&got);
            let number = fits.then_some(got as usize);
            number.ok_or_else(|| wrong(key, got, format!("1 to {most}")))
        };
        let width = size("bert.embedding_length", MAX_WIDTH)?;
        let heads = size("bert.attention.head_count", width as u64)?;
        check_heads("bert.attention.head_count", width, heads)?;
        if metadata.opt_bool("bert.attention.causal")? == Some(true) {
            return Err(wrong("bert.attention.causal", true, "false"));
        }
        let eps = f64::from(metadata.f32("bert.attention.layer_norm_epsilon")?);
        let rows = |name: &str| {
            let shape = file.info(name).map(|info| info.shape());
            shape.and_then(|shape| shape.first()).copied().unwrap_or(0)
        };
        // llama.cpp's numbering; `none` is its name for no pooling.
        const POOLING: &str = "bert.pooling_type";
        let pooling = match metadata.opt_u64(POOLING)?.unwrap_or(1) {
            0 | 1 => Pooling::Mean,
            2 => Pooling::First,
            other => return Err(wrong(POOLING, other, "1 (mean) or 2 (first token)")),
        };
        let positions = size("bert.context_length", MAX_POSITIONS)?;
        let bert = Self {
            width,
            heads,
            positions,
            pooling,
            layers: size("bert.block_count", MAX_LAYERS)?,
            ffn: size("bert.feed_forward_length", MAX_FFN)?,
            vocab: rows("token_embd.weight").min(MAX_VOCAB as usize),
            types: rows("token_types.weight").clamp(1, 1 << 10),
            first_position: 0,
            eps: check_eps("bert.attention.layer_norm_epsilon", eps)?,
            bend: EncoderActivation::Gelu,
        };
        let family = EncoderFamily::Bert;
        Ok((bert.config(family, positions), bert))
    }

    fn config(&self, family: EncoderFamily, context: usize) -> EncoderConfig {
        EncoderConfig {
            family,
            context,
            width: self.width,
            vocab: self.vocab,
            pooling: self.pooling,
        }
    }

    fn of_folder(folder: &HfFolder) -> Result<(EncoderConfig, Self), Error> {
        let config = folder.config();
        let name = text(config, "model_type")?.ok_or(missing("model_type"))?;
        let family = EncoderFamily::of(name).ok_or_else(|| Error::Architecture {
            architecture: name.chars().take(64).collect(),
            supported: "bert, roberta, xlm-roberta, camembert".to_owned(),
        })?;
        refuse_what_differs(config)?;
        let width = size(config, "hidden_size", 1..=MAX_WIDTH)?;
        let heads = size(config, "num_attention_heads", 1..=width as u64)?;
        check_heads("num_attention_heads", width, heads)?;
        let positions = size(config, "max_position_embeddings", 2..=MAX_POSITIONS)?;
        let first_position = match family {
            EncoderFamily::Bert | EncoderFamily::Decoder(_) => 0,
            EncoderFamily::Roberta => size(config, "pad_token_id", 0..=positions as u64 - 2)? + 1,
        };
        let usable = positions - first_position;
        let context = longest(folder)?.unwrap_or(usable).min(usable);
        let bert = Self {
            width,
            heads,
            positions,
            first_position,
            layers: size(config, "num_hidden_layers", 1..=MAX_LAYERS)?,
            ffn: size(config, "intermediate_size", 1..=MAX_FFN)?,
            vocab: size(config, "vocab_size", 1..=MAX_VOCAB)?,
            types: size(config, "type_vocab_size", 1..=1 << 10)?,
            pooling: pooling(folder)?,
            eps: eps(config)?,
            bend: bend(config)?,
        };
        Ok((bert.config(family, context), bert))
    }

    /// Elements of a head.
    pub(super) const fn head(&self) -> usize {
        self.width / self.heads
    }
}

/// Refuses settings that change the computation.
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
    check_eps(FIELD, config[FIELD].as_f64().ok_or(missing(FIELD))?)
}

fn check_eps(field: &'static str, eps: f64) -> Result<f64, Error> {
    if !(0.0..=1e-2).contains(&eps) {
        return Err(wrong(field, eps, "0 to 0.01"));
    }
    Ok(eps)
}

fn check_heads(field: &'static str, width: usize, heads: usize) -> Result<(), Error> {
    if !width.is_multiple_of(heads) {
        let expected = format!("a divisor of the width {width}");
        return Err(wrong(field, heads, expected));
    }
    Ok(())
}

fn bend(config: &Value) -> Result<EncoderActivation, Error> {
    const FIELD: &str = "hidden_act";
    match text(config, FIELD)?.ok_or(missing(FIELD))? {
        "gelu" => Ok(EncoderActivation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(EncoderActivation::GeluTanh),
        "relu" => Ok(EncoderActivation::Relu),
        other => Err(wrong(FIELD, other, "gelu, gelu_new or relu")),
    }
}

/// Maximum tokens of a text in sentence-transformers' files, if the folder has them.
pub(super) fn longest(folder: &HfFolder) -> Result<Option<usize>, Error> {
    const FIELD: &str = "max_seq_length";
    let settings = folder.settings("sentence_bert_config.json")?;
    let settings = settings.filter(|settings| !settings[FIELD].is_null());
    let longest = settings.map(|settings| size(&settings, FIELD, 2..=MAX_LONGEST));
    longest.transpose()
}

/// Pooling in sentence-transformers' files; the mean by default, as there.
fn pooling(folder: &HfFolder) -> Result<Pooling, Error> {
    const KNOWN: &str = "pooling_mode_mean_tokens or pooling_mode_cls_token, alone";
    let Some(modes) = pooling_modes(folder)? else {
        return Ok(Pooling::Mean);
    };
    match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
        ["pooling_mode_cls_token"] => Ok(Pooling::First),
        _ => Err(wrong("1_Pooling", format!("{modes:?}"), KNOWN)),
    }
}

/// Enabled pooling modes in sentence-transformers' file.
pub(super) fn pooling_modes(folder: &HfFolder) -> Result<Option<Vec<String>>, Error> {
    let settings = folder.settings("1_Pooling/config.json")?;
    let is_on = |(name, value): &(&String, &Value)| {
        name.starts_with("pooling_mode_") && **value == Value::Bool(true)
    };
    Ok(settings.map(|settings| {
        let modes = settings.as_object().into_iter().flatten();
        modes.filter(is_on).map(|(name, _)| name.clone()).collect()
    }))
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

pub(super) fn wrong(
    field: &'static str,
    got: impl ToString,
    expected: impl Into<Cow<'static, str>>,
) -> Error {
    Error::Value {
        field,
        got: got.to_string(),
        expected: expected.into(),
    }
}
