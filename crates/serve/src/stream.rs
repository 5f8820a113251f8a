//! An answer as a stream: server-sent events, or lines of JSON.
//!
//! An answer that fails under way ends with the dialect's error and without its last word.
//! Comments or the dialect's own sign of life keep the connection alive.

use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use paceline_engine::Reply;

use crate::answer::Answer;
use crate::places::Place;
use crate::rejection::Rejection;
use crate::render::Telling;

/// A stream that has been decided upon.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) answer: Answer,
    pub(crate) telling: Telling,
    pub(crate) keep_alive: Duration,
    /// A reply that came while the status was not decided.
    pub(crate) early: Option<(usize, Reply)>,
    /// The request's place among those in work.
    pub(crate) _place: Place,
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
        let early = self.early.take();
        let framing = self.telling.framing();
        for value in self.telling.start(early) {
            framing.put(&mut out, &value);
        }
        if out.is_empty() {
            framing.comment(&mut out);
        }
        out.into()
    }

    /// The next values, at least a sign of life.
    async fn more(mut self: Box<Self>) -> (Bytes, State) {
        let framing = self.telling.framing();
        let mut out = Vec::new();
        while out.is_empty() {
            if self.answer.is_complete() {
                return (self.finish(), State::Over);
            }
            match tokio::time::timeout(self.keep_alive, self.answer.next()).await {
                Ok(Ok((choice, reply))) => {
                    for value in self.telling.more(choice, reply) {
                        framing.put(&mut out, &value);
                    }
                }
                Ok(Err(rejection)) => return (self.error(&rejection), State::Over),
                Err(_) => match self.telling.beat() {
                    Some(value) => framing.put(&mut out, &value),
                    None => framing.comment(&mut out),
                },
            }
        }
        (out.into(), State::Under(self))
    }

    fn finish(&mut self) -> Bytes {
        let framing = self.telling.framing();
        let mut out = Vec::new();
        for value in self.telling.end() {
            framing.put(&mut out, &value);
        }
        framing.last_word(&mut out);
        out.into()
    }

    fn error(&mut self, rejection: &Rejection) -> Bytes {
        let mut out = Vec::new();
        let value = self.telling.failed(rejection);
        self.telling.framing().put(&mut out, &value);
        out.into()
    }
}
