//! A loaded model that answers one prompt after the other.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_board::answer::{About, Asked, Figures, collect};
use paceline_cluster::machine;
use paceline_engine::{Failure, Request, SamplingParams};
use paceline_formats::chat::{ChatOptions, ChatTemplate, Error as ChatError, Message};
use paceline_formats::tokenizer::Specials;
use paceline_model::Config;
use paceline_node::room::Room;
use paceline_node::trace::{Clock, Recording, Timeline, Times};
use paceline_store::Cancel;

use super::Args;
use crate::adapter;
use crate::error::Error;
use crate::loaded::{Loaded, Opened, SplitArgs};
use crate::output::{printable, show, tell};
use crate::process::peak_memory_bytes;
use crate::shared::Instance;

/// Tokens of an answer that can teach how fast this machine is: the first few are slower.
const LESSON: usize = 16;

/// One model, ready to answer.
pub(super) struct Session {
    loaded: Loaded,
    template: Option<ChatTemplate>,
    sampling: SamplingParams,
    max_tokens: usize,
    stop: Vec<String>,
    /// Name of the adapter that answers, if one does.
    adapter: Option<String>,
}

impl Session {
    /// Loads the model at `path`, for which the one at `draft` guesses and beside which `adapter`
    /// is, and tells how it is split.
    /// `stays` keeps the split that was chosen first, whatever comes of it.
    pub(super) fn open(
        args: &Args,
        (path, draft, adapter): (&Path, Option<&Path>, Option<&Path>),
        sampling: SamplingParams,
        stays: bool,
    ) -> anyhow::Result<Self> {
        let mut opened = open(args, path, &args.split)?;
        draft.map_or(Ok(()), |draft| opened.guess_with(draft))?;
        let name = adapter.map(adapter::name_of);
        if let (Some(name), Some(adapter)) = (&name, adapter) {
            opened.adapt(name, adapter)?;
        }
        opened.forecast();
        if stays {
            opened.prepared_mut().stay();
        }
        let loaded = opened.load()?;
        if loaded.nodes() > 1 && !args.json {
            loaded.tell_split();
        }
        let adapter = name;
        let session = Self::of(args, path, loaded, sampling)?;
        Ok(Self { adapter, ..session })
    }

    /// Answers by an instance of this machine's node.
    pub(super) fn at(
        args: &Args,
        instance: &Instance,
        sampling: SamplingParams,
    ) -> anyhow::Result<Self> {
        let split = SplitArgs {
            nodes: instance.nodes,
            split: instance.split,
            ..SplitArgs::one_node()
        };
        let opened = open(args, &instance.path, &split)?;
        let loaded = opened.elsewhere(Arc::clone(&instance.service), instance.on.clone());
        Self::of(args, &instance.path, loaded, sampling)
    }

    fn of(
        args: &Args,
        path: &Path,
        mut loaded: Loaded,
        sampling: SamplingParams,
    ) -> anyhow::Result<Self> {
        let template = loaded.template.take().filter(|_| !args.raw).transpose();
        let bad = || format!("{}: cannot use its chat template", path.display());
        let template = template.with_context(bad)?;
        Ok(Self {
            loaded,
            template,
            sampling,
            max_tokens: args.max_tokens.unwrap_or(usize::MAX),
            stop: args.stop.clone(),
            adapter: None,
        })
    }

    /// Bounds answers from now on, where the command line does not.
    pub(super) fn limit(&mut self, max_tokens: usize) {
        self.max_tokens = self.max_tokens.min(max_tokens);
    }

    /// Generates an answer, and records what every node does meanwhile.
    ///
    /// # Errors
    /// As [`generate`](Self::generate); a node that does not tell.
    pub(super) fn trace(&self, prompt: Vec<u32>) -> anyhow::Result<(Figures, Timeline)> {
        let clock = Clock::now();
        self.loaded.trace();
        let figures = self.generate(prompt, None, |_| Ok(()));
        let traces = self.loaded.traced();
        let (figures, traces) = (figures?, traces?);
        let first = figures.asked + figures.prefill;
        let times = Times {
            asked_unix_ns: clock.unix_ns(figures.asked),
            first_unix_ns: clock.unix_ns(first),
            ended_unix_ns: clock.unix_ns(first + figures.decode),
        };
        let (split, config) = (self.loaded.split(), self.loaded.config());
        let recording = Recording::new(traces, times, split, config);
        Ok((figures, Timeline::new(&recording)))
    }

    /// Whether the model was made for chats, and may use what it has for them.
    pub(super) const fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The object of `--json` of an answer; `name` is that of the command line.
    pub(super) fn json(&self, figures: &Figures, name: &str) -> serde_json::Value {
        let loaded = &self.loaded;
        figures.json(&About {
            load_time: loaded.load_time,
            peak_memory: peak_memory_bytes(),
            nodes: loaded.nodes(),
            split: loaded.split().to_string(),
            threads: loaded.threads,
            weights: loaded.weights(),
            model: name,
            context: loaded.engine.context,
            class: loaded.classes.to_string(),
            kv: loaded.kv,
            device: loaded.device(),
            seed: self.sampling.seed,
            expert_uses: loaded.expert_uses(),
            guesses: loaded.guesses(),
        })
    }

    /// Tokens of a plain text.
    pub(super) fn encode_text(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.loaded.tokenizer.encode(text, Specials::AsText, true)?)
    }

    /// Tokens of a conversation up to where the model is to answer.
    pub(super) fn encode_chat(&self, messages: &[Message]) -> anyhow::Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: unix_now(),
            ..ChatOptions::default()
        };
        Ok(template.encode_chat(&self.loaded.tokenizer, messages, &options)?)
    }

    /// Generates an answer, showing its text as it becomes certain. In a chat it ends early when
    /// `chat` is cancelled; `chat` also chooses the advice for a prompt that is too long.
    ///
    /// # Errors
    /// What `show` says, and prompts that cannot be answered. Another prompt can be answered
    /// after it.
    pub(super) fn generate(
        &self,
        prompt: Vec<u32>,
        chat: Option<&Cancel>,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figures> {
        let n_prompt = prompt.len();
        if n_prompt == 0 {
            return Err(paceline_engine::Error::EmptyPrompt.into());
        }
        let request = Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling: self.sampling.clone(),
            stop: self.stop.clone(),
            logprobs: None,
            adapter: self.adapter.clone(),
            ..Request::default()
        };
        let before = self.loaded.moved();
        let (predicted, changes) = (self.loaded.predicted(), self.loaded.changes().len());
        let start = Instant::now();
        let answer = self.loaded.submit(request);
        let figures = answer.map_err(anyhow::Error::new).and_then(|answer| {
            let asked = Asked {
                at: start,
                n_prompt,
                max_tokens: self.max_tokens,
            };
            let is_stopped = chat.map(|chat| move || chat.is_cancelled());
            let is_stopped = is_stopped.as_ref().map(|it| it as &dyn Fn() -> bool);
            collect(&answer, asked, is_stopped, show)
        });
        let mut figures = figures.map_err(|error| self.explain(error, chat.is_some()))?;
        let moved = self.loaded.moved().zip(before);
        figures.moved = moved.map(|(after, before)| after.since(before));
        figures.predicted = predicted;
        figures.changes = self.loaded.changes().split_off(changes);
        let speed = figures.decode_tok_s();
        if let Some(measured) = speed.filter(|_| figures.tokens.len() >= LESSON) {
            self.loaded.learn(measured);
        }
        Ok(figures)
    }

    /// A prompt that is too long gets advice that fits.
    fn explain(&self, error: anyhow::Error, in_chat: bool) -> anyhow::Error {
        match error.downcast_ref() {
            Some(Failure::PromptTooLong { tokens, context }) => Error::PromptTooLong {
                tokens: *tokens,
                context: *context,
                trained: self.loaded.config().context,
                in_chat,
            }
            .into(),
            _ => error,
        }
    }
}

/// Opens the model at `path`, cut as `split` says.
fn open(args: &Args, path: &Path, split: &SplitArgs) -> anyhow::Result<Opened> {
    let sizes = |config: &Config| {
        warn_of_context(args.context, config);
        let kv = args.compute.in_memory(args.engine);
        let memory = (kv, machine::available());
        Room::of((path, config), memory, args.context, 1).engine(&args.model)
    };
    Opened::new(path, (args.compute, args.engine), split, sizes)
}

/// Shows a piece of the answer at once.
pub(super) fn show_answer(text: &str) -> anyhow::Result<()> {
    if std::io::stdout().is_terminal() {
        show(&printable(text))
    } else {
        show(text)
    }
}

/// More positions than the model was trained for are warned about.
fn warn_of_context(asked: Option<u32>, config: &Config) {
    let trained = config.context;
    if let Some(context) = asked.filter(|context| *context as usize > trained) {
        tell(format_args!(
            "warning: --context is {context}, but the model was trained for {trained} positions: \
             answers get worse beyond them"
        ));
    }
}

/// For templates that write the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}
