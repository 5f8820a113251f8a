//! A process and its group, how processes end, and whole lines of many.
//!
//! The parts that workers and launches are built of, of use for any set of processes:
//! - [`Process`]: a child that does not outlive its owner, nor leave children of its own behind.
//! - [`Ending`], [`Endings`]: how it ended; which of many failed first.
//! - [`Lines`], [`Tail`], [`Prefixed`]: whole lines from pieces, the last of them, and many
//!   processes' lines on one output without mixing.

mod ending;
mod lines;
mod process;

pub use ending::{Ending, Endings};
pub use lines::{LINE_TEXT_BYTES_MAX, Lines, Prefixed, Tail};
pub use process::Process;
pub use rustix::process::Signal;
