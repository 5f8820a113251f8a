//! Workers on other machines: `--hosts`.
//!
//! The job's workers are bridges, processes of this program that start a worker by `ssh` and pass
//! on what both sides say. Files have the same paths on all hosts; a worker whose inputs differ
//! from those here ends the job.

use anyhow::{Context, bail};
use paceline_cluster::bridge;
use paceline_cluster::hostfile::Hostfile;
use paceline_cluster::processes::Ending;
use paceline_cluster::remote::{Reach, quote};
use paceline_mapreduce::worker::GREETING;

/// Names of hosts, with commas between.
///
/// # Errors
/// The fault of the names.
pub(super) fn names(text: &str) -> Result<Vec<String>, String> {
    let file = Hostfile::from_names(text, 1).map_err(|error| error.to_string())?;
    Ok(file.hosts.into_iter().map(|host| host.ssh).collect())
}

/// Starts a worker on a host and passes on what it and this process's parent say to each other.
///
/// # Errors
/// When it cannot be started, or ends badly; what `ssh` says is on standard error.
pub(super) fn bridge(host: &str) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let program = quote(&program.display().to_string());
    // The same file as here where there is one, else what the host calls paceline.
    let script = format!(
        "program={program}; [ -x \"$program\" ] || program=paceline\n\
         exec \"$program\" mapreduce worker --stdio\n"
    );
    let ending = bridge::run(&Reach::new("ssh", None), host, &script, GREETING)?;
    match ending {
        Ending::Code(0) => Ok(()),
        // It or `ssh` said why on standard error, of which the parent tells the last line.
        Ending::Code(code) => std::process::exit(code),
        ending => bail!("the worker on {host} {ending}"),
    }
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
