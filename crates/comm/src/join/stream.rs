//! A connection between two ranks, in the clear or sealed.

use std::io::{IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use super::poll::outcome;
use super::seal::Session;
use crate::transport::Closed;

/// A connection. Nothing blocks.
pub(crate) struct Stream {
    socket: TcpStream,
    session: Option<Session>,
}

impl Stream {
    pub(super) const fn new(socket: TcpStream, session: Option<Session>) -> Self {
        Self { socket, session }
    }

    /// Writes what fits of `head` followed by `body` and returns how many bytes that were. The
    /// rest has to be offered again before any other bytes.
    pub(crate) fn write(&self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        if let Some(session) = &self.session {
            return session.write(&mut socket, head, body);
        }
        outcome(match (head, body) {
            (head, []) => socket.write(head),
            ([], body) => socket.write(body),
            _ => socket.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]),
        })
    }

    /// Reads what is there, 0 bytes if nothing is.
    pub(crate) fn read(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.read(&mut socket, into),
            None => outcome(socket.read(into)),
        }
    }

    /// As `read`, but the bytes stay; of a sealed connection no more than one write of the peer.
    pub(crate) fn peek(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.peek(&mut socket, into),
            None => outcome(socket.peek(into)),
        }
    }

    /// Whether a read would find something that the system does not know of.
    pub(crate) fn is_filled(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_filled)
    }

    /// Whether the peer sent what is no record.
    pub(crate) fn is_garbled(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_garbled)
    }

    /// Says that nothing more will be sent, and reads what is there. So closing the socket does not
    /// make the system discard what the peer has not read yet.
    pub(crate) fn shut_down(&self) {
        let mut bytes = [0; 4096];
        let _ = self.socket.shutdown(Shutdown::Write);
        while (&self.socket).read(&mut bytes).is_ok_and(|count| count > 0) {}
    }
}

impl Stream {
    /// Where the peer is.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|addr| addr.ip())
    }

    /// Whether the peer is on another machine, or behind a bridge of this one.
    pub(crate) fn is_wire(&self) -> bool {
        let own = self.socket.local_addr().ok().map(|addr| addr.ip());
        matches!((own, self.peer()), (Some(own), Some(peer)) if leaves(own, peer))
    }
}

/// Whether what goes from address `own` to `peer` leaves the machine. A machine that calls an
/// address of its own does so from that address, and any of loopback from any.
fn leaves(own: IpAddr, peer: IpAddr) -> bool {
    let (own, peer) = (own.to_canonical(), peer.to_canonical());
    own != peer && !peer.is_loopback()
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_a_machine_has_one_address_or_goes_to_loopback() {
        for (own, peer, expected) in [
            ("127.0.0.1", "127.0.0.1", false),
            ("127.0.0.1", "127.0.0.2", false),
            ("::1", "::1", false),
            ("::ffff:127.0.0.1", "127.0.0.3", false),
            ("192.168.1.5", "192.168.1.5", false),
            ("::ffff:192.168.1.5", "192.168.1.5", false),
            ("fd00::1", "fd00::1", false),
            ("192.168.1.5", "192.168.1.6", true),
            ("::ffff:192.168.1.5", "::ffff:192.168.1.6", true),
            ("fd00::1", "fd00::2", true),
        ] {
            let [from, to] = [own, peer].map(|addr| addr.parse().unwrap());
            assert_eq!(leaves(from, to), expected, "{own} to {peer}");
        }
    }
}
