//! Collectives between ranks that finish, fail by name, or give up in time, but never hang.
//!
//! A *group* is a fixed set of *ranks*. Each rank holds a handle and all call the same operations
//! in the same order:
//!
//! ```
//! use std::time::{Duration, Instant};
//! use paceline_comm::{Deadline, Group, Reduce, local};
//!
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(5));
//! let threads: Vec<_> = local::ranks(3)
//!     .into_iter()
//!     .map(|handle| {
//!         std::thread::spawn(move || {
//!             let group: &dyn Group = &handle;
//!             let mut data = [group.rank().0 as f32, 1.0];
//!             group.all_reduce(&mut data, Reduce::Sum, deadline).map(|()| data)
//!         })
//!     })
//!     .collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap(), Ok([3.0, 3.0]));
//! }
//! ```
//!
//! In reading order:
//! - [`Group`]: the trait and its contract; [`Collective`]: a call as data.
//! - [`Data`], [`DataMut`], [`ElementCounts`]: the buffers of a call, with the type erased.
//! - [`Call`]: what a rank announces and the lockstep guard compares; [`Error`]; [`Deadline`].
//! - [`local`]: ranks as threads of one process; [`shm`]: as processes of one machine; [`tcp`]:
//!   connected by TCP; [`init`]: a chosen or the best backend.
//! - [`provider`]: the interface between [`init`] and backends above this crate (`comm-rdma`,
//!   `comm-interop`), and the parts that they reuse.
//! - [`RegisteredMemory`]: memory that devices use in place; [`NonblockingCalls`]: several calls in
//!   flight; [`Tuning`]: the choice of algorithms.
//! - [`testing`]: the conformance suite that every provider runs.
//!
//! The crate knows nothing about models. Steps and bytes of every algorithm: `docs/algorithms.md`.

#![warn(clippy::cast_possible_truncation)]

mod call;
mod collective;
mod data;
mod deadline;
mod error;
mod file;
mod group;
mod heartbeat;
mod init;
mod join;
pub mod local;
mod locks;
mod mapping;
mod memory;
mod nonblocking;
mod peer_bytes;
mod plan;
mod process;
pub mod provider;
mod reduce;
mod regions;
mod ring;
#[cfg(test)]
mod ring_tests;
mod shared_rings;
pub mod shm;
#[cfg(test)]
mod simulation;
mod single_copy;
mod site;
mod sockets;
mod split;
mod status;
mod sync;
pub mod tcp;
pub mod testing;
mod transport;
mod transport_group;
mod tuning;
mod wire;

pub use call::{Call, Kind};
pub use collective::Collective;
pub use data::{Complex64, Data, DataMut, Dtype, Element, ElementCounts};
pub use deadline::Deadline;
pub use error::Error;
pub use group::{CopyStats, Group, MESSAGES_HELD, Traffic};
pub use heartbeat::Starvation;
pub use init::{Backend, InitError, JoinParams, Plaintext, Strict, UnknownBackend, init};
pub use join::resolve;
pub use memory::{MemoryRegistration, Pages, RegisteredMemory};
pub use nonblocking::{NonblockingCalls, PendingCall};
pub use reduce::Reduce;
pub use site::Site;
pub use tuning::{Algorithm, Tuning};
