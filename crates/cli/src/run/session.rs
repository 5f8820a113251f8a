//! A loaded model that answers prompts in turn.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_base::Bytes;
use paceline_board::answer::{AnswerStats, RunDetails, SubmittedPrompt, collect};
use paceline_cluster::machine::peak_memory_bytes;
use paceline_engine::SamplingParams;
use paceline_engine::{EngineConfig, Error as EngineError, GenerationRequest, RequestFailure};
use paceline_model::Config;
use paceline_node::context_size::{ContextBudget, positions};
use paceline_node::trace::{AnswerTimes, Recording, Timeline, UnixClock};
use paceline_node::worker_notices::unknown_fields;
use paceline_store::Cancel;
use paceline_text::chat::{ChatMessage, ChatOptions, ChatTemplate, Error as ChatError};
use paceline_text::tokenizer::Error as TokenizerError;
use serde_json::Value;

use super::Args;
use crate::adapter;
use crate::error::failed;
use crate::instance_choice::NodeInstance;
use crate::local_model::{LocalModel, ReadyModel, SplitArgs};
use crate::output::print_err;

/// Minimum tokens of an answer for the speed records: the first few are slower.
const LESSON: usize = 16;

#[derive(Clone, Debug)]
pub(super) struct SessionOptions {
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: usize,
    stop: Vec<String>,
    /// Name of the adapter to use, if any.
    adapter: Option<String>,
}

pub(super) struct RunSession {
    loaded: ReadyModel,
    /// `None` to complete plain text.
    pub(super) template: Option<ChatTemplate>,
    pub(super) options: SessionOptions,
    /// The node's instance, which may be leased until the session ends.
    _instance: Option<NodeInstance>,
}

impl RunSession {
    /// Loads the model at `path` with an optional draft model and adapter, and prints its split.
    /// `stays` keeps the first split.
    pub(super) fn open(
        args: &Args,
        (path, draft, adapter): (&Path, Option<&Path>, Option<&Path>),
        sampling: SamplingParams,
        stays: bool,
    ) -> anyhow::Result<Self> {
        let mut opened = open(args, path, &args.split)?;
        match draft {
            Some(draft) => opened.set_draft(draft)?,
            None if args.memory.is_none() => opened.set_own_draft()?,
            None => {}
        }
        let name = adapter.map(adapter::name_of);
        if let (Some(name), Some(adapter)) = (&name, adapter) {
            opened.add_adapter(name, adapter)?;
        }
        if let Some(memory) = args.memory {
            opened.limit_memory(Bytes(memory))?;
        }
        if args.packed || args.memory.is_some() {
            opened.keep_packed()?;
        }
        opened.forecast();
        if stays {
            opened.stay();
        }
        let loaded = opened.load()?;
        if loaded.nodes() > 1 && !args.json {
            loaded.split_lines().iter().for_each(print_err);
        }
        unknown_fields(loaded.config()).iter().for_each(print_err);
        Self::of(args, path, loaded, (sampling, name), None)
    }

    /// A session on an instance of this machine's node.
    pub(super) fn at(
        args: &Args,
        instance: NodeInstance,
        sampling: SamplingParams,
    ) -> anyhow::Result<Self> {
        let split = SplitArgs {
            nodes: instance.nodes,
            split: instance.split,
            ..SplitArgs::one_node()
        };
        let opened = open(args, &instance.path, &split)?;
        let loaded = opened.with_service(Arc::clone(&instance.service), instance.on.clone())?;
        let path = instance.path.clone();
        Self::of(args, &path, loaded, (sampling, None), Some(instance))
    }

    fn of(
        args: &Args,
        path: &Path,
        mut loaded: ReadyModel,
        (sampling, adapter): (SamplingParams, Option<String>),
        instance: Option<NodeInstance>,
    ) -> anyhow::Result<Self> {
        let template = loaded.template.take().filter(|_| !args.raw).transpose();
        let bad = || format!("{}: cannot use its chat template", path.display());
        Ok(Self {
            template: template.with_context(bad)?,
            options: SessionOptions {
                sampling,
                max_tokens: args.max_tokens.unwrap_or(usize::MAX),
                stop: args.stop.clone(),
                adapter,
            },
            loaded,
            _instance: instance,
        })
    }

    /// Generates an answer with a timeline of all nodes.
    pub(super) fn trace(&self, prompt: Vec<u32>) -> anyhow::Result<(AnswerStats, Timeline)> {
        let clock = UnixClock::now();
        self.loaded.trace();
        let figures = self.generate(prompt, None, |_| Ok(()));
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

    /// An answer as a JSON object; `name` is the user's name for the model.
    pub(super) fn json(&self, figures: &AnswerStats, name: &str) -> Value {
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
            seed: self.options.sampling.seed,
            expert_uses: loaded.expert_uses(),
            guesses: loaded.guesses(),
        })
    }

    /// Tokenises a prompt without a template; names of control tokens are these tokens.
    pub(super) fn encode_prompt(&self, prompt: &str) -> Result<Vec<u32>, TokenizerError> {
        self.loaded.tokenizer.encode_prompt(prompt, usize::MAX)
    }

    /// Renders and tokenises a conversation, up to the model's turn.
    pub(super) fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: unix_now(),
            ..ChatOptions::default()
        };
        template.encode_chat(&self.loaded.tokenizer, messages, &options)
    }

    /// Generates an answer, and shows its text as it becomes certain. Cancelling `chat` ends it
    /// early; `chat` also selects the hint for a prompt that is too long. The session stays usable
    /// after an error.
    pub(super) fn generate(
        &self,
        prompt: Vec<u32>,
        chat: Option<&Cancel>,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<AnswerStats> {
        let is_stopped = chat.map(|chat| move || chat.is_cancelled());
        let is_stopped = is_stopped.as_ref().map(|it| it as &dyn Fn() -> bool);
        let figures = self.answer(prompt, is_stopped, show);
        figures.map_err(|error| self.explain(error, chat.is_some()))
    }

    fn answer(
        &self,
        prompt: Vec<u32>,
        is_stopped: Option<&dyn Fn() -> bool>,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<AnswerStats> {
        let (n_prompt, max_tokens) = (prompt.len(), self.options.max_tokens);
        if n_prompt == 0 {
            return Err(EngineError::EmptyPrompt.into());
        }
        let request = GenerationRequest {
            prompt,
            max_tokens,
            sampling: self.options.sampling.clone(),
            stop: self.options.stop.clone(),
            logprobs: None,
            adapter: self.options.adapter.clone(),
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

    /// Adds the hint for a prompt that is too long.
    fn explain(&self, error: anyhow::Error, in_chat: bool) -> anyhow::Error {
        match error.downcast_ref() {
            Some(RequestFailure::PromptTooLong { tokens, context }) => {
                let shorter = match in_chat {
                    true => "/clear forgets the conversation",
                    false => "shorten the prompt",
                };
                let trained = self.loaded.config().context;
                let hint = if *tokens < trained && *context < trained {
                    format!(
                        "{shorter}, or give room with --context N, up to {trained} for this model"
                    )
                } else {
                    format!("{shorter}: the model was trained for {trained} positions")
                };
                let text =
                    format!("the prompt has {tokens} tokens, but the context holds {context}");
                failed(text, hint).into()
            }
            _ => error,
        }
    }
}

fn open(args: &Args, path: &Path, split: &SplitArgs) -> anyhow::Result<LocalModel> {
    let sizes = |config: &Config| {
        warn_of_context(args.context, config);
        let (form, available) = args.compute.kv_memory(args.engine);
        let memory = (form, args.memory.map(Bytes).or(available));
        let room = ContextBudget::of((path, config), memory, args.context, 1);
        EngineConfig {
            strict: args.engine.strict,
            ..room.engine(&args.model)
        }
    };
    LocalModel::new(path, (args.compute, args.engine), split, sizes)
}

/// Warns about more positions than the model was trained for.
fn warn_of_context(asked: Option<u32>, config: &Config) {
    let trained = config.context;
    let asked = asked.map(|context| positions(context, config));
    if let Some(context) = asked.filter(|context| *context > trained) {
        print_err(format_args!(
            "warning: --context is {context}, but the model was trained for {trained} positions: \
             answers get worse beyond them"
        ));
    }
}

/// Time for templates that print the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}
