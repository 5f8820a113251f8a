//! Locks without poisoning: the guarded state is consistent after each statement, or fails by its
//! own checks.

pub(crate) use paceline_base::lock;
