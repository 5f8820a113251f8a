//! `cargo xtask darwin`: does the workspace still compile for Apple silicon, would MLX load there?
//!
//! The first is a check, not a build. It needs the target's standard library (rustup has it) and,
//! for the C parts of `ring`, a C compiler that knows macOS. On a Mac that is the system's;
//! elsewhere it is Zig's, from a Python package, through `scripts/zig-cc`.
//!
//! The second builds MLX's C layer, as a release does, and reads it and MLX's library for macOS:
//! `packaging/layer.py`, `packaging/macho.py`.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tally::TestTally;
use crate::{process, repo, rust_target, sdk, venv};

const TARGET: &str = "aarch64-apple-darwin";

/// Runs the check.
///
/// # Errors
/// When cargo cannot be run. A missing toolchain is a skip.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let mut command = repo::cargo();
    // The profile of all builds here, so that macros and build scripts are there already.
    command.args(["check", "--release", "--workspace", "--target", TARGET]);
    if let Err(error) = rust_target::install(TARGET).and_then(|()| set_compiler(&mut command)) {
        return Ok(TestTally::skip("darwin check", &format!("{error:#}")));
    }
    let passed = process::stream(command, &process::log_path("darwin"), |line| {
        let progress = ["Compiling", "Checking", "Download"];
        if !progress
            .iter()
            .any(|word| line.trim_start().starts_with(word))
        {
            show(line);
        }
    })?;
    let mut tally = TestTally::check("darwin check: see target/xtask/darwin.log", passed);
    tally.add(layer(show)?);
    Ok(tally)
}

/// Builds MLX's C layer for macOS and compares it with MLX's library.
fn layer(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let python = match venv::python_with("requirements-darwin.txt") {
        Ok(python) => python,
        Err(error) => return Ok(TestTally::skip("MLX for macOS", &format!("{error:#}"))),
    };
    let mut command = Command::new(python);
    command.arg(repo::root().join("packaging/layer.py"));
    command.arg("darwin-arm64");
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let log = process::log_path("darwin-mlx");
    sdk::cases("darwin", &log, command, &mut |line| show(line))
}

/// Sets the compiler that `cc`, which builds the C parts, uses for the target.
fn set_compiler(command: &mut Command) -> Result<()> {
    if cfg!(target_os = "macos") {
        return Ok(());
    }
    let script = repo::root().join("scripts/zig-cc");
    ensure!(script.exists(), "scripts/zig-cc is missing");
    let python = venv::python_with("requirements-darwin.txt").context("no ziglang")?;
    command.env("CC_aarch64_apple_darwin", &script);
    command.env("ZIG", format!("{} -m ziglang", python.display()));
    Ok(())
}
