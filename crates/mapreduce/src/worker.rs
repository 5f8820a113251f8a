//! What a worker process runs: its parent's parts, on threads of its own.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::Control;

use crate::crew::said;
use crate::messages::{FromWorker, ToWorker};
use crate::{Choice, Device, Error, Part, Prepared, Scratch};

type Channel = Arc<Control<ToWorker, FromWorker>>;

/// A part of a job.
type Work = (u64, Arc<Prepared>, Part);

/// What a worker on another machine says first. Its version is in it: messages have no other.
pub const GREETING: &str = concat!("paceline-mapreduce-worker ", env!("CARGO_PKG_VERSION"));

/// Longest wait for the first message.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Parts that may wait for a thread: far more than a parent leases.
const WAITING_MAX: usize = 4096;

/// How long a worker that cannot go on waits to be ended, so that the parent reads why first.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Runs a worker on the control channel that is this process's standard input, until the parent
/// ends it or is gone; returns only when something failed, which the parent has been told.
///
/// # Errors
/// What failed; [`Error::Cluster`] when there is no parent.
pub fn run() -> Result<Infallible, Error> {
    run_on(Control::from_stdin()?)
}

/// As [`run`], on standard input and output: for a worker that `ssh` has started, at the other end
/// of [`bridge`](paceline_cluster::bridge).
///
/// # Errors
/// As of [`run`].
pub fn run_over_stdio() -> Result<Infallible, Error> {
    run_on(Control::from_stdio(GREETING)?)
}

fn run_on(channel: Control<ToWorker, FromWorker>) -> Result<Infallible, Error> {
    let channel: Channel = Arc::new(channel);
    let error = match work(&channel) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    tell(&channel, &error);
    Err(error)
}

fn tell(channel: &Channel, error: &dyn std::error::Error) {
    let reason = said(error);
    if channel.send(&FromWorker::Failed { reason }).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
}

fn work(channel: &Channel) -> Result<Infallible, Error> {
    let (threads, choice) = match channel.recv(START_LIMIT)? {
        Some(ToWorker::Start { threads, device }) => (threads, device),
        other => return Err(unexpected(other.as_ref(), "Start")),
    };
    let device = choice.open()?;
    let (sender, waiting) = sync_channel::<Work>(WAITING_MAX);
    let waiting = Arc::new(Mutex::new(waiting));
    let devices = choice.threads(cores_for(threads), device.as_ref());
    let threads = devices.len();
    for device in devices {
        let (channel, waiting) = (Arc::clone(channel), Arc::clone(&waiting));
        let thread = std::thread::Builder::new().name("part".to_owned());
        let started = thread.spawn(move || compute(&channel, &waiting, device, choice));
        started.map_err(|source| Error::Thread { source })?;
    }
    let mut current = None;
    loop {
        match (channel.recv(Duration::MAX)?, &current) {
            (Some(ToWorker::Job { job, task }), _) => {
                current = Some((job, Arc::new(task.prepare()?)));
                let inputs = task.looks()?;
                let ready = FromWorker::Ready {
                    job,
                    inputs,
                    threads,
                };
                channel.send(&ready)?;
            }
            (Some(ToWorker::Lease(part)), Some((job, prepared))) => {
                // The threads never end before the process.
                let _ = sender.send((*job, Arc::clone(prepared), part));
            }
            (None, _) => {}
            (other, _) => return Err(unexpected(other.as_ref(), "Job")),
        }
    }
}

/// So many threads, or one for each core.
pub(crate) fn cores_for(threads: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    match threads {
        0 => cores(),
        threads => threads,
    }
}

fn compute(
    channel: &Channel,
    waiting: &Mutex<Receiver<Work>>,
    device: Option<Arc<dyn Device>>,
    choice: Choice,
) {
    let mut scratch = Scratch::on(device, choice);
    loop {
        let next = lock(waiting).recv();
        let Ok((job, prepared, part)) = next else {
            return;
        };
        let computed = prepared.compute(part, &mut scratch);
        let on_device = scratch.on_device();
        let sent = computed.and_then(|partial| {
            let part = part.id;
            let (pieces, partial) = partial.into_pieces();
            // A parent that is gone ends this process by the reader of the channel.
            for partial in pieces {
                channel.send(&FromWorker::Piece { job, part, partial })?;
            }
            let done = FromWorker::Done {
                job,
                part,
                partial,
                on_device,
            };
            Ok(channel.send(&done)?)
        });
        if let Err(error) = sent {
            tell(channel, &error);
            return;
        }
    }
}

const fn unexpected(message: Option<&ToWorker>, expected: &'static str) -> Error {
    let got = match message {
        Some(ToWorker::Start { .. }) => "Start",
        Some(ToWorker::Job { .. }) => "Job",
        Some(ToWorker::Lease(_)) => "Lease",
        None => "nothing",
    };
    Error::Protocol { got, expected }
}
