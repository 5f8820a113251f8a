//! `paceline service`: this machine's node as a service of the operating system.

use std::env;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use paceline_node::service::{Error, Folders, Manager, Scope, Service, line, object};

use crate::output::{print, print_err};
use crate::{Cli, home};

const EXAMPLES: &str = "\
Examples:
  paceline service install                       the node alone, for this user
  paceline service install -- smollm2 --port 8080   what stands behind -- are options of `up`
  sudo paceline service install --system         from the machine's start on
  paceline service status";

#[derive(Debug, clap::Subcommand)]
#[command(after_help = EXAMPLES)]
pub(crate) enum Command {
    /// Start the node now and at every login (or, with --system, at every start of the machine)
    Install {
        #[command(flatten)]
        scope: ScopeArgs,
        /// Options and models of `paceline up`, behind --
        #[arg(last = true, value_name = "UP ARGS")]
        up: Vec<String>,
        /// Print the unit and change nothing
        #[arg(long)]
        print: bool,
    },
    /// Whether the node runs, and where its unit is
    Status {
        #[command(flatten)]
        scope: ScopeArgs,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Stop the node and remove its unit
    Remove {
        #[command(flatten)]
        scope: ScopeArgs,
    },
}

/// For whom the service runs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct ScopeArgs {
    /// For the machine instead of this user; needs root
    #[arg(long)]
    system: bool,
}

pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Install {
            scope,
            up,
            print: false,
        } => install(&service(*scope, up)?),
        Command::Install { scope, up, .. } => print(service(*scope, up)?.unit().trim_end()),
        Command::Status { scope, json } => status(&service(*scope, &[])?, *json),
        Command::Remove { scope } => {
            let path = service(*scope, &[])?.remove(&folders()?)?;
            print(&format!("removed {}", path.display()))
        }
    }
}

fn service(scope: ScopeArgs, up: &[String]) -> anyhow::Result<Service> {
    let arguments: Vec<String> = std::iter::once("up".to_owned())
        .chain(up.iter().cloned())
        .collect();
    // Reports a mistake now, not in the log at the next start.
    let line = std::iter::once("paceline").chain(arguments.iter().map(String::as_str));
    Cli::try_parse_from(line).context("these are no arguments of `paceline up`")?;
    Ok(Service {
        manager: Manager::here()?,
        scope: match scope.system {
            true => Scope::System,
            false => Scope::User,
        },
        // By path: the service starts the updated program after an update.
        program: env::current_exe().context("cannot find this program")?,
        arguments,
        home: home::named_folder()?,
    })
}

fn folders() -> anyhow::Result<Folders> {
    let home = PathBuf::from(env::var_os("HOME").context("HOME is not set")?);
    let config = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    Ok(Folders {
        config: config
            .filter(|path| path.is_absolute())
            .unwrap_or_else(|| home.join(".config")),
        home,
        root: "/".into(),
    })
}

fn install(service: &Service) -> anyhow::Result<()> {
    let path = service.install(&folders()?)?;
    print(&format!("installed {}", path.display()))?;
    print_err(
        "The node runs, and starts again by itself: `paceline nodes`, `paceline service status`",
    );
    if service.scope == Scope::User && service.manager == Manager::Systemd {
        print_err("It ends when you log out, unless you say: loginctl enable-linger");
    }
    Ok(())
}

fn status(service: &Service, as_json: bool) -> anyhow::Result<()> {
    let folders = folders()?;
    let path = service.path(&folders);
    let found = match service.state(&folders) {
        Ok(state) => Some(state),
        Err(Error::Missing { .. }) => None,
        Err(other) => return Err(other.into()),
    };
    if as_json {
        return print(&object(found.as_ref(), &path).to_string());
    }
    match found {
        Some(state) => print(&line(&state, &path)),
        None => print("not installed: `paceline service install` does it"),
    }
}
