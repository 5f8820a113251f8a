//! The pseudo-terminal of the tests of `run`.

#[path = "../run/terminal.rs"]
mod shared;

pub(crate) use shared::Terminal;
