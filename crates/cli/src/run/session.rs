//! A loaded model that answers prompts in turn, by [`paceline_board::session`].

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use paceline_base::Bytes;
use paceline_board::answer::AnswerStats;
use paceline_board::session::{self, SessionOptions};
use paceline_engine::{EngineConfig, RequestFailure, SamplingParams};
use paceline_model::Config;
use paceline_node::context_size::{ContextBudget, positions};
use paceline_node::trace::Timeline;
use paceline_store::Cancel;

use super::Args;
use crate::adapter;
use crate::error::Error;
use crate::instance_choice::NodeInstance;
use crate::local_model::{LocalModel, ReadyModel, SplitArgs};
use crate::output::print_err;

/// A session with one model.
pub(super) struct RunSession {
    session: session::ModelSession,
    /// The node's instance, which may be leased until the session ends.
    _instance: Option<NodeInstance>,
}

impl Deref for RunSession {
    type Target = session::ModelSession;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for RunSession {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
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
        loaded: ReadyModel,
        (sampling, adapter): (SamplingParams, Option<String>),
        instance: Option<NodeInstance>,
    ) -> anyhow::Result<Self> {
        let manner = SessionOptions {
            sampling,
            max_tokens: args.max_tokens.unwrap_or(usize::MAX),
            stop: args.stop.clone(),
            adapter,
            raw: args.raw,
        };
        let bad = || format!("{}: cannot use its chat template", path.display());
        let session = session::ModelSession::new(loaded, manner).with_context(bad)?;
        Ok(Self {
            session,
            _instance: instance,
        })
    }

    /// Generates an answer with a timeline of all nodes.
    pub(super) fn trace(&self, prompt: Vec<u32>) -> anyhow::Result<(AnswerStats, Timeline)> {
        let traced = self.session.trace(prompt);
        traced.map_err(|error| self.explain(error, false))
    }

    /// Generates an answer, and shows its text as it becomes certain. Cancelling `chat` ends it
    /// early; `chat` also selects the hint for a prompt that is too long.
    pub(super) fn generate(
        &self,
        prompt: Vec<u32>,
        chat: Option<&Cancel>,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<AnswerStats> {
        let is_stopped = chat.map(|chat| move || chat.is_cancelled());
        let is_stopped = is_stopped.as_ref().map(|it| it as &dyn Fn() -> bool);
        let figures = self.session.generate(prompt, is_stopped, show);
        figures.map_err(|error| self.explain(error, chat.is_some()))
    }

    /// Adds the hint for a prompt that is too long.
    fn explain(&self, error: anyhow::Error, in_chat: bool) -> anyhow::Error {
        match error.downcast_ref() {
            Some(RequestFailure::PromptTooLong { tokens, context }) => Error::PromptTooLong {
                tokens: *tokens,
                context: *context,
                trained: self.loaded().config().context,
                in_chat,
            }
            .into(),
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
