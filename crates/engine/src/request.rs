//! What goes into the engine and what comes out.

use serde::{Deserialize, Serialize};

use crate::SamplingParams;

/// A sequence in one engine; never used twice by the same engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// A prompt and what to do with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; 0 only reads the prompt. The context bounds it as well.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether to tell log-probabilities, and of how many of the most probable tokens beside the
    /// chosen one; `None` for none, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
}

/// Most alternatives that [`Request::logprobs`] may ask for: the bound of the OpenAI API.
pub const MAX_LOGPROBS: usize = 20;

/// Log-probabilities at one position, of the softmax over the model's logits before penalties,
/// temperature and the other filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most probable tokens, best first, the lower id first among equals; as many as asked
    /// for, or the vocabulary has.
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
}

/// Something that a step did.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt is in the cache; the first token, if one is wanted, comes with the same step.
    /// Told once, however often the sequence is preempted or moved.
    PromptRead {
        /// The sequence.
        id: SequenceId,
    },
    /// A token was generated. `text` holds what became certain: it may be empty while a character
    /// or a possible stop string is incomplete.
    Token {
        /// The sequence.
        id: SequenceId,
        /// The token.
        token: u32,
        /// Text to show.
        text: String,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The sequence is over and forgotten.
    Finished {
        /// The sequence.
        id: SequenceId,
        /// Text that was held back and is certain now.
        text: String,
        /// Why.
        reason: Finish,
    },
}
