//! The messages between members over their sessions.

use serde::{Deserialize, Serialize};

use super::super::{Key, NodeId, Register};
use super::peers::Life;

/// Most rumours in a message; further ones are not read.
pub const RUMOURS_MAX: usize = 16;

/// Most entries of the map in a message; further ones are not read.
pub const ENTRIES_MAX: usize = 64;

/// News of a node's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rumour {
    /// Whose.
    pub id: NodeId,
    /// Which of its lives: it alone raises the number, to object.
    pub incarnation: u64,
    /// The state that it is said to have.
    pub life: Life,
}

/// A message between members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Are you there?
    Ping {
        /// Counts the sender's pings.
        seq: u64,
        /// Root of the sender's map.
        root: u64,
        /// The news that the sender heard lately.
        rumours: Vec<Rumour>,
    },
    /// Yes.
    Ack {
        /// That of the ping.
        seq: u64,
        /// Root of the sender's map.
        root: u64,
        /// The news that the sender heard lately.
        rumours: Vec<Rumour>,
    },
    /// Ask this node, which does not answer the sender.
    PingFor {
        /// Which.
        id: NodeId,
    },
    /// Are you there, asks `asker`?
    PingFrom {
        /// The node that wants to know.
        asker: NodeId,
    },
    /// `id` answered, for `asker`.
    Lives {
        /// The node that lives.
        id: NodeId,
        /// The node that wanted to know.
        asker: NodeId,
    },
    /// News.
    Gossip {
        /// The news that the sender heard.
        rumours: Vec<Rumour>,
    },
    /// The marks of all entries of the sender's map: send what is not among them.
    Marks {
        /// A mark for each entry.
        marks: Vec<u64>,
        /// Whether to send the own marks too if some entries are missing.
        answer: bool,
    },
    /// Entries of the map.
    Entries {
        /// At most [`ENTRIES_MAX`].
        entries: Vec<(Key, Register)>,
    },
}
