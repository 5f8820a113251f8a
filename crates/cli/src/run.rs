//! `paceline run`: an answer, or a chat.

mod figures;
mod session;

use std::io::{BufRead, IsTerminal, Read, Write};

use anyhow::{Context, bail};
use paceline_engine::SamplingParams;
use paceline_formats::chat::Message;

use crate::home::Settings;
use crate::interrupt::{cancel_on_signals, end_on_signals};
use crate::load::ComputeArgs;
use crate::{print, pull};
use figures::Figures;
use session::Session;

/// Arguments of `paceline run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    model: String,
    /// What to answer; without it, a chat (or one answer to what standard input holds)
    prompt: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Give the prompt to the model as it is, without its chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Most tokens of an answer [default: until the model ends it or the context is full]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Positions to reserve memory for [default: what the model was trained for, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object when the answer is complete
    #[arg(long)]
    json: bool,
}

/// How tokens are chosen; defaults suit small chat models.
#[derive(Clone, Copy, Debug, clap::Args)]
struct SamplingArgs {
    /// 0 takes the most probable token always
    #[arg(long, value_name = "F", default_value_t = 0.7)]
    temperature: f32,
    /// Keep the N most probable tokens; 0 keeps all
    #[arg(long, value_name = "N", default_value_t = 40)]
    top_k: usize,
    /// Keep the most probable tokens up to this probability together
    #[arg(long, value_name = "F", default_value_t = 0.95)]
    top_p: f32,
    /// Keep tokens at least this probable, as a share of the most probable
    #[arg(long, value_name = "F", default_value_t = 0.05)]
    min_p: f32,
    /// Make tokens of the last 64 less probable; 1 does nothing
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer has
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    presence_penalty: f32,
    /// Subtracted once per occurrence in the answer
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    frequency_penalty: f32,
    /// Start of the random numbers; the same seed gives the same answer [default: another each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    fn params(self) -> anyhow::Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.unwrap_or_else(arbitrary_seed),
            ..SamplingParams::default()
        };
        params.check()?;
        Ok(params)
    }
}

/// A seed from the clock: different each time is all that is wanted. Kept below 2^53 so that every
/// JSON reader keeps it whole.
fn arbitrary_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64 & ((1 << 53) - 1))
}

/// Answers the prompt, or chats.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let sampling = args.sampling.params()?;
    let prompt = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None => piped_prompt()?,
    };
    if args.json && prompt.is_none() {
        bail!("--json needs a prompt");
    }
    let settings = Settings::from_env()?;
    let cancel = cancel_on_signals()?;
    let found = pull::ensure(&args.model, &settings, &cancel)?;
    end_on_signals(&cancel);
    let mut session = Session::open(args, &found.path, sampling)?;
    match prompt {
        Some(prompt) => answer(args, &mut session, prompt),
        None => chat(args, &mut session),
    }
}

/// Standard input as the prompt, when it is not a terminal.
fn piped_prompt() -> anyhow::Result<Option<String>> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Ok(None);
    }
    // Far above any context; a larger input is a mistake, such as a file of another kind.
    const LIMIT: u64 = 16 << 20;
    let mut text = String::new();
    let read = stdin.lock().take(LIMIT + 1).read_to_string(&mut text);
    if read.context("cannot read the prompt from standard input")? as u64 > LIMIT {
        bail!("the prompt on standard input is larger than 16 MiB");
    }
    if text.trim().is_empty() {
        bail!("no prompt: none was given and standard input is empty");
    }
    Ok(Some(text))
}

fn answer(args: &Args, session: &mut Session, prompt: String) -> anyhow::Result<()> {
    let tokens = if args.raw || !session.has_template() {
        session.encode_text(&prompt)?
    } else {
        session.encode_chat(&first_messages(args, prompt))?
    };
    if args.json {
        let figures = session.generate(tokens, |_| Ok(()))?;
        return print(&figures.json(args, session).to_string());
    }
    let figures = session.generate(tokens, show)?;
    finish_line(&figures)
}

fn first_messages(args: &Args, prompt: String) -> Vec<Message> {
    let mut messages = start_of_chat(args);
    messages.push(Message::new("user", prompt));
    messages
}

fn start_of_chat(args: &Args) -> Vec<Message> {
    args.system
        .iter()
        .map(|text| Message::new("system", text.clone()))
        .collect()
}

/// Reads lines and answers them until the input ends.
fn chat(args: &Args, session: &mut Session) -> anyhow::Result<()> {
    if !session.has_template() {
        bail!(
            "{} has no chat template: give it a text to continue as prompt",
            args.model
        );
    }
    eprintln!(
        "Chat with {}. /clear forgets the conversation, /exit or Ctrl-D ends.",
        args.model
    );
    let mut messages = start_of_chat(args);
    while let Some(line) = read_line()? {
        match line.trim() {
            "" => continue,
            "/exit" | "/bye" => break,
            "/clear" => {
                messages = start_of_chat(args);
                continue;
            }
            text => messages.push(Message::new("user", text.to_owned())),
        }
        let outcome = session
            .encode_chat(&messages)
            .and_then(|t| session.generate(t, show));
        match outcome {
            Ok(figures) => {
                messages.push(Message::new("assistant", figures.text.clone()));
                finish_line(&figures)?;
            }
            Err(error) => {
                // The conversation stays as it was, so that another question can be asked.
                messages.pop();
                crate::hint::report(&error);
            }
        }
    }
    Ok(())
}

fn read_line() -> anyhow::Result<Option<String>> {
    eprint!("> ");
    let mut line = String::new();
    let n = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("cannot read your input")?;
    if n == 0 {
        eprintln!();
    }
    Ok((n > 0).then_some(line))
}

/// Shows a piece of the answer at once.
fn show(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot print the answer")
}

fn finish_line(figures: &Figures) -> anyhow::Result<()> {
    print("")?;
    eprintln!("{}", figures.line());
    Ok(())
}
