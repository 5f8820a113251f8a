//! The bulk queue pair of a cable, for zero-copy transfers between callers' memory.
//!
//! A message here is a head of 64 bytes, which is in a slot at both ends, and a chunk. The chunk is
//! in the callers' memory at both ends. Receives are posted only for chunks that the peer may send
//! ([`bulk`](super::bulk)). Between transfers no memory of a caller is posted.

use super::abi::{Sge, Wc};
use super::error::RdmaError;
use super::message::HEAD_BYTES;
use super::message_pair::{REQUESTS, RegisteredBody};
use super::slab::Slab;
use super::verbs::{Destination, QueuePair};

const SEND: u64 = 1 << 16;
const RECEIVE: u64 = 2 << 16;

/// Segments of a message, in either direction: head and chunk.
const PIECES: u32 = 2;

/// The event reported by a completion.
pub(super) enum ChunkCompletion {
    /// A send is over.
    Sent { in_place: bool },
    /// The receive posted for `chunk` has completed, with this head.
    Received {
        chunk: u64,
        head: [u8; HEAD_BYTES],
        bytes: usize,
    },
    /// An invalid completion.
    Stray,
}

pub(super) struct BulkQueuePair {
    pair: QueuePair,
    /// First byte of its slots, and the key of their memory.
    start: *mut u8,
    key: u32,
    /// By slot: whether a send is posted, and whether in place.
    sends: [Option<bool>; REQUESTS],
    /// By slot: the chunk whose memory is posted.
    receives: [Option<u64>; REQUESTS],
    /// Number of posted requests of each kind.
    sending: usize,
    receiving: usize,
}

// SAFETY: the slots belong to this pair alone, and `CableLink` is behind a lock.
unsafe impl Send for BulkQueuePair {}

impl BulkQueuePair {
    /// Bytes of all slots.
    pub(super) const BYTES: usize = 2 * REQUESTS * HEAD_BYTES;

    /// The pair whose slots begin `at` bytes into `slab`, which outlives it.
    pub(super) fn new(slab: &Slab, at: usize) -> Result<Self, RdmaError> {
        let requests = u32::try_from(REQUESTS).expect("a small number");
        Ok(Self {
            pair: QueuePair::new(slab.adapter(), requests, [PIECES; 2])?,
            // SAFETY: the slab has these bytes.
            start: unsafe { slab.start().add(at) },
            key: slab.key(),
            sends: [None; REQUESTS],
            receives: [None; REQUESTS],
            sending: 0,
            receiving: 0,
        })
    }

    pub(super) const fn pair(&self) -> &QueuePair {
        &self.pair
    }

    pub(super) fn connect(&self, peer: &Destination) -> Result<(), RdmaError> {
        self.pair.connect(peer)
    }

    /// Whether no request is posted.
    pub(super) const fn is_idle(&self) -> bool {
        self.sending == 0 && self.receiving == 0
    }

    /// Whether a device may still write to a caller's memory.
    pub(super) const fn is_posted(&self) -> bool {
        self.receiving > 0
    }

    /// Handles a completion; `failed` if the request was flushed or failed.
    pub(super) fn completed(&mut self, wc: &Wc, failed: bool) -> ChunkCompletion {
        let slot = (wc.wr_id & 0xffff) as usize;
        let done = match wc.wr_id & !0xffff {
            SEND if slot < REQUESTS => self.sends[slot]
                .take()
                .map(|in_place| ChunkCompletion::Sent { in_place }),
            RECEIVE if slot < REQUESTS => self.receives[slot].take().map(|chunk| {
                let bytes = if failed { 0 } else { wc.byte_len as usize };
                let head = self.head(slot);
                ChunkCompletion::Received { chunk, head, bytes }
            }),
            _ => None,
        };
        match done {
            Some(ChunkCompletion::Sent { .. }) => self.sending -= 1,
            Some(ChunkCompletion::Received { .. }) => self.receiving -= 1,
            _ => {}
        }
        done.unwrap_or(ChunkCompletion::Stray)
    }

    /// Treats all requests as failed, when polling fails.
    pub(super) fn forget(&mut self) -> (usize, usize) {
        (self.sending, self.receiving) = (0, 0);
        let sends = self.sends.iter_mut().filter_map(Option::take);
        let in_place = sends.filter(|in_place| *in_place).count();
        (
            in_place,
            self.receives.iter_mut().filter_map(Option::take).count(),
        )
    }

    fn head(&self, slot: usize) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        // SAFETY: within the slots; its request has completed.
        unsafe {
            let first = self.start.add(slot * HEAD_BYTES);
            first.copy_to_nonoverlapping(head.as_mut_ptr(), HEAD_BYTES);
        }
        head
    }

    /// Posts the memory of `chunk`; false if all receives are posted.
    ///
    /// # Safety
    /// `body` is not used before the receive completes.
    pub(super) unsafe fn post(
        &mut self,
        chunk: u64,
        body: RegisteredBody,
    ) -> Result<bool, RdmaError> {
        let Some(slot) = self.receives.iter().position(Option::is_none) else {
            return Ok(false);
        };
        let mut pieces = [self.piece(slot), body.piece()];
        // SAFETY: the slot is registered and not read before; the body is the caller's promise.
        unsafe { self.pair.receive(RECEIVE | slot as u64, &mut pieces) }?;
        (self.receives[slot], self.receiving) = (Some(chunk), self.receiving + 1);
        Ok(true)
    }

    /// Sends `head` and `body`; false if all sends are posted.
    ///
    /// # Safety
    /// `body` stays unchanged until the send completes.
    pub(super) unsafe fn send(
        &mut self,
        head: &[u8; HEAD_BYTES],
        body: Option<RegisteredBody>,
    ) -> Result<bool, RdmaError> {
        let Some(slot) = self.sends.iter().position(Option::is_none) else {
            return Ok(false);
        };
        let own = self.piece(REQUESTS + slot);
        let mut pieces = [own, body.map_or(own, |body| body.piece())];
        let count = 1 + usize::from(body.is_some());
        // SAFETY: the slot is free, and registered; the body is the caller's promise.
        unsafe {
            let first = self.start.add((REQUESTS + slot) * HEAD_BYTES);
            head.as_ptr().copy_to_nonoverlapping(first, HEAD_BYTES);
            self.pair.send(SEND | slot as u64, &mut pieces[..count])
        }?;
        (self.sends[slot], self.sending) = (Some(body.is_some()), self.sending + 1);
        Ok(true)
    }

    fn piece(&self, index: usize) -> Sge {
        Sge {
            addr: self.start.wrapping_add(index * HEAD_BYTES) as u64,
            length: u32::try_from(HEAD_BYTES).expect("a small number"),
            lkey: self.key,
        }
    }
}
