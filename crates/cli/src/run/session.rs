//! A loaded model that answers one prompt after the other.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_engine::{EngineConfig, Failure, Reply, Request, SamplingParams};
use paceline_formats::chat::{ChatOptions, ChatTemplate, Error as ChatError, Message};
use paceline_formats::tokenizer::Specials;
use paceline_model::Config;

use super::Args;
use super::figures::{End, Figures};
use crate::error::Error;
use crate::loaded::{Answer, Loaded, Opened};
use crate::output::{printable, show, tell};

/// Positions reserved unless asked for more: key/value memory of an 8B model at this context is
/// 1 GiB.
const DEFAULT_CONTEXT: usize = 8192;

/// Tokens of an answer that can teach how fast this machine is: the first few are slower.
const LESSON: usize = 16;

/// One model, ready to answer.
pub(super) struct Session {
    loaded: Loaded,
    template: Option<ChatTemplate>,
    sampling: SamplingParams,
    max_tokens: usize,
    stop: Vec<String>,
}

impl Session {
    /// Loads the model at `path`, and tells how it is split.
    pub(super) fn open(args: &Args, path: &Path, sampling: SamplingParams) -> anyhow::Result<Self> {
        let sizes = |config: &Config| {
            EngineConfig::single(args.model.clone(), context(args.context, config))
        };
        let mut opened = Opened::new(path, (args.compute, args.engine), &args.split, sizes)?;
        opened.forecast();
        let mut loaded = opened.load()?;
        let template = loaded.template.take().filter(|_| !args.raw).transpose();
        let bad = || format!("{}: cannot use its chat template", path.display());
        let template = template.with_context(bad)?;
        if loaded.nodes() > 1 && !args.json {
            loaded.tell_split();
        }
        Ok(Self {
            loaded,
            template,
            sampling,
            max_tokens: args.max_tokens.unwrap_or(usize::MAX),
            stop: args.stop.clone(),
        })
    }

    /// Whether the model was made for chats, and may use what it has for them.
    pub(super) const fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The model, for figures.
    pub(super) const fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// The seed of every answer.
    pub(super) const fn seed(&self) -> u64 {
        self.sampling.seed
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

    /// Generates an answer, showing its text as it becomes certain. `in_chat` chooses the advice
    /// for a prompt that is too long.
    ///
    /// # Errors
    /// What `show` says, and prompts that cannot be answered. Another prompt can be answered
    /// after it.
    pub(super) fn generate(
        &self,
        prompt: Vec<u32>,
        in_chat: bool,
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
        };
        let before = self.loaded.moved();
        let (predicted, changes) = (self.loaded.predicted(), self.loaded.changes().len());
        let start = Instant::now();
        let answer = self.loaded.submit(request);
        let figures = answer
            .map_err(anyhow::Error::new)
            .and_then(|answer| self.collect(&answer, start, n_prompt, show));
        let mut figures = figures.map_err(|error| self.explain(error, in_chat))?;
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
                trained: self.loaded.config.context,
                in_chat,
            }
            .into(),
            _ => error,
        }
    }

    fn collect(
        &self,
        answer: &Answer<'_>,
        start: Instant,
        n_prompt: usize,
        mut show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figures> {
        let (mut prefill, mut first) = (Duration::ZERO, start);
        let (mut text, mut tokens, mut n_reused) = (String::new(), Vec::new(), 0);
        let (end, last) = loop {
            let (at, reply) = answer.next()?;
            let (piece, end) = match reply {
                Reply::PromptRead { reused } => {
                    (prefill, first) = (at - start, at);
                    n_reused = reused;
                    continue;
                }
                Reply::Token { token, text, .. } => {
                    tokens.push(token);
                    (text, None)
                }
                Reply::Finished { text, reason } => {
                    let end = End::new(reason, tokens.len(), self.max_tokens);
                    (text, Some(end))
                }
                Reply::Failed(failure) => return Err(failure.into()),
            };
            if !piece.is_empty() {
                show(&piece)?;
                text.push_str(&piece);
            }
            if let Some(end) = end {
                break (end, at);
            }
        };
        Ok(Figures {
            text,
            tokens,
            n_prompt,
            n_reused,
            end,
            prefill,
            decode: last - first,
            moved: None,
            predicted: None,
            changes: Vec::new(),
        })
    }
}

/// Shows a piece of the answer at once.
pub(super) fn show_answer(text: &str) -> anyhow::Result<()> {
    if std::io::stdout().is_terminal() {
        show(&printable(text))
    } else {
        show(text)
    }
}

/// Positions to reserve; more than the model was trained for are warned about.
fn context(asked: Option<u32>, config: &Config) -> usize {
    let trained = config.context;
    let Some(context) = asked else {
        // Two are the least: one for the prompt and one for the answer.
        return trained.clamp(2, DEFAULT_CONTEXT);
    };
    if context as usize > trained {
        tell(format_args!(
            "warning: --context is {context}, but the model was trained for {trained} positions: \
             answers get worse beyond them"
        ));
    }
    context as usize
}

/// For templates that write the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}
