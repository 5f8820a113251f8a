//! The run's end of the connection to a remote worker.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::lock;
use paceline_cluster::Control;
use paceline_model::ModelSource;
use paceline_process::Program;

use super::frames::{FileReceiver, FrameConnection, FrameSender, broken};
use crate::data::file_of;
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker, WorkerJob};
use crate::shard::ShardRole;
use crate::stage::ModelStage;

/// Longest wait for the first message of the run, and for the other end to answer.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Poll interval of both connections of this process.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type WorkerChannel = Control<ToWorker, FromWorker>;

/// Forwards between the run and a worker at the other end of the connection that `connect` makes,
/// where [`worker_side`](super::far()) runs. The run's control channel is this process's standard
/// input. `model` is the user's name for the model. Returns only with an error.
///
/// # Errors
/// [`Error::Line`] at the end of the connection, with its reason; [`Error::Files`].
pub fn forward_to_worker(
    connect: impl FnOnce() -> Result<Program, Error>,
    model: &str,
) -> Result<Infallible, Error> {
    let channel = Arc::new(WorkerChannel::from_stdin()?);
    let line = FrameConnection::new(connect()?)?;
    while line.recv(LOOK_EVERY)?.is_none_or(|(kind, _)| kind != b'h') {
        if line.age() > START_LIMIT {
            return Err(broken("nobody is there"));
        }
    }
    let first = channel.recv(START_LIMIT)?;
    let Some(ToWorker::Start {
        mut job,
        threads,
        exchange,
        stage,
        shard,
    }) = first
    else {
        return Err(broken("the run did not say what it is"));
    };
    let wants_model = Arc::new(AtomicBool::new(false));
    let failed: Arc<Mutex<Option<Error>>> = Arc::default();
    let outgoing = FrameForwarder {
        channel: Arc::clone(&channel),
        out: line.out(),
        name: model.to_owned(),
        model: job.files().model.clone(),
        folder: exchange.clone(),
        stage,
        shard,
        sent: BTreeSet::new(),
        wants_model: Arc::clone(&wants_model),
    };
    // A separate thread sends. Frames are received even while a large file is sent, so the two
    // sides never deadlock, and a side that stops reading is noticed.
    let told = Arc::clone(&failed);
    let send = move || {
        let error = match outgoing.run(*job, threads) {
            Ok(never) => match never {},
            Err(error) => error,
        };
        *lock(&told) = Some(error);
    };
    let thread = std::thread::Builder::new().name("outgoing".to_owned());
    let started = thread.spawn(send);
    started.map_err(|source| Error::Threads { threads: 1, source })?;
    let mut files = FileReceiver::new(exchange);
    loop {
        if let Some(error) = lock(&failed).take() {
            return Err(error);
        }
        let Some((kind, bytes)) = line.recv(LOOK_EVERY)? else {
            continue;
        };
        match kind {
            b'f' => files.begin(&bytes)?,
            b'd' => files.data(&bytes)?,
            b'n' => wants_model.store(true, Ordering::SeqCst),
            b'm' => {
                let message: FromWorker = serde_json::from_slice(&bytes).map_err(broken)?;
                channel.send(&message)?;
            }
            other => return Err(broken(format!("a frame of kind {other}"))),
        }
    }
}

/// Messages and files for the other end.
struct FrameForwarder {
    channel: Arc<WorkerChannel>,
    out: FrameSender,
    /// The user's name for the model.
    name: String,
    model: PathBuf,
    /// The run's folder of exchanged files.
    folder: PathBuf,
    stage: ModelStage,
    shard: Option<ShardRole>,
    /// Files of the current step that the other end has.
    sent: BTreeSet<String>,
    wants_model: Arc<AtomicBool>,
}

impl FrameForwarder {
    fn run(mut self, job: WorkerJob, threads: usize) -> Result<Infallible, Error> {
        self.out.send(b's', self.name.as_bytes())?;
        self.send_data(job, threads)?;
        loop {
            if self.wants_model.swap(false, Ordering::SeqCst) {
                self.send_model()?;
            }
            if let Some(message) = self.channel.recv(LOOK_EVERY)? {
                self.send_files(&message)?;
                self.pass_on(&message)?;
            }
        }
    }

    /// Sends the data, and the job with paths below the other end's folder.
    fn send_data(&self, mut job: WorkerJob, threads: usize) -> Result<(), Error> {
        let files = job.files();
        let beside = || files.data.join("valid.jsonl");
        let valid = file_of(&files.valid.take().unwrap_or_else(beside), "valid");
        let train = file_of(files.data, "train");
        self.out.send_file(&train, "data/train.jsonl")?;
        *files.data = "data/train.jsonl".into();
        if valid.is_file() {
            self.out.send_file(&valid, "data/valid.jsonl")?;
            *files.valid = Some("data/valid.jsonl".into());
        }
        let start = ToWorker::Start {
            job: Box::new(job),
            threads,
            exchange: PathBuf::new(),
            stage: self.stage,
            shard: self.shard,
        };
        self.pass_on(&start)
    }

    fn pass_on(&self, message: &ToWorker) -> Result<(), Error> {
        let text = serde_json::to_vec(message).map_err(broken)?;
        self.out.send(b'm', &text)
    }

    /// Sends the files that a message names and the other end lacks.
    fn send_files(&mut self, message: &ToWorker) -> Result<(), Error> {
        for name in message.needs(self.stage) {
            let step = name.split('/').next().unwrap_or_default();
            let same = format!("{step}/");
            self.sent.retain(|name| name.starts_with(&same));
            let path = self.folder.join(&name);
            // A finished step has no files any more: its message goes alone, and the worker skips
            // it.
            if !self.sent.contains(&name) && path.is_file() {
                self.out.send_file(&path, &name)?;
                self.sent.insert(name);
            }
        }
        Ok(())
    }

    /// The model's files, for a machine that has none.
    fn send_model(&self) -> Result<(), Error> {
        let paths: Vec<PathBuf> = match ModelSource::open(&self.model)? {
            ModelSource::Gguf(file) => file.paths().map(Path::to_owned).collect(),
            ModelSource::Hf(folder) => files_in(folder.path())?,
        };
        for path in &paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.out.send_file(path, &format!("model/{name}"))?;
        }
        let name = self.model.file_name().unwrap_or_default();
        let there = match self.model.is_dir() {
            true => "model".to_owned(),
            false => format!("model/{}", name.to_string_lossy()),
        };
        self.out.send(b'e', there.as_bytes())
    }
}

/// Files of a folder, without those in folders of it.
fn files_in(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::file("list", folder))? {
        let path = entry.map_err(Error::file("list", folder))?.path();
        if path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}
