//! Renders responses in each API dialect, whole or as a stream.
//!
//! ```text
//! Reply --Choice--> Delta --Writer of the dialect--> JSON --Framing--> bytes
//! ```

pub(crate) mod anthropic;
pub(crate) mod embeddings;
pub(crate) mod llama;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod responses;
mod tokens;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_engine::{DraftCounts, Reply};
use serde_json::Value;

use crate::choice::{ChoiceOutput, ChoiceState, Delta};
use crate::metrics::Metrics;
use crate::rejection::Rejection;

/// Values repeated in every part of a response.
#[derive(Clone, Debug)]
pub(crate) struct ResponseFrame {
    pub(crate) id: String,
    pub(crate) created_unix_s: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
}

/// Behind a fingerprint: the answer continued with numbers that are near those of an answer without
/// interruption.
const CONTINUED: &str = "+continued";

impl ResponseFrame {
    /// Puts the name of the numbers that read the prompt in front of the fingerprint, once.
    pub(crate) fn read_by(&mut self, name: &str) {
        let mark = format!("{name}>");
        if !self.fingerprint.starts_with(&mark) {
            self.fingerprint.insert_str(0, &mark);
        }
    }

    /// Marks the fingerprint, once.
    pub(crate) fn continue_near(&mut self) {
        if !self.fingerprint.ends_with(CONTINUED) {
            self.fingerprint += CONTINUED;
        }
    }
}

/// How a stream separates its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamFraming {
    /// `data: {...}`, and `data: [DONE]` at the end.
    Data,
    /// `event: TYPE` and `data: {...}`: the type is the value's own.
    Named,
    /// `data: {...}` without a final marker.
    Bare,
    Lines,
}

impl StreamFraming {
    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::Lines => "application/x-ndjson",
            _ => "text/event-stream",
        }
    }

    /// Writes `value` as one line: JSON escapes line ends.
    pub(crate) fn put(self, out: &mut Vec<u8>, value: &Value) {
        if self == Self::Named {
            let name = value["type"].as_str().unwrap_or_default();
            out.extend_from_slice(format!("event: {name}\n").as_bytes());
        }
        if self != Self::Lines {
            out.extend_from_slice(b"data: ");
        }
        out.extend_from_slice(value.to_string().as_bytes());
        let end: &[u8] = if self == Self::Lines { b"\n" } else { b"\n\n" };
        out.extend_from_slice(end);
    }

    pub(crate) fn last_word(self, out: &mut Vec<u8>) {
        if self == Self::Data {
            out.extend_from_slice(b"data: [DONE]\n\n");
        }
    }

    /// Writes a keep-alive comment; JSON lines have none.
    pub(crate) fn comment(self, out: &mut Vec<u8>) {
        if self != Self::Lines {
            out.extend_from_slice(b": waiting\n\n");
        }
    }
}

/// Token counts and times of a response.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ResponseUsage {
    /// Prompt tokens, each prompt counted once.
    pub(crate) prompt: usize,
    /// Of these, cached ones.
    pub(crate) cached: usize,
    /// Generated tokens of all choices.
    pub(crate) completion: usize,
    /// Of these, thinking.
    pub(crate) reasoning: usize,
    /// Verified draft tokens of all choices that have ended.
    pub(crate) drafts: DraftCounts,
    /// Time since the request.
    pub(crate) total: Duration,
    /// Time from the request to the end of prefill.
    pub(crate) reading: Duration,
}

/// Renders the responses of one dialect.
pub(crate) trait DialectWriter: fmt::Debug + Send {
    fn framing(&self) -> StreamFraming;

    /// The first values of a stream.
    fn start(&mut self, usage: &ResponseUsage) -> Vec<Value>;

    fn delta(&mut self, index: usize, delta: Delta) -> Vec<Value>;

    /// The last values of a stream whose choices are all complete.
    fn end(&mut self, usage: &ResponseUsage) -> Vec<Value>;

    fn whole(&mut self, said: Vec<ChoiceOutput>, usage: &ResponseUsage) -> Value;

    /// The last value of a failed stream.
    fn failed(&mut self, rejection: &Rejection) -> Value;

    /// Marks all that follows as continued with other bits than begun, where the dialect has a
    /// field for what determines them.
    fn continued(&mut self) {}

    /// Names the numbers that read the prompt, where they are near those that decode and the
    /// dialect has such a field.
    fn read_by(&mut self, name: &str) {
        let _ = name;
    }

    /// The keep-alive value; `None` sends a comment.
    fn beat(&self) -> Option<Value> {
        None
    }
}

/// Builds a response: applies engine replies to the choices, and renders the result.
#[derive(Debug)]
pub(crate) struct ResponseBuilder {
    writer: Box<dyn DialectWriter>,
    choices: Vec<ChoiceState>,
    said: Vec<ChoiceOutput>,
    prompt_tokens: usize,
    /// Choices per prompt.
    n: usize,
    asked: Instant,
    now: fn() -> Instant,
    metrics: Arc<Metrics>,
}

impl ResponseBuilder {
    pub(crate) fn new(
        writer: Box<dyn DialectWriter>,
        choices: Vec<ChoiceState>,
        (prompt_tokens, n): (usize, usize),
        (asked, now): (Instant, fn() -> Instant),
        metrics: &Arc<Metrics>,
    ) -> Self {
        let said = choices.iter().map(|_| ChoiceOutput::default()).collect();
        Self {
            writer,
            choices,
            said,
            prompt_tokens,
            n,
            asked,
            now,
            metrics: Arc::clone(metrics),
        }
    }

    /// Applies a reply to its choice; counts the tool calls of a finished one.
    fn take(&mut self, index: usize, reply: Reply) -> Option<Delta> {
        match &reply {
            Reply::Continued => self.writer.continued(),
            Reply::PromptRead {
                read_by: Some(name),
                ..
            } => self.writer.read_by(name),
            _ => {}
        }
        let choice = &mut self.choices[index];
        let delta = choice.apply_reply(reply, (self.now)());
        if delta.as_ref().is_some_and(|delta| delta.ending.is_some()) {
            self.metrics.calls(choice.calls());
        }
        delta
    }

    pub(crate) fn framing(&self) -> StreamFraming {
        self.writer.framing()
    }

    pub(crate) fn collect(&mut self, index: usize, reply: Reply) {
        if let Some(delta) = self.take(index, reply) {
            self.said[index].add(delta);
        }
    }

    pub(crate) fn whole(mut self) -> Value {
        let usage = self.usage();
        self.writer.whole(std::mem::take(&mut self.said), &usage)
    }

    /// The first values of a stream, with those of an early reply.
    pub(crate) fn start(&mut self, early: Option<(usize, Reply)>) -> Vec<Value> {
        let delta = early.and_then(|(i, reply)| Some((i, self.take(i, reply)?)));
        let usage = self.usage();
        let mut values = self.writer.start(&usage);
        if let Some((index, delta)) = delta {
            values.extend(self.writer.delta(index, delta));
        }
        values
    }

    pub(crate) fn more(&mut self, index: usize, reply: Reply) -> Vec<Value> {
        let delta = self.take(index, reply);
        delta.map_or_else(Vec::new, |delta| self.writer.delta(index, delta))
    }

    pub(crate) fn end(&mut self) -> Vec<Value> {
        let usage = self.usage();
        self.writer.end(&usage)
    }

    pub(crate) fn failed(&mut self, rejection: &Rejection) -> Value {
        self.writer.failed(rejection)
    }

    pub(crate) fn beat(&self) -> Option<Value> {
        self.writer.beat()
    }

    fn usage(&self) -> ResponseUsage {
        let sum = |of: fn(&ChoiceState) -> usize| self.choices.iter().map(of).sum();
        let firsts = self.choices.iter().step_by(self.n.max(1));
        let read_at = self.choices.iter().filter_map(|choice| choice.read_at);
        let since = |at: Instant| at.saturating_duration_since(self.asked);
        ResponseUsage {
            prompt: self.prompt_tokens,
            cached: firsts.map(|choice| choice.reused).sum(),
            completion: sum(|choice| choice.tokens),
            reasoning: sum(|choice| choice.reasoning_tokens),
            drafts: self.choices.iter().map(|choice| choice.drafts).sum(),
            total: since((self.now)()),
            reading: read_at.max().map_or(Duration::ZERO, since),
        }
    }
}
