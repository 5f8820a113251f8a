//! A response as a stream: server-sent events, or lines of JSON.
//!
//! A response that fails midway ends with the dialect's error and without its final event. Comments
//! or the dialect's own keep-alive hold the connection open. Events of a stream with a journal have
//! ids, and a disconnected client resumes after its last one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::concurrency::ConcurrencyPermit;
use crate::events;
use crate::journal::{
    ChoiceReply, Journal, JournalBounds, JournalReader, Journals, Mirror, Superseded,
};
use crate::rejection::Rejection;
use crate::render::{ResponseBuilder, StreamFraming};
use crate::response_stream::ResponseStream;

/// Maximum replies rendered per chunk. More would delay a client that could read.
const AT_ONCE: usize = 64;

/// Requests an early keep-alive from a stream, before [`SseStream::keep_alive`] has passed. The
/// connection takes it out of the response, and uses it after the client's half-close. A client
/// that has left answers the next byte by a reset.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAliveRequest(Arc<Notify>);

impl KeepAliveRequest {
    /// Never blocks.
    pub(crate) fn ask(&self) {
        self.0.notify_one();
    }

    /// Waits for a request.
    pub(crate) async fn asked(&self) {
        self.0.notified().await;
    }
}

/// A streamed response whose status is decided.
#[derive(Debug)]
pub(crate) struct SseStream {
    pub(crate) answer: ResponseStream,
    pub(crate) builder: ResponseBuilder,
    pub(crate) keep_alive: Duration,
    /// A reply received before the status was decided.
    pub(crate) early: Option<ChoiceReply>,
    /// Events rendered from a journal; `None` for a new stream.
    pub(crate) past: Option<Vec<Value>>,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) beat: KeepAliveRequest,
    pub(crate) _place: ConcurrencyPermit,
}

/// Writes a stream's journal and numbers its events. Dropping it releases the journal to a later
/// reader.
#[derive(derive_more::Debug)]
#[debug("recorder of {} at event {}", self.journal.head.id, self.next)]
pub(crate) struct Recorder {
    pub(crate) journal: Arc<Journal>,
    pub(crate) reader: JournalReader,
    pub(crate) mirror: Option<Arc<dyn Mirror>>,
    /// The node's journals, and their limits.
    pub(crate) journals: Journals,
    pub(crate) bounds: JournalBounds,
    /// Event log, for streams without a mirrored copy.
    pub(crate) events: events::EventLog,
    pub(crate) now: fn() -> Instant,
    /// Number of the next event.
    pub(crate) next: u64,
    /// Events up to this number are skipped.
    pub(crate) after: Option<u64>,
}

enum State {
    Start(Box<SseStream>),
    Under(Box<SseStream>),
    Over,
}

/// Result of a wait for replies.
enum StreamStep {
    Lines(Vec<ChoiceReply>),
    Failed(Rejection),
    Silence,
    Superseded,
}

impl SseStream {
    /// The response body. Dropping it, as when the client leaves, cancels the request.
    pub(crate) fn into_body(self) -> Body {
        let state = State::Start(Box::new(self));
        Body::from_stream(stream::unfold(state, |state| async move {
            let (bytes, next) = match state {
                State::Start(events) => events.start().await,
                State::Under(events) => events.more().await,
                State::Over => return None,
            };
            Some((Ok::<_, std::convert::Infallible>(bytes), next))
        }))
    }

    async fn start(mut self: Box<Self>) -> (Bytes, State) {
        let mut out = Vec::new();
        let mut early: Vec<ChoiceReply> = self.early.take().into_iter().collect();
        if self.record(&mut early).await.is_err() {
            return (Bytes::new(), State::Over);
        }
        let past = self.past.take();
        let values = past.unwrap_or_else(|| self.builder.start(early.pop()));
        self.put(&mut out, values);
        if out.is_empty() {
            self.builder.framing().comment(&mut out);
        }
        (out.into(), State::Under(self))
    }

    /// The next values, at least a keep-alive.
    async fn more(mut self: Box<Self>) -> (Bytes, State) {
        let framing = self.builder.framing();
        let mut out = Vec::new();
        while out.is_empty() {
            if self.answer.is_complete() {
                return (self.finish(), State::Over);
            }
            match self.wait().await {
                StreamStep::Lines(mut lines) => {
                    if self.record(&mut lines).await.is_err() {
                        return (Bytes::new(), State::Over);
                    }
                    for (choice, reply) in lines {
                        let values = self.builder.more(choice, reply);
                        self.put(&mut out, values);
                    }
                }
                StreamStep::Failed(rejection) => return (self.error(&rejection), State::Over),
                StreamStep::Superseded => return (Bytes::new(), State::Over),
                StreamStep::Silence => {
                    self.recorder.iter().for_each(Recorder::touch);
                    match self.builder.beat() {
                        Some(value) => framing.put(&mut out, &value),
                        None => framing.comment(&mut out),
                    }
                }
            }
        }
        (out.into(), State::Under(self))
    }

    /// All available replies, or another reason to wake.
    async fn wait(&mut self) -> StreamStep {
        let (recorder, answer) = (&mut self.recorder, &mut self.answer);
        let superseded = async {
            match recorder {
                Some(recorder) => drop(recorder.reader.superseded.changed().await),
                None => std::future::pending().await,
            }
        };
        let next = tokio::select! {
            biased;
            () = superseded => return StreamStep::Superseded,
            () = self.beat.asked() => return StreamStep::Silence,
            next = timeout(self.keep_alive, answer.next()) => next,
        };
        match next {
            Ok(Ok(line)) => {
                let mut lines = vec![line];
                lines.extend(self.answer.ready(AT_ONCE));
                StreamStep::Lines(lines)
            }
            Ok(Err(rejection)) => StreamStep::Failed(rejection),
            Err(_) => StreamStep::Silence,
        }
    }

    async fn record(&mut self, lines: &mut Vec<ChoiceReply>) -> Result<(), Superseded> {
        match &mut self.recorder {
            Some(recorder) => recorder.record(lines).await,
            None => Ok(()),
        }
    }

    /// Writes values, without those that the client has.
    fn put(&mut self, out: &mut Vec<u8>, values: Vec<Value>) {
        let framing = self.builder.framing();
        for value in values {
            match &mut self.recorder {
                Some(recorder) => recorder.put(framing, out, &value),
                None => framing.put(out, &value),
            }
        }
    }

    fn finish(&mut self) -> Bytes {
        let mut out = Vec::new();
        let values = self.builder.end();
        self.put(&mut out, values);
        self.builder.framing().last_word(&mut out);
        out.into()
    }

    /// Without an id, so that a reconnecting client retries the response.
    fn error(&mut self, rejection: &Rejection) -> Bytes {
        let mut out = Vec::new();
        let value = self.builder.failed(rejection);
        self.builder.framing().put(&mut out, &value);
        out.into()
    }
}

impl Recorder {
    /// Records replies here and at the mirror; drops repeated ones. Without replies it mirrors the
    /// request, since the client learns its id now.
    async fn record(&mut self, lines: &mut Vec<ChoiceReply>) -> Result<(), Superseded> {
        self.append(lines)?;
        if let Some(mirror) = &self.mirror
            && let Some(reason) = self.journal.protect(&**mirror, self.now).await
        {
            self.events.put(events::Kind::Unprotected { reason });
        }
        Ok(())
    }

    /// Appends replies to the journal. A journal at its byte limit is discarded, with an event: the
    /// response continues and cannot be resumed.
    fn append(&self, lines: &mut Vec<ChoiceReply>) -> Result<(), Superseded> {
        let was_whole = self.journal.is_whole();
        let bytes_max = self.bounds.bytes_of_one();
        self.journal.append(self.reader.life, lines, bytes_max)?;
        self.journals.settle(&self.journal, self.bounds);
        if was_whole && !self.journal.is_whole() {
            let all = self.bounds.bytes;
            let reason = format!(
                "the answer's journal was given up: one may take {bytes_max} bytes, all of this \
                 node {all}"
            );
            self.events.put(events::Kind::Unprotected { reason });
        }
        Ok(())
    }

    fn put(&mut self, framing: StreamFraming, out: &mut Vec<u8>, value: &Value) {
        let number = self.next;
        self.next += 1;
        if self.after.is_some_and(|after| number <= after) {
            return;
        }
        let id = &self.journal.head.id;
        out.extend_from_slice(format!("id: {id}:{number}\n").as_bytes());
        framing.put(out, value);
    }

    fn touch(&self) {
        if let Some(mirror) = &self.mirror {
            self.journal.touch(&**mirror);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.journal.leave(self.reader.life, (self.now)());
    }
}
