//! Model families, relatives in one file: a configuration reader and, unless another file has it,
//! the order of operations in a layer.
//!
//! `LayerStep` has the operations; the CPU and the MLX backend implement it. Family files hold no
//! kernels and no buffers.
//!
//! Letters in shape comments: T rows of the batch, C width, H heads, K KV heads, D head size,
//! F feed-forward width, V vocabulary.

pub(crate) mod blocks;
mod dbrx;
mod deepseek;
mod deepseek4;
mod delta_net;
mod facts;
mod fields;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod glm4moe;
mod glm5_next;
mod gpt_oss;
mod kimi_linear;
mod layer_step;
mod lfm2;
mod llama;
mod minimax_m2;
mod minimax_m3;
mod names;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen;
mod qwen4;

pub use layer_step::{Half, LayerStep};

pub(crate) use fields::{
    ConfigFields, RopeKind, V41, class_default, head_rope, type_of, unknown_fields,
};
pub(crate) use names::{ExpertLayout, FileNames, QWEN3_VL_MOE, dbrx_stem};

use crate::config::Activation;
use crate::{Config, Error};

/// Feed-forward of a layer with pre-norms: experts if it has them.
fn feed_forward<S: LayerStep>(step: &mut S, w: &S::Layer) -> Result<(), Error> {
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    if step.has_experts(w) {
        step.experts(w)?; //                   x (T, C) -> delta (T, C)
    } else {
        step.project_gate_up(w)?; //           x (T, C) -> gate, up (T, F)
        step.activate()?; //                   silu(gate) * up -> hidden (T, F)
        step.project_down(w)?; //              hidden (T, F) -> delta (T, C)
    }
    step.scale_delta()?; //                    delta *= the model's factor
    step.add_delta() //                        residual += delta
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelFamily {
    /// Llama 2 and 3, SmolLM2 and other models stored as `llama`.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Mistral, Ministral and Ministral 3, text only; `mistral3` in GGUF files.
    Mistral,
    SmolLm3,
    /// Granite 3 and 4, dense.
    Granite,
    /// `OLMo` 2 and 3.
    Olmo2,
    /// Phi 3 and 4, text only.
    Phi3,
    Gemma2,
    /// Gemma 3, text only.
    Gemma3,
    /// Gemma 3n, text only.
    Gemma3n,
    /// Gemma 4, text only.
    Gemma4,
    /// Mixtral: Llama with experts; `llama` in GGUF files.
    Mixtral,
    /// Qwen 1.5 and 2 with experts and a shared expert.
    Qwen2Moe,
    /// Qwen 3 with experts, and the text part of Qwen3-VL with experts.
    Qwen3Moe,
    Dbrx,
    GptOss,
    /// GLM 4.5 to 4.7, with experts.
    Glm4Moe,
    /// GLM 5.3 Flash, text only: Kimi delta attention, latent attention and experts.
    Glm5Next,
    /// MiniMax M2 to M2.7.
    MiniMaxM2,
    /// MiniMax M3, text only.
    MiniMaxM3,
    /// DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash, Mistral 4: latent attention and experts.
    DeepSeek,
    /// DeepSeek V4 and V4.1: compressed keys and experts, several residual streams.
    DeepSeek4,
    /// Qwen3-Next: gated delta nets and experts.
    Qwen3Next,
    /// Qwen 3.5 to 3.8, dense, text only.
    Qwen35,
    /// Qwen 3.5 to 3.8 with experts, text only.
    Qwen35Moe,
    /// Qwen4-Exp, text only: gated delta nets and experts, several residual streams.
    Qwen4Exp,
    /// Kimi Linear and Kimi K3: Kimi delta attention, latent attention and experts.
    KimiLinear,
    /// LFM2: short convolutions and attention.
    Lfm2,
    /// LFM2 with experts.
    Lfm2Moe,
    /// Nemotron-H and Nemotron 3 Nano: Mamba 2 and attention, with and without experts.
    NemotronH,
}

impl ModelFamily {
    pub const ALL: [Self; 31] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mistral,
        Self::SmolLm3,
        Self::Granite,
        Self::Olmo2,
        Self::Phi3,
        Self::Gemma2,
        Self::Gemma3,
        Self::Gemma3n,
        Self::Gemma4,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Dbrx,
        Self::GptOss,
        Self::Glm4Moe,
        Self::Glm5Next,
        Self::MiniMaxM2,
        Self::MiniMaxM3,
        Self::DeepSeek,
        Self::DeepSeek4,
        Self::Qwen3Next,
        Self::Qwen35,
        Self::Qwen35Moe,
        Self::Qwen4Exp,
        Self::KimiLinear,
        Self::Lfm2,
        Self::Lfm2Moe,
        Self::NemotronH,
    ];

    /// Dense families in which every layer is attention.
    pub const DENSE: [Self; 10] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mistral,
        Self::SmolLm3,
        Self::Granite,
        Self::Olmo2,
        Self::Phi3,
        Self::Gemma2,
        Self::Gemma3,
    ];

    /// `general.architecture` in GGUF files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama | Self::Mixtral => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Mistral => "mistral3",
            Self::SmolLm3 => "smollm3",
            Self::Granite => "granite",
            Self::Olmo2 => "olmo2",
            Self::Phi3 => "phi3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::Gemma3n => "gemma3n",
            Self::Gemma4 => "gemma4",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe => "qwen3moe",
            Self::Dbrx => "dbrx",
            Self::GptOss => "gpt-oss",
            Self::Glm4Moe => "glm4moe",
            Self::Glm5Next => "glm5_next_text",
            Self::MiniMaxM2 => "minimax-m2",
            Self::MiniMaxM3 => "minimax_m3_vl_text",
            Self::DeepSeek => "deepseek2",
            Self::DeepSeek4 => "deepseek_v4",
            Self::Qwen3Next => "qwen3next",
            Self::Qwen35 => "qwen35",
            Self::Qwen35Moe => "qwen35moe",
            Self::Qwen4Exp => "qwen4_exp_text",
            Self::KimiLinear => "kimi_linear",
            Self::Lfm2 => "lfm2",
            Self::Lfm2Moe => "lfm2moe",
            Self::NemotronH => "nemotron_h",
        }
    }

    /// `model_type` in `config.json`.
    const fn hf_name(self) -> &'static str {
        match self {
            Self::Mistral => "mistral",
            Self::Gemma3 => "gemma3_text",
            Self::Gemma3n => "gemma3n_text",
            Self::Gemma4 => "gemma4_text",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::GptOss => "gpt_oss",
            Self::Glm4Moe => "glm4_moe",
            Self::MiniMaxM2 => "minimax_m2",
            Self::DeepSeek => "deepseek_v3",
            Self::Qwen3Next => "qwen3_next",
            Self::Qwen35 => "qwen3_5_text",
            Self::Qwen35Moe => "qwen3_5_moe_text",
            Self::Lfm2Moe => "lfm2_moe",
            other => other.name(),
        }
    }

    /// Additional names in files, in either layout.
    const fn other_names(self) -> &'static [&'static str] {
        match self {
            Self::Gemma3 => &["gemma-embedding"],
            Self::Mistral => &["ministral", "ministral3"],
            Self::Olmo2 => &["olmo3"],
            Self::Qwen3 => &["qwen3vl", "qwen3_vl_text"],
            Self::Qwen3Moe => &["qwen3vlmoe", "qwen3_vl_moe_text"],
            Self::KimiLinear => &["kimi_k3"],
            Self::Glm5Next => &["glm5_next"],
            Self::NemotronH => &["nemotron_h_moe"],
            Self::Gemma4 => &["gemma4_unified_text"],
            Self::DeepSeek4 => &[V41],
            Self::DeepSeek => &[
                "mistral4",
                "deepseek_v2",
                "kimi_k2",
                "glm4_moe_lite",
                "deepseek32",
                "deepseek_v32",
                "glm-dsa",
                "glm_moe_dsa",
            ],
            _ => &[],
        }
    }

    /// Activation of the feed-forward's gate.
    pub(crate) const fn activation(self) -> Activation {
        match self {
            Self::Gemma2 | Self::Gemma3 | Self::Gemma3n | Self::Gemma4 => Activation::GeluTanh,
            Self::NemotronH => Activation::ReluSquared,
            _ => Activation::Silu,
        }
    }

    /// Whether GGUF files of it are known.
    pub const fn has_gguf(self) -> bool {
        !matches!(
            self,
            Self::DeepSeek4 | Self::Glm5Next | Self::Qwen4Exp | Self::KimiLinear | Self::MiniMaxM3
        )
    }

    pub(crate) const fn has_experts(self) -> bool {
        !matches!(
            self,
            Self::Llama
                | Self::Qwen2
                | Self::Qwen3
                | Self::Mistral
                | Self::SmolLm3
                | Self::Granite
                | Self::Olmo2
                | Self::Phi3
                | Self::Gemma2
                | Self::Gemma3
                | Self::Gemma3n
                | Self::Qwen35
                | Self::Lfm2
        )
    }

    /// Whether queries, keys and values require biases.
    pub const fn has_qkv_biases(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen2Moe | Self::GptOss)
    }

    /// Whether a clamp of gates is of silu, not of gpt-oss's gate.
    pub const fn clamps_silu(self) -> bool {
        matches!(self, Self::DeepSeek4 | Self::Glm5Next)
    }

    /// Whether heads have attention sinks.
    pub const fn has_sinks(self) -> bool {
        self.has_sinks_and_biases() || matches!(self, Self::DeepSeek4)
    }

    /// Whether heads have attention sinks, and attention output, router and experts require biases.
    pub const fn has_sinks_and_biases(self) -> bool {
        matches!(self, Self::GptOss)
    }

    /// Whether all heads of a layer share one latent vector per position.
    pub(crate) const fn has_latent_attention(self) -> bool {
        matches!(self, Self::DeepSeek | Self::KimiLinear | Self::Glm5Next)
    }

    /// Whether only some of its files have a choice bias of the router.
    pub(crate) const fn may_correct_choices(self) -> bool {
        matches!(self, Self::DeepSeek)
    }

    /// Whether feed-forwards and experts have a gate.
    pub const fn has_gates(self) -> bool {
        !matches!(self, Self::NemotronH)
    }

    /// Whether its newer files store steps and decays of a delta net in one matrix.
    pub(crate) const fn joins_delta_gates(self) -> bool {
        matches!(self, Self::Qwen3Next)
    }

    /// Whether queries and keys have a norm over all heads.
    pub const fn norms_projections(self) -> bool {
        matches!(self, Self::MiniMaxM2 | Self::Olmo2)
    }

    /// Whether norms subtract the mean.
    pub const fn centres_norms(self) -> bool {
        matches!(self, Self::Dbrx)
    }

    /// Whether files store queries, keys and values as one matrix.
    pub const fn joins_qkv(self) -> bool {
        matches!(self, Self::Dbrx | Self::Phi3)
    }

    /// Whether files store gate and up of the feed-forward as one matrix.
    pub(crate) const fn joins_gate_up(self) -> bool {
        matches!(self, Self::Phi3)
    }

    /// Whether every query and key head has a norm.
    pub const fn norms_heads(self) -> bool {
        let attention = matches!(
            self,
            Self::Qwen3
                | Self::Gemma3
                | Self::Gemma3n
                | Self::Gemma4
                | Self::Qwen3Moe
                | Self::MiniMaxM3
                | Self::Lfm2
                | Self::Lfm2Moe
        );
        attention || self.has_delta_nets()
    }

    /// Whether most of its layers are gated delta nets.
    pub(crate) const fn has_delta_nets(self) -> bool {
        matches!(
            self,
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe | Self::Qwen4Exp
        )
    }

    /// Whether most of its layers are short convolutions.
    pub const fn has_short_convs(self) -> bool {
        matches!(self, Self::Lfm2 | Self::Lfm2Moe)
    }

    /// Whether the inputs of both halves of a layer have norms.
    pub const fn norms_before_halves(self) -> bool {
        !matches!(self, Self::Olmo2 | Self::Qwen4Exp)
    }

    /// Whether the outputs of both halves of a layer have norms.
    pub const fn norms_after_halves(self) -> bool {
        matches!(
            self,
            Self::Gemma2 | Self::Gemma3 | Self::Gemma3n | Self::Gemma4 | Self::Olmo2
        )
    }

    /// Whether its activations overflow half precision.
    pub const fn needs_wide_activations(self) -> bool {
        matches!(
            self,
            Self::Gemma2 | Self::Gemma3 | Self::Gemma3n | Self::Gemma4 | Self::GptOss
        )
    }

    /// Whether the output head is the embedding if `config.json` does not say.
    pub(crate) const fn is_usually_tied(self) -> bool {
        matches!(
            self,
            Self::Gemma2
                | Self::Gemma3
                | Self::Gemma3n
                | Self::Gemma4
                | Self::SmolLm3
                | Self::Lfm2
                | Self::Lfm2Moe
        )
    }

    /// Names of the family's weights in files.
    pub(crate) const fn file_names(self) -> &'static FileNames {
        match self {
            Self::Gemma2 => &gemma2::NAMES,
            Self::Gemma3 => &gemma3::NAMES,
            Self::Gemma3n => &gemma3n::NAMES,
            Self::Gemma4 => &gemma4::NAMES,
            Self::Mixtral | Self::MiniMaxM2 => &FileNames::MIXTRAL,
            Self::MiniMaxM3 => &minimax_m3::NAMES,
            Self::Dbrx => &dbrx::NAMES,
            Self::GptOss => &gpt_oss::NAMES,
            Self::Glm4Moe => &glm4moe::NAMES,
            Self::Glm5Next => &glm5_next::NAMES,
            Self::DeepSeek => &deepseek::NAMES,
            Self::DeepSeek4 => &deepseek4::NAMES,
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => &delta_net::NAMES,
            Self::Qwen4Exp => &qwen4::NAMES,
            Self::Phi3 => &phi3::NAMES,
            Self::KimiLinear => &kimi_linear::NAMES,
            Self::Lfm2 | Self::Lfm2Moe => &lfm2::NAMES,
            Self::NemotronH => &nemotron_h::NAMES,
            Self::Llama
            | Self::Qwen2
            | Self::Qwen3
            | Self::Mistral
            | Self::SmolLm3
            | Self::Granite
            | Self::Olmo2
            | Self::Qwen2Moe
            | Self::Qwen3Moe => &FileNames::USUAL,
        }
    }

    pub(crate) fn config(self, fields: &ConfigFields<'_>) -> Result<Config, Error> {
        match self {
            Self::Llama | Self::Mistral | Self::SmolLm3 | Self::Granite | Self::Mixtral => {
                llama::config(self, fields)
            }
            Self::Qwen2 | Self::Qwen3 | Self::Qwen2Moe | Self::Qwen3Moe => {
                qwen::config(self, fields)
            }
            Self::Olmo2 => olmo2::config(fields),
            Self::Phi3 => phi3::config(fields),
            Self::Gemma2 => gemma2::config(fields),
            Self::Gemma3 => gemma3::config(fields),
            Self::Gemma3n => gemma3n::config(fields),
            Self::Gemma4 => gemma4::config(fields),
            Self::Dbrx => dbrx::config(fields),
            Self::GptOss => gpt_oss::config(fields),
            Self::Glm4Moe => glm4moe::config(fields),
            Self::Glm5Next => glm5_next::config(fields),
            Self::MiniMaxM2 => minimax_m2::config(fields),
            Self::MiniMaxM3 => minimax_m3::config(fields),
            Self::DeepSeek => deepseek::config(fields),
            Self::DeepSeek4 => deepseek4::config(fields),
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => delta_net::config(self, fields),
            Self::Qwen4Exp => qwen4::config(fields),
            Self::KimiLinear => kimi_linear::config(fields),
            Self::Lfm2 | Self::Lfm2Moe => lfm2::config(self, fields),
            Self::NemotronH => nemotron_h::config(fields),
        }
    }

    /// Runs one layer on the residual stream of `step`.
    ///
    /// # Errors
    /// If another rank of the stage, or the backend, fails.
    pub fn layer<S: LayerStep>(
        self,
        step: &mut S,
        weights: &S::Layer,
        index: usize,
    ) -> Result<(), Error> {
        match self {
            Self::Llama
            | Self::Mistral
            | Self::SmolLm3
            | Self::Phi3
            | Self::Granite
            | Self::Qwen2
            | Self::Qwen3
            | Self::Mixtral
            | Self::Qwen2Moe
            | Self::Qwen3Moe
            | Self::Dbrx
            | Self::GptOss
            | Self::Glm4Moe => llama::layer(step, weights, index),
            Self::Olmo2 => olmo2::layer(step, weights, index),
            Self::Gemma2 | Self::Gemma3 | Self::Gemma4 => gemma4::layer(step, weights, index),
            Self::Gemma3n => gemma3n::layer(step, weights, index),
            Self::MiniMaxM3 => minimax_m3::layer(step, weights, index),
            Self::MiniMaxM2 => minimax_m2::layer(step, weights, index),
            Self::DeepSeek => deepseek::layer(step, weights, index),
            Self::DeepSeek4 => deepseek4::layer(step, weights, index),
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => {
                delta_net::layer(step, weights, index)
            }
            Self::Qwen4Exp => qwen4::layer(step, weights, index),
            Self::KimiLinear => kimi_linear::layer(step, weights, index),
            Self::Glm5Next => glm5_next::layer(step, weights, index),
            Self::Lfm2 | Self::Lfm2Moe => lfm2::layer(step, weights, index),
            Self::NemotronH => nemotron_h::layer(step, weights, index),
        }
    }
}
