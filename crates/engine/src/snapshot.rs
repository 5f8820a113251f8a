//! The state of a sequence outside an engine.

use paceline_text::detokenizer::{StopMatcher, StopOutput, StreamDecoder};
use paceline_text::grammar::Constraint;
use serde::{Deserialize, Serialize};

use crate::request::{check_logprobs, check_prompt_logprobs, check_shown, check_tokens};
use crate::sampling::Sampler;
use crate::{Error, SchedulingParams};

/// Everything that determines how a sequence continues: tokens, sampling state with its random
/// numbers, partial characters and stop strings. Keys and values are not included: an engine of the
/// same model and kernel class recomputes them to the bit.
///
/// A continued snapshot gives the same tokens and text as the uninterrupted sequence. Serialises
/// with serde, a few bytes per token. A received snapshot is checked when it is parsed and when it
/// is restored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// Model and kernel class; [`EngineConfig::model`](crate::EngineConfig::model).
    pub(crate) model: String,
    /// Prompt and answer so far.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) tokens_left: usize,
    /// [`GenerationRequest::min_tokens`](crate::Request::min_tokens).
    #[serde(default)]
    pub(crate) min_tokens: usize,
    /// [`GenerationRequest::logprobs`](crate::Request::logprobs).
    pub(crate) logprobs: Option<usize>,
    /// [`GenerationRequest::prompt_logprobs`](crate::Request::prompt_logprobs), if not reported
    /// yet.
    #[serde(default)]
    pub(crate) prompt_logprobs: bool,
    /// [`GenerationRequest::shown`](crate::Request::shown).
    #[serde(default)]
    pub(crate) shown: Vec<u32>,
    /// [`GenerationRequest::constraint`](crate::Request::constraint). The grammar's state follows
    /// from the tokens.
    #[serde(default)]
    pub(crate) constraint: Option<Constraint>,
    /// [`GenerationRequest::order`](crate::Request::order); the deadline starts again.
    #[serde(default)]
    pub(crate) order: SchedulingParams,
    /// SHA-256 of its adapter's values, if it has one: names may differ between engines.
    #[serde(default)]
    pub(crate) adapter: Option<[u8; 32]>,
    pub(crate) sampler: Sampler,
    pub(crate) decoder: StreamDecoder,
    pub(crate) stops: StopMatcher,
}

impl Snapshot {
    /// Prompt and answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of prompt tokens.
    pub const fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Checks that a running sequence of an engine with `context` positions and `vocab` tokens
    /// could have this state.
    pub(crate) fn check(&self, context: usize, vocab: usize) -> Result<(), Error> {
        check_logprobs(self.logprobs)?;
        if self.prompt_logprobs {
            check_prompt_logprobs(self.prompt_len, self.logprobs)?;
        }
        self.sampler.params().check_bias(vocab)?;
        check_shown(&self.shown, vocab)?;
        let (tokens, prompt, left) = (self.tokens.len(), self.prompt_len, self.tokens_left);
        // No remaining tokens is the state of a request that only computes its prompt.
        if prompt == 0 || tokens < prompt || (left == 0 && tokens > prompt) {
            return Err(Error::BadSnapshot {
                tokens,
                prompt,
                left,
            });
        }
        let most = tokens.saturating_add(left.max(1));
        if most > context {
            return Err(Error::SnapshotTooLong {
                tokens: most,
                context,
            });
        }
        check_tokens(&self.tokens, vocab)?;
        // Both return nothing for empty input, unless they hold more than any answer leaves.
        let decodes = !self.decoder.clone().push(&[]).is_empty();
        if decodes || self.stops.clone().push("") != StopOutput::default() {
            return Err(Error::BadSnapshotText);
        }
        Ok(())
    }
}
