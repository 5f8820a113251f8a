//! Launches a program on many machines, started and ended as one.
//!
//! ```text
//!  hostfile ──plan──▶ environment of each rank
//!                         │
//!  run: an agent on each host, a shell for each rank, all at once; then the programs
//!                         │
//!  their lines, prefixed ◀┴▶ the outcome: success, or the first failure
//! ```
//!
//! Promises:
//! - Output is whole lines, each with its rank in front, with standard output and error separate.
//! - The first rank that fails ends all others, by SIGTERM and after [`LaunchLimits::grace`] by
//!   SIGKILL. Their child processes end too, as long as these stay in their process group. The
//!   failed rank's exit code is the launch's ([`Error::exit_code`]).
//! - A rank that ends well while others run for longer than [`LaunchLimits::linger`] ends them too.
//! - When the launcher ends in any way, or a connection breaks, the programs on all machines end
//!   and their temporary files are removed.
//! - Every wait has a limit, except for the programs themselves.
//!
//! A program that leaves its process group, as daemons do, is out of scope.
//!
//! In reading order: [`plan`], [`run`], `course.rs` (the state machine), `script.rs` (the remote
//! scripts), `session.rs` (processes and pipes), [`mpi`].

mod blocking_stream;
mod error;
pub mod mpi;
pub mod openmpi;
mod output;
mod plan;
mod scratch;
mod script;
mod session;
mod state_machine;

use std::fmt;
use std::io::{Read, Write};
use std::time::Duration;

use paceline_base::Rank;
use paceline_process::Ending;

pub use blocking_stream::BlockingStream;
pub use error::Error;
pub use plan::{Backend, Options, PlanError, RankPlan, plan};
pub use scratch::folder;
pub use session::run;

/// The program and machines of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// By rank; at least one.
    pub ranks: Vec<RankPlan>,
    /// The program and its arguments, the same for all ranks.
    pub command: Vec<String>,
    /// The folder to start in.
    pub place: WorkingDirectory,
    /// The ranks that get standard input.
    pub stdin: StdinTo,
    /// How lines are assigned to ranks.
    pub tags: RankTags,
    /// How long things may take.
    pub limits: LaunchLimits,
}

/// The folder that programs start in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkingDirectory {
    /// This one; a rank fails where it does not exist.
    Required(String),
    /// This one where it exists, else where the login shell starts.
    IfPresent(String),
}

/// The ranks that get standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StdinTo {
    /// The first rank.
    Rank0,
    /// Every rank, the same bytes. The slowest reader sets the pace.
    All,
    None,
}

impl StdinTo {
    fn reaches(self, rank: usize) -> bool {
        match self {
            Self::Rank0 => rank == 0,
            Self::All => true,
            Self::None => false,
        }
    }
}

/// How the rank of a line is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankTags {
    /// Each session is a rank.
    Session,
    /// The one session is `mpirun`, which marks lines itself.
    Mpirun,
}

/// Time limits of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchLimits {
    /// Until all ranks can start. Default 30 s: connections have 10, slow logins the rest.
    pub start: Duration,
    /// From SIGTERM to SIGKILL. Default 5 s, to write a last checkpoint of a small model.
    pub grace: Duration,
    /// How long the others may run after the first rank has ended with code 0; `None` for ever.
    /// Default 10 minutes, to write a large checkpoint.
    pub linger: Option<Duration>,
}

impl Default for LaunchLimits {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(30),
            grace: Duration::from_secs(5),
            linger: Some(Duration::from_secs(600)),
        }
    }
}

/// Source and sinks of the programs' streams.
pub struct Streams {
    /// Standard input, for the ranks in [`StdinTo`]. Read by a thread that may outlive the launch.
    pub input: Box<dyn Read + Send>,
    /// For lines of standard output.
    pub output: Box<dyn Write + Send>,
    /// For lines of standard error.
    pub errors: Box<dyn Write + Send>,
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}

/// A progress notification. Prints as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The program of a rank ended.
    Ended(Rank, Ending),
    /// The program of a rank did not end when asked to, and was killed.
    Killed(Rank),
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(rank, ending) => write!(f, "{rank} {ending}"),
            Self::Killed(rank) => write!(f, "{rank} did not end by itself and was killed"),
        }
    }
}
