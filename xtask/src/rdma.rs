//! `cargo xtask rdma`: tests RDMA over real verbs.
//!
//! Boots a virtual machine with a software device (`scripts/rdma/guest.sh`). There it runs the
//! tests of `crates/comm-rdma/src/tests/shared_library.rs` that need a device. They are the
//! conformance suite for two ranks, then two ranks as processes that sum 4 B to 1 MB. Opt-in: it
//! takes minutes and Debian.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tally::TestTally;
use crate::{process, repo};

/// The guest's commands: `tests` is the test program. Both ranks are processes of the guest.
const COMMAND: &str = "\
export COMM_TEST_RDMA_DEVICE=$RXE_DEV
./tests tests::loaded::a_device_conforms --exact --nocapture || exit 1
ranks='127.0.0.1:4001 127.0.0.1:4002'
COMM_TEST_RDMA_GROUP=\"1 $ranks\" ./tests tests::loaded::a_device_carries_every_size --exact --nocapture &
COMM_TEST_RDMA_GROUP=\"0 $ranks\" ./tests tests::loaded::a_device_carries_every_size --exact --nocapture || exit 1
wait $!";

/// Builds the tests and runs them in the guest.
///
/// # Errors
/// When cargo or the script cannot be run. A missing tool or kernel feature is a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let tests = build()?;
    let folder = repo::root().join("target/rdma");
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let copy = folder.join("tests");
    std::fs::copy(&tests, &copy).with_context(|| format!("copy {}", tests.display()))?;
    guest(&folder, &copy, show)
}

/// The test program's path.
fn build() -> Result<PathBuf> {
    let mut command = repo::cargo();
    command.args([
        "test",
        "--release",
        "--package",
        "paceline-comm-rdma",
        "--lib",
    ]);
    command.args(["--no-run", "--message-format", "json"]);
    let output = command.output().context("run cargo test --no-run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let program = |line: &str| -> Option<PathBuf> {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        let tests = value["profile"]["test"] == true;
        let path = value["executable"].as_str().filter(|_| tests)?;
        Some(PathBuf::from(path))
    };
    match text.lines().find_map(program) {
        Some(path) if output.status.success() => Ok(path),
        _ => bail!(
            "cargo test --no-run: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        ),
    }
}

fn guest(folder: &Path, tests: &Path, show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    const NAME: &str = "RDMA in QEMU";
    let mut command = Command::new(repo::root().join("scripts/rdma/guest.sh"));
    command.arg(folder.join("kernel")).arg(COMMAND);
    command.env("FILES", tests);
    // The stream reports success only; a line says what is missing.
    let mut lacking = None;
    let passed = process::stream(command, &process::log_path("rdma"), |line| {
        show(line);
        lacking = lacking
            .take()
            .or_else(|| line.strip_prefix("guest: ").map(String::from));
    })?;
    Ok(match lacking {
        Some(reason) if !passed && is_lack(&reason) => TestTally::skip(NAME, &reason),
        _ => TestTally::check(&format!("{NAME}: see target/xtask/rdma.log"), passed),
    })
}

/// Whether the guest's complaint is about this machine, not about the tests.
fn is_lack(reason: &str) -> bool {
    !reason.starts_with("no end") && !reason.starts_with("it did not come up")
}
