//! Bytes that have been read from a link and not yet been used.

use super::lending;
use crate::transport::{Closed, Lane, Transport};

/// Size of the buffer; what is not used of it is not touched. How much is read at a time is up to
/// the transport: [`Transport::gulp`].
const INBUF_BYTES: usize = 1 << 20;

/// Shortest payload that is read to where it belongs. A header with a shorter one is read in one
/// go.
pub(super) const DIRECT_BYTES: usize = 16 << 10;

/// A buffer for one link.
pub(super) struct Inbuf {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Inbuf {
    fn default() -> Self {
        Self {
            bytes: vec![0; INBUF_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }
}

impl Inbuf {
    /// The bytes that are there.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Forgets the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// The first `N` bytes, once they are there; 0 or more bytes are read to get them.
    pub(super) fn head<const N: usize, T: Transport>(
        &mut self,
        transport: &T,
        lane: Lane,
        peer: usize,
    ) -> Result<Option<[u8; N]>, Closed> {
        loop {
            if let Some(head) = self.bytes().first_chunk() {
                return Ok(Some(*head));
            }
            if self.fill(transport, lane, peer, N)? == 0 {
                return Ok(None);
            }
        }
    }

    /// Reads what is there and fits; of a transport that lends no more than there are `wanted`.
    pub(super) fn fill<T: Transport>(
        &mut self,
        transport: &T,
        lane: Lane,
        peer: usize,
        wanted: usize,
    ) -> Result<usize, Closed> {
        let most = transport.gulp().min(self.bytes.len());
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end >= most {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let end = match lending::lends(transport, lane, peer) {
            true => most.min(self.start + wanted),
            false => most,
        };
        let count = transport.read(lane, peer, &mut self.bytes[self.end..end])?;
        self.end += count;
        Ok(count)
    }
}
