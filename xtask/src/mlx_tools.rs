//! `cargo xtask mlx-tools`: compares `paceline launch` and `paceline topology` with MLX's own
//! tools, and runs Python MLX programs started by the first.
//!
//! The scripts in `scripts/mlx` print a line for each case, as those of `cargo xtask sdk` do; they
//! also run by hand. MLX lies in an environment next to the test models and stays there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::tally::TestTally;
use crate::{models, process, repo, sdk, venv};

/// The scripts to compare, in `scripts/mlx`, and the MLX tool that each needs.
const SCRIPTS: [(&str, &str); 3] = [
    ("topology.py", "mlx.distributed_config"),
    ("launch.py", "mlx.launch"),
    ("ranks.py", "mlx.distributed_config"),
];

/// MLX's output for recorded hosts, for tests without Python.
const GOLDEN: &str = "tests-data/topology/mlx-0.32.4.json";

/// Runs every script against `binary`, or what is built here.
///
/// # Errors
/// When paceline cannot be built or a script not be started. A missing environment is a skip.
pub(crate) fn run(binary: Option<PathBuf>, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let python = match python() {
        Ok(python) => python,
        Err(error) => return Ok(TestTally::skip("MLX's tools", &format!("{error:#}"))),
    };
    let binary = binary.map_or_else(|| sdk::build(see), Ok)?;
    let mut tally = TestTally::default();
    for (script, tool) in SCRIPTS {
        let mut command = command(&python, script, tool);
        command.arg("--paceline").arg(&binary);
        command.arg("--python").arg(&python);
        tally.add(count(script, command, see)?);
    }
    Ok(tally)
}

/// Writes [`GOLDEN`] anew.
pub(crate) fn golden() -> Result<()> {
    let mut command = command(&python()?, "topology.py", "mlx.distributed_config");
    command.arg("--write").arg(repo::root().join(GOLDEN));
    let log = process::log_path("mlx-golden");
    let written = process::stream(command, &log, |line| println!("{line}"))?;
    ensure!(written, "topology.py --write: see {}", log.display());
    println!("wrote {GOLDEN}");
    Ok(())
}

fn python() -> Result<PathBuf> {
    let folder = models::folder()?.with_file_name("test-clients/mlx");
    venv::python_in(&folder, "mlx/requirements.txt")
}

fn command(python: &Path, script: &str, tool: &str) -> Command {
    let mut command = Command::new(python);
    command.arg(repo::root().join("scripts/mlx").join(script));
    command.arg("--mlx").arg(python.with_file_name(tool));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs a script to its end and counts its cases.
fn count(script: &str, command: Command, see: &mut impl FnMut(&str)) -> Result<TestTally> {
    let log = process::log_path(&format!("mlx-{script}"));
    sdk::cases("mlx", &log, command, see)
}
