//! Errors of array jobs.

use std::io;
use std::path::{Path, PathBuf};

use crate::npy::NpyError;

/// Why a job cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {what} {}", path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{}: {problem}", path.display())]
    Npy { path: PathBuf, problem: NpyError },
    #[error("{} changed while it was used", path.display())]
    Changed { path: PathBuf },
    /// A task has not the inputs that it needs.
    #[error("{task} takes {expected} inputs, got {got}")]
    Inputs {
        task: &'static str,
        expected: usize,
        got: usize,
    },
    #[error("{} has {got} values, expected {expected} as the first input", path.display())]
    Shapes {
        path: PathBuf,
        got: u64,
        /// The number of the first input's values.
        expected: u64,
    },
    #[error("{} has {got} rows, expected {expected} as the first matrix has columns", path.display())]
    Inner {
        path: PathBuf,
        got: u64,
        /// Columns of the first matrix.
        expected: u64,
    },
    #[error("{0} of no values")]
    Empty(&'static str),
    #[error(transparent)]
    Expression(#[from] crate::expr::ExprError),
    /// Groups are made by integers, and have a sum, a mean, an extreme or a count.
    #[error(
        "{op} of {values} by keys of type {keys}: expected sum, mean, min, max or count, and \
             integer keys"
    )]
    Grouping {
        op: &'static str,
        keys: crate::Dtype,
        values: crate::Dtype,
    },
    /// The right table of a join has more rows than a process can number.
    #[error("the right table has {rows} rows, expected at most 2^31: exchange left and right")]
    Right { rows: u64 },
    /// Clusters whose centroids have no numbers, or too many.
    #[error(
        "{k} centroids of {columns} columns: expected 1 to {} numbers in all",
        crate::kmeans::CELLS_MAX
    )]
    Cells { k: u32, columns: u64 },
    /// The shape of the first centroids does not fit the number of clusters and the rows' columns.
    #[error(
        "{} has {rows} rows of {columns} columns, expected {k} of {expected}",
        path.display()
    )]
    Init {
        path: PathBuf,
        rows: u64,
        columns: u64,
        k: u32,
        /// Columns of the rows that are to be clustered.
        expected: u64,
    },
    /// More clusters than rows to draw them from.
    #[error("{k} clusters of {rows} rows")]
    Drawn { k: u32, rows: u64 },
    #[error("{k} clusters of {rows} different rows")]
    Distinct {
        k: u32,
        /// Rows that differ from each other.
        rows: u64,
    },
    /// A row has no finite distance from a centroid, so it belongs to no cluster.
    #[error("{}: row {row} has {what}, which has no distance (such rows in all: {rows})", path.display())]
    NoDistance {
        path: PathBuf,
        /// The first such row, from 0.
        row: u64,
        what: &'static str,
        rows: u64,
    },
    #[error("the values reach from {low} to {high}, expected finite values for the edges of bins")]
    Edges { low: f64, high: f64 },
    #[error("{memory} bytes of memory are too few, expected at least {needed}")]
    Memory {
        memory: u64,
        /// The memory that the sort needs, about.
        needed: u64,
    },
    /// Splitters drawn again and again left a bucket that is larger than its share of memory.
    #[error("values fall into a bucket of {bytes} bytes, which has room for {most}")]
    Bucket { bytes: u64, most: u64 },
    /// A journal says that some of a result is written, but the result is not there.
    #[error("{} is gone, of which {} says that it is written in part", path.display(), journal.display())]
    Gone { path: PathBuf, journal: PathBuf },
    /// The partial result of a job that is resumed is missing.
    #[error("{} is gone, which this job has written in part", path.display())]
    PartGone { path: PathBuf },
    /// A whole result could not get its name.
    #[error("cannot rename {} to {}", from.display(), to.display())]
    Rename {
        from: PathBuf,
        to: PathBuf,
        source: io::Error,
    },
    /// The journal to resume from belongs to another job.
    #[error("{} is not that of this job, or an input changed since", path.display())]
    OtherJob { path: PathBuf },
    #[error("{task} takes columns as they are: no expression can be computed first")]
    Mapped { task: &'static str },
    /// An expression and a function at once, or a function for a task that has no place for one.
    #[error("{task} takes no WGSL function")]
    Function { task: &'static str },
    #[error("{reason}")]
    Device { reason: String },
    /// A worker's inputs are not those of the job.
    #[error("{worker} has other inputs of the same names: its results would be of other data")]
    OtherInputs { worker: String },
    /// Another machine's job names a file that this machine does not lend.
    #[error("{} is not there, or in no folder that the machine lends to array jobs", path.display())]
    NotLent { path: PathBuf },
    #[error(transparent)]
    Cluster(#[from] paceline_cluster::Error),
    #[error("cannot start a thread")]
    Thread { source: io::Error },
    /// A worker failed for a reason that would stop every other worker too.
    #[error("{worker}: {reason}")]
    Worker { worker: String, reason: String },
    #[error("all workers are lost, the last one: {last}")]
    Lost { last: String },
    #[error("the parent sent {got}, expected {expected}")]
    Protocol {
        got: &'static str,
        expected: &'static str,
    },
}

impl Error {
    pub(crate) fn file(what: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        Self::File { what, path, source }
    }
}
