//! Model families, one file each: how a configuration reads and what one layer computes.
//!
//! Letters in shape comments: T rows of the batch, C width, H heads, K KV heads, D head size,
//! F feed-forward width, V vocabulary.

mod dbrx;
mod deepseek;
mod delta_net;
mod fields;
mod gemma3;
mod gemma4;
mod glm4moe;
mod gpt_oss;
mod llama;
mod minimax_m2;
mod mixtral;
mod names;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3moe;

pub(crate) use fields::{Fields, RopeKind};
pub(crate) use names::{FileNames, Stacks, dbrx_stem};

use crate::config::Activation;
use crate::{Config, Error};

/// A half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    /// Queries, keys, values and their projection.
    Attention,
    /// Gate, up and down.
    FeedForward,
    /// Experts beside gate, up and down: a part of the second half with norms of its own.
    Beside,
}

/// The operations that layers are made of, on any engine. An implementation is a step in progress,
/// whose rows are this rank's. A family says the order.
///
/// Each operation fails only for its engine's reasons: the CPU's never but where ranks exchange.
pub(crate) trait LayerStep {
    /// A rank's weights of one layer.
    type Layer;

    /// residual (T, C) -> x (T, C), by the norm before a half
    fn norm(&mut self, w: &Self::Layer, half: Half) -> Result<(), Error>;

    /// x (T, C) -> q (T, H D), k, v (T, K D)
    fn project_qkv(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Brings q, k and v within the model's limit, in place, where it has one.
    fn clamp_qkv(&mut self) -> Result<(), Error>;

    /// Norms every head of q (T, H, D) and k (T, K, D) in place.
    fn norm_heads(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the weights of norms on heads are there, of families that have them or not.
    fn norms_heads(&self, w: &Self::Layer) -> bool;

    /// Norms every head of v (T, K, D) in place, without weights.
    fn norm_values(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Norms q (T, H D) over all heads, and k (T, K D) over all of theirs, in place. Sums of
    /// squares are exchanged with the ranks of the stage.
    fn norm_projections(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Rotates and scales q, rotates k, by the positions of the rows.
    fn rotate(&mut self, index: usize) -> Result<(), Error>;

    /// Writes k and v to the cache, then q (T, H D) -> attended (T, H D).
    fn attend(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// x (T, C) -> q (T, H, R + P), k (T, R + P), of latent attention. R counts latent numbers, P
    /// those that turn. The latter are rotated by the positions of the rows. q is scaled.
    fn project_latent(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Writes k to the cache, then q -> attended (T, H V): what a head reads of latent numbers,
    /// expanded.
    fn attend_latent(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// attended (T, H D) *= sigmoid(gate of each head), where the layer has gates.
    fn gate_attention(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the layer is a gated delta net.
    fn is_delta_net(&self, w: &Self::Layer) -> bool;

    /// x (T, C) -> q, k (T, K D), v, gates (T, H E), and of each head its step and its decay (T, H)
    fn project_delta_net(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Takes q, k, v into the states, reads these, norms and gates each head -> attended (T, H E).
    fn delta_net(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// attended (T, H D) -> delta (T, C), summed over the ranks of the stage
    fn project_attention(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Norms delta (T, C) in place, by the norm after a half.
    fn norm_delta(&mut self, w: &Self::Layer, half: Half) -> Result<(), Error>;

    /// residual (T, C) += delta (T, C)
    fn add_delta(&mut self) -> Result<(), Error>;

    /// x (T, C) -> gate, up (T, F)
    fn project_gate_up(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// activation(gate) * up -> hidden (T, F)
    fn activate(&mut self) -> Result<(), Error>;

    /// hidden (T, F) -> delta (T, C), summed over the ranks of the stage
    fn project_down(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// Whether the layer has experts instead of a feed-forward.
    fn has_experts(&self, w: &Self::Layer) -> bool;

    /// x (T, C) -> delta (T, C), by the experts that the router chooses for each row, summed over
    /// the ranks of the stage
    fn experts(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// delta (T, C) -> aside (T, C), by the norm after a feed-forward that has experts beside it.
    fn set_aside(&mut self, w: &Self::Layer) -> Result<(), Error>;

    /// delta (T, C) += aside (T, C)
    fn add_aside(&mut self) -> Result<(), Error>;

    /// residual (T, C) += what the layer's own embeddings give; nothing where a model has none.
    fn add_per_layer(&mut self, w: &Self::Layer, index: usize) -> Result<(), Error>;

    /// residual (T, C) *= the layer's own factor, where it has one.
    fn scale_residual(&mut self, w: &Self::Layer) -> Result<(), Error>;
}

/// The second half of a layer whose norms are before its halves: experts where it has them.
fn feed_forward<S: LayerStep>(step: &mut S, w: &S::Layer) -> Result<(), Error> {
    step.norm(w, Half::FeedForward)?; //       residual (T, C) -> x (T, C)
    if step.has_experts(w) {
        step.experts(w)?; //                   x (T, C) -> delta (T, C)
    } else {
        step.project_gate_up(w)?; //           x (T, C) -> gate, up (T, F)
        step.activate()?; //                   silu(gate) * up -> hidden (T, F)
        step.project_down(w)?; //              hidden (T, F) -> delta (T, C)
    }
    step.add_delta() //                        residual += delta
}

/// A model family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2 and what else is stored as `llama`.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Gemma 3, text.
    Gemma3,
    /// Gemma 4, text.
    Gemma4,
    /// Mixtral: Llama with experts, and `llama` in GGUF files.
    Mixtral,
    /// Qwen 1.5 and 2 with experts and a shared one.
    Qwen2Moe,
    /// Qwen 3 with experts.
    Qwen3Moe,
    Dbrx,
    GptOss,
    /// GLM 4.5 to 4.7, with experts.
    Glm4Moe,
    /// MiniMax M2 to M2.7.
    MiniMaxM2,
    /// DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash, Mistral 4: latent attention and experts.
    DeepSeek,
    /// Qwen3-Next: gated delta nets and experts.
    Qwen3Next,
    /// Qwen 3.5 to 3.8, dense, text.
    Qwen35,
    /// Qwen 3.5 to 3.8 with experts, text.
    Qwen35Moe,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 16] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Gemma3,
        Self::Gemma4,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Dbrx,
        Self::GptOss,
        Self::Glm4Moe,
        Self::MiniMaxM2,
        Self::DeepSeek,
        Self::Qwen3Next,
        Self::Qwen35,
        Self::Qwen35Moe,
    ];

    /// Families without experts, all layers of which are attention.
    pub const DENSE: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    /// The name in `general.architecture` of GGUF files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama | Self::Mixtral => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
            Self::Gemma4 => "gemma4",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe => "qwen3moe",
            Self::Dbrx => "dbrx",
            Self::GptOss => "gpt-oss",
            Self::Glm4Moe => "glm4moe",
            Self::MiniMaxM2 => "minimax-m2",
            Self::DeepSeek => "deepseek2",
            Self::Qwen3Next => "qwen3next",
            Self::Qwen35 => "qwen35",
            Self::Qwen35Moe => "qwen35moe",
        }
    }

    /// The `model_type` of `config.json`.
    const fn hf_name(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3_text",
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
            other => other.name(),
        }
    }

    /// More names that files have for it, in either layout.
    const fn other_names(self) -> &'static [&'static str] {
        match self {
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

    /// The function on the gate of the feed-forward.
    pub(crate) const fn activation(self) -> Activation {
        match self {
            Self::Gemma3 | Self::Gemma4 => Activation::GeluTanh,
            _ => Activation::Silu,
        }
    }

    /// Whether its layers have experts, all or some.
    pub(crate) const fn has_experts(self) -> bool {
        !matches!(
            self,
            Self::Llama | Self::Qwen2 | Self::Qwen3 | Self::Gemma3 | Self::Qwen35
        )
    }

    /// Whether queries, keys and values need biases.
    pub const fn has_qkv_biases(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen2Moe | Self::GptOss)
    }

    /// Whether the attention's output, the router and the experts need biases, and heads sinks.
    pub(crate) const fn has_sinks_and_biases(self) -> bool {
        matches!(self, Self::GptOss)
    }

    /// Whether all heads of a layer share one latent vector of each position.
    pub(crate) const fn has_latent_attention(self) -> bool {
        matches!(self, Self::DeepSeek)
    }

    /// Whether some of its files have biases on the router's choice and others none.
    pub(crate) const fn may_correct_choices(self) -> bool {
        matches!(self, Self::DeepSeek)
    }

    /// Whether its newer files keep the steps and the decays of a delta net in one matrix.
    pub(crate) const fn joins_delta_gates(self) -> bool {
        matches!(self, Self::Qwen3Next)
    }

    /// Whether queries and keys have a norm over all heads.
    pub(crate) const fn norms_projections(self) -> bool {
        matches!(self, Self::MiniMaxM2)
    }

    /// Whether norms take the mean away first.
    pub(crate) const fn centres_norms(self) -> bool {
        matches!(self, Self::Dbrx)
    }

    /// Whether files have queries, keys and values behind each other in one matrix.
    pub const fn joins_qkv(self) -> bool {
        matches!(self, Self::Dbrx)
    }

    /// Whether every query and key head has a norm.
    pub const fn norms_heads(self) -> bool {
        let attention = matches!(
            self,
            Self::Qwen3 | Self::Gemma3 | Self::Gemma4 | Self::Qwen3Moe
        );
        attention || self.has_delta_nets()
    }

    /// Whether most of its layers are gated delta nets.
    pub(crate) const fn has_delta_nets(self) -> bool {
        matches!(self, Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe)
    }

    /// Whether the results of both halves of a layer have norms.
    pub const fn norms_after_halves(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Gemma4)
    }

    /// Whether half precision is too narrow for its activations.
    pub(crate) const fn needs_wide_activations(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Gemma4 | Self::GptOss)
    }

    /// Whether the output head is the embedding where `config.json` does not say.
    pub(crate) const fn is_usually_tied(self) -> bool {
        matches!(self, Self::Gemma3 | Self::Gemma4)
    }

    /// Names of the family's weights in files.
    pub(crate) const fn file_names(self) -> &'static FileNames {
        match self {
            Self::Gemma3 => &gemma3::NAMES,
            Self::Gemma4 => &gemma4::NAMES,
            Self::Mixtral | Self::MiniMaxM2 => &FileNames::MIXTRAL,
            Self::Dbrx => &dbrx::NAMES,
            Self::GptOss => &gpt_oss::NAMES,
            Self::Glm4Moe => &glm4moe::NAMES,
            Self::DeepSeek => &deepseek::NAMES,
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => &delta_net::NAMES,
            Self::Llama | Self::Qwen2 | Self::Qwen3 | Self::Qwen2Moe | Self::Qwen3Moe => {
                &FileNames::USUAL
            }
        }
    }

    pub(crate) fn config(self, fields: &Fields<'_>) -> Result<Config, Error> {
        match self {
            Self::Llama => llama::config(fields),
            Self::Qwen2 => qwen2::config(fields),
            Self::Qwen3 => qwen3::config(fields),
            Self::Gemma3 => gemma3::config(fields),
            Self::Gemma4 => gemma4::config(fields),
            Self::Mixtral => mixtral::config(fields),
            Self::Qwen2Moe => qwen2moe::config(fields),
            Self::Qwen3Moe => qwen3moe::config(fields),
            Self::Dbrx => dbrx::config(fields),
            Self::GptOss => gpt_oss::config(fields),
            Self::Glm4Moe => glm4moe::config(fields),
            Self::MiniMaxM2 => minimax_m2::config(fields),
            Self::DeepSeek => deepseek::config(fields),
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => delta_net::config(self, fields),
        }
    }

    /// Runs one layer on the residual stream of `step`.
    ///
    /// # Errors
    /// When another rank of the stage fails, or what computes.
    pub(crate) fn layer<S: LayerStep>(
        self,
        step: &mut S,
        weights: &S::Layer,
        index: usize,
    ) -> Result<(), Error> {
        match self {
            Self::Llama => llama::layer(step, weights, index),
            Self::Qwen2 => qwen2::layer(step, weights, index),
            Self::Qwen3 => qwen3::layer(step, weights, index),
            Self::Gemma3 => gemma3::layer(step, weights, index),
            Self::Gemma4 => gemma4::layer(step, weights, index),
            Self::Mixtral => mixtral::layer(step, weights, index),
            Self::Qwen2Moe => qwen2moe::layer(step, weights, index),
            Self::Qwen3Moe => qwen3moe::layer(step, weights, index),
            Self::Dbrx => dbrx::layer(step, weights, index),
            Self::GptOss => gpt_oss::layer(step, weights, index),
            Self::Glm4Moe => glm4moe::layer(step, weights, index),
            Self::MiniMaxM2 => minimax_m2::layer(step, weights, index),
            Self::DeepSeek => deepseek::layer(step, weights, index),
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => {
                delta_net::layer(step, weights, index)
            }
        }
    }
}
