//! A loaded model that answers prompts in turn, for `run` and chats.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use paceline_cluster::machine::peak_memory_bytes;
use paceline_engine::{Error as EngineError, GenerationRequest, RequestFailure, SamplingParams};
use paceline_node::Error as NodeError;
use paceline_node::trace::{AnswerTimes, Recording, Timeline, UnixClock};
use paceline_text::chat::{ChatMessage, ChatOptions, ChatTemplate, Error as ChatError};
use paceline_text::tokenizer::Error as TokenizerError;
use serde_json::Value;

use crate::answer::{AnswerStats, RunDetails, SubmittedPrompt, collect};
use crate::local_model::ReadyModel;

/// Minimum tokens of an answer for the speed records: the first few are slower.
const LESSON: usize = 16;

#[derive(Clone, Debug)]
pub struct SessionOptions {
    pub sampling: SamplingParams,
    /// Maximum tokens of an answer.
    pub max_tokens: usize,
    /// Stop texts.
    pub stop: Vec<String>,
    /// Name of the adapter to use, if any.
    pub adapter: Option<String>,
    /// Whether to skip the chat template.
    pub raw: bool,
}

#[derive(Debug)]
pub struct ModelSession {
    loaded: ReadyModel,
    template: Option<ChatTemplate>,
    manner: SessionOptions,
}

impl ModelSession {
    /// A session with `loaded`.
    ///
    /// # Errors
    /// An unusable chat template, if needed.
    pub fn new(mut loaded: ReadyModel, manner: SessionOptions) -> Result<Self, ChatError> {
        let template = loaded.template.take().filter(|_| !manner.raw).transpose()?;
        Ok(Self {
            loaded,
            template,
            manner,
        })
    }

    pub const fn loaded(&self) -> &ReadyModel {
        &self.loaded
    }

    pub const fn options(&self) -> &SessionOptions {
        &self.manner
    }

    /// Its options, for the answers that follow.
    pub const fn options_mut(&mut self) -> &mut SessionOptions {
        &mut self.manner
    }

    /// Limits answers, unless a lower limit exists.
    pub fn limit(&mut self, max_tokens: usize) {
        self.manner.max_tokens = self.manner.max_tokens.min(max_tokens);
    }

    /// Generates an answer with a timeline of all nodes.
    ///
    /// # Errors
    /// As [`generate`](Self::generate); or a node without a timeline.
    pub fn trace<E>(&self, prompt: Vec<u32>) -> Result<(AnswerStats, Timeline), E>
    where
        E: From<RequestFailure> + From<EngineError> + From<NodeError>,
    {
        let clock = UnixClock::now();
        self.loaded.trace();
        let figures = self.generate::<E>(prompt, None, |_| Ok(()));
        let traces = self.loaded.traced();
        let (figures, traces) = (figures?, traces?);
        let first = figures.asked + figures.prefill;
        let times = AnswerTimes {
            asked_unix_ns: clock.unix_ns(figures.asked),
            first_unix_ns: clock.unix_ns(first),
            ended_unix_ns: clock.unix_ns(first + figures.decode),
        };
        let (split, config) = (self.loaded.split(), self.loaded.config());
        let recording = Recording::new(traces, times, split, config);
        Ok((figures, Timeline::new(&recording)))
    }

    /// Whether the session uses a chat template.
    pub const fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// An answer as a JSON object; `name` is the user's name for the model.
    pub fn json(&self, figures: &AnswerStats, name: &str) -> Value {
        let loaded = &self.loaded;
        figures.json(&RunDetails {
            load_time: loaded.load_time,
            peak_memory: peak_memory_bytes(),
            nodes: loaded.nodes(),
            split: loaded.split().to_string(),
            threads: loaded.options().threads,
            weights: loaded.weights(),
            model: name,
            context: loaded.engine().context,
            class: loaded.options().classes.to_string(),
            kv: loaded.options().kv_type(),
            device: loaded.device(),
            seed: self.manner.sampling.seed,
            expert_uses: loaded.expert_uses(),
            guesses: loaded.guesses(),
        })
    }

    /// Tokenises a prompt without a template; names of control tokens are these tokens.
    ///
    /// # Errors
    /// A text that the tokenizer rejects.
    pub fn encode_prompt(&self, prompt: &str) -> Result<Vec<u32>, TokenizerError> {
        self.loaded.tokenizer.encode_prompt(prompt, usize::MAX)
    }

    /// Renders and tokenises a conversation, up to the model's turn.
    ///
    /// # Errors
    /// [`ChatError::NoTemplate`], or the template's error.
    pub fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: unix_now(),
            ..ChatOptions::default()
        };
        template.encode_chat(&self.loaded.tokenizer, messages, &options)
    }

    /// Generates an answer, and shows its text as it becomes certain. Ends early when `is_stopped`,
    /// if given. The session stays usable after an error.
    ///
    /// # Errors
    /// An error of `show`, or an invalid prompt.
    pub fn generate<E: From<RequestFailure> + From<EngineError>>(
        &self,
        prompt: Vec<u32>,
        is_stopped: Option<&dyn Fn() -> bool>,
        show: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<AnswerStats, E> {
        let (n_prompt, max_tokens) = (prompt.len(), self.manner.max_tokens);
        if n_prompt == 0 {
            return Err(EngineError::EmptyPrompt.into());
        }
        let request = GenerationRequest {
            prompt,
            max_tokens,
            sampling: self.manner.sampling.clone(),
            stop: self.manner.stop.clone(),
            logprobs: None,
            adapter: self.manner.adapter.clone(),
            ..GenerationRequest::default()
        };
        let before = self.loaded.moved();
        let (predicted, changes) = (self.loaded.predicted(), self.loaded.changes().len());
        let asked = SubmittedPrompt {
            at: Instant::now(),
            n_prompt,
            max_tokens,
        };
        let answer = self.loaded.submit(request)?;
        let mut figures = collect(&answer, asked, is_stopped, show)?;
        drop(answer);
        let moved = self.loaded.moved().zip(before);
        figures.moved = moved.map(|(after, before)| after.since(before));
        figures.predicted = predicted;
        figures.changes = self.loaded.changes().split_off(changes);
        let speed = figures.decode_tok_s();
        if let Some(measured) = speed.filter(|_| figures.tokens.len() >= LESSON) {
            let keys = n_prompt + figures.tokens.len() / 2;
            self.loaded
                .learn(u32::try_from(keys).unwrap_or(u32::MAX), measured);
        }
        Ok(figures)
    }
}

/// Time for templates that print the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}
