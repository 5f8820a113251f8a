//! Received bytes of a link that are not consumed yet.

use super::zero_copy;
use crate::transport::{Closed, Transport, VirtualLane};

/// Buffer size; untouched pages cost nothing. [`Transport::gulp`] bounds a single read.
const INBUF_BYTES: usize = 1 << 20;

/// Shortest payload that is read directly to its destination. A header with a shorter payload is
/// read in one call.
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
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Drops the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// The first `N` bytes, once buffered; may read some.
    pub(super) fn head<const N: usize, T: Transport>(
        &mut self,
        transport: &T,
        lane: VirtualLane,
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

    /// Reads available bytes that fit; from a zero-copy transport, no more than `wanted`.
    pub(super) fn fill<T: Transport>(
        &mut self,
        transport: &T,
        lane: VirtualLane,
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
        let end = match zero_copy::reads_in_place(transport, lane, peer) {
            true => most.min(self.start + wanted),
            false => most,
        };
        let count = transport.read(lane, peer, &mut self.bytes[self.end..end])?;
        self.end += count;
        Ok(count)
    }
}
