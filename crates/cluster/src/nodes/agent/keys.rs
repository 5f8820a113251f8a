//! API keys of all nodes, synchronised through the shared map.
//!
//! The file of each node and the map hold the same entries. A key that appears in the file is
//! written to the map. A key that disappears from it is deleted there. Changes of the map are
//! written to the file likewise. The entries have hashes only; the agent does not interpret them.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use paceline_base::lock;

use super::super::member::Event;
use super::super::{RegisterKey, Registers};
use super::Inner;

/// A file of API keys, by their ids; each value is the JSON of one key.
pub trait KeyFile: Send + Sync {
    /// All entries; empty if there is no file.
    ///
    /// # Errors
    /// The file cannot be read: then nothing is synchronised.
    fn read(&self) -> io::Result<BTreeMap<String, String>>;

    /// Replaces all entries.
    ///
    /// # Errors
    /// The file cannot be written.
    fn write(&self, entries: &BTreeMap<String, String>) -> io::Result<()>;
}

/// Live entries of the map.
pub(super) fn of(map: &Registers) -> BTreeMap<String, String> {
    let entries = map.iter().filter_map(|(key, register)| {
        let RegisterKey::ApiKey(id) = key else {
            return None;
        };
        Some((id.clone(), register.value.clone()?))
    });
    entries.collect()
}

impl Inner {
    /// Synchronises file and map. `synced` is their last common state: a difference from it shows
    /// which of the two changed.
    pub(super) fn share_keys(self: &Arc<Self>, synced: &mut BTreeMap<String, String>) {
        let Some(file) = &self.config.keys else {
            return;
        };
        let Ok(here) = file.read() else { return };
        let wanted = {
            let mut state = lock(&self.state);
            for (key, value) in changes(synced, &here, &of(state.member.map())) {
                let (key, epoch) = (RegisterKey::ApiKey(key), 0);
                self.step(&mut state, Event::Write { key, epoch, value });
            }
            of(state.member.map())
        };
        if wanted != here && file.write(&wanted).is_err() {
            return; // tried again next time
        }
        *synced = wanted;
    }
}

/// Writes to the map for what changed in the file since `synced`.
fn changes(
    synced: &BTreeMap<String, String>,
    here: &BTreeMap<String, String>,
    map: &BTreeMap<String, String>,
) -> Vec<(String, Option<String>)> {
    let new = here
        .iter()
        .filter(|(id, value)| synced.get(*id) != Some(value) && map.get(*id) != Some(value));
    let gone = synced
        .keys()
        .filter(|id| !here.contains_key(*id) && map.contains_key(*id));
    let new = new.map(|(id, value)| (id.clone(), Some(value.clone())));
    new.chain(gone.map(|id| (id.clone(), None))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(ids: &str) -> BTreeMap<String, String> {
        ids.chars()
            .map(|c| (c.to_string(), "{}".to_owned()))
            .collect()
    }

    #[test]
    fn changes_of_the_file_reach_the_map_and_no_others_do() {
        let write = |id: &str| (id.to_owned(), Some("{}".to_owned()));
        let delete = |id: &str| (id.to_owned(), None);
        for (synced, here, map, expected) in [
            ("", "", "", vec![]),
            ("", "a", "", vec![write("a")]),
            ("a", "", "a", vec![delete("a")]),
            ("a", "a", "ab", vec![]),
            ("ab", "ab", "a", vec![]),
            ("a", "b", "ac", vec![write("b"), delete("a")]),
        ] {
            let found = changes(&keys(synced), &keys(here), &keys(map));
            assert_eq!(found, expected, "{synced} {here} {map}");
        }
    }
}
