//! The message queue pair of a cable, with its slots.
//!
//! ```text
//! slots of a cable, each as long as the longest message
//!  0  receives: all are posted, except those with unread bytes
//! 32  sends: 14 of calls, 10 of messages, 8 of states
//! ```
//!
//! A lane never has more messages in flight than the peer has receives reserved for it. So only
//! states can exhaust the peer's receives, and they are few. Then a message is lost and repeated.

use super::abi::{Sge, Wc};
use super::error::RdmaError;
use super::message::HEAD_BYTES;
use super::slab::Slab;
use super::verbs::{Destination, QueuePair};

/// Receives, and sends, of a queue pair: safe on Apple's devices, see `limits`.
pub(super) const REQUESTS: usize = 32;

/// Most messages in flight on one cable, by lane.
///
/// Calls have more, as they move more. Both lanes and the states fill the sends. The remaining
/// receives are for states and repetitions.
pub(super) const WINDOW: [usize; 2] = [14, 10];

/// First send slot of each lane, then of states.
const SENDS_AT: [usize; 3] = [0, WINDOW[0], WINDOW[0] + WINDOW[1]];

/// Send slots for states.
const STATES: usize = REQUESTS - WINDOW[0] - WINDOW[1];

const SEND: u64 = 1 << 16;
const RECEIVE: u64 = 2 << 16;

/// The event reported by a completion.
pub(super) enum MessageCompletion {
    /// A send slot is free again.
    Sent { in_place: bool },
    /// A message of `bytes` bytes is in a slot.
    Received { slot: usize, bytes: usize },
    /// An invalid completion.
    Stray,
}

/// A caller's memory that is sent in place.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisteredBody {
    pub(super) start: *const u8,
    pub(super) bytes: usize,
    pub(super) key: u32,
}

impl RegisteredBody {
    pub(super) fn piece(&self) -> Sge {
        Sge {
            addr: self.start as u64,
            length: u32::try_from(self.bytes).expect("less than a slot"),
            lkey: self.key,
        }
    }
}

// SAFETY: only a device uses the address; the caller keeps the memory unchanged.
unsafe impl Send for RegisteredBody {}

pub(super) struct MessageQueuePair {
    pair: QueuePair,
    /// First byte of its slots, and the key of their memory.
    start: *mut u8,
    key: u32,
    slot_bytes: usize,
    posted: [SendSlot; REQUESTS],
    /// Sends whose message may have to be repeated.
    owned: [bool; REQUESTS],
    next_state: usize,
    /// A valid message has arrived over it.
    pub(super) heard: bool,
    /// The cable is not used any more.
    pub(super) dead: bool,
    /// Consecutive messages lost on it.
    pub(super) lost: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SendSlot {
    No,
    Copied,
    InPlace,
}

// SAFETY: the slots belong to this cable alone, and `CableLink` is behind a lock.
unsafe impl Send for MessageQueuePair {}

/// Segments of a send: the head and a body.
const GATHERS: u32 = 2;

impl MessageQueuePair {
    pub(super) const fn bytes(slot_bytes: usize) -> usize {
        2 * REQUESTS * slot_bytes
    }

    /// The pair whose slots begin `at` bytes into `slab`, which outlives it.
    pub(super) fn new(slab: &Slab, at: usize, slot_bytes: usize) -> Result<Self, RdmaError> {
        let requests = u32::try_from(REQUESTS).expect("a small number");
        let pair = QueuePair::new(slab.adapter(), requests, [GATHERS, 1])?;
        let mut cable = Self {
            pair,
            // SAFETY: the slab has these bytes.
            start: unsafe { slab.start().add(at) },
            key: slab.key(),
            slot_bytes,
            posted: [SendSlot::No; REQUESTS],
            owned: [false; REQUESTS],
            next_state: 0,
            heard: false,
            dead: false,
            lost: 0,
        };
        for slot in 0..REQUESTS {
            cable.post_receive(slot)?;
        }
        Ok(cable)
    }

    pub(super) const fn pair(&self) -> &QueuePair {
        &self.pair
    }

    pub(super) fn connect(&self, peer: &Destination) -> Result<(), RdmaError> {
        self.pair.connect(peer)
    }

    pub(super) fn poll(&self, into: &mut [Wc]) -> Result<usize, RdmaError> {
        self.pair.queue().poll(into)
    }

    /// Handles a successful completion.
    pub(super) fn completed(&mut self, wc: &Wc) -> MessageCompletion {
        let slot = (wc.wr_id & 0xffff) as usize;
        if slot >= REQUESTS {
            return MessageCompletion::Stray;
        }
        match wc.wr_id & !0xffff {
            SEND if self.posted[slot] != SendSlot::No => {
                let in_place = self.posted[slot] == SendSlot::InPlace;
                self.posted[slot] = SendSlot::No;
                MessageCompletion::Sent { in_place }
            }
            RECEIVE if (HEAD_BYTES..=self.slot_bytes).contains(&(wc.byte_len as usize)) => {
                MessageCompletion::Received {
                    slot,
                    bytes: wc.byte_len as usize,
                }
            }
            _ => MessageCompletion::Stray,
        }
    }

    /// Posts a receive slot, unless the cable is dead.
    pub(super) fn post_receive(&mut self, slot: usize) -> Result<(), RdmaError> {
        if self.dead {
            return Ok(());
        }
        let piece = self.piece(slot, self.slot_bytes);
        // SAFETY: the slot is registered. It is not read before the request completes: it was never
        // used, or its message has been read.
        unsafe { self.pair.receive(RECEIVE | slot as u64, &mut [piece]) }
    }

    /// Bytes `from..to` of a received message.
    pub(super) fn received(&self, slot: usize, from: usize, to: usize) -> &[u8] {
        assert!(slot < REQUESTS && from <= to && to <= self.slot_bytes);
        // SAFETY: within the slot, as asserted. Its request has completed, so the device does not
        // use it until `post_receive`, which needs exclusive access.
        unsafe {
            let first = self.start.add(slot * self.slot_bytes + from);
            std::slice::from_raw_parts(first, to - from)
        }
    }

    /// A free send slot of a lane: the first, so that few are in use and in the cache.
    pub(super) fn free_slot(&self, lane: usize) -> Option<usize> {
        let mut slots = SENDS_AT[lane]..SENDS_AT[lane] + WINDOW[lane];
        let free = |slot: &usize| !self.owned[*slot] && self.is_free(*slot);
        slots.find(free).filter(|_| !self.dead)
    }

    /// Keeps a slot for a message until its receipt is acknowledged.
    pub(super) fn own(&mut self, slot: usize, owned: bool) {
        self.owned[slot] = owned;
    }

    /// The payload of a send slot, up to byte `end`.
    pub(super) fn payload(&self, slot: usize, end: usize) -> Vec<u8> {
        assert!(slot < REQUESTS && (HEAD_BYTES..=self.slot_bytes).contains(&end));
        let mut bytes = vec![0; end - HEAD_BYTES];
        // SAFETY: within the slot, as asserted; a device only reads it.
        unsafe {
            let first = self
                .start
                .add((REQUESTS + slot) * self.slot_bytes + HEAD_BYTES);
            first.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }

    /// Treats all sends as complete; returns how many were in place.
    pub(super) fn forget(&mut self) -> usize {
        let in_place = self
            .posted
            .iter()
            .filter(|posted| **posted == SendSlot::InPlace)
            .count();
        self.posted = [SendSlot::No; REQUESTS];
        in_place
    }

    pub(super) fn state_slot(&mut self) -> Option<usize> {
        let slot = SENDS_AT[2] + self.next_state;
        let free = self.posted[slot] == SendSlot::No && !self.dead;
        free.then(|| {
            self.next_state = (self.next_state + 1) % STATES;
            slot
        })
    }

    /// Whether a send slot is not posted.
    pub(super) fn is_free(&self, slot: usize) -> bool {
        self.posted[slot] == SendSlot::No
    }

    /// Concatenates `parts` in a free send slot, from byte `at` on.
    pub(super) fn fill(&mut self, slot: usize, at: usize, parts: &[&[u8]]) {
        assert!(slot < REQUESTS && self.is_free(slot));
        let mut at = at;
        for part in parts {
            assert!(at + part.len() <= self.slot_bytes);
            // SAFETY: within the slot, as asserted; it is not posted.
            unsafe {
                let first = self.start.add((REQUESTS + slot) * self.slot_bytes + at);
                part.as_ptr().copy_to_nonoverlapping(first, part.len());
            }
            at += part.len();
        }
    }

    /// Sends the first `bytes` of a slot, then `body` if there is one.
    ///
    /// # Safety
    /// `body` stays unchanged until the request completes.
    pub(super) unsafe fn send(
        &mut self,
        slot: usize,
        bytes: usize,
        body: Option<RegisteredBody>,
    ) -> Result<(), RdmaError> {
        let head = self.piece(REQUESTS + slot, bytes);
        let second = body.map_or(head, |body| body.piece());
        let mut pieces = [head, second];
        let count = 1 + usize::from(body.is_some());
        // SAFETY: the slot is registered and unchanged while it is posted; the body is the caller's
        // promise.
        unsafe { self.pair.send(SEND | slot as u64, &mut pieces[..count]) }?;
        self.posted[slot] = match body {
            Some(_) => SendSlot::InPlace,
            None => SendSlot::Copied,
        };
        Ok(())
    }

    /// The first `bytes` of slot `index`.
    fn piece(&self, index: usize, bytes: usize) -> Sge {
        Sge {
            addr: self.start.wrapping_add(index * self.slot_bytes) as u64,
            length: u32::try_from(bytes).expect("slots are below 4 GiB"),
            lkey: self.key,
        }
    }
}
