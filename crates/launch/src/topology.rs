//! Detects cables between machines, and makes the best hostfile for them.
//!
//! ```text
//!  probe: one ssh session a host, all at once ──▶ ports, devices, addresses
//!      │
//!  graph: cables from the ports' identifiers ──▶ mesh? ring? missing cables?
//!      │
//!  address: a subnet for each cable ──▶ setup: commands that configure it, and that undo it
//!      │
//!  choice: backend and hostfile
//! ```
//!
//! For the same machines the hostfile equals that of `mlx.distributed_config` 0.32.4 byte for byte,
//! except where that tool is wrong: see [`best_ring`] and [`Addresses::assign`].
//!
//! Nothing here changes a machine: [`setup`] only prints commands.

mod address;
mod choice;
mod error;
mod graph;
mod probe;
mod rings;
pub mod setup;
mod thunderbolt;

pub use address::{Addresses, InterfaceNetwork};
pub use choice::{TopologyChoice, choose, ethernet};
pub use error::Error;
pub use graph::{Cable, CableEnd, Graph};
pub use probe::{ProbeResults, ProbeScope, ProbedMachine, probe, sorted};
pub use rings::{HOSTS_EXACT, Ring, best_ring, missing_for_ring};
pub use thunderbolt::{ConnectedPort, Port, connected_ports, ports};

/// For fuzzing: parses `bytes` as a machine's output.
pub(crate) fn parse(bytes: &[u8]) {
    probe::parse(bytes);
}
