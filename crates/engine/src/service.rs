//! The trait of everything that answers requests: an engine on a thread of this process, or workers
//! in other processes. Both are a [`Service`], so that a command line, a bench and an HTTP server
//! need not know which.

use serde::{Deserialize, Serialize};

use crate::{Embedder, Error, Finish, Request, TokenLogprobs};

/// A request that a [`Service`] took. Never used twice by the same service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ticket(pub u64);

/// Where the replies to one request go. Called by one thread at a time, in order; must not block.
///
/// The last call is [`Reply::Finished`] or [`Reply::Failed`], exactly one of them, unless the
/// request is cancelled: then none may come.
pub type Sink = Box<dyn FnMut(Reply) + Send>;

/// Answers requests.
pub trait Service: Send + Sync + std::fmt::Debug {
    /// Takes a request. Does not wait for anything to be computed.
    ///
    /// # Errors
    /// A refusal that is known at once; others come as [`Reply::Failed`]. `sink` is dropped then.
    fn submit(&self, request: Request, sink: Sink) -> Result<Ticket, Failure> {
        self.submit_after(request, Vec::new(), sink)
    }

    /// Takes a request of whose answer its caller has `tokens` already. They are from this service,
    /// or from another one of the same model and kernel class. The replies are those that follow.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure>;

    /// Stops a request and forgets it; nothing happens when it is over already. Replies that were
    /// under way may still come.
    fn cancel(&self, ticket: Ticket);

    /// How it is.
    fn status(&self) -> Status;

    /// How its model is cut between ranks, in a word for figures: `none` where one rank has all of
    /// it. Takes microseconds.
    fn cut(&self) -> String {
        "none".to_owned()
    }

    /// The encoder that makes vectors of texts; a service that has one generates nothing.
    fn embedder(&self) -> Option<&dyn Embedder> {
        None
    }
}

/// Something that happened to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// The prompt is in the cache; comes before the first token.
    PromptRead {
        /// Tokens of the prompt that did not have to be computed.
        reused: usize,
        /// Of the prompt's tokens from the second on, when the request asked for them.
        #[serde(default)]
        logprobs: Option<Vec<TokenLogprobs>>,
    },
    /// A token was generated. `text` holds what became certain, and may be empty.
    Token {
        token: u32,
        /// Text to show.
        text: String,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is complete.
    Finished {
        /// Text that was held back and is certain now.
        text: String,
        /// Why.
        reason: Finish,
    },
    /// The answer will not be completed.
    Failed(Failure),
}

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Failure {
    /// The queue is full: try again later.
    #[error("{waiting} requests are waiting already, which is the most that are held")]
    Busy {
        /// Requests that wait.
        waiting: usize,
    },
    #[error("the prompt has {tokens} tokens, the context is {context}: one must be left to answer")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of a sequence.
        context: usize,
    },
    /// The request cannot be computed, as the engine says.
    #[error("{reason}")]
    Invalid {
        /// The engine's error.
        reason: String,
    },
    /// The engine or worker that computed the answer is gone or cannot go on.
    #[error("the answer was lost: {reason}")]
    Lost {
        /// Which rank failed, and how.
        reason: String,
    },
    /// It is not ready yet, or no more.
    #[error("the model cannot answer now: {reason}")]
    Unavailable {
        /// Why.
        reason: String,
    },
}

impl From<Error> for Failure {
    /// The engine's error about a request, as its caller gets it.
    fn from(error: Error) -> Self {
        match error {
            Error::Busy { waiting, .. } => Self::Busy { waiting },
            Error::PromptTooLong { tokens, context } => Self::PromptTooLong { tokens, context },
            other => Self::Invalid {
                reason: other.to_string(),
            },
        }
    }
}

/// How a service is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Whether it takes requests.
    pub state: State,
    /// Sequences that are computed.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
}

/// Whether a service takes requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Weights are being read.
    Loading,
    /// It does.
    Ready,
    /// It takes them, and answers once what failed is mended; says what failed.
    Recovering(String),
    /// It broke; says how.
    Failed(String),
}
