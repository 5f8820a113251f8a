//! How much a run does.

/// How much the tests do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// What every change must pass.
    Default,
    /// With the slow proofs, which CONTRIBUTING.md lists.
    Long,
}

/// What the long run sets for the tests.
pub(crate) const LONG: (&str, &str) = ("PACELINE_TEST_LONG", "1");
