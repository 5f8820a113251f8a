//! A worker on another machine: two processes that stand between it and the run.
//!
//! ```text
//! run ── control channel ── near ══ a line, such as ssh's ══ far ── control channel ── worker
//!     files in the run's folder         frames           files in a folder of its own
//! ```
//! Messages pass through as they are. Before a message go the files that it speaks of, so that a
//! worker finds them where it always does. Data and, where the other machine has none, the model go
//! the same way. Both sides say that they live, and end when the other does not.

mod far;
mod line;
mod near;
mod ssh;

pub use far::{FarSpec, far};
pub use line::Ends;
pub use near::near;
pub use ssh::{GREETING, by_ssh};

pub(crate) use line::parse;
