//! Errors of a launch.

use std::time::Duration;

use paceline_base::Rank;
use paceline_process::Ending;

use crate::remote;

/// The first failure of a launch.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program of a rank did not end with code 0.
    #[error("{rank} on {host} {ending}")]
    Failed {
        rank: Rank,
        host: String,
        ending: Ending,
    },
    /// No session with a host could be made; no program was started.
    #[error("cannot reach {host}: {why}")]
    HostUnreachable {
        host: String,
        /// The last line from `ssh`, or how it ended.
        why: String,
    },
    #[error("the connection to {host} is lost: {why}")]
    HostLost {
        host: String,
        /// The last line from `ssh`, or how it ended.
        why: String,
    },
    /// The session of a rank ended without its program's exit code.
    #[error("the session of {rank} on {host} is lost: it {ending}")]
    SessionLost {
        rank: Rank,
        host: String,
        ending: Ending,
    },
    /// The shell of a rank failed before its program; no program was started.
    #[error("cannot start {rank} on {host}: its shell {ending}")]
    NotStarted {
        rank: Rank,
        host: String,
        ending: Ending,
    },
    /// The SSH server of a host runs commands in its own process group; no program was started.
    #[error("{host} does not give a session a process group of its own")]
    SharedGroup { host: String },
    /// Some hosts were not ready in time; no program was started.
    #[error("not ready within {limit:?}: {}", hosts.join(", "))]
    StartLate { hosts: Vec<String>, limit: Duration },
    /// A rank ended well, and others ran without it for too long.
    #[error(
        "{ended} ended with code 0, and {limit:?} later {} still ran",
        running.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Lingered {
        ended: Rank,
        /// The ranks that did not end.
        running: Vec<Rank>,
        limit: Duration,
    },
    #[error("nobody reads the output")]
    OutputGone,
    #[error("interrupted")]
    Cancelled,
    /// A shell or `ssh` cannot be started here.
    #[error(transparent)]
    Here(#[from] remote::Error),
}

impl Error {
    /// The exit code for the launch: that of the rank that failed, else 1.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Failed { ending, .. } => ending.exit_code(),
            _ => 1,
        }
    }
}
