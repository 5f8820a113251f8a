//! A loaded model that answers one prompt after the other.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_engine::{Engine, EngineConfig, Error as EngineError, Event, Request, SamplingParams};
use paceline_formats::chat::{ChatOptions, ChatTemplate, Error as ChatError, Message};
use paceline_formats::tokenizer::{Specials, Tokenizer};
use paceline_model::{Model, Source};

use super::Args;
use super::figures::{End, Figures};
use crate::error::Error;
use crate::load;
use crate::output::{printable, show, tell};

/// Positions reserved unless asked for more: key/value memory of an 8B model at this context is
/// 1 GiB.
const DEFAULT_CONTEXT: usize = 8192;

/// One model, ready to answer.
pub(super) struct Session {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    sampling: SamplingParams,
    max_tokens: usize,
    stop: Vec<String>,
    load_time: Duration,
}

impl Session {
    /// Loads the model at `path`.
    pub(super) fn open(args: &Args, path: &Path, sampling: SamplingParams) -> anyhow::Result<Self> {
        let start = Instant::now();
        let kernels = load::kernels(args.compute)?;
        let (source, model) = load::model(path, args.compute.class, kernels)?;
        let bad = |what| format!("{}: cannot use its {what}", path.display());
        let tokenizer = Arc::new(tokenizer(&source).with_context(|| bad("tokenizer"))?);
        // What is wrong with a template matters only to those who use it.
        let template = if args.raw { None } else { template(&source) };
        let template = template.transpose().with_context(|| bad("chat template"))?;
        let context = context(args.context, &model);
        let config = EngineConfig::single(args.model.clone(), context);
        let engine = Engine::new(Arc::new(model), Arc::clone(&tokenizer), config)?;
        Ok(Self {
            engine,
            tokenizer,
            template,
            sampling,
            max_tokens: args.max_tokens.unwrap_or(usize::MAX),
            stop: args.stop.clone(),
            load_time: start.elapsed(),
        })
    }

    /// Whether the model was made for chats, and may use what it has for them.
    pub(super) const fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Threads in use.
    pub(super) fn threads(&self) -> usize {
        self.engine.model().kernels().pool().threads()
    }

    /// From opening the model's files to being ready for a prompt.
    pub(super) const fn load_time(&self) -> Duration {
        self.load_time
    }

    /// The engine, for figures.
    pub(super) const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The seed of every answer.
    pub(super) const fn seed(&self) -> u64 {
        self.sampling.seed
    }

    /// Tokens of a plain text.
    pub(super) fn encode_text(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, Specials::AsText, true)?)
    }

    /// Tokens of a conversation up to where the model is to answer.
    pub(super) fn encode_chat(&self, messages: &[Message]) -> anyhow::Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: unix_now(),
            ..ChatOptions::default()
        };
        Ok(template.encode_chat(&self.tokenizer, messages, &options)?)
    }

    /// Generates an answer, showing its text as it becomes certain. `in_chat` chooses the advice
    /// for a prompt that is too long.
    ///
    /// # Errors
    /// What `show` says, and prompts that cannot be answered. Another prompt can be answered
    /// after it.
    pub(super) fn generate(
        &mut self,
        prompt: Vec<u32>,
        in_chat: bool,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figures> {
        let n_prompt = prompt.len();
        let request = Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling: self.sampling.clone(),
            stop: self.stop.clone(),
            logprobs: None,
        };
        let id = match self.engine.submit(request) {
            Err(EngineError::PromptTooLong { tokens, context }) => {
                let trained = self.engine.model().config().context;
                return Err(Error::PromptTooLong {
                    tokens,
                    context,
                    trained,
                    in_chat,
                }
                .into());
            }
            other => other?,
        };
        let outcome = self.collect(n_prompt, show);
        if outcome.is_err() {
            // Nothing to cancel when the sequence has just finished.
            let _ = self.engine.cancel(id);
        }
        outcome
    }

    fn collect(
        &mut self,
        n_prompt: usize,
        mut show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figures> {
        let start = Instant::now();
        let (mut prefill, mut first, mut last) = (Duration::ZERO, start, start);
        let (mut text, mut tokens, mut end) = (String::new(), Vec::new(), End::Stop);
        while !self.engine.is_idle() {
            let events = self.engine.step()?;
            last = Instant::now();
            for event in events {
                let piece = match event {
                    Event::PromptRead { .. } => {
                        (prefill, first) = (last - start, last);
                        continue;
                    }
                    Event::Token { token, text, .. } => {
                        tokens.push(token);
                        text
                    }
                    Event::Finished { text, reason, .. } => {
                        end = End::new(reason, tokens.len(), self.max_tokens);
                        text
                    }
                };
                if !piece.is_empty() {
                    show(&piece)?;
                    text.push_str(&piece);
                }
            }
        }
        Ok(Figures {
            text,
            tokens,
            n_prompt,
            end,
            prefill,
            decode: last - first,
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
fn context(asked: Option<u32>, model: &Model) -> usize {
    let trained = model.config().context;
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

fn tokenizer(source: &Source) -> anyhow::Result<Tokenizer> {
    Ok(match source {
        Source::Gguf(file) => Tokenizer::from_gguf(file.metadata())?,
        Source::Hf(folder) => Tokenizer::from_hf_dir(folder.path())?,
    })
}

fn template(source: &Source) -> Option<Result<ChatTemplate, ChatError>> {
    let template = match source {
        Source::Gguf(file) => ChatTemplate::from_gguf(file.metadata()),
        Source::Hf(folder) => ChatTemplate::from_hf_dir(folder.path()),
    };
    (!matches!(template, Err(ChatError::NoTemplate))).then_some(template)
}

/// For templates that write the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}
