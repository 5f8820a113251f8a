//! `paceline chaos`: a cluster of nodes on this machine, broken on purpose while it answers.
//!
//! Each round sends the same requests, spread over all nodes. At a moment that the seed chooses a
//! fault hits one of these, and sometimes a second fault another. A client whose node is gone goes
//! on at the next. Every answer is compared with the answer of an undisturbed round.

mod cluster;
mod faults;
mod memory;
mod report;
mod spaces;
mod streams;

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paceline_model::SplitKind;

use crate::interrupt::Signals;
use crate::output::{print, printable, tell};
use crate::pull;
use cluster::Cluster;
use faults::{Fault, Round};
use report::{Report, Seen};
use streams::{Answer, Door, KINDS, Request};

const EXAMPLES: &str = "\
Examples:
  paceline chaos smollm2
  paceline chaos smollm2 --nodes 4 --rounds 40 --seed 7
  paceline chaos ./model.gguf --faults kill-node,freeze-node --json
  paceline chaos smollm2 --long --from 40 --rounds 20   a part of the long run
  sudo paceline chaos smollm2 --namespaces --faults cut-node,fill-disk,out-of-memory";

/// Wait for an instance to answer again after a round: a model's load and a node's return.
const HEAL_LIMIT: Duration = Duration::from_secs(120);

/// Rounds where nobody says.
const ROUNDS: u32 = 8;

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
    /// Faults, one a round [default: 8, or 200 with --long]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,
    /// Chooses faults, victims and moments: the same seed, the same choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Faults to choose from [default: all that this system allows]
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    faults: Vec<Fault>,
    /// 200 rounds on 4 nodes, or --rounds of them
    #[arg(long, conflicts_with = "nodes")]
    long: bool,
    /// First round of the seed's schedule that is played, so that a long run can be split
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u32,
    /// Further copies of each node's part that wait packed on another one
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u16).range(0..=1))]
    spare: u16,
    /// Give each node a network and a disk of its own, so that it can be cut off (Linux, root)
    #[arg(long)]
    namespaces: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Threads of each node, requests at a time, and spares.
    const fn sizes(&self) -> (u16, u16, u16) {
        (self.threads, self.streams, self.spare)
    }
}

/// Breaks a cluster round by round and prints what came of it.
///
/// # Errors
/// A cluster that cannot be made or does not heal; answers that were lost or altered.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let faults = faults::of(&args.faults, args.namespaces)?;
    let model = pull::ensure(&args.model, signals)?;
    signals.orderly(|cancel| {
        let (nodes, rounds) = match args.long {
            true => (4, args.rounds.unwrap_or(LONG_ROUNDS)),
            false => (args.nodes, args.rounds.unwrap_or(ROUNDS)),
        };
        let space = args
            .namespaces
            .then(|| disk_bytes(&model.path))
            .transpose()?;
        let mut cluster = Cluster::start(usize::from(nodes), space)?;
        cluster.load(&model.path, args.split, args.sizes())?;
        let streams = usize::from(args.streams);
        let requests = Request::several(streams.max(KINDS), args.tokens);
        let known = undisturbed(&cluster, &requests, streams)?;
        let all = args.from.saturating_add(rounds);
        let rounds = faults::schedule(args.seed, all, &faults, args.tokens);
        let mut report = Report::new(args.seed, usize::from(nodes));
        for (number, round) in rounds.into_iter().enumerate().skip(args.from as usize) {
            if cancel.is_cancelled() {
                break;
            }
            // Other kinds of requests each round.
            let turn = known.iter().cycle().skip(number * streams % known.len());
            let (requests, right): (Vec<_>, Vec<_>) = turn.take(streams).cloned().unzip();
            let seen = play(&mut cluster, round, &requests, &right)?;
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

/// Bytes of a node's disk: its model twice over, and what else a node writes.
fn disk_bytes(model: &Path) -> anyhow::Result<u64> {
    let model = std::fs::metadata(model).context("cannot look at the model")?;
    Ok(2 * model.len() + (192 << 20))
}

/// The requests with the answers that come without faults, `streams` at a time. Those that this
/// model does not answer are left out.
fn undisturbed(
    cluster: &Cluster,
    requests: &[Request],
    streams: usize,
) -> anyhow::Result<Vec<(Request, Answer)>> {
    let mut known = Vec::new();
    for part in requests.chunks(streams) {
        let (_, answers) = answers_at(&cluster.clients(part), u32::MAX, || Ok(()))?;
        for (request, answer) in part.iter().zip(answers) {
            match &answer.error {
                None => known.push((request.clone(), answer)),
                Some(error) if request.is_optional() && answer.is_refused => {
                    stage(&format!("no request with tools: {}", printable(error)));
                }
                Some(error) => bail!("an undisturbed answer failed: {error}"),
            }
        }
    }
    Ok(known)
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
    let detected = detected.since(at);
    let told = detected.map(|after| at + after);
    let resumed = |told| {
        found
            .iter()
            .filter_map(|answer| answer.next_after(told))
            .max()
    };
    Ok(Seen {
        round,
        victim: cluster.name(victims[0]),
        detected,
        resumed: told.and_then(resumed),
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
    clients: &[(Vec<Door>, Request)],
    at_token: u32,
    then: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<(Option<Instant>, Vec<Answer>)> {
    let (sender, reached) = mpsc::channel();
    thread::scope(|scope| {
        let asked: Vec<_> = clients
            .iter()
            .map(|(doors, request)| {
                let sender = sender.clone();
                scope.spawn(move || request.answer(doors, at_token, &sender))
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
