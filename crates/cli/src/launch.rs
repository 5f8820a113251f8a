//! `paceline launch`: runs a program on many machines, like `mlx.launch`.

mod error;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use paceline_board::machines::{ClusterMachine, consenting};
use paceline_launch::hostfile::{Host, Hostfile};
use paceline_launch::launch::{
    self, Backend, BlockingStream, Error as LaunchError, Launch, LaunchLimits, Notice, Options,
    RankTags, StdinTo, Streams, WorkingDirectory, openmpi,
};
use paceline_launch::remote::SshClient;
use rustix::process::getpgrp;
use rustix::termios::{tcgetpgrp, tcgetwinsize};
use tempfile::TempDir;

use error::MpirunFailed;
pub(crate) use error::{exit_code, hints, ssh_works};

use crate::error::{Error, failed, misused};
use crate::home;
use crate::interrupt::Signals;
use crate::output::{print, print_err};

const EXAMPLES: &str = "\
Examples:
  paceline launch -n 2 -- python3 train.py            two ranks on this machine, a TCP ring
  paceline launch --hosts 10.0.0.1,10.0.0.2 -- python3 train.py
  paceline launch --nodes 3 -- ./program              machines of the cluster, without ssh
  paceline launch --hostfile hosts.json --env HF_HOME=/data -- ./program --its-own-flag
  paceline topology --hosts a,b --output hosts.json   makes such a file

Hosts are reached by `ssh`, which must not ask for a password; those of --nodes by their nodes,
where `paceline up --allow-programs` runs. Each line has its rank before it.
The first rank that fails ends the others, and its exit code is that of the launch.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The program and its arguments; `--` before it is only needed when it starts with a hyphen
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM",
        required_unless_present = "print_python"
    )]
    command: Vec<String>,
    /// Ranks on each of --hosts
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    repeat_hosts: u16,
    /// Names for `ssh`, with commas between; a literal address is used for data too
    #[arg(long, value_name = "A,B", default_value = "127.0.0.1")]
    hosts: String,
    /// Machines of the cluster, this one first, in place of --hosts
    #[arg(long, value_name = "N", conflicts_with_all = ["hosts", "hostfile"],
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    nodes: Option<u16>,
    /// Hosts, addresses, devices, backend and environment from a file in one of MLX's formats
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "repeat_hosts"])]
    hostfile: Option<PathBuf>,
    /// ring, rdma (jaccl), jaccl-ring, mpi, nccl or any [default: the hostfile's, else nccl where
    /// there is an NVIDIA GPU, else ring]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Set a variable for all ranks; without a value that of this environment, which nobody can
    /// read in a list of processes; may be given several times
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Folder to start in [default: the current one on hosts that have it]
    #[arg(long, value_name = "FOLDER")]
    cwd: Option<String>,
    /// Run the program with this Python
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// Who gets standard input
    #[arg(long, value_enum, default_value_t)]
    stdin: StdinTarget,
    /// Backend ring: connections for each address
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections_per_ip: u16,
    /// First port of a ring, or that of rank 0 with rdma
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 32323,
          value_parser = clap::value_parser!(u16).range(1..))]
    starting_port: u16,
    /// Backend nccl: port of rank 0
    #[arg(long, value_name = "PORT", default_value_t = 12345,
          value_parser = clap::value_parser!(u16).range(1..))]
    nccl_port: u16,
    /// Backend mpi: arguments for `mpirun`, split at blanks; may be given several times
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    mpi_arg: Vec<String>,
    /// Seconds from SIGTERM to SIGKILL, once a rank has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 5,
          value_parser = clap::value_parser!(u16).range(0..=3600))]
    grace: u16,
    /// Seconds that other ranks may run after one has ended well, or `never` to end them
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = linger)]
    linger: Linger,
    /// Seconds until all hosts must be ready
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u16).range(1..=3600))]
    start: u16,
    /// Print the path of the Python that --python or PATH names, and end
    #[arg(long)]
    print_python: bool,
    /// Tell how ranks end, and have the backend tell what it does
    #[arg(long)]
    verbose: bool,
}

/// Who gets standard input.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum StdinTarget {
    /// The first rank
    #[default]
    Rank0,
    /// Every rank
    All,
    /// None
    None,
}

/// How long ranks may run after one has ended; `None` without a limit.
#[derive(Clone, Copy, Debug)]
struct Linger(Option<Duration>);

fn linger(text: &str) -> Result<Linger, String> {
    if text == "never" {
        return Ok(Linger(None));
    }
    let seconds: u32 = text
        .parse()
        .map_err(|_| "expected seconds or `never`".to_owned())?;
    Ok(Linger(Some(Duration::from_secs(seconds.into()))))
}

/// Runs the program on all hosts.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    if args.print_python {
        return print(&args.python()?);
    }
    let (hosts, nodes) = args.machines()?;
    let backend = args.backend(&hosts)?;
    let scratch = launch::folder(&env::temp_dir()).context("cannot make a temporary folder")?;
    let launch = args.launch(backend, &hosts, &scratch)?;
    let streams = Streams {
        input: Box::new(BlockingStream(io::stdin())),
        output: Box::new(BlockingStream(io::stdout())),
        errors: Box::new(BlockingStream(io::stderr())),
    };
    let reach = match nodes {
        Some(nodes) => SshClient::by_nodes(own_program()?, nodes),
        None => SshClient::new("ssh", Some(scratch.path())),
    };
    let mut notice = |notice: Notice| {
        if args.verbose || matches!(notice, Notice::Killed(_)) {
            print_err(&notice);
        }
    };
    signals.orderly(|cancel| {
        let cancelled = || cancel.is_cancelled();
        let ended = launch::run(&launch, &reach, streams, &cancelled, &mut notice);
        ended.map_err(|error| told(error, backend))
    })
}

/// `NAME=VALUE` of the command line; for `NAME` alone with its value here.
fn with_value(text: &str) -> Result<String, Error> {
    if text.contains('=') {
        return Ok(text.to_owned());
    }
    let not_set = |_| {
        misused(
            format!("--env {text}: it is not set here, or not UTF-8"),
            format!("write --env {text}=VALUE, or export it first"),
        )
    };
    let value = env::var(text).map_err(not_set)?;
    Ok(format!("{text}={value}"))
}

fn path() -> Option<OsString> {
    env::var_os("PATH")
}

fn told(error: LaunchError, backend: Backend) -> anyhow::Error {
    match error {
        LaunchError::OutputGone => Error::ReaderGone.into(),
        // `mpirun` is not a rank: it passes a rank's exit code on.
        LaunchError::Failed { ending, .. } if backend == Backend::Mpi => {
            MpirunFailed(ending).into()
        }
        error => error.into(),
    }
}

/// Ids of nodes by the names of their hosts.
type NodeIds = BTreeMap<String, String>;

/// This program's file.
fn own_program() -> anyhow::Result<PathBuf> {
    env::current_exe().context("cannot find this program's own file")
}

/// The first `count` machines that run programs, each `repeats` times in a row.
fn joined(count: usize, repeats: usize) -> anyhow::Result<(Hostfile, NodeIds)> {
    let found = consenting(&home::folder()?)?;
    if found.machines.len() < count {
        let refusing = match &found.refusing[..] {
            [] => String::new(),
            names => format!("; not allowed on {}", names.join(", ")),
        };
        let n = found.machines.len();
        let hint = match n {
            0 => "start this machine's node: paceline up",
            _ => "each machine allows it by `paceline up --allow-programs`",
        };
        let text = format!("{n} machines run programs, {count} are wanted{refusing}");
        return Err(failed(text, hint).into());
    }
    let chosen = || found.machines.iter().zip(&found.addresses).take(count);
    let others = chosen().filter(|(machine, _)| !machine.is_own);
    let ids = others.map(|(machine, _)| (machine.name.clone(), machine.id.clone()));
    let host = |machine: &ClusterMachine, address: &String| Host {
        ssh: match machine.is_own {
            true => "127.0.0.1".to_owned(),
            false => machine.name.clone(),
        },
        ips: vec![address.clone()],
        ..Host::default()
    };
    let hosts = chosen().flat_map(|(it, at)| std::iter::repeat_n(host(it, at), repeats));
    let file = Hostfile {
        hosts: hosts.collect(),
        ..Hostfile::default()
    };
    Ok((file, ids.collect()))
}

impl Args {
    /// The hosts, and the nodes that reach them if they are machines of the cluster.
    fn machines(&self) -> anyhow::Result<(Hostfile, Option<NodeIds>)> {
        let repeats = self.repeat_hosts.into();
        Ok(match (&self.hostfile, self.nodes) {
            (Some(path), _) => (Hostfile::read(path)?, None),
            (None, Some(count)) => {
                let (file, nodes) = joined(count.into(), repeats)?;
                (file, Some(nodes))
            }
            (None, None) => (Hostfile::from_names(&self.hosts, repeats)?, None),
        })
    }

    fn backend(&self, hosts: &Hostfile) -> anyhow::Result<Backend> {
        let named = self.backend.as_deref().filter(|name| *name != "any");
        let of_file = Some(&hosts.backend[..]).filter(|name| !name.is_empty() && *name != "any");
        match named.or(of_file) {
            Some(name) => Ok(name.parse()?),
            // A file of the kernel driver, present on every Linux with a working GPU.
            None if PathBuf::from("/dev/nvidiactl").exists() => Ok(Backend::Nccl),
            None => Ok(Backend::Ring),
        }
    }

    fn launch(
        &self,
        backend: Backend,
        hosts: &Hostfile,
        scratch: &TempDir,
    ) -> anyhow::Result<Launch> {
        let options = Options {
            env: self.environment(hosts)?,
            connections_per_ip: self.connections_per_ip,
            starting_port: self.starting_port,
            nccl_port: self.nccl_port,
            repeats: self.repeat_hosts.into(),
            verbose: self.verbose,
        };
        let ranks = launch::plan(backend, hosts, &options)?;
        let mut command = self.command.clone();
        if let Some(python) = &self.python {
            command.insert(0, python.clone());
        }
        let place = self.place()?;
        let limits = self.limits();
        let stdin = self.stdin();
        if backend == Backend::Mpi {
            let mpirun = openmpi::find(path().as_deref(), &self.mpi_arg, &ranks, scratch.path())?;
            return Ok(launch::mpi::launch(
                &mpirun, &ranks, command, place, stdin, limits,
            ));
        }
        Ok(Launch {
            ranks,
            command,
            place,
            stdin,
            tags: RankTags::Session,
            limits,
        })
    }

    /// Variables of the command line, and the terminal's size.
    fn environment(&self, hosts: &Hostfile) -> Result<Vec<String>, Error> {
        let given = self.env.iter().map(|text| with_value(text));
        let mut env = given.collect::<Result<Vec<_>, _>>()?;
        let mut set = hosts.envs.iter().chain(&env);
        if set.any(|text| text.starts_with("COLUMNS=")) {
            return Ok(env);
        }
        let size = tcgetwinsize(io::stdout()).ok();
        let or = |name, of_terminal: Option<u16>| {
            let set = env::var(name).ok().and_then(|text| text.parse().ok());
            set.filter(|size| *size > 0).or(of_terminal).unwrap_or(0)
        };
        let columns = or("COLUMNS", size.map(|size| size.ws_col));
        if columns > 0 {
            env.push(format!("COLUMNS={columns}"));
            env.push(format!(
                "LINES={}",
                or("LINES", size.map(|size| size.ws_row))
            ));
        }
        Ok(env)
    }

    fn place(&self) -> anyhow::Result<WorkingDirectory> {
        if let Some(folder) = &self.cwd {
            return Ok(WorkingDirectory::Required(folder.clone()));
        }
        let here = env::current_dir().context("cannot find the current folder")?;
        let here = here.into_os_string().into_string();
        let not_utf8 = |here: OsString| {
            failed(
                format!("the current folder {here:?} is not UTF-8"),
                "name a folder with --cwd",
            )
        };
        Ok(WorkingDirectory::IfPresent(here.map_err(not_utf8)?))
    }

    fn limits(&self) -> LaunchLimits {
        LaunchLimits {
            start: Duration::from_secs(self.start.into()),
            grace: Duration::from_secs(self.grace.into()),
            linger: self.linger.0,
        }
    }

    fn stdin(&self) -> StdinTo {
        // Reading the terminal would stop a launcher in the background.
        let stdin = io::stdin();
        let in_foreground = || tcgetpgrp(&stdin).is_ok_and(|group| group == getpgrp());
        match self.stdin {
            _ if stdin.is_terminal() && !in_foreground() => StdinTo::None,
            StdinTarget::Rank0 => StdinTo::Rank0,
            StdinTarget::All => StdinTo::All,
            StdinTarget::None => StdinTo::None,
        }
    }

    fn python(&self) -> Result<String, Error> {
        match &self.python {
            Some(python) => Ok(python.clone()),
            None => openmpi::in_path(path().as_deref(), "python3")
                .ok_or_else(|| failed("there is no python3 in PATH", "name one with --python")),
        }
    }
}
