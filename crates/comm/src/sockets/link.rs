//! Ordered bytes between two ranks over one or several connections.
//!
//! Several connections carry one lane in stripes of [`STRIPE_BYTES`]. Byte `p` of the lane travels
//! on connection `p / STRIPE_BYTES % streams`, and is read from there. So the order needs no
//! sequence numbers. A connection that ends or falls behind ends or delays the whole lane.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::join::{PeerConnection, rest};
use crate::transport::Closed;

/// Bytes of a stripe on one connection. At most a default socket buffer on Linux (208 KiB), so that
/// a stripe does not end in a wait. Enough to keep system calls few.
const STRIPE_BYTES: u64 = 128 << 10;

/// A lane to a peer.
pub(crate) struct StripedLink {
    streams: Box<[PeerConnection]>,
    /// Bytes written and read so far; each by one thread at a time.
    written: AtomicU64,
    read: AtomicU64,
}

impl StripedLink {
    pub(super) fn new(streams: Vec<PeerConnection>) -> io::Result<Self> {
        if streams.is_empty() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(Self {
            streams: streams.into(),
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
        })
    }

    /// Connection of byte `at`, and the bytes left in its stripe.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "less than the streams, than a stripe"
    )]
    fn turn(&self, at: u64) -> (&PeerConnection, usize) {
        let number = at / STRIPE_BYTES % self.streams.len() as u64;
        let left = STRIPE_BYTES - at % STRIPE_BYTES;
        (&self.streams[number as usize], left as usize)
    }

    /// The connections that the next read and the next write use.
    pub(super) fn next(&self) -> [&PeerConnection; 2] {
        [&self.read, &self.written].map(|at| self.turn(at.load(Ordering::Relaxed)).0)
    }

    pub(super) fn streams(&self) -> &[PeerConnection] {
        &self.streams
    }

    /// As [`PeerConnection::write`].
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

    /// As [`PeerConnection::read`].
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
                // Bytes before the end are returned first.
                Err(Closed) if count > 0 => break,
                Err(Closed) => return Err(Closed),
            }
        }
        Ok(count)
    }
}
