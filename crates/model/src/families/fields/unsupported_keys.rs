//! Refuses fields that change the computation and that the family's reader ignores.
//!
//! The tables list the fields known to llama.cpp (`src/llama-arch.cpp`) or to a class of
//! transformers, with the value that paceline computes. Any other value is refused by name. To
//! support a field, read it in the family's reader and add the family to `readers`.

use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::config::Gating;
use crate::families::ModelFamily;
use crate::{Config, Error, Experts};

/// A field's name in both layouts, empty if a layout lacks it.
struct FieldKey<C> {
    gguf: &'static str,
    hf: &'static str,
    /// The implemented value.
    computed: C,
    /// Families whose readers use the field.
    readers: &'static [ModelFamily],
}

impl<C: Copy> FieldKey<C> {
    const fn new(
        gguf: &'static str,
        hf: &'static str,
        computed: C,
        readers: &'static [ModelFamily],
    ) -> Self {
        Self {
            gguf,
            hf,
            computed,
            readers,
        }
    }

    /// Name in the layout of `fields`.
    const fn name(&self, fields: &ConfigFields<'_>) -> &'static str {
        match fields {
            ConfigFields::Gguf { .. } => self.gguf,
            ConfigFields::Hf(_) => self.hf,
        }
    }

    fn is_read(&self, family: ModelFamily) -> bool {
        self.readers.contains(&family)
    }
}

type FlagKey = FieldKey<fn(ModelFamily) -> bool>;

const FLAGS: [FlagKey; 17] = [
    FlagKey::new("attention.causal", "is_causal", |_| true, GEMMA3),
    FlagKey::new("", BIDIRECTIONAL, |_| false, GEMMAS),
    FlagKey::new("", "altup_correct_scale", |_| true, &[]),
    FlagKey::new("", "qkv_bias", ModelFamily::has_qkv_biases, &[]),
    FlagKey::new(PARALLEL, PARALLEL, |_| false, &[]),
    FlagKey::new("swin_norm", "", |_| false, &[]),
    FlagKey::new("", "scale_attn_by_inverse_layer_idx", |_| false, &[]),
    FlagKey::new("", "conv_bias", |_| false, &[]),
    FlagKey::new("", "use_bias", |_| false, &[]),
    FlagKey::new("", "mamba_proj_bias", |_| false, &[]),
    FlagKey::new("", "use_conv_bias", |_| true, &[]),
    FlagKey::new("", "attn_output_gate", ModelFamily::has_delta_nets, &[]),
    FlagKey::new("", "use_qk_norm", ModelFamily::norms_heads, QK_NORM),
    FlagKey::new("", "attention_output_gate", |_| false, &[]),
    FlagKey::new("", "use_gemma_norm", |_| true, &[]),
    FlagKey::new("", "index_kpool_compress", |_| true, &[]),
    FlagKey::new("", "mhc", |_| true, &[]),
];
const GEMMA3: &[ModelFamily] = &[ModelFamily::Gemma3];
const GEMMAS: &[ModelFamily] = &[ModelFamily::Gemma3, ModelFamily::Gemma4];
const BIDIRECTIONAL: &str = "use_bidirectional_attention";
const PARALLEL: &str = "use_parallel_residual";
const QK_NORM: &[ModelFamily] = &[ModelFamily::Glm4Moe, ModelFamily::MiniMaxM2];

/// 0 means unset, as in llama.cpp.
type NumberKey = FieldKey<fn(&Config) -> f32>;

const fn one(_: &Config) -> f32 {
    1.0
}

/// Accepts only 0.
const fn none(_: &Config) -> f32 {
    0.0
}

fn query_scale(config: &Config) -> f32 {
    config.layers.first().map_or(1.0, |layer| layer.query_scale)
}

const EMBEDDING: [&str; 2] = ["embedding_scale", "embedding_multiplier"];
const ATTENTION: [&str; 2] = ["attention.scale", "attention_multiplier"];
const TEMPERATURES: &[ModelFamily] = &[ModelFamily::DeepSeek, ModelFamily::Mistral];
const DBRX: &[ModelFamily] = &[ModelFamily::Dbrx];
const NUMBERS: [NumberKey; 18] = [
    NumberKey::new("logit_scale", "logit_scale", one, GRANITE),
    NumberKey::new("", "logits_scaling", one, GRANITE),
    NumberKey::new(EMBEDDING[0], EMBEDDING[1], |c| c.embedding_scale, GRANITE),
    NumberKey::new("residual_scale", "residual_multiplier", one, GRANITE),
    NumberKey::new(ATTENTION[0], ATTENTION[1], query_scale, GRANITE),
    NumberKey::new("attention.output_scale", "", one, &[]),
    NumberKey::new("attention.value_scale", "", one, &[]),
    NumberKey::new("attention.temperature_scale", "", none, TEMPERATURES),
    NumberKey::new("attention.clamp_kqv", "clip_qkv", none, DBRX),
    NumberKey::new("attention.max_alibi_bias", "", none, &[]),
    NumberKey::new(ATTENTION_CAP, ATTENTION_CAP, none, &[ModelFamily::Gemma2]),
    NumberKey::new(ROUTER_CAP, ROUTER_CAP, none, &[]),
    NumberKey::new(FINAL_CAP, FINAL_CAP, |c| c.softcap.unwrap_or(0.0), &[]),
    NumberKey::new("expert_group_scale", "", one, &[]),
    NumberKey::new("rope.scale_linear", "", one, &[]),
    NumberKey::new("rope.scaling.alpha", "", one, &[]),
    NumberKey::new("rope.scaling.yarn_ext_factor", "", one, &[]),
    NumberKey::new("rope.scaling.yarn_attn_factor", "", one, &[]),
];
const GRANITE: &[ModelFamily] = &[ModelFamily::Granite];
const ATTENTION_CAP: &str = "attn_logit_softcapping";
const ROUTER_CAP: &str = "router_logit_softcapping";
const FINAL_CAP: &str = "final_logit_softcapping";

impl ConfigFields<'_> {
    /// Refuses fields that require another computation than `config`, the reader's result.
    ///
    /// # Errors
    /// [`Error::Value`] with the field, its value and the implemented value; [`Error::UnknownKey`].
    pub(crate) fn check_unread(&self, config: &Config) -> Result<(), Error> {
        self.check_known_keys(config.family)?;
        self.check_flags(config.family)?;
        for number in NUMBERS.iter().filter(|key| !key.is_read(config.family)) {
            let said = self.opt_float(number.gguf, number.hf)?;
            check_number(number.name(self), said, (number.computed)(config))?;
        }
        if let Self::Gguf { .. } = self {
            self.check_gguf_window(config)?;
            self.check_gguf_rope()?;
            self.check_gguf_experts(config)?;
        }
        Ok(())
    }

    fn check_flags(&self, family: ModelFamily) -> Result<(), Error> {
        for flag in FLAGS.iter().filter(|key| !key.is_read(family)) {
            let computed = (flag.computed)(family);
            let said = self.opt_flag(flag.gguf, flag.hf)?;
            check_flag(flag.name(self), said, computed)?;
        }
        Ok(())
    }

    fn opt_flag(&self, gguf: &str, hf: &str) -> Result<Option<bool>, Error> {
        match self {
            Self::Gguf { metadata, .. } => Ok(metadata.opt_bool(&self.key(gguf))?),
            Self::Hf(_) => self.hf(hf, "true or false", Value::as_bool),
        }
    }

    /// In a family without windows, a window must cover the whole context.
    fn check_gguf_window(&self, config: &Config) -> Result<(), Error> {
        const KEY: &str = "attention.sliding_window";
        if matches!(
            config.family,
            ModelFamily::Gemma2
                | ModelFamily::Gemma3
                | ModelFamily::Gemma3n
                | ModelFamily::Gemma4
                | ModelFamily::GptOss
                | ModelFamily::Olmo2
                | ModelFamily::Phi3
        ) {
            return Ok(());
        }
        let said = self.opt_size(KEY, "", 0, u64::MAX)?;
        match said.filter(|window| (1..config.context).contains(window)) {
            None => Ok(()),
            Some(window) => Err(wrong_value(KEY, window, "none (the family has no windows)")),
        }
    }

    /// Only `YaRN` may multiply cosines and sines by a factor.
    fn check_gguf_rope(&self) -> Result<(), Error> {
        const KEY: &str = "rope.scaling.attn_factor";
        if self.gguf_scaling()? == Some("yarn") {
            return Ok(());
        }
        check_number(KEY, self.opt_float(KEY, "")?, 1.0)
    }

    /// Experts are routed and weighted as the family's reader says.
    fn check_gguf_experts(&self, config: &Config) -> Result<(), Error> {
        const SCALE: &str = "expert_weights_scale";
        const GROUPS: &str = "expert_group_count";
        let Some(experts) = config.experts() else {
            return Ok(());
        };
        self.check_gguf_gating(experts)?;
        check_number(SCALE, self.opt_float(SCALE, "")?, experts.scale)?;
        let groups = self.opt_size(GROUPS, "", 0, u64::MAX)?;
        let computed = experts.groups.map_or(1, |groups| groups.count);
        match groups.filter(|groups| *groups > 1 && *groups != computed) {
            None => Ok(()),
            Some(groups) => Err(wrong_value(GROUPS, groups, computed.to_string())),
        }
    }

    /// The router's function, by its number in llama.cpp, where 0 means unset; and whether the
    /// weights of chosen experts sum to 1.
    fn check_gguf_gating(&self, experts: Experts) -> Result<(), Error> {
        let (number, name) = match experts.gating {
            Gating::Softmax => (1, "1 (softmax)"),
            Gating::Sigmoid => (2, "2 (sigmoid)"),
            Gating::OfChosen => (3, "3 (softmax of those chosen)"),
            Gating::SqrtSoftplus | Gating::OfToken => return Ok(()), // no files of the family
        };
        let said = self.opt_size("expert_gating_func", "", 0, u64::MAX)?;
        if let Some(other) = said.filter(|said| ![0, number].contains(said)) {
            return Err(wrong_value("expert_gating_func", other, name));
        }
        let said = self.opt_flag("expert_weights_norm", "")?;
        // A softmax over the chosen experts sums to 1 anyway.
        let computed = experts.normalised || experts.gating == Gating::OfChosen;
        check_flag("expert_weights_norm", said, computed)
    }
}

fn check_flag(name: &'static str, said: Option<bool>, computed: bool) -> Result<(), Error> {
    match said.filter(|said| *said != computed) {
        None => Ok(()),
        Some(said) => Err(wrong_value(name, said, computed.to_string())),
    }
}

/// Files store numbers as decimals and in single precision: equality with `computed` to five digits
/// passes.
fn check_number(name: &'static str, said: Option<f32>, computed: f32) -> Result<(), Error> {
    let is_computed = |said: f32| (said - computed).abs() <= 1e-5 * computed.abs();
    match said.filter(|said| *said != 0.0 && !is_computed(*said)) {
        None => Ok(()),
        Some(said) if computed == 0.0 => Err(wrong_value(name, said, "none")),
        Some(said) => Err(wrong_value(name, said, computed.to_string())),
    }
}
