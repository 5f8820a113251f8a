//! Process control on one machine, and the cluster's node agent.
//!
//! Starts, watches and ends processes that work together as one.
//!
//! A parent starts one process per rank on its machine and holds a *control channel* to each. The
//! channel is a Unix socket pair whose other end is the child's standard input. Messages are JSON,
//! one a line, in both directions. The child also sends a heartbeat every 200 ms. The crate
//! `launch` starts other programs, which do not use this protocol.
//!
//! ```text
//!  parent                                              child of rank r
//!  Workers::send ──────────── lines ────────────────▶  reader thread ──▶ Control::recv
//!  Workers::recv ◀── monitor ◀── lines, beats ───────  Control::send, beat thread
//!  line sink     ◀── thread  ◀── standard error ─────  (standard output goes nowhere)
//! ```
//!
//! The parent:
//!
//! ```no_run
//! use std::time::Duration;
//! use paceline_base::Rank;
//! use paceline_cluster::workers::{Event, WorkerSpec, Workers};
//!
//! # fn main() -> Result<(), paceline_cluster::Error> {
//! let args = (0..3).map(|rank| vec!["worker".into(), format!("--rank={rank}").into()]);
//! let spec = WorkerSpec::new("paceline", args.collect());
//! let workers: Workers<String, u64> = Workers::spawn(spec)?;
//! workers.send(Rank(0), &"how many?".to_owned())?;
//! match workers.recv(Duration::from_secs(10)) {
//!     Some(Event::Message { rank, message }) => eprintln!("{rank} says {message}"),
//!     Some(failure) => eprintln!("{failure}"),
//!     None => eprintln!("no answer in time"),
//! }
//! workers.stop(Duration::from_secs(1));
//! # Ok(())
//! # }
//! ```
//!
//! The child:
//!
//! ```no_run
//! use std::time::Duration;
//! use paceline_cluster::Control;
//!
//! # fn main() -> Result<(), paceline_cluster::Error> {
//! let control: Control<String, u64> = Control::from_stdin()?;
//! while let Some(_question) = control.recv(Duration::MAX)? {
//!     control.send(&42)?;
//! } // the process ends by itself when the parent is gone
//! # Ok(())
//! # }
//! ```
//!
//! In reading order:
//! - [`workers`]: the parent's side, and its guarantees when a process dies.
//! - [`Control`]: the child's side.
//! - [`sandbox`]: rights that children give up.
//! - [`bridge`]: a control channel to a worker on another machine.
//! - [`nodes`]: machines that form a cluster without a master.
//! - [`machine`]: this machine's memory, GPUs and programs.
//! - [`network`]: this machine's networks, and settings that block other machines.
//! - [`telemetry`]: load, memory and temperatures of this machine.
//! - [`Error`].
//!
//! Processes and their lines are those of [`paceline_process`].
//!
//! The crate knows nothing about models or what the messages mean. It has no async runtime: a
//! parent has two threads for any number of children.

pub mod bridge;
mod channel;
mod control;
mod error;
pub mod machine;
pub mod network;
pub mod nodes;
mod queue;
pub mod sandbox;
pub mod telemetry;
pub mod testing;
pub mod this_process;
mod wire;
pub mod workers;

pub use control::{Control, EXIT_CODE_PARENT_GONE};
pub use error::{Error, Garbage};
pub use wire::{BEAT, LINE_BYTES_MAX};
