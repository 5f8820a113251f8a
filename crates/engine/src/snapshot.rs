//! A sequence outside an engine.

use paceline_formats::text::{StopMatcher, StreamDecoder};
use serde::{Deserialize, Serialize};

use crate::Sampler;

/// Everything that decides how a sequence goes on: tokens, sampling state with its random
/// numbers, characters and stop strings half seen. Keys and values are not in it: an engine of the
/// same model and kernel class computes them again to the bit.
///
/// Continuing a snapshot gives the same tokens and text as if the sequence had never been taken
/// out. Serialises with serde; a few bytes per token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// Model and kernel class, as [`EngineConfig::model`](crate::EngineConfig::model) says.
    pub(crate) model: String,
    /// Prompt and answer so far.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) tokens_left: usize,
    pub(crate) sampler: Sampler,
    pub(crate) decoder: StreamDecoder,
    pub(crate) stops: StopMatcher,
}

impl Snapshot {
    /// Prompt and answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many of the tokens are the prompt.
    pub const fn prompt_len(&self) -> usize {
        self.prompt_len
    }
}
