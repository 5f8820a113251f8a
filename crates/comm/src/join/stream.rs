//! A connection between two ranks, plaintext or encrypted.

use std::io::{IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use super::poll::outcome;
use super::seal::NoiseSession;
use crate::transport::Closed;

pub(crate) struct PeerConnection {
    socket: TcpStream,
    session: Option<NoiseSession>,
}

impl PeerConnection {
    pub(super) const fn new(socket: TcpStream, session: Option<NoiseSession>) -> Self {
        Self { socket, session }
    }

    /// Writes as much of `head` followed by `body` as fits and returns that number of bytes. The
    /// caller must offer the rest again before any other bytes.
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

    /// Reads available bytes; 0 if there are none.
    pub(crate) fn read(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.read(&mut socket, into),
            None => outcome(socket.read(into)),
        }
    }

    /// Like `read`, but the bytes stay. Of an encrypted connection, at most one write of the peer.
    pub(crate) fn peek(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.peek(&mut socket, into),
            None => outcome(socket.peek(into)),
        }
    }

    /// Whether a read would return bytes that are already decrypted.
    pub(crate) fn is_filled(&self) -> bool {
        self.session.as_ref().is_some_and(NoiseSession::is_filled)
    }

    /// Whether the peer sent an invalid record.
    pub(crate) fn is_garbled(&self) -> bool {
        self.session.as_ref().is_some_and(NoiseSession::is_garbled)
    }

    /// Half-closes the connection and drains the receive buffer, so that closing the socket does
    /// not discard bytes that the peer has not read.
    pub(crate) fn shut_down(&self) {
        let mut bytes = [0; 4096];
        let _ = self.socket.shutdown(Shutdown::Write);
        while (&self.socket).read(&mut bytes).is_ok_and(|count| count > 0) {}
    }
}

impl PeerConnection {
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|addr| addr.ip())
    }

    /// Whether the peer is on another machine, or behind a bridge of this one.
    pub(crate) fn is_wire(&self) -> bool {
        let own = self.socket.local_addr().ok().map(|addr| addr.ip());
        matches!((own, self.peer()), (Some(own), Some(peer)) if leaves(own, peer))
    }
}

/// Whether traffic from `own` to `peer` leaves the machine. A machine that dials one of its own
/// addresses uses that address as the source, and any loopback address for another.
fn leaves(own: IpAddr, peer: IpAddr) -> bool {
    let (own, peer) = (own.to_canonical(), peer.to_canonical());
    own != peer && !peer.is_loopback()
}

impl AsFd for PeerConnection {
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
