//! One file per model family: how its configuration reads and what one layer computes.
//!
//! Letters in shape comments: T rows of the batch, C width, H heads, K KV heads, D head size,
//! F feed-forward width, V vocabulary.

mod fields;
mod gemma3;
mod llama;
mod qwen2;
mod qwen3;

pub(crate) use fields::{Fields, RopeKind};

use crate::config::Activation;
use crate::step::Step;
use crate::weights::Layer;
use crate::{Config, Error};

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
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3];

    /// The name in `general.architecture` of GGUF files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    /// The `model_type` of `config.json`.
    const fn hf_name(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3_text",
            other => other.name(),
        }
    }

    /// The function on the gate of the feed-forward.
    pub(crate) const fn activation(self) -> Activation {
        match self {
            Self::Llama | Self::Qwen2 | Self::Qwen3 => Activation::Silu,
            Self::Gemma3 => Activation::GeluTanh,
        }
    }

    pub(crate) fn config(self, fields: &Fields<'_>) -> Result<Config, Error> {
        match self {
            Self::Llama => llama::config(fields),
            Self::Qwen2 => qwen2::config(fields),
            Self::Qwen3 => qwen3::config(fields),
            Self::Gemma3 => gemma3::config(fields),
        }
    }

    /// Runs one layer on the residual stream of `step`.
    ///
    /// # Errors
    /// When another rank of the stage fails.
    pub(crate) fn layer(
        self,
        step: &mut Step<'_, '_>,
        weights: &Layer,
        index: usize,
    ) -> Result<(), Error> {
        match self {
            Self::Llama => llama::layer(step, weights, index),
            Self::Qwen2 => qwen2::layer(step, weights, index),
            Self::Qwen3 => qwen3::layer(step, weights, index),
            Self::Gemma3 => gemma3::layer(step, weights, index),
        }
    }
}
