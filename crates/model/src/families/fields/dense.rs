//! Fields of dense families that differ from Llama in few places.

use serde_json::Value;

use super::rope::hf_parameters;
use super::{ConfigFields, field, layer_types, wrong_type, wrong_value};
use crate::families::RopeKind;
use crate::rope::Rope;
use crate::{Config, Error};

const WINDOW: (&str, &str) = ("attention.sliding_window", "sliding_window");

impl ConfigFields<'_> {
    /// Size of the sliding window in positions; `None` without.
    pub(crate) fn opt_window(&self) -> Result<Option<usize>, Error> {
        let said = self.opt_size(WINDOW.0, WINDOW.1, 0, u64::from(u32::MAX))?;
        Ok(said.filter(|window| *window > 0))
    }

    /// Windows of Mistral: in the layers that `layer_types` of Ministral lists, or in all.
    pub(crate) fn set_mistral_windows(&self, config: &mut Config) -> Result<(), Error> {
        const USUAL: usize = 4096; // default of transformers' classes, but for Ministral 3
        let Self::Hf(json) = self else { return Ok(()) };
        let kind = self.model_type()?;
        let window = match json.get(WINDOW.1) {
            None if kind != "ministral3" => Some(USUAL),
            _ => self.opt_window()?,
        };
        let windowed = match kind {
            "ministral" => layer_types(json, config.layers.len())?,
            _ => None,
        };
        for (i, layer) in config.layers.iter_mut().enumerate() {
            let has_window = windowed.as_ref().is_none_or(|list| list[i]);
            layer.window = window.filter(|_| has_window);
        }
        Ok(())
    }

    /// Whether each of `layers` layers of SmolLM3 rotates queries and keys.
    pub(crate) fn rotated_layers(&self, layers: usize) -> Result<Vec<bool>, Error> {
        const FIELD: &str = "no_rope_layers"; // despite its name, 1 for those with rotation
        const EVERY: usize = 4; // of GGUF files, and the default of transformers' class
        let windows = self.hf("use_sliding_window", "true or false", Value::as_bool)?;
        if windows == Some(true) {
            return Err(wrong_value("use_sliding_window", true, "false"));
        }
        let every = self.opt_size("", "no_rope_layer_interval", 1, u64::from(u32::MAX))?;
        let every = every.unwrap_or(EVERY);
        let list = match self {
            Self::Hf(json) => field(json, FIELD, "a list", Value::as_array)?,
            Self::Gguf { .. } => None,
        };
        let Some(list) = list else {
            return Ok((1..=layers).map(|n| !n.is_multiple_of(every)).collect());
        };
        let expected = "a list of 0 or 1, one per layer";
        if list.len() < layers {
            return Err(wrong_value(
                FIELD,
                format!("a list of {}", list.len()),
                expected,
            ));
        }
        let rotates = |value: &Value| match value.as_u64() {
            Some(n @ (0 | 1)) => Ok(n == 1),
            _ => Err(wrong_type(FIELD, expected, value)),
        };
        list.iter().take(layers).map(rotates).collect()
    }

    /// Factors of Granite. 0 means unset in GGUF files.
    pub(crate) fn set_granite_factors(&self, config: &mut Config) -> Result<(), Error> {
        config.embedding_scale = self.factor("embedding_scale", "embedding_multiplier")?;
        config.residual_scale = self.factor("residual_scale", "residual_multiplier")?;
        config.logit_scale = 1.0 / self.factor("logit_scale", "logits_scaling")?;
        let scale = match self {
            Self::Gguf { .. } => self.opt_float("attention.scale", "")?,
            Self::Hf(_) => Some(self.factor("", "attention_multiplier")?),
        };
        for layer in &mut config.layers {
            let usual = layer.query_scale;
            layer.query_scale = scale.filter(|scale| *scale != 0.0).unwrap_or(usual);
        }
        Ok(())
    }

    /// A soft cap of Gemma 2, `usual` by default; `None` for null or 0.
    pub(crate) fn gemma2_cap(&self, field: &'static str, usual: f32) -> Result<Option<f32>, Error> {
        let is_null = match self {
            Self::Hf(json) => json.get(field).is_some_and(Value::is_null),
            Self::Gguf { .. } => false,
        };
        let cap = self.opt_float(field, field)?.unwrap_or(usual);
        match cap {
            _ if is_null => Ok(None),
            0.0 => Ok(None),
            cap if cap.is_finite() && cap > 0.0 => Ok(Some(cap)),
            cap => Err(wrong_value(field, cap, "above 0")),
        }
    }

    /// Divisor of scores is the root of this: 256 in folders by default. In GGUF files it is the
    /// head size, or of the 27B model the width per head (`src/models/gemma2.cpp` of llama.cpp).
    pub(crate) fn gemma2_query_scalar(&self, config: &Config) -> Result<f32, Error> {
        const LAYERS_27B: usize = 46;
        let usual = match self {
            Self::Hf(_) => 256.0,
            Self::Gguf { .. } if config.layers.len() == LAYERS_27B => {
                (config.width / config.heads) as f32
            }
            Self::Gguf { .. } => config.head_dim as f32,
        };
        let scalar = self
            .opt_float("", "query_pre_attn_scalar")?
            .unwrap_or(usual);
        if scalar.is_finite() && scalar > 0.0 {
            Ok(scalar)
        } else {
            Err(wrong_value("query_pre_attn_scalar", scalar, "above 0"))
        }
    }

    /// A factor above 0; 1 if the file does not say.
    fn factor(&self, gguf: &'static str, hf: &'static str) -> Result<f32, Error> {
        let (unset, name) = match self {
            Self::Gguf { .. } => (Some(0.0), gguf),
            Self::Hf(_) => (None, hf),
        };
        let said = self
            .opt_float(gguf, hf)?
            .filter(|said| Some(*said) != unset);
        match said.unwrap_or(1.0) {
            factor if factor.is_finite() && factor > 0.0 => Ok(factor),
            factor => Err(wrong_value(name, factor, "above 0")),
        }
    }

    /// Window of `OLMo` 3; `None` for `OLMo` 2.
    pub(crate) fn olmo_window(&self) -> Result<Option<usize>, Error> {
        match self {
            Self::Gguf { .. } => self.opt_window(),
            Self::Hf(_) if self.model_type()? == "olmo3" => self.window().map(Some),
            Self::Hf(_) => Ok(None),
        }
    }

    /// Rotary embedding of window layers of `OLMo` 3: the base of full layers, never scaled.
    pub(crate) fn olmo_window_rope(&self, config: &Config, kind: RopeKind) -> Result<Rope, Error> {
        match self {
            Self::Gguf { .. } => {
                let base = match self.opt_float("rope.freq_base_swa", "")? {
                    Some(base) => Some(base),
                    None => self.opt_float("rope.freq_base", "")?,
                };
                let base = f64::from(base.unwrap_or(10_000.0));
                super::rope::checked(kind.pairs, config.head_dim, base, 1.0)
            }
            Self::Hf(json) => {
                let parameters = hf_parameters(json, "sliding_attention")?;
                self.hf_rope(config.head_dim, kind, parameters, "rope_theta")
            }
        }
    }
}
