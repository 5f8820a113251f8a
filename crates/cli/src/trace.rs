//! `paceline trace`: the timeline of an answer, node by node.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use paceline_node::fleet::TraceRequest;
use paceline_node::trace::{Recording, Timeline};
use serde_json::{Value, json};

use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::{member, run};

/// Default tokens of an answer: some seconds, and a file that browsers open quickly.
const TOKENS: usize = 64;

/// Timeout of a loaded model's answer: its owner's plus a margin.
const LIMIT: Duration = Duration::from_secs(300);

const EXAMPLES: &str = "\
Examples:
  paceline trace smollm2 \"Why is the sky blue?\" --nodes 2
  paceline trace smollm2 \"Hi\" --nodes 4 --split 2x2 --out trace.json   for https://ui.perfetto.dev
  paceline trace smollm2 \"Hi\" --loaded                    what `paceline load` has loaded

Every moment of the answer is in one column of each row:
  compute   the node's share of the model        exchange  values move between nodes
  wait      another node is not there yet        choose    the leader chooses tokens
  plan      the leader decides steps, replies    way       between this command and the leader
  rest      what was not recorded";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
#[group(skip)] // `run` has a group of this name
pub(crate) struct Args {
    #[command(flatten)]
    run: run::Args,
    /// Trace the model that the machines of the cluster have loaded, its answer greedy
    #[arg(long, conflicts_with_all = ["nodes", "split", "shares", "adapter", "system", "raw"])]
    loaded: bool,
    /// Also write the timeline for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Answers the prompt and prints the timeline.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let max_tokens = args.run.max_tokens.unwrap_or(TOKENS);
    let (timeline, answer, line) = if args.loaded {
        let prompt = run::prompt(&args.run)?;
        (
            loaded(&args.run.model, prompt, max_tokens)?,
            Value::Null,
            None,
        )
    } else {
        let traced = run::traced(&args.run, max_tokens, signals)?;
        (traced.timeline, traced.figures, Some(traced.line))
    };
    if let Some(path) = &args.out {
        let written = std::fs::write(path, timeline.json().to_string());
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    if args.run.json {
        let told = json!({ "trace": timeline.summary(), "answer": answer });
        return print(&told.to_string());
    }
    line.iter().for_each(print_err);
    print(&timeline.text())
}

/// Traces an answer of a loaded model through this machine's node.
fn loaded(model: &str, prompt: String, max_tokens: usize) -> anyhow::Result<Timeline> {
    let ask = TraceRequest {
        model: model.to_owned(),
        prompt,
        max_tokens,
    };
    let told = member::ask_within("trace", json!(ask), LIMIT)?;
    let recording: Recording = serde_json::from_value(told).context("no recording")?;
    ensure!(
        (recording.leader as usize) < recording.ranks.len(),
        "a recording of {} ranks, of which {} leads",
        recording.ranks.len(),
        recording.leader
    );
    Ok(Timeline::new(&recording))
}
