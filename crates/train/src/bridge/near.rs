//! The run's side.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_cluster::Control;
use paceline_model::Source;

use super::line::{Ends, Files, Line, broken};
use crate::data::file_of;
use crate::error::Error;
use crate::messages::{FromWorker, ToWorker};
use crate::run::Job;
use crate::stage::Stage;

/// Longest wait for the first message of the run, and for the other side to be there.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often each side of this process is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type Channel = Control<ToWorker, FromWorker>;

/// Stands between the run, whose control channel is this process's standard input, and a worker at
/// the other end of the line that `connect` gives, where [`far`](super::far()) runs. `model` is
/// what the user calls the model. Returns only when something failed.
///
/// # Errors
/// [`Error::Line`]: what became of the other side; [`Error::File`].
pub fn near(
    connect: impl FnOnce() -> Result<Ends, Error>,
    model: &str,
) -> Result<Infallible, Error> {
    let channel = Channel::from_stdin()?;
    let line = Line::new(connect()?)?;
    let start = Instant::now();
    while line.recv(LOOK_EVERY)?.is_none_or(|(kind, _)| kind != b'h') {
        if start.elapsed() > START_LIMIT {
            return Err(broken("nobody is there"));
        }
    }
    let first = channel.recv(START_LIMIT)?;
    let Some(ToWorker::Start {
        job,
        threads,
        exchange,
        stage,
    }) = first
    else {
        return Err(broken("the run did not say what it is"));
    };
    let near = Near {
        channel,
        line,
        model: job.trained.model.clone(),
        files: Files::new(exchange),
        stage,
        sent: BTreeSet::new(),
    };
    near.line.send(b's', model.as_bytes())?;
    near.send_data(*job, threads)?;
    near.run()
}

struct Near {
    channel: Channel,
    line: Line,
    model: PathBuf,
    files: Files,
    stage: Stage,
    /// Files of the step under way that the other side has.
    sent: BTreeSet<String>,
}

impl Near {
    /// The data, and what the run is, with paths below the other side's folder.
    fn send_data(&self, mut job: Job, threads: usize) -> Result<(), Error> {
        let valid = job
            .valid
            .clone()
            .unwrap_or_else(|| job.data.join("valid.jsonl"));
        let valid = file_of(&valid, "valid");
        let train = file_of(&job.data, "train");
        self.line.send_file(&train, "data/train.jsonl")?;
        job.data = "data/train.jsonl".into();
        job.valid = None;
        if valid.is_file() {
            self.line.send_file(&valid, "data/valid.jsonl")?;
            job.valid = Some("data/valid.jsonl".into());
        }
        let start = ToWorker::Start {
            job: Box::new(job),
            threads,
            exchange: PathBuf::new(),
            stage: self.stage,
        };
        self.pass_on(&start)
    }

    fn pass_on(&self, message: &ToWorker) -> Result<(), Error> {
        let text = serde_json::to_vec(message).map_err(broken)?;
        self.line.send(b'm', &text)
    }

    fn run(mut self) -> Result<Infallible, Error> {
        loop {
            if let Some(message) = self.channel.recv(LOOK_EVERY)? {
                self.send_files(&message)?;
                self.pass_on(&message)?;
            }
            while let Some((kind, bytes)) = self.line.recv(Duration::ZERO)? {
                self.take(kind, &bytes)?;
            }
        }
    }

    /// Files that a message speaks of, which the other side does not have.
    fn send_files(&mut self, message: &ToWorker) -> Result<(), Error> {
        for name in message.needs(self.stage) {
            let step = name.split('/').next().unwrap_or_default();
            let same = format!("{step}/");
            self.sent.retain(|name| name.starts_with(&same));
            let path = self.files.folder().join(&name);
            // A step that is over has no files any more; the message is told, and passed over.
            if !self.sent.contains(&name) && path.is_file() {
                self.line.send_file(&path, &name)?;
                self.sent.insert(name);
            }
        }
        Ok(())
    }

    fn take(&mut self, kind: u8, bytes: &[u8]) -> Result<(), Error> {
        match kind {
            b'f' => self.files.begin(bytes),
            b'd' => self.files.data(bytes),
            b'n' => self.send_model(),
            b'm' => {
                let message: FromWorker = serde_json::from_slice(bytes).map_err(broken)?;
                Ok(self.channel.send(&message)?)
            }
            other => Err(broken(format!("a frame of kind {other}"))),
        }
    }

    /// The model's files, for a machine that has none.
    fn send_model(&self) -> Result<(), Error> {
        let paths: Vec<PathBuf> = match Source::open(&self.model)? {
            Source::Gguf(file) => file.paths().map(Path::to_owned).collect(),
            Source::Hf(folder) => files_in(folder.path())?,
        };
        for path in &paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.line.send_file(path, &format!("model/{name}"))?;
        }
        let name = self.model.file_name().unwrap_or_default();
        let there = match self.model.is_dir() {
            true => "model".to_owned(),
            false => format!("model/{}", name.to_string_lossy()),
        };
        self.line.send(b'e', there.as_bytes())
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
