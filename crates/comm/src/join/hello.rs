//! The hellos and replies of ranks before they are a group, byte by byte, little-endian.
//!
//! ```text
//! hello, from the rank that dials: 56 bytes; 104 if sealed
//!   0  "paceline"   8  version (u16)  10  slot (u16)     12  size (u32)
//!  16  own rank (u32)                 20  rank dialled   24  group id (16)
//!  40  instance (u64)                 48  streams (u16)  50  1: sealed    51  0 (5)
//!  56  first message of the handshake (48)
//! reply: 24 bytes; 72 if it welcomes a sealed connection
//!   0  "paceline"   8  version (u16)  10  verdict        11  1: about another rank
//!  12  ours (u32)  16  theirs (u32)   20  0 (4)
//!  24  second message of the handshake (48)
//! ```
//!
//! A *slot* is a connection of a pair: `streams` for calls, as many for messages, one for control.
//! Version 1 said hello in 48 bytes and took replies of 24; both are the beginning of today's.

use paceline_base::Rank;

use super::config::GroupId;
use super::refusal::Refusal;
use super::seal::SHAKE_BYTES;

/// Incremented with every change of a frame, or of the number of messages a sender may have
/// unreceived.
pub(super) const VERSION: u16 = 3;
pub(super) const MAGIC: [u8; 8] = *b"paceline";
pub(super) const HELLO_BYTES: usize = 56;
pub(super) const REPLY_BYTES: usize = 24;

/// Bytes of the shortest hello of any version; they contain the version.
pub(super) const HELLO_BYTES_MIN: usize = 48;

/// Bytes of the longest hello or reply.
pub(super) const GREETING_BYTES: usize = HELLO_BYTES + SHAKE_BYTES;

/// The first message of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) slot: u16,
    pub(super) size: u32,
    pub(super) rank: u32,
    pub(super) to: u32,
    pub(super) group: GroupId,
    pub(super) instance: u64,
    pub(super) streams: u16,
    pub(super) sealed: bool,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.slot.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.group.0);
        bytes[40..48].copy_from_slice(&self.instance.to_le_bytes());
        bytes[48..50].copy_from_slice(&self.streams.to_le_bytes());
        bytes[50] = u8::from(self.sealed);
        bytes
    }

    /// `None` if the bytes are no hello of any version.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let mut group = [0; 16];
        group.copy_from_slice(&bytes[24..40]);
        bytes.starts_with(&MAGIC).then(|| Self {
            version: short(bytes, 8),
            slot: short(bytes, 10),
            size: word(bytes, 12),
            rank: word(bytes, 16),
            to: word(bytes, 20),
            group: GroupId(group),
            instance: u64::from(word(bytes, 40)) | u64::from(word(bytes, 44)) << 32,
            streams: short(bytes, 48),
            sealed: bytes[50] != 0,
        })
    }
}

fn short(bytes: &[u8], at: usize) -> u16 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |short| u16::from_le_bytes(*short))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |word| u32::from_le_bytes(*word))
}

/// A rank's reply to a hello, or its message when it gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Welcome,
    /// The sender of the hello does not fit.
    Refused(Refusal),
    /// Another process did not fit.
    GaveUp(Refusal),
}

impl Reply {
    pub(super) fn encode(self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        let (verdict, ours, theirs) = match self {
            Self::Welcome => (0, 0, 0),
            Self::Refused(why) | Self::GaveUp(why) => match why {
                Refusal::Version { ours, theirs } => (1, ours.into(), theirs.into()),
                Refusal::Size { ours, theirs } => (2, ours, theirs),
                Refusal::Group => (3, 0, 0),
                Refusal::Rank(rank) => (4, 0, rank.0),
                Refusal::Duplicate(rank) => (5, 0, rank.0),
                Refusal::Key => (6, 0, 0),
                Refusal::NoKey => (7, 0, 0),
                Refusal::UnknownKey => (8, 0, 0),
                Refusal::Streams { ours, theirs } => (9, ours.into(), theirs.into()),
            },
        };
        bytes[10] = verdict;
        bytes[11] = u8::from(matches!(self, Self::GaveUp(_)));
        bytes[12..16].copy_from_slice(&ours.to_le_bytes());
        bytes[16..20].copy_from_slice(&theirs.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no reply.
    pub(super) fn decode(bytes: &[u8; REPLY_BYTES]) -> Option<Self> {
        if !bytes.starts_with(&MAGIC) {
            return None;
        }
        let (ours, theirs) = (word(bytes, 12), word(bytes, 16));
        let why = match bytes[10] {
            0 => return Some(Self::Welcome),
            // Before version 2 this reply carried its sender's version in the header only.
            1 => Refusal::Version {
                ours: short(bytes, 8),
                theirs: u16::try_from(theirs).ok()?,
            },
            2 => Refusal::Size { ours, theirs },
            3 => Refusal::Group,
            4 => Refusal::Rank(Rank(theirs)),
            5 => Refusal::Duplicate(Rank(theirs)),
            6 => Refusal::Key,
            7 => Refusal::NoKey,
            8 => Refusal::UnknownKey,
            9 => Refusal::Streams {
                ours: u16::try_from(ours).ok()?,
                theirs: u16::try_from(theirs).ok()?,
            },
            _ => return None,
        };
        Some(match bytes[11] {
            0 => Self::Refused(why),
            _ => Self::GaveUp(why),
        })
    }
}

pub(crate) fn parse(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk().and_then(Hello::decode) {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }
    if let Some(reply) = bytes.first_chunk().and_then(Reply::decode) {
        let again = Reply::decode(&reply.encode());
        // A relayed version refusal names the versions as received.
        let version = matches!(
            reply,
            Reply::Refused(Refusal::Version { .. }) | Reply::GaveUp(Refusal::Version { .. })
        );
        assert!(again == Some(reply) || version);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_come_back() {
        for why in [
            Refusal::Version {
                ours: VERSION,
                theirs: 7,
            },
            Refusal::Size {
                ours: 3,
                theirs: 1 << 20,
            },
            Refusal::Group,
            Refusal::Rank(Rank(9)),
            Refusal::Duplicate(Rank(2)),
            Refusal::Key,
            Refusal::NoKey,
            Refusal::UnknownKey,
            Refusal::Streams { ours: 1, theirs: 8 },
        ] {
            for reply in [Reply::Refused(why), Reply::GaveUp(why), Reply::Welcome] {
                assert_eq!(Reply::decode(&reply.encode()), Some(reply));
            }
        }
    }
}
