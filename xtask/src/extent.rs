//! Extent of a test run.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TestExtent {
    /// The tests that every change must pass.
    Default,
    /// With the slow proofs, which CONTRIBUTING.md lists.
    Long,
}

/// Environment variable of the long run.
pub(crate) const LONG: (&str, &str) = ("PACELINE_TEST_LONG", "1");
