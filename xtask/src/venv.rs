//! Python environments of the project: `target/venv` and others, made when a chore first needs
//! them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{process, repo};

/// Making an environment or installing into it may fetch a hundred megabytes; a mirror that is
/// slower than this is taken for absent.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// The Python of the project's own environment, as [`python_in`].
pub(crate) fn python_with(requirements: &str) -> Result<PathBuf> {
    python_in(&folder(), requirements)
}

/// The Python of the environment `folder`, with everything in `scripts/<requirements>` installed.
///
/// The environment has a copy of the file, so later calls use no network until the file changes.
pub(crate) fn python_in(folder: &Path, requirements: &str) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    if !python.exists() {
        let mut command = Command::new("python3");
        command.args(["-m", "venv"]).arg(folder);
        process::capture(command, INSTALL_LIMIT)?;
    }
    let file = repo::root().join("scripts").join(requirements);
    let wanted = std::fs::read(&file).with_context(|| format!("read scripts/{requirements}"))?;
    let stamp = folder.join(format!("installed-{}", requirements.replace('/', "-")));
    if std::fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    let mut command = Command::new(&python);
    command.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    command.args(["--only-binary", ":all:", "-r"]).arg(&file);
    process::capture(command, INSTALL_LIMIT)?;
    std::fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
    Ok(python)
}

/// The project's own environment.
pub(crate) fn folder() -> PathBuf {
    repo::root().join("target/venv")
}
