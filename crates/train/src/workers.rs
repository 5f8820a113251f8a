//! The workers that compute the leaves of a step: this process, or worker processes. Each of those
//! has the whole model ([`leaves`]) or a stage of it ([`pipeline`]).
//!
//! A worker that ends, hangs ([`deadline`]) or sends garbage loses its leaves, and the others
//! compute those. The sum is the same, because a leaf depends on no worker and the tree on no
//! distribution of leaves. A replacement is started and joins when it has loaded the model.

mod answers;
mod compute;
mod deadline;
mod leaves;
mod pipeline;
mod shards;

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_base::{Rank, hex};
use paceline_cluster::sandbox::Sandbox;
use paceline_cluster::workers::{Event, WorkerLimits, WorkerSpec, Workers};
use paceline_model::adapter::files::tensors;
use sha2::{Digest, Sha256};

use crate::checkpoint::{self, Checkpoint};
use crate::error::Error;
use crate::hashed::Hashed;
use crate::messages::{FromWorker, ToWorker, WorkerJob};
use crate::report::TrainingProgress;
use crate::run::TrainingRun;
use crate::shard::Sharding;
use crate::stage::ModelStage;
use compute::alone;
pub(crate) use compute::{LeafModel, LeafSums, PartSink, compute_together};
use deadline::{Deadlines, Overdue};
use shards::{RankGroup, Stepped};

/// Longest silence of a worker before its leaves go to others. Its signs of life do not depend on
/// what it computes.
const SILENCE: Duration = Duration::from_secs(5);

/// Time for workers to end by themselves before they are killed.
const GRACE: Duration = Duration::from_millis(300);

/// The environment variable of glibc's settings, which it reads when a process starts, and those of
/// a training; other libraries ignore it. A step needs new memory for activations and gradients.
/// With pages of 2 MiB, 30 million numbers take 5,000 page faults a step instead of 197,000. Up to
/// 32 MiB of free memory stay: with less, pages are returned and cleared again within a layer. All
/// this saves a fifth of the processor time (November 2026).
pub const ALLOCATOR: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:\
     glibc.malloc.trim_threshold=33554432",
);

/// As [`ALLOCATOR`] for ranks with shards, for least memory: vectors from 256 KiB on are returned
/// as soon as they are free. By default the limit rises to 32 MiB with the first large vector, and
/// free memory lies in holes. A rank of four, 30 million numbers: 715 MiB without it, 433 with it;
/// 306 by now, and 314 with pages of 2 MiB.
const RANK_SETTINGS: &str = "glibc.malloc.mmap_threshold=262144";

/// Poll interval of the parent while workers compute.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Workers that end in a row without having computed anything before none is started any more.
const FRUITLESS_MAX: u32 = 8;

/// The processes that compute leaves.
#[derive(Debug)]
pub struct TrainingWorkers {
    team: Option<WorkerSet>,
}

/// Worker processes that are to be started.
#[derive(Debug)]
pub struct WorkerOptions {
    /// A program that is [`worker::run`](crate::worker::run), or
    /// [`remote::near`](crate::bridge::near()) to one.
    pub program: PathBuf,
    /// Each of them, at least one.
    pub posts: Vec<Post>,
    /// All of every one's environment.
    pub env: Vec<(OsString, OsString)>,
    /// Stages that the model is cut into. Worker `n` has stage `n` modulo this.
    pub stages: usize,
    /// Parts of the state that the workers share out as ranks of a group, if they do.
    pub sharding: Option<Sharding>,
    /// Folder of exchanged files: made, and removed at the end.
    pub exchange: PathBuf,
}

/// A worker process.
#[derive(Clone, Debug)]
pub struct Post {
    pub args: Vec<OsString>,
    /// Its threads; 0 for as many as its machine has cores.
    pub threads: usize,
    /// Display name of its machine; empty for this one. Workers that are all on this machine are
    /// sandboxed: they may write exchanged files only.
    pub place: String,
}

impl TrainingWorkers {
    /// This process.
    pub const fn here() -> Self {
        Self { team: None }
    }

    /// Starts workers for a run. Dropping this ends them.
    ///
    /// # Errors
    /// [`Error::Option`] for fewer workers than stages; [`Error::Cluster`], [`Error::Files`].
    pub fn start(processes: WorkerOptions, run: &TrainingRun) -> Result<Self, Error> {
        let (count, stages) = (processes.posts.len(), processes.stages.max(1));
        if count == 0 || !count.is_multiple_of(stages) {
            return Err(Error::Option {
                option: "--nodes",
                got: count.to_string(),
                expected: format!("as many nodes for each of {stages} stages"),
            });
        }
        if processes.sharding.is_some() && stages > 1 {
            return Err(Error::Option {
                option: "--stages",
                got: stages.to_string(),
                expected: "1, with --shard".to_owned(),
            });
        }
        let sharding = processes.sharding;
        if let Some(sharding) = sharding.filter(|sharding| !sharding.has_state()) {
            run.check_cut_rows(sharding)?;
        }
        let has_group = sharding.is_some() || stages > 1;
        let group = has_group.then(|| RankGroup::new(run, sharding, count));
        let expected = (
            run.net.fingerprint().to_owned(),
            run.examples.digest.clone(),
        );
        Self::spawn(
            processes,
            WorkerJob::Model(run.job.clone()),
            expected,
            group,
        )
    }

    /// Starts workers. `expected`: fingerprints of the model and the data.
    fn spawn(
        processes: WorkerOptions,
        job: WorkerJob,
        expected: (String, String),
        group: Option<RankGroup>,
    ) -> Result<Self, Error> {
        let (count, sharding) = (processes.posts.len(), processes.sharding);
        let exchange = processes.exchange;
        let _ = std::fs::remove_dir_all(&exchange); // of a run that was killed
        std::fs::create_dir_all(&exchange).map_err(Error::file("make", &exchange))?;
        let args = processes.posts.iter().map(|post| post.args.clone());
        let mut spec = WorkerSpec::new(processes.program, args.collect());
        (spec.env, spec.env_alone) = (processes.env, true);
        let (name, settings) = ALLOCATOR;
        let settings = match sharding.is_some_and(Sharding::has_state) {
            true => RANK_SETTINGS,
            false => settings,
        };
        spec.env.push((name.into(), settings.into()));
        // A process that forwards to another machine starts `ssh`, which writes below the home.
        if processes.posts.iter().all(|post| post.place.is_empty()) {
            spec.sandbox = Some(Sandbox::Worker);
            spec.writable = vec![exchange.clone()];
        }
        spec.limits = WorkerLimits {
            silence: SILENCE,
            write: SILENCE,
            ..WorkerLimits::default()
        };
        let mut team = WorkerSet {
            workers: Workers::spawn(spec)?,
            members: (0..count).map(|_| TrainingWorker::default()).collect(),
            deadlines: Deadlines::new(count),
            stages: processes.stages.max(1),
            group,
            is_learning: false,
            busy_s: None,
            lost: 0,
            fruitless: 0,
            last: String::new(),
            untold: Vec::new(),
            engine: None,
            notes: Vec::new(),
            job,
            posts: processes.posts,
            expected,
            exchange,
        };
        for rank in 0..count {
            team.welcome(rank as u32);
        }
        Ok(Self { team: Some(team) })
    }

    /// Workers that were lost so far.
    pub fn lost(&self) -> u32 {
        self.team.as_ref().map_or(0, |team| team.lost)
    }

    /// Seconds that the least busy worker of a stage, or of cut rows, computed in the last step.
    pub(crate) fn busy_s(&self) -> Option<f64> {
        self.team.as_ref()?.busy_s
    }

    /// Workers that can compute now.
    pub fn nodes(&self) -> u32 {
        let ready = |team: &WorkerSet| team.members.iter().filter(|m| m.is_ready).count() as u32;
        self.team.as_ref().map_or(1, ready)
    }

    /// Process ids by rank: for reports.
    pub fn ids(&self) -> Vec<u32> {
        self.team
            .as_ref()
            .map(|team| team.workers.ids())
            .unwrap_or_default()
    }

    /// The workers of a sharded run, whose values are theirs.
    pub(crate) fn sharded(&mut self) -> Option<ShardedRanks<'_>> {
        let team = self.team.as_mut()?;
        let has_state = team.group.as_ref()?.has_state();
        has_state.then_some(ShardedRanks { team })
    }

    /// The loss and the gradient of a step.
    pub(crate) fn step(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        step: u64,
        clock: &dyn Fn() -> f64,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(f64, Vec<f32>), Error> {
        let at = At { step, clock };
        match &mut self.team {
            None => alone(&mut { run }, params, step),
            Some(team) if !team.is_line() => {
                team.leaves((run.order.leaves(), run.net.parts()), params, &at, watch)
            }
            Some(team) => team.trained(run, params, &at, watch),
        }
    }

    /// The loss of each row of what is held out, with the values before a step.
    pub(crate) fn judge(
        &mut self,
        run: &TrainingRun,
        params: &[f32],
        step: u64,
        clock: &dyn Fn() -> f64,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Vec<f64>, Error> {
        let at = At { step, clock };
        match &mut self.team {
            Some(team) if team.is_line() => team.judged(run, params, &at, watch),
            _ => run.losses(params),
        }
    }
}

pub(crate) struct ShardedRanks<'a> {
    team: &'a mut WorkerSet,
}

impl ShardedRanks<'_> {
    /// Makes a step. Ranks that have no state yet begin with `from`, or with the first values.
    pub(crate) fn step(
        &mut self,
        run: &TrainingRun,
        at: (u64, Option<&Checkpoint>),
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Stepped, Error> {
        self.team.step_together(run, at, watch)
    }

    /// The loss of each row of what is held out, with the values before a step.
    pub(crate) fn judge(
        &mut self,
        run: &TrainingRun,
        at: (u64, Option<&Checkpoint>),
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<Vec<f64>, Error> {
        self.team.judge_together(run, at, watch)
    }

    /// Writes the state before a step as a checkpoint into `output`.
    pub(crate) fn save(
        &mut self,
        run: &TrainingRun,
        at: (u64, Option<&Checkpoint>),
        output: &Path,
        watch: &mut dyn FnMut(TrainingProgress),
    ) -> Result<(), Error> {
        let (cuts, files) = self.team.save_together(run, at, watch)?;
        checkpoint::join(output, at.0, run, (&cuts, &files))
    }
}

/// A worker, as far as the parent knows.
#[derive(Debug, Default)]
struct TrainingWorker {
    is_ready: bool,
    /// Has a process.
    is_there: bool,
    has: AssignedLeaves,
    /// When it got that.
    since: f64,
    /// Leaves a second, 0 before it has computed any.
    speed: f64,
}

/// Work that a worker has.
#[derive(Debug, Default)]
struct AssignedLeaves {
    leaves: Vec<Range<usize>>,
}

/// The number of a step, and the clock.
struct At<'a> {
    step: u64,
    clock: &'a dyn Fn() -> f64,
}

/// The outcome of an event.
enum WorkerEvent {
    Nothing,
    Lost(AssignedLeaves),
    Said(u32, FromWorker),
}

#[derive(Debug)]
struct WorkerSet {
    workers: Workers<ToWorker, FromWorker>,
    members: Vec<TrainingWorker>,
    deadlines: Deadlines,
    stages: usize,
    /// Of a sharded run, and of stages.
    group: Option<RankGroup>,
    /// The workers have the answers that a draft head is trained on.
    is_learning: bool,
    /// Seconds that the least busy worker of a stage, or of cut rows, computed in the last step.
    busy_s: Option<f64>,
    lost: u32,
    fruitless: u32,
    /// Reason for the last loss of a worker.
    last: String,
    /// Progress not yet reported to the caller.
    untold: Vec<TrainingProgress>,
    /// Class and device of all workers, once one is ready.
    engine: Option<String>,
    /// Notes about the engine so far.
    notes: Vec<String>,
    job: WorkerJob,
    posts: Vec<Post>,
    /// Fingerprints of the model and the data.
    expected: (String, String),
    exchange: PathBuf,
}

impl WorkerSet {
    /// The stage of a worker.
    fn stage(&self, rank: usize) -> ModelStage {
        ModelStage {
            index: rank % self.stages,
            of: self.stages,
        }
    }

    /// Whether workers exchange leaves directly: stages, or parts of rows.
    fn is_line(&self) -> bool {
        let group = self.group.as_ref();
        group.is_some_and(|group| !group.has_state())
    }

    /// Handles an event; returns only what concerns leaves.
    fn take(&mut self, event: Event<FromWorker>) -> Result<WorkerEvent, Error> {
        let (text, rank) = (event.to_string(), event.rank().0);
        match event {
            Event::Message { message, .. } => self.handle_message(rank, message),
            _ if self.members[rank as usize].is_there => {
                Ok(WorkerEvent::Lost(self.lose(rank, text)))
            }
            _ => Ok(WorkerEvent::Nothing),
        }
    }

    fn handle_message(&mut self, rank: u32, message: FromWorker) -> Result<WorkerEvent, Error> {
        let place = self.posts[rank as usize].place.clone();
        let failed = |reason| Error::Worker {
            rank,
            place,
            reason,
        };
        match message {
            FromWorker::Failed { reason } => Err(failed(reason)),
            FromWorker::Hangs { limit_s } => {
                let why = format!(
                    "rank {rank} hangs: it computes for more than {limit_s:.0} s, by far longer \
                     than before"
                );
                Ok(WorkerEvent::Lost(self.lose(rank, why)))
            }
            FromWorker::Ready {
                model,
                data,
                engine,
                notes,
            } => {
                let (expected_model, expected_data) = &self.expected;
                if model != *expected_model {
                    return Err(failed("its model is another one".to_owned()));
                }
                if data != *expected_data {
                    return Err(failed("it reads other tokens from the data".to_owned()));
                }
                let of_others = self.engine.get_or_insert_with(|| engine.clone());
                if *of_others != engine {
                    let others = of_others.clone();
                    let reason = format!("it computes with {engine}, the others with {others}");
                    return Err(failed(reason));
                }
                for note in notes {
                    if !self.notes.contains(&note) {
                        self.untold
                            .push(TrainingProgress::Note { line: note.clone() });
                        self.notes.push(note);
                    }
                }
                self.members[rank as usize].is_ready = true;
                Ok(WorkerEvent::Nothing)
            }
            other => Ok(WorkerEvent::Said(rank, other)),
        }
    }

    /// Whether every stage has a worker, or one that is about to be.
    fn check_alive(&self) -> Result<(), Error> {
        let has_one = |stage: usize| {
            let mut members = self.members.iter().skip(stage).step_by(self.stages);
            members.any(|member| member.is_there)
        };
        match (0..self.stages).all(has_one) {
            true => Ok(()),
            false => Err(Error::Lost {
                last: self.last.clone(),
            }),
        }
    }

    /// Drops a worker, starts another in its place, and returns the leaves that it had.
    fn lose(&mut self, rank: u32, why: String) -> AssignedLeaves {
        let gone = std::mem::take(&mut self.members[rank as usize]);
        self.deadlines.begin(rank as usize, 0);
        self.lost += 1;
        self.fruitless += 1;
        let place = &self.posts[rank as usize].place;
        let why = match place.as_str() {
            "" => why,
            place => format!("{place}: {why}"),
        };
        self.untold
            .push(TrainingProgress::Lost { why: why.clone() });
        self.last = why;
        if self.fruitless > FRUITLESS_MAX {
            self.workers.kill(Rank(rank));
        } else if self.workers.replace(Rank(rank)).is_ok() {
            self.welcome(rank);
        }
        gone.has
    }

    /// Drops workers whose leaves are overdue: they hang even if their heartbeats arrive. Returns
    /// the leaves that they had.
    fn lose_hung(&mut self, at: &At<'_>) -> Vec<AssignedLeaves> {
        let over = self.deadlines.overdue((at.clock)()).into_iter();
        let lose = |Overdue { rank, limit_s }: Overdue| {
            let why = format!(
                "rank {rank} hangs: its leaves took more than {limit_s:.0} s, by far longer than \
                 others"
            );
            self.lose(rank, why)
        };
        over.map(lose).collect()
    }

    /// Sends a new worker the description of the run.
    fn welcome(&mut self, rank: u32) {
        let message = ToWorker::Start {
            job: Box::new(self.job.clone()),
            threads: self.posts[rank as usize].threads,
            exchange: self.exchange.clone(),
            stage: self.stage(rank as usize),
            shard: self.role(rank as usize),
        };
        // A worker that does not read will be reported as ended.
        let _ = self.workers.send(Rank(rank), &message);
        if self.is_learning {
            let _ = self.workers.send(Rank(rank), &ToWorker::Learn);
        }
        self.members[rank as usize].is_there = true;
    }

    /// Reports lost workers, and new workers' notes about their engine.
    fn report_progress(&mut self, watch: &mut dyn FnMut(TrainingProgress)) {
        self.untold.drain(..).for_each(watch);
    }

    /// Removes the files of a step.
    fn forget(&self, step: u64) {
        // The rest is removed with the folder.
        let _ = std::fs::remove_dir_all(self.exchange.join(step.to_string()));
    }
}

impl Drop for WorkerSet {
    fn drop(&mut self) {
        self.workers.stop(GRACE);
        let _ = std::fs::remove_dir_all(&self.exchange); // nothing of it is needed
    }
}

/// Writes values where other processes see them whole or not at all. Gives their SHA-256.
pub(crate) fn publish(exchange: &Path, name: &str, values: &[f32]) -> Result<String, Error> {
    publish_all(exchange, name, &[values])
}

/// The same of several vectors, one behind the other.
pub(crate) fn publish_all(
    exchange: &Path,
    name: &str,
    vectors: &[&[f32]],
) -> Result<String, Error> {
    let path = exchange.join(name);
    let folder = path.parent().unwrap_or(exchange);
    std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let write = || {
        let mut file = Hashed {
            file: BufWriter::new(File::create(&temporary)?),
            hash: Sha256::new(),
        };
        for values in vectors {
            tensors::write_floats(&mut file, values)?;
        }
        file.flush()?;
        std::fs::rename(&temporary, &path)?;
        Ok(hex(&file.hash.finalize()))
    };
    write().map_err(Error::file("write", &path))
}

/// The `n` values of a file; with this digest where there is one.
pub(crate) fn read_values(path: &Path, n: usize, digest: Option<&str>) -> Option<Vec<f32>> {
    let bytes = std::fs::read(path).ok()?;
    let is_right = |digest: &str| hex(&Sha256::digest(&bytes)) == digest;
    let right = bytes.len() == n * size_of::<f32>() && digest.is_none_or(is_right);
    right.then(|| tensors::floats(&bytes))
}
