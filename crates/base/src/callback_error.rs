//! The error of a function that a crate is given by the crates above.

/// Error of a callback, whose kinds the caller does not know. People and peers see its text.
pub type CallbackError = Box<dyn std::error::Error + Send + Sync>;
