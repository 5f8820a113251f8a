//! `paceline chaos`: a local cluster with injected faults while it answers.

use std::sync::Arc;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use paceline_chaos::{Chaos, Fault, ProgramPaths, ProgressSink, RoundSettings};
use paceline_model::SplitKind;

use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::process::own_program;
use crate::pull;

const EXAMPLES: &str = "\
Examples:
  paceline chaos smollm2
  paceline chaos smollm2 --nodes 4 --rounds 40 --seed 7
  paceline chaos ./model.gguf --faults kill-node,freeze-node --json
  paceline chaos smollm2 --long --from 40 --rounds 20   a part of the long run
  sudo paceline chaos smollm2 --namespaces --faults cut-node,fill-disk,out-of-memory";

/// Default rounds.
const ROUNDS: u32 = 8;

const LONG_ROUNDS: u32 = 200;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Model to answer with
    #[arg(value_name = "MODEL", default_value = "smollm2")]
    model: String,
    /// Nodes of the cluster, each a process with a home of its own
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u16).range(2..=16))]
    nodes: u16,
    /// How the model is cut
    #[arg(long, value_name = "SPLIT", default_value_t)]
    split: SplitKind,
    /// Threads of each node
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Requests that are answered at the same time
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: u16,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 300,
          value_parser = clap::value_parser!(u32).range(20..=100_000))]
    tokens: u32,
    /// Faults, one a round [default: 8, or 200 with --long]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,
    /// Chooses faults, victims and moments: the same seed, the same choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Faults to choose from [default: all that this system allows]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',',
          value_parser = fault())]
    faults: Vec<Fault>,
    /// 200 rounds on 4 nodes, or --rounds of them
    #[arg(long, conflicts_with = "nodes")]
    long: bool,
    /// First round of the seed's schedule that is played, so that a long run can be split
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u32,
    /// Standby copies of each node's part, packed on another one
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u16).range(0..=1))]
    spare: u16,
    /// Give each node a network and a disk of its own, so that it can be cut off (Linux, root,
    /// Python 3)
    #[arg(long)]
    namespaces: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    fn plan(&self, faults: Vec<Fault>) -> RoundSettings {
        let (nodes, rounds) = match self.long {
            true => (4, self.rounds.unwrap_or(LONG_ROUNDS)),
            false => (self.nodes, self.rounds.unwrap_or(ROUNDS)),
        };
        RoundSettings {
            nodes: usize::from(nodes),
            split: self.split,
            threads: self.threads,
            streams: self.streams,
            tokens: self.tokens,
            rounds,
            from: self.from,
            seed: self.seed,
            faults,
            spare: self.spare,
            namespaces: self.namespaces,
        }
    }
}

fn fault() -> impl TypedValueParser<Value = Fault> {
    let all = Fault::ALL.map(|fault| PossibleValue::new(fault.name()).help(fault.meaning()));
    let named = |name: String| Fault::ALL.into_iter().find(|fault| fault.name() == name);
    PossibleValuesParser::new(all).try_map(move |name| named(name).ok_or("no fault"))
}

/// Injects a fault per round, and prints the results.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let plan = args.plan(paceline_chaos::faults(&args.faults, args.namespaces)?);
    let model = pull::ensure(&args.model, signals)?;
    let program = ProgramPaths {
        own: own_program()?,
        file: std::env::current_exe()?,
    };
    let tell: ProgressSink = Arc::new(|line| print_err(line));
    signals.orderly(|cancel| {
        let mut chaos = Chaos::start(&plan, &model.path, program, tell)?;
        let played = play(&mut chaos, &|| cancel.is_cancelled(), args.json);
        let report = chaos.report();
        print(&match args.json {
            true => report.json().to_string(),
            false => report.total(),
        })?;
        played?;
        report.verdict()
    })
}

/// Runs the rounds, and prints each, unless JSON follows at the end.
fn play(chaos: &mut Chaos, is_over: &dyn Fn() -> bool, json: bool) -> anyhow::Result<()> {
    while !is_over()
        && let Some(line) = chaos.round()?
    {
        if !json {
            print(&line)?;
        }
        chaos.heal()?;
    }
    Ok(())
}
