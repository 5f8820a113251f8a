//! Messages over a cable: one message per work request, with a head of 64 bytes.
//!
//! ```text
//!  0  "PLr3"     4  kind: 0 calls, 1 messages, 2 state, 3 hello, 4 ask, 5 offer, 6 patch,
//!                      7 chunk, 8 drain; 9 and 10: offer and patch of messages
//!  5  1: answer at once, 2: waits for a message
//!  8  session (u64)             16  sequence (u64), of the lane
//! 24  received: calls, messages (2 u64)      40  consumed: likewise
//! 56  bytes that follow (u32)   60  transfers that are complete (u32), see `bulk`
//! state, ask: then a bit for each message behind `received` (2 u64), and 6 u64 about a transfer
//! ```
//!
//! An *ask* is a state that requests one back. Chunks and drains use the bulk pairs and acknowledge
//! nothing.
//!
//! `received` and `consumed` count the messages of the other direction at the sender. All messages
//! below `received` have arrived. All below `consumed` have been read, so that their memory is
//! free. Every message carries both; a *state* carries nothing else. A message of another session
//! (of an earlier group, or over a cable that leads elsewhere) is dropped.

use paceline_comm::provider::VirtualLane;

/// Bytes before the payload.
pub(super) const HEAD_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"PLr3";

/// Words of a state about transfers, in the order of `BulkTransfers::words`.
pub(super) const WORDS: usize = 6;

pub(super) const STATE_BYTES: usize = 8 * (2 + WORDS);

/// The purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data(VirtualLane),
    State,
    Hello,
    /// A state that requests one back.
    Ask,
    /// The start of a transfer.
    Offer(VirtualLane),
    /// A repeated chunk.
    Patch(VirtualLane),
    Chunk,
    Drain,
}

/// By their numbers on the wire.
const KINDS: [Kind; 11] = [
    Kind::Data(VirtualLane::Calls),
    Kind::Data(VirtualLane::Messages),
    Kind::State,
    Kind::Hello,
    Kind::Ask,
    Kind::Offer(VirtualLane::Calls),
    Kind::Patch(VirtualLane::Calls),
    Kind::Chunk,
    Kind::Drain,
    Kind::Offer(VirtualLane::Messages),
    Kind::Patch(VirtualLane::Messages),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageHead {
    pub(super) kind: Kind,
    pub(super) session: u64,
    pub(super) sequence: u64,
    pub(super) received: [u64; 2],
    pub(super) consumed: [u64; 2],
    pub(super) bytes: u32,
    /// The sender waits for the release of its memory.
    pub(super) asks: bool,
    /// The waiting receiver has read all messages, and has registered memory for a long one.
    pub(super) waits: bool,
    pub(super) done: u32,
}

impl MessageHead {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        let number = (0..).zip(KINDS).find(|(_, kind)| *kind == self.kind);
        bytes[4] = number.map_or(u8::MAX, |(n, _)| n);
        bytes[5] = u8::from(self.asks) | u8::from(self.waits) << 1;
        let [r, c] = [self.received, self.consumed];
        let words = [self.session, self.sequence, r[0], r[1], c[0], c[1]];
        let (room, _) = bytes[8..56].as_chunks_mut();
        for (slot, word) in room.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        bytes[56..60].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[60..].copy_from_slice(&self.done.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no head.
    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let kind = *KINDS.get(usize::from(bytes[4]))?;
        let word = |at: usize| {
            let word = bytes[at..].first_chunk();
            word.map_or(0, |word| u64::from_le_bytes(*word))
        };
        let half = |at: usize| {
            let word = bytes[at..].first_chunk();
            word.map_or(0, |word| u32::from_le_bytes(*word))
        };
        bytes.starts_with(&MAGIC).then(|| Self {
            kind,
            session: word(8),
            sequence: word(16),
            received: [word(24), word(32)],
            consumed: [word(40), word(48)],
            bytes: half(56),
            asks: bytes[5] & 1 != 0,
            waits: bytes[5] & 2 != 0,
            done: half(60),
        })
    }
}

/// For fuzzing: parses `bytes` as the head of a message.
pub(super) fn parse(bytes: &[u8]) {
    let head = bytes.first_chunk().and_then(MessageHead::decode);
    assert!(head.is_none_or(|head| MessageHead::decode(&head.encode()) == Some(head)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_and_other_bytes_do_not() {
        for kind in KINDS {
            let head = MessageHead {
                kind,
                session: 0x0123_4567_89ab_cdef,
                sequence: u64::MAX,
                received: [1, 2],
                consumed: [3, 4],
                bytes: 32704,
                asks: true,
                waits: kind == Kind::State,
                done: 7,
            };
            let mut bytes = head.encode();
            assert_eq!(MessageHead::decode(&bytes), Some(head));
            bytes[4] = 11;
            assert_eq!(MessageHead::decode(&bytes), None);
            bytes[4] = 0;
            bytes[0] = b'X';
            assert_eq!(MessageHead::decode(&bytes), None);
        }
    }
}
