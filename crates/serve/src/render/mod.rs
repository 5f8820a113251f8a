//! Answers as OpenAI writes them, whole and in chunks.

mod chat;
mod completion;
mod tokens;

use serde_json::{Map, Value, json};

use crate::choice::{Choice, Delta};
use crate::request::Dialect;
use paceline_engine::Reply;
use paceline_formats::tokenizer::Tokenizer;
use std::sync::Arc;

/// What all parts of an answer repeat.
#[derive(Debug)]
pub(crate) struct Frame {
    /// The request's own name, unique.
    pub(crate) id: String,
    pub(crate) created_unix_s: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
}

/// An answer that is being written.
#[derive(Debug)]
pub(crate) struct Writer {
    frame: Frame,
    dialect: Dialect,
    tokenizer: Arc<Tokenizer>,
    has_logprobs: bool,
    has_usage: bool,
    prompt_tokens: usize,
    /// Choices per prompt.
    n: usize,
    choices: Vec<Written>,
}

/// A choice as far as it is written.
#[derive(Debug, Default)]
struct Written {
    choice: Choice,
    /// Whole answers only.
    text: String,
    entries: Vec<crate::choice::Entry>,
    finish: Option<&'static str>,
    /// Characters that begin in the tokens so far, for offsets.
    n_chars: usize,
}

/// What a [`Writer`] is made for.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) dialect: Dialect,
    pub(crate) has_logprobs: bool,
    /// Streams only: whether they end with the usage.
    pub(crate) has_usage: bool,
    pub(crate) prompt_tokens: usize,
    pub(crate) n: usize,
    /// Of all prompts.
    pub(crate) choices: usize,
}

impl Writer {
    pub(crate) fn new(frame: Frame, shape: Shape, tokenizer: Arc<Tokenizer>) -> Self {
        let choices = (0..shape.choices).map(|_| Written::default()).collect();
        Self {
            frame,
            dialect: shape.dialect,
            tokenizer,
            has_logprobs: shape.has_logprobs,
            has_usage: shape.has_usage,
            prompt_tokens: shape.prompt_tokens,
            n: shape.n,
            choices,
        }
    }

    /// Takes a reply into a whole answer.
    pub(crate) fn collect(&mut self, index: usize, reply: Reply) {
        let written = &mut self.choices[index];
        if let Some(delta) = written.choice.take(reply) {
            written.text.push_str(&delta.text);
            written.entries.extend(delta.entries);
            written.finish = delta.finish.or(written.finish);
        }
    }

    /// The whole answer.
    pub(crate) fn whole(mut self) -> Value {
        let choices: Vec<Value> = (0..self.choices.len())
            .map(|i| self.whole_choice(i))
            .collect();
        let mut whole = self.head(false);
        whole.insert("choices".into(), choices.into());
        whole.insert("usage".into(), self.usage());
        whole.into()
    }

    fn whole_choice(&mut self, index: usize) -> Value {
        let written = &mut self.choices[index];
        let delta = Delta {
            text: std::mem::take(&mut written.text),
            entries: std::mem::take(&mut written.entries),
            finish: written.finish,
        };
        let logprobs = self.logprobs(index, &delta);
        match &self.dialect {
            Dialect::Chat => chat::choice(index, delta, logprobs),
            Dialect::Completion { echo } => {
                let before = echo.as_ref().map_or("", |texts| &texts[index / self.n]);
                let text = format!("{before}{}", delta.text);
                completion::choice(index, &text, delta.finish, logprobs)
            }
        }
    }

    /// What a stream begins with.
    pub(crate) fn first_chunks(&self) -> Vec<Value> {
        let chunk = |index| match &self.dialect {
            Dialect::Chat => Some(self.chunk(vec![chat::opening(index)])),
            Dialect::Completion { echo } => echo.as_ref().map(|texts| {
                let text = &texts[index / self.n];
                self.chunk(vec![completion::choice(index, text, None, Value::Null)])
            }),
        };
        (0..self.choices.len()).filter_map(chunk).collect()
    }

    /// What a reply adds to a stream.
    pub(crate) fn chunks(&mut self, index: usize, reply: Reply) -> Vec<Value> {
        let Some(delta) = self.choices[index].choice.take(reply) else {
            return Vec::new();
        };
        let logprobs = self.logprobs(index, &delta);
        if let Dialect::Completion { .. } = self.dialect {
            let choice = completion::choice(index, &delta.text, delta.finish, logprobs);
            return vec![self.chunk(vec![choice])];
        }
        // The end has a chunk of its own, without content.
        let mut chunks = Vec::new();
        if !delta.text.is_empty() || !delta.entries.is_empty() {
            chunks.push(self.chunk(vec![chat::delta(index, &delta.text, logprobs)]));
        }
        if let Some(finish) = delta.finish {
            chunks.push(self.chunk(vec![chat::closing(index, finish)]));
        }
        chunks
    }

    /// The chunk without choices that ends a stream which asked for its usage.
    pub(crate) fn usage_chunk(&self) -> Option<Value> {
        let mut chunk = self.chunk(Vec::new());
        chunk["usage"] = self.usage();
        self.has_usage.then_some(chunk)
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let mut chunk = self.head(true);
        chunk.insert("choices".into(), choices.into());
        if self.has_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk.into()
    }

    fn head(&self, is_chunk: bool) -> Map<String, Value> {
        let (prefix, object) = match (&self.dialect, is_chunk) {
            (Dialect::Chat, false) => ("chatcmpl", "chat.completion"),
            (Dialect::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Dialect::Completion { .. }, _) => ("cmpl", "text_completion"),
        };
        let frame = &self.frame;
        let mut head = Map::new();
        head.insert("id".into(), format!("{prefix}-{}", frame.id).into());
        head.insert("object".into(), object.into());
        head.insert("created".into(), frame.created_unix_s.into());
        head.insert("model".into(), frame.model.as_str().into());
        head.insert(
            "system_fingerprint".into(),
            frame.fingerprint.as_str().into(),
        );
        head
    }

    fn usage(&self) -> Value {
        let completion: usize = self.choices.iter().map(|w| w.choice.tokens).sum();
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        })
    }

    fn logprobs(&mut self, index: usize, delta: &Delta) -> Value {
        if !self.has_logprobs {
            return Value::Null;
        }
        match self.dialect {
            Dialect::Chat => chat::logprobs(&self.tokenizer, &delta.entries),
            Dialect::Completion { .. } => {
                let n_chars = &mut self.choices[index].n_chars;
                completion::logprobs(&self.tokenizer, &delta.entries, n_chars)
            }
        }
    }
}
