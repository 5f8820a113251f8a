//! Ranks as processes connected by TCP.
//!
//! Every rank binds a [`Listener`], and a launcher distributes the list of all addresses. Every
//! rank then calls [`join`], which connects each pair by sockets for collectives, messages and
//! control.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use paceline_base::Rank;
//! use paceline_comm::{Deadline, Group, tcp};
//!
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(5));
//! let bind = || tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
//! let listeners = [bind(), bind()];
//! let addrs = [listeners[0].addr(), listeners[1].addr()];
//! let id = tcp::GroupId::random();
//! let threads: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| {
//!     std::thread::spawn(move || {
//!         let group = tcp::join(listener, Rank(rank), &addrs, id, deadline).unwrap();
//!         (&group as &dyn Group).barrier(deadline)
//!     })
//! }).collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap(), Ok(()));
//! }
//! ```
//!
//! `join` makes the connections, `heartbeat` monitors them, and `sockets` turns them into links.

use std::fmt;

use paceline_base::Rank;

use crate::heartbeat::{MonitoredGroup, MonitoredLinks, keeping_group};
use crate::join::JoinRecord;
pub use crate::join::{
    Addrs, Config, GroupId, GroupKey, JoinError, KEY_BYTES, Listener, Protection, Refusal, SILENCE,
};
use crate::sockets::{self, Sockets};
use crate::split::{SplitMember, members};
use crate::transport_group::TransportGroup;
use crate::{Deadline, Error, Group};

/// A rank of a group over TCP. Dropping it ends the group for the others.
pub struct Tcp(MonitoredGroup<Sockets>);

/// [`join_with`] the default [`Config`].
pub fn join<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    join_with(listener, rank, addrs, id, Config::default(), deadline)
}

/// Connects `rank` with all others and returns when all ranks are connected. Collective.
///
/// `addrs` has the address of every rank in rank order (or a list of [`Addrs`]); `id` is the same
/// on all ranks. `listener` is the one at `addrs[rank]`. Other processes that connect are turned
/// away and cannot end the join. Addresses off loopback need an explicit [`Config::protection`].
/// Blocks until all ranks have arrived, one of them failed, or the deadline passed.
///
/// # Errors
/// Any [`JoinError`]; the others get one that names this rank.
pub fn join_with<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    assemble(JoinRecord::new(listener, addrs, id, config), rank, deadline)
}

fn assemble(origin: JoinRecord, rank: Rank, deadline: Deadline) -> Result<Tcp, JoinError> {
    let linked = sockets::connect(&origin, rank, deadline)?;
    start(linked, origin, deadline)
}

/// Makes a group of connected ranks.
pub(crate) fn start(
    linked: TransportGroup<Sockets>,
    origin: JoinRecord,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    MonitoredGroup::start(linked, origin, deadline).map(Tcp)
}

impl Tcp {
    /// Why this rank last turned a process away since the group was complete. The process, which
    /// receives the same reason, may be a second process of a rank. The group continues.
    pub fn turned_away(&self) -> Option<Refusal> {
        self.0.linked.transport().controls().turned_away()
    }
}

keeping_group!(Tcp, assemble);

#[cfg(test)]
mod tests;
