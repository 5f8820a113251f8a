//! Workers on other machines: `--hosts`, and `--nodes` in a cluster.
//!
//! The job's workers are relays: processes of this program that pass messages to a remote worker
//! and back. They start it by `ssh` or through the node of the other machine. Inputs have the same
//! paths on all machines. A worker with different inputs is excluded. Results are written here.

use anyhow::{Context, bail, ensure};
use paceline_cluster::bridge;
use paceline_launch::hostfile::Hostfile;
use paceline_launch::remote::{Sharing, SshClient, quote};
use paceline_mapreduce::worker::GREETING;
use paceline_node::tunnel;
use paceline_process::Ending;

use crate::home;

/// Parses comma-separated host names.
pub(super) fn names(text: &str) -> Result<Vec<String>, String> {
    let file = Hostfile::from_names(text, 1).map_err(|error| error.to_string())?;
    Ok(file.hosts.into_iter().map(|host| host.ssh).collect())
}

/// Starts a worker on a host and relays messages between it and this process's parent.
pub(super) fn bridge(host: &str) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let program = quote(&program.display().to_string());
    // The same path as here if it exists, else the host's `paceline`.
    let script = format!(
        "program={program}; [ -x \"$program\" ] || program=paceline\n\
         exec \"$program\" mapreduce worker --stdio\n"
    );
    let mut shell = SshClient::new("ssh", None).shell(host, Sharing::Alone);
    let ending = bridge::run(&mut shell, host, &script, GREETING)?;
    match ending {
        Ending::Code(0) => Ok(()),
        // It or `ssh` printed the reason to standard error; the parent reports the last line.
        Ending::Code(code) => std::process::exit(code),
        ending => bail!("the worker on {host} {ending}"),
    }
}

/// Has a node of the cluster start a worker, and relays messages between it and this process's
/// parent, through this machine's node.
pub(super) fn bridge_to_node(id: &str) -> anyhow::Result<()> {
    let line = tunnel::line(&home::folder()?, id, tunnel::ARRAYS);
    let line = line.context("cannot reach its node")?;
    let by_parent = bridge::join(line, id, GREETING)?;
    ensure!(by_parent, "the line to its node ended");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn hosts_have_names() {
        assert_eq!(names("a,b"), Ok(vec!["a".to_owned(), "b".to_owned()]));
        for wrong in ["", "a,,b", "-oProxyCommand=x"] {
            assert!(names(wrong).is_err(), "{wrong}");
        }
    }
}
