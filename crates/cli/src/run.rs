//! `paceline run`: an answer, or a chat.

mod chat;
mod chat_input;
mod lines;
mod sampling;
mod session;

use std::io::{IsTerminal, Read};
use std::path::PathBuf;

use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use paceline_board::answer::AnswerStats;
use paceline_engine::SamplingParams;
use paceline_node::trace::Timeline;
use paceline_store::Cancel;
use paceline_text::chat::ChatMessage;
use serde_json::Value;

use crate::adapter;
use crate::compute::{ComputeArgs, EngineArgs, context};
use crate::error::{Error, PROMPT_BYTES_MAX, failed, misused};
use crate::instance_choice::{self, InstanceRequest};
use crate::interrupt::Signals;
use crate::local_model::{NodeTransport, SplitArgs};
use crate::output::{print, print_err, show};
use crate::{mapreduce, pull};
use sampling::SamplingArgs;
use session::RunSession;

const EXAMPLES: &str = "\
Examples:
  paceline run smollm2                                   chat
  paceline run smollm2 --temperature 0 --json \"Hi\"       reproducible, for programs
  paceline run smollm2 --nodes 2 \"Why is the sky blue?\"  over two nodes, the same answer
Ctrl-C ends at once; in a chat it stops the answer. Exit codes: 0 ok, 1 failed or interrupted, 2 wrong usage.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Alias (`smollm2`), GGUF file, folder of safetensors, or hub id `owner/name[:quantisation]`
    pub(crate) model: String,
    /// What to answer; without it, a chat on a terminal, else what standard input holds
    prompt: Option<String>,
    /// Answer with this adapter of the model: its folder, or its file of weights (PEFT's, MLX's or
    /// GGUF's form)
    #[arg(long, value_name = "FILE")]
    adapter: Option<PathBuf>,
    /// Guesses tokens, which MODEL checks together: a small model of the same vocabulary, or a
    /// draft head (EAGLE-3, DFlash, DSpark, Gemma 4's assistant). The same answer in less time
    /// [default: the prediction layer in MODEL's files, if there is one]
    #[arg(long, visible_alias = "drafter", value_name = "MODEL")]
    draft: Option<String>,
    /// System message before the conversation
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        conflicts_with = "raw"
    )]
    system: Option<String>,
    /// Give the prompt to the model as it is, control tokens included, without its chat template
    #[arg(long)]
    raw: bool,
    /// Most tokens of an answer [default: until the model ends it or the context is full]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<usize>,
    /// Most tokens of conversation and answer [default: what the model was trained for, as
    /// far as memory has room]; max: all of that
    #[arg(long, value_name = "N|max", allow_negative_numbers = true, value_parser = context)]
    context: Option<u32>,
    /// Text that ends the answer and is not shown; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true,
          value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Print one JSON object when the answer is complete
    #[arg(long)]
    pub(crate) json: bool,
    /// Compute in this process instead of this machine's node
    #[arg(long)]
    local: bool,
    /// Keep weights on disk as the processor computes with them, and read them from there at later
    /// starts. They take as much as the model besides
    #[arg(long)]
    packed: bool,
    /// Most memory for the model and its conversations, such as 8G. Weights that do not fit are
    /// read from disk while they are computed with, as with --packed; the answers are the same
    #[arg(long, value_name = "SIZE", value_parser = mapreduce::memory)]
    memory: Option<u64>,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    split: SplitArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Answers the prompt, or chats.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let sampling = args.sampling.params()?;
    let prompt = match &args.prompt {
        Some(prompt) if prompt.trim().is_empty() => return Err(no_prompt().into()),
        Some(prompt) => Some(prompt.clone()),
        None if std::io::stdin().is_terminal() => None,
        None => Some(piped_prompt()?),
    };
    check_chat(args, prompt.as_deref())?;
    args.split.check()?;
    let mut session = begin(args, sampling, signals)?;
    match prompt {
        Some(prompt) => answer(args, &mut session, prompt),
        None => chat::chat(args, session, signals),
    }
}

/// A session on an instance of this machine's node, else in this process.
fn begin(args: &Args, sampling: SamplingParams, signals: &Signals) -> anyhow::Result<RunSession> {
    match instance_choice::instance(&args.wish(), signals)? {
        Some(instance) => RunSession::at(args, instance, sampling),
        None => open(args, sampling, signals, false),
    }
}

/// Loads the model; `stays` keeps the first split.
fn open(
    args: &Args,
    sampling: SamplingParams,
    signals: &Signals,
    stays: bool,
) -> anyhow::Result<RunSession> {
    args.split.check()?;
    let found = pull::ensure(&args.model, signals)?;
    let given = args.adapter.as_deref();
    let classes = (args.engine, args.compute.class);
    let is_beside = adapter::beside(classes, args.split.nodes)?;
    let (path, beside) = match is_beside {
        true => (found.path, given),
        false => (adapter::applied(found.path, given)?, None),
    };
    let draft = args.draft.as_deref();
    let draft = draft
        .map(|draft| pull::ensure(draft, signals))
        .transpose()?;
    let draft = draft.map(|found| found.path);
    RunSession::open(args, (&path, draft.as_deref(), beside), sampling, stays)
}

pub(crate) struct TracedAnswer {
    pub(crate) timeline: Timeline,
    /// The answer with statistics: the object of `run --json`.
    pub(crate) figures: Value,
    pub(crate) line: String,
}

/// The prompt, from the command line or a standard input that is not a terminal.
pub(crate) fn prompt(args: &Args) -> anyhow::Result<String> {
    match &args.prompt {
        Some(prompt) if !prompt.trim().is_empty() => Ok(prompt.clone()),
        None if !std::io::stdin().is_terminal() => piped_prompt(),
        _ => Err(no_prompt().into()),
    }
}

/// Answers the prompt with a timeline of all nodes.
pub(crate) fn traced(
    args: &Args,
    max_tokens: usize,
    signals: &Signals,
) -> anyhow::Result<TracedAnswer> {
    let sampling = args.sampling.params()?;
    let prompt = prompt(args)?;
    let mut session = open(args, sampling, signals, true)?;
    let most = &mut session.options.max_tokens;
    *most = max_tokens.min(*most);
    let tokens = encode(args, &session, prompt)?;
    let (figures, timeline) = session.trace(tokens)?;
    Ok(TracedAnswer {
        timeline,
        figures: session.json(&figures, &args.model),
        line: figures.line(),
    })
}

impl Args {
    /// The model and options that decide whether the node is used.
    fn wish(&self) -> InstanceRequest<'_> {
        InstanceRequest {
            model: &self.model,
            nodes: self.split.nodes,
            split: self.split.split,
            context: self.context,
            class: None,
            never: self.local,
            only_here: self.only_here(),
        }
    }

    /// An option that only this process supports.
    fn only_here(&self) -> Option<&'static str> {
        let compute = &self.compute;
        let given = [
            ("--adapter", self.adapter.is_some()),
            ("--draft", self.draft.is_some()),
            ("--engine", self.engine.engine.is_some()),
            ("--class", compute.class.is_some()),
            ("--kv", compute.kv.is_some()),
            ("--packed", self.packed),
            ("--memory", self.memory.is_some()),
            ("--pin", compute.pin),
            ("--threads", compute.threads.is_some()),
            ("--shares", !self.split.shares.is_empty()),
            ("--transport", self.split.transport != NodeTransport::Any),
        ];
        let first = given.into_iter().find(|(_, is_given)| *is_given);
        first.map(|(option, _)| option)
    }
}

/// Rejects options that need a prompt without one.
fn check_chat(args: &Args, prompt: Option<&str>) -> Result<(), Error> {
    let flag = match prompt {
        None if args.json => "--json",
        None if args.raw => "--raw",
        _ => return Ok(()),
    };
    Err(misused(
        format!("{flag} needs a prompt"),
        "put the prompt after MODEL, or pipe it in",
    ))
}

fn no_prompt() -> Error {
    misused(
        "the prompt is empty",
        "put the prompt after MODEL, pipe it in, or chat from a terminal",
    )
}

/// Reads the prompt from standard input.
fn piped_prompt() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let stdin = std::io::stdin().lock();
    let read = stdin.take(PROMPT_BYTES_MAX + 1).read_to_end(&mut bytes);
    if read.context("cannot read the prompt from standard input")? as u64 > PROMPT_BYTES_MAX {
        let mib = PROMPT_BYTES_MAX >> 20;
        let text = format!("the prompt on standard input is larger than {mib} MiB");
        let hint = "is it the right file? A prompt is text of some pages";
        return Err(failed(text, hint).into());
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[at];
        failed(
            format!("the prompt on standard input is not UTF-8 text, byte {at} is {byte:#04x}"),
            "convert it, for example with `iconv -f latin1 -t utf-8`",
        )
    })?;
    if text.trim().is_empty() {
        return Err(no_prompt().into());
    }
    Ok(text)
}

fn answer(args: &Args, session: &mut RunSession, prompt: String) -> anyhow::Result<()> {
    let tokens = encode(args, session, prompt)?;
    if args.json {
        let figures = session.generate(tokens, None, |_| Ok(()))?;
        return print(&session.json(&figures, &args.model).to_string());
    }
    let figures = shown(session, tokens, None)?;
    end_answer(&figures)
}

/// Generates and shows an answer, in a chat until it is cancelled. An interrupted answer ends its
/// line, so that the error has its own.
fn shown(
    session: &mut RunSession,
    tokens: Vec<u32>,
    chat: Option<&Cancel>,
) -> anyhow::Result<AnswerStats> {
    let mut begun = false;
    let figures = session.generate(tokens, chat, |text| {
        begun = true;
        show(text)
    });
    if figures.is_err() && begun {
        let _ = print(""); // the error before this one is the one to tell
    }
    figures
}

/// Tokenises the prompt, with the chat template if there is one.
fn encode(args: &Args, session: &RunSession, prompt: String) -> anyhow::Result<Vec<u32>> {
    if session.template.is_some() && !args.raw {
        let mut messages = start_of_chat(args);
        messages.push(ChatMessage::new("user", prompt));
        return Ok(session.encode_chat(&messages)?);
    }
    if args.system.is_some() {
        let text = format!(
            "{} has no chat template that --system could go into",
            args.model
        );
        let hint = "leave out --system and put its text into the prompt";
        return Err(failed(text, hint).into());
    }
    Ok(session.encode_prompt(&prompt)?)
}

fn start_of_chat(args: &Args) -> Vec<ChatMessage> {
    let system = args.system.iter();
    system
        .map(|text| ChatMessage::new("system", text))
        .collect()
}

/// Ends the answer's last line and prints the statistics.
fn end_answer(figures: &AnswerStats) -> anyhow::Result<()> {
    print("")?;
    figures
        .changes
        .iter()
        .for_each(|change| print_err(change.line()));
    print_err(figures.line());
    Ok(())
}
