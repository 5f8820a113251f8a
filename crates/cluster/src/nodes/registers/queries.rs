//! Queries of the map by readers and other nodes: winners, members of interest, and the entries
//! that another copy lacks.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::NodeId;
use super::entry::{Register, RegisterKey, SignedEntry};
use super::{Group, Registers, Slot, signed};

impl Registers {
    /// The JSON of a live entry.
    pub fn get(&self, key: &RegisterKey) -> Option<&str> {
        self.register(key)?.value.as_deref()
    }

    /// An entry or tombstone.
    pub fn register(&self, key: &RegisterKey) -> Option<&Register> {
        self.visible(key, self.groups.get(key)?)
    }

    pub(super) fn visible<'a>(&self, key: &RegisterKey, group: &'a Group) -> Option<&'a Register> {
        let slot = match key {
            // A revocation counts although each of its signers may be revoked, too.
            RegisterKey::Revoked(id) if self.revoked.contains(id) => {
                let slots = group.slots.iter();
                slots.min_by_key(|slot| slot.register.stamp)?
            }
            RegisterKey::Revoked(_) => return None,
            _ => return group.winner().map(|slot| &slot.register),
        };
        Some(&slot.register)
    }

    /// All entries and tombstones, in order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&RegisterKey, &Register)> {
        let groups = self.groups.iter();
        groups.filter_map(|(key, group)| Some((key, self.visible(key, group)?)))
    }

    /// Whether the map has an API key of this id, even if it is deleted or hidden.
    pub(crate) fn has_api_key(&self, id: &str) -> bool {
        let mut keys = self.groups.keys();
        keys.any(|key| key.as_api_key().is_some_and(|(_, it)| it == id))
    }

    /// Nodes that are revoked.
    pub const fn revoked(&self) -> &BTreeSet<NodeId> {
        &self.revoked
    }

    /// Whether a revocation counts on this node only, which signed it: the others need a second
    /// signer.
    pub(crate) fn needs_second(&self, id: NodeId) -> bool {
        let mut others = self.clone();
        others.own = None;
        others.judge();
        self.revoked.contains(&id) && !others.revoked.contains(&id)
    }

    /// The last facts of a revoked node, while they are kept.
    pub(crate) fn facts_of_revoked(&self, id: NodeId) -> Option<&str> {
        let group = self.groups.get(&RegisterKey::Node(id))?;
        let slot = group.of(id).filter(|_| self.revoked.contains(&id))?;
        slot.register.value.as_deref()
    }

    /// Whether a node has written facts, even if they are hidden or deleted.
    pub(crate) fn has_met(&self, id: NodeId) -> bool {
        let facts = self.groups.get(&RegisterKey::Node(id));
        facts.is_some_and(|group| group.of(id).is_some())
    }

    /// When this machine saw the first facts of a node, in milliseconds since 1970.
    pub(crate) fn met_ms(&self, id: NodeId) -> Option<u64> {
        let facts = self.groups.get(&RegisterKey::Node(id))?;
        facts.of(id).map(|slot| slot.seen_ms)
    }

    /// Revoked nodes whose signers have no facts in the map, so that newcomers refuse them.
    pub(crate) fn orphans(&self) -> Vec<NodeId> {
        let known =
            |slot: &Arc<Slot>| self.own == Some(slot.writer()) || self.has_met(slot.writer());
        let is_orphan = |id: &&NodeId| {
            let claims = self.groups.get(&RegisterKey::Revoked(**id));
            !claims.iter().flat_map(|group| &group.slots).any(known)
        };
        self.revoked.iter().filter(is_orphan).copied().collect()
    }

    /// Revoked nodes with one signer, another node than this one, whose revocation arrived before
    /// this time.
    pub(crate) fn unconfirmed(&self, before_ms: u64) -> Vec<NodeId> {
        let is_due = |id: &&NodeId| {
            let claims = self.groups.get(&RegisterKey::Revoked(**id));
            match claims.map(|group| &group.slots[..]) {
                Some([slot]) => slot.seen_ms < before_ms && self.own != Some(slot.writer()),
                _ => false,
            }
        };
        self.revoked.iter().filter(is_due).copied().collect()
    }

    /// All revocations, after the facts of their signers.
    pub(crate) fn revocations(&self) -> Vec<SignedEntry> {
        let claims: Vec<(&RegisterKey, &Arc<Slot>)> = self
            .groups
            .iter()
            .filter(|(key, _)| matches!(key, RegisterKey::Revoked(_)))
            .flat_map(|(key, group)| group.slots.iter().map(move |slot| (key, slot)))
            .collect();
        let signers: BTreeSet<NodeId> = claims.iter().map(|(_, slot)| slot.writer()).collect();
        let facts = signers.iter().filter_map(|id| {
            let (key, group) = self.groups.get_key_value(&RegisterKey::Node(*id))?;
            signed(key, group.of(*id)?)
        });
        let claims = claims.iter().filter_map(|(key, slot)| signed(key, slot));
        facts.chain(claims).collect()
    }

    /// A hash of all winners and revocations: equal for copies with the same ones, and different
    /// otherwise, except with a probability of 2^-64.
    pub const fn root(&self) -> u64 {
        self.root
    }

    /// The mark of each shared slot, from which another node finds differences.
    pub(crate) fn marks(&self) -> Vec<u64> {
        let shared = self.shared();
        shared.map(|(key, slot)| slot.register.mark(key)).collect()
    }

    pub(super) fn shared(&self) -> impl Iterator<Item = (&RegisterKey, &Slot)> {
        let groups = self.groups.iter();
        groups.flat_map(|(key, group)| group.shared(key).iter().map(move |slot| (key, &**slot)))
    }

    /// Entries whose marks are not among `known`, and how many marks there name no entry here.
    pub(crate) fn beyond(&self, known: &[u64]) -> (Vec<SignedEntry>, usize) {
        let mut theirs: Vec<u64> = known.to_vec();
        theirs.sort_unstable();
        theirs.dedup();
        let mut shared = 0;
        let mut beyond = Vec::new();
        for (key, slot) in self.shared() {
            if theirs.binary_search(&slot.register.mark(key)).is_ok() {
                shared += 1;
            } else {
                beyond.extend(signed(key, slot));
            }
        }
        (beyond, theirs.len() - shared)
    }
}
