//! Places the workers of a training: here, on hosts by `ssh`, or on machines of the cluster.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use paceline_node::tunnel;
use paceline_process::Program;
use paceline_train::remote::{self, FarSpec, GREETING};
use paceline_train::{Means, Post, worker};

use super::Args;
use crate::error::started_by_hand;
use crate::machines::{self, ClusterMachine};
use crate::output::{print, print_err};
use crate::{home, load, process};

/// Delay before an unreachable worker is retried.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// One process of a training.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainWorkerArgs {
    /// Stand between the run and a worker on this host
    #[arg(long, value_name = "HOST", conflicts_with = "node")]
    host: Option<String>,
    /// Stand between the run and a worker on the machine of this node
    #[arg(long, value_name = "ID")]
    node: Option<String>,
    /// What the user calls the model
    #[arg(long, value_name = "MODEL", default_value = "")]
    named: String,
}

/// The other machine's part of a training.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainHostArgs {
    /// Take the model from the store, or have it sent: open no path that the other machine names
    #[arg(long)]
    store_only: bool,
}

/// The workers of a training; empty if this process computes alone.
pub(super) fn posts(args: &Args, model: &str) -> anyhow::Result<Vec<Post>> {
    let own = args.threads.map_or(0, usize::from);
    let elsewhere = |option: &str, name: &str, place: &str| Post {
        args: ["train-worker", option, name, "--named", model]
            .map(OsString::from)
            .to_vec(),
        threads: own,
        place: place.to_owned(),
    };
    if !args.hosts.is_empty() {
        let hosts = args.hosts.iter();
        return Ok(hosts.map(|host| elsewhere("--host", host, host)).collect());
    }
    let count = args.workers();
    if count == 1 {
        return Ok(Vec::new());
    }
    let here = |count: usize| Post {
        args: vec!["train-worker".into()],
        threads: args.threads(count),
        place: String::new(),
    };
    let machines = if args.local {
        None
    } else {
        machines::chosen(count)?
    };
    let Some(machines) = machines else {
        return Ok(vec![here(count); count]);
    };
    let post = |machine: &ClusterMachine| match machine.is_own {
        true => here(1),
        false => elsewhere("--node", &machine.id, &machine.name),
    };
    Ok(machines.iter().map(post).collect())
}

/// `paceline train-worker`: a process of a training. Errors go to its parent; only those of a
/// connection to another machine are printed.
pub(crate) fn work(args: &TrainWorkerArgs) -> anyhow::Result<()> {
    let means = |threads| {
        Ok::<_, io::Error>(Means {
            kernels: load::free_kernels(threads).map_err(io::Error::other)?,
            // Without a home, MLX is not installed.
            mlx: home::mlx_places().unwrap_or_default(),
        })
    };
    let ended = match (&args.host, &args.node) {
        (Some(host), _) => remote::forward_to_worker(|| by_ssh(host), &args.named),
        (None, Some(id)) => remote::forward_to_worker(|| by_node(id), &args.named),
        (None, None) => worker::run(means),
    };
    let error = match ended {
        Ok(never) => match never {},
        Err(error) => error,
    };
    if matches!(error, paceline_train::Error::Cluster(_)) {
        return Err(started_by_hand().into());
    }
    if args.host.is_some() || args.node.is_some() {
        print_err(&error); // the run shows a worker's last line
        std::thread::sleep(AGAIN_AFTER);
    }
    Err(error.into())
}

/// `paceline train-far`: runs a worker for another machine, over standard input and output.
pub(crate) fn far(args: &TrainHostArgs) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir().context("cannot make a temporary folder")?;
    let find = |name: &str, path: &Path| -> Option<PathBuf> {
        if !args.store_only && path.exists() {
            return Some(path.to_owned());
        }
        let found = paceline_store::resolve(&home::home().ok()?, name).ok()?;
        match found {
            paceline_store::Resolution::Path(found) if found.name.is_some() => Some(found.path),
            _ => None,
        }
    };
    if !args.store_only {
        print(GREETING)?; // a login shell may have printed lines before
    }
    let spec = FarSpec {
        program: process::own_program().context("cannot find this program's own file")?,
        args: vec!["train-worker".into()],
        env: process::worker_env(),
        scratch: scratch.path(),
        find: &find,
    };
    match remote::run_worker(Program::parent(), spec) {
        Ok(never) => match never {},
        Err(error) => Err(error.into()),
    }
}

fn by_ssh(host: &str) -> Result<Program, paceline_train::Error> {
    let failed = |reason: String| paceline_train::Error::Line { reason };
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    remote::by_ssh(host, &program)
}

/// A connection to a node of the cluster, through the own node.
fn by_node(id: &str) -> Result<Program, paceline_train::Error> {
    let failed = |reason: &dyn std::fmt::Display| paceline_train::Error::Line {
        reason: reason.to_string(),
    };
    let home = home::folder().map_err(|error| failed(&error))?;
    let stream = tunnel::line(&home, id, tunnel::TRAIN).map_err(|error| failed(&error))?;
    Program::connected(stream).map_err(|error| failed(&error))
}
