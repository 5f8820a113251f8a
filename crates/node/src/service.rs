//! Installs this machine's node as a service of the operating system.
//!
//! ```text
//! Service (program, arguments, scope) --unit()--> text --install()--> file + systemctl | launchctl
//! ```
//!
//! Linux has systemd units, macOS has launchd's property lists. A service of the user needs no root
//! and ends with the login session unless the user may linger. A service of the system starts with
//! the machine. Nothing here reads the environment: callers name the folders.
//!
//! - [`Service`]: the program that is started, and its user.
//! - [`Manager`]: the program that starts it; [`Folders`]: where its files belong.
//! - [`State`]: the service's state, as the manager says.

mod launchd;
mod systemd;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// Seconds that a manager waits for a node to exit. A draining node hands over its models, for
/// which `paceline up` allows 120 s (`MOVE_LIMIT`), and closes its streams.
const STOP_S: u32 = 130;

/// Why a service was not installed, queried or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("services need systemd (Linux) or launchd (macOS)")]
    NoManager,
    /// A file or folder of the service cannot be written or removed.
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot run {program}: {source}; the unit is {unit}", unit = unit.display())]
    NotRun {
        /// `systemctl` or `launchctl`.
        program: &'static str,
        source: io::Error,
        /// The file that it should read.
        unit: PathBuf,
    },
    #[error("`{command}` fails: {said}")]
    Refused {
        /// The command line.
        command: String,
        /// The last line that it printed.
        said: String,
    },
    #[error("no service is installed: {path} is missing", path = path.display())]
    Missing {
        /// Where it would be.
        path: PathBuf,
    },
}

/// The program that starts services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// systemd, of most Linux distributions.
    Systemd,
    /// launchd, of macOS.
    Launchd,
}

impl Manager {
    /// The one of this operating system.
    ///
    /// # Errors
    /// [`Error::NoManager`].
    pub const fn here() -> Result<Self, Error> {
        if cfg!(target_os = "macos") {
            Ok(Self::Launchd)
        } else if cfg!(target_os = "linux") {
            Ok(Self::Systemd)
        } else {
            Err(Error::NoManager)
        }
    }
}

/// Scope of a service: the user or the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The user who installs it: no root is needed.
    User,
    /// The machine, from its start on: root installs it.
    System,
}

/// Where units are kept.
#[derive(Clone, Debug)]
pub struct Folders {
    /// The user's home.
    pub home: PathBuf,
    /// The user's settings, `$XDG_CONFIG_HOME` or `~/.config`.
    pub config: PathBuf,
    /// `/`, or a stand-in of a test.
    pub root: PathBuf,
}

/// A program to start as a service, with the manager that starts it and the scope it runs in.
#[derive(Clone, Debug)]
pub struct Service {
    /// The manager that starts it.
    pub manager: Manager,
    /// For whom.
    pub scope: Scope,
    /// Absolute path of `paceline`.
    pub program: PathBuf,
    /// Its arguments, `up` first.
    pub arguments: Vec<String>,
    /// `PACELINE_HOME`, where it is not the default.
    pub home: Option<PathBuf>,
}

/// The service's state, as its manager reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Such as `active` or `running`.
    pub state: String,
    /// The node's process, while it runs.
    pub pid: Option<u32>,
    /// Whether it starts by itself next time.
    pub enabled: bool,
}

/// The service of the unit at `unit` as one object; no state where none is installed.
pub fn object(state: Option<&State>, unit: &Path) -> Value {
    json!({
        "installed": state.is_some(),
        "state": state.map(|state| state.state.as_str()),
        "pid": state.and_then(|state| state.pid),
        "enabled": state.map(|state| state.enabled),
        "unit": unit.display().to_string(),
    })
}

/// The service of the unit at `unit`, for people.
pub fn line(state: &State, unit: &Path) -> String {
    let pid = state
        .pid
        .map(|pid| format!(", process {pid}"))
        .unwrap_or_default();
    let again = match state.enabled {
        true => "starts by itself",
        false => "does not start by itself",
    };
    format!("{}{pid}, {again}; {}", state.state, unit.display())
}

impl Service {
    /// The unit's text.
    pub fn unit(&self) -> String {
        match self.manager {
            Manager::Systemd => systemd::unit(self),
            Manager::Launchd => launchd::plist(self),
        }
    }

    /// The unit's file.
    pub fn path(&self, folders: &Folders) -> PathBuf {
        match self.manager {
            Manager::Systemd => systemd::path(self.scope, folders),
            Manager::Launchd => launchd::path(self.scope, folders),
        }
    }

    /// Writes the unit, replacing an earlier one; gives its file. Starts nothing.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn write(&self, folders: &Folders) -> Result<PathBuf, Error> {
        let path = self.path(folders);
        let failed = |source| Error::File {
            path: path.clone(),
            source,
        };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        fs::write(&path, self.unit()).map_err(failed)?;
        Ok(path)
    }

    /// Writes the unit and starts it, now and whenever the user or the machine starts. Blocks as
    /// long as the manager does, a second as a rule.
    ///
    /// # Errors
    /// Any [`Error`]; the file stays where the manager cannot be run or refuses.
    pub fn install(&self, folders: &Folders) -> Result<PathBuf, Error> {
        let path = self.write(folders)?;
        match self.manager {
            Manager::Systemd => systemd::start(self.scope, &path)?,
            Manager::Launchd => launchd::start(self.scope, &path)?,
        }
        Ok(path)
    }

    /// The state of the service, as its manager reports it.
    ///
    /// # Errors
    /// [`Error::Missing`] without a unit; what the manager says.
    pub fn state(&self, folders: &Folders) -> Result<State, Error> {
        let path = self.existing(folders)?;
        match self.manager {
            Manager::Systemd => systemd::state(self.scope, &path),
            Manager::Launchd => launchd::state(self.scope, &path),
        }
    }

    /// Stops the service and removes its unit; gives the file that was removed.
    ///
    /// # Errors
    /// [`Error::Missing`] without a unit; [`Error::File`]. A manager that does not know the unit,
    /// or cannot be run, does not keep the file from being removed.
    pub fn remove(&self, folders: &Folders) -> Result<PathBuf, Error> {
        let path = self.existing(folders)?;
        let stopped = match self.manager {
            Manager::Systemd => systemd::stop(self.scope, &path),
            Manager::Launchd => launchd::stop(self.scope, &path),
        };
        let removed = fs::remove_file(&path);
        removed.map_err(|source| Error::File {
            path: path.clone(),
            source,
        })?;
        match stopped {
            Err(Error::NotRun { .. } | Error::Refused { .. }) | Ok(()) => Ok(path),
            Err(other) => Err(other),
        }
    }

    fn existing(&self, folders: &Folders) -> Result<PathBuf, Error> {
        let path = self.path(folders);
        match path.is_file() {
            true => Ok(path),
            false => Err(Error::Missing { path }),
        }
    }
}

/// Runs a manager's command and gives what it printed.
fn ask(program: &'static str, arguments: &[&str], unit: &Path) -> Result<String, Error> {
    let mut command = Command::new(program);
    let done = command.args(arguments).output();
    let done = done.map_err(|source| Error::NotRun {
        program,
        source,
        unit: unit.to_owned(),
    })?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    Err(Error::Refused {
        command: format!("{program} {}", arguments.join(" ")),
        said: last.unwrap_or("it says nothing").trim().to_owned(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn service(manager: Manager, scope: Scope) -> Service {
        Service {
            manager,
            scope,
            program: "/opt/a \"b\" & 100%/paceline".into(),
            arguments: ["up", "smollm2", "--alias", "$x"]
                .map(str::to_owned)
                .to_vec(),
            home: Some("/data/my models".into()),
        }
    }

    fn folders(root: &Path) -> Folders {
        Folders {
            home: root.join("home"),
            config: root.join("home/.config"),
            root: root.to_owned(),
        }
    }

    #[test]
    fn a_unit_is_written_where_the_manager_looks_for_it() {
        let root = tempfile::tempdir().unwrap();
        let folders = folders(root.path());
        for (manager, scope, place) in [
            (
                Manager::Systemd,
                Scope::User,
                "home/.config/systemd/user/paceline.service",
            ),
            (
                Manager::Systemd,
                Scope::System,
                "etc/systemd/system/paceline.service",
            ),
            (
                Manager::Launchd,
                Scope::User,
                "home/Library/LaunchAgents/net.paceline.node.plist",
            ),
            (
                Manager::Launchd,
                Scope::System,
                "Library/LaunchDaemons/net.paceline.node.plist",
            ),
        ] {
            let service = service(manager, scope);
            let path = service.write(&folders).unwrap();
            assert_eq!(path, root.path().join(place));
            assert_eq!(fs::read_to_string(&path).unwrap(), service.unit());
        }
    }

    #[test]
    fn what_is_not_installed_is_missing_by_path() {
        let root = tempfile::tempdir().unwrap();
        let service = service(Manager::Systemd, Scope::User);
        let error = service.state(&folders(root.path())).unwrap_err();
        assert!(matches!(error, Error::Missing { .. }), "{error}");
        let error = service.remove(&folders(root.path())).unwrap_err();
        assert!(
            error.to_string().contains("paceline.service is missing"),
            "{error}"
        );
    }

    #[test]
    fn a_unit_goes_even_where_its_manager_does_not_answer() {
        let root = tempfile::tempdir().unwrap();
        let service = service(Manager::here().unwrap(), Scope::User);
        let path = service.write(&folders(root.path())).unwrap();
        assert_eq!(service.remove(&folders(root.path())).unwrap(), path);
        assert!(!path.exists());
    }
}
