//! Jobs from start to end: parts are leased to threads of this process or to worker processes.
//!
//! The parent merges the results. A worker process that ends, hangs or sends garbage loses its
//! leases, and the others compute those parts. The result is the same, because it does not depend
//! on the partition or on which worker computed a part.
//!
//! A worker on another machine reads inputs of the same paths there. It writes nothing: it sends
//! rows of a result over its channel, and the parent writes them. A worker that has other inputs,
//! or none, is left out.

mod fragments;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::{Rank, lock};
use paceline_cluster::Error as ClusterError;
use paceline_cluster::workers::{Event, WorkerLimits, WorkerSpec, Workers};

use crate::journal::Journal;
use crate::messages::{FromWorker, ToWorker};
use crate::parent::unpack;
use crate::sort::SpillStore;
use crate::worker::cores_for;
use crate::{
    ComputeDevice, DeviceChoice, Error, JobSpec, Kind, Leases, PartComputer, PartialResult,
    RowPartition, Scratch, Sink,
};
use fragments::Pieces;

/// Longest silence of a worker before its parts go to others. Its signs of life do not depend on
/// what it computes; ten seconds without one is a stopped process or a machine that swaps.
const SILENCE: Duration = Duration::from_secs(10);

/// Longest wait for a sign of life of a worker on another machine: 10 s for the connection, and a
/// program on a cold disk.
const REMOTE_START: Duration = Duration::from_secs(30);

/// Time for workers to end by themselves when this is dropped.
const GRACE: Duration = Duration::from_millis(300);

/// Poll interval of the parent while workers compute.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Events that are taken before lost leases are given out again.
const EVENTS_AT_ONCE: usize = 64;

/// Parts that a worker has for each of its threads: one under way and one that waits.
const PARTS_AHEAD: usize = 2;

/// Most threads that a worker is believed to have.
const THREADS_MAX: usize = 1024;

/// The team that computes: threads or worker processes, one job after the other.
#[derive(Debug)]
pub struct JobWorkers {
    threads: usize,
    choice: DeviceChoice,
    device: Option<Arc<dyn ComputeDevice>>,
    /// Parts with at least one block computed by a device.
    device_parts: u64,
    team: Option<ProcessPool>,
}

/// Worker processes that are to be started.
#[derive(Debug)]
pub struct ProcessOptions {
    /// A program that is [`worker::run`](crate::worker::run).
    pub program: PathBuf,
    /// The arguments of each.
    pub args: Vec<Vec<OsString>>,
    /// All of every one's environment.
    pub env: Vec<(OsString, OsString)>,
    /// Names of their machines for people. Such a machine shares no files with this one; empty
    /// for a process of this machine. None where all are on this one.
    pub hosts: Vec<String>,
    /// Threads of each; 0 for as many as its machine has cores.
    pub threads: usize,
    /// The devices that compute besides.
    pub device: DeviceChoice,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobProgress {
    /// Rows done so far.
    Rows { done: u64, of: u64 },
    /// A worker was lost or left out, and its parts are leased again.
    Lost {
        /// Reason for the loss.
        why: String,
        /// Parts that it had, perhaps none.
        parts: usize,
    },
}

impl JobWorkers {
    /// Threads of this process, at least one.
    pub fn here(threads: usize) -> Self {
        Self {
            threads: threads.max(1),
            choice: DeviceChoice::Cpu,
            device: None,
            device_parts: 0,
            team: None,
        }
    }

    /// The same threads, and a device that computes besides or instead.
    pub fn with_device(
        mut self,
        device: Option<Arc<dyn ComputeDevice>>,
        choice: DeviceChoice,
    ) -> Self {
        (self.device, self.choice) = (device, choice);
        self
    }

    /// Starts worker processes, here or over connections to other machines
    /// ([`paceline_cluster::bridge`]). Dropping this ends them.
    pub fn start(processes: ProcessOptions) -> Result<Self, Error> {
        let count = processes.args.len();
        let mut spec = WorkerSpec::new(processes.program, processes.args);
        (spec.env, spec.env_alone) = (processes.env, true);
        spec.limits = WorkerLimits {
            silence: SILENCE,
            write: SILENCE,
            start: match processes.hosts[..] {
                [] => WorkerLimits::default().start,
                _ => REMOTE_START,
            },
        };
        // Other machines count as many cores as this one, until they report theirs.
        let threads = cores_for(processes.threads);
        let is_here = |rank: usize| processes.hosts.get(rank).is_none_or(String::is_empty);
        let said = (0..count).map(|rank| is_here(rank).then_some(threads));
        let said = said.collect();
        let mut team = ProcessPool {
            workers: Workers::spawn(spec)?,
            alive: vec![true; count],
            hosts: processes.hosts,
            lost: 0,
            last: String::new(),
            untold: BTreeMap::new(),
            threads,
            said,
            ready: vec![false; count],
            job: 0,
            inputs: 0,
            sink: None,
            device_parts: 0,
            pieces: Pieces::default(),
        };
        for rank in 0..team.workers.count() {
            let start = ToWorker::Start {
                threads: processes.threads,
                device: processes.device,
            };
            team.send(Rank(rank), &start);
        }
        Ok(Self {
            threads,
            choice: processes.device,
            device: None,
            device_parts: 0,
            team: Some(team),
        })
    }

    /// The name for people of this process's device.
    pub fn device(&self) -> Option<&str> {
        self.device.as_ref().map(|device| device.label())
    }

    /// Parts so far with at least one block computed by a device.
    pub fn device_parts(&self) -> u64 {
        let of_team = self.team.as_ref().map_or(0, |team| team.device_parts);
        self.device_parts + of_team
    }

    /// Whether it is processes, which have no memory in common.
    pub const fn is_processes(&self) -> bool {
        self.team.is_some()
    }

    /// Machines that compute and share no folder; 0 where all processes are on this one.
    pub(crate) fn machines(&self) -> u64 {
        self.team.as_ref().map_or(0, |team| team.hosts.len() as u64)
    }

    /// Number of processes that compute.
    pub fn nodes(&self) -> u32 {
        self.team.as_ref().map_or(1, |team| team.workers.count())
    }

    /// Threads of all processes together.
    pub fn threads(&self) -> u64 {
        let nodes = self.team.as_ref().map_or(1, |team| team.alive.len());
        self.threads as u64 * nodes as u64
    }

    /// Threads of each process; `None` of one on another machine that has not said it.
    pub fn node_threads(&self) -> Vec<Option<usize>> {
        let of_team = self.team.as_ref().map(|team| team.said.clone());
        of_team.unwrap_or_else(|| vec![Some(self.threads)])
    }

    /// Workers that were lost or left out so far.
    pub fn lost(&self) -> u32 {
        self.team.as_ref().map_or(0, |team| team.lost)
    }

    /// Runs a job to its end, which takes as long as reading the inputs. `watch` receives the
    /// progress. With a journal, parts that it has are not computed again.
    ///
    /// # Errors
    /// Errors of the task or its inputs; [`Error::Lost`] when no worker is left; [`Error::Worker`]
    /// for a worker's error that would recur on another.
    pub fn run(
        &mut self,
        task: &JobSpec,
        journal: Option<&mut Journal>,
        watch: &mut dyn FnMut(JobProgress),
    ) -> Result<PartialResult, Error> {
        self.run_prepared(task, task.prepare()?, journal, watch)
    }

    /// Runs half of a sort, which keeps its parts in `store`.
    pub(crate) fn run_stored(
        &mut self,
        task: &JobSpec,
        store: &Arc<SpillStore>,
        journal: Option<&mut Journal>,
        watch: &mut dyn FnMut(JobProgress),
    ) -> Result<PartialResult, Error> {
        let prepared = task.prepare()?.with_store(Arc::clone(store));
        self.run_prepared(task, prepared, journal, watch)
    }

    fn run_prepared(
        &mut self,
        task: &JobSpec,
        prepared: PartComputer,
        journal: Option<&mut Journal>,
        watch: &mut dyn FnMut(JobProgress),
    ) -> Result<PartialResult, Error> {
        let part_rows = match &journal {
            Some(journal) => journal.part_rows(),
            None => task.part_rows(self.threads()),
        };
        let leases = Leases::of(task.rows(), part_rows);
        let mut run = RunningJob {
            leases: match &task.kind {
                Kind::Gather(gather) => leases.by_holder(gather.scatter.machines),
                _ => leases,
            },
            partial: task.empty(),
            task,
            journal,
            watch,
        };
        run.take_journal();
        match &mut self.team {
            None => {
                let threads = self.choice.threads(self.threads, self.device.as_ref());
                self.device_parts += run_here(&mut run, &prepared, threads, self.choice)?;
            }
            Some(team) => {
                // The workers open the inputs again.
                team.sink = prepared.into_sink();
                team.inputs = task.fingerprint()?;
                team.run(&mut run)?;
            }
        }
        Ok(run.partial)
    }
}

/// A job under way.
struct RunningJob<'a> {
    task: &'a JobSpec,
    leases: Leases,
    partial: PartialResult,
    journal: Option<&'a mut Journal>,
    watch: &'a mut dyn FnMut(JobProgress),
}

impl RunningJob<'_> {
    /// Adds the results in the journal.
    fn take_journal(&mut self) {
        let Some(journal) = &mut self.journal else {
            return;
        };
        for (part, partial) in journal.done.drain(..) {
            if self.leases.skip(part) {
                self.partial.merge(partial);
            }
        }
    }

    /// Adds a part's result, merged from `fragments` and `rest`, unless the part is leased to
    /// another worker by now.
    fn finish(
        &mut self,
        part: u64,
        holder: u32,
        pieces: Vec<PartialResult>,
        mut rest: PartialResult,
    ) -> Result<(), Error> {
        if !self.leases.finish(part, holder) {
            return Ok(());
        }
        if let Some(journal) = &mut self.journal {
            let mut whole = self.task.empty();
            pieces.into_iter().for_each(|piece| whole.merge(piece));
            whole.merge(rest);
            journal.record_part(part, &whole)?;
            rest = whole;
        } else {
            pieces
                .into_iter()
                .for_each(|piece| self.partial.merge(piece));
        }
        self.partial.merge(rest);
        let (done, of) = (self.leases.rows_done(), self.leases.rows());
        (self.watch)(JobProgress::Rows { done, of });
        Ok(())
    }
}

/// Computes on threads, each with its device. Returns the number of parts with a block computed by
/// a device.
fn run_here(
    run: &mut RunningJob<'_>,
    prepared: &PartComputer,
    threads: Vec<Option<Arc<dyn ComputeDevice>>>,
    choice: DeviceChoice,
) -> Result<u64, Error> {
    let first = std::iter::from_fn(|| run.leases.lease(0)).collect::<Vec<_>>();
    let parts = Mutex::new(first.into_iter());
    let (sender, results) = channel();
    let compute = |sender: &Sender<_>, device: Option<Arc<dyn ComputeDevice>>| {
        let mut scratch = Scratch::on(device, choice);
        loop {
            let Some(part) = lock(&parts).next() else {
                return;
            };
            let partial = prepared.compute(part, &mut scratch);
            if sender.send((part, partial, scratch.on_device())).is_err() {
                return; // another part failed
            }
        }
    };
    std::thread::scope(|scope| {
        for device in threads {
            let (sender, compute) = (sender.clone(), &compute);
            let thread = std::thread::Builder::new().name("part".to_owned());
            let started = thread.spawn_scoped(scope, move || compute(&sender, device));
            started.map_err(|source| Error::Thread { source })?;
        }
        drop(sender);
        let results = results; // dropped on an error, so that the threads end
        let mut device_parts = 0;
        for (part, result, on_device) in &results {
            run.finish(part.id, 0, Vec::new(), result?)?;
            device_parts += u64::from(on_device);
        }
        Ok(device_parts)
    })
}

/// Worker processes.
#[derive(Debug)]
struct ProcessPool {
    workers: Workers<ToWorker, FromWorker>,
    alive: Vec<bool>,
    /// Names of their machines for people; empty for this one, none where all are on this one.
    hosts: Vec<String>,
    lost: u32,
    /// Reason for the last loss of a worker.
    last: String,
    /// Ends of workers that were not reported yet.
    untold: BTreeMap<u32, String>,
    /// Threads of each, as jobs are planned.
    threads: usize,
    /// Threads of each, as it has said; of those here before.
    said: Vec<Option<usize>>,
    /// By worker: whether it is ready for the current job; others do not read yet.
    ready: Vec<bool>,
    /// Number of the job under way.
    job: u64,
    /// Fingerprint of the inputs here.
    inputs: u64,
    /// Destination of rows that workers on other machines send.
    sink: Option<Arc<dyn Sink>>,
    /// Parts with at least one block computed by a device.
    device_parts: u64,
    /// Partial results received for parts in progress.
    pieces: Pieces,
}

impl ProcessPool {
    fn run(&mut self, run: &mut RunningJob<'_>) -> Result<(), Error> {
        self.job += 1;
        self.pieces.clear();
        self.ready.fill(false);
        for rank in 0..self.workers.count() {
            let message = ToWorker::Job {
                job: self.job,
                task: Box::new(run.task.clone()),
            };
            if self.alive[rank as usize] {
                self.send(Rank(rank), &message);
            }
        }
        while !run.leases.is_done() {
            if !self.alive.contains(&true) {
                let last = self.last.clone();
                return Err(Error::Lost { last });
            }
            self.turn(run)?;
            self.return_leases(run);
        }
        Ok(())
    }

    /// Handles some events.
    fn turn(&mut self, run: &mut RunningJob<'_>) -> Result<(), Error> {
        let mut wait = LOOK_EVERY;
        for _ in 0..EVENTS_AT_ONCE {
            if run.leases.is_done() {
                break;
            }
            let Some(event) = self.workers.recv(wait) else {
                break;
            };
            self.take(event, run)?;
            wait = Duration::ZERO;
        }
        Ok(())
    }

    fn take(&mut self, event: Event<FromWorker>, run: &mut RunningJob<'_>) -> Result<(), Error> {
        let text = event.to_string();
        match event {
            Event::Message { rank, message } => self.handle_message(rank, message, run),
            Event::Exited { rank, .. }
            | Event::Silent { rank, .. }
            | Event::Garbled { rank, .. }
            | Event::Gone { rank, .. } => {
                self.lose(rank, text);
                Ok(())
            }
        }
    }

    fn handle_message(
        &mut self,
        from: Rank,
        message: FromWorker,
        run: &mut RunningJob<'_>,
    ) -> Result<(), Error> {
        if !self.alive[from.0 as usize] {
            return Ok(()); // others have its parts
        }
        match message {
            FromWorker::Ready {
                job,
                inputs,
                threads,
            } if job == self.job => {
                if inputs != self.inputs {
                    let worker = self.name(from);
                    let why = "it has other inputs of the same names".to_owned();
                    return self.refuse(from, why, Error::OtherInputs { worker });
                }
                let threads = threads.clamp(1, THREADS_MAX);
                self.said[from.0 as usize] = Some(threads);
                self.ready[from.0 as usize] = true;
                let parts = self.ahead(from, threads, run.task);
                self.lease(from, parts, run);
            }
            FromWorker::Done {
                job,
                part,
                partial,
                on_device,
            } if job == self.job => {
                self.device_parts += u64::from(on_device);
                self.finish(from, part, partial, run)?;
            }
            FromWorker::Piece { job, part, partial } if job == self.job => {
                let held = run.leases.held(part, from.0);
                if !held.is_some_and(|part| self.pieces.keep(from.0, part, partial, run.task)) {
                    self.lose(from, format!("{from} sent groups that are not of its part"));
                }
            }
            FromWorker::Rows {
                job,
                first_row,
                values,
            } if job == self.job => self.write(from, first_row, &values.0, run)?,
            // Messages about a finished job.
            FromWorker::Ready { .. }
            | FromWorker::Piece { .. }
            | FromWorker::Rows { .. }
            | FromWorker::Done { .. } => {}
            FromWorker::Failed { reason } => {
                let worker = self.name(from);
                let why = reason.clone();
                return self.refuse(from, why, Error::Worker { worker, reason });
            }
        }
        Ok(())
    }

    /// Whether a worker is on another machine, with which this one shares no files.
    fn is_apart(&self, rank: Rank) -> bool {
        let host = self.hosts.get(rank.0 as usize);
        host.is_some_and(|host| !host.is_empty())
    }

    /// Excludes a worker of another machine. An error of a worker on this machine would recur in
    /// others: that ends the job.
    fn refuse(&mut self, from: Rank, why: String, error: Error) -> Result<(), Error> {
        if !self.is_apart(from) {
            return Err(error);
        }
        self.lose(from, why);
        Ok(())
    }

    /// Adds the result of a part, and leases the worker another part. A worker with an impossible
    /// result is lost.
    fn finish(
        &mut self,
        from: Rank,
        part: u64,
        partial: PartialResult,
        run: &mut RunningJob<'_>,
    ) -> Result<(), Error> {
        let held = run.leases.held(part, from.0);
        let kind = &run.task.kind;
        let held = held.filter(|part| partial.is_of(kind) && partial.counts(kind, part.rows));
        let pieces = held.and_then(|part| self.pieces.take(from.0, part, &partial, run.task));
        let Some(pieces) = pieces else {
            self.lose(
                from,
                format!("{from} sent a result that is not of its part"),
            );
            return Ok(());
        };
        run.finish(part, from.0, pieces, partial)?;
        self.lease(from, 1, run);
        Ok(())
    }

    /// Writes rows that a worker of another machine has sent: all of one part that it holds.
    fn write(
        &mut self,
        from: Rank,
        first_row: u64,
        values: &[u8],
        run: &RunningJob<'_>,
    ) -> Result<(), Error> {
        let width = run.task.dtype_written().bytes();
        let values = unpack(values, width);
        let rows = values.as_ref().map_or(0, Vec::len) / width;
        let end = first_row.saturating_add(rows as u64);
        let has = |part: RowPartition| {
            let rows = run.task.rows_written_by(part);
            rows.start <= first_row && end <= rows.end
        };
        let is_its = run.leases.held_by(from.0).any(has) && self.is_apart(from);
        let Some((sink, values)) = self.sink.clone().zip(values).filter(|_| is_its) else {
            self.lose(from, format!("{from} sent rows that are not of its part"));
            return Ok(());
        };
        sink.write_bytes(first_row, &values)
    }

    /// Parts that a worker of `threads` threads gets at first. Parts of a sort take memory, which
    /// is planned for all threads.
    fn ahead(&self, rank: Rank, threads: usize, task: &JobSpec) -> usize {
        let sorts = matches!(task.kind, Kind::Scatter(_) | Kind::Gather(_));
        match sorts {
            true if threads > self.threads || self.is_apart(rank) => threads.min(self.threads),
            _ => PARTS_AHEAD * threads,
        }
    }

    /// The name for people of a worker.
    fn name(&self, rank: Rank) -> String {
        match self.hosts.get(rank.0 as usize) {
            Some(host) if self.is_apart(rank) => format!("worker on {host}"),
            _ => format!("worker {}", rank.0),
        }
    }

    fn lease(&mut self, to: Rank, parts: usize, run: &mut RunningJob<'_>) {
        for _ in 0..parts {
            if !self.alive[to.0 as usize] {
                return;
            }
            let Some(part) = run.leases.lease(to.0) else {
                return;
            };
            self.send(to, &ToWorker::Lease(part));
        }
    }

    fn send(&mut self, to: Rank, message: &ToWorker) {
        match self.workers.send(to, message) {
            // The event of its end follows within `CLOSED_LIMIT` of the monitor, with the reason.
            Ok(()) | Err(ClusterError::Closed { .. }) => {}
            Err(error) => self.lose(to, error.to_string()),
        }
    }

    fn lose(&mut self, rank: Rank, why: String) {
        if std::mem::replace(&mut self.alive[rank.0 as usize], false) {
            self.lost += 1;
            self.last = match self.hosts.get(rank.0 as usize) {
                Some(host) if self.is_apart(rank) => format!("{host}: {why}"),
                _ => why,
            };
            self.untold.insert(rank.0, self.last.clone());
            self.pieces.lose(rank.0);
        }
    }

    /// Gives the parts of lost workers to the others, which may all be idle by now. A worker that
    /// is not ready gets some when it is.
    fn return_leases(&mut self, run: &mut RunningJob<'_>) {
        for rank in 0..self.workers.count() {
            if self.alive[rank as usize] {
                continue;
            }
            let parts = run.leases.lose(rank);
            let why = self.untold.remove(&rank);
            if parts == 0 && why.is_none() {
                continue;
            }
            let why = why.unwrap_or_else(|| self.last.clone());
            (run.watch)(JobProgress::Lost { why, parts });
            let takes = |other: &u32| self.alive[*other as usize] && self.ready[*other as usize];
            let others: Vec<u32> = (0..self.workers.count()).filter(takes).collect();
            for (_, other) in (0..parts).zip(others.iter().cycle()) {
                self.lease(Rank(*other), 1, run);
            }
        }
    }
}

impl Drop for ProcessPool {
    fn drop(&mut self) {
        self.workers.stop(GRACE);
    }
}

/// An error with its causes, as one line.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
