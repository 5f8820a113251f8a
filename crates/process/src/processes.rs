//! Processes in groups, their exit states, and lines of many outputs.
//!
//! Building blocks of workers and launches, usable for any set of processes:
//! - [`Process`]: a child that ends with its owner, together with its own children.
//! - [`Ending`], [`ExitLog`]: the exit state of a process; the first failure of many.
//! - [`LineBuffer`], [`LineTail`], [`PrefixedWriter`]: whole lines from chunks, the last lines, and
//!   many processes' lines on one output without mixing.

mod exit;
mod lines;
mod process;

pub use exit::{Ending, ExitLog};
pub use lines::{LINE_TEXT_BYTES_MAX, LineBuffer, LineTail, PrefixedWriter};
pub use process::Process;
pub use rustix::process::Signal;
