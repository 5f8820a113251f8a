//! `cargo xtask mpi`: groups over a real MPI, by `mpirun` with 2, 3, 4 and 8 ranks. On top of such
//! a group it runs the cases that all of MLX's suites have, in Python.
//!
//! Needs Open MPI with its headers and libclang (Debian: libopenmpi-dev, openmpi-bin,
//! libclang-dev).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::tally::TestTally;
use crate::{mlx, process, repo};

const NAME: &str = "groups over MPI";

/// The sizes of MLX's wire tests, and of its MPI suite.
const RANKS: [u32; 4] = [2, 3, 4, 8];

/// Eight ranks on two cores take some seconds.
const LIMIT: Duration = Duration::from_secs(90);

/// Builds the test program and runs it; every case of every size is counted.
///
/// # Errors
/// When cargo cannot be run. Missing tools are a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    if let Err(error) = prepare() {
        return Ok(TestTally::skip(NAME, &format!("{error:#}")));
    }
    let Some(program) = build(show)? else {
        return Ok(TestTally::failure("mpi: did not build"));
    };
    let mut tally = TestTally::default();
    for ranks in RANKS {
        match mpirun(ranks, Command::new(&program)) {
            Ok(output) => {
                let passed = passed(&output, "", show);
                tally.passed += passed;
                if passed == 0 {
                    tally.add(TestTally::failure(&format!(
                        "mpi: {ranks} ranks ran no case"
                    )));
                }
            }
            Err(error) => {
                show(&format!("{error:#}"));
                tally.add(TestTally::failure(&format!(
                    "mpi: {ranks} ranks: {error:#}"
                )));
            }
        }
    }
    tally.add(python_cases(&program, show));
    Ok(tally)
}

/// Ranks of the Python cases. MLX has them with eight, which are slow on two cores.
const PYTHON_RANKS: u32 = 4;

/// Shows the cases that passed, each with `more` behind it; how many they are.
fn passed(output: &str, more: &str, show: &mut dyn FnMut(&str)) -> usize {
    let cases = output.lines().filter(|line| line.starts_with("ok "));
    let shown = cases.inspect(|case| show(&format!("{case}{more}")));
    shown.count()
}

/// The number of cases that `cases.py` prints at its end; 0 if it prints none.
fn announced(output: &str) -> usize {
    let mut lines = output.lines();
    let all = lines.find_map(|line| line.strip_prefix("done ")?.parse().ok());
    all.unwrap_or(0)
}

/// MLX's common cases, as many as `cases.py` says.
fn python_cases(program: &Path, show: &mut dyn FnMut(&str)) -> TestTally {
    let python = match mlx::python() {
        Ok(python) => python,
        Err(error) => return TestTally::skip("MLX's cases over MPI", &format!("{error:#}")),
    };
    let mut rank = Command::new(python);
    rank.arg(repo::root().join("crates/comm-interop/tests/mlx_ring/cases.py"));
    rank.args(["paceline", "common"]);
    rank.env("COMM_TEST_BINARY", program);
    rank.env("PYTHONDONTWRITEBYTECODE", "1");
    let output = match mpirun(PYTHON_RANKS, rank) {
        Ok(output) => output,
        Err(error) => {
            show(&format!("{error:#}"));
            return TestTally::failure("mpi: MLX's cases did not end well");
        }
    };
    let more = format!(" of MLX with {PYTHON_RANKS} ranks");
    let (passed, all) = (passed(&output, &more, show), announced(&output));
    let mut tally = TestTally {
        passed,
        ..TestTally::default()
    };
    if passed == 0 || passed != all {
        let text = format!("mpi: {passed} of {all} of MLX's cases passed");
        tally.add(TestTally::failure(&text));
    }
    tally
}

fn prepare() -> Result<()> {
    let headers = ["-E", "-x", "c", "-include", "mpi.h", "/dev/null"];
    for (program, arguments) in [("mpirun", &["--version"][..]), ("mpicc", &headers)] {
        let output = Command::new(program).args(arguments).output();
        let output = output.with_context(|| format!("no {program}"))?;
        ensure!(
            output.status.success(),
            "{program} {} ends with {}",
            arguments.join(" "),
            output.status
        );
    }
    let found = ["/usr/lib", "/usr/local/lib", "/opt/homebrew/opt/llvm/lib"];
    let mut places = found.into_iter().map(PathBuf::from).chain(
        std::fs::read_dir("/usr/lib")
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("lib")),
    );
    let has_libclang = |folder: PathBuf| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.any(|name| name.starts_with("libclang.") || name.starts_with("libclang-"))
    };
    let known = std::env::var_os("LIBCLANG_PATH").is_some();
    ensure!(
        known || places.any(has_libclang),
        "no libclang (Debian: libclang-dev)"
    );
    Ok(())
}

/// The test program, if it builds.
fn build(show: &mut dyn FnMut(&str)) -> Result<Option<PathBuf>> {
    let mut command = repo::cargo();
    // The workspace, so that what others built is used again: features are those of all crates.
    command.args(["test", "--release", "--workspace", "--no-run"]);
    command.args(["--features", "paceline-comm-interop/mpi", "--test", "mpi"]);
    command.arg("--message-format=json-render-diagnostics");
    let mut program = None;
    let built = process::stream(
        command,
        &process::log_path("mpi-build"),
        |line| match executable(line) {
            Some(path) => program = Some(path),
            None if line.starts_with('{') || process::is_progress(line) => {}
            None => show(line),
        },
    )?;
    Ok(program.filter(|_| built))
}

/// The path in one of cargo's messages, if it is about an executable.
fn executable(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    Some(message["executable"].as_str()?.into())
}

/// The output of `ranks` ranks of `rank`, if all ended well.
fn mpirun(ranks: u32, rank: Command) -> Result<String> {
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
    command.arg(ranks.to_string());
    command.arg(rank.get_program()).args(rank.get_args());
    let set = rank.get_envs();
    command.envs(set.filter_map(|(name, value)| Some((name, value?))));
    // Containers forbid the system call that Open MPI copies by between processes.
    command.env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    process::capture(command, LIMIT)
}
