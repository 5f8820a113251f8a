//! A listening address of this rank, and its pending connections.
//!
//! MLX's protocol has no handshake, so any connection may be the neighbour's. Two rules separate
//! them:
//! - A connection that closed without data is dropped: a port scan, a health check.
//! - A connection that closed after data may be a stranger's, or a neighbour's that sent a message
//!   and ended. This rank then waits a while for another, which would be the neighbour's.
//!
//! If two stay open, one is a stranger's; which one is undecidable.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use paceline_base::Rank;

use super::connect::{JoinError, prepare, system};
use super::run::{has_ended, is_closed};
use paceline_comm::provider::now;

/// How long to wait for another connection after one that closed with data. Longer than the start
/// times of ranks on one machine differ, and short for a person.
const ANOTHER: Duration = Duration::from_secs(1);

/// Most pending connections; further ones wait in the system's queue.
const CALLERS_MAX: usize = 16;

pub(super) struct NeighbourListener<'a> {
    listener: &'a TcpListener,
    pub(super) addr: SocketAddr,
    callers: Vec<TcpStream>,
    /// Start of the time in which all connections were closed.
    gone_since: Option<Instant>,
}

impl<'a> NeighbourListener<'a> {
    pub(super) fn open(listener: &'a TcpListener, addr: SocketAddr) -> Result<Self, JoinError> {
        let set = listener.set_nonblocking(true);
        set.map_err(system("listen at", addr))?;
        Ok(Self {
            listener,
            addr,
            callers: Vec::new(),
            gone_since: None,
        })
    }

    /// Accepts new connections and drops those that do not count.
    pub(super) fn accept(&mut self) {
        while self.callers.len() < CALLERS_MAX
            && let Ok((stream, _)) = self.listener.accept()
        {
            self.callers.extend(prepare(stream));
        }
        self.callers.retain(|caller| !is_closed(caller));
        let stays = |caller: &TcpStream| !has_ended(caller);
        if self.callers.iter().any(stays) {
            self.callers.retain(stays);
            self.gone_since = None;
        } else if self.callers.is_empty() {
            self.gone_since = None;
        } else {
            self.gone_since.get_or_insert_with(now);
        }
    }

    /// Whether the neighbour seems connected.
    pub(super) fn is_filled(&self) -> bool {
        let has_waited = |since: Instant| now().saturating_duration_since(since) >= ANOTHER;
        !self.callers.is_empty() && self.gone_since.is_none_or(has_waited)
    }

    /// The connection of `neighbour`, if it is the only one.
    pub(super) fn into_caller(mut self, neighbour: Rank) -> Result<TcpStream, JoinError> {
        match (self.callers.pop(), &self.callers[..]) {
            (Some(caller), []) => Ok(caller),
            (last, others) => Err(JoinError::Strangers {
                rank: neighbour,
                addr: self.addr,
                callers: others
                    .iter()
                    .chain(&last)
                    .filter_map(|caller| caller.peer_addr().ok())
                    .collect(),
            }),
        }
    }
}
