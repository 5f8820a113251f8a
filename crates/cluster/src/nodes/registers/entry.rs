//! Entries of the map: keys with their rights and bounds, values, and the bytes that are signed.

use serde::{Deserialize, Serialize};

use super::super::clock::HybridTimestamp;
use super::super::{NodeId, RecordId, Signature};
use super::{EPOCH_UNWANTED, NAME_BYTES_MAX};

/// The subject of a register.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RegisterKey {
    /// Facts of a node, written by itself.
    Node(NodeId),
    /// A record of a crate above, written by any member.
    #[serde(rename = "Instance")]
    Record(RecordId),
    /// The report of a record, written by its owner.
    #[serde(rename = "State")]
    Report(RecordId),
    /// A revoked node. Never deleted.
    Revoked(NodeId),
    /// An API key: the node that made it, `/`, and the key's id.
    ApiKey(String),
    /// Any other cluster-wide entry, by a name of at most [`NAME_BYTES_MAX`].
    Named(String),
}

impl RegisterKey {
    /// The register of an API key that `maker` made.
    pub fn api_key(maker: NodeId, id: &str) -> Self {
        Self::ApiKey(format!("{maker}/{id}"))
    }

    /// The maker of an API key, and the key's id.
    pub fn as_api_key(&self) -> Option<(NodeId, &str)> {
        let Self::ApiKey(name) = self else {
            return None;
        };
        let (maker, id) = name.split_once('/')?;
        Some((maker.parse().ok()?, id))
    }

    /// The only node that may write a live value, if there is one.
    pub(in crate::nodes) fn subject(&self) -> Option<NodeId> {
        match self {
            Self::Node(id) => Some(*id),
            Self::Named(name) => name.split_once('/')?.1.parse().ok(),
            Self::ApiKey(_) => self.as_api_key().map(|(maker, _)| maker),
            Self::Record(_) | Self::Report(_) | Self::Revoked(_) => None,
        }
    }

    /// Whether it describes a node, which alone may delete it while it lives.
    pub(in crate::nodes) fn is_of_node(&self) -> bool {
        matches!(self, Self::Node(_) | Self::Named(_)) && self.subject().is_some()
    }

    /// Whether its epochs count changes of responsibility.
    pub(super) const fn has_epochs(&self) -> bool {
        matches!(self, Self::Record(_) | Self::Report(_))
    }

    /// Ids of API keys are eight hexadecimal digits; most others have a fixed length.
    pub(super) fn is_sane(&self) -> bool {
        match self {
            Self::ApiKey(name) => name.len() <= 64 && self.as_api_key().is_some(),
            Self::Named(name) => name.len() <= NAME_BYTES_MAX,
            _ => true,
        }
    }
}

/// An entry's content and its write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// Counts changes of responsibility; 0 where there are none.
    pub epoch: u64,
    /// When it was written, and by which node.
    pub stamp: HybridTimestamp,
    /// JSON, or `None` once deleted.
    pub value: Option<String>,
}

impl Register {
    /// The order by which one of two writes wins.
    pub(super) fn rank(&self) -> (u64, HybridTimestamp) {
        (self.epoch, self.stamp)
    }

    pub(super) fn bytes(&self) -> usize {
        self.value.as_ref().map_or(0, String::len)
    }

    /// Whether it deletes for good, as the end of a record does.
    pub(super) const fn is_end(&self) -> bool {
        self.value.is_none() && self.epoch == EPOCH_UNWANTED
    }

    /// A 64-bit hash of this write of `key`. Not cryptographic: only members write.
    pub(super) fn mark(&self, key: &RegisterKey) -> u64 {
        let node = |id: &NodeId| id.0;
        let (tag, bytes) = match key {
            RegisterKey::Node(id) => (1, fold(&node(id))),
            RegisterKey::Record(id) => (2, id.0),
            RegisterKey::Report(id) => (3, id.0),
            RegisterKey::Revoked(id) => (4, fold(&node(id))),
            RegisterKey::ApiKey(id) => (5, fold(id.as_bytes())),
            RegisterKey::Named(name) => (6, fold(name.as_bytes())),
        };
        let stamp = self.stamp.ms ^ u64::from(self.stamp.count).rotate_left(40);
        let parts = [tag, bytes, self.epoch, stamp, fold(&self.stamp.node.0)];
        parts.into_iter().fold(0, |sum, part| mix(sum ^ part))
    }
}

/// A write with its writer's signature, as members send it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedEntry {
    pub key: RegisterKey,
    pub register: Register,
    pub signature: Signature,
}

impl SignedEntry {
    /// The bytes that the writer signs.
    pub fn message(key: &RegisterKey, register: &Register) -> Vec<u8> {
        serde_json::to_vec(&("paceline entry 1", key, register)).expect("an entry is JSON")
    }
}

/// A slot as a node saves it.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedEntry {
    pub(super) entry: SignedEntry,
    /// As of [`Slot::seen_ms`].
    pub(super) seen_ms: u64,
}

/// SplitMix64's last steps (Steele and others, OOPSLA 2014).
pub(super) const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

pub(super) fn fold(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| {
        chunk
            .iter()
            .fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    };
    bytes.chunks(8).fold(0, |sum, chunk| mix(sum ^ word(chunk)))
}
