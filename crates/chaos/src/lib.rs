//! Chaos tests: a cluster of nodes on this machine that gets faults while it serves requests.
//!
//! Each round sends the same requests, spread over all nodes. At a seeded moment a fault hits a
//! node, and sometimes a second fault hits another. A client whose node fails continues at the next
//! one. Every answer is compared with that of an undisturbed round.
//!
//! - [`Chaos`]: the rounds, one by one; [`RoundSettings`]: their settings.
//! - [`Fault`]: a fault of a node; [`faults`]: the faults that this system allows.
//! - [`Report`]: all rounds, as text and as JSON.
//!
//! Nodes are processes of the program `paceline`. The crate prints nothing: progress lines go to a
//! [`ProgressSink`].

mod cluster;
mod faults;
mod memory;
mod report;
mod spaces;
mod streams;

use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use paceline_base::printable;
use paceline_model::SplitKind;

use cluster::Cluster;
use faults::Round;
use report::RoundResult;
use streams::{ApiEndpoint, ClientRequest, ClientResponse, KINDS};

pub use faults::{Fault, of as faults};
pub use report::Report;

/// Receives progress lines; must not block.
pub type ProgressSink = Arc<dyn Fn(&str) + Send + Sync>;

/// Time limit for an instance to recover after a round: a model's load and a node's return.
const HEAL_LIMIT: Duration = Duration::from_secs(120);

/// Time until a worker without memory is reported. All answers may have ended before the kernel
/// kills it. What `ps` says is true 5 s after a fault (docs/guide.md).
const TRUE_AFTER: Duration = Duration::from_secs(5);

/// Pause after which a client counts as hung: a user gives up.
const HUNG_AFTER: Duration = Duration::from_secs(30);

/// The program `paceline`.
#[derive(Clone, Debug)]
pub struct ProgramPaths {
    /// Its path in this process: a link of the kernel's, if there is one.
    pub own: PathBuf,
    /// Its file, for programs between this process and a node.
    pub file: PathBuf,
}

#[derive(Clone, Debug)]
pub struct RoundSettings {
    /// Nodes of the cluster, two or more.
    pub nodes: usize,
    /// How the model is split.
    pub split: SplitKind,
    pub threads: u16,
    /// Concurrent requests.
    pub streams: u16,
    pub tokens: u32,
    /// Number of rounds to run.
    pub rounds: u32,
    /// First round to run of the seed's schedule.
    pub from: u32,
    /// Draws faults, victims and moments.
    pub seed: u64,
    /// Faults to draw from, from [`faults`].
    pub faults: Vec<Fault>,
    /// Packed standby copies of each node's part on other nodes.
    pub spare: u16,
    /// Whether each node has a network and a disk of its own.
    pub namespaces: bool,
}

/// A cluster with its remaining rounds. It ends when this is dropped, and with the thread that made
/// it.
pub struct Chaos {
    cluster: Cluster,
    /// Requests and the answers of an undisturbed round.
    known: Vec<(ClientRequest, ClientResponse)>,
    rounds: VecDeque<(usize, Round)>,
    /// Requests of a round.
    streams: usize,
    report: Report,
}

impl fmt::Debug for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Chaos");
        shown.field("rounds", &self.rounds);
        shown.field("report", &self.report).finish_non_exhaustive()
    }
}

impl Chaos {
    /// Starts a cluster of `plan`, loads `model` over it, and records its undisturbed answers.
    ///
    /// # Errors
    /// A cluster that cannot be made, or an answer that fails without a fault.
    pub fn start(
        plan: &RoundSettings,
        model: &Path,
        program: ProgramPaths,
        tell: ProgressSink,
    ) -> Result<Self> {
        let tell: ProgressSink = Arc::new(move |what| tell(&format!("chaos: {what}")));
        let space = plan.namespaces.then(|| disk_bytes(model)).transpose()?;
        let mut cluster = Cluster::start(plan.nodes, space, program, tell.clone())?;
        cluster.load(model, plan.split, (plan.threads, plan.streams, plan.spare))?;
        let streams = usize::from(plan.streams);
        let requests = ClientRequest::several(streams.max(KINDS), plan.tokens);
        let known = undisturbed(&cluster, &requests, streams, &tell)?;
        let all = plan.from.saturating_add(plan.rounds);
        let rounds = faults::schedule(plan.seed, all, &plan.faults, plan.tokens);
        let rounds = rounds.into_iter().enumerate().skip(plan.from as usize);
        Ok(Self {
            cluster,
            known,
            rounds: rounds.collect(),
            streams,
            report: Report::new(plan.seed, plan.nodes),
        })
    }

    /// Runs the next round: returns its line, or `None` after the last. Call [`heal`] before the
    /// next round.
    ///
    /// # Errors
    /// A fault that cannot be applied.
    ///
    /// [`heal`]: Self::heal
    pub fn round(&mut self) -> Result<Option<String>> {
        let Some((number, round)) = self.rounds.pop_front() else {
            return Ok(None);
        };
        // Different kinds of requests in each round.
        let (known, streams) = (&self.known, self.streams);
        let turn = known.iter().cycle().skip(number * streams % known.len());
        let (requests, right): (Vec<_>, Vec<_>) = turn.take(streams).cloned().unzip();
        let seen = play(&mut self.cluster, round, &requests, &right)?;
        let line = self.report.line(&seen);
        self.report.add(seen);
        Ok(Some(line))
    }

    /// Reverts the faults and waits until all nodes compute the model again.
    pub fn heal(&mut self) -> Result<()> {
        self.cluster.heal(HEAL_LIMIT)
    }

    /// The completed rounds.
    pub const fn report(&self) -> &Report {
        &self.report
    }
}

/// Bytes of a node's disk: twice its model, and room for its other files.
fn disk_bytes(model: &Path) -> Result<u64> {
    let model = std::fs::metadata(model).context("cannot look at the model")?;
    Ok(2 * model.len() + (192 << 20))
}

/// The requests with their answers without faults, `streams` at a time. Requests that this model
/// cannot answer are left out.
fn undisturbed(
    cluster: &Cluster,
    requests: &[ClientRequest],
    streams: usize,
    tell: &ProgressSink,
) -> Result<Vec<(ClientRequest, ClientResponse)>> {
    let mut known = Vec::new();
    for part in requests.chunks(streams) {
        let (_, answers) = answers_at(&cluster.clients(part), u32::MAX, || Ok(()))?;
        for (request, answer) in part.iter().zip(answers) {
            match &answer.error {
                None => known.push((request.clone(), answer)),
                Some(error) if request.is_optional() && answer.is_refused => {
                    tell(&format!("no request with tools: {}", printable(error)));
                }
                Some(error) => {
                    bail!("an undisturbed answer failed: {error}");
                }
            }
        }
    }
    Ok(known)
}

/// Runs a round: requests, the fault, and the outcomes of the answers.
fn play(
    cluster: &mut Cluster,
    round: Round,
    requests: &[ClientRequest],
    undisturbed: &[ClientResponse],
) -> Result<RoundResult> {
    let victims = cluster.victims(round.fault, round.victim)?;
    if round.fault == Fault::LoseInLoad {
        return play_load(cluster, (round, victims[0]), requests, undisturbed);
    }
    let [first, other] = victims;
    let clients = cluster.clients(requests);
    // Before the answers: on a busy machine they could end while a node is asked.
    let watch = cluster.watch(&victims)?;
    let mut missed = false;
    let (hit, found) = answers_at(&clients, round.at_token, || {
        let begun = Instant::now();
        match round.second {
            Some((second, after)) if after.is_zero() => {
                cluster.hit(second, [other, first])?;
                cluster.hit(round.fault, victims)
            }
            Some((second, after)) => {
                cluster.hit(round.fault, victims)?;
                thread::sleep(after.saturating_sub(begun.elapsed()));
                // It may have no worker at this moment.
                missed = cluster.hit(second, [other, first]).is_err();
                Ok(())
            }
            None => cluster.hit(round.fault, victims),
        }
    })?;
    let at = hit.context("no answer got as far as the fault's token")?;
    let faults = [Some(round.fault), round.second.map(|(fault, _)| fault)];
    let is_slow = faults.contains(&Some(Fault::OutOfMemory));
    let detected = watch.since(at, if is_slow { TRUE_AFTER } else { Duration::ZERO });
    let told = detected.map(|after| at + after);
    let longest = |has_moved: bool| {
        let those = found
            .iter()
            .filter(|answer| (answer.moves > 0) == has_moved);
        those.filter_map(|answer| answer.resumed(at, told?)).max()
    };
    Ok(RoundResult {
        round: Round {
            second: round.second.filter(|_| !missed),
            ..round
        },
        detected,
        resumed: longest(false),
        moved_resumed: longest(true),
        pause: found.iter().filter_map(|answer| answer.pause(at)).max(),
        tokens: found.iter().map(|answer| answer.pieces_at(at)).sum(),
        hung: found
            .iter()
            .filter(|answer| hangs(answer.pause(at)))
            .count(),
        ..RoundResult::of(round, cluster.name(first), &found, undisturbed)
    })
}

/// Whether a client waits too long.
fn hangs(pause: Option<Duration>) -> bool {
    pause > Some(HUNG_AFTER)
}

/// Runs a round in which a node is lost while the model loads. Then the requests follow.
fn play_load(
    cluster: &mut Cluster,
    (round, victim): (Round, usize),
    requests: &[ClientRequest],
    undisturbed: &[ClientResponse],
) -> Result<RoundResult> {
    let name = cluster.name(victim);
    // From the first moment to one at which a small model is loaded.
    let after = Duration::from_millis(5 * u64::from(round.at_token));
    let spares_node = round.at_token.is_multiple_of(2);
    let took = cluster.lose_in_load((victim, after), spares_node, HEAL_LIMIT)?;
    let (_, found) = answers_at(&cluster.clients(requests), u32::MAX, || Ok(()))?;
    Ok(RoundResult {
        pause: Some(took),
        hung: if hangs(Some(took)) { found.len() } else { 0 },
        ..RoundResult::of(round, name, &found, undisturbed)
    })
}

/// Collects all answers. Calls `then` when the first of them has `at_token` fragments, and returns
/// the moment of that call; `None` if no answer got that far.
fn answers_at(
    clients: &[(Vec<ApiEndpoint>, ClientRequest)],
    at_token: u32,
    then: impl FnOnce() -> Result<()>,
) -> Result<(Option<Instant>, Vec<ClientResponse>)> {
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
        // An error means that all answers ended before that token.
        let hit = reached.recv().ok().map(|()| Instant::now());
        let outcome = hit.map_or(Ok(()), |_| then());
        let answers = asked
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a client panicked")))
            .collect::<Result<Vec<_>>>();
        outcome?;
        Ok((hit, answers?))
    })
}
