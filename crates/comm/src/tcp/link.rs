//! Ordered bytes between two ranks over one or several connections, in the clear or sealed.
//!
//! Several connections carry one lane in turns of [`STRIPE_BYTES`]: byte `p` of the lane travels on
//! connection `p / STRIPE_BYTES % streams`, and is read from there. So the order needs no numbers
//! on the wire, and a connection that ends, or falls behind, ends or holds up the whole lane.

use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use std::io::{IoSlice, Read, Write};

use super::seal::{Session, rest};
use super::sockets::outcome;
use crate::transport::Closed;

/// Bytes that go over one connection before it is the next one's turn. No more than a socket
/// buffer holds by default on Linux (208 KiB), so that the turn does not end in a wait; enough that
/// the calls for it are few.
const STRIPE_BYTES: u64 = 128 << 10;

/// One connection. Nothing blocks.
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
    pub(super) fn write(&self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
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
    pub(super) fn read(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.read(&mut socket, into),
            None => outcome(socket.read(into)),
        }
    }

    /// As `read`, but the bytes stay; of a sealed connection no more than one write of the peer.
    pub(super) fn peek(&self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut socket = &self.socket;
        match &self.session {
            Some(session) => session.peek(&mut socket, into),
            None => outcome(socket.peek(into)),
        }
    }

    /// Whether a read would find something that the system does not know of.
    pub(super) fn is_filled(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_filled)
    }

    /// Whether the peer sent what is no record.
    pub(super) fn is_garbled(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_garbled)
    }

    /// Says that nothing more will be sent, and reads what is there, so that closing the socket
    /// does not make the system discard what the peer has not read yet.
    pub(super) fn shut_down(&self) {
        let mut bytes = [0; 4096];
        let _ = self.socket.shutdown(Shutdown::Write);
        while (&self.socket).read(&mut bytes).is_ok_and(|count| count > 0) {}
    }
}

impl Stream {
    /// Where the peer is.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        self.socket.peer_addr().ok().map(|addr| addr.ip())
    }

    /// Whether the peer is on another machine, or behind a bridge of this one.
    pub(super) fn is_wire(&self) -> bool {
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

/// One lane to one peer.
pub(crate) struct Link {
    streams: Box<[Stream]>,
    /// Bytes that were written and read so far; each by one thread at a time.
    written: AtomicU64,
    read: AtomicU64,
}

impl Link {
    /// # Errors
    /// Without a connection.
    pub(super) fn new(streams: Vec<Stream>) -> io::Result<Self> {
        if streams.is_empty() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(Self {
            streams: streams.into(),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
        })
    }

    /// Whose turn it is at byte `at`, and for how many bytes.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "less than the streams, than a stripe"
    )]
    fn turn(&self, at: u64) -> (&Stream, usize) {
        let number = at / STRIPE_BYTES % self.streams.len() as u64;
        let left = STRIPE_BYTES - at % STRIPE_BYTES;
        (&self.streams[number as usize], left as usize)
    }

    /// The connections that the next read and the next write use.
    pub(super) fn next(&self) -> [&Stream; 2] {
        [&self.read, &self.written].map(|at| self.turn(at.load(Ordering::Relaxed)).0)
    }

    pub(super) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// As [`Stream::write`].
    pub(super) fn write(&self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        if let [only] = &*self.streams {
            return only.write(head, body);
        }
        let (total, mut taken) = (head.len() + body.len(), 0);
        let mut at = self.written.load(Ordering::Relaxed);
        while taken < total {
            let (stream, left) = self.turn(at);
            let (head, body) = rest(head, body, taken);
            let head = &head[..head.len().min(left)];
            let body = &body[..body.len().min(left - head.len())];
            let count = stream.write(head, body)?;
            taken += count;
            at += count as u64;
            self.written.store(at, Ordering::Relaxed);
            if count < head.len() + body.len() {
                break;
            }
        }
        Ok(taken)
    }

    /// As [`Stream::read`].
    pub(super) fn read(&self, into: &mut [u8]) -> Result<usize, Closed> {
        if let [only] = &*self.streams {
            return only.read(into);
        }
        let mut count = 0;
        let mut at = self.read.load(Ordering::Relaxed);
        while count < into.len() {
            let (stream, left) = self.turn(at);
            let part = left.min(into.len() - count);
            match stream.read(&mut into[count..count + part]) {
                Ok(0) => break,
                Ok(got) => {
                    count += got;
                    at += got as u64;
                    self.read.store(at, Ordering::Relaxed);
                }
                // What came before the end is handed out first.
                Err(Closed) if count > 0 => break,
                Err(Closed) => return Err(Closed),
            }
        }
        Ok(count)
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
