//! Requests to the engine, and the events of their sequences.

use paceline_text::detokenizer::StopMatcher;
use paceline_text::grammar::Constraint;
use serde::{Deserialize, Serialize};

use crate::{Error, SamplingParams, SchedulingParams};

/// Id of a sequence; never reused by the same engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// A generation request. The default has no prompt and generates nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationRequest {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Maximum tokens to generate; 0 only computes the prompt. The context is a bound as well.
    pub max_tokens: usize,
    /// Minimum tokens before an end-of-generation token; a stop string still ends the answer. No
    /// effect with a constraint.
    #[serde(default)]
    pub min_tokens: usize,
    pub sampling: SamplingParams,
    /// Stop strings: each ends the answer and is not part of it.
    pub stop: Vec<String>,
    /// Number of most probable alternatives per token to report with log-probabilities, at most
    /// [`MAX_LOGPROBS`]; `None` for no log-probabilities.
    pub logprobs: Option<usize>,
    /// Whether to report log-probabilities of the prompt tokens as well, with `logprobs`
    /// alternatives (0 for `None`); at most [`MAX_PROMPT_LOGPROBS`] values. Disables the prefix
    /// cache for the prompt.
    #[serde(default)]
    pub prompt_logprobs: bool,
    /// Constraint on the answer; `None` for any text.
    pub constraint: Option<Constraint>,
    /// Control tokens whose names appear in the text, ascending. For parsers of tool calls
    /// (`paceline_text::tools::Syntax::shown_tokens`).
    pub shown: Vec<u32>,
    #[serde(default)]
    pub order: SchedulingParams,
    /// Name of the adapter to use; `None` for the base model.
    #[serde(default)]
    pub adapter: Option<String>,
}

impl GenerationRequest {
    /// Checks the request for an engine with `vocab` tokens and `context` positions.
    ///
    /// # Errors
    /// The first fault found.
    pub(crate) fn check(&self, vocab: usize, context: usize) -> Result<(), Error> {
        if self.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let tokens = self.prompt.len();
        if tokens >= context {
            return Err(Error::PromptTooLong { tokens, context });
        }
        check_tokens(&self.prompt, vocab)?;
        check_logprobs(self.logprobs)?;
        if self.prompt_logprobs {
            check_prompt_logprobs(self.prompt.len(), self.logprobs)?;
        }
        self.sampling.check()?;
        self.sampling.check_bias(vocab)?;
        check_shown(&self.shown, vocab)?;
        StopMatcher::new(self.stop.clone())?;
        Ok(())
    }
}

/// # Errors
/// [`Error::PromptLogprobs`] if `prompt` tokens with `asked` alternatives exceed the limit.
pub(crate) fn check_prompt_logprobs(prompt: usize, asked: Option<usize>) -> Result<(), Error> {
    let (got, most) = (prompt * (1 + asked.unwrap_or(0)), MAX_PROMPT_LOGPROBS);
    match got {
        got if got > most => Err(Error::PromptLogprobs { got, most }),
        _ => Ok(()),
    }
}

/// # Errors
/// [`Error::Token`] for the first one outside a vocabulary of `vocab` tokens.
pub(crate) fn check_tokens(tokens: &[u32], vocab: usize) -> Result<(), Error> {
    let outside = tokens.iter().position(|token| *token as usize >= vocab);
    outside.map_or(Ok(()), |position| {
        let token = tokens[position];
        Err(Error::Token {
            token,
            position,
            vocab,
        })
    })
}

/// Maximum of [`GenerationRequest::shown`]: tool-call formats have a dozen.
pub const MAX_SHOWN: usize = 64;

/// # Errors
/// [`Error::Shown`], [`Error::Token`].
pub(crate) fn check_shown(shown: &[u32], vocab: usize) -> Result<(), Error> {
    let most = MAX_SHOWN;
    if shown.len() > most || !shown.is_sorted_by(|a, b| a < b) {
        return Err(Error::Shown { most });
    }
    check_tokens(shown, vocab)
}

/// # Errors
/// [`Error::Logprobs`].
pub(crate) const fn check_logprobs(asked: Option<usize>) -> Result<(), Error> {
    match asked {
        Some(got) if got > MAX_LOGPROBS => Err(Error::Logprobs {
            got,
            most: MAX_LOGPROBS,
        }),
        _ => Ok(()),
    }
}

/// Maximum alternatives of [`GenerationRequest::logprobs`]: the limit of the OpenAI API.
pub const MAX_LOGPROBS: usize = 20;

/// Maximum log-probabilities of a prompt ([`GenerationRequest::prompt_logprobs`]), alternatives
/// included. They arrive in one event. As JSON, 2^20 are some 24 MB, under the 64 MiB of a message
/// between processes. That is enough for 131,072 tokens with 7 alternatives each.
pub const MAX_PROMPT_LOGPROBS: usize = 1 << 20;

/// Log-probabilities at one position: the softmax over the model's logits before bias, penalties,
/// temperature and filters. Finite, at least -9999: less probable tokens have this value too. Equal
/// logits give equal bits on every machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the generated token.
    pub logprob: f32,
    /// The most probable tokens, best first, the lower id first among equals. As many as requested,
    /// bounded by the vocabulary. The generated token need not be among them.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// The model gave an end-of-generation token.
    EndOfText,
    /// Index of the stop string in [`GenerationRequest::stop`].
    Stop(usize),
    /// `max_tokens`, or the end of the context.
    Length,
    /// The constraint exceeded its limits; the answer is incomplete.
    Constraint,
    /// [`Order::deadline_ms`] has passed; the answer is incomplete or empty.
    Deadline,
}

/// Result of resuming a request after tokens that its caller has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeOutcome {
    Running(SequenceId),
    /// The caller's tokens are the whole answer; only its end was not reported.
    Finished {
        /// Text that was held back and is now certain.
        text: String,
        reason: Finish,
    },
}
