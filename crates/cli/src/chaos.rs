//! `paceline chaos`: a cluster of nodes on this machine, broken on purpose while it answers.
//!
//! Each round sends the same requests, spread over all nodes. At a moment that the seed chooses a
//! fault hits one of these, and sometimes a second fault another. A client whose node is gone goes
//! on at the next. Every answer is compared with the answer of an undisturbed round.

mod cluster;
mod faults;
mod report;
mod streams;

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paceline_model::SplitKind;

use crate::interrupt::Signals;
use crate::output::{print, tell};
use crate::pull;
use cluster::Cluster;
use faults::{Fault, Round};
use report::{Report, Seen};
use streams::{Answer, Request};

const EXAMPLES: &str = "\
Examples:
  paceline chaos smollm2
  paceline chaos smollm2 --nodes 4 --rounds 40 --seed 7
  paceline chaos ./model.gguf --faults kill-node,freeze-node --json";

/// Wait for an instance to answer again after a round: a model's load and a node's return.
const HEAL_LIMIT: Duration = Duration::from_secs(120);

/// Rounds with `--long`.
const LONG_ROUNDS: u32 = 200;

/// Arguments of `paceline chaos`.
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
    /// Faults, one a round
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Chooses faults, victims and moments: the same seed, the same choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Faults to choose from [default: all that this system allows]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    faults: Vec<Fault>,
    /// 200 rounds on 4 nodes
    #[arg(long, conflicts_with_all = ["rounds", "nodes"])]
    long: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Breaks a cluster round by round and prints what came of it.
///
/// # Errors
/// A cluster that cannot be made or does not heal; answers that were lost or altered.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let faults = faults::of(&args.faults)?;
    let model = pull::ensure(&args.model, signals)?;
    signals.orderly(|cancel| {
        let (nodes, rounds) = if args.long {
            (4, LONG_ROUNDS)
        } else {
            (args.nodes, args.rounds)
        };
        let mut cluster = Cluster::start(usize::from(nodes))?;
        cluster.load(&model.path, args.split, (args.threads, args.streams))?;
        let requests = Request::several(usize::from(args.streams), args.tokens);
        let (_, undisturbed) = answers_at(&cluster.clients(&requests), u32::MAX, || Ok(()))?;
        if let Some(error) = undisturbed.iter().find_map(|answer| answer.error.as_ref()) {
            bail!("an undisturbed answer failed: {error}");
        }
        let rounds = faults::schedule(args.seed, rounds, &faults, args.tokens);
        let mut report = Report::new(args.seed, usize::from(nodes));
        for round in rounds {
            if cancel.is_cancelled() {
                break;
            }
            let seen = play(&mut cluster, round, &requests, &undisturbed)?;
            if !args.json {
                report.show(&seen)?;
            }
            report.add(seen);
            cluster.heal(HEAL_LIMIT)?;
        }
        if args.json {
            print(&report.json().to_string())?;
        } else {
            report.close()?;
        }
        report.verdict()
    })
}

/// One round: requests, the fault, and what became of the answers.
fn play(
    cluster: &mut Cluster,
    round: Round,
    requests: &[Request],
    undisturbed: &[Answer],
) -> anyhow::Result<Seen> {
    let victims = cluster.victims(round.victim)?;
    let clients = cluster.clients(requests);
    let mut watch = None;
    let (hit, found) = answers_at(&clients, round.at_token, || {
        watch = Some(cluster.watch(&victims)?);
        let begun = Instant::now();
        match round.second {
            Some((second, after)) if after.is_zero() => {
                cluster.hit(second, victims[1])?;
                cluster.hit(round.fault, victims[0])
            }
            Some((second, after)) => {
                cluster.hit(round.fault, victims[0])?;
                thread::sleep(after.saturating_sub(begun.elapsed()));
                // It may have no worker at this moment.
                let _ = cluster.hit(second, victims[1]);
                Ok(())
            }
            None => cluster.hit(round.fault, victims[0]),
        }
    })?;
    let detected = watch.context("no answer got as far as the fault's token")?;
    let at = hit.context("no answer got as far as the fault's token")?;
    Ok(Seen {
        round,
        victim: cluster.name(victims[0]),
        detected: detected.since(at),
        pause: found.iter().filter_map(|answer| answer.pause(at)).max(),
        answers: found.len(),
        moved: found.iter().map(|answer| answer.moves).sum(),
        lost: found.iter().filter(|answer| answer.is_lost()).count(),
        altered: found
            .iter()
            .zip(undisturbed)
            .filter(|(answer, right)| answer.is_altered(right))
            .count(),
        reason: found.into_iter().find_map(|answer| answer.error),
    })
}

/// All answers. When the first of them has `at_token` pieces, `then` is called; the moment of the
/// call comes back, or `None` where none got so far.
fn answers_at(
    clients: &[(Vec<u16>, Request)],
    at_token: u32,
    then: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<(Option<Instant>, Vec<Answer>)> {
    let (sender, reached) = mpsc::channel();
    thread::scope(|scope| {
        let asked: Vec<_> = clients
            .iter()
            .map(|(ports, request)| {
                let sender = sender.clone();
                scope.spawn(move || request.answer(ports, at_token, &sender))
            })
            .collect();
        drop(sender);
        // An error means that all answers ended before the token came.
        let hit = reached.recv().ok().map(|()| Instant::now());
        let outcome = hit.map_or(Ok(()), |_| then());
        let answers = asked
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a client panicked"))
            })
            .collect::<anyhow::Result<Vec<_>>>();
        outcome?;
        Ok((hit, answers?))
    })
}

/// Says on stderr what is going on, since rounds take seconds.
fn stage(what: &str) {
    tell(format_args!("chaos: {what}"));
}
