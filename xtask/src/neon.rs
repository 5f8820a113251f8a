//! `cargo xtask neon`: are the NEON kernels bit-equal to naive?
//!
//! On AArch64 the unit tests say so. Elsewhere the kernel tests are built for Linux on AArch64 and
//! run by QEMU's user-mode emulation. That needs `qemu-aarch64` and a cross linker (Debian:
//! qemu-user, gcc-aarch64-linux-gnu).

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cargo_test::TestLog;
use crate::tally::TestTally;
use crate::{process, repo, rust_target};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

/// Runs the kernel tests of `paceline-tensor` in their own target folder, `target/neon`.
///
/// # Errors
/// When cargo cannot be run. Missing tools are a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    if cfg!(target_arch = "aarch64") {
        return Ok(TestTally::skip(
            "NEON kernels in QEMU",
            "the unit tests ran them on this CPU",
        ));
    }
    if let Err(error) = prepare() {
        return Ok(TestTally::skip(
            "NEON kernels in QEMU",
            &format!("{error:#}"),
        ));
    }
    let mut command = repo::cargo();
    command.args(["test", "--release", "--package", "paceline-tensor", "--lib"]);
    command.args(["--target", TARGET, "--target-dir", "target/neon"]);
    command.args(["--", "--show-output", "kernels::tests"]);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    // All that the emulator knows, i8mm among it.
    let emulate = format!("{EMULATOR} -cpu max -L /usr/aarch64-linux-gnu");
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", emulate);
    let mut log = TestLog::new();
    let success = process::stream(command, &process::log_path("neon"), |line| {
        if log.read(line) {
            show(line);
        }
    })?;
    Ok(log.finish("neon", success))
}

fn prepare() -> Result<()> {
    for program in [LINKER, EMULATOR] {
        let found = Command::new(program).arg("--version").output();
        let output = found.with_context(|| format!("no {program}"))?;
        ensure!(
            output.status.success(),
            "{program} --version ends with {}",
            output.status
        );
    }
    rust_target::install(TARGET)
}
