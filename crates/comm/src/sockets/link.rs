//! Ordered bytes between two ranks over one or several connections.
//!
//! Several connections carry one lane in turns of [`STRIPE_BYTES`]. Byte `p` of the lane travels on
//! connection `p / STRIPE_BYTES % streams`, and is read from there. So the order needs no numbers
//! on the wire. A connection that ends, or falls behind, ends or holds up the whole lane.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::join::{Stream, rest};
use crate::transport::Closed;

/// Bytes that go over one connection before it is the next one's turn. No more than a socket buffer
/// holds by default on Linux (208 KiB), so that the turn does not end in a wait. Enough that the
/// calls for it are few.
const STRIPE_BYTES: u64 = 128 << 10;

/// A lane to one peer.
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
