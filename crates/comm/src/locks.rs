//! Locks: what this crate guards is in order after each statement, or fails by its own checks.

pub(crate) use paceline_base::lock;
