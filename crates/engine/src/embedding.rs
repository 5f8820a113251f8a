//! Text embeddings: the trait that a [`Service`] may offer, and its implementation by an encoder.

use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use paceline_model::encoder::Encoder;

use crate::{RequestFailure, Service, ServiceStatus, Sink, State, Submission, Ticket};

/// Computes embedding vectors. A vector depends on the model and its own text only.
pub trait Embedder: Send + Sync + Debug {
    /// Elements of a vector.
    fn dimensions(&self) -> usize;

    /// Maximum tokens of a text.
    fn context(&self) -> usize;

    /// Computes a vector of length 1 for each of `texts`, in order. Blocks. Stops between steps, of
    /// about a second at most, once `is_over` is true.
    ///
    /// # Errors
    /// [`RequestFailure::Invalid`] for an invalid text, by its index;
    /// [`RequestFailure::Unavailable`] if `is_over` was true. [`RequestFailure::Unavailable`] where
    /// `is_over` was true.
    fn embed(
        &self,
        texts: &[Vec<u32>],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, RequestFailure>;
}

/// An encoder as a [`Service`] that computes embeddings and generates nothing.
#[derive(Debug)]
pub struct EncoderService {
    encoder: Encoder,
    /// Locked for one step, so that requests alternate.
    step: Mutex<()>,
    asked: AtomicUsize,
}

/// Counts a request until dropped.
struct InFlightGuard<'a>(&'a AtomicUsize);

impl<'a> InFlightGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl EncoderService {
    pub const fn new(encoder: Encoder) -> Self {
        Self {
            encoder,
            step: Mutex::new(()),
            asked: AtomicUsize::new(0),
        }
    }

    pub const fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// # Errors
    /// [`RequestFailure::Invalid`]: an empty text, one that is too long, an unknown token.
    fn check(&self, i: usize, text: &[u32]) -> Result<(), RequestFailure> {
        let config = self.encoder.config();
        let (context, vocab) = (config.context, config.vocab);
        let unknown = text.iter().find(|id| **id as usize >= vocab);
        let reason = match (text.len(), unknown) {
            (0, _) => format!("text {i} has no tokens"),
            (tokens, _) if tokens > context => {
                format!("text {i} has {tokens} tokens, expected at most {context}")
            }
            (_, Some(id)) => format!("token {id} of text {i} is unknown, expected below {vocab}"),
            (_, None) => return Ok(()),
        };
        Err(RequestFailure::Invalid { reason })
    }
}

impl Embedder for EncoderService {
    fn dimensions(&self) -> usize {
        self.encoder.config().width
    }

    fn context(&self) -> usize {
        self.encoder.config().context
    }

    fn embed(
        &self,
        texts: &[Vec<u32>],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, RequestFailure> {
        let _asked = InFlightGuard::new(&self.asked);
        for (i, text) in texts.iter().enumerate() {
            self.check(i, text)?;
        }
        let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
        let mut vectors = Vec::with_capacity(texts.len());
        for step in Encoder::steps(&lengths) {
            let of_step: Vec<&[u32]> = texts[step].iter().map(Vec::as_slice).collect();
            let _turn = self.step.lock().unwrap_or_else(PoisonError::into_inner);
            let over = || RequestFailure::Unavailable {
                reason: "the request is over".to_owned(),
            };
            if is_over() {
                return Err(over());
            }
            let computed = self.encoder.embed(&of_step, is_over);
            let computed = computed.map_err(|error| RequestFailure::Unavailable {
                reason: error.to_string(),
            })?;
            vectors.extend(computed.ok_or_else(over)?);
        }
        Ok(vectors)
    }
}

impl Service for EncoderService {
    fn accept(&self, _submission: Submission, _sink: Sink) -> Result<(), RequestFailure> {
        let reason = "the model makes embeddings and generates no text".to_owned();
        Err(RequestFailure::Invalid { reason })
    }

    fn cancel(&self, _ticket: Ticket) {}

    fn status(&self) -> ServiceStatus {
        let asked = self.asked.load(Ordering::Relaxed);
        ServiceStatus {
            state: State::Ready,
            running: asked.min(1),
            waiting: asked.saturating_sub(1),
        }
    }

    fn embedder(&self) -> Option<&dyn Embedder> {
        Some(self)
    }
}
