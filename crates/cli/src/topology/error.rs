//! Errors of a topology, with hints.

use std::error::Error as StdError;

use paceline_comm_rdma::ENABLE_RDMA;
use paceline_launch::topology::Error as TopologyError;
use paceline_process::Ending;

use crate::launch::ssh_works;

/// Errors of the command itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No host is left.
    #[error("none of the hosts answers")]
    NobodyAnswers,
    /// `sudo` would require a password.
    #[error("sudo wants a password on {}", hosts.join(", "))]
    NoSudo { hosts: Vec<String> },
    /// There is no terminal for a question.
    #[error("--auto-setup asks before it changes machines, but standard input is no terminal")]
    NobodyToAsk,
    /// A command failed.
    #[error("the setup of {host} failed: it {ending}")]
    Setup {
        host: String,
        /// Exit state of its shell.
        ending: Ending,
    },
}

impl Error {
    pub(crate) const fn is_usage(&self) -> bool {
        matches!(self, Self::NobodyToAsk)
    }
}

pub(crate) fn hints(cause: &(dyn StdError + 'static)) -> Vec<String> {
    let hint = if let Some(error) = cause.downcast_ref() {
        of_topology(error)
    } else if let Some(error) = cause.downcast_ref() {
        own(error)
    } else {
        None
    };
    hint.into_iter().collect()
}

fn own(error: &Error) -> Option<String> {
    Some(match error {
        Error::NobodyAnswers => "`ssh HOST true` must work without a question".to_owned(),
        Error::NoSudo { .. } => "run the commands shown above by hand, without --auto-setup; or \
                                 let sudo run them without a password"
            .to_owned(),
        Error::NobodyToAsk => "add --yes to have the commands above run".to_owned(),
        Error::Setup { .. } => {
            "the lines above say why; `paceline topology --undo` shows the way back".to_owned()
        }
    })
}

fn of_topology(error: &TopologyError) -> Option<String> {
    const DOT: &str = "--dot draws the cables that were found";
    Some(match error {
        TopologyError::Unreachable { host, .. } => {
            format!(
                "{}; --ignore-unreachable goes on without it",
                ssh_works(host)
            )
        }
        TopologyError::Late { .. } => "give more time with --timeout SECONDS".to_owned(),
        TopologyError::NoThunderbolt { .. } => {
            "--over ethernet does without Thunderbolt".to_owned()
        }
        TopologyError::NoService { receptacle, .. } => {
            format!("add the service \"Thunderbolt {receptacle}\" in System Settings, Network")
        }
        TopologyError::NoMesh { .. } => {
            format!("connect them, or take --backend jaccl-ring or ring; {DOT}")
        }
        TopologyError::NoRing { .. } => format!("connect them, or leave hosts out; {DOT}"),
        TopologyError::NoRdma { .. } => {
            format!("{ENABLE_RDMA}; or take --backend ring")
        }
        TopologyError::OneHost => "name several: --hosts A,B".to_owned(),
        TopologyError::SameMachine { .. } => "name it once".to_owned(),
        _ => return None,
    })
}
