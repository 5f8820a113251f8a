//! Meeting the neighbours: accept from the left, connect to the right.
//!
//! MLX's wire has no handshake, so whoever connects is taken for the neighbour. What can be known
//! is used: a connection that was closed before all had come is a stranger's (a port scan, a health
//! check), and the place is given to the next one; a socket that the system connected to itself is
//! nobody.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use paceline_base::Rank;

use super::run::{Sides, is_closed};
use crate::{Deadline, deadline};

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
    /// The system refused.
    #[error("mlx-ring: {what} {addr}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// With which address.
        addr: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A neighbour did not come before the deadline.
    #[error("mlx-ring: {rank} did not {what} {addr} before the deadline")]
    Missing {
        /// Who.
        rank: Rank,
        /// What it was to do: connect to this rank's address, or accept at its own.
        what: &'static str,
        /// The address.
        addr: SocketAddr,
    },
}

/// Who is where.
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
        for (listener, addr) in self.listeners.iter().zip(self.own) {
            let set = listener.set_nonblocking(true);
            set.map_err(system("listen at", *addr))?;
        }
        let mut left: Vec<Option<TcpStream>> = self.own.iter().map(|_| None).collect();
        let mut right: Vec<Option<TcpStream>> = self.theirs.iter().map(|_| None).collect();
        loop {
            for (place, listener) in left.iter_mut().zip(self.listeners) {
                fill(place, || accept(listener));
            }
            for (place, addr) in right.iter_mut().zip(self.theirs) {
                fill(place, || attempt(*addr, deadline));
            }
            if left.iter().chain(&right).all(Option::is_some) {
                let whole = |places: Vec<Option<TcpStream>>| places.into_iter().flatten().collect();
                let (right, left) = (whole(right), whole(left));
                return Ok(Sides { right, left });
            }
            let time = deadline.left(deadline::now());
            if time.is_zero() {
                return Err(self.missing(&left, &right));
            }
            thread::sleep(NAP.min(time));
        }
    }

    /// Who did not come.
    fn missing(&self, left: &[Option<TcpStream>], right: &[Option<TcpStream>]) -> JoinError {
        let first = |places: &[Option<TcpStream>]| places.iter().position(Option::is_none);
        if let Some(i) = first(right) {
            return JoinError::Missing {
                rank: self.right,
                what: "accept at",
                addr: self.theirs[i],
            };
        }
        JoinError::Missing {
            rank: self.left,
            what: "connect to",
            addr: self.own[first(left).unwrap_or(0)],
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

fn accept(listener: &TcpListener) -> Option<TcpStream> {
    prepare(listener.accept().ok()?.0)
}

/// Connects once; whatever is wrong may be over at the next attempt.
fn attempt(addr: SocketAddr, deadline: Deadline) -> Option<TcpStream> {
    let left = deadline.left(deadline::now());
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
fn prepare(stream: TcpStream) -> Option<TcpStream> {
    stream.set_nodelay(true).ok()?;
    stream.set_nonblocking(true).ok()?;
    Some(stream)
}
