//! Connects the neighbours: accepts from the left, dials to the right.
//!
//! [`NeighbourListener`] selects the neighbour among the connections from the left. To the right, a
//! closed connection is dialled again, and a socket that the system connected to itself is dropped.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use paceline_base::Rank;

use super::neighbour_listener::NeighbourListener;
use super::run::{NeighbourSockets, is_closed};
use paceline_comm::Deadline;
use paceline_comm::provider::now;

/// Polling interval. MLX's ranks sleep for a second at least.
const NAP: Duration = Duration::from_millis(10);

/// Limit of one attempt to connect, so that an address without replies does not keep this rank from
/// accepting.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Why a rank could not join a ring.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error("mlx-ring is plaintext and {addr} is not on this machine's loopback: not allowed")]
    Plaintext {
        /// The first such address.
        addr: SocketAddr,
    },
    #[error("mlx-ring: {rank} is not in a ring of {size}")]
    NoSuchRank { rank: Rank, size: usize },
    /// A rank of the list has no address, or another number of addresses than rank 0.
    #[error("mlx-ring: {rank} has {got} addresses, expected {expected} as rank 0, and at least 1")]
    Connections {
        /// The first such rank.
        rank: Rank,
        /// Addresses of rank 0.
        expected: usize,
        /// Addresses of `rank`.
        got: usize,
    },
    #[error("mlx-ring: {what} {addr}: {source}")]
    System {
        what: &'static str,
        addr: SocketAddr,
        source: io::Error,
    },
    /// A neighbour did not connect before the deadline.
    #[error("mlx-ring: {rank} did not {what} {addr} before the deadline")]
    Missing {
        rank: Rank,
        /// The missing step: connect to this rank's address, or accept at its own.
        what: &'static str,
        addr: SocketAddr,
    },
    #[error("mlx-ring: {callers:?} connected to {addr}, expected only {rank}")]
    Strangers {
        rank: Rank,
        addr: SocketAddr,
        callers: Vec<SocketAddr>,
    },
}

/// Addresses and sockets of this rank and its neighbours.
pub(super) struct RingEndpoints<'a> {
    /// By address of this rank.
    pub(super) listeners: &'a [TcpListener],
    pub(super) own: &'a [SocketAddr],
    pub(super) left: Rank,
    pub(super) right: Rank,
    /// The right neighbour's addresses.
    pub(super) theirs: &'a [SocketAddr],
}

impl RingEndpoints<'_> {
    pub(super) fn connect(&self, deadline: Deadline) -> Result<NeighbourSockets, JoinError> {
        let mut doors = self.doors()?;
        let mut right: Vec<Option<TcpStream>> = self.theirs.iter().map(|_| None).collect();
        loop {
            for (place, addr) in right.iter_mut().zip(self.theirs) {
                fill(place, || attempt(*addr, deadline));
            }
            doors.iter_mut().for_each(NeighbourListener::accept);
            if doors.iter().all(NeighbourListener::is_filled) && right.iter().all(Option::is_some) {
                let left = doors.into_iter().map(|door| door.into_caller(self.left));
                return Ok(NeighbourSockets {
                    left: left.collect::<Result<_, _>>()?,
                    right: right.into_iter().flatten().collect(),
                });
            }
            let time = deadline.left(now());
            if time.is_zero() {
                return Err(self.missing(&doors, &right));
            }
            thread::sleep(NAP.min(time));
        }
    }

    fn doors(&self) -> Result<Vec<NeighbourListener<'_>>, JoinError> {
        let each = self.listeners.iter().zip(self.own);
        each.map(|(listener, addr)| NeighbourListener::open(listener, *addr))
            .collect()
    }

    /// The error that names the missing neighbour.
    fn missing(&self, doors: &[NeighbourListener<'_>], right: &[Option<TcpStream>]) -> JoinError {
        if let Some(i) = right.iter().position(Option::is_none) {
            return JoinError::Missing {
                rank: self.right,
                what: "accept at",
                addr: self.theirs[i],
            };
        }
        let empty = doors.iter().find(|door| !door.is_filled());
        JoinError::Missing {
            rank: self.left,
            what: "connect to",
            addr: empty.map_or(self.own[0], |door| door.addr),
        }
    }
}

pub(super) fn system(what: &'static str, addr: SocketAddr) -> impl FnOnce(io::Error) -> JoinError {
    move |source| JoinError::System { what, addr, source }
}

/// Fills an empty slot, and empties one whose connection has ended.
fn fill(place: &mut Option<TcpStream>, connect: impl FnOnce() -> Option<TcpStream>) {
    if place.as_ref().is_some_and(is_closed) {
        *place = None;
    }
    if place.is_none() {
        *place = connect().filter(|stream| !is_closed(stream));
    }
}

/// Connects once; a failure may be temporary.
fn attempt(addr: SocketAddr, deadline: Deadline) -> Option<TcpStream> {
    let left = deadline.left(now());
    if left.is_zero() {
        return None;
    }
    let stream = TcpStream::connect_timeout(&addr, left.min(ATTEMPT)).ok()?;
    // An unused ephemeral port may be assigned to this very socket.
    if stream.local_addr().ok()? == stream.peer_addr().ok()? {
        return None;
    }
    prepare(stream)
}

/// Configures a socket like MLX: no delay, nonblocking.
pub(super) fn prepare(stream: TcpStream) -> Option<TcpStream> {
    stream.set_nodelay(true).ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}
