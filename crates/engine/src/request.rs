//! What goes into the engine and what comes out.

use crate::SamplingParams;

/// A sequence in one engine; never used twice by the same engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// A prompt and what to do with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; 0 only reads the prompt. The context bounds it as well.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
