//! Ranks connected by RDMA: Thunderbolt cables between Macs, RoCE or InfiniBand.
//!
//! [`RdmaProvider`] is a provider for [`paceline_comm::init`]; [`join`] makes a group directly. Of
//! `comm` the crate uses what [`paceline_comm::provider`] publishes. The ranks meet by TCP, and the
//! links over cables are a transport below the same collectives and messages.
//!
//! The verbs library is opened at run time; builds need nothing installed. Queue pairs are of kind
//! UC and messages are two-sided: Apple's devices support nothing else. JACCL, MLX's library for
//! these devices, uses them in the same way. The crate understands JACCL's device file, environment
//! and side channel ([`Matrix`], [`JacclSettings`], [`SideChannel`]). The protocol on the cables is
//! paceline's own: the frames of every transport, in numbered and acknowledged messages. So
//! messages that UC loses silently are repeated.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use paceline_base::Rank;
//! use paceline_comm::{Deadline, Group, Reduce, tcp};
//! use paceline_comm_rdma::{self as rdma, Cabling, Matrix, Verbs};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (rank, addrs) = (Rank(0), Vec::<std::net::SocketAddr>::new());
//! # let (id, listener) = (tcp::GroupId::random(), todo());
//! # fn todo() -> tcp::Listener { tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap() }
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(30));
//! let matrix = Matrix::parse(r#"[[null, "rdma_en5"], ["rdma_en5", null]]"#)?;
//! let cabling = Cabling::new(Verbs::load()?, matrix);
//! let group = rdma::join(&cabling, listener, rank, &addrs, id, deadline)?;
//! let mut buffer = group.allocate(4096)?;
//! (&group as &dyn Group).all_reduce(&mut buffer[..], Reduce::Sum, deadline)?;
//! # Ok(())
//! # }
//! ```
//!
//! - `abi`, `verbs`: the library and its objects; `limits`: capacities of Apple's devices;
//! - `message`, `message_pair`, `link`, `links`: from work requests to a transport;
//! - `bulk_pair`, `bulk`, `chunks`: zero-copy transfers of large bodies;
//! - `slab`, `memory`: registered memory, of the group and of callers;
//! - `matrix`, `settings`, `side_channel`: JACCL's configuration;
//! - `cabling`, `join`, `group`: open devices, the join, and the group over them; `destination`:
//!   encoding of a queue pair's address;
//! - `fallback`: joins that use TCP where a cable fails;
//! - `route`: rings where the cables form no mesh;
//! - `soft`: a verbs library in software, for tests.
//!
//! The control connections detect the death of a peer, as for shared memory: UC does not. Nothing
//! is encrypted.

#![warn(clippy::cast_possible_truncation)]

#[cfg(test)]
extern crate self as paceline_comm_rdma; // for `tests/library.rs`, which other crates share

mod abi;
mod bulk;
mod bulk_pair;
mod cabling;
mod chunks;
mod destination;
mod error;
mod fallback;
#[cfg(test)]
#[path = "../../comm-interop/src/free.rs"]
mod free;
mod group;
mod join;
mod limits;
mod link;
mod links;
mod matrix;
mod memory;
mod message;
mod message_pair;
mod route;
pub mod settings;
mod side_channel;
mod slab;
#[cfg(test)]
mod soft;
#[cfg(test)]
mod software;
pub mod testing;
#[cfg(test)]
mod tests;
mod verbs;

pub use self::cabling::{Cabling, Config, IN_PLACE_BYTES, MESSAGE_BYTES};
pub use self::error::{ENABLE_RDMA, RdmaError};
pub use self::fallback::Refusal;
pub use self::group::{Rdma, RdmaProvider, join, join_settings};
pub use self::limits::{DeviceLimits, MemoryRegions, QueuePairs, WorkRequests};
pub use self::matrix::{CABLES_MAX, Matrix, MatrixError};
pub use self::memory::Registration;
pub use self::settings::{JacclSettings, SettingsError};
pub use self::side_channel::SideChannel;
pub use self::verbs::{DevicePort, LIBRARY, Verbs};
