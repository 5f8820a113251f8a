//! Standard libraries of other targets.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::{process, repo};

/// rustup downloads some 30 MB when a target is missing.
const RUSTUP_LIMIT: Duration = Duration::from_secs(300);

/// Installs the standard library of `target` with rustup, unless it is there.
pub(crate) fn install(target: &str) -> Result<()> {
    let rustup = |arguments: &[&str], limit| {
        let mut command = Command::new("rustup");
        command.args(arguments).current_dir(repo::root());
        process::capture(command, limit)
    };
    let installed = rustup(&["target", "list", "--installed"], Duration::from_secs(20))?;
    if !installed.lines().any(|line| line.trim() == target) {
        rustup(&["target", "add", target], RUSTUP_LIMIT)?;
    }
    Ok(())
}
