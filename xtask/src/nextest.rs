//! Reading what `cargo nextest run --success-output immediate` prints: counts, failures, skips.
//!
//! A test that cannot do its work here prints `SKIPPED <name>: <reason>` and passes. This reader
//! counts it as skipped, as [`TestLog`](crate::cargo_test::TestLog) does for the plain harness.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::tally::{Skip, TestTally};
use crate::{process, repo, venv};

/// States that nextest prints before a test that failed.
const FAILED: [&str; 6] = ["FAIL", "TIMEOUT", "ABORT", "LEAK-FAIL", "XFAIL", "SIG"];

/// `cargo nextest`: an installed one, or else the pinned one in the project's Python environment.
pub(crate) fn command() -> Result<Command> {
    let mut version = repo::cargo();
    version.args(["nextest", "--version"]);
    let mut command = repo::cargo();
    command.arg("nextest");
    if process::capture(version, Duration::from_secs(20)).is_err() {
        venv::python_with("requirements-nextest.txt").context("no cargo-nextest is installed")?;
        // Last, so that tests find the same programs, Python above all.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = venv::folder().join("bin");
        let folders = std::env::split_paths(&path).chain([own]);
        command.env("PATH", std::env::join_paths(folders)?);
    }
    Ok(command)
}

/// Reads line after line; [`NextestLog::finish`] gives the counts.
#[derive(Debug, Default)]
pub(crate) struct NextestLog {
    tally: TestTally,
    /// The test whose state was printed last, with its program.
    test: String,
    /// Tests that passed, failed, and said that they were skipped.
    passed: BTreeSet<String>,
    failed: BTreeSet<String>,
    skipped: BTreeSet<String>,
    /// Whether the output of a test that failed follows.
    is_failure: bool,
}

impl NextestLog {
    /// Parses one line; true when a person following the run should see it.
    pub(crate) fn read(&mut self, line: &str) -> bool {
        if let Some((state, test)) = parse_state(line) {
            return self.read_state(state, test);
        }
        if line.trim_start().starts_with("Summary [") {
            self.is_failure = false;
            return true;
        }
        if !self.is_failure
            && let Some(skip) = Skip::find(line)
            && self.skipped.insert(self.test.clone())
        {
            self.tally.skips.push(skip);
        }
        self.is_failure
    }

    fn read_state(&mut self, state: &str, test: &str) -> bool {
        test.clone_into(&mut self.test);
        self.is_failure = FAILED.iter().any(|failed| state.starts_with(failed));
        if self.is_failure {
            self.failed.insert(test.to_owned());
        } else if matches!(state, "PASS" | "LEAK") {
            self.passed.insert(test.to_owned());
        }
        state != "PASS"
    }

    /// The counts; `success` is nextest's own verdict. A run that it calls failed counts at least
    /// one failure under the step's `name`, also when no test got to run.
    pub(crate) fn finish(mut self, name: &str, success: bool) -> TestTally {
        self.tally.passed = self.passed.difference(&self.skipped).count();
        self.tally.failed = self.failed.len();
        self.tally.failures.extend(self.failed);
        if !success && self.tally.failed == 0 {
            let ended = format!("{name}: did not build or ended early");
            self.tally.add(TestTally::failure(&ended));
        }
        self.tally
    }
}

/// State and test of `PASS [   0.012s] (13/17) paceline-mlx::library memory_is_counted`.
fn parse_state(line: &str) -> Option<(&str, &str)> {
    let (state, rest) = line.trim_start().split_once(" [")?;
    let is_state = |c: char| c.is_ascii_uppercase() || c == '-' || c.is_ascii_digit();
    if state.is_empty() || !state.chars().all(is_state) {
        return None;
    }
    let (_, test) = rest.split_once("s] ")?;
    let test = match test.trim_start().strip_prefix('(') {
        Some(counted) => counted.split_once(") ")?.1,
        None => test,
    };
    test.contains(' ').then_some((state, test.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of cargo-nextest 0.9.143.
    const RUN: &str = "\
    Finished `release` profile [optimized] target(s) in 5.72s
────────────
 Nextest run ID d36577bc with nextest profile: default
    Starting 4 tests across 2 binaries
        PASS [   0.012s] (1/4) paceline-mlx::library memory_is_counted
  stdout ───

    running 1 test
    test memory_is_counted ... ok

  stderr ───
    SKIPPED mlx memory: no libmlxc
    SKIPPED mlx again: the same test

        SLOW [> 60.000s] (─────────) paceline-cli::all nodes::same
        PASS [   0.010s] (2/4) paceline-base tree::sums
  stdout ───

    test result: ok. 1 passed; 0 failed; finished in 0.00s

        FAIL [   0.703s] (3/4) paceline-base tree::breaks
  stderr ───
    SKIPPED tree: said before it broke
    assertion failed

     SIGABRT [   0.100s] (4/4) paceline-cli::all nodes::same
────────────
     Summary [   1.106s] 4 tests run: 2 passed, 2 failed, 0 skipped
        FAIL [   0.703s] (3/4) paceline-base tree::breaks
     SIGABRT [   0.100s] (4/4) paceline-cli::all nodes::same
error: test run failed
";

    #[test]
    fn counts_skips_and_failures_are_read() {
        let mut log = NextestLog::default();
        let shown: Vec<&str> = RUN.lines().filter(|line| log.read(line)).collect();
        assert!(shown.contains(&"    assertion failed"), "{shown:#?}");
        assert!(
            !shown.iter().any(|line| line.contains("PASS")),
            "{shown:#?}"
        );
        let tally = log.finish("unit", false);
        assert_eq!(tally.to_string(), "1 passed, 2 failed, 1 skipped");
        assert_eq!(tally.skips[0].name, "mlx memory");
        assert_eq!(
            tally.failures,
            [
                "paceline-base tree::breaks",
                "paceline-cli::all nodes::same"
            ]
        );
    }

    #[test]
    fn a_run_that_ended_early_failed() {
        let tally = NextestLog::default().finish("unit", false);
        assert_eq!(tally.failures, ["unit: did not build or ended early"]);
    }
}
