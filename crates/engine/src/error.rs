//! Errors of the engine.

use paceline_formats::text;

use crate::{ConstraintError, ParamError, Request, SequenceId, Snapshot};

/// Why the engine refuses a request or a snapshot, or cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, but the context holds {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that a sequence can have, one of them for the answer.
        context: usize,
    },
    #[error("token {token} at position {position} is outside the vocabulary of {vocab}")]
    Token {
        token: u32,
        /// Its place in the prompt or snapshot.
        position: usize,
        /// Number of tokens.
        vocab: usize,
    },
    #[error(transparent)]
    Sampling(#[from] ParamError),
    #[error(
        "{got} log-probabilities of the prompt are asked for, alternatives included, expected at \
         most {most}"
    )]
    PromptLogprobs {
        /// Tokens of the prompt, times one more than alternatives.
        got: usize,
        /// [`MAX_PROMPT_LOGPROBS`](crate::MAX_PROMPT_LOGPROBS).
        most: usize,
    },
    #[error("logprobs is {got}, expected at most {most}")]
    Logprobs {
        /// How many were asked for.
        got: usize,
        /// How many would be told.
        most: usize,
    },
    #[error("pace is {got:?}, expected `auto`, `off` or milliseconds from 1 to 60000")]
    Pace { got: String },
    #[error("logit_bias has {got} tokens, expected at most {most}")]
    BiasCount {
        /// Its tokens.
        got: usize,
        /// How many would be accepted.
        most: usize,
    },
    /// A bias on a token that does not exist.
    #[error("logit_bias has token {token}, which is outside the vocabulary of {vocab}")]
    BiasToken {
        token: u32,
        /// Number of tokens.
        vocab: usize,
    },
    #[error("logit_bias of token {token} is {got}, expected -100 to 100")]
    BiasValue { token: u32, got: f32 },
    #[error("logit_bias has token {token} twice")]
    BiasTwice { token: u32 },
    #[error(transparent)]
    Stop(#[from] text::Error),
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// A request for an adapter that the model has not beside it.
    #[error("the model has no adapter {got:?} beside it")]
    NoAdapter {
        /// The name that was asked for.
        got: String,
    },
    /// A snapshot of a sequence whose adapter the model has not beside it.
    #[error("snapshot of a sequence with an adapter that this model has not beside it")]
    OtherAdapter,
    /// Control tokens to show that are not in ascending order, or too many.
    #[error("shown tokens must ascend, at most {most}")]
    Shown {
        /// How many would be accepted.
        most: usize,
    },
    /// The queue is full; the request comes back unchanged, to be tried again later.
    #[error("{waiting} requests are waiting already")]
    Busy {
        waiting: usize,
        request: Box<Request>,
    },
    /// No such sequence: it has finished, or never was.
    #[error("sequence {} is not in this engine", .0.0)]
    NoSequence(SequenceId),
    /// A snapshot of another model or kernel class: its answer would not be the same.
    #[error("snapshot of {got}, this engine runs {expected}")]
    OtherModel {
        /// Model and kernel class of the snapshot.
        got: String,
        /// Model and kernel class of the engine.
        expected: String,
    },
    #[error(
        "snapshot of {tokens} tokens, {prompt} of them the prompt, with {left} to generate, \
         is of no running sequence"
    )]
    BadSnapshot {
        tokens: usize,
        prompt: usize,
        /// Tokens that may still be generated.
        left: usize,
    },
    /// The decoder or the stop strings of a snapshot are in a state that no answer leads to.
    #[error("snapshot holds back text that no running sequence would")]
    BadSnapshotText,
    /// A snapshot of an engine with a larger context: its answer would end elsewhere.
    #[error("snapshot may grow to {tokens} tokens, but the context holds {context}")]
    SnapshotTooLong {
        /// Its tokens with those that may still be generated.
        tokens: usize,
        /// Tokens that a sequence can have.
        context: usize,
    },
    /// As many sequences as fit wait to be resumed; the snapshot comes back unchanged.
    #[error("{waiting} sequences are waiting to be resumed already")]
    BusyResuming {
        waiting: usize,
        snapshot: Box<Snapshot>,
    },
    /// A setting of the engine that cannot work.
    #[error("{setting} is {got}, expected {expected}")]
    Config {
        setting: &'static str,
        got: usize,
        expected: &'static str,
    },
    /// The draft model and the model do not mean the same by a token.
    #[error(
        "token {token} of the draft model is {got}, that of the model is {expected}: a draft needs \
         the vocabulary of its model"
    )]
    DraftVocabulary {
        /// The first such token.
        token: u32,
        /// How the draft model's vocabulary writes it, in quotes, or that it has none.
        got: String,
        /// The same of the model's.
        expected: String,
    },
    #[error(transparent)]
    Model(#[from] paceline_model::Error),
}
