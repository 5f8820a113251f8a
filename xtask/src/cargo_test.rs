//! Reading what `cargo test -- --show-output` prints: counts, failures, skips.
//!
//! A test that cannot do its work here (no model file, no device) prints
//! `SKIPPED <name>: <reason>` to stderr and returns. The harness counts it as passed and swallows
//! the line; `--show-output` brings the line back, and this reader counts the test as skipped.

use std::collections::BTreeSet;

use crate::tally::{Skip, TestTally};

/// The section of the lines at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Section {
    /// cargo building, or announcing the next test binary.
    Cargo,
    /// The harness's running list.
    Running,
    /// Output of passed tests; holds the test whose output it is.
    Successes(String),
    /// Output of failed tests.
    Failures,
}

/// Reads line after line; [`TestLog::finish`] gives the counts.
#[derive(Debug)]
pub(crate) struct TestLog {
    section: Section,
    tally: TestTally,
    /// Number of the test binary, to distinguish tests of one name.
    binary: usize,
    /// Tests that said they were skipped: (binary, test or line).
    skipped: BTreeSet<(usize, String)>,
}

impl TestLog {
    /// Before the first line.
    pub(crate) fn new() -> TestLog {
        TestLog {
            section: Section::Cargo,
            tally: TestTally::default(),
            binary: 0,
            skipped: BTreeSet::new(),
        }
    }

    /// Parses one line; true when a person following the run should see it.
    pub(crate) fn read(&mut self, line: &str) -> bool {
        if let Some(skip) = Skip::find(line) {
            self.skip(skip, line);
        }
        if let Some((passed, failed)) = parse_result(line) {
            self.tally.passed += passed;
            self.tally.failed += failed;
            self.binary += 1;
            self.section = Section::Cargo;
            return true;
        }
        match line {
            "successes:" => self.section = Section::Successes(String::new()),
            "failures:" => self.section = Section::Failures,
            _ if is_running_line(line) => self.section = Section::Running,
            _ => return self.read_inside(line),
        }
        self.section == Section::Failures
    }

    /// A line that does not change the section.
    fn read_inside(&mut self, line: &str) -> bool {
        let noise = line.is_empty() || line.trim_start().starts_with("Compiling ");
        match &mut self.section {
            Section::Cargo => !noise,
            Section::Failures => true,
            Section::Successes(test) => {
                if let Some(name) = output_heading(line) {
                    *test = name.into();
                }
                false
            }
            Section::Running => self.read_outcome(line),
        }
    }

    /// `test NAME ... OUTCOME`.
    fn read_outcome(&mut self, line: &str) -> bool {
        let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        else {
            return !line.is_empty();
        };
        if outcome.starts_with("ignored") {
            let reason = outcome
                .trim_start_matches("ignored")
                .trim_start_matches([',', ' ']);
            let reason = if reason.is_empty() { "ignored" } else { reason };
            self.tally.skips.push(Skip {
                name: name.into(),
                reason: reason.into(),
            });
        }
        if outcome.starts_with("FAILED") {
            self.tally.failures.push(name.into());
        }
        outcome != "ok"
    }

    /// Notes the skip, once per test: that test is then not a passed one.
    fn skip(&mut self, skip: Skip, line: &str) {
        let key = match &self.section {
            Section::Successes(test) => test.clone(),
            Section::Failures => return, // it failed, also after a skip
            Section::Cargo | Section::Running => line.to_string(),
        };
        if self.skipped.insert((self.binary, key)) {
            self.tally.skips.push(skip);
        }
    }

    /// The counts; `success` is cargo's own verdict. A run that cargo calls failed counts at
    /// least one failure under the step's `name`, also when no test got to run.
    pub(crate) fn finish(mut self, name: &str, success: bool) -> TestTally {
        self.tally.passed = self.tally.passed.saturating_sub(self.skipped.len());
        if !success && self.tally.failed == 0 {
            self.tally.add(TestTally::failure(&format!(
                "{name}: did not build or ended early"
            )));
        }
        self.tally
    }
}

/// `running 3 tests`.
fn is_running_line(line: &str) -> bool {
    let count = line
        .strip_prefix("running ")
        .and_then(|rest| rest.split_once(' '));
    count.is_some_and(|(n, rest)| n.parse::<usize>().is_ok() && rest.starts_with("test"))
}

/// `---- NAME stdout ----`.
fn output_heading(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// Passed and failed of `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
fn parse_result(line: &str) -> Option<(usize, usize)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |label: &str| {
        counts
            .split("; ")
            .find_map(|part| part.strip_suffix(label)?.trim().parse().ok())
    };
    Some((count("passed")?, count("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "\
   Compiling paceline-base v0.1.0
     Running unittests src/lib.rs (target/release/deps/x)

running 5 tests
test a::works ... ok
test b::breaks ... FAILED
test c::waits ... ignored, needs RDMA
test d::skips ... ok
test e::skips ... ok

successes:

---- a::works stdout ----
it says test result and FAILED here

---- d::skips stdout ----
SKIPPED d: no Gemma file
SKIPPED d again: the same test

---- e::skips stdout ----
SKIPPED e: no Gemma file

successes:
    a::works
    d::skips
    e::skips

failures:

---- b::breaks stdout ----
SKIPPED b: said before it broke
assertion failed

failures:
    b::breaks

test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s
     Running tests/edge.rs (target/release/deps/y)

running 1 test
test a::works ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s
";

    fn read(text: &str) -> (TestLog, Vec<&str>) {
        let mut log = TestLog::new();
        let shown = text.lines().filter(|line| log.read(line)).collect();
        (log, shown)
    }

    #[test]
    fn a_run_is_counted() {
        let (log, _) = read(RUN);
        let tally = log.finish("unit", false);
        assert_eq!(tally.to_string(), "2 passed, 1 failed, 3 skipped");
        assert_eq!(tally.failures, ["b::breaks"]);
        let names: Vec<&str> = tally.skips.iter().map(|skip| skip.name.as_str()).collect();
        assert_eq!(names, ["c::waits", "d", "e"]);
    }

    #[test]
    fn a_person_sees_failures_and_results_and_little_else() {
        let (_, shown) = read(RUN);
        assert!(shown.contains(&"assertion failed"), "{shown:#?}");
        assert!(shown.contains(&"test b::breaks ... FAILED"), "{shown:#?}");
        assert_eq!(
            shown
                .iter()
                .filter(|line| line.starts_with("test result"))
                .count(),
            2
        );
        assert!(
            !shown.iter().any(|line| line.ends_with("... ok")),
            "{shown:#?}"
        );
        assert!(
            !shown.iter().any(|line| line.contains("Compiling")),
            "{shown:#?}"
        );
        assert!(
            !shown.contains(&"it says test result and FAILED here"),
            "{shown:#?}"
        );
    }

    #[test]
    fn a_failed_build_counts_as_a_failure() {
        let (log, shown) = read("error[E0425]: cannot find value `x`\nerror: could not compile\n");
        assert_eq!(shown.len(), 2);
        let tally = log.finish("unit", false);
        assert_eq!((tally.passed, tally.failed), (0, 1));
        assert!(
            tally.failures[0].starts_with("unit: "),
            "{:?}",
            tally.failures
        );
        assert_eq!(TestLog::new().finish("unit", true), TestTally::default());
    }
}
