//! `/v1/chat/completions` and `/v1/completions`.

mod chat;
mod completion;

use std::sync::Arc;

use paceline_engine::TokenLogprobs;
use paceline_text::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::{DialectWriter, ResponseFrame, ResponseUsage, StreamFraming};
use crate::choice::{ChoiceOutput, Delta, ScoredToken};
use crate::rejection::Rejection;

/// Which of the two endpoints, with its own data.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Chat,
    /// By prompt, the echo before each choice.
    Completion {
        echo: Option<Vec<PromptEcho>>,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct PromptEcho {
    pub(crate) text: String,
    /// The prompt's tokens, if their log-probabilities are echoed.
    pub(crate) tokens: Option<Vec<u32>>,
}

/// Renders both.
#[derive(Debug)]
pub(crate) struct OpenAi {
    frame: ResponseFrame,
    kind: Kind,
    tokenizer: Arc<Tokenizer>,
    has_logprobs: bool,
    /// Whether a stream ends with the usage.
    has_usage: bool,
    /// Choices per prompt.
    n: usize,
    /// By choice, characters that began in its tokens so far, for offsets.
    n_chars: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct OpenAiOptions {
    pub(crate) kind: Kind,
    pub(crate) has_logprobs: bool,
    pub(crate) has_usage: bool,
    /// Choices per prompt.
    pub(crate) n: usize,
    pub(crate) choices: usize,
}

impl OpenAi {
    pub(crate) fn new(
        frame: ResponseFrame,
        shape: OpenAiOptions,
        tokenizer: Arc<Tokenizer>,
    ) -> Self {
        Self {
            frame,
            kind: shape.kind,
            tokenizer,
            has_logprobs: shape.has_logprobs,
            has_usage: shape.has_usage,
            n: shape.n,
            n_chars: vec![0; shape.choices],
        }
    }

    fn whole_choice(&mut self, index: usize, said: &ChoiceOutput) -> Value {
        let logprobs = self.logprobs(index, said.prompt.as_deref(), &said.entries);
        match &self.kind {
            Kind::Chat => chat::choice(index, said, logprobs),
            Kind::Completion { .. } => {
                let before = self.echo(index).map_or("", |echo| &echo.text);
                let text = format!("{before}{}", said.text);
                completion::choice(index, &text, said.finish_reason(), logprobs)
            }
        }
    }

    /// The echoed prompt before a choice, if the request asks for it.
    fn echo(&self, index: usize) -> Option<&PromptEcho> {
        match &self.kind {
            Kind::Completion { echo: Some(echoes) } => Some(&echoes[index / self.n]),
            _ => None,
        }
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
        let (prefix, object) = match (&self.kind, is_chunk) {
            (Kind::Chat, false) => ("chatcmpl", "chat.completion"),
            (Kind::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Kind::Completion { .. }, _) => ("cmpl", "text_completion"),
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

    /// Log-probabilities of the output; `prompt` has those of the echoed prompt from its second
    /// token on.
    fn logprobs(
        &mut self,
        index: usize,
        prompt: Option<&[TokenLogprobs]>,
        entries: &[ScoredToken],
    ) -> Value {
        if !self.has_logprobs {
            return Value::Null;
        }
        if let Kind::Chat = self.kind {
            return chat::logprobs(&self.tokenizer, entries);
        }
        let tokens = self.echo(index).and_then(|echo| echo.tokens.as_deref());
        let prompt = tokens.zip(prompt).map_or_else(Vec::new, completion::scored);
        let answer = entries.iter().map(|e| (e.token, Some(&e.logprobs)));
        let tokens: Vec<_> = prompt.into_iter().chain(answer).collect();
        completion::logprobs(&self.tokenizer, &tokens, &mut self.n_chars[index])
    }
}

/// OpenAI's `usage`. Its fields for predictions by the client have the draft tokens, where some
/// were verified.
fn usage(usage: &ResponseUsage) -> Value {
    let mut of_answer = json!({"reasoning_tokens": usage.reasoning});
    if !usage.drafts.is_none() {
        let accepted = usage.drafts.right;
        of_answer["accepted_prediction_tokens"] = json!(accepted);
        of_answer["rejected_prediction_tokens"] = json!(usage.drafts.checked - accepted);
    }
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": of_answer,
    })
}

impl DialectWriter for OpenAi {
    fn framing(&self) -> StreamFraming {
        StreamFraming::Data
    }

    fn start(&mut self, _usage: &ResponseUsage) -> Vec<Value> {
        let chunk = |index| match &self.kind {
            Kind::Chat => Some(self.chunk(vec![chat::opening(index)])),
            // An echo with log-probabilities follows with the first delta.
            Kind::Completion { .. } => {
                let echo = self.echo(index).filter(|echo| echo.tokens.is_none());
                echo.map(|echo| {
                    let choice = completion::choice(index, &echo.text, None, Value::Null);
                    self.chunk(vec![choice])
                })
            }
        };
        (0..self.n_chars.len()).filter_map(chunk).collect()
    }

    fn delta(&mut self, index: usize, delta: Delta) -> Vec<Value> {
        let logprobs = self.logprobs(index, delta.prompt.as_deref(), &delta.entries);
        let finish = delta.ending.map(crate::choice::FinishReason::openai);
        if let Kind::Completion { .. } = self.kind {
            let echo = self.echo(index).filter(|_| delta.prompt.is_some());
            let mut said = ChoiceOutput {
                text: echo.map_or_else(String::new, |echo| echo.text.clone()),
                ..ChoiceOutput::default()
            };
            said.add(delta);
            let choice = completion::choice(index, &said.text, finish, logprobs);
            return vec![self.chunk(vec![choice])];
        }
        // The finish reason has a chunk of its own, without content.
        let closing = finish.map(|finish| chat::closing(index, finish));
        let deltas = chat::deltas(index, &delta, logprobs);
        let all = deltas.into_iter().chain(closing);
        all.map(|choice| self.chunk(vec![choice])).collect()
    }

    fn end(&mut self, sum: &ResponseUsage) -> Vec<Value> {
        let mut chunk = self.chunk(Vec::new());
        chunk["usage"] = usage(sum);
        self.has_usage.then_some(chunk).into_iter().collect()
    }

    fn whole(&mut self, said: Vec<ChoiceOutput>, sum: &ResponseUsage) -> Value {
        let choices = said.iter().enumerate();
        let choices: Vec<Value> = choices
            .map(|(i, said)| self.whole_choice(i, said))
            .collect();
        let mut whole = self.head(false);
        whole.insert("choices".into(), choices.into());
        whole.insert("usage".into(), usage(sum));
        whole.into()
    }

    fn continued(&mut self) {
        self.frame.continue_near();
    }

    fn read_by(&mut self, name: &str) {
        self.frame.read_by(name);
    }

    fn failed(&mut self, rejection: &Rejection) -> Value {
        rejection.body()
    }
}
