//! Rotary embeddings as files describe them.

use paceline_tensor::RopePairs;
use serde_json::Value;

use super::{Fields, field, wrong_type, wrong_value};
use crate::rope::{Llama3Scaling, MAX_PAIRS, MIN_DIVISOR, Rope};
use crate::{Config, Error};

/// What [`Fields::rope`] needs to know of the family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeKind {
    /// Which elements turn together.
    pub(crate) pairs: RopePairs,
    /// Base when `config.json` has none (the default of the family's class in transformers).
    pub(crate) hf_base: f64,
}

impl Fields<'_> {
    /// The rotary embedding of full-attention layers.
    pub(crate) fn rope(&self, config: &Config, kind: RopeKind) -> Result<Rope, Error> {
        match self {
            Self::Gguf { .. } => {
                // llama.cpp's default, for every family.
                let base = self.opt_float("rope.freq_base", "")?.unwrap_or(10_000.0);
                let rotated = self
                    .opt_size("rope.dimension_count", "", 2, config.head_dim as u64)?
                    .unwrap_or(config.head_dim);
                let linear = self.gguf_linear_factor()?;
                checked(kind.pairs, rotated, f64::from(base), linear)
            }
            Self::Hf(json) => {
                let parameters = match hf_parameters(json, "full_attention")? {
                    None => field(json, "rope_scaling", "an object", as_object)?,
                    found => found,
                };
                self.hf_rope(config.head_dim, kind, parameters, "rope_theta")
            }
        }
    }

    /// The rotary embedding of windowed layers: base 10000 unless said otherwise, never scaled.
    pub(crate) fn gemma_window_rope(&self, config: &Config) -> Result<Rope, Error> {
        let kind = RopeKind {
            pairs: RopePairs::Halves,
            hf_base: 10_000.0,
        };
        match self {
            Self::Gguf { .. } => {
                let base = self.opt_float("rope.freq_base_swa", "")?;
                let base = base.map_or(kind.hf_base, f64::from);
                checked(kind.pairs, config.head_dim, base, 1.0)
            }
            Self::Hf(json) => {
                let parameters = hf_parameters(json, "sliding_attention")?;
                self.hf_rope(config.head_dim, kind, parameters, "rope_local_base_freq")
            }
        }
    }

    /// The divisor of all frequencies; a file without a type of scaling means `linear`, as in
    /// llama.cpp (`src/llama-model.cpp`).
    fn gguf_linear_factor(&self) -> Result<f64, Error> {
        const KEY: &str = "rope.scaling.type";
        let scaling = match self {
            Self::Gguf { metadata, .. } => metadata.opt_str(&self.key(KEY))?,
            Self::Hf(_) => None,
        };
        match scaling {
            Some("none") => Ok(1.0),
            None | Some("linear") => {
                let factor = self.opt_float("rope.scaling.factor", "")?;
                Ok(f64::from(factor.unwrap_or(1.0)))
            }
            Some(other) => Err(wrong_value("rope scaling", other, "none or linear")),
        }
    }

    /// A rotary embedding from the object `parameters`, with a base under `theta` of `config.json`
    /// where that has none.
    fn hf_rope(
        &self,
        head_dim: usize,
        kind: RopeKind,
        parameters: Option<&Value>,
        theta: &'static str,
    ) -> Result<Rope, Error> {
        let of = |name| number(parameters, name);
        let base = match of("rope_theta")? {
            Some(base) => base,
            None => self
                .hf(theta, "a number", Value::as_f64)?
                .unwrap_or(kind.hf_base),
        };
        const PARTIAL: &str = "partial_rotary_factor";
        for part in [of(PARTIAL)?, self.hf(PARTIAL, "a number", Value::as_f64)?] {
            if part.is_some_and(|part| part != 1.0) {
                return Err(wrong_value(PARTIAL, part.unwrap_or(0.0), "1"));
            }
        }
        let plain = |linear| checked(kind.pairs, head_dim, base, linear);
        match scaling_type(parameters)? {
            None | Some("default") => plain(1.0),
            Some("linear") => plain(needed(parameters, "factor")?),
            Some("llama3") => Ok(plain(1.0)?.with_llama3(llama3(parameters)?)),
            Some(other) => Err(wrong_value("rope_type", other, "default, linear or llama3")),
        }
    }
}

fn as_object(value: &Value) -> Option<&Value> {
    value.is_object().then_some(value)
}

/// `rope_parameters` of newer files, which is one object, or one for each kind of layer.
fn hf_parameters<'a>(config: &'a Value, kind: &str) -> Result<Option<&'a Value>, Error> {
    let Some(parameters) = field(config, "rope_parameters", "an object", as_object)? else {
        return Ok(None);
    };
    match field(parameters, kind, "an object", as_object)? {
        None if kind == "full_attention" => Ok(Some(parameters)),
        of_kind => Ok(of_kind),
    }
}

/// `rope_type`, or `type` in older files.
fn scaling_type(parameters: Option<&Value>) -> Result<Option<&str>, Error> {
    let Some(parameters) = parameters else {
        return Ok(None);
    };
    let of = |name| field(parameters, name, "a string", Value::as_str);
    match of("rope_type") {
        Ok(None) => {
            of("type").map_err(|_| wrong_type("rope_type", "a string", &parameters["type"]))
        }
        found => found,
    }
}

fn number(parameters: Option<&Value>, name: &str) -> Result<Option<f64>, Error> {
    match parameters {
        Some(parameters) => field(parameters, name, "a number", Value::as_f64),
        None => Ok(None),
    }
}

fn needed(parameters: Option<&Value>, name: &'static str) -> Result<f64, Error> {
    number(parameters, name)?.ok_or(Error::MissingField { field: name })
}

fn llama3(parameters: Option<&Value>) -> Result<Llama3Scaling, Error> {
    let positive = |name: &'static str| match needed(parameters, name)? {
        value if value > 0.0 => Ok(value),
        value => Err(wrong_value(name, value, "above 0")),
    };
    let scaling = Llama3Scaling {
        factor: positive("factor")?,
        low: positive("low_freq_factor")?,
        high: positive("high_freq_factor")?,
        original_context: positive("original_max_position_embeddings")?,
    };
    if scaling.high > scaling.low {
        Ok(scaling)
    } else {
        Err(wrong_value(
            "high_freq_factor",
            scaling.high,
            "above low_freq_factor",
        ))
    }
}

/// A rotary embedding whose frequencies are all numbers.
fn checked(pairs: RopePairs, rotated: usize, base: f64, linear: f64) -> Result<Rope, Error> {
    if !rotated.is_multiple_of(2) || rotated / 2 > MAX_PAIRS {
        return Err(wrong_value(
            "rotated elements",
            rotated,
            "an even number up to 8192",
        ));
    }
    // Below 1 the frequencies grow from pair to pair; the first one is 1 / linear.
    if !(base.is_finite() && base >= 1.0) {
        return Err(wrong_value("rope base", base, "1 or more"));
    }
    if !(linear.is_finite() && linear >= MIN_DIVISOR) {
        return Err(wrong_value("rope scaling factor", linear, "0.001 or more"));
    }
    Ok(Rope::new(pairs, rotated, base, linear))
}
