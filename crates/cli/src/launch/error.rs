//! Errors of a launch, with hints.

use std::error::Error as StdError;

use paceline_launch::hostfile::Error as HostfileError;
use paceline_launch::launch::openmpi::FindError;
use paceline_launch::launch::{Error as LaunchError, PlanError};
use paceline_launch::remote::Error as RemoteError;
use paceline_process::Ending;

/// `mpirun` failed, by itself or with a rank's code.
#[derive(Debug, thiserror::Error)]
#[error("mpirun {0}")]
pub(super) struct MpirunFailed(pub(super) Ending);

/// The exit code for an error of a launch; `None` for others.
pub(crate) fn exit_code(error: &anyhow::Error) -> Option<u8> {
    let code = if let Some(error) = error.downcast_ref::<LaunchError>() {
        error.exit_code()
    } else if let Some(MpirunFailed(ending)) = error.downcast_ref() {
        ending.exit_code()
    } else if error.is::<PlanError>() || error.downcast_ref().is_some_and(is_wrong_file) {
        2
    } else {
        return None;
    };
    Some(u8::try_from(code).unwrap_or(1))
}

/// Whether a hostfile of the command line is invalid, which counts as wrong usage.
const fn is_wrong_file(error: &HostfileError) -> bool {
    !matches!(error, HostfileError::Write { .. })
}

pub(crate) fn hints(cause: &(dyn StdError + 'static)) -> Vec<String> {
    let hint = if let Some(error) = cause.downcast_ref() {
        of_launch(error)
    } else if let Some(error) = cause.downcast_ref() {
        of_plan(error)
    } else if let Some(error) = cause.downcast_ref() {
        of_hostfile(error)
    } else if let Some(FindError::NoMpirun | FindError::NotOpenMpi { .. }) = cause.downcast_ref() {
        Some(
            "install Open MPI (Debian: openmpi-bin; macOS: brew install open-mpi), or take \
             --backend ring"
                .to_owned(),
        )
    } else {
        None
    };
    hint.into_iter().collect()
}

pub(crate) fn ssh_works(host: &str) -> String {
    format!("`ssh {host} true` must work without a question; `ssh-copy-id {host}` installs a key")
}

fn of_launch(error: &LaunchError) -> Option<String> {
    Some(match error {
        LaunchError::HostUnreachable { host, .. } => ssh_works(host),
        LaunchError::Here(RemoteError::Start { .. }) => {
            "install an SSH client, such as OpenSSH's".to_owned()
        }
        LaunchError::StartLate { .. } => "give them more time with --start SECONDS".to_owned(),
        LaunchError::Failed {
            ending: Ending::Code(126 | 127),
            host,
            ..
        } => format!(
            "the program must be on {host}, in its PATH or with its path, and executable; run a \
             script as `-- python3 SCRIPT`"
        ),
        LaunchError::NotStarted { .. } => "the lines above say why; --cwd names another \
                                           folder"
            .to_owned(),
        LaunchError::Lingered { .. } => {
            "--linger never lets them go on for as long as they like".to_owned()
        }
        LaunchError::SharedGroup { .. } => {
            "its SSH server cannot be used: OpenSSH's can".to_owned()
        }
        _ => return None,
    })
}

fn of_plan(error: &PlanError) -> Option<String> {
    Some(match error {
        PlanError::NoAddress { host } | PlanError::NoCoordinator { host, .. } => format!(
            "name {host} by its address, or make a hostfile: paceline topology --over ethernet \
             --hosts A,B --output hosts.json"
        ),
        PlanError::RdmaCount { .. }
        | PlanError::RdmaSelf { .. }
        | PlanError::RdmaMissing { .. } => {
            "`paceline topology --hosts A,B --output hosts.json` finds the devices; \
             --backend jaccl-ring needs fewer"
                .to_owned()
        }
        PlanError::Ports { .. } => "take a lower --starting-port".to_owned(),
        PlanError::Env { .. } => "write --env NAME=VALUE".to_owned(),
        _ => return None,
    })
}

fn of_hostfile(error: &HostfileError) -> Option<String> {
    Some(match error {
        HostfileError::NotJson { .. } | HostfileError::Shape { .. } => {
            r#"a hostfile looks like [{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b", "ips": ["10.0.0.2"]}]"#
                .to_owned()
        }
        _ => return None,
    })
}
