//! Fields of latent attention, and the experts of its families.

use paceline_tensor::RopePairs;
use serde_json::Value;

use super::rope::{GgufYarn, checked, number, scaling_type};
use super::{ConfigFields, field, wrong_value};
use crate::config::{
    Activation, CompressedExperts, ExpertGroups, Gating, Latent, PositionScaling, Selection,
};
use crate::rope::{Rope, Yarn};
use crate::{Config, Error, Experts};

/// Largest accepted latent sizes: many times those of published models.
const MAX_LATENT: u64 = 1 << 14;

/// Epsilon of the norms on compressed queries and latent elements in folders: the default of their
/// classes in transformers, independent of `rms_norm_eps`.
const HF_EPS: f32 = 1e-6;

/// `expert_gating_func` of GGUF files.
const SOFTMAX: usize = 1;
const SIGMOID: usize = 2;

/// `hidden_act` of Kimi K3.
pub(super) const SITU: &str = "situ";

/// Models with different defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    V2,
    V3,
    Kimi,
    Glm,
    GlmNext,
    Mistral,
}

impl ConfigFields<'_> {
    fn latent_kind(&self) -> Result<Kind, Error> {
        let name = match self {
            Self::Gguf { architecture, .. } => architecture,
            Self::Hf(_) => self.model_type()?,
        };
        Ok(match name {
            "deepseek_v2" => Kind::V2,
            "glm4_moe_lite" => Kind::Glm,
            "glm5_next_text" | "glm5_next" => Kind::GlmNext,
            "kimi_linear" | "kimi_k3" => Kind::Kimi,
            "mistral4" => Kind::Mistral,
            _ => Kind::V3,
        })
    }

    /// Sizes of latent attention.
    pub(crate) fn latent(&self) -> Result<Latent, Error> {
        let size = |gguf, hf| self.size(gguf, hf, 1, MAX_LATENT);
        let query_rank = self.opt_size("attention.q_lora_rank", "q_lora_rank", 0, MAX_LATENT)?;
        let is_next = self.latent_kind()? == Kind::GlmNext;
        let turned = ("rope.dimension_count", "qk_rope_head_dim");
        let turned = match is_next {
            true => self.size(turned.0, turned.1, 0, 0)?,
            false => size(turned.0, turned.1)?,
        };
        let (plain, value_dim) = match self {
            Self::Gguf { .. } => self.gguf_latent_heads(turned)?,
            Self::Hf(_) => (size("", "qk_nope_head_dim")?, size("", "v_head_dim")?),
        };
        let norm_eps = match self {
            Self::Gguf { .. } => self.float("attention.layer_norm_rms_epsilon", "")?,
            Self::Hf(_) if is_next => self.float("", "rms_norm_eps")?,
            Self::Hf(_) => HF_EPS,
        };
        let latent = Latent {
            query_rank: query_rank.filter(|rank| *rank > 0),
            rank: size("attention.kv_lora_rank", "kv_lora_rank")?,
            plain,
            turned,
            value_dim,
            norm_eps,
            growth: self.growth()?,
            selection: Selection::All,
            gated: self.hf("mla_use_output_gate", "true or false", Value::as_bool)? == Some(true),
        };
        for (field, got, of) in [
            ("number of latent elements", latent.rank, 32),
            ("rotated elements", turned, 16),
            ("elements of a query without rotation", plain, 32),
            ("size of a value head", value_dim, 16),
            (
                "elements of a compressed query",
                query_rank.unwrap_or(0),
                32,
            ),
        ] {
            if !got.is_multiple_of(of) {
                return Err(wrong_value(field, got, format!("a multiple of {of}")));
            }
        }
        Ok(latent)
    }

    /// Query elements without rotation, and value size. Files with separate key and value
    /// expansions have keys of their own for these sizes; older ones use the keys of all families.
    fn gguf_latent_heads(&self, turned: usize) -> Result<(usize, usize), Error> {
        let of = |new, old| match self.opt_size(new, "", 1, MAX_LATENT)? {
            Some(size) => Ok(size),
            None => self.size(old, "", 1, MAX_LATENT),
        };
        let key = of("attention.key_length_mla", "attention.key_length")?;
        let value = of("attention.value_length_mla", "attention.value_length")?;
        match key.checked_sub(turned).filter(|plain| *plain > 0) {
            Some(plain) => Ok((plain, value)),
            None => {
                let expected = format!("more than the {turned} that turn");
                Err(wrong_value("size of a key head", key, expected))
            }
        }
    }

    /// Growth of queries with their position.
    pub(crate) fn growth(&self) -> Result<Option<PositionScaling>, Error> {
        const CONTEXT: &str = "rope.scaling.original_context_length";
        let (rate, length) = match self {
            Self::Gguf { .. } => {
                let of = |key| self.opt_size(key, "", 1, 1 << 27);
                let length = match of("attention.temperature_length")? {
                    None => of(CONTEXT)?,
                    length => length,
                };
                let rate = self.opt_float("attention.temperature_scale", "")?;
                (rate.map(f64::from), length.map(|n| n as f64))
            }
            Self::Hf(_) => {
                let parameters = self.hf_rope_parameters()?;
                let of = |name| number(parameters, name);
                let length = of("original_max_position_embeddings")?;
                (of("llama_4_scaling_beta")?, length)
            }
        };
        let Some(rate) = rate.filter(|rate| *rate != 0.0) else {
            return Ok(None);
        };
        let length =
            length.ok_or_else(|| self.missing(CONTEXT, "original_max_position_embeddings"))?;
        if !(rate.is_finite() && rate > 0.0) {
            return Err(wrong_value("growth of queries", rate, "0 or more"));
        }
        if !(length.is_finite() && length >= 1.0) {
            return Err(wrong_value("positions of a growth", length, "1 or more"));
        }
        Ok(Some(PositionScaling { rate, length }))
    }

    /// Rotary embedding, and `YaRN`'s factor of the attention scores.
    ///
    /// In a file with `YaRN` but without its second factor, that factor is 1, as in transformers.
    /// llama.cpp multiplies scores by the first factor's square then.
    pub(crate) fn latent_rope(&self, latent: &Latent) -> Result<(Rope, f64), Error> {
        let rotated = latent.turned;
        match self {
            Self::Gguf { .. } => {
                let base = f64::from(self.opt_float("rope.freq_base", "")?.unwrap_or(10_000.0));
                let plain = |linear| checked(RopePairs::Adjacent, rotated, base, linear);
                if self.gguf_scaling()? != Some("yarn") {
                    return Ok((plain(self.gguf_linear_factor()?)?, 1.0));
                }
                let GgufYarn {
                    mut yarn,
                    attention,
                } = self.gguf_yarn()?;
                let weight = f64::from(
                    self.opt_float("rope.scaling.yarn_log_multiplier", "")?
                        .unwrap_or(0.0),
                );
                let mut scale = 1.0;
                if weight != 0.0 {
                    let all = weight / 0.1; // the converter has multiplied by that
                    let one = match self.latent_kind()? {
                        Kind::Mistral => 1.0,
                        _ => all,
                    };
                    scale = positive_magnitude(yarn.factor, all)?;
                    yarn.magnitude = attention * positive_magnitude(yarn.factor, one)? / scale;
                }
                Ok((plain(1.0)?.with_yarn(base, yarn), scale * scale))
            }
            Self::Hf(_) => {
                let interleaved = self.hf("rope_interleave", "true or false", Value::as_bool)?;
                let pairs = match interleaved {
                    Some(false) => RopePairs::Halves,
                    _ => RopePairs::Adjacent,
                };
                let parameters = self.hf_rope_parameters()?;
                let rope = self.hf_turned(rotated, (pairs, 10_000.0), parameters, "rope_theta")?;
                let all = number(parameters, "mscale_all_dim")?.filter(|all| *all != 0.0);
                let scaled = !matches!(scaling_type(parameters)?, None | Some("default"));
                let (Some(all), true) = (all, scaled) else {
                    return Ok((rope, 1.0));
                };
                let factor = number(parameters, "factor")?.unwrap_or(1.0);
                let scale = positive_magnitude(factor, all)?;
                Ok((rope, scale * scale))
            }
        }
    }

    /// Experts of the sparse layers. Whether the router has a choice bias follows from the weights.
    pub(crate) fn latent_experts(&self, config: &Config) -> Result<Experts, Error> {
        let kind = self.latent_kind()?;
        if let Some(n) = self
            .hf("moe_layer_freq", "a number", Value::as_u64)?
            .filter(|n| *n != 1)
        {
            return Err(wrong_value("moe_layer_freq", n, "1"));
        }
        let mut experts = self.experts("n_routed_experts", config.ffn, false)?;
        experts.gating = self.latent_gating(kind, config)?;
        experts.normalised = self.says_normalised(kind != Kind::V2)?;
        if let (Self::Hf(_), Kind::V2, true) = (self, kind, experts.normalised) {
            return Err(wrong_value("norm_topk_prob", true, "false"));
        }
        experts.scale = self.expert_scale()?;
        let usual = match kind {
            Kind::V3 => (8, 4),
            _ => (1, 1),
        };
        // V2 scores a group by its best expert (section 2.2.2 of its paper); llama.cpp does not.
        let is_v2 = match self {
            Self::Gguf { .. } => kind != Kind::Mistral && experts.gating == Gating::Softmax,
            Self::Hf(_) => kind == Kind::V2,
        };
        if kind != Kind::V2 || self.limits_groups()? {
            experts.groups = self.groups(experts.count, usual, if is_v2 { 1 } else { 2 })?;
        }
        self.with_ungated_shared(experts)
    }

    /// Refuses latent attention of Kimi Linear that turns, and experts in some layers only.
    pub(crate) fn check_kimi(&self) -> Result<(), Error> {
        if self.hf("mla_use_nope", "true or false", Value::as_bool)? == Some(false) {
            return Err(wrong_value("mla_use_nope", false, "true"));
        }
        match self.hf("moe_layer_freq", "a number", Value::as_u64)? {
            None | Some(1) => Ok(()),
            Some(n) => Err(wrong_value("moe_layer_freq", n, "1")),
        }
    }

    /// As [`latent_experts`](Self::latent_experts), of Kimi Linear. Its experts count under another
    /// name.
    pub(crate) fn kimi_experts(&self, config: &Config) -> Result<Experts, Error> {
        let mut experts = self.sigmoid_experts("num_experts", config.ffn)?;
        experts.gating = self.latent_gating(Kind::Kimi, config)?;
        let mut experts = self.with_ungated_shared(experts)?;
        experts.compressed = self.compressed_experts(&experts, config.width)?;
        Ok(experts)
    }

    /// Rows of routed experts of Kimi K3 in a model of width `most`.
    fn compressed_experts(
        &self,
        experts: &Experts,
        most: usize,
    ) -> Result<Option<CompressedExperts>, Error> {
        const FIELD: &str = "routed_expert_hidden_size";
        let Some(width) = self.opt_size("", FIELD, 1, most as u64)? else {
            return Ok(None);
        };
        if !width.is_multiple_of(32) {
            return Err(wrong_value(FIELD, width, "a multiple of 32"));
        }
        if experts.shared == 0 {
            let expected = format!("1 or more beside {FIELD}");
            return Err(wrong_value("num_shared_experts", 0, expected));
        }
        let normed = self.hf("latent_moe_use_norm", "true or false", Value::as_bool)?;
        let normed = normed.unwrap_or(false);
        Ok(Some(CompressedExperts { width, normed }))
    }

    /// The gate of Kimi K3; `None` for that of the family.
    pub(crate) fn situ(&self) -> Result<Option<Activation>, Error> {
        if self.hf("hidden_act", "a string", Value::as_str)? != Some(SITU) {
            return Ok(None);
        }
        let bound = |field| {
            let bound = self.opt_float("", field)?;
            match bound.filter(|bound| !(bound.is_finite() && *bound > 0.0)) {
                None => Ok(bound),
                Some(bad) => Err(wrong_value(field, bad, "above 0")),
            }
        };
        let gate = bound("activation_situ_beta")?.unwrap_or(1.0); // as the class
        let up = bound("activation_situ_linear_beta")?;
        Ok(Some(Activation::Situ { gate, up }))
    }

    /// How router scores become weights: the file's field, or the default of llama.cpp and
    /// transformers.
    fn latent_gating(&self, kind: Kind, config: &Config) -> Result<Gating, Error> {
        if let Self::Gguf { .. } = self {
            let said = self
                .opt_size("expert_gating_func", "", 0, u64::MAX)?
                .unwrap_or(0);
            let flash = [47, 48].contains(&config.layers.len()) && config.vocab == 154_880;
            return match said {
                SIGMOID => Ok(Gating::Sigmoid),
                SOFTMAX => Ok(Gating::Softmax),
                0 if flash => Ok(Gating::Sigmoid),
                0 => Ok(Gating::Softmax),
                other => Err(wrong_value("expert_gating_func", other, "1 or 2")),
            };
        }
        let (gating, name) = match kind {
            Kind::V2 | Kind::Mistral => (Gating::Softmax, "softmax"),
            Kind::V3 | Kind::Glm | Kind::GlmNext | Kind::Kimi => (Gating::Sigmoid, "sigmoid"),
        };
        match self.hf("scoring_func", "a string", Value::as_str)? {
            Some(other) if other != name => Err(wrong_value("scoring_func", other, name)),
            _ => Ok(gating),
        }
    }

    /// Whether V2's router chooses groups first.
    fn limits_groups(&self) -> Result<bool, Error> {
        match self.hf("topk_method", "a string", Value::as_str)? {
            None | Some("greedy") => Ok(false),
            Some("group_limited_greedy") => Ok(true),
            Some(other) => Err(wrong_value(
                "topk_method",
                other,
                "greedy or group_limited_greedy",
            )),
        }
    }

    /// Groups of the `experts` experts; `None` for a single group. `usual` is the default of
    /// folders: number of groups, and groups used. A group's score is the sum of its `largest` best
    /// experts.
    pub(super) fn groups(
        &self,
        experts: usize,
        usual: (usize, usize),
        largest: usize,
    ) -> Result<Option<ExpertGroups>, Error> {
        let usual = match self {
            Self::Gguf { .. } => (1, 1),
            Self::Hf(_) => usual,
        };
        let most = crate::config::MAX_GROUPS as u64;
        let count = self.opt_size("expert_group_count", "n_group", 0, most)?;
        let count = count.unwrap_or(usual.0);
        if count <= 1 {
            return Ok(None);
        }
        if !experts.is_multiple_of(count) || experts / count < largest {
            let expected = format!("a divisor of {experts} with {largest} or more in each");
            return Err(wrong_value("number of groups of experts", count, expected));
        }
        let used = self.opt_size("expert_group_used_count", "topk_group", 1, count as u64)?;
        let used = match (used, self) {
            (Some(used), _) => used,
            (None, Self::Hf(_)) => usual.1,
            (None, Self::Gguf { .. }) => return Err(self.missing("expert_group_used_count", "")),
        };
        Ok(Some(ExpertGroups {
            count,
            used,
            largest,
        }))
    }

    /// Whether each of `layers` layers is dense: by the number of leading dense layers, or by a
    /// list.
    pub(crate) fn dense_of(&self, layers: usize) -> Result<Vec<bool>, Error> {
        let usual = match self.latent_kind()? {
            Kind::V3 | Kind::GlmNext => 3,
            Kind::Glm | Kind::Kimi => 1,
            Kind::V2 | Kind::Mistral => 0,
        };
        let Self::Hf(json) = self else {
            let first = self.dense_layers(0)?;
            return Ok((0..layers).map(|layer| layer < first).collect());
        };
        let Some(kinds) = field(json, "mlp_layer_types", "a list", Value::as_array)? else {
            let first = self.dense_layers(usual)?;
            return Ok((0..layers).map(|layer| layer < first).collect());
        };
        dense_of_list(kinds, layers)
    }
}

/// Whether each of `layers` layers is dense by `mlp_layer_types`.
pub(super) fn dense_of_list(kinds: &[Value], layers: usize) -> Result<Vec<bool>, Error> {
    if kinds.len() != layers {
        let expected = format!("one for each of {layers} layers");
        return Err(wrong_value(
            "number of mlp_layer_types",
            kinds.len(),
            expected,
        ));
    }
    let kind = |kind: &Value| match kind.as_str() {
        Some("dense") => Ok(true),
        Some("sparse") => Ok(false),
        _ => Err(wrong_value("mlp_layer_types", kind, "dense or sparse")),
    };
    kinds.iter().map(kind).collect()
}

/// Factor of attention scores; refuses values that are not positive and finite.
fn positive_magnitude(factor: f64, weight: f64) -> Result<f64, Error> {
    let magnitude = Yarn::usual_magnitude(factor, weight);
    if magnitude.is_finite() && (1e-3..=1e3).contains(&magnitude) {
        Ok(magnitude)
    } else {
        Err(wrong_value(
            "attention factor of yarn",
            magnitude,
            "0.001 to 1000",
        ))
    }
}
