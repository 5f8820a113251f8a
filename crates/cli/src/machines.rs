//! Machines of the cluster that compute for a command.

pub(crate) use paceline_board::machines::ClusterMachine;
use paceline_board::machines::found;

use crate::home;
use crate::output::print_err;

/// Chooses and prints `count` machines of the cluster, this one first. `None` if no node that
/// starts workers runs here, or the cluster has fewer machines of this build.
pub(crate) fn chosen(count: usize) -> anyhow::Result<Option<Vec<ClusterMachine>>> {
    let found = found(&home::folder()?, count)?;
    if let Some(machines) = &found {
        let names: Vec<&str> = machines.iter().map(|it| it.name.as_str()).collect();
        print_err(format_args!(
            "workers on {}; --local computes here",
            names.join(", ")
        ));
    }
    Ok(found)
}
