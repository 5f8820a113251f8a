//! Removal of records that no instance uses: queries nodes for files, on its own thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use paceline_base::lock;
use paceline_cluster::nodes::RegisterKey;
use paceline_fleet::rules::collect::{Write, file_of, idle};

use super::Inner;

/// Most files in a query to nodes: 17 kB of SHA-256.
const FILES_MAX: usize = 256;

impl Inner {
    /// Looks for unused records, and removes those found twice if `removes`.
    pub(super) fn collect_stale(self: &Arc<Self>, removes: bool) {
        let mut state = lock(&self.state);
        if std::mem::replace(&mut state.is_collecting, true) {
            return; // the last check still waits for a node
        }
        let mut seen = std::mem::take(&mut state.idle_records);
        drop(state);
        let inner = Arc::clone(self);
        let run = move || {
            let due = seen.look(&inner.agent.map());
            if removes {
                inner.remove_records(due);
            }
            let mut state = lock(&inner.state);
            (state.idle_records, state.is_collecting) = (seen, false);
        };
        if !self.spawn("stale", run) {
            lock(&self.state).is_collecting = false;
        }
    }

    fn remove_records(&self, mut due: BTreeMap<RegisterKey, Write>) {
        let files: BTreeSet<String> = due.keys().filter_map(file_of).map(str::to_owned).collect();
        let files: Vec<String> = files.into_iter().take(FILES_MAX).collect();
        // A node that does not answer may have all of them.
        let held = match files.is_empty() {
            true => Some(BTreeSet::new()),
            false => self.held_anywhere(&files),
        };
        due.retain(|key, _| match (file_of(key), &held) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(sha256), Some(held)) => {
                !held.contains(sha256) && files.iter().any(|file| file == sha256)
            }
        });
        let still = idle(&self.agent.map());
        due.retain(|key, write| still.get(key) == Some(write));
        for (key, (epoch, _)) in due {
            // Fails if it was written again meanwhile: then it is used.
            let _: Result<(), _> = self.agent.write(key, epoch, None);
        }
    }
}
