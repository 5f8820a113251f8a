//! The worker's end of the connection to a remote run.

use std::convert::Infallible;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_base::Rank;
use paceline_cluster::sandbox::Sandbox;
use paceline_cluster::workers::{Event, WorkerLimits, WorkerSpec, Workers};
use paceline_process::Program;

use super::frames::{FileReceiver, FrameConnection, broken, is_inside};
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker};
use crate::stage::ModelStage;

/// Poll interval of both connections of this process.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Longest silence of the worker, as on the run's machine.
const SILENCE: Duration = Duration::from_secs(5);

/// Options of a machine that runs workers of remote runs.
#[allow(
    missing_debug_implementations,
    reason = "functions have nothing to show"
)]
pub struct FarSpec<'a> {
    /// A program that is [`worker::run`](crate::worker::run).
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// All of its environment.
    pub env: Vec<(OsString, OsString)>,
    /// A folder for files, which the caller removes.
    pub scratch: &'a Path,
    /// Finds a model by its user's name or its path on the run's machine.
    pub find: &'a dyn Fn(&str, &Path) -> Option<PathBuf>,
}

/// Runs one worker for the run at the program `run`. Returns when the connection ends, or
/// with an error that the other side has received too.
///
/// # Errors
/// [`Error::Line`] at the end of the connection; [`Error::Cluster`], [`Error::Files`].
pub fn run_worker(run: Program, spec: FarSpec<'_>) -> Result<Infallible, Error> {
    let line = FrameConnection::new(run)?;
    line.send(b'h', &[])?;
    let mut far = Far {
        files: FileReceiver::new(spec.scratch.to_owned()),
        spec,
        name: String::new(),
        waiting: None,
        worker: None,
        stage: ModelStage::WHOLE,
        step: String::new(),
    };
    loop {
        if let Err(error) = far.poll(&line) {
            // Lost if the connection itself failed.
            let _ = line.send(b'x', error.to_string().as_bytes());
            return Err(error);
        }
    }
}

struct Far<'a> {
    spec: FarSpec<'a>,
    files: FileReceiver,
    /// The user's name of the model.
    name: String,
    /// Message that starts the worker, while the model is on its way.
    waiting: Option<ToWorker>,
    worker: Option<Workers<ToWorker, FromWorker>>,
    stage: ModelStage,
    /// Folder of the step under way.
    step: String,
}

impl Far<'_> {
    /// Handles at most one frame and one event; waits for the frame for a moment.
    fn poll(&mut self, line: &FrameConnection) -> Result<(), Error> {
        if let Some((kind, bytes)) = line.recv(LOOK_EVERY)? {
            self.take(line, kind, &bytes)?;
        }
        let event = match &self.worker {
            Some(worker) => worker.recv(Duration::ZERO),
            None => None,
        };
        match event {
            None => Ok(()),
            Some(Event::Message { message, .. }) => self.pass_on(line, &message),
            Some(other) => Err(broken(other)),
        }
    }

    fn take(&mut self, line: &FrameConnection, kind: u8, bytes: &[u8]) -> Result<(), Error> {
        match kind {
            b'f' => {
                self.forget_steps(bytes);
                self.files.begin(bytes)
            }
            b'd' => self.files.data(bytes),
            b's' => {
                self.name = String::from_utf8_lossy(bytes).into_owned();
                Ok(())
            }
            b'm' => match serde_json::from_slice(bytes).map_err(broken)? {
                start @ ToWorker::Start { .. } => self.start(line, start),
                other => match &self.worker {
                    Some(worker) => Ok(worker.send(Rank(0), &other)?),
                    None => Err(broken("a message before the worker was started")),
                },
            },
            b'e' => {
                let name = String::from_utf8_lossy(bytes);
                if name != "model" && !(name.starts_with("model/") && is_inside(&name)) {
                    return Err(broken(format!("a model called {name:?}")));
                }
                let model = self.files.folder().join(&*name);
                match self.waiting.take() {
                    Some(start) => self.spawn(start, &model),
                    None => Err(broken("a model that nobody asked for")),
                }
            }
            other => Err(broken(format!("a frame of kind {other}"))),
        }
    }

    /// Starts the worker, or requests its model first.
    fn start(&mut self, line: &FrameConnection, mut start: ToWorker) -> Result<(), Error> {
        let ToWorker::Start { job, .. } = &mut start else {
            return Err(broken("a message that is no start"));
        };
        match (self.spec.find)(&self.name, job.files().model) {
            Some(model) => self.spawn(start, &model),
            None => {
                self.waiting = Some(start);
                line.send(b'n', &[])
            }
        }
    }

    fn spawn(&mut self, start: ToWorker, model: &Path) -> Result<(), Error> {
        let ToWorker::Start {
            mut job,
            threads,
            stage,
            shard,
            ..
        } = start
        else {
            return Err(broken("a message that is no start"));
        };
        let folder = self.files.folder();
        let files = job.files();
        *files.model = model.to_owned();
        *files.data = folder.join("data/train.jsonl");
        let valid = files.valid.iter_mut();
        valid.for_each(|valid| *valid = folder.join("data/valid.jsonl"));
        let exchange = folder.to_owned();
        let mut spec = WorkerSpec::new(self.spec.program.clone(), vec![self.spec.args.clone()]);
        (spec.env, spec.env_alone) = (self.spec.env.clone(), true);
        spec.sandbox = Some(Sandbox::Worker);
        spec.writable = vec![exchange.clone()];
        spec.limits = WorkerLimits {
            silence: SILENCE,
            write: SILENCE,
            ..WorkerLimits::default()
        };
        let worker = Workers::spawn(spec)?;
        let start = ToWorker::Start {
            job,
            threads,
            exchange,
            stage,
            shard,
        };
        worker.send(Rank(0), &start)?;
        (self.stage, self.worker) = (stage, Some(worker));
        Ok(())
    }

    /// The files that a message speaks of, then the message.
    fn pass_on(&self, line: &FrameConnection, message: &FromWorker) -> Result<(), Error> {
        for name in message.output_files(self.stage) {
            line.send_file(&self.files.folder().join(&name), &name)?;
        }
        let text = serde_json::to_vec(message).map_err(broken)?;
        line.send(b'm', &text)
    }

    /// Removes the previous step's files when the first file of another step arrives.
    fn forget_steps(&mut self, frame: &[u8]) {
        let name = String::from_utf8_lossy(frame.get(8..).unwrap_or_default());
        let step = name.split('/').next().unwrap_or_default();
        if step != self.step && step.parse::<u64>().is_ok() {
            if !self.step.is_empty() {
                // Remaining files go with the folder.
                let _ = std::fs::remove_dir_all(self.files.folder().join(&self.step));
            }
            self.step = step.to_owned();
        }
    }
}
