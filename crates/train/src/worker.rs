//! The worker process: computes leaves, or stages of leaves, for its parent.
//!
//! The parent is a [`TrainingWorkers`](crate::Crew). Values and gradients are exchanged as files in
//! the run's folder, messages over the control channel.

mod rows;
mod stage;

use std::convert::Infallible;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use paceline_cluster::Control;
use paceline_model::adapter::files::tensors;

use crate::activity::Activity;
use crate::class::Means;
use crate::drafter::{self, DrafterRun};
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, WorkerJob, params_file, roots_file};
use crate::run::TrainingRun;
use crate::shard::{RankWorker, ShardRole};
use crate::workers::{LeafModel, publish};
use stage::StageWorker;

/// Longest wait for the first message.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Time that a failed worker waits to be ended, so that the parent reads the reason first.
const LAST_WORDS: Duration = Duration::from_millis(200);

pub(crate) type RunChannel = Control<ToWorker, FromWorker>;

/// Runs a worker on the control channel that is this process's standard input, until the parent
/// ends it or is gone. Returns only with an error, which the parent has received.
///
/// # Errors
/// Errors of the work; [`Error::Cluster`] when there is no parent.
pub fn run<M: Into<Means>>(
    means: impl FnOnce(usize) -> std::io::Result<M>,
) -> Result<Infallible, Error> {
    let channel = Arc::new(RunChannel::from_stdin()?);
    let mut is_ready = false;
    let error = match work(&channel, means, &mut is_ready) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    if is_ready && matches!(error, Error::Model(_)) {
        // A device failed or hangs: this worker ends, and others get its leaves.
        return Err(error);
    }
    let reason = error_chain(&error);
    if channel.send(&FromWorker::Failed { reason }).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
    Err(error)
}

fn work<M: Into<Means>>(
    channel: &Arc<RunChannel>,
    means: impl FnOnce(usize) -> std::io::Result<M>,
    is_ready: &mut bool,
) -> Result<Infallible, Error> {
    let (job, threads, exchange, stage, shard) = match channel.recv(START_LIMIT)? {
        Some(ToWorker::Start {
            job,
            threads,
            exchange,
            stage,
            shard,
        }) => (job, threads, exchange, stage, shard),
        other => return Err(unexpected(other.as_ref(), "Start")),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if threads == 0 { cores } else { threads };
    let means = means(threads).map_err(|source| Error::Threads { threads, source })?;
    let means: Means = means.into();
    let job = match *job {
        WorkerJob::Model(job) => job,
        WorkerJob::Drafter(job) => {
            let run = DrafterRun::open(&job, Arc::new(means.kernels))?;
            channel.send(&run.ready()?)?;
            *is_ready = true;
            return drafter::work(channel, &run, exchange);
        }
    };
    let run = TrainingRun::open_stage(&job, means, (stage, shard))?;
    let engine = run.net.ready()?;
    channel.send(&FromWorker::Ready {
        model: run.net.fingerprint().to_owned(),
        data: run.examples.digest.clone(),
        engine,
        notes: run.net.notes().to_vec(),
    })?;
    *is_ready = true;
    if let Some(role) = shard.filter(|role| role.sharding.has_state()) {
        let activity = watched(channel)?;
        let mut worker = RankWorker::new((channel, &activity), run, exchange, role);
        loop {
            if let Some(message) = channel.recv(Duration::MAX)? {
                worker.handle(message)?;
            }
        }
    }
    if stage.of > 1 || shard.is_some() {
        let activity = watched(channel)?;
        let cuts_experts = shard.and_then(ShardRole::of_experts).is_some();
        let mut worker = StageWorker::new((channel, &activity), (run, cuts_experts), exchange);
        loop {
            if let Some(message) = channel.recv(Duration::MAX)? {
                worker.handle(message)?;
            }
        }
    }
    LeafWorker::new(channel, &run, exchange).serve()
}

/// The activity of a rank, which is watched from now on: the parent gets a message when it hangs.
fn watched(channel: &Arc<RunChannel>) -> Result<Arc<Activity>, Error> {
    let (activity, channel) = (Arc::<Activity>::default(), Arc::clone(channel));
    let tell = move |limit_s| drop(channel.send(&FromWorker::Hangs { limit_s }));
    let started = activity.watch(tell);
    started.map_err(|source| Error::Threads { threads: 1, source })?;
    Ok(activity)
}

/// A worker that has loaded the model.
pub(crate) struct LeafWorker<'a, L> {
    channel: &'a RunChannel,
    model: L,
    exchange: PathBuf,
    /// A step, and the values before it.
    values: (Option<u64>, Vec<f32>),
}

impl<'a, L: LeafModel> LeafWorker<'a, L> {
    pub(crate) const fn new(channel: &'a RunChannel, model: L, exchange: PathBuf) -> Self {
        Self {
            channel,
            model,
            exchange,
            values: (None, Vec::new()),
        }
    }

    /// Computes the leaves that the parent asks for. Returns only with an error.
    pub(crate) fn serve(mut self) -> Result<Infallible, Error> {
        loop {
            match self.channel.recv(Duration::MAX)? {
                Some(ToWorker::Compute { step, start, end }) => self.compute(step, start..end)?,
                None => {}
                other => return Err(unexpected(other.as_ref(), "Compute")),
            }
        }
    }

    /// Reads the values before a step. False when the step is over: its leaves were others' before
    /// this process read the message about them.
    fn load_parameters(&mut self, step: u64) -> Result<bool, Error> {
        if self.values.0 == Some(step) {
            return Ok(true);
        }
        let path = self.exchange.join(params_file(step, 0));
        match std::fs::read(&path) {
            Ok(bytes) => {
                self.values = (Some(step), tensors::floats(&bytes));
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::file("read", &path)(error)),
        }
    }

    /// Leaves of the whole model, part by part.
    fn compute(&mut self, step: u64, leaves: Range<usize>) -> Result<(), Error> {
        if !self.load_parameters(step)? {
            return Ok(());
        }
        let (start, end) = (leaves.start, leaves.end);
        let (channel, exchange) = (self.channel, &self.exchange);
        let mut tell = |part: usize, roots: &[f32]| -> Result<(), Error> {
            let digest = publish(exchange, &roots_file(step, start, end, part), roots)?;
            let part = FromWorker::Part {
                step,
                start,
                end,
                part,
                digest,
            };
            Ok(channel.send(&part)?)
        };
        let losses = (self.model).compute(&self.values.1, (step, leaves), &mut tell)?;
        let done = FromWorker::Done {
            step,
            start,
            end,
            losses: losses.into_iter().map(f64::to_bits).collect(),
        };
        Ok(self.channel.send(&done)?)
    }
}

pub(crate) const fn unexpected(message: Option<&ToWorker>, expected: &'static str) -> Error {
    let got = match message {
        Some(ToWorker::Start { .. }) => "Start",
        Some(ToWorker::Compute { .. }) => "Compute",
        Some(ToWorker::Answer { .. }) => "Answer",
        Some(ToWorker::Learn) => "Learn",
        Some(ToWorker::Pipe { .. }) => "Pipe",
        Some(ToWorker::Listen { .. }) => "Listen",
        Some(ToWorker::Form { .. }) => "Form",
        Some(ToWorker::Step { .. }) => "Step",
        Some(ToWorker::Judge { .. }) => "Judge",
        Some(ToWorker::Save { .. }) => "Save",
        None => "nothing",
    };
    Error::Protocol { got, expected }
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
