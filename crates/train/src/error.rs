//! Errors of training.

use std::io;
use std::path::{Path, PathBuf};

use paceline_model::adapter::files;

/// Why training failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Model(#[from] paceline_model::Error),
    /// The model is of a family whose gradients are not written.
    #[error("training of {family} is not supported: {why}")]
    Family { family: String, why: &'static str },
    #[error("the model's tokenizer")]
    Tokenizer(#[from] paceline_text::tokenizer::Error),
    #[error("the model's chat template")]
    Template(#[source] paceline_text::chat::Error),
    /// A file of an adapter or a checkpoint cannot be used.
    #[error(transparent)]
    Files(#[from] files::Error),
    /// A line of data cannot be trained on.
    #[error("{}:{line}: {reason}", path.display())]
    Data {
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The fault in the line.
        reason: String,
    },
    #[error("{} has no examples", path.display())]
    NoExamples { path: PathBuf },
    /// An option has a value that nothing can be done with.
    #[error("{option} is {got}, expected {expected}")]
    Option {
        option: &'static str,
        got: String,
        /// The values that it may have.
        expected: String,
    },
    /// The folder has a run of other options.
    #[error(
        "{} has a run with {field} {there}, this one has {here}: choose another folder",
        path.display()
    )]
    OtherRun {
        path: PathBuf,
        field: String,
        there: String,
        here: String,
    },
    /// The folder has a run, and `--resume` was not given.
    #[error("{} has a run already: --resume continues it, another --output starts anew", path.display())]
    RunThere { path: PathBuf },
    /// The loss is no number: the learning rate is too high, or the model is broken.
    #[error("the loss of step {step} is {loss}: a lower learning rate may help")]
    Diverged {
        /// The step, from 1.
        step: u64,
        loss: f64,
    },
    #[error(transparent)]
    Cluster(#[from] paceline_cluster::Error),
    /// A call of a sharded run's ranks failed: one of them is gone, or cut off.
    #[error(transparent)]
    Comm(#[from] paceline_comm::Error),
    /// The ranks of a sharded run cannot reach each other.
    #[error("the ranks cannot join")]
    Join(#[from] paceline_comm::InitError),
    #[error("cannot listen for other ranks")]
    Listen(#[source] io::Error),
    /// Two neighbouring ranks of a sharded run were lost at once, with both copies of a shard.
    #[error(
        "rank {rank} and the rank with a copy of its shard were lost, the last one because {last}"
    )]
    ShardLost {
        rank: usize,
        /// Reason for the last loss.
        last: String,
    },
    /// A worker's machine is out of reach, or ended its worker.
    #[error("the other machine: {reason}")]
    Line { reason: String },
    #[error("no worker is left; the last one was lost because {last}")]
    Lost {
        /// Reason for the last loss.
        last: String,
    },
    /// A worker failed for a reason that would stop every other worker too.
    #[error("worker {rank}{}: {reason}", on(place))]
    Worker {
        rank: u32,
        /// Its machine, empty for this one.
        place: String,
        reason: String,
    },
    /// A worker got a message out of turn.
    #[error("got {got}, expected {expected}")]
    Protocol {
        got: &'static str,
        /// The message that was expected.
        expected: &'static str,
    },
    #[error("cannot start {threads} threads")]
    Threads { threads: usize, source: io::Error },
    /// The caller stopped the run. The last checkpoint is saved.
    #[error("stopped before step {step}")]
    Stopped {
        /// The step, from 1.
        step: u64,
    },
}

/// A machine, if it is another one.
fn on(place: &str) -> String {
    match place {
        "" => String::new(),
        place => format!(" on {place}"),
    }
}

impl Error {
    /// The system's answer about a file.
    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let failed = files::Error::file(what, path);
        move |source| Self::Files(failed(source))
    }

    pub(crate) fn malformed(path: &Path, reason: impl ToString) -> Self {
        Self::Files(files::Error::malformed(path, reason))
    }
}
