//! The shared map of a cluster: last-writer-wins registers, each signed by its writer.
//!
//! ```text
//! key -> one slot per writer: epoch, timestamp, value, signature
//!        the winner: highest epoch, then latest timestamp
//! ```
//! A writer replaces its own slot only. Readers see the winner; the other slots are hidden and
//! stay for [`HIDDEN_MS`]. A revocation hides all slots of the revoked writer, and the slots that
//! they had beaten win again.
//!
//! Merging is commutative, associative and idempotent, so copies with the same writes in any order
//! have equal winners. A deleted key leaves a tombstone, which is removed after [`TOMBSTONE_MS`].
//! A node that was offline for longer may restore a deleted entry.
//!
//! **Rights**, checked by `Registers::admits` and by the order of winners:
//!
//! - Facts of a node, and `NAME/ID` of a node's id: the node itself. Others delete them once it is
//!   dead.
//! - An API key `MAKER/ID`: its maker. Any member deletes it.
//! - A revocation: any other member; see `revocation.rs`.
//! - A record of a crate above: any member. Its value is opaque but for its owner, the first of its
//!   `nodes`.
//! - The report of a record: its owner.
//! - An epoch that is more than [`EPOCH_JUMP_MAX`] above those of all other writers does not win.
//!
//! Bounds: [`REGISTERS_MAX`] slots and [`BYTES_MAX`] of values; of one writer
//! [`WRITER_REGISTERS_MAX`] and [`WRITER_BYTES_MAX`], beyond which its oldest slots are dropped.
//! Revocations are outside of these bounds: [`CLAIMS_MAX`] of one writer.
//!
//! Cost: a signature takes some 0.05 ms, its check 0.1 ms. A slot is checked when it is merged and
//! never again; a write that is known already is not checked.

mod entry;
mod queries;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;

use super::{NodeId, RecordId, Signature, revocation};
pub use entry::{Register, RegisterKey, SavedEntry, SignedEntry};

/// The epoch of a record that has ended.
pub const EPOCH_UNWANTED: u64 = u64::MAX;

/// Most slots, tombstones included: some forty for each of a hundred nodes.
pub const REGISTERS_MAX: usize = 4096;

/// Most bytes of values: 2 KiB for each of [`REGISTERS_MAX`]. A hundred nodes with a record of
/// 4 KiB and paths of 16 KiB each take 2 MiB.
pub const BYTES_MAX: usize = 8 << 20;

/// Most slots of one writer: a quarter of all. A node alone publishes two for each file of its
/// store.
pub const WRITER_REGISTERS_MAX: usize = REGISTERS_MAX / 4;

/// Most bytes of one writer's values: a quarter of all.
pub const WRITER_BYTES_MAX: usize = BYTES_MAX / 4;

/// Most revocations of one writer.
pub const CLAIMS_MAX: usize = 256;

/// Longest value.
pub const VALUE_BYTES_MAX: usize = 16 << 10;

/// Longest name of a [`RegisterKey::Named`].
pub const NAME_BYTES_MAX: usize = 128;

/// How long tombstones are kept: a week.
pub const TOMBSTONE_MS: u64 = 7 * 24 * 3_600_000;

/// How long hidden slots are kept: a day, in which the writer that hides them can be revoked.
pub const HIDDEN_MS: u64 = 24 * 3_600_000;

/// How far an epoch may be above those of the other writers. A record that changes once
/// a minute needs two years for as many.
pub const EPOCH_JUMP_MAX: u64 = 1 << 20;

/// A writer's latest write of a key.
#[derive(Debug)]
struct Slot {
    register: Register,
    /// Absent in tests and of entries that are never sent.
    signature: Option<Signature>,
    /// Wall time of this machine when the write arrived. Facts of a node keep their first one.
    seen_ms: u64,
}

impl Slot {
    const fn writer(&self) -> NodeId {
        self.register.stamp.node
    }
}

/// The slots of a key, and the winner among them.
#[derive(Clone, Debug, Default)]
struct Group {
    slots: Vec<Arc<Slot>>,
    winner: Option<usize>,
    /// Its part of [`Registers::root`].
    mark: u64,
}

impl Group {
    fn winner(&self) -> Option<&Slot> {
        Some(&*self.slots[self.winner?])
    }

    fn of(&self, writer: NodeId) -> Option<&Slot> {
        let mut slots = self.slots.iter();
        slots
            .find(|slot| slot.writer() == writer)
            .map(|slot| &**slot)
    }

    /// The slots that nodes compare and send: the winner, and all revocations.
    fn shared(&self, key: &RegisterKey) -> &[Arc<Slot>] {
        match (key, self.winner) {
            (RegisterKey::Revoked(_), _) => &self.slots,
            (_, Some(at)) => &self.slots[at..=at],
            (_, None) => &[],
        }
    }

    fn marks(&self, key: &RegisterKey) -> u64 {
        let marks = self.shared(key).iter().map(|slot| slot.register.mark(key));
        marks.fold(0, |sum, mark| sum ^ mark)
    }
}

/// Slots and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    slots: usize,
    bytes: usize,
}

impl Usage {
    fn add(&mut self, register: &Register) {
        self.slots += 1;
        self.bytes += register.bytes();
    }

    fn remove(&mut self, register: &Register) {
        self.slots -= 1;
        self.bytes -= register.bytes();
    }

    const fn fits(self, slots: usize, bytes: usize) -> bool {
        self.slots <= slots && self.bytes <= bytes
    }
}

/// A node's copy of the map. Clones share the slots.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    /// The node itself, whose own revocations always count here.
    own: Option<NodeId>,
    groups: BTreeMap<RegisterKey, Group>,
    /// Of each writer, without revocations.
    usage: BTreeMap<NodeId, Usage>,
    all: Usage,
    revoked: BTreeSet<NodeId>,
    root: u64,
}

impl Registers {
    /// The map of these entries, unsigned, such as those of a test. Skips entries that exceed a
    /// bound.
    pub fn from_entries(entries: impl IntoIterator<Item = (RegisterKey, Register)>) -> Self {
        let mut map = Self::default();
        for (key, register) in entries {
            map.insert(key, register, None, 0);
        }
        map
    }

    /// The map of saved entries, whose signatures were checked before they were saved.
    pub fn from_saved(entries: Vec<SavedEntry>) -> Self {
        let mut map = Self::default();
        for SavedEntry { entry, seen_ms } in entries {
            map.insert(entry.key, entry.register, Some(entry.signature), seen_ms);
        }
        map
    }

    /// All slots, hidden ones included.
    pub fn saved(&self) -> Vec<SavedEntry> {
        let groups = self.groups.iter();
        let slots = groups.flat_map(|(key, group)| group.slots.iter().map(move |slot| (key, slot)));
        let saved = slots.filter_map(|(key, slot)| {
            Some(SavedEntry {
                entry: signed(key, slot)?,
                seen_ms: slot.seen_ms,
            })
        });
        saved.collect()
    }

    /// The records and their reports alone, which a node takes along into another cluster.
    pub(crate) fn records(&self) -> Self {
        let mut map = Self::default();
        let groups = self.groups.iter().filter(|(key, _)| key.has_epochs());
        let slots = groups.flat_map(|(key, group)| group.slots.iter().map(move |slot| (key, slot)));
        for (key, slot) in slots.filter(|(_, slot)| !self.revoked.contains(&slot.writer())) {
            let (register, signature) = (slot.register.clone(), slot.signature.clone());
            map.insert(key.clone(), register, signature, slot.seen_ms);
        }
        map
    }

    /// Makes this the copy of the node `own`.
    pub(crate) fn set_own(&mut self, own: NodeId) {
        self.own = Some(own);
        self.judge();
    }

    /// Whether a write breaks no rule and is news. The caller checks the signature.
    pub(crate) fn admits(&self, key: &RegisterKey, register: &Register) -> bool {
        let writer = register.stamp.node;
        let is_allowed = match key {
            // Not even by a later write: a revoked node could undo its revocation at a node that
            // was offline.
            RegisterKey::Revoked(id) => *id != writer && register.value.is_some(),
            _ => register.value.is_none() || key.subject().is_none_or(|id| id == writer),
        };
        let is_bounded = register.bytes() <= VALUE_BYTES_MAX
            && (key.has_epochs() || register.epoch == 0)
            && key.is_sane();
        let known = self.groups.get(key).and_then(|group| group.of(writer));
        let is_news = known.is_none_or(|slot| slot.register.rank() < register.rank());
        is_allowed && is_bounded && is_news && self.has_room(key, register, known)
    }

    /// Whether the map has room for a write. A foreign writer's quota makes room by itself.
    fn has_room(&self, key: &RegisterKey, register: &Register, known: Option<&Slot>) -> bool {
        let writer = register.stamp.node;
        if matches!(key, RegisterKey::Revoked(_)) {
            return known.is_some() || self.own == Some(writer) || self.claims(writer) < CLAIMS_MAX;
        }
        let after = |mut usage: Usage| {
            known
                .into_iter()
                .for_each(|slot| usage.remove(&slot.register));
            usage.add(register);
            usage
        };
        let of_writer = after(self.usage.get(&writer).copied().unwrap_or_default());
        let fits_writer = of_writer.fits(WRITER_REGISTERS_MAX, WRITER_BYTES_MAX);
        let fits_all = after(self.all).fits(REGISTERS_MAX, BYTES_MAX);
        match fits_writer {
            true => fits_all,
            false => self.own != Some(writer),
        }
    }

    fn claims(&self, writer: NodeId) -> usize {
        let groups = self.groups.iter();
        let claims = groups.filter(|(key, _)| matches!(key, RegisterKey::Revoked(_)));
        claims
            .filter(|(_, group)| group.of(writer).is_some())
            .count()
    }

    /// Whether a write of this node would win.
    pub(crate) fn would_win(&self, key: &RegisterKey, register: &Register) -> bool {
        let Some(group) = self.groups.get(key) else {
            return !key.has_epochs() || register.is_end() || register.epoch <= EPOCH_JUMP_MAX;
        };
        let mut slots = group.slots.clone();
        slots.retain(|slot| slot.writer() != register.stamp.node);
        slots.push(Arc::new(Slot {
            register: register.clone(),
            signature: None,
            seen_ms: 0,
        }));
        matches!(key, RegisterKey::Revoked(_)) || self.winner(key, &slots) == Some(slots.len() - 1)
    }

    /// Merges an admitted write whose signature was checked; true if readers or other nodes see a
    /// change.
    pub(crate) fn merge(&mut self, entry: SignedEntry, now_ms: u64) -> bool {
        let before = self.root;
        self.insert(entry.key, entry.register, Some(entry.signature), now_ms);
        self.root != before
    }

    fn insert(
        &mut self,
        key: RegisterKey,
        register: Register,
        signature: Option<Signature>,
        now_ms: u64,
    ) {
        if !self.admits(&key, &register) {
            return;
        }
        let (writer, mut seen_ms) = (register.stamp.node, now_ms);
        if let Some(known) = self.remove(&key, writer)
            && matches!(key, RegisterKey::Node(_))
        {
            seen_ms = known.seen_ms;
        }
        self.count(&key, &register, Usage::add);
        let slot = Arc::new(Slot {
            register,
            signature,
            seen_ms,
        });
        let group = self.groups.entry(key.clone()).or_default();
        group.slots.push(slot);
        self.changed(&key);
        self.keep_quota(writer);
    }

    /// Takes a slot out. The caller settles the key.
    fn remove(&mut self, key: &RegisterKey, writer: NodeId) -> Option<Arc<Slot>> {
        let group = self.groups.get_mut(key)?;
        let at = group
            .slots
            .iter()
            .position(|slot| slot.writer() == writer)?;
        group.winner = None;
        let slot = group.slots.remove(at);
        self.count(key, &slot.register, Usage::remove);
        Some(slot)
    }

    fn count(&mut self, key: &RegisterKey, register: &Register, by: fn(&mut Usage, &Register)) {
        if !matches!(key, RegisterKey::Revoked(_)) {
            by(&mut self.all, register);
            by(self.usage.entry(register.stamp.node).or_default(), register);
        }
    }

    /// Finds the winner of a key again, and what depends on it.
    fn changed(&mut self, key: &RegisterKey) {
        self.settle(key);
        match key {
            RegisterKey::Record(id) => self.settle(&RegisterKey::Report(*id)),
            RegisterKey::Revoked(_) => self.judge(),
            _ => {}
        }
    }

    fn settle(&mut self, key: &RegisterKey) {
        let Some(group) = self.groups.get(key) else {
            return;
        };
        let winner = self.winner(key, &group.slots);
        let group = self.groups.get_mut(key).expect("it was found");
        group.winner = winner;
        let before = group.mark;
        group.mark = group.marks(key);
        self.root ^= before ^ group.mark;
        if group.slots.is_empty() {
            self.groups.remove(key);
        }
    }

    /// The slot that wins, of writers that are not revoked.
    fn winner(&self, key: &RegisterKey, slots: &[Arc<Slot>]) -> Option<usize> {
        if let [slot] = slots
            && !key.has_epochs()
        {
            return (!self.revoked.contains(&slot.writer())).then_some(0);
        }
        let owner = match key {
            RegisterKey::Report(id) => self.owner(*id),
            _ => None,
        };
        let counts = |slot: &Slot| {
            let writer = slot.writer();
            !self.revoked.contains(&writer) && owner.is_none_or(|owner| owner == writer)
        };
        let highest = |but: NodeId| {
            let others = slots.iter().filter(|slot| slot.writer() != but);
            let others = others.filter(|slot| counts(slot) && !slot.register.is_end());
            others.map(|slot| slot.register.epoch).max().unwrap_or(0)
        };
        let is_near = |slot: &Slot| {
            let epoch = slot.register.epoch;
            epoch <= EPOCH_JUMP_MAX
                || slot.register.is_end()
                || epoch - EPOCH_JUMP_MAX <= highest(slot.writer())
        };
        let slots = slots.iter().enumerate();
        let slots = slots.filter(|(_, slot)| counts(slot) && is_near(slot));
        let (at, _) = slots.max_by_key(|(_, slot)| slot.register.rank())?;
        Some(at)
    }

    /// The owner of a record, which alone reports on it.
    fn owner(&self, id: RecordId) -> Option<NodeId> {
        #[derive(Deserialize)]
        struct Nodes {
            nodes: Vec<NodeId>,
        }
        let record = self.get(&RegisterKey::Record(id))?;
        let record: Nodes = serde_json::from_str(record).ok()?;
        record.nodes.first().copied()
    }

    /// Decides which nodes are revoked, and hides or shows their slots.
    fn judge(&mut self) {
        let mut claims = revocation::Claims::new();
        for (key, group) in &self.groups {
            if let RegisterKey::Revoked(id) = key {
                let signers = group.slots.iter().map(|slot| slot.register.stamp);
                claims.insert(*id, signers.collect());
            }
        }
        let revoked = revocation::revoked(&claims, self.own);
        if revoked == self.revoked {
            return;
        }
        self.revoked = revoked;
        // Records before reports, in the order of keys.
        let keys: Vec<RegisterKey> = self.groups.keys().cloned().collect();
        keys.iter().for_each(|key| self.settle(key));
    }

    /// Drops the oldest slots of a writer that exceeds its quota.
    fn keep_quota(&mut self, writer: NodeId) {
        while let Some(usage) = self.usage.get(&writer)
            && !usage.fits(WRITER_REGISTERS_MAX, WRITER_BYTES_MAX)
        {
            let slots = self.groups.iter().filter_map(|(key, group)| {
                let is_claim = matches!(key, RegisterKey::Revoked(_));
                let slot = group.of(writer).filter(|_| !is_claim)?;
                Some((slot.register.stamp, key))
            });
            let Some(oldest) = slots.min().map(|(_, key)| key.clone()) else {
                return;
            };
            self.remove(&oldest, writer);
            self.changed(&oldest);
        }
        self.usage.retain(|_, usage| usage.slots > 0);
    }

    /// Removes hidden slots and old tombstones.
    pub(crate) fn forget(&mut self, wall_ms: u64) {
        let oldest = wall_ms.saturating_sub(TOMBSTONE_MS);
        let mut due = Vec::new();
        for (key, group) in &self.groups {
            if matches!(key, RegisterKey::Revoked(_)) {
                continue;
            }
            let winner = group.winner();
            for slot in &group.slots {
                let wins = winner.is_some_and(|winner| winner.writer() == slot.writer());
                let beaten = winner.map_or(0, |winner| winner.seen_ms);
                let hidden = slot.seen_ms.max(beaten).max(self.revoked_ms(slot.writer()));
                let is_old = match wins {
                    true => slot.register.value.is_none() && slot.register.stamp.ms < oldest,
                    false => wall_ms.saturating_sub(hidden) >= HIDDEN_MS,
                };
                if is_old {
                    due.push((wins, key.clone(), slot.writer()));
                }
            }
        }
        due.sort(); // hidden slots first, so that none wins in between
        for (_, key, writer) in due {
            self.remove(&key, writer);
            self.changed(&key);
        }
        self.usage.retain(|_, usage| usage.slots > 0);
    }

    /// When the last revocation of a revoked node arrived; 0 of other nodes.
    fn revoked_ms(&self, id: NodeId) -> u64 {
        if !self.revoked.contains(&id) {
            return 0;
        }
        let claims = self.groups.get(&RegisterKey::Revoked(id));
        let seen = claims
            .iter()
            .flat_map(|group| &group.slots)
            .map(|slot| slot.seen_ms);
        seen.max().unwrap_or(0)
    }
}

fn signed(key: &RegisterKey, slot: &Slot) -> Option<SignedEntry> {
    Some(SignedEntry {
        key: key.clone(),
        register: slot.register.clone(),
        signature: slot.signature.clone()?,
    })
}

#[cfg(test)]
mod tests;
