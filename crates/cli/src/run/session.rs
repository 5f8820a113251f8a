//! A loaded model that answers one prompt after the other.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use paceline_engine::{Engine, EngineConfig, Event, Finish, Request, SamplingParams};
use paceline_formats::chat::{ChatOptions, ChatTemplate, Message};
use paceline_formats::tokenizer::{Specials, Tokenizer};
use paceline_model::Source;

use super::Args;
use super::figures::Figures;
use crate::load;

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
}

impl Session {
    /// Loads the model at `path`.
    pub(super) fn open(args: &Args, path: &Path, sampling: SamplingParams) -> anyhow::Result<Self> {
        let kernels = load::kernels(args.compute)?;
        let (source, model) = load::model(path, args.compute.class, kernels)?;
        let bad = |what| format!("{}: cannot use its {what}", path.display());
        let tokenizer = Arc::new(tokenizer(&source).with_context(|| bad("tokenizer"))?);
        let template = template(&source).with_context(|| bad("chat template"))?;
        let context = args.context.map_or_else(
            || model.config().context.min(DEFAULT_CONTEXT),
            |positions| positions as usize,
        );
        let config = EngineConfig::single(args.model.clone(), context);
        let engine = Engine::new(Arc::new(model), Arc::clone(&tokenizer), config)?;
        Ok(Self {
            engine,
            tokenizer,
            template,
            sampling,
            max_tokens: args.max_tokens.unwrap_or(usize::MAX),
            stop: args.stop.clone(),
        })
    }

    /// Whether the model was made for chats.
    pub(super) const fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Threads in use.
    pub(super) fn threads(&self) -> usize {
        self.engine.model().kernels().pool().threads()
    }

    /// The engine's model, for figures.
    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The seed of the next answer.
    pub(super) const fn seed(&self) -> u64 {
        self.sampling.seed
    }

    /// Tokens of a plain text.
    pub(super) fn encode_text(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, Specials::AsText, true)?)
    }

    /// Tokens of a conversation up to where the model is to answer.
    pub(super) fn encode_chat(&self, messages: &[Message]) -> anyhow::Result<Vec<u32>> {
        let template = self
            .template
            .as_ref()
            .context("the model has no chat template")?;
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: unix_now(),
            ..ChatOptions::default()
        };
        Ok(template.encode_chat(&self.tokenizer, messages, &options)?)
    }

    /// Generates an answer, showing its text as it becomes certain.
    pub(super) fn generate(
        &mut self,
        prompt: Vec<u32>,
        show: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<Figures> {
        let n_prompt = prompt.len();
        let request = Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling: self.sampling,
            stop: self.stop.clone(),
        };
        let id = self.engine.submit(request)?;
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
        let mut figures = Figures {
            n_prompt,
            ..Figures::default()
        };
        let mut first = None;
        while !self.engine.is_idle() {
            for event in self.engine.step() {
                let text = match event {
                    Event::PromptRead { .. } => continue,
                    Event::Token { token, text, .. } => {
                        first.get_or_insert_with(Instant::now);
                        figures.tokens.push(token);
                        text
                    }
                    Event::Finished { text, reason, .. } => {
                        figures.finish = Some(reason);
                        text
                    }
                };
                if !text.is_empty() {
                    show(&text)?;
                    figures.text.push_str(&text);
                }
            }
        }
        let first = first.unwrap_or_else(Instant::now);
        figures.ttft = first - start;
        figures.decode = first.elapsed();
        Ok(figures)
    }
}

fn tokenizer(source: &Source) -> anyhow::Result<Tokenizer> {
    Ok(match source {
        Source::Gguf(file) => Tokenizer::from_gguf(file.metadata())?,
        Source::Hf(folder) => Tokenizer::from_hf_dir(folder.path())?,
    })
}

fn template(source: &Source) -> anyhow::Result<Option<ChatTemplate>> {
    let text = match source {
        Source::Gguf(file) => file.metadata().opt_str("tokenizer.chat_template")?,
        Source::Hf(folder) => folder.chat_template(),
    };
    Ok(text.map(ChatTemplate::new).transpose()?)
}

/// For templates that write the date.
fn unix_now() -> Option<i64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_secs()).ok()
}

/// How the answer ended, in the words of the OpenAI API.
pub(super) const fn finish_word(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::EndOfText | Finish::Stop(_)) => "stop",
        Some(Finish::Length) | None => "length",
    }
}

/// Events per second, 0 for none.
pub(super) fn rate(events: usize, time: Duration) -> f64 {
    if events == 0 {
        0.0
    } else {
        events as f64 / time.as_secs_f64().max(1e-9)
    }
}
