//! Fields of rotary embeddings.

use paceline_tensor::RopePairs;
use serde_json::Value;

use super::{ConfigFields, field, wrong_type, wrong_value};
use crate::config::MAX_CONTEXT;
use crate::rope::{
    Llama3Scaling, LongContext, LongFrequencies, MAX_PAIRS, MIN_DIVISOR, Rope, Yarn,
};
use crate::{Config, Error};

/// A family's defaults for [`Fields::rope`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeKind {
    /// Pairs that are rotated together.
    pub(crate) pairs: RopePairs,
    /// Base if `config.json` has none (the default of the family's class in transformers).
    pub(crate) hf_base: f64,
    /// Rotated part of a head if `config.json` does not say; `None` if the whole head must be
    /// rotated.
    pub(crate) partial: Option<f64>,
    /// Gemma 4: the slow pairs may have frequency 0. The value is the rotated part of a head if
    /// `config.json` has no parameters.
    pub(crate) proportional: Option<f64>,
}

impl RopeKind {
    /// Rotation of whole heads.
    pub(crate) const fn plain(pairs: RopePairs, hf_base: f64) -> Self {
        Self {
            pairs,
            hf_base,
            partial: None,
            proportional: None,
        }
    }

    /// [`plain`](Self::plain), with halves of a head as pairs.
    pub(crate) const fn halves(hf_base: f64) -> Self {
        Self::plain(RopePairs::Halves, hf_base)
    }

    /// With this [part](Self::partial) of a head.
    pub(crate) const fn of_part(self, part: f64) -> Self {
        let partial = Some(part);
        Self { partial, ..self }
    }
}

/// Rotary embedding of a draft head by its `config.json`.
pub(crate) fn head_rope(json: &Value, head_dim: usize, kind: RopeKind) -> Result<Rope, Error> {
    let fields = ConfigFields::Hf(json);
    let parameters = fields.hf_rope_parameters()?;
    fields.hf_rope(head_dim, kind, parameters, "rope_theta")
}

impl ConfigFields<'_> {
    /// Rotary embedding of full-attention layers.
    pub(crate) fn rope(&self, config: &Config, kind: RopeKind) -> Result<Rope, Error> {
        match self {
            Self::Gguf { .. } => {
                // The default of llama.cpp, for every family.
                let base = self.opt_float("rope.freq_base", "")?.unwrap_or(10_000.0);
                let rotated = self
                    .opt_size("rope.dimension_count", "", 2, config.head_dim as u64)?
                    .unwrap_or(config.head_dim);
                let base = f64::from(base);
                let plain = |linear| checked(kind.pairs, rotated, base, linear);
                if self.gguf_scaling()? == Some("yarn") {
                    return Ok(plain(1.0)?.with_yarn(base, self.gguf_yarn()?.yarn));
                }
                if self.has_gguf_long_factors()? {
                    return self.gguf_longrope(plain(1.0)?);
                }
                plain(self.gguf_linear_factor()?)
            }
            Self::Hf(_) => {
                let parameters = self.hf_rope_parameters()?;
                self.hf_rope(config.head_dim, kind, parameters, "rope_theta")
            }
        }
    }

    /// Rotary embedding of window layers: base 10000 by default, never scaled.
    pub(crate) fn gemma_window_rope(&self, config: &Config) -> Result<Rope, Error> {
        let kind = RopeKind::plain(RopePairs::Halves, 10_000.0);
        match self {
            Self::Gguf { .. } => {
                let base = self.opt_float("rope.freq_base_swa", "")?;
                let base = base.map_or(kind.hf_base, f64::from);
                let all = config.head_dim;
                let rotated = self.opt_size("rope.dimension_count_swa", "", 2, all as u64)?;
                checked(kind.pairs, rotated.unwrap_or(all), base, 1.0)
            }
            Self::Hf(json) => {
                let parameters = hf_parameters(json, "sliding_attention")?;
                self.hf_rope(config.head_dim, kind, parameters, "rope_local_base_freq")
            }
        }
    }

    /// Divisor of all frequencies. A file without a scaling type means `linear`, as in llama.cpp
    /// (`src/llama-model.cpp`).
    pub(super) fn gguf_linear_factor(&self) -> Result<f64, Error> {
        match self.gguf_scaling()? {
            Some("none") => Ok(1.0),
            None | Some("linear") => {
                let factor = self.opt_float("rope.scaling.factor", "")?;
                Ok(f64::from(factor.unwrap_or(1.0)))
            }
            Some(other) => Err(wrong_value("rope scaling", other, GGUF_TYPES)),
        }
    }

    pub(super) fn gguf_scaling(&self) -> Result<Option<&str>, Error> {
        const KEY: &str = "rope.scaling.type";
        match self {
            Self::Gguf { metadata, .. } => Ok(metadata.opt_str(&self.key(KEY))?),
            Self::Hf(_) => Ok(None),
        }
    }

    /// `YaRN` as in llama.cpp, with the ends of its ramp rounded to whole pairs.
    pub(super) fn gguf_yarn(&self) -> Result<GgufYarn, Error> {
        let of = |key| Ok::<_, Error>(self.opt_float(key, "")?.map(f64::from));
        let context = self.gguf_original_context()?;
        let factor = of("rope.scaling.factor")?.unwrap_or(1.0);
        let attention = of("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let yarn = checked_yarn(Yarn {
            factor,
            original_context: context as f64,
            fast: of("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            slow: of("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            whole_pairs: true,
            magnitude: attention * Yarn::usual_magnitude(factor, 1.0),
        })?;
        Ok(GgufYarn { yarn, attention })
    }

    /// Original training context; the training context if the file does not say.
    fn gguf_original_context(&self) -> Result<usize, Error> {
        let size = |key| self.opt_size(key, "", 1, MAX_CONTEXT);
        match size("rope.scaling.original_context_length")? {
            Some(original) => Ok(original),
            None => self.size("context_length", "", 1, MAX_CONTEXT),
        }
    }

    /// Whether the file has `LongRoPE`'s factors, which llama.cpp identifies by their tensors.
    pub(super) fn has_gguf_long_factors(&self) -> Result<bool, Error> {
        let Self::Gguf { file, .. } = self else {
            return Ok(false);
        };
        let has = |name| file.has(&format!("rope_factors_{name}.weight"));
        match (self.gguf_scaling()?, has("long") && has("short")) {
            (Some("longrope"), false) => {
                let expected = "its factors, rope_factors_long and rope_factors_short, in the file";
                Err(wrong_value("rope scaling", "longrope", expected))
            }
            (_, has_factors) => Ok(has_factors),
        }
    }

    /// `LongRoPE` without its factors, which are read with the weights.
    fn gguf_longrope(&self, mut plain: Rope) -> Result<Rope, Error> {
        let magnitude = self.opt_float("rope.scaling.attn_factor", "")?;
        plain.magnitude = usable(MAGNITUDE, f64::from(magnitude.unwrap_or(1.0)))?;
        plain.long = Some(LongContext {
            original: self.gguf_original_context()?,
            frequencies: LongFrequencies::Fixed(plain.frequencies.clone()),
        });
        Ok(plain)
    }

    /// Longest context: the stated one, or what `YaRN` and dynamic scaling extend the original one
    /// to. Files with scaling added by hand still state the original one.
    pub(crate) fn scaled_context(&self, stated: usize) -> Result<usize, Error> {
        let extended = match self {
            Self::Gguf { .. } if self.gguf_scaling()? == Some("yarn") => {
                let factor = self.opt_float("rope.scaling.factor", "")?.unwrap_or(1.0);
                self.gguf_original_context()? as f64 * f64::from(factor)
            }
            Self::Gguf { .. } => return Ok(stated),
            Self::Hf(_) => {
                let parameters = self.hf_rope_parameters()?;
                let original = match scaling_type(parameters)? {
                    Some("yarn" | "deepseek_yarn") => self.hf_original_context(parameters)?,
                    Some("dynamic") => stated,
                    _ => return Ok(stated),
                };
                original as f64 * number(parameters, "factor")?.unwrap_or(1.0)
            }
        };
        match extended <= MAX_CONTEXT as f64 {
            true => Ok(stated.max(extended as usize)),
            // The reader of the rotation names the factor.
            false if !extended.is_finite() => Ok(stated),
            false => Err(wrong_value(
                "longest context",
                extended,
                "134217728 or less",
            )),
        }
    }

    /// Original training context: next to the parameters as in Phi, in the parameters, or the
    /// training context, in transformers' order.
    fn hf_original_context(&self, parameters: Option<&Value>) -> Result<usize, Error> {
        let said = match self.opt_size("", ORIGINAL, 1, MAX_CONTEXT)? {
            None => number(parameters, ORIGINAL)?,
            outer => return Ok(outer.unwrap_or(1)),
        };
        match said {
            Some(original) if original >= 1.0 && original <= MAX_CONTEXT as f64 => {
                Ok(original as usize)
            }
            Some(other) => Err(wrong_value(ORIGINAL, other, "1 to 134217728")),
            None => self.size("", "max_position_embeddings", 1, MAX_CONTEXT),
        }
    }

    /// `factor`; by default the stated context over the original one.
    fn hf_factor(&self, parameters: Option<&Value>, original: usize) -> Result<f64, Error> {
        match number(parameters, "factor")? {
            Some(factor) => Ok(factor),
            None => {
                let stated = self.size("", "max_position_embeddings", 1, MAX_CONTEXT)?;
                Ok(stated as f64 / original as f64)
            }
        }
    }

    /// Parameters of full attention in `config.json`, under their newer or older name.
    pub(super) fn hf_rope_parameters(&self) -> Result<Option<&Value>, Error> {
        let Self::Hf(json) = self else {
            return Ok(None);
        };
        match hf_parameters(json, "full_attention")? {
            None => field(json, "rope_scaling", "an object", as_object),
            found => Ok(found),
        }
    }

    /// Rotated elements of a head: all, or by `rotary_dim` or `partial_rotary_factor` in families
    /// with these.
    fn hf_rotated(
        &self,
        head_dim: usize,
        kind: RopeKind,
        parameters: Option<&Value>,
    ) -> Result<usize, Error> {
        const PARTIAL: &str = "partial_rotary_factor";
        let said = [
            number(parameters, PARTIAL)?,
            self.hf(PARTIAL, "a number", Value::as_f64)?,
        ];
        let Some(usual) = kind.partial else {
            let mut parts = said.into_iter().flatten();
            return match parts.find(|part| *part != 1.0) {
                Some(part) => Err(wrong_value(PARTIAL, part, "1")),
                None => Ok(head_dim),
            };
        };
        let part = said.into_iter().flatten().next();
        if let (None, Some(rotated)) = (part, self.opt_size("", "rotary_dim", 2, head_dim as u64)?)
        {
            return Ok(rotated);
        }
        let part = part.unwrap_or(usual);
        if part > 0.0 && part <= 1.0 {
            let rotated = (head_dim as f64 * part) as usize;
            if rotated < 2 {
                return Err(wrong_value("rotated elements", rotated, "2 or more"));
            }
            Ok(rotated)
        } else {
            Err(wrong_value(PARTIAL, part, "above 0, at most 1"))
        }
    }

    /// Rotary embedding from the object `parameters`. The base is under `theta` of `config.json` if
    /// the object has none.
    pub(super) fn hf_rope(
        &self,
        head_dim: usize,
        kind: RopeKind,
        parameters: Option<&Value>,
        theta: &'static str,
    ) -> Result<Rope, Error> {
        if let Some(usual) = kind.proportional {
            let base = self.hf_base(parameters, theta, kind.hf_base)?;
            return proportional(head_dim, (kind, usual), parameters, base);
        }
        let rotated = self.hf_rotated(head_dim, kind, parameters)?;
        self.hf_turned(rotated, (kind.pairs, kind.hf_base), parameters, theta)
    }

    /// Base in `parameters`, or under `theta` of `config.json`.
    fn hf_base(
        &self,
        parameters: Option<&Value>,
        theta: &'static str,
        usual: f64,
    ) -> Result<f64, Error> {
        match number(parameters, "rope_theta")? {
            Some(base) => Ok(base),
            None => Ok(self.hf(theta, "a number", Value::as_f64)?.unwrap_or(usual)),
        }
    }

    /// As [`hf_rope`](Self::hf_rope), for `rotated` elements, with explicit pairs and default base.
    pub(super) fn hf_turned(
        &self,
        rotated: usize,
        (pairs, usual_base): (RopePairs, f64),
        parameters: Option<&Value>,
        theta: &'static str,
    ) -> Result<Rope, Error> {
        let base = self.hf_base(parameters, theta, usual_base)?;
        let plain = |linear| checked(pairs, rotated, base, linear);
        match scaling_type(parameters)? {
            None | Some("default" | "mrope") => plain(1.0),
            Some("linear") => plain(needed(parameters, "factor")?),
            Some("llama3") => {
                let original = self.hf_original_context(parameters)?;
                Ok(plain(1.0)?.with_llama3(llama3(parameters, original)?))
            }
            Some("yarn" | "deepseek_yarn") => {
                let original = self.hf_original_context(parameters)?;
                let factor = self.hf_factor(parameters, original)?;
                let yarn = checked_yarn(yarn(parameters, factor, original)?)?;
                Ok(plain(1.0)?.with_yarn(base, yarn))
            }
            Some("longrope" | "su") => self.hf_longrope(plain(1.0)?, parameters),
            Some("dynamic") => {
                let factor = needed(parameters, "factor")?;
                if !(factor.is_finite() && factor >= 1.0 && rotated > 2) {
                    return Err(wrong_value("factor of dynamic rope", factor, "1 or more"));
                }
                let long = LongContext {
                    original: self.size("", "max_position_embeddings", 1, MAX_CONTEXT)?,
                    frequencies: LongFrequencies::GrownBase { base, factor },
                };
                Ok(Rope {
                    long: Some(long),
                    ..plain(1.0)?
                })
            }
            Some(other) => Err(wrong_value("rope_type", other, HF_TYPES)),
        }
    }

    /// `LongRoPE`: factors of short and of long contexts.
    fn hf_longrope(&self, plain: Rope, parameters: Option<&Value>) -> Result<Rope, Error> {
        let original = self.hf_original_context(parameters)?;
        let factor = self.hf_factor(parameters, original)?;
        let pairs = plain.frequencies.len();
        let [short, long] = [
            factors(parameters, "short_factor", pairs)?,
            factors(parameters, "long_factor", pairs)?,
        ];
        let usual = match factor > 1.0 && original > 1 {
            true => libm::sqrt(1.0 + libm::log(factor) / libm::log(original as f64)),
            false => 1.0,
        };
        let magnitude = number(parameters, "attention_factor")?.unwrap_or(usual);
        let long = plain.clone().with_factors(&long).frequencies;
        Ok(Rope {
            magnitude: usable(MAGNITUDE, magnitude)?,
            long: Some(LongContext {
                original,
                frequencies: LongFrequencies::Fixed(long),
            }),
            ..plain.with_factors(&short)
        })
    }
}

/// Types of scaling in `config.json` and in GGUF files.
const HF_TYPES: &str = "default, linear, dynamic, yarn, longrope or llama3";
const GGUF_TYPES: &str = "none, linear, yarn or longrope";

const ORIGINAL: &str = "original_max_position_embeddings";
/// Factor of cosines and sines.
const MAGNITUDE: &str = "attention factor of rope";

/// A factor for each of `pairs` pairs.
fn factors(
    parameters: Option<&Value>,
    name: &'static str,
    pairs: usize,
) -> Result<Vec<f32>, Error> {
    let list = match parameters {
        Some(parameters) => field(parameters, name, "a list of numbers", Value::as_array)?,
        None => None,
    };
    let list = list.ok_or(Error::MissingField { field: name })?;
    if list.len() != pairs {
        let (got, expected) = (list.len(), format!("one for each of {pairs} pairs"));
        return Err(wrong_value(name, format!("a list of {got}"), expected));
    }
    let factor = |value: &Value| match value.as_f64() {
        Some(factor) => usable(name, factor).map(|factor| factor as f32),
        None => Err(wrong_value(name, value, "0.001 or more")),
    };
    list.iter().map(factor).collect()
}

/// A factor or divisor that leaves numbers finite.
fn usable(name: &'static str, value: f64) -> Result<f64, Error> {
    match value.is_finite() && value >= MIN_DIVISOR {
        true => Ok(value),
        false => Err(wrong_value(name, value, "0.001 or more")),
    }
}

/// `YaRN` of a GGUF file.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgufYarn {
    pub(super) yarn: Yarn,
    /// The file's factor of cosines and sines, included in `yarn.magnitude`.
    pub(super) attention: f64,
}

/// Frequencies for the whole head; only the fastest are used, the others are 0.
///
/// Source: `_compute_proportional_rope_parameters` in transformers' `modeling_rope_utils.py`.
fn proportional(
    head_dim: usize,
    (kind, usual): (RopeKind, f64),
    parameters: Option<&Value>,
    base: f64,
) -> Result<Rope, Error> {
    let part = match scaling_type(parameters)? {
        _ if parameters.is_none() => usual,
        None | Some("default") => 1.0,
        Some("proportional") => number(parameters, "partial_rotary_factor")?.unwrap_or(1.0),
        Some(other) => return Err(wrong_value("rope_type", other, "default or proportional")),
    };
    if !(0.0..=1.0).contains(&part) {
        return Err(wrong_value("partial_rotary_factor", part, "0 to 1"));
    }
    let factor = number(parameters, "factor")?.unwrap_or(1.0);
    let turning = (part * head_dim as f64 / 2.0) as usize;
    Ok(checked(kind.pairs, head_dim, base, factor)?.with_turning(turning))
}

fn as_object(value: &Value) -> Option<&Value> {
    value.is_object().then_some(value)
}

/// `rope_parameters` of newer files: one object, or one per kind of layer.
pub(super) fn hf_parameters<'a>(config: &'a Value, kind: &str) -> Result<Option<&'a Value>, Error> {
    let Some(parameters) = field(config, "rope_parameters", "an object", as_object)? else {
        return Ok(None);
    };
    match field(parameters, kind, "an object", as_object)? {
        None if kind == "full_attention" => Ok(Some(parameters)),
        of_kind => Ok(of_kind),
    }
}

/// `rope_type`, or `type` in older files.
pub(super) fn scaling_type(parameters: Option<&Value>) -> Result<Option<&str>, Error> {
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

pub(super) fn number(parameters: Option<&Value>, name: &str) -> Result<Option<f64>, Error> {
    match parameters {
        Some(parameters) => field(parameters, name, "a number", Value::as_f64),
        None => Ok(None),
    }
}

fn needed(parameters: Option<&Value>, name: &'static str) -> Result<f64, Error> {
    number(parameters, name)?.ok_or(Error::MissingField { field: name })
}

fn llama3(parameters: Option<&Value>, original: usize) -> Result<Llama3Scaling, Error> {
    let positive = |name: &'static str| match needed(parameters, name)? {
        value if value > 0.0 => Ok(value),
        value => Err(wrong_value(name, value, "above 0")),
    };
    let scaling = Llama3Scaling {
        factor: positive("factor")?,
        low: positive("low_freq_factor")?,
        high: positive("high_freq_factor")?,
        original_context: original as f64,
    };
    let (name, expected) = ("high_freq_factor", "above low_freq_factor");
    match scaling.high > scaling.low {
        true => Ok(scaling),
        false => Err(wrong_value(name, scaling.high, expected)),
    }
}

/// `YaRN` of `config.json`.
fn yarn(parameters: Option<&Value>, factor: f64, original: usize) -> Result<Yarn, Error> {
    let of = |name| number(parameters, name);
    let given = |name| Ok::<_, Error>(of(name)?.filter(|value| *value != 0.0));
    let usual = match (of("mscale")?, of("mscale_all_dim")?) {
        (Some(one), Some(all)) if one != 0.0 && all != 0.0 => {
            Yarn::usual_magnitude(factor, one) / Yarn::usual_magnitude(factor, all)
        }
        _ => Yarn::usual_magnitude(factor, 1.0),
    };
    let truncate = match parameters {
        Some(parameters) => field(parameters, "truncate", "true or false", Value::as_bool)?,
        None => None,
    };
    Ok(Yarn {
        factor,
        original_context: original as f64,
        fast: given("beta_fast")?.unwrap_or(32.0),
        slow: given("beta_slow")?.unwrap_or(1.0),
        whole_pairs: truncate.unwrap_or(true),
        magnitude: of("attention_factor")?.unwrap_or(usual),
    })
}

/// Checks that `YaRN`'s ramp and frequencies are finite.
fn checked_yarn(yarn: Yarn) -> Result<Yarn, Error> {
    let positive = [
        ("rope scaling factor", yarn.factor),
        ("original context of yarn", yarn.original_context),
        ("beta_fast of yarn", yarn.fast),
        ("beta_slow of yarn", yarn.slow),
        ("attention factor of yarn", yarn.magnitude),
    ];
    for (name, value) in positive {
        usable(name, value)?;
    }
    let (name, expected) = ("beta_fast of yarn", "above beta_slow");
    match yarn.fast > yarn.slow {
        true => Ok(yarn),
        false => Err(wrong_value(name, yarn.fast, expected)),
    }
}

/// A rotary embedding with finite frequencies only.
pub(super) fn checked(
    pairs: RopePairs,
    rotated: usize,
    base: f64,
    linear: f64,
) -> Result<Rope, Error> {
    if !rotated.is_multiple_of(2) || rotated / 2 > MAX_PAIRS {
        let expected = "an even number up to 8192";
        return Err(wrong_value("rotated elements", rotated, expected));
    }
    // Below 1 the frequencies increase from pair to pair; the first one is 1 / linear.
    if !(base.is_finite() && base >= 1.0) {
        return Err(wrong_value("rope base", base, "1 or more"));
    }
    let linear = usable("rope scaling factor", linear)?;
    Ok(Rope::new(pairs, rotated, base, linear))
}
