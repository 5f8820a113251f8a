//! The messages between members over their sessions.

use serde::{Deserialize, Serialize};

use super::super::NodeId;
use super::super::registers::SignedEntry;
use super::peers::Life;

/// Most rumours in a message; further ones are not read.
pub const RUMOURS_MAX: usize = 16;

/// Most entries of the map in a message; further ones are not read.
pub const ENTRIES_MAX: usize = 64;

/// A change of a node's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rumour {
    /// Whose.
    pub id: NodeId,
    /// Its incarnation number: only the node itself raises it, to object.
    pub incarnation: u64,
    /// Its reported state.
    pub life: Life,
}

/// A message between members. A later release may add kinds and fields, which an earlier one
/// ignores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GossipMessage {
    /// Are you there?
    Ping {
        /// Counts the sender's pings.
        seq: u64,
        /// Root of the sender's map.
        root: u64,
        /// Recent rumours of the sender.
        rumours: Vec<Rumour>,
    },
    /// Yes.
    Ack {
        /// That of the ping.
        seq: u64,
        /// Root of the sender's map.
        root: u64,
        /// Recent rumours of the sender.
        rumours: Vec<Rumour>,
    },
    /// Request to ping this node, which does not answer the sender.
    PingFor { id: NodeId },
    /// A ping on behalf of `asker`.
    PingFrom { asker: NodeId },
    /// `id` answered, for `asker`.
    Lives { id: NodeId, asker: NodeId },
    /// News.
    Gossip { rumours: Vec<Rumour> },
    /// The marks of all entries of the sender's map: request for all others.
    Marks {
        marks: Vec<u64>,
        /// Whether to send the own marks too if some entries are missing.
        answer: bool,
    },
    Entries {
        /// At most [`ENTRIES_MAX`].
        entries: Vec<SignedEntry>,
    },
}

impl GossipMessage {
    /// Reads a message; `None` for a kind that this release does not know.
    pub fn read(bytes: &[u8]) -> Result<Option<Self>, serde_json::Error> {
        match serde_json::from_slice(bytes) {
            Ok(message) => Ok(Some(message)),
            // serde has no other sign of an unknown variant.
            Err(error) if error.to_string().starts_with("unknown variant") => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_fields_of_a_later_release_are_ignored() {
        let known = r#"{"PingFrom":{"asker":"01010101010101010101010101010101","since":3}}"#;
        let asker = NodeId([1; 16]);
        let read = GossipMessage::read(known.as_bytes()).unwrap();
        assert_eq!(read, Some(GossipMessage::PingFrom { asker }));
        let later = GossipMessage::read(br#"{"Poem":{"lines":[1]}}"#);
        assert_eq!(later.unwrap(), None);
        for bad in [&b"{"[..], b"{}", br#"{"PingFrom":{}}"#] {
            let read = GossipMessage::read(bad);
            assert!(read.is_err(), "{}", String::from_utf8_lossy(bad));
        }
    }
}
