//! Configuration fields from GGUF metadata or `config.json`, under the names of both layouts.
//!
//! Readers in the families call [`ConfigFields`]. Each reader checks type and range, and its error
//! names the field.

mod compressed;
mod dbrx;
mod delta_net;
mod dense;
mod experts;
mod gemma4;
mod indexer;
mod known_keys;
mod latent;
mod mamba;
mod minimax;
mod ngrams;
mod rope;
mod short_conv;
mod streams;
mod unknown_fields;
mod unsupported_keys;

pub(crate) use compressed::V41;
pub(crate) use rope::{RopeKind, head_rope};
pub(crate) use unknown_fields::of_source as unknown_fields;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use paceline_tensor::RopePairs;
use paceline_weights::gguf::{self, Array, Gguf, Metadata};
use serde_json::Value;

use super::ModelFamily;
use crate::config::{Activation, MAX_WIDTH};
use crate::{Config, Error, ModelSource};
use experts::MAX_EXPERTS;

/// Architecture of EmbeddingGemma in GGUF files.
pub(super) const GEMMA_EMBEDDING: &str = "gemma-embedding";

/// The configuration of an opened model in either layout.
#[derive(Debug)]
pub(crate) enum ConfigFields<'a> {
    /// Keys have the architecture as prefix.
    Gguf {
        file: &'a Gguf,
        metadata: &'a Metadata,
        architecture: &'a str,
    },
    /// `config.json`, or its text part.
    Hf(&'a Value),
}

/// Text part of the `config.json` of a multimodal model, if that says its type.
fn text_part(config: &Value) -> &Value {
    let text = config.get("text_config");
    text.filter(|text| type_of(text).is_some())
        .unwrap_or(config)
}

/// `model_type` of a text part. Published ones of MiniMax M3 name their class alone; those of
/// DeepSeek V4.1 have a name of their own.
pub(crate) fn type_of(config: &Value) -> Option<&str> {
    const M3_CLASS: &str = "MiniMaxM3SparseForCausalLM";
    let said = config.get("model_type").and_then(Value::as_str);
    let class = || config.pointer("/architectures/0").and_then(Value::as_str);
    match said {
        Some("deepseek_v41_text") => Some(V41),
        None | Some("" | "minimax_m3") if class() == Some(M3_CLASS) => {
            Some(ModelFamily::MiniMaxM3.hf_name())
        }
        said => said,
    }
}

/// Default of a field that files leave out. The published text parts of Gemma 3 lack fields with
/// the default of their class (`configuration_gemma3.py` and its siblings of transformers).
pub(crate) fn class_default(model_type: Option<&str>, field: &str) -> Option<&'static Value> {
    static GEMMA3N: LazyLock<Value> = LazyLock::new(|| {
        serde_json::json!({
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2048,
            "intermediate_size": 16_384, "max_position_embeddings": 32_768,
            "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2,
            "num_kv_shared_layers": 15, "rms_norm_eps": 1e-6, "sliding_window": 512,
            "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144
        })
    });
    static GLM_NEXT: LazyLock<Value> = LazyLock::new(|| {
        serde_json::json!({
            "index_kpool": 16, "linear_conv_kernel_dim": 4, "linear_head_dim": 128,
            "linear_lower_bound": -5.0, "linear_num_heads": 64, "qk_rope_head_dim": 0,
            "routed_scaling_factor": 2.5, "swiglu_limit": 10.0
        })
    });
    if model_type == Some(ModelFamily::Gemma3n.hf_name()) {
        return GEMMA3N.get(field);
    }
    if model_type == Some(ModelFamily::Glm5Next.hf_name()) {
        return GLM_NEXT.get(field);
    }
    if model_type != Some(ModelFamily::Gemma3.hf_name()) {
        return None;
    }
    static DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
        serde_json::json!({
            "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216,
            "max_position_embeddings": 131_072, "num_attention_heads": 8,
            "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6, "sliding_window": 4096, "vocab_size": 262_208
        })
    });
    DEFAULTS.get(field)
}

impl<'a> ConfigFields<'a> {
    pub(crate) fn of(source: &'a ModelSource) -> Result<Self, Error> {
        Ok(match source {
            ModelSource::Gguf(file) => {
                let metadata = file.metadata();
                Self::Gguf {
                    file,
                    metadata,
                    architecture: metadata.str("general.architecture")?,
                }
            }
            ModelSource::Hf(folder) => Self::Hf(text_part(folder.config())),
        })
    }

    pub(crate) fn family(&self) -> Result<ModelFamily, Error> {
        let in_folder = matches!(self, Self::Hf(_));
        let (name, names): (&str, fn(ModelFamily) -> &'static str) = match self {
            Self::Gguf { architecture, .. } => (architecture, ModelFamily::name),
            Self::Hf(_) => (self.model_type()?, ModelFamily::hf_name),
        };
        let mixtral = |family| match self.experts_in_file() {
            Ok(true) if family == ModelFamily::Llama => ModelFamily::Mixtral,
            _ => family,
        };
        ModelFamily::ALL
            .into_iter()
            .filter(|f| in_folder || f.has_gguf())
            .find(|f| names(*f) == name || f.other_names().contains(&name))
            .map(mixtral)
            .ok_or_else(|| Error::Architecture {
                architecture: shortened(name),
                supported: known_names(names),
            })
    }

    /// Feed-forward width of each layer; in models with experts only, the width of an expert.
    pub(crate) fn ffns(&self, family: ModelFamily, layers: usize) -> Result<Vec<usize>, Error> {
        if let (Self::Hf(_), ModelFamily::Lfm2) = (self, family) {
            return Ok(vec![self.lfm2_ffn()?; layers]);
        }
        if family == ModelFamily::NemotronH {
            let names = ("feed_forward_length", "intermediate_size");
            let ffn = self.opt_largest(names, (0, MAX_WIDTH))?;
            let ffn = ffn.ok_or_else(|| self.missing(names.0, names.1))?;
            return Ok(vec![ffn; layers]);
        }
        let of = |gguf, hf| self.opt_sizes((gguf, hf), layers, (1, MAX_WIDTH));
        let usual = of("feed_forward_length", "intermediate_size")?;
        let experts = match family {
            ModelFamily::Qwen35Moe | ModelFamily::Qwen4Exp | ModelFamily::DeepSeek4
                if usual.is_none() =>
            {
                of("expert_feed_forward_length", "moe_intermediate_size")?
            }
            _ => None,
        };
        let missing = || self.missing("feed_forward_length", "intermediate_size");
        usual.or(experts).ok_or_else(missing)
    }

    fn model_type(&self) -> Result<&'a str, Error> {
        const FIELD: &str = "model_type";
        let said = self.hf(FIELD, "a string", Value::as_str)?;
        match self {
            Self::Hf(config) => type_of(config),
            Self::Gguf { .. } => said,
        }
        .ok_or(Error::MissingField { field: FIELD })
    }

    /// Whether it is a folder whose text part has this `model_type`.
    pub(crate) fn is_type(&self, name: &str) -> bool {
        matches!(self, Self::Hf(_)) && self.model_type().is_ok_and(|own| own == name)
    }

    /// Whether it is Kimi Linear or Kimi K3.
    fn is_kimi(&self) -> bool {
        self.is_type("kimi_linear") || self.is_type("kimi_k3")
    }

    /// An integer in `low..=high`.
    pub(crate) fn size(
        &self,
        gguf: &'static str,
        hf: &'static str,
        low: u64,
        high: u64,
    ) -> Result<usize, Error> {
        self.opt_size(gguf, hf, low, high)?
            .ok_or_else(|| self.missing(gguf, hf))
    }

    pub(super) fn missing(&self, gguf: &str, hf: &'static str) -> Error {
        match self {
            Self::Gguf { .. } => gguf::Error::MissingKey {
                key: self.key(gguf),
            }
            .into(),
            Self::Hf(config) => Error::MissingField {
                field: dbrx::place(config, hf).1,
            },
        }
    }

    /// An integer in `low..=high`, `None` when absent or null.
    pub(crate) fn opt_size(
        &self,
        gguf: &'static str,
        hf: &'static str,
        low: u64,
        high: u64,
    ) -> Result<Option<usize>, Error> {
        let (field, number) = match self {
            Self::Gguf { metadata, .. } => (gguf, metadata.opt_u64(&self.key(gguf))?),
            Self::Hf(config) => {
                let number = self.hf(hf, "a non-negative integer", Value::as_u64)?;
                (dbrx::place(config, hf).1, number)
            }
        };
        let Some(number) = number else {
            return Ok(None);
        };
        if number < low || number > high {
            return Err(wrong_value(field, number, format!("{low} to {high}")));
        }
        Ok(Some(number as usize))
    }

    /// An integer in `low..=high` for each of `layers` layers: one for all, or a list. `None` if
    /// absent or null.
    pub(crate) fn opt_sizes(
        &self,
        (gguf, hf): (&'static str, &'static str),
        layers: usize,
        (low, high): (u64, u64),
    ) -> Result<Option<Vec<usize>>, Error> {
        let listed = |list: &Value| Some(list.as_array().cloned());
        let list = self.hf(hf, "a list", listed)?.flatten();
        if let Some(list) = list.filter(|list| list.len() == layers) {
            let number = |n: &Value| match n.as_u64().filter(|n| (low..=high).contains(n)) {
                Some(n) => Ok(n as usize),
                None => Err(wrong_value(hf, n, format!("{low} to {high}"))),
            };
            return list.iter().map(number).collect::<Result<_, _>>().map(Some);
        }
        let Self::Gguf { metadata, .. } = self else {
            let one = self.opt_size(gguf, hf, low, high)?;
            return Ok(one.map(|one| vec![one; layers]));
        };
        let key = self.key(gguf);
        let Some(gguf::MetadataValue::Array(_)) = metadata.get(&key) else {
            let one = self.opt_size(gguf, hf, low, high)?;
            return Ok(one.map(|one| vec![one; layers]));
        };
        let list = metadata.u64s(&key)?;
        check_layers(gguf, list.len(), layers)?;
        match list.iter().find(|n| !(low..=high).contains(n)) {
            Some(bad) => Err(wrong_value(gguf, bad, format!("{low} to {high}"))),
            None => Ok(Some(list.iter().map(|n| *n as usize).collect())),
        }
    }

    /// The largest integer of a list, or the only one, in `low..=high`. `None` if absent or null.
    pub(crate) fn opt_largest(
        &self,
        (gguf, hf): (&'static str, &'static str),
        (low, high): (u64, u64),
    ) -> Result<Option<usize>, Error> {
        let Self::Gguf { metadata, .. } = self else {
            return self.opt_size(gguf, hf, low, high);
        };
        let len = match metadata.get(&self.key(gguf)) {
            Some(gguf::MetadataValue::Array(list)) => list.len(),
            _ => 1,
        };
        let all = self.opt_sizes((gguf, hf), len, (low, high))?;
        Ok(all.and_then(|all| all.into_iter().max()))
    }

    pub(crate) fn float(&self, gguf: &'static str, hf: &'static str) -> Result<f32, Error> {
        self.opt_float(gguf, hf)?
            .ok_or_else(|| self.missing(gguf, hf))
    }

    pub(crate) fn opt_float(
        &self,
        gguf: &'static str,
        hf: &'static str,
    ) -> Result<Option<f32>, Error> {
        match self {
            Self::Gguf { metadata, .. } => Ok(metadata.opt_f32(&self.key(gguf))?),
            Self::Hf(_) => {
                let value = self.hf(hf, "a number", Value::as_f64)?;
                Ok(value.map(|value| value as f32))
            }
        }
    }

    /// Rows of the embedding.
    pub(crate) fn vocab(&self) -> Result<usize, Error> {
        const LIMIT: u64 = 1 << 24;
        match self {
            Self::Gguf { metadata, .. } => {
                let array = metadata.array("tokenizer.ggml.tokens")?;
                Ok(self
                    .opt_size("vocab_size", "vocab_size", 1, LIMIT)?
                    .unwrap_or_else(|| array.len()))
            }
            Self::Hf(_) => self.size("vocab_size", "vocab_size", 1, LIMIT),
        }
    }

    /// Pairs that are rotated together in the llama family.
    pub(crate) const fn permuted_pairs(&self) -> RopePairs {
        match self {
            Self::Gguf { .. } => RopePairs::Adjacent,
            Self::Hf(_) => RopePairs::Halves,
        }
    }

    /// Whether it is a GGUF file with experts: Mixtral has Llama's architecture there.
    fn experts_in_file(&self) -> Result<bool, Error> {
        let Self::Gguf { .. } = self else {
            return Ok(false);
        };
        let count = self.opt_size("expert_count", "", 0, MAX_EXPERTS)?;
        Ok(count.is_some_and(|n| n > 0))
    }

    /// Epsilon of norms.
    pub(crate) fn norm_eps(&self, family: ModelFamily) -> Result<f32, Error> {
        match (self, family) {
            (Self::Hf(_), ModelFamily::Dbrx) => Ok(1e-5), // default of torch's LayerNorm
            (Self::Gguf { .. }, ModelFamily::Dbrx) => {
                self.float("attention.layer_norm_epsilon", "")
            }
            (Self::Hf(_), ModelFamily::Lfm2 | ModelFamily::Lfm2Moe) => self.float("", "norm_eps"),
            (Self::Hf(_), ModelFamily::NemotronH) => self.float("", "layer_norm_epsilon"),
            _ => self.float("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        }
    }

    /// Refuses sliding windows, which early files of the family name and later ones do not have.
    pub(crate) fn refuse_window(&self) -> Result<(), Error> {
        match self.hf("sliding_window", "a number", Value::as_u64)? {
            None => Ok(()),
            Some(n) => Err(wrong_value("sliding_window", n, "null")),
        }
    }

    /// Refuses mixture-of-experts files of a dense family.
    pub(crate) fn refuse_experts(&self) -> Result<(), Error> {
        match self.opt_size("expert_count", "num_local_experts", 0, u64::MAX)? {
            None | Some(0) => Ok(()),
            Some(n) => Err(wrong_value(
                "number of experts",
                n,
                "none (experts of this family are not supported)",
            )),
        }
    }

    /// Refuses a feed-forward activation other than the family's; GGUF files do not state it.
    pub(crate) fn check_activation(&self, expected: Activation) -> Result<(), Error> {
        let (names, expected): (&[&str], _) = match expected {
            Activation::Silu => (&["silu", "swish"], "silu"),
            Activation::GeluTanh => (&["gelu_pytorch_tanh"], "gelu_pytorch_tanh"),
            Activation::ReluSquared => (&["relu2"], "relu2"),
            Activation::Situ { .. } => (&[latent::SITU], latent::SITU),
        };
        for key in ["hidden_act", "hidden_activation", "mlp_hidden_act"] {
            match self.hf(key, "a string", Value::as_str)? {
                Some("swigluoai") if self.is_type("minimax_m3_vl_text") => {}
                Some(latent::SITU) if self.is_kimi() => {}
                Some(name) if !names.contains(&name) => {
                    return Err(wrong_value(key, name, expected));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the output head is the embedding. `None` if that depends on the file having an
    /// output tensor, as in GGUF files. Gemma's `config.json` states it only if untied.
    pub(crate) fn tied(&self, family: ModelFamily) -> Result<Option<bool>, Error> {
        let said = match self.hf("tie_word_embeddings", "true or false", Value::as_bool)? {
            None => self.hf("tie_embedding", "true or false", Value::as_bool)?,
            said => said,
        };
        Ok(match self {
            Self::Gguf { .. } => None,
            Self::Hf(_) => Some(said.unwrap_or(family.is_usually_tied())),
        })
    }

    /// Sliding windows of qwen models in the Hugging Face layout; GGUF files do not carry them.
    pub(crate) fn set_qwen_windows(&self, config: &mut Config) -> Result<(), Error> {
        let Self::Hf(json) = self else { return Ok(()) };
        if self.hf("use_sliding_window", "true or false", Value::as_bool)? != Some(true) {
            return Ok(());
        }
        let window = self.size("", "sliding_window", 1, u64::from(u32::MAX))?;
        let bound = || self.size("", "max_window_layers", 0, u64::from(u32::MAX));
        let n = config.layers.len();
        // The rules of the classes in transformers differ.
        let windowed = match (config.family, layer_types(json, n)?) {
            (ModelFamily::Qwen3Moe, _) => vec![true; n],
            (_, Some(types)) => types,
            (ModelFamily::Qwen2Moe, None) => {
                let end = bound()?;
                (0..n).map(|i| i % 2 == 0 && i < end).collect()
            }
            (_, None) => {
                let first = bound()?;
                (0..n).map(|i| i >= first).collect()
            }
        };
        for (layer, windowed) in config.layers.iter_mut().zip(windowed) {
            layer.window = windowed.then_some(window);
        }
        Ok(())
    }

    /// 1 in the Hugging Face layout, whose norm weights are offsets from 1. 0 in GGUF files, whose
    /// converter has added it.
    pub(crate) const fn gemma_norm_offset(&self) -> f32 {
        match self {
            Self::Gguf { .. } => 0.0,
            Self::Hf(_) => 1.0,
        }
    }

    /// Divisor of scores is the root of this: the head size by default. In the 27B model it is the
    /// width per query head. GGUF files identify that model only by its number of layers
    /// (`src/models/gemma3.cpp` of llama.cpp).
    pub(crate) fn gemma_query_scalar(&self, config: &Config) -> Result<f32, Error> {
        const LAYERS_27B: usize = 62;
        let scalar = match self.opt_float("attention.query_scalar", "query_pre_attn_scalar")? {
            Some(scalar) => scalar,
            None if config.layers.len() == LAYERS_27B => (config.width / config.heads) as f32,
            None => config.head_dim as f32,
        };
        if scalar.is_finite() && scalar > 0.0 {
            Ok(scalar)
        } else {
            Err(wrong_value("query scalar", scalar, "above 0"))
        }
    }

    /// Whether positions of Gemma 3 attend to later ones too: EmbeddingGemma.
    pub(crate) fn is_bidirectional(&self) -> Result<bool, Error> {
        match self {
            Self::Gguf {
                architecture,
                metadata,
                ..
            } => {
                let causal = metadata.opt_bool(&self.key("attention.causal"))?;
                let is_gemma3 = *architecture == ModelFamily::Gemma3.name();
                Ok(*architecture == GEMMA_EMBEDDING || is_gemma3 && causal == Some(false))
            }
            Self::Hf(_) => {
                const FIELD: &str = "use_bidirectional_attention";
                const CAUSAL: &str = "is_causal";
                if self.model_type()? != ModelFamily::Gemma3.hf_name() {
                    return Ok(false);
                }
                let said = |name| self.hf(name, "true or false", Value::as_bool);
                match (said(FIELD)?, said(CAUSAL)?) {
                    (Some(true), _) => Ok(true),
                    (_, Some(false)) => Err(wrong_value(CAUSAL, false, "true")),
                    _ => Ok(false),
                }
            }
        }
    }

    /// Size of the sliding window in positions.
    pub(crate) fn window(&self) -> Result<usize, Error> {
        self.size(
            "attention.sliding_window",
            "sliding_window",
            1,
            u64::from(u32::MAX),
        )
    }

    /// Whether each layer has a sliding window: by default all but every `usual`th.
    pub(crate) fn windowed(&self, layers: usize, usual: usize) -> Result<Vec<bool>, Error> {
        if let Self::Hf(json) = self
            && let Some(windowed) = layer_types(json, layers)?
        {
            return Ok(windowed);
        }
        const GGUF: &str = "attention.sliding_window_pattern";
        if let Self::Gguf { metadata, .. } = self
            && let Some(gguf::MetadataValue::Array(list)) = metadata.get(&self.key(GGUF))
        {
            check_layers(GGUF, list.len(), layers)?;
            return match list {
                Array::Bool(windowed) => Ok(windowed.clone()),
                _ => Ok(metadata
                    .u64s(&self.key(GGUF))?
                    .iter()
                    .map(|n| *n != 0)
                    .collect()),
            };
        }
        let pattern = self.opt_size(GGUF, "sliding_window_pattern", 1, u64::from(u32::MAX))?;
        let full = |i: usize| (i + 1).is_multiple_of(pattern.unwrap_or(usual));
        Ok((0..layers).map(|i| !full(i)).collect())
    }

    fn key(&self, name: &str) -> String {
        match self {
            Self::Gguf { architecture, .. } => format!("{architecture}.{name}"),
            Self::Hf(_) => name.to_owned(),
        }
    }

    /// A field of `config.json`; `None` when absent, null, or in a GGUF file.
    fn hf<T>(
        &self,
        name: &str,
        expected: &'static str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self {
            Self::Gguf { .. } => Ok(None),
            Self::Hf(config) => {
                let (object, name) = dbrx::place(config, name);
                let model_type = config.get("model_type").and_then(Value::as_str);
                match object.get(name) {
                    None => Ok(class_default(model_type, name).and_then(convert)),
                    Some(_) => field(object, name, expected, convert),
                }
            }
        }
    }
}

/// Names of all families in a layout, each once.
fn known_names(names: fn(ModelFamily) -> &'static str) -> String {
    let of = |family: ModelFamily| {
        [names(family)]
            .into_iter()
            .chain(family.other_names().to_vec())
    };
    let all: BTreeSet<&str> = ModelFamily::ALL.into_iter().flat_map(of).collect();
    all.into_iter().collect::<Vec<_>>().join(", ")
}

/// Refuses a list without one entry per layer.
fn check_layers(field: &'static str, got: usize, layers: usize) -> Result<(), Error> {
    if got == layers {
        return Ok(());
    }
    let expected = format!("one for each of {layers} layers");
    Err(wrong_value(field, format!("a list of {got}"), expected))
}

/// The field `name` of a JSON object; `None` when absent or null.
fn field<'a, T>(
    object: &'a Value,
    name: &str,
    expected: &'static str,
    convert: impl Fn(&'a Value) -> Option<T>,
) -> Result<Option<T>, Error> {
    match object.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => convert(value)
            .map(Some)
            .ok_or_else(|| wrong_type(name, expected, value)),
    }
}

fn wrong_type(field: &str, expected: &'static str, got: &Value) -> Error {
    Error::FieldType {
        field: field.to_owned(),
        expected,
        got: shortened(&got.to_string()),
    }
}

fn wrong_value(
    field: &'static str,
    got: impl ToString,
    expected: impl Into<Cow<'static, str>>,
) -> Error {
    Error::Value {
        field,
        got: shortened(&got.to_string()),
        expected: expected.into(),
    }
}

/// Truncates text of a file for an error message.
fn shortened(text: &str) -> String {
    const CHARS: usize = 80;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// `layer_types` as flags for sliding windows, `None` if absent.
fn layer_types(config: &Value, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    const FIELD: &str = "layer_types";
    let Some(value) = field(config, FIELD, "an array", Some)? else {
        return Ok(None);
    };
    let expected = "an array of full_attention or sliding_attention, one per layer";
    let wrong = || wrong_type(FIELD, expected, value);
    let types = value
        .as_array()
        .filter(|types| types.len() == layers)
        .ok_or_else(wrong)?;
    let windowed = types.iter().map(|kind| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(wrong()),
    });
    windowed.collect::<Result<_, _>>().map(Some)
}
