//! Requests that go into the engine, and events that come out.

use paceline_formats::grammar::Constraint;
use paceline_formats::text::StopMatcher;
use serde::{Deserialize, Serialize};

use crate::{Error, Order, SamplingParams};

/// A sequence in one engine; never used twice by the same engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// A prompt and what to do with it. The default reads nothing and generates nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; 0 only reads the prompt. The context bounds it as well.
    pub max_tokens: usize,
    /// Tokens before which no token that ends the answer is chosen; a stop text still ends it.
    /// Without effect where a constraint says what may come.
    #[serde(default)]
    pub min_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether to tell log-probabilities, and of how many of the most probable tokens beside the
    /// chosen one; `None` for none, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// Whether log-probabilities of the prompt's tokens are told as well, with as many alternatives
    /// as `logprobs` says (none for `None`); at most [`MAX_PROMPT_LOGPROBS`] numbers. All rows of
    /// the prompt are computed then, those of known pages too.
    #[serde(default)]
    pub prompt_logprobs: bool,
    /// The constraint that the answer must match; `None` for any text.
    pub constraint: Option<Constraint>,
    /// Control tokens whose names are part of the text, ascending; others give no text. For
    /// readers of tool calls (`paceline_formats::tools::Syntax::shown_tokens`).
    pub shown: Vec<u32>,
    /// When it gets its turn.
    #[serde(default)]
    pub order: Order,
    /// Name of the adapter beside the model's weights that answers; `None` for the model alone.
    #[serde(default)]
    pub adapter: Option<String>,
}

impl Request {
    /// Whether an engine of `vocab` tokens and `context` positions can answer it.
    ///
    /// # Errors
    /// For the first thing that is wrong.
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
/// [`Error::PromptLogprobs`] for more than are told of `prompt` tokens with `asked` alternatives.
pub(crate) fn check_prompt_logprobs(prompt: usize, asked: Option<usize>) -> Result<(), Error> {
    let (got, most) = (prompt * (1 + asked.unwrap_or(0)), MAX_PROMPT_LOGPROBS);
    match got {
        got if got > most => Err(Error::PromptLogprobs { got, most }),
        _ => Ok(()),
    }
}

/// # Errors
/// [`Error::Token`] for the first one that a vocabulary of `vocab` tokens lacks.
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

/// Most control tokens of [`Request::shown`]: the forms of calls have a dozen.
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

/// Most alternatives that [`Request::logprobs`] may ask for: the bound of the OpenAI API.
pub const MAX_LOGPROBS: usize = 20;

/// Most log-probabilities of a prompt ([`Request::prompt_logprobs`]), alternatives included. All of
/// them are told at once. As JSON, 2^20 are some 24 MB, under the 64 MiB of a message between
/// processes. They are enough for 131,072 tokens with 7 alternatives each.
pub const MAX_PROMPT_LOGPROBS: usize = 1 << 20;

/// Log-probabilities at one position, of the softmax over the model's logits before bias,
/// penalties, temperature and the other filters. Finite, at least -9999: less probable tokens have
/// this value too. Equal logits give equal bits on every machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most probable tokens, best first, the lower id first among equals; as many as asked
    /// for, or the vocabulary has. The chosen token need not be among them.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// The model gave an end-of-generation token.
    EndOfText,
    /// A stop string came; its place in [`Request::stop`].
    Stop(usize),
    /// `max_tokens`, or the end of the context.
    Length,
    /// The constraint cannot be followed any further within its limits; the answer is a part.
    Constraint,
    /// [`Order::deadline_ms`] is over; the answer is a part, or nothing.
    Deadline,
}

/// A request that is to go on after tokens that its caller has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resumed {
    Goes(SequenceId),
    /// The caller's tokens were the whole answer: only its end was not told.
    Over {
        /// Text that was held back and is certain now.
        text: String,
        /// Why.
        reason: Finish,
    },
}

/// Something that a step did.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt is in the cache; the first token, if one is wanted, comes with the same step.
    /// Told once, however often the sequence is preempted or moved.
    PromptRead {
        id: SequenceId,
        /// Tokens of the prompt that another sequence had computed before.
        reused: usize,
        /// Of the prompt's tokens from the second on, when the request asked for them.
        logprobs: Option<Vec<TokenLogprobs>>,
    },
    /// A token was generated. `text` holds what became certain: it may be empty while a character
    /// or a possible stop string is incomplete.
    Token {
        id: SequenceId,
        token: u32,
        /// Text to show.
        text: String,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The sequence is over and forgotten.
    Finished {
        id: SequenceId,
        /// Text that was held back and is certain now.
        text: String,
        /// Why.
        reason: Finish,
    },
}
