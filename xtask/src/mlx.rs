//! `cargo xtask mlx-ring`: rings of Rust and real MLX ranks, in a Python environment of their own.

use std::path::PathBuf;

use anyhow::Result;

use crate::cargo_test::TestLog;
use crate::tally::TestTally;
use crate::{models, process, repo, venv};

/// The variable from which the tests read the environment's Python.
pub(crate) const PYTHON: &str = "PACELINE_MLX_PYTHON";

/// The Python that has MLX. The environment lies next to the test models and stays there.
pub(crate) fn python() -> Result<PathBuf> {
    let folder = models::folder()?.with_file_name("test-clients/mlx");
    venv::python_in(&folder, "mlx/requirements.txt")
}

/// Runs the tests of `crates/comm-interop/tests/mlx_ring.rs`, each of them counted.
///
/// # Errors
/// When cargo cannot be run. A missing environment is a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let python = match python() {
        Ok(python) => python,
        Err(error) => {
            return Ok(TestTally::skip(
                "rings with MLX ranks",
                &format!("{error:#}"),
            ));
        }
    };
    let mut command = repo::cargo();
    command.args(["test", "--release", "--package", "paceline-comm-interop"]);
    command.args(["--test", "all", "mlx_ring", "--", "--show-output"]);
    command.env(PYTHON, python);
    let mut log = TestLog::new();
    let success = process::stream(command, &process::log_path("mlx-ring"), |line| {
        if log.read(line) {
            show(line);
        }
    })?;
    Ok(log.finish("mlx-ring", success))
}
