//! `paceline upgrade`: a new release for the machines of the cluster, one after the other.

use std::ffi::OsString;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use paceline_board::upgrade::{ClusterUpgrade, Error, MachineState, ReceiverSettings, receive};
use paceline_cluster::nodes::agent::local;
use paceline_process::Program;
use paceline_store::release::{
    Error as ReleaseError, Prefix, Release, ReleaseKey, ReleaseSource, Version, platform,
};

use crate::error::failed;
use crate::home::{self, StoreSettings};
use crate::interrupt::Signals;
use crate::output::{print, print_err};
use crate::progress::on_stderr;
use crate::{member, release};

const EXAMPLES: &str = "\
Examples:
  paceline upgrade --check                   what each machine has, and what the release has
  paceline upgrade                           from where install.sh took this program
  paceline upgrade /media/usb/paceline-0.2   from a folder of release files
  paceline upgrade --local                   this machine alone

Each machine drains, gets the new program, and restarts; the next one follows when all models answer
again. A machine checks the release's signature by the key of its own installation.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder or address of a release's files [default: where this program was installed from]
    from: Option<String>,
    /// Print what would be done
    #[arg(long)]
    check: bool,
    /// Only this machine
    #[arg(long)]
    local: bool,
    /// Public key of minisign that must have signed the release [default: the installation's]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Install an older release too
    #[arg(long, requires = "local")]
    downgrade: bool,
}

/// Arguments of the program that upgrades this machine for another one.
#[derive(Debug, clap::Args)]
pub(crate) struct ReceiverArgs {
    /// The program of this machine's node
    program: PathBuf,
}

/// Upgrades the machines of the cluster, or lists what would be done.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let prefix = Prefix::of_program(&program)?;
    let StoreSettings { options, .. } = StoreSettings::from_env()?;
    let source = args.from.as_deref().map(ReleaseSource::from);
    let source = source.or_else(|| prefix.source());
    let unknown = || {
        failed(
            "the installation does not say where it came from",
            "name it: paceline upgrade FOLDER",
        )
    };
    let source = source.ok_or_else(unknown)?;
    let key = match &args.key {
        Some(path) => Some(ReleaseKey::read(path)?),
        None => prefix.key()?,
    };
    if key.is_none() {
        print_err("warning: this installation has no release key: checksums alone are checked");
    }
    let home = home::folder()?;
    signals.orderly(|cancel| {
        let texts = source.texts(&options, cancel)?;
        let upgrade = ClusterUpgrade {
            home: &home,
            release: Release::checked(&texts, key.as_ref())?,
            prefix,
            installed: release::version().parse()?,
            source,
            texts,
            options: &options,
            cancel,
            tell: &|line| print_err(line),
        };
        match member::ask_if_up("nodes", serde_json::json!({}))? {
            Some(_) if args.check => list(&upgrade),
            Some(_) if !args.local => Ok(upgrade.run(&mut *on_stderr())?),
            found => here(args, &upgrade, found.is_some()),
        }
    })
}

fn list(upgrade: &ClusterUpgrade<'_>) -> anyhow::Result<()> {
    for (machine, state) in upgrade.states()? {
        print(&match state {
            MachineState::Current => format!("{machine}  has this release"),
            MachineState::Upgradable(version) => format!("{machine}  {version}, can be upgraded"),
            MachineState::Refuses(reason) => format!("{machine}  {reason}"),
        })?;
    }
    Ok(())
}

/// Upgrades this machine alone, whose node may not run.
fn here(args: &Args, upgrade: &ClusterUpgrade<'_>, is_up: bool) -> anyhow::Result<()> {
    let (offered, _) = upgrade.release.archive(&platform())?;
    let installed = upgrade.installed;
    if args.check {
        return print(&format!(
            "this machine  {installed}, the release has {offered}"
        ));
    }
    if offered == installed {
        return print(&format!("this machine has {installed}"));
    }
    if offered < installed && !args.downgrade {
        return Err(Error::Older {
            machine: "this machine".to_owned(),
            installed,
            offered,
        }
        .into());
    }
    let version = match is_up {
        true => upgrade.run_here(&mut *on_stderr())?,
        false => upgrade.install(&mut *on_stderr())?,
    };
    print(&format!("this machine has {version}"))
}

/// Starts the program that upgrades this machine for another one; `program` is that of this node.
pub(crate) fn start_receiver(
    own: &Path,
    program: &Path,
    home: &Path,
    env: &[(OsString, OsString)],
) -> io::Result<Program> {
    let mut command = Command::new(own);
    command.arg("upgrade-receiver").arg(program);
    command.env_clear().envs(env.iter().cloned());
    command.env("PACELINE_HOME", home);
    Program::start(command.stderr(Stdio::null()))
}

/// Upgrades this machine for a leader on standard input and output.
pub(crate) fn receiver(args: &ReceiverArgs) -> anyhow::Result<()> {
    let version: Version = release::version().parse()?;
    let home = home::folder()?;
    let settings = ReceiverSettings {
        program: &args.program,
        home: &home,
        version,
    };
    let (input, output) = (io::stdin().lock(), io::stdout().lock());
    Ok(receive(settings, &mut BufReader::new(input), &mut {
        output
    })?)
}

pub(crate) fn hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(ReleaseError::NotInstalled { .. }) = cause.downcast_ref() {
        return Some(
            "apt, dnf, brew or pip upgrades what it installed; a build is built anew".to_owned(),
        );
    }
    Some(match cause.downcast_ref::<Error>()? {
        Error::Older { .. } => {
            "on that machine: paceline upgrade --local --downgrade FOLDER".into()
        }
        Error::Machine { .. } => "`paceline upgrade --check` lists all machines".into(),
        Error::NotBack { machine, .. } => format!("look at the log of {machine}'s node"),
        Error::Node(local::Error::Refused(_)) => {
            "unload the model, or free memory on the others: this machine must drain first".into()
        }
        _ => return None,
    })
}
