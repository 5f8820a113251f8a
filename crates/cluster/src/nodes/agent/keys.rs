//! API keys of all nodes, synchronised through the shared map.
//!
//! The file of each node and the map hold the same entries. A key that appears in the file is
//! written to the map. A key that disappears from it is deleted there. Changes of the map are
//! written to the file likewise. The entries have hashes only; the agent does not interpret them.
//!
//! A key that another node made is written to the file without its rights of an admin. The user of
//! this machine may restore them there: then the file has the maker's exact entry, and keeps it
//! until the maker writes another.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use paceline_base::lock;

use super::super::member::Event;
use super::super::{NodeId, RegisterKey, Registers};
use super::{ClusterAct, Inner};

/// A file of API keys, by their ids; each value is the JSON of one key.
pub trait KeyFile: Send + Sync {
    /// All entries; empty if there is no file.
    ///
    /// # Errors
    /// The file cannot be read: then nothing is synchronised.
    fn read(&self) -> io::Result<BTreeMap<String, String>>;

    /// Replaces all entries.
    fn write(&self, entries: &BTreeMap<String, String>) -> io::Result<()>;

    /// An entry without rights of an admin; `None` if it is no entry of a key with this id.
    fn restrict(&self, id: &str, entry: &str) -> Option<String>;
}

/// A key of the cluster: the node that made it, and its entry as this node's file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedKey {
    maker: NodeId,
    entry: String,
}

/// Most keys taken from another maker: a quarter of what a file of keys may have.
const MAKER_KEYS_MAX: usize = 250;

/// Keys by their ids.
pub(super) type SharedKeys = BTreeMap<String, SharedKey>;

/// The live keys of the map. Of several makers of one id, this node comes first, then the one in
/// `known`, then the lowest.
fn of(map: &Registers, own: NodeId, known: &SharedKeys) -> SharedKeys {
    let (mut keys, mut counts) = (SharedKeys::new(), BTreeMap::<NodeId, usize>::new());
    for (key, register) in map.iter() {
        let (Some((maker, id)), Some(entry)) = (key.as_api_key(), &register.value) else {
            continue;
        };
        let count = counts.entry(maker).or_default();
        *count += 1;
        if maker != own && *count > MAKER_KEYS_MAX {
            continue;
        }
        let is_first =
            |other: NodeId| other == own || known.get(id).is_some_and(|it| it.maker == other);
        let stays = keys
            .get(id)
            .is_some_and(|it| it.maker == own || !is_first(maker));
        if !stays {
            let entry = entry.clone();
            keys.insert(id.to_owned(), SharedKey { maker, entry });
        }
    }
    keys
}

impl Inner {
    /// Synchronises file and map. `synced` is their last common state: a difference from it shows
    /// which of the two changed.
    pub(super) fn share_keys(self: &Arc<Self>, synced: &mut SharedKeys) {
        let Some(file) = &self.config.keys else {
            return;
        };
        let Ok(here) = file.read() else { return };
        let own = self.identity.id();
        let mut keys = {
            let mut state = lock(&self.state);
            for (key, value) in changes(own, synced, &here, state.member.map()) {
                state.record(ClusterAct::of_key(&key, value.is_some()));
                let epoch = 0;
                self.step(&mut state, Event::Write { key, epoch, value });
            }
            of(state.member.map(), own, synced)
        };
        keys.retain(|id, key| {
            let is_exact = here.get(id) == Some(&key.entry);
            if key.maker == own || is_exact {
                let before = synced.get(id).filter(|before| before.maker == key.maker);
                if key.maker != own && before.is_some_and(|before| before != key) {
                    lock(&self.state).record(ClusterAct::KeyAllowed(id.clone()));
                }
                return true;
            }
            let entry = file.restrict(id, &key.entry);
            entry.is_some_and(|entry| {
                key.entry = entry;
                true
            })
        });
        let wanted = keys.iter().map(|(id, key)| (id.clone(), key.entry.clone()));
        let wanted: BTreeMap<String, String> = wanted.collect();
        if wanted != here && file.write(&wanted).is_err() {
            return; // tried again next time
        }
        *synced = keys;
    }

    /// Takes the rights of admins from keys of the file.
    pub(super) fn restrict_keys(&self, ids: &[String]) {
        let Some(file) = &self.config.keys else {
            return;
        };
        let Ok(mut entries) = file.read() else { return };
        for id in ids {
            if let Some(entry) = entries.get_mut(id)
                && let Some(restricted) = file.restrict(id, entry)
            {
                *entry = restricted;
            }
        }
        // Without the file the keys stay as they are, and the user sees them in the list.
        let _ = file.write(&entries);
    }

    /// The keys of the map at the start, with the entries of the file.
    pub(super) fn known_keys(&self) -> SharedKeys {
        let own = self.identity.id();
        let mut keys = of(lock(&self.state).member.map(), own, &SharedKeys::new());
        let here = self.config.keys.as_ref().and_then(|file| file.read().ok());
        for (id, entry) in here.unwrap_or_default() {
            if let Some(key) = keys.get_mut(&id).filter(|key| key.maker != own) {
                key.entry = entry;
            }
        }
        keys
    }
}

/// Writes to the map for what changed in the file since `synced`. A change of a key that another
/// node made stays on this machine, except that its deletion deletes it everywhere.
fn changes(
    own: NodeId,
    synced: &SharedKeys,
    here: &BTreeMap<String, String>,
    map: &Registers,
) -> Vec<(RegisterKey, Option<String>)> {
    let known = of(map, own, synced);
    let is_new = |id: &String, entry: &String| match (known.get(id), synced.get(id)) {
        (Some(key), before) => {
            let is_changed = before.is_none_or(|before| before.entry != *entry);
            key.maker == own && key.entry != *entry && is_changed
        }
        // A key that was deleted, or whose maker is revoked, does not come back.
        (None, before) => before.is_none() && !map.has_api_key(id),
    };
    let new = here.iter().filter(|(id, entry)| is_new(id, entry));
    let new = new.map(|(id, entry)| (RegisterKey::api_key(own, id), Some(entry.clone())));
    let is_gone = |id: &str| synced.contains_key(id) && !here.contains_key(id);
    let gone = map.iter().filter(|(key, register)| {
        register.value.is_some() && key.as_api_key().is_some_and(|(_, id)| is_gone(id))
    });
    new.chain(gone.map(|(key, _)| (key.clone(), None)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::{HybridTimestamp, Register};
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn file(ids: &str) -> BTreeMap<String, String> {
        let entry = |c: char| (c.to_string(), "{}".to_owned());
        ids.chars().map(entry).collect()
    }

    fn map(maker: u8, ids: &str) -> Registers {
        let (ms, count, node) = (1, 0, node(maker));
        let register = Register {
            epoch: 0,
            stamp: HybridTimestamp { ms, count, node },
            value: Some("{}".to_owned()),
        };
        let key = |c: char| RegisterKey::api_key(node, &c.to_string());
        Registers::from_entries(ids.chars().map(|c| (key(c), register.clone())))
    }

    #[test]
    fn changes_of_the_file_reach_the_map_and_no_others_do() {
        let own = node(1);
        for (synced, here, in_map, expected) in [
            ("", "", "", ""),
            ("", "a", "", "+a"),
            ("a", "", "a", "-a"),
            ("a", "a", "ab", ""),
            ("ab", "ab", "a", ""),
            ("a", "b", "ac", "+b-a"),
        ] {
            for maker in [1, 2] {
                let synced = of(&map(maker, synced), own, &SharedKeys::new());
                let found = changes(own, &synced, &file(here), &map(maker, in_map));
                let shown = found.iter().map(|(key, value)| {
                    let (by, id) = key.as_api_key().unwrap();
                    let is_new = value.is_some();
                    assert_eq!(by, if is_new { own } else { node(maker) });
                    format!("{}{id}", if is_new { '+' } else { '-' })
                });
                assert_eq!(shown.collect::<String>(), expected, "{maker}");
            }
        }
    }

    #[test]
    fn another_nodes_key_is_changed_on_this_machine_only() {
        let (own, theirs) = (node(1), map(2, "a"));
        let synced = of(&theirs, own, &SharedKeys::new());
        let mut here = file("a");
        here.insert("a".to_owned(), "{\"role\":1}".to_owned());
        assert_eq!(changes(own, &synced, &here, &theirs), []);
        let ours = map(1, "a");
        let synced = of(&ours, own, &SharedKeys::new());
        assert_eq!(changes(own, &synced, &here, &ours).len(), 1);
    }
}
