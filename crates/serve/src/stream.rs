//! An answer as server-sent events.
//!
//! `data: {chunk}` for each piece, `data: [DONE]` at the end. An answer that fails under way ends
//! with `data: {"error": ...}` and without `[DONE]`. Comments keep the connection alive.

use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use paceline_engine::Reply;
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;

use crate::answer::Answer;
use crate::rejection::Rejection;
use crate::render::Writer;

/// A stream that has been decided upon.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) answer: Answer,
    pub(crate) writer: Writer,
    pub(crate) keep_alive: Duration,
    /// A reply that came while the status was not decided.
    pub(crate) early: Option<(usize, Reply)>,
    /// The request's place among those in work.
    pub(crate) _permit: OwnedSemaphorePermit,
}

/// Where a stream is.
enum State {
    Start(Box<Events>),
    Under(Box<Events>),
    Over,
}

impl Events {
    /// The body of the response. Dropping it, as a client does that leaves, stops the answer.
    pub(crate) fn into_body(self) -> Body {
        let state = State::Start(Box::new(self));
        Body::from_stream(stream::unfold(state, |state| async move {
            let (bytes, next) = match state {
                State::Start(mut events) => (events.start(), events.then()),
                State::Under(events) => events.more().await,
                State::Over => return None,
            };
            Some((Ok::<_, std::convert::Infallible>(bytes), next))
        }))
    }

    fn then(self: Box<Self>) -> State {
        State::Under(self)
    }

    fn start(&mut self) -> Bytes {
        let mut out = Vec::new();
        let first = self.writer.first_chunks();
        first.iter().for_each(|chunk| push(&mut out, chunk));
        if let Some((choice, reply)) = self.early.take() {
            self.push_reply(&mut out, choice, reply);
        }
        if out.is_empty() {
            comment(&mut out);
        }
        out.into()
    }

    /// The next events, at least a comment.
    async fn more(mut self: Box<Self>) -> (Bytes, State) {
        let mut out = Vec::new();
        while out.is_empty() {
            if self.answer.is_complete() {
                return (self.finish(), State::Over);
            }
            match tokio::time::timeout(self.keep_alive, self.answer.next()).await {
                Ok(Ok((choice, reply))) => self.push_reply(&mut out, choice, reply),
                Ok(Err(rejection)) => return (error(&rejection), State::Over),
                Err(_) => comment(&mut out),
            }
        }
        (out.into(), State::Under(self))
    }

    fn push_reply(&mut self, out: &mut Vec<u8>, choice: usize, reply: Reply) {
        let chunks = self.writer.chunks(choice, reply);
        chunks.iter().for_each(|chunk| push(out, chunk));
    }

    fn finish(&self) -> Bytes {
        let mut out = Vec::new();
        let usage = self.writer.usage_chunk();
        usage.iter().for_each(|chunk| push(&mut out, chunk));
        out.extend_from_slice(b"data: [DONE]\n\n");
        out.into()
    }
}

fn push(out: &mut Vec<u8>, chunk: &Value) {
    out.extend_from_slice(b"data: ");
    // JSON has no line ends outside of escapes, so a chunk is one line.
    out.extend_from_slice(chunk.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

fn comment(out: &mut Vec<u8>) {
    out.extend_from_slice(b": waiting\n\n");
}

fn error(rejection: &Rejection) -> Bytes {
    let mut out = Vec::new();
    push(&mut out, &rejection.body());
    out.into()
}
