//! A cluster of machines without a master: discovery, membership, shared map and sessions.
//!
//! ```text
//!  discovery, peers ── Found ──▶ ┌────────────────┐ ── Dial, Send, Close ──▶ sessions
//!  sessions ── Linked, Received ▶│ Member::step   │
//!  timer ────────────── Tick ───▶└────────────────┘ ── Changed ──▶ crates above
//! ```
//!
//! All decisions are in [`Membership`], which has no clock and no sockets; time and randomness are
//! arguments. So the crate `sim` runs whole clusters of it in virtual time. Around it:
//!
//! - [`identity`]: a node's identity, for the lifetime of its home.
//! - [`signature`]: a node's signatures on messages that others forward.
//! - [`key`]: the cluster's secret, and its form for people.
//! - [`session`]: encrypted, authenticated messages over TCP.
//! - [`Registers`]: the map that all nodes share, signed by its writers; [`HybridTimestamp`]: the
//!   clock that orders the writes.
//! - [`Membership`]: membership, gossip, and the required sessions.
//! - [`paths`]: measured network paths to other nodes, and the preferred one of each.
//! - [`reach`]: which nodes can speak to each other, by these paths.
//! - [`rdma`]: RDMA devices of nodes, the cables between them, and trust in cables.
//! - `revocation`: which nodes are revoked, by signed entries of the map.
//! - [`discovery`]: nodes of the same cluster on the networks of this machine; [`mdns`]: the same
//!   by multicast DNS.
//! - [`pairing`]: a short code instead of a token.
//! - [`agent`]: the threads and sockets that drive all of it.

pub mod agent;
pub mod clock;
pub mod discovery;
pub mod identity;
pub mod key;
pub mod mdns;
pub mod member;
pub mod pairing;
pub mod paths;
pub mod rdma;
pub mod reach;
pub mod registers;
mod revocation;
pub mod session;
pub mod signature;

use std::fmt;
use std::str::FromStr;

use paceline_base::unhex;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

pub use clock::{HybridTimestamp, Now};
pub use identity::Identity;
pub use key::ClusterKey;
pub use member::Membership;
pub use registers::{Register, RegisterKey, Registers};
pub use signature::Signature;

/// Parses `bytes` as every kind of message of another machine, for fuzzing. Returns for any input.
pub fn parse_all(bytes: &[u8]) {
    let key = ClusterKey::new([7; 32]);
    let _ = discovery::read_beacon(&key, bytes);
    let _ = serde_json::from_slice::<member::GossipMessage>(bytes);
    session::parse(bytes);
    agent::parse(bytes);
    let _ = serde_json::from_slice::<Signature>(bytes);
    let _ = serde_json::from_slice::<Vec<registers::SavedEntry>>(bytes).map(Registers::from_saved);
    let _ = serde_json::from_slice::<Vec<paths::Path>>(bytes);
    if let Ok(entries) = serde_json::from_slice::<Vec<(RegisterKey, Register)>>(bytes) {
        let _ = Registers::from_entries(entries);
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = unhex(text).and_then(|bytes| discovery::read_beacon(&key, &bytes));
        let _ = pairing::Code::parse(text);
        let _ = ClusterKey::from_token(text);
    }
}

/// A node's id: the beginning of SHA-256 of its static public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

/// Id of a record; drawn at random.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display("{:016x}", self.0)]
pub struct RecordId(pub u64);

/// The text is no id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {digits} hexadecimal digits")]
pub struct NotAnId {
    /// The expected number of digits.
    pub digits: usize,
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for NodeId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let bytes = unhex(text).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(NotAnId { digits: 32 })
    }
}

impl fmt::Debug for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RecordId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let bytes = unhex(text).and_then(|bytes| bytes.try_into().ok());
        let number = bytes.map(|bytes| Self(u64::from_be_bytes(bytes)));
        number.ok_or(NotAnId { digits: 16 })
    }
}

macro_rules! as_text {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    };
}

as_text!(NodeId);
as_text!(RecordId);

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of each kind with changed, removed and repeated bytes.
    #[test]
    fn no_bytes_of_another_machine_panic() {
        let id = NodeId([9; 16]);
        let beacon = discovery::beacon(&ClusterKey::new([7; 32]), 1, id, 1, true);
        let ping = member::GossipMessage::PingFor { id };
        let ping = serde_json::to_vec(&ping).unwrap();
        let token = ClusterKey::new([7; 32]).token().as_bytes().to_vec();
        let mut random = paceline_base::SplitMix64::new(7);
        for seed in [beacon.to_vec(), ping, token, b"123-456".to_vec()] {
            for _ in 0..2000 {
                let mut bytes = seed.clone();
                for _ in 0..=random.below(4) {
                    let at = random.below(bytes.len());
                    match random.below(4) {
                        0 => bytes.truncate(at),
                        1 => bytes.extend_from_within(at..),
                        _ => bytes[at] ^= 1 << random.below(8),
                    }
                    bytes.push(random.next() as u8);
                }
                parse_all(&bytes);
            }
        }
    }

    /// The map's records are opaque; a record's name on the wire is the one exception.
    #[test]
    fn membership_has_no_word_of_models() {
        let words = [
            "model", "instance", "replica", "adapter", "draft", "prompt", "prefill", "weight",
        ];
        let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/nodes")];
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if !path.ends_with("nodes/mod.rs") {
                    files += 1;
                    let text = std::fs::read_to_string(&path).unwrap();
                    let text = text.replace("#[serde(rename = \"Instance\")]", "");
                    let text = text.to_lowercase();
                    let found: Vec<_> = words.iter().filter(|it| text.contains(**it)).collect();
                    assert!(found.is_empty(), "{found:?} in {}", path.display());
                }
            }
        }
        assert!(files > 30, "{files}");
    }

    #[test]
    fn ids_are_text_and_come_back() {
        let id = NodeId(std::array::from_fn(|i| (i * 17) as u8));
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        assert_eq!(id.to_string().parse(), Ok(id));
        let record = RecordId(0x00ff_0000_0000_0001);
        assert_eq!(record.to_string().parse(), Ok(record));
        let json = serde_json::to_string(&(id, record)).unwrap();
        assert_eq!(
            serde_json::from_str::<(NodeId, RecordId)>(&json).unwrap(),
            (id, record)
        );
        for bad in [
            "",
            "0",
            "zz",
            "é",
            "00112233445566778899aabbccddeefff",
            "0011",
        ] {
            assert!(
                bad.parse::<NodeId>().is_err() && bad.parse::<RecordId>().is_err(),
                "{bad}"
            );
        }
    }
}
