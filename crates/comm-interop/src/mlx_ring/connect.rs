//! Meeting the neighbours: accept from the left, connect to the right.
//!
//! [`Door`] sorts out the callers from the left. To the right, a connection that ended is made
//! again, and a socket that the system connected to itself is nobody.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use paceline_base::Rank;

use super::door::Door;
use super::run::{Sides, is_closed};
use paceline_comm::Deadline;
use paceline_comm::provider::now;

/// How long to wait between looks. MLX's ranks sleep for a second at least.
const NAP: Duration = Duration::from_millis(10);

/// How long one attempt to connect may take, so that a silent address does not keep this rank from
/// accepting for longer.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Why a rank could not join a ring.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The ring would leave this machine, and nobody said that it may do so unencrypted.
    #[error("mlx-ring is plaintext and {addr} is not on this machine's loopback: not allowed")]
    Plaintext {
        /// The first such address.
        addr: SocketAddr,
    },
    /// The list of hosts has no such rank.
    #[error("mlx-ring: {rank} is not in a ring of {size}")]
    NoSuchRank {
        /// The rank that this process was to be.
        rank: Rank,
        /// Ranks in the list.
        size: usize,
    },
    /// A rank of the list has no address, or not as many as the others.
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
        /// The operation that was tried.
        what: &'static str,
        /// With which address.
        addr: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// A neighbour did not come before the deadline.
    #[error("mlx-ring: {rank} did not {what} {addr} before the deadline")]
    Missing {
        /// The missing neighbour.
        rank: Rank,
        /// The act that was expected: connect to this rank's address, or accept at its own.
        what: &'static str,
        addr: SocketAddr,
    },
    /// More than the neighbour came to an address, and stayed.
    #[error("mlx-ring: {callers:?} connected to {addr}, expected only {rank}")]
    Strangers {
        /// The neighbour that was expected.
        rank: Rank,
        /// Where.
        addr: SocketAddr,
        /// The callers that came.
        callers: Vec<SocketAddr>,
    },
}

/// Places of this rank and its neighbours.
pub(super) struct Places<'a> {
    /// This rank's, one for each of its addresses.
    pub(super) listeners: &'a [TcpListener],
    pub(super) own: &'a [SocketAddr],
    pub(super) left: Rank,
    pub(super) right: Rank,
    /// The right neighbour's addresses.
    pub(super) theirs: &'a [SocketAddr],
}

impl Places<'_> {
    /// Connects with both neighbours.
    pub(super) fn connect(&self, deadline: Deadline) -> Result<Sides, JoinError> {
        let mut doors = self.doors()?;
        let mut right: Vec<Option<TcpStream>> = self.theirs.iter().map(|_| None).collect();
        loop {
            for (place, addr) in right.iter_mut().zip(self.theirs) {
                fill(place, || attempt(*addr, deadline));
            }
            doors.iter_mut().for_each(Door::look);
            if doors.iter().all(Door::is_filled) && right.iter().all(Option::is_some) {
                let left = doors.into_iter().map(|door| door.into_caller(self.left));
                return Ok(Sides {
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

    fn doors(&self) -> Result<Vec<Door<'_>>, JoinError> {
        let each = self.listeners.iter().zip(self.own);
        each.map(|(listener, addr)| Door::open(listener, *addr))
            .collect()
    }

    /// The error that names the neighbour that did not come.
    fn missing(&self, doors: &[Door<'_>], right: &[Option<TcpStream>]) -> JoinError {
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

/// Fills an empty place, and empties one whose connection has ended.
fn fill(place: &mut Option<TcpStream>, connect: impl FnOnce() -> Option<TcpStream>) {
    if place.as_ref().is_some_and(is_closed) {
        *place = None;
    }
    if place.is_none() {
        *place = connect().filter(|stream| !is_closed(stream));
    }
}

/// Connects once; whatever is wrong may be over at the next attempt.
fn attempt(addr: SocketAddr, deadline: Deadline) -> Option<TcpStream> {
    let left = deadline.left(now());
    if left.is_zero() {
        return None;
    }
    let stream = TcpStream::connect_timeout(&addr, left.min(ATTEMPT)).ok()?;
    // A port of the ephemeral range that nobody listens at may be given to this very socket.
    if stream.local_addr().ok()? == stream.peer_addr().ok()? {
        return None;
    }
    prepare(stream)
}

/// As MLX sets its sockets up: no delay, no blocking.
pub(super) fn prepare(stream: TcpStream) -> Option<TcpStream> {
    stream.set_nodelay(true).ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}
