//! The worker process: computes the parts that its parent leases to it, on threads of its own.
//!
//! The parent is a [`JobWorkers`](crate::Crew), here or on another machine. A worker opens only the
//! files that [`FileAccess`] allows.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::Control;

use crate::messages::{FromWorker, ToWorker};
use crate::parent::{ParentChannel, ParentConnection};
use crate::workers::error_chain;
use crate::{
    ComputeDevice, DeviceChoice, Error, InputSource, JobSpec, PartComputer, RowPartition, Scratch,
};

type WorkItem = (u64, Arc<PartComputer>, RowPartition);

/// First line from a worker on another machine. Its version is in it: messages have no other.
pub const GREETING: &str = concat!("paceline-mapreduce-worker ", env!("CARGO_PKG_VERSION"));

/// Longest wait for the first message.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Parts that may wait for a thread: far more than a parent leases.
const WAITING_MAX: usize = 4096;

/// Time that a failed worker waits to be ended, so that the parent reads the reason first.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Files named by the parent that a worker may open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// All, to read and to write: the parent is on the same machine.
    Shared,
    /// Inputs. What is to be written goes to the parent.
    Inputs,
    /// Inputs below these folders, whose paths are canonical. Output goes to the parent, which may
    /// belong to another user.
    Lent(Vec<PathBuf>),
}

/// Runs a worker on the control channel that is this process's standard input, until the parent
/// ends it or is gone. Returns only with an error, which the parent has received.
///
/// # Errors
/// Errors of the work; [`Error::Cluster`] when there is no parent.
pub fn run() -> Result<Infallible, Error> {
    run_on(Control::from_stdin()?, &FileAccess::Shared)
}

/// Like [`run`], on standard input and output: for a worker on another machine, at the other end of
/// [`bridge`](paceline_cluster::bridge).
pub fn run_over_stdio(files: &FileAccess) -> Result<Infallible, Error> {
    run_on(Control::from_stdio(GREETING)?, files)
}

fn run_on(channel: Control<ToWorker, FromWorker>, files: &FileAccess) -> Result<Infallible, Error> {
    let channel: ParentChannel = Arc::new(channel);
    let error = match work(&channel, files) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    report_failure(&channel, &error);
    Err(error)
}

fn report_failure(channel: &ParentChannel, error: &dyn std::error::Error) {
    let reason = error_chain(error);
    if channel.send(&FromWorker::Failed { reason }).is_ok() {
        std::thread::sleep(LAST_WORDS);
    }
}

/// A job that the next leases belong to.
struct Current {
    job: u64,
    prepared: Arc<PartComputer>,
    inputs: u64,
}

impl Current {
    fn open(
        job: u64,
        task: JobSpec,
        files: &FileAccess,
        channel: &ParentChannel,
    ) -> Result<Self, Error> {
        let dtype = task.dtype_written();
        let line = || Arc::new(ParentConnection::new(Arc::clone(channel), job, dtype));
        let (line, task) = match files {
            FileAccess::Shared => (None, task),
            FileAccess::Inputs => (Some(line()), task),
            FileAccess::Lent(folders) => (Some(line()), lent(task, folders)?),
        };
        let prepared = match &line {
            None => task.prepare()?,
            Some(line) => task.prepare_over(line)?,
        };
        Ok(Self {
            job,
            prepared: Arc::new(prepared),
            inputs: task.fingerprint()?,
        })
    }
}

/// A task with the canonical paths of its inputs, which must all lie below `folders`.
fn lent(mut task: JobSpec, folders: &[PathBuf]) -> Result<JobSpec, Error> {
    if let InputSource::Files(inputs) = &mut task.origin {
        for input in inputs {
            input.path = below(folders, &input.path)?;
        }
    }
    Ok(task)
}

/// The canonical path of a file below one of these folders. The error is the same for a file
/// elsewhere and for a missing one.
fn below(folders: &[PathBuf], path: &Path) -> Result<PathBuf, Error> {
    let real = std::fs::canonicalize(path).ok();
    let is_lent = |real: &PathBuf| folders.iter().any(|folder| real.starts_with(folder));
    real.filter(is_lent).ok_or_else(|| Error::NotLent {
        path: path.to_owned(),
    })
}

fn work(channel: &ParentChannel, files: &FileAccess) -> Result<Infallible, Error> {
    let (threads, choice) = match channel.recv(START_LIMIT)? {
        Some(ToWorker::Start { threads, device }) => (threads, device),
        other => return Err(unexpected(other.as_ref(), "Start")),
    };
    let device = choice.open()?;
    let (sender, waiting) = sync_channel::<WorkItem>(WAITING_MAX);
    let waiting = Arc::new(Mutex::new(waiting));
    let devices = choice.threads(cores_for(threads), device.as_ref());
    let threads = devices.len();
    for device in devices {
        let (channel, waiting) = (Arc::clone(channel), Arc::clone(&waiting));
        let thread = std::thread::Builder::new().name("part".to_owned());
        let started = thread.spawn(move || compute(&channel, &waiting, device, choice));
        started.map_err(|source| Error::Thread { source })?;
    }
    let mut current: Option<Current> = None;
    loop {
        match (channel.recv(Duration::MAX)?, &current) {
            (Some(ToWorker::Job { job, task }), _) => {
                let opened = Current::open(job, *task, files, channel)?;
                let inputs = opened.inputs;
                current = Some(opened);
                let ready = FromWorker::Ready {
                    job,
                    inputs,
                    threads,
                };
                channel.send(&ready)?;
            }
            (Some(ToWorker::Lease(part)), Some(current)) => {
                // The threads never end before the process.
                let _ = sender.send((current.job, Arc::clone(&current.prepared), part));
            }
            (None, _) => {}
            (other, _) => return Err(unexpected(other.as_ref(), "Job")),
        }
    }
}

/// `threads`, or one for each core if it is 0.
pub(crate) fn cores_for(threads: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    match threads {
        0 => cores(),
        threads => threads,
    }
}

fn compute(
    channel: &ParentChannel,
    waiting: &Mutex<Receiver<WorkItem>>,
    device: Option<Arc<dyn ComputeDevice>>,
    choice: DeviceChoice,
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
            report_failure(channel, &error);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_opened_but_those_of_lent_folders() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let lent = home.join("lent");
        std::fs::create_dir(&lent).unwrap();
        for name in ["lent/x.npy", "secret", "lentil"] {
            std::fs::write(home.join(name), "").unwrap();
        }
        std::os::unix::fs::symlink(home.join("secret"), lent.join("link")).unwrap();
        std::os::unix::fs::symlink(lent.join("x.npy"), home.join("way")).unwrap();
        let folders = [lent.clone()];
        for name in ["lent/x.npy", "lent/../lent/x.npy", "way"] {
            let path = below(&folders, &home.join(name)).unwrap();
            assert_eq!(path, lent.join("x.npy"), "{name}");
        }
        for name in ["secret", "lent/link", "lent/../secret", "lentil", "none"] {
            let refused = below(&folders, &home.join(name)).unwrap_err();
            assert!(matches!(refused, Error::NotLent { .. }), "{name}");
        }
        assert!(below(&[], &lent.join("x.npy")).is_err());
    }
}
