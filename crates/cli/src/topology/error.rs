//! Hints for errors of a topology.

use std::error::Error as StdError;

use paceline_comm_rdma::ENABLE_RDMA;
use paceline_launch::topology::Error as TopologyError;

use crate::launch::ssh_works;

pub(crate) fn hints(cause: &(dyn StdError + 'static)) -> Vec<String> {
    let hint = cause.downcast_ref().and_then(of_topology);
    hint.into_iter().collect()
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
