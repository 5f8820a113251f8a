//! Fields of experts and routers.

use serde_json::Value;

use super::{ConfigFields, wrong_value};
use crate::config::Gating;
use crate::{Config, Error, Experts};

/// Largest accepted numbers: several times those of published models.
pub(super) const MAX_EXPERTS: u64 = 1 << 12;
const MAX_EXPERT_WIDTH: u64 = 1 << 18;

/// Largest accepted count of layers or blocks.
const MAX_COUNT: u64 = 1 << 10;

/// Clamp of gpt-oss, which its GGUF files do not contain.
const CLAMP: f32 = 7.0;
/// Slope of gpt-oss's gate.
const SLOPE: f32 = 1.702;

/// Number of experts in folders saved by transformers 5, of every family.
const NEW_COUNT: &str = "num_local_experts";

/// `expert_gating_func` of GGUF files for a sigmoid.
const SIGMOID: usize = 2;

impl ConfigFields<'_> {
    /// Experts with width `ffn` unless the file says otherwise; `hf_count` is the field of their
    /// number.
    pub(crate) fn experts(
        &self,
        hf_count: &'static str,
        ffn: usize,
        normalised: bool,
    ) -> Result<Experts, Error> {
        let count = match self.opt_size("expert_count", hf_count, 1, MAX_EXPERTS)? {
            None => self.opt_size("expert_count", NEW_COUNT, 1, MAX_EXPERTS)?,
            count => count,
        };
        let count = count.ok_or_else(|| self.missing("expert_count", hf_count))?;
        let width = self.opt_size(
            "expert_feed_forward_length",
            "moe_intermediate_size",
            1,
            MAX_EXPERT_WIDTH,
        )?;
        Ok(Experts {
            count,
            used: self.size("expert_used_count", "num_experts_per_tok", 1, count as u64)?,
            width: width.unwrap_or(ffn),
            gating: Gating::Softmax,
            normalised,
            scale: 1.0,
            corrected: false,
            shared: 0,
            shared_gate: true,
            clamp: None,
            groups: None,
            scaled: false,
            compressed: None,
        })
    }

    /// Experts with a sigmoid router and a choice bias.
    pub(crate) fn sigmoid_experts(
        &self,
        hf_count: &'static str,
        ffn: usize,
    ) -> Result<Experts, Error> {
        let gating = self.opt_size("expert_gating_func", "", 0, u64::MAX);
        if let (Self::Gguf { .. }, Some(other)) =
            (self, gating?.filter(|g| ![0, SIGMOID].contains(g)))
        {
            return Err(wrong_value("expert_gating_func", other, "2 (sigmoid)"));
        }
        let normalised = self.says_normalised(true)?;
        let mut experts = self.experts(hf_count, ffn, normalised)?;
        experts.gating = Gating::Sigmoid;
        experts.corrected = true;
        experts.scale = self.expert_scale()?;
        experts.groups = self.groups(experts.count, (1, 1), 2)?;
        Ok(experts)
    }

    /// Whether expert weights are divided by their sum. Default: no in GGUF files, as in llama.cpp,
    /// and `usual` in folders.
    pub(super) fn says_normalised(&self, usual: bool) -> Result<bool, Error> {
        match self {
            Self::Gguf { metadata, .. } => {
                let said = metadata.opt_bool(&self.key("expert_weights_norm"))?;
                Ok(said.unwrap_or(false))
            }
            Self::Hf(_) => {
                let said = self.hf("norm_topk_prob", "true or false", Value::as_bool)?;
                Ok(said.unwrap_or(usual))
            }
        }
    }

    /// Factor of the weights of chosen experts; 0 in a file means 1.
    pub(super) fn expert_scale(&self) -> Result<f32, Error> {
        let said = self.opt_float("expert_weights_scale", "routed_scaling_factor")?;
        match said {
            None | Some(0.0) => Ok(1.0),
            Some(scale) if scale.is_finite() && scale > 0.0 => Ok(scale),
            Some(scale) => Err(wrong_value("scale of expert weights", scale, "above 0")),
        }
    }

    /// Adds a shared expert without a gate. Its width is that of the file's number of experts
    /// (default 1).
    pub(crate) fn with_ungated_shared(&self, mut experts: Experts) -> Result<Experts, Error> {
        let shared = self.opt_size("expert_shared_count", "n_shared_experts", 0, MAX_COUNT)?;
        experts.shared = experts.width * shared.unwrap_or(1);
        experts.shared_gate = false;
        if experts.shared as u64 > MAX_EXPERT_WIDTH {
            let got = experts.shared;
            return Err(wrong_value(
                "width of the shared expert",
                got,
                "262144 or less",
            ));
        }
        Ok(experts)
    }

    /// Leading dense layers; `usual` in folders that do not say.
    pub(crate) fn dense_layers(&self, usual: usize) -> Result<usize, Error> {
        let said = self.opt_size(
            "leading_dense_block_count",
            "first_k_dense_replace",
            0,
            MAX_COUNT,
        )?;
        Ok(said.unwrap_or(match self {
            Self::Gguf { .. } => 0,
            Self::Hf(_) => usual,
        }))
    }

    /// Layers of `blocks` without multi-token prediction. GGUF files count the prediction blocks,
    /// which are last.
    pub(crate) fn decoder_layers(&self, blocks: usize) -> Result<usize, Error> {
        const KEY: &str = "nextn_predict_layers";
        match self {
            Self::Hf(_) => Ok(blocks),
            Self::Gguf { .. } => {
                let more = self.opt_size(KEY, "", 0, blocks as u64 - 1)?;
                Ok(blocks - more.unwrap_or(0))
            }
        }
    }

    /// Clamp of gpt-oss's gate.
    pub(crate) fn gpt_oss_clamp(&self) -> Result<f32, Error> {
        let slope = self.opt_float("", "swiglu_alpha")?;
        if let (Self::Hf(_), Some(other)) = (self, slope.filter(|slope| *slope != SLOPE)) {
            return Err(wrong_value("swiglu_alpha", other, "1.702"));
        }
        let limit = match self {
            Self::Gguf { .. } => None,
            Self::Hf(_) => self.opt_float("", "swiglu_limit")?,
        };
        match limit.unwrap_or(CLAMP) {
            limit if limit.is_finite() && limit > 0.0 => Ok(limit),
            limit => Err(wrong_value("swiglu_limit", limit, "above 0")),
        }
    }

    /// Whether heads have norms; `None` if that depends on the file having the weights.
    pub(crate) fn glm_head_norms(&self) -> Result<Option<bool>, Error> {
        match self {
            Self::Gguf { .. } => Ok(None),
            Self::Hf(_) => {
                let said = self.hf("use_qk_norm", "true or false", Value::as_bool)?;
                Ok(Some(said.unwrap_or(false)))
            }
        }
    }

    /// Refuses MiniMax's earlier and later models.
    pub(crate) fn check_minimax(&self) -> Result<(), Error> {
        let text = self.hf("scoring_func", "a string", Value::as_str)?;
        if let Some(other) = text.filter(|text| *text != "sigmoid") {
            return Err(wrong_value("scoring_func", other, "sigmoid"));
        }
        let text = self.hf("qk_norm_type", "a string", Value::as_str)?;
        if let Some(other) = text.filter(|text| *text != "per_layer") {
            return Err(wrong_value("qk_norm_type", other, "per_layer"));
        }
        for field in ["use_qk_norm", "use_routing_bias"] {
            if self.hf(field, "true or false", Value::as_bool)? == Some(false) {
                return Err(wrong_value(field, false, "true"));
            }
        }
        match self.hf("shared_intermediate_size", "a number", Value::as_u64)? {
            None | Some(0) => {}
            Some(n) => return Err(wrong_value("shared_intermediate_size", n, "0")),
        }
        let kinds = self.hf("attn_type_list", "a list", Value::as_array)?;
        let other = kinds.and_then(|kinds| kinds.iter().find(|kind| kind.as_u64() != Some(1)));
        other.map_or(Ok(()), |kind| {
            Err(wrong_value("attn_type_list", kind, "1 for every layer"))
        })
    }

    /// Width of the shared expert.
    pub(crate) fn shared_expert(&self) -> Result<usize, Error> {
        self.size(
            "expert_shared_feed_forward_length",
            "shared_expert_intermediate_size",
            1,
            MAX_EXPERT_WIDTH,
        )
    }

    /// Whether the weights of the chosen experts are divided by their sum. GGUF files do not state
    /// it; `gguf` is their value. The default of transformers is no.
    pub(crate) fn normalises_experts(&self, gguf: bool) -> Result<bool, Error> {
        match self {
            Self::Gguf { .. } => Ok(gguf),
            Self::Hf(_) => {
                let said = self.hf("norm_topk_prob", "true or false", Value::as_bool)?;
                Ok(said.unwrap_or(false))
            }
        }
    }

    /// Sets the experts of all layers except those that `config.json` makes dense.
    pub(crate) fn set_sparse_layers(
        &self,
        config: &mut Config,
        experts: Experts,
    ) -> Result<(), Error> {
        let step = self.opt_size("", "decoder_sparse_step", 1, 1 << 10);
        let step = match self {
            Self::Gguf { .. } => 1,
            Self::Hf(_) => step?.unwrap_or(1),
        };
        let dense = self.hf("mlp_only_layers", "a list", Value::as_array)?;
        let is_dense = |layer: u64| {
            let listed = dense.is_some_and(|list| list.iter().any(|i| i.as_u64() == Some(layer)));
            listed || !(layer + 1).is_multiple_of(step as u64)
        };
        for (layer, shape) in (0..).zip(&mut config.layers) {
            shape.experts = (!is_dense(layer)).then_some(experts);
        }
        Ok(())
    }
}
