//! Errors between a parent and its children.

use std::path::PathBuf;
use std::time::Duration;

use paceline_base::Rank;

/// Why something could not be started, sent or understood.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program of a rank cannot be started; no process is left.
    #[error("cannot start {} for {rank}: {source}", program.display())]
    Start {
        rank: Rank,
        program: PathBuf,
        source: std::io::Error,
    },
    /// A socket pair or a thread cannot be created; no process is left.
    #[error("cannot make {what}: {source}")]
    Resource {
        what: &'static str,
        source: std::io::Error,
    },
    #[error("{rank} is not one of {size} workers")]
    NoSuchRank { rank: Rank, size: u32 },
    /// A message cannot be written as JSON; nothing was sent.
    #[error("a message cannot be written as JSON: {reason}")]
    Unencodable { reason: String },
    /// A message is too long; nothing was sent.
    #[error("a message has more than {bytes_max} bytes, the most that are sent")]
    TooLong {
        /// The limit, [`LINE_BYTES_MAX`](crate::LINE_BYTES_MAX).
        bytes_max: usize,
    },
    /// A child did not read a message in time. The channel is unusable: every later message gets
    /// this error too.
    #[error("{rank} took {written} of {bytes} bytes of a message in {limit:?}")]
    Stuck {
        rank: Rank,
        /// Bytes that went into the channel.
        written: usize,
        bytes: usize,
        /// How long it was tried.
        limit: Duration,
    },
    /// The channel to a child is closed: the child has ended or closed it, or was asked to end.
    #[error("the channel to {rank} is closed")]
    Closed { rank: Rank },
    /// Standard input is not a control channel: the process was not started by [`Workers`].
    ///
    /// [`Workers`]: crate::workers::Workers
    #[error("standard input is not a control channel: {source}")]
    NoControl { source: std::io::Error },
    /// No worker could be started on another machine.
    #[error("cannot start a worker on {host}: {source}")]
    Remote {
        /// Name of the machine for `ssh`.
        host: String,
        /// The system's error; a timeout if the worker's greeting did not arrive.
        source: std::io::Error,
    },
    /// The parent sent what is not a message.
    #[error("from the parent: {0}")]
    Garbled(#[from] Garbage),
}

/// Bytes on a control channel that are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Garbage {
    /// A line is not the JSON of a message.
    #[error("{excerpt} is not a message: {reason}")]
    Malformed {
        reason: String,
        /// The line, shortened, what is not printable ASCII escaped.
        excerpt: String,
    },
    /// A line does not end within the limit.
    #[error("{excerpt} has more than {bytes_max} bytes, the most that a message may have")]
    TooLong {
        /// The limit, [`LINE_BYTES_MAX`](crate::LINE_BYTES_MAX).
        bytes_max: usize,
        /// The line, shortened, what is not printable ASCII escaped.
        excerpt: String,
    },
    /// The other side closed the channel and did not end.
    #[error("the control channel was closed by a process that did not end within {limit:?}")]
    Closed {
        /// How long it was given to end.
        limit: Duration,
    },
}
