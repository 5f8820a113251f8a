//! Reading configuration values from GGUF metadata or `config.json` under their two names.

use paceline_formats::gguf::Metadata;
use paceline_tensor::RopePairs;
use serde_json::Value;

use super::Family;
use crate::rope::{Llama3Scaling, MAX_PAIRS, Rope};
use crate::{Config, Error, Source};

/// The configuration of an opened model, whichever layout it has.
#[derive(Debug)]
pub(crate) enum Fields<'a> {
    /// Keys carry the architecture as prefix.
    Gguf {
        metadata: &'a Metadata,
        architecture: &'a str,
    },
    /// `config.json`.
    Hf(&'a Value),
}

impl<'a> Fields<'a> {
    pub(crate) fn of(source: &'a Source) -> Result<Self, Error> {
        Ok(match source {
            Source::Gguf(file) => {
                let metadata = file.metadata();
                Self::Gguf {
                    metadata,
                    architecture: metadata.str("general.architecture")?,
                }
            }
            Source::Hf(folder) => Self::Hf(folder.config()),
        })
    }

    pub(crate) fn family(&self) -> Result<Family, Error> {
        let (name, names): (&str, fn(Family) -> &'static str) = match self {
            Self::Gguf { architecture, .. } => (architecture, Family::name),
            Self::Hf(config) => (self.model_type(config)?, Family::hf_name),
        };
        Family::ALL
            .into_iter()
            .find(|f| names(*f) == name)
            .ok_or_else(|| Error::Architecture {
                architecture: name.to_owned(),
                supported: Family::ALL.map(names).join(", "),
            })
    }

    fn model_type(&self, config: &'a Value) -> Result<&'a str, Error> {
        const FIELD: &str = "model_type";
        let value = config
            .get(FIELD)
            .ok_or(Error::MissingField { field: FIELD })?;
        value
            .as_str()
            .ok_or_else(|| wrong_type(FIELD, "a string", value))
    }

    /// An integer in `low..=high`.
    pub(crate) fn size(
        &self,
        gguf: &'static str,
        hf: &'static str,
        low: u64,
        high: u64,
    ) -> Result<usize, Error> {
        match (self.opt_size(gguf, hf, low, high)?, self) {
            (Some(size), _) => Ok(size),
            (None, Self::Hf(_)) => Err(Error::MissingField { field: hf }),
            (None, Self::Gguf { metadata, .. }) => {
                Err(metadata.u64(&self.key(gguf)).map_or_else(Error::from, |_| {
                    unreachable!("{gguf} was absent a moment ago")
                }))
            }
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
            Self::Hf(_) => (
                hf,
                self.number(hf, "a non-negative integer", Value::as_u64)?,
            ),
        };
        let Some(number) = number else {
            return Ok(None);
        };
        if number < low || number > high {
            let got = number.to_string();
            return Err(Error::Value {
                field,
                got,
                expected: "a size within paceline's limits",
            });
        }
        Ok(Some(number as usize))
    }

    pub(crate) fn float(&self, gguf: &'static str, hf: &'static str) -> Result<f32, Error> {
        match (self.opt_float(gguf, hf)?, self) {
            (Some(value), _) => Ok(value),
            (None, Self::Hf(_)) => Err(Error::MissingField { field: hf }),
            (None, Self::Gguf { metadata, .. }) => Ok(metadata.f32(&self.key(gguf))?),
        }
    }

    pub(crate) fn opt_float(
        &self,
        gguf: &'static str,
        hf: &'static str,
    ) -> Result<Option<f32>, Error> {
        match self {
            Self::Gguf { metadata, .. } => Ok(metadata.opt_f32(&self.key(gguf))?),
            Self::Hf(_) => Ok(self
                .number(hf, "a number", Value::as_f64)?
                .map(|value| value as f32)),
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

    /// Which elements of a head turn together in the llama family.
    pub(crate) const fn permuted_pairs(&self) -> RopePairs {
        match self {
            Self::Gguf { .. } => RopePairs::Adjacent,
            Self::Hf(_) => RopePairs::Halves,
        }
    }

    /// Refuses mixture-of-experts files of a dense family.
    pub(crate) fn refuse_experts(&self) -> Result<(), Error> {
        match self.opt_size("expert_count", "num_local_experts", 0, u64::MAX)? {
            None | Some(0) => Ok(()),
            Some(n) => Err(Error::Value {
                field: "number of experts",
                got: n.to_string(),
                expected: "none (mixture-of-experts models are not supported yet)",
            }),
        }
    }

    /// The rotary embedding of full-attention layers.
    pub(crate) fn rope(&self, config: &Config, pairs: RopePairs) -> Result<Rope, Error> {
        match self {
            Self::Gguf { .. } => {
                let base = self.opt_float("rope.freq_base", "")?.unwrap_or(10_000.0);
                let rotated = self
                    .opt_size("rope.dimension_count", "", 2, config.head_dim as u64)?
                    .unwrap_or(config.head_dim);
                let linear = self.gguf_linear_factor()?;
                checked_rope(pairs, rotated, f64::from(base), linear)
            }
            Self::Hf(json) => {
                let parameters = rope_parameters(json, "full_attention");
                self.hf_rope(config, pairs, parameters, "rope_theta", 10_000.0)
            }
        }
    }

    fn gguf_linear_factor(&self) -> Result<f64, Error> {
        let Self::Gguf { metadata, .. } = self else {
            return Ok(1.0);
        };
        match metadata.opt_str(&self.key("rope.scaling.type"))? {
            None | Some("none") => Ok(1.0),
            Some("linear") => {
                let factor = self.opt_float("rope.scaling.factor", "")?;
                Ok(f64::from(factor.unwrap_or(1.0)))
            }
            Some(other) => Err(Error::Value {
                field: "rope scaling",
                got: other.to_owned(),
                expected: "none or linear",
            }),
        }
    }

    /// A rotary embedding from `rope_parameters`, `rope_scaling` and a base under `theta`.
    fn hf_rope(
        &self,
        config: &Config,
        pairs: RopePairs,
        parameters: Option<&Value>,
        theta: &'static str,
        default: f64,
    ) -> Result<Rope, Error> {
        let of = |name: &str| parameters.and_then(|p| p.get(name)).and_then(Value::as_f64);
        let base = match of("rope_theta") {
            Some(base) => base,
            None => self
                .number(theta, "a number", Value::as_f64)?
                .unwrap_or(default),
        };
        let kind = parameters.and_then(|p| p.get("rope_type").or_else(|| p.get("type")));
        let need = |name: &'static str| of(name).ok_or(Error::MissingField { field: name });
        let plain = |linear| checked_rope(pairs, config.head_dim, base, linear);
        match kind.and_then(Value::as_str) {
            None | Some("default") => plain(1.0),
            Some("linear") => plain(need("factor")?),
            Some("llama3") => Ok(plain(1.0)?.with_llama3(Llama3Scaling {
                factor: need("factor")?,
                low: need("low_freq_factor")?,
                high: need("high_freq_factor")?,
                original_context: need("original_max_position_embeddings")?,
            })),
            Some(other) => Err(Error::Value {
                field: "rope_type",
                got: other.to_owned(),
                expected: "default, linear or llama3",
            }),
        }
    }

    /// Sliding windows of qwen models in the Hugging Face layout; GGUF files do not carry them.
    pub(crate) fn set_qwen_windows(&self, config: &mut Config) -> Result<(), Error> {
        let Self::Hf(json) = self else { return Ok(()) };
        if json.get("use_sliding_window").and_then(Value::as_bool) != Some(true) {
            return Ok(());
        }
        let window = self.size("", "sliding_window", 1, u64::from(u32::MAX))?;
        let first = self.size("", "max_window_layers", 0, u64::from(u32::MAX))?;
        let windowed = match layer_types(json, config.layers.len())? {
            Some(types) => types,
            None => (0..config.layers.len()).map(|i| i >= first).collect(),
        };
        for (layer, windowed) in config.layers.iter_mut().zip(windowed) {
            layer.window = windowed.then_some(window);
        }
        Ok(())
    }

    /// 1 in the Hugging Face layout, whose norm weights are offsets from 1; 0 in GGUF files, where
    /// the converter has added it.
    pub(crate) const fn gemma_norm_offset(&self) -> f32 {
        match self {
            Self::Gguf { .. } => 0.0,
            Self::Hf(_) => 1.0,
        }
    }

    pub(crate) fn gemma_window(&self) -> Result<usize, Error> {
        self.size(
            "attention.sliding_window",
            "sliding_window",
            1,
            u64::from(u32::MAX),
        )
    }

    /// The rotary embedding of windowed layers: base 10000 unless said otherwise, never scaled.
    pub(crate) fn gemma_window_rope(&self, config: &Config) -> Result<Rope, Error> {
        const BASE: f64 = 10_000.0;
        match self {
            Self::Gguf { .. } => {
                let base = self
                    .opt_float("rope.freq_base_swa", "")?
                    .map_or(BASE, f64::from);
                checked_rope(RopePairs::Halves, config.head_dim, base, 1.0)
            }
            Self::Hf(json) => {
                let parameters = json
                    .get("rope_parameters")
                    .and_then(|p| p.get("sliding_attention"));
                let theta = "rope_local_base_freq";
                self.hf_rope(config, RopePairs::Halves, parameters, theta, BASE)
            }
        }
    }

    /// Which layers see a window only. GGUF files do not say: all but every sixth.
    pub(crate) fn gemma_windowed(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const PATTERN: usize = 6;
        let pattern = match self {
            Self::Gguf { .. } => PATTERN,
            Self::Hf(json) => {
                if let Some(types) = layer_types(json, layers)? {
                    return Ok(types);
                }
                self.opt_size("", "sliding_window_pattern", 1, 1 << 10)?
                    .unwrap_or(PATTERN)
            }
        };
        Ok((0..layers)
            .map(|i| !(i + 1).is_multiple_of(pattern))
            .collect())
    }

    fn key(&self, name: &str) -> String {
        match self {
            Self::Gguf { architecture, .. } => format!("{architecture}.{name}"),
            Self::Hf(_) => name.to_owned(),
        }
    }

    /// A number of `config.json`; `None` when absent or null.
    fn number<T>(
        &self,
        name: &str,
        expected: &'static str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Self::Hf(config) = self else {
            return Ok(None);
        };
        match config.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => convert(value)
                .map(Some)
                .ok_or_else(|| wrong_type(name, expected, value)),
        }
    }
}

fn wrong_type(field: &str, expected: &'static str, got: &Value) -> Error {
    let mut got = got.to_string();
    if got.len() > 80 {
        got = got.chars().take(80).chain("...".chars()).collect();
    }
    Error::FieldType {
        field: field.to_owned(),
        expected,
        got,
    }
}

fn checked_rope(pairs: RopePairs, rotated: usize, base: f64, linear: f64) -> Result<Rope, Error> {
    let value = |field, got: String, expected| {
        Err(Error::Value {
            field,
            got,
            expected,
        })
    };
    if !rotated.is_multiple_of(2) || rotated / 2 > MAX_PAIRS {
        return value(
            "rotated elements",
            rotated.to_string(),
            "an even number up to 8192",
        );
    }
    if !(base.is_finite() && base > 0.0) {
        return value("rope base", base.to_string(), "above 0");
    }
    if !(linear.is_finite() && linear > 0.0) {
        return value("rope scaling factor", linear.to_string(), "above 0");
    }
    Ok(Rope::new(pairs, rotated, base, linear))
}

/// The rotary parameters of a kind of layer: newer files have `rope_parameters`, flat or per kind,
/// older ones `rope_scaling`.
fn rope_parameters<'a>(config: &'a Value, kind: &str) -> Option<&'a Value> {
    match config.get("rope_parameters") {
        Some(parameters) => parameters.get(kind).or(Some(parameters)),
        None => config
            .get("rope_scaling")
            .filter(|scaling| !scaling.is_null()),
    }
}

/// `layer_types` as "is windowed", `None` when absent.
fn layer_types(config: &Value, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    const FIELD: &str = "layer_types";
    let value = match config.get(FIELD) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
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
