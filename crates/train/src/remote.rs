//! A worker on another machine, through a pair of forwarding processes.
//!
//! ```text
//! run ── control channel ── near ══ connection such as ssh's ══ far ── control channel ── worker
//!     files in the run's folder            frames              files in a folder of its own
//! ```
//! Messages are forwarded unchanged. The files that a message names are sent before it, so that a
//! worker finds them in its folder. Data is sent the same way, and so is the model if the other
//! machine has none. Both sides send heartbeats, and end when the other's stop.

mod frames;
mod run_side;
mod ssh;
mod worker_side;

pub use run_side::forward_to_worker;
pub use ssh::{GREETING, by_ssh};
pub use worker_side::{FarSpec, run_worker};

pub(crate) use frames::parse;
