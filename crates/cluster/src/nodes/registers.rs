//! The shared map of a cluster: last-writer-wins registers.
//!
//! Merging is commutative, associative and idempotent, so copies with the same writes in any order
//! are equal. Of two writes to one key the one with the higher *epoch* wins, then the later
//! [`HybridTimestamp`]. A deleted key leaves a tombstone, which is removed after [`TOMBSTONE_MS`].
//! A node that was offline for longer may restore a deleted entry.
//!
//! Bounds: [`REGISTERS_MAX`] entries of [`VALUE_BYTES_MAX`]; writes over them are refused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::clock::HybridTimestamp;
use super::{InstanceId, NodeId};

/// Most entries, tombstones included: some forty for each of a hundred nodes.
pub const REGISTERS_MAX: usize = 4096;

/// Longest value.
pub const VALUE_BYTES_MAX: usize = 16 << 10;

/// Longest name of a [`RegisterKey::Named`].
pub const NAME_BYTES_MAX: usize = 128;

/// How long tombstones are kept: a week.
pub const TOMBSTONE_MS: u64 = 7 * 24 * 3_600_000;

/// The subject of a register.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RegisterKey {
    /// Facts of a node, written by itself.
    Node(NodeId),
    /// The spec of an instance, written by the node of the user's request, and by its successors.
    Instance(InstanceId),
    /// The report of an instance, written by its owner.
    State(InstanceId),
    /// A revoked node. Never deleted.
    Revoked(NodeId),
    /// An API key, by its id.
    ApiKey(String),
    /// Any other cluster-wide entry, by a name of at most [`NAME_BYTES_MAX`].
    Named(String),
}

impl RegisterKey {
    /// Names of API keys are eight hexadecimal digits; most others have a fixed length.
    fn is_sane(&self) -> bool {
        match self {
            Self::ApiKey(id) => id.len() <= 64,
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
    /// When it was written.
    pub stamp: HybridTimestamp,
    /// JSON, or `None` once deleted.
    pub value: Option<String>,
}

impl Register {
    /// The order by which one of two writes wins.
    fn rank(&self) -> (u64, HybridTimestamp) {
        (self.epoch, self.stamp)
    }

    /// A 64-bit hash of this write of `key`. Not cryptographic: only members write.
    fn mark(&self, key: &RegisterKey) -> u64 {
        let node = |id: &NodeId| id.0;
        let (tag, bytes) = match key {
            RegisterKey::Node(id) => (1, fold(&node(id))),
            RegisterKey::Instance(id) => (2, id.0),
            RegisterKey::State(id) => (3, id.0),
            RegisterKey::Revoked(id) => (4, fold(&node(id))),
            RegisterKey::ApiKey(id) => (5, fold(id.as_bytes())),
            RegisterKey::Named(name) => (6, fold(name.as_bytes())),
        };
        let stamp = self.stamp.ms ^ u64::from(self.stamp.count).rotate_left(40);
        let parts = [tag, bytes, self.epoch, stamp, fold(&self.stamp.node.0)];
        parts.into_iter().fold(0, |sum, part| mix(sum ^ part))
    }
}

/// SplitMix64's last steps (Steele and others, OOPSLA 2014).
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn fold(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| {
        chunk
            .iter()
            .fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    };
    bytes.chunks(8).fold(0, |sum, chunk| mix(sum ^ word(chunk)))
}

/// A node's copy of the map.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    entries: BTreeMap<RegisterKey, Register>,
    root: u64,
}

impl Registers {
    /// Merges a write; true if it changed something.
    pub(crate) fn merge(&mut self, key: RegisterKey, register: Register) -> bool {
        let is_long = register
            .value
            .as_ref()
            .is_some_and(|v| v.len() > VALUE_BYTES_MAX);
        // Not even by a later write: a revoked node could undo its revocation at a node that was
        // offline.
        let is_undone = matches!(key, RegisterKey::Revoked(_)) && register.value.is_none();
        if is_long || is_undone || !key.is_sane() {
            return false;
        }
        match self.entries.get(&key) {
            Some(known) if known.rank() >= register.rank() => return false,
            Some(known) => self.root ^= known.mark(&key),
            None if self.entries.len() >= REGISTERS_MAX => return false,
            None => {}
        }
        self.root ^= register.mark(&key);
        self.entries.insert(key, register);
        true
    }

    /// Removes old tombstones.
    pub(crate) fn forget(&mut self, wall_ms: u64) {
        let oldest = wall_ms.saturating_sub(TOMBSTONE_MS);
        let root = &mut self.root;
        self.entries.retain(|key, register| {
            let keep = register.value.is_some() || register.stamp.ms >= oldest;
            if !keep {
                *root ^= register.mark(key);
            }
            keep
        });
    }

    /// The map of these entries, such as saved ones. Skips entries that exceed a bound.
    pub fn from_entries(entries: impl IntoIterator<Item = (RegisterKey, Register)>) -> Self {
        let mut map = Self::default();
        for (key, register) in entries {
            map.merge(key, register);
        }
        map
    }

    /// The JSON of a live entry.
    pub fn get(&self, key: &RegisterKey) -> Option<&str> {
        self.entries.get(key)?.value.as_deref()
    }

    /// An entry or tombstone.
    pub fn register(&self, key: &RegisterKey) -> Option<&Register> {
        self.entries.get(key)
    }

    /// All entries and tombstones, in order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&RegisterKey, &Register)> {
        self.entries.iter()
    }

    /// A hash of all writes: equal for copies with the same writes, and different otherwise, except
    /// with a probability of 2^-64.
    pub const fn root(&self) -> u64 {
        self.root
    }

    /// The mark of each entry, from which another node finds differences.
    pub(crate) fn marks(&self) -> Vec<u64> {
        self.iter()
            .map(|(key, register)| register.mark(key))
            .collect()
    }

    /// Entries whose marks are not among `known`, and how many marks there name no entry here.
    pub(crate) fn beyond(&self, known: &[u64]) -> (Vec<(RegisterKey, Register)>, usize) {
        let mut theirs: Vec<u64> = known.to_vec();
        theirs.sort_unstable();
        theirs.dedup();
        let mut shared = 0;
        let mut beyond = Vec::new();
        for (key, register) in self.iter() {
            if theirs.binary_search(&register.mark(key)).is_ok() {
                shared += 1;
            } else {
                beyond.push((key.clone(), register.clone()));
            }
        }
        (beyond, theirs.len() - shared)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn write(node: u8, epoch: u64, ms: u64, value: Option<&str>) -> Register {
        let stamp = HybridTimestamp {
            ms,
            count: 0,
            node: NodeId([node; 16]),
        };
        Register {
            epoch,
            stamp,
            value: value.map(str::to_owned),
        }
    }

    fn contents(map: &Registers) -> Vec<(RegisterKey, Register)> {
        map.iter().map(|(k, r)| (k.clone(), r.clone())).collect()
    }

    #[test]
    fn the_later_write_wins_and_an_epoch_over_both() {
        let mut map = Registers::default();
        let key = RegisterKey::Instance(InstanceId(7));
        assert!(map.merge(key.clone(), write(1, 0, 10, Some("a"))));
        assert!(!map.merge(key.clone(), write(2, 0, 9, Some("b"))));
        assert!(
            map.merge(key.clone(), write(2, 0, 10, Some("c"))),
            "the higher node"
        );
        assert!(
            map.merge(key.clone(), write(1, 1, 1, Some("d"))),
            "the higher epoch"
        );
        assert!(!map.merge(key.clone(), write(1, 0, 99, None)));
        assert_eq!(map.get(&key), Some("d"));
        assert!(map.merge(key.clone(), write(1, u64::MAX, 2, None)));
        assert_eq!(map.get(&key), None);
        assert!(map.register(&key).is_some());
    }

    #[test]
    fn a_revocation_is_not_taken_back() {
        let mut map = Registers::default();
        let key = RegisterKey::Revoked(NodeId([3; 16]));
        assert!(!map.merge(key.clone(), write(3, u64::MAX, 1, None)));
        assert!(map.merge(key.clone(), write(1, 0, 2, Some("{}"))));
        assert!(!map.merge(key.clone(), write(3, 1, 3, None)));
        assert_eq!(map.get(&key), Some("{}"));
    }

    #[test]
    fn bounds_hold() {
        let mut map = Registers::default();
        let long = "x".repeat(VALUE_BYTES_MAX + 1);
        assert!(!map.merge(
            RegisterKey::State(InstanceId(1)),
            write(1, 0, 1, Some(&long))
        ));
        assert!(!map.merge(
            RegisterKey::ApiKey("x".repeat(65)),
            write(1, 0, 1, Some("1"))
        ));
        for id in 0..=REGISTERS_MAX as u64 {
            let took = map.merge(RegisterKey::State(InstanceId(id)), write(1, 0, 1, None));
            assert_eq!(took, id < REGISTERS_MAX as u64);
        }
        assert!(
            map.merge(RegisterKey::State(InstanceId(0)), write(1, 0, 2, Some("1"))),
            "known keys"
        );
        map.forget(TOMBSTONE_MS + 2);
        assert_eq!(contents(&map).len(), 1);
        let mut other = Registers::default();
        other.merge(RegisterKey::State(InstanceId(0)), write(1, 0, 2, Some("1")));
        assert_eq!(
            map.root(),
            other.root(),
            "what is forgotten leaves no trace"
        );
    }

    #[test]
    fn differences_are_found_by_marks() {
        let (mut one, mut two) = (Registers::default(), Registers::default());
        for id in 0..5 {
            one.merge(
                RegisterKey::State(InstanceId(id)),
                write(1, 0, id, Some("1")),
            );
            two.merge(
                RegisterKey::State(InstanceId(id + 2)),
                write(1, 0, id + 2, Some("1")),
            );
        }
        let (beyond, missing) = one.beyond(&two.marks());
        let keys: Vec<RegisterKey> = beyond.into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, [0, 1].map(|id| RegisterKey::State(InstanceId(id))));
        assert_eq!(missing, 2);
        assert_eq!(one.beyond(&one.marks()), (Vec::new(), 0));
    }

    proptest! {
        /// Copies with the same writes are equal, for any order and repetition.
        #[test]
        fn order_does_not_matter(
            writes in prop::collection::vec((0_u64..4, 0_u8..3, 0_u64..2, 0_u64..4), 0..40),
        ) {
            // A node never uses a timestamp twice, so the value is a function of it.
            let each = writes.iter().map(|&(id, node, epoch, ms)| {
                let value = ((id + ms + epoch) % 3 != 0).then_some("v");
                (RegisterKey::State(InstanceId(id)), write(node, epoch, ms, value))
            });
            let (mut one, mut two) = (Registers::default(), Registers::default());
            for (key, register) in each.clone() {
                one.merge(key, register);
            }
            for (key, register) in each.clone().rev().chain(each) {
                two.merge(key, register);
            }
            prop_assert_eq!(contents(&one), contents(&two));
            prop_assert_eq!(one.root(), two.root());
        }
    }
}
