//! Errors of the engine, with the offending values.

use paceline_text::detokenizer;

use crate::{ConstraintError, GenerationRequest, ParamError, SequenceId, Snapshot};

/// Why a request, a snapshot or a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, but the context holds {context}")]
    PromptTooLong {
        tokens: usize,
        /// Maximum tokens of a sequence, one of them for the answer.
        context: usize,
    },
    #[error("token {token} at position {position} is outside the vocabulary of {vocab}")]
    Token {
        token: u32,
        /// Index in the prompt or snapshot.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    #[error(transparent)]
    Sampling(#[from] ParamError),
    #[error(
        "{got} log-probabilities of the prompt are asked for, alternatives included, expected at \
         most {most}"
    )]
    PromptLogprobs {
        /// Prompt tokens times alternatives plus one.
        got: usize,
        /// [`MAX_PROMPT_LOGPROBS`](crate::MAX_PROMPT_LOGPROBS).
        most: usize,
    },
    #[error("logprobs is {got}, expected at most {most}")]
    Logprobs {
        /// Requested.
        got: usize,
        /// Maximum.
        most: usize,
    },
    #[error("pace is {got:?}, expected `auto`, `off` or milliseconds from 1 to 60000")]
    Pace { got: String },
    #[error("logit_bias has {got} tokens, expected at most {most}")]
    BiasCount {
        got: usize,
        /// Maximum.
        most: usize,
    },
    /// A bias on a token outside the vocabulary.
    #[error("logit_bias has token {token}, which is outside the vocabulary of {vocab}")]
    BiasToken {
        token: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    #[error("logit_bias of token {token} is {got}, expected -100 to 100")]
    BiasValue { token: u32, got: f32 },
    #[error("logit_bias has token {token} twice")]
    BiasTwice { token: u32 },
    #[error(transparent)]
    Stop(#[from] detokenizer::Error),
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// A request for an adapter that is not loaded.
    #[error("the model has no adapter {got:?} beside it")]
    NoAdapter {
        /// Requested name.
        got: String,
    },
    /// A snapshot whose adapter is not loaded.
    #[error("snapshot of a sequence with an adapter that this model has not beside it")]
    OtherAdapter,
    /// Shown control tokens that are not ascending, or too many.
    #[error("shown tokens must ascend, at most {most}")]
    Shown {
        /// Maximum.
        most: usize,
    },
    /// The queue is full. Returns the request unchanged; try again later.
    #[error("{waiting} requests are waiting already")]
    Busy {
        waiting: usize,
        request: Box<GenerationRequest>,
    },
    /// No such sequence: it has finished, or never existed.
    #[error("sequence {} is not in this engine", .0.0)]
    NoSequence(SequenceId),
    /// A snapshot of another model or kernel class: its answer would differ.
    #[error("snapshot of {got}, this engine runs {expected}")]
    OtherModel { got: String, expected: String },
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
    /// A decoder or stop-string state that no answer reaches.
    #[error("snapshot holds back text that no running sequence would")]
    BadSnapshotText,
    /// A snapshot of an engine with a larger context: its answer would end elsewhere.
    #[error("snapshot may grow to {tokens} tokens, but the context holds {context}")]
    SnapshotTooLong {
        /// Its tokens plus those that may still be generated.
        tokens: usize,
        /// Maximum tokens of a sequence.
        context: usize,
    },
    /// The resuming queue is full. Returns the snapshot unchanged.
    #[error("{waiting} sequences are waiting to be resumed already")]
    BusyResuming {
        waiting: usize,
        snapshot: Box<Snapshot>,
    },
    /// An invalid setting of the engine.
    #[error("{setting} is {got}, expected {expected}")]
    Config {
        setting: &'static str,
        got: usize,
        expected: &'static str,
    },
    /// The vocabularies of draft model and model differ.
    #[error(
        "token {token} of the draft model is {got}, that of the model is {expected}: a draft needs \
         the vocabulary of its model"
    )]
    DraftVocabulary {
        /// The first token that differs.
        token: u32,
        /// Its text in the draft model's vocabulary, in quotes, or that it is missing.
        got: String,
        /// Its text in the model's vocabulary.
        expected: String,
    },
    /// A draft head reads layers that the model does not capture.
    #[error("the draft head reads the layers {expected:?}, the model captures {got:?}")]
    DraftCaptures {
        got: Vec<usize>,
        expected: Vec<usize>,
    },
    #[error(transparent)]
    Model(#[from] paceline_model::Error),
}
