//! An answer as a stream: server-sent events, or lines of JSON.
//!
//! An answer that fails under way ends with the dialect's error and without its last word.
//! Comments or the dialect's own sign of life keep the connection alive. Events of a stream that
//! has a journal have ids, and a client that was cut off goes on after the last one it has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::answer::Answer;
use crate::events;
use crate::journal::{Bounds, Journal, Journals, Line, Mirror, Reader, Superseded};
use crate::places::Place;
use crate::rejection::Rejection;
use crate::render::{Framing, Telling};

/// Replies that are made events at once. More would make a client wait that could read.
const AT_ONCE: usize = 64;

/// Asks a stream for a sign of life, before its [`Events::keep_alive`] has passed. The connection
/// takes it out of the response, and asks when its client sends no more. A client that has left
/// answers the next byte by a reset.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beat(Arc<Notify>);

impl Beat {
    /// Never blocks.
    pub(crate) fn ask(&self) {
        self.0.notify_one();
    }
}

/// A stream that has been decided upon.
#[derive(Debug)]
pub(crate) struct Events {
    pub(crate) answer: Answer,
    pub(crate) telling: Telling,
    pub(crate) keep_alive: Duration,
    /// A reply that came while the status was not decided.
    pub(crate) early: Option<Line>,
    /// Events that a journal has already; `None` for a new stream.
    pub(crate) past: Option<Vec<Value>>,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) beat: Beat,
    /// The request's place among those in work.
    pub(crate) _place: Place,
}

/// Writes a stream's journal and numbers its events. Dropping it leaves the journal.
pub(crate) struct Recorder {
    pub(crate) journal: Arc<Journal>,
    pub(crate) reader: Reader,
    pub(crate) mirror: Option<Arc<dyn Mirror>>,
    /// Journals of the node, and the bounds of their bytes.
    pub(crate) journals: Journals,
    pub(crate) bounds: Bounds,
    /// Hears when no other node has the tokens.
    pub(crate) events: events::Events,
    pub(crate) now: fn() -> Instant,
    /// Number of the next event.
    pub(crate) next: u64,
    /// Events up to this number are not sent.
    pub(crate) after: Option<u64>,
}

/// Where a stream is.
enum State {
    Start(Box<Events>),
    Under(Box<Events>),
    Over,
}

/// Outcome of a wait for replies.
enum Next {
    Lines(Vec<Line>),
    Failed(Rejection),
    Silence,
    Superseded,
}

impl Events {
    /// The body of the response. Dropping it, as a client does that leaves, stops the answer.
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
        let mut early: Vec<Line> = self.early.take().into_iter().collect();
        if self.record(&mut early).await.is_err() {
            return (Bytes::new(), State::Over);
        }
        let past = self.past.take();
        let values = past.unwrap_or_else(|| self.telling.start(early.pop()));
        self.put(&mut out, values);
        if out.is_empty() {
            self.telling.framing().comment(&mut out);
        }
        (out.into(), State::Under(self))
    }

    /// The next values, at least a sign of life.
    async fn more(mut self: Box<Self>) -> (Bytes, State) {
        let framing = self.telling.framing();
        let mut out = Vec::new();
        while out.is_empty() {
            if self.answer.is_complete() {
                return (self.finish(), State::Over);
            }
            match self.wait().await {
                Next::Lines(mut lines) => {
                    if self.record(&mut lines).await.is_err() {
                        return (Bytes::new(), State::Over);
                    }
                    for (choice, reply) in lines {
                        let values = self.telling.more(choice, reply);
                        self.put(&mut out, values);
                    }
                }
                Next::Failed(rejection) => return (self.error(&rejection), State::Over),
                Next::Superseded => return (Bytes::new(), State::Over),
                Next::Silence => {
                    self.recorder.iter().for_each(Recorder::touch);
                    match self.telling.beat() {
                        Some(value) => framing.put(&mut out, &value),
                        None => framing.comment(&mut out),
                    }
                }
            }
        }
        (out.into(), State::Under(self))
    }

    /// Replies, as many as are there, or what comes instead of them.
    async fn wait(&mut self) -> Next {
        let (recorder, answer) = (&mut self.recorder, &mut self.answer);
        let superseded = async {
            match recorder {
                Some(recorder) => drop(recorder.reader.superseded.changed().await),
                None => std::future::pending().await,
            }
        };
        let next = tokio::select! {
            biased;
            () = superseded => return Next::Superseded,
            () = self.beat.0.notified() => return Next::Silence,
            next = timeout(self.keep_alive, answer.next()) => next,
        };
        match next {
            Ok(Ok(line)) => {
                let mut lines = vec![line];
                lines.extend(self.answer.ready(AT_ONCE));
                Next::Lines(lines)
            }
            Ok(Err(rejection)) => Next::Failed(rejection),
            Err(_) => Next::Silence,
        }
    }

    async fn record(&mut self, lines: &mut Vec<Line>) -> Result<(), Superseded> {
        match &mut self.recorder {
            Some(recorder) => recorder.record(lines).await,
            None => Ok(()),
        }
    }

    /// Writes values, but those that the client has.
    fn put(&mut self, out: &mut Vec<u8>, values: Vec<Value>) {
        let framing = self.telling.framing();
        for value in values {
            match &mut self.recorder {
                Some(recorder) => recorder.put(framing, out, &value),
                None => framing.put(out, &value),
            }
        }
    }

    fn finish(&mut self) -> Bytes {
        let mut out = Vec::new();
        let values = self.telling.end();
        self.put(&mut out, values);
        self.telling.framing().last_word(&mut out);
        out.into()
    }

    /// It has no id: a client that comes back has the answer tried again.
    fn error(&mut self, rejection: &Rejection) -> Bytes {
        let mut out = Vec::new();
        let value = self.telling.failed(rejection);
        self.telling.framing().put(&mut out, &value);
        out.into()
    }
}

impl Recorder {
    /// Keeps replies here and on another node; leaves those out that say nothing new. Without any
    /// it is the request that the other node gets, whose client knows its name from now on.
    async fn record(&mut self, lines: &mut Vec<Line>) -> Result<(), Superseded> {
        self.append(lines)?;
        if let Some(mirror) = &self.mirror
            && let Some(reason) = self.journal.protect(&**mirror, self.now).await
        {
            self.events.put(events::Kind::Unprotected { reason });
        }
        Ok(())
    }

    /// Adds replies to the journal. One that comes to a bound of its bytes is given up, with an
    /// event: the answer goes on and cannot be come back to.
    fn append(&self, lines: &mut Vec<Line>) -> Result<(), Superseded> {
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

    fn put(&mut self, framing: Framing, out: &mut Vec<u8>, value: &Value) {
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

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "recorder of {} at event {}",
            self.journal.head.id, self.next
        )
    }
}
