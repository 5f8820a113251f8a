//! Counting what passed, what failed and what was skipped, by name.

use std::fmt;

/// Something that was not run, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    pub(crate) name: String,
    pub(crate) reason: String,
}

impl Skip {
    /// Reads `SKIPPED <name>: <reason>` at the start of a line or after a blank.
    pub(crate) fn find(line: &str) -> Option<Skip> {
        let mut starts = line.match_indices("SKIPPED ").map(|(at, _)| at);
        let at = starts.find(|at| {
            line[..*at].chars().all(|c| !c.is_alphanumeric()) || line[..*at].ends_with("... ")
        })?;
        let (name, reason) = line[at + "SKIPPED ".len()..].split_once(": ")?;
        Some(Skip {
            name: name.trim().into(),
            reason: reason.trim().into(),
        })
    }
}

/// The counts of one step or of a whole run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TestTally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skips: Vec<Skip>,
    /// Names of what failed, as far as they are known.
    pub(crate) failures: Vec<String>,
}

impl TestTally {
    /// The tally of a check that passed or failed as a whole.
    pub(crate) fn check(name: &str, passed: bool) -> TestTally {
        if passed {
            TestTally {
                passed: 1,
                ..TestTally::default()
            }
        } else {
            TestTally::failure(name)
        }
    }

    /// The tally of a check that failed.
    pub(crate) fn failure(name: &str) -> TestTally {
        TestTally {
            failed: 1,
            failures: vec![name.into()],
            ..TestTally::default()
        }
    }

    /// The tally of a check that could not be made.
    pub(crate) fn skip(name: &str, reason: &str) -> TestTally {
        let skip = Skip {
            name: name.into(),
            reason: reason.replace('\n', " "),
        };
        TestTally {
            skips: vec![skip],
            ..TestTally::default()
        }
    }

    /// Adds the counts of `other`.
    pub(crate) fn add(&mut self, other: TestTally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skips.extend(other.skips);
        self.failures.extend(other.failures);
    }

    /// Prints a line for everything that failed or was skipped.
    pub(crate) fn print_names(&self) {
        self.failures
            .iter()
            .for_each(|name| println!("FAILED {name}"));
        self.skips
            .iter()
            .for_each(|skip| println!("SKIPPED {}: {}", skip.name, skip.reason));
    }
}

/// The closing line, `N passed, N failed, N skipped`.
impl fmt::Display for TestTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skips.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_read_from_lines() {
        let skip = |name: &str, reason: &str| {
            Some(Skip {
                name: name.into(),
                reason: reason.into(),
            })
        };
        let cases = [
            (
                "SKIPPED gemma3 tests: no file",
                skip("gemma3 tests", "no file"),
            ),
            ("  SKIPPED x: a: b", skip("x", "a: b")),
            ("test a::b ... SKIPPED x: y", skip("x", "y")),
            ("SKIPPED without a reason", None),
            ("the word SKIPPED in prose: no", None),
            ("UNSKIPPED x: y", None),
            ("", None),
        ];
        for (line, expected) in cases {
            assert_eq!(Skip::find(line), expected, "{line}");
        }
    }

    #[test]
    fn tallies_add_up_to_the_closing_line() {
        let mut total = TestTally::default();
        assert_eq!(total.to_string(), "0 passed, 0 failed, 0 skipped");
        total.add(TestTally::check("fmt", true));
        total.add(TestTally::check("clippy", false));
        total.add(TestTally::skip("darwin check", "no\nzig"));
        assert_eq!(total.to_string(), "1 passed, 1 failed, 1 skipped");
        assert_eq!(total.failures, ["clippy"]);
        assert_eq!(total.skips[0].reason, "no zig");
    }
}
