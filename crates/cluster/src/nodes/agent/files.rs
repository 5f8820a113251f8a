//! The files of a node, below its home.
//!
//! ```text
//! HOME/node/identity      static private key, 32 bytes, mode 0600
//! HOME/node/cluster-key   the cluster's key, 32 bytes, mode 0600
//! HOME/node/former-keys   replaced keys: their count, then one token a line, mode 0600
//! HOME/node/map.json      the last saved shared map: {"form":2,"entries":[..]}, and names of nodes
//! HOME/node/trusted      RDMA cables that carry plaintext: device and node, one a line, mode 0600
//! HOME/node/lock          locked while the node runs
//! HOME/node/socket        where the command line reaches the node
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use paceline_base::lock;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::super::identity::{check_folder, write_secret};
use super::super::registers::SavedEntry;
use super::super::{ClusterKey, Identity, NodeId, Register, RegisterKey, Registers};
use super::Error;

/// Trusted cables: the device here, and the other node.
pub(super) type TrustedCables = BTreeSet<(String, NodeId)>;

/// Most stored former keys. A node that was offline for more revocations must join again.
pub(super) const FORMER_MAX: usize = 4;

/// Longest saved map that is read: its bounds, twice over.
const MAP_BYTES_MAX: u64 = 128 << 20;

/// The form of a saved map. The first form was a list of unsigned entries.
const MAP_FORM: u32 = 2;

#[derive(Serialize, Deserialize)]
struct MapFile {
    form: u32,
    entries: Vec<SavedEntry>,
    #[serde(default)]
    names: NodeNames,
}

/// Names of nodes, also of those that the map has no more.
pub(super) type NodeNames = BTreeMap<NodeId, String>;

#[derive(Debug, Default)]
pub(super) struct SavedMap {
    pub(super) map: Registers,
    /// Unsigned entries of a map of the first form.
    pub(super) former: Vec<(RegisterKey, Register)>,
    pub(super) names: NodeNames,
}

/// Longest file of trusted cables that is read: its bound, twice over.
const TRUSTED_BYTES_MAX: u64 = 16 << 10;

/// Longest file of former keys that is read.
const FORMER_BYTES_MAX: u64 = 4096;

/// Attempts to take the lock, with pauses. A newly forked process holds copies of its parent's
/// files until it runs its own program.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The folder of a node, which one process has, and in it one thread changes.
#[derive(Debug)]
pub(super) struct NodeFolder {
    folder: PathBuf,
    /// The locked file, while this process has the folder. A thread that changes files holds the
    /// mutex, and takes it without the node's state.
    claim: Mutex<Option<File>>,
}

impl NodeFolder {
    pub(super) fn new(home: &Path) -> Self {
        Self {
            folder: home.join("node"),
            claim: Mutex::default(),
        }
    }

    /// The right to change files, of one thread at a time: waits for the others.
    pub(super) fn turn(&self) -> MutexGuard<'_, Option<File>> {
        lock(&self.claim)
    }

    /// Lets another process have the folder.
    pub(super) fn release(&self) {
        drop(self.turn().take());
    }

    /// Claims the folder for this process, until [`release`](Self::release) or drop.
    ///
    /// # Errors
    /// [`Error::Running`] if another process has it.
    pub(super) fn claim(&self) -> Result<(), Error> {
        let failed = |path: &Path, source| Error::File {
            path: path.to_owned(),
            source,
        };
        // Before any secret is read, or made for others to take away.
        for folder in [self.folder.parent(), Some(&*self.folder)] {
            folder.map_or(Ok(()), check_folder)?;
        }
        let mut folder = DirBuilder::new();
        let made = folder.recursive(true).mode(0o700).create(&self.folder);
        made.map_err(|error| failed(&self.folder, error))?;
        let path = self.folder.join("lock");
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let file = options.mode(0o600).open(&path);
        let file = file.map_err(|error| failed(&path, error))?;
        for _ in 0..LOCK_TRIES {
            match file.try_lock() {
                Ok(()) => {
                    *self.turn() = Some(file);
                    return Ok(());
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
                Err(TryLockError::Error(error)) => return Err(failed(&path, error)),
            }
        }
        let folder = self.folder.clone();
        Err(Error::Running { folder })
    }

    pub(super) fn identity(&self) -> Result<Identity, Error> {
        Ok(Identity::open(&self.folder.join("identity"))?)
    }

    pub(super) fn key(&self) -> Result<ClusterKey, Error> {
        Ok(ClusterKey::open(&self.folder.join("cluster-key"))?)
    }

    pub(super) fn save_key(&self, key: &ClusterKey) -> Result<(), Error> {
        remove(&self.folder.join("former-keys"))?;
        Ok(key.save(&self.folder.join("cluster-key"))?)
    }

    /// Saves a key that replaces the `former` ones.
    pub(super) fn save_renewed(
        &self,
        key: &ClusterKey,
        generation: u64,
        former: &[ClusterKey],
    ) -> Result<(), Error> {
        let mut text = Zeroizing::new(format!("{generation}\n"));
        for key in former {
            text.push_str(&key.token());
            text.push('\n');
        }
        // In this order: a key in both files is recognised as not replaced.
        write_secret(&self.folder.join("former-keys"), text.as_bytes())?;
        Ok(key.save(&self.folder.join("cluster-key"))?)
    }

    /// The count of the present key, and the former keys. An unreadable file counts as empty: nodes
    /// that were offline must then join again.
    pub(super) fn former_keys(&self, present: &ClusterKey) -> (u64, Vec<ClusterKey>) {
        let mut text = Zeroizing::new(String::new());
        let file = File::open(self.folder.join("former-keys"));
        let read = file.and_then(|file| file.take(FORMER_BYTES_MAX).read_to_string(&mut text));
        if read.is_err() {
            return (0, Vec::new());
        }
        let mut lines = text.lines();
        let generation: Option<u64> = lines.next().and_then(|line| line.parse().ok());
        let keys = lines.filter_map(|line| ClusterKey::from_token(line).ok());
        let mut keys: Vec<ClusterKey> = keys.take(FORMER_MAX).collect();
        let read = keys.len();
        keys.retain(|key| key != present);
        // The process ended between the two files: the key was not replaced yet.
        let cut_off = u64::from(keys.len() < read);
        (generation.unwrap_or(0).saturating_sub(cut_off), keys)
    }

    /// The trusted cables. An unreadable file or line counts as none.
    pub(super) fn trusted(&self) -> TrustedCables {
        let mut text = String::new();
        let file = File::open(self.folder.join("trusted"));
        let read = file.and_then(|file| file.take(TRUSTED_BYTES_MAX).read_to_string(&mut text));
        if read.is_err() {
            return TrustedCables::new();
        }
        let cable = |line: &str| {
            let (device, node) = line.rsplit_once(' ')?;
            Some((device.to_owned(), node.parse().ok()?))
        };
        text.lines().filter_map(cable).collect()
    }

    pub(super) fn save_trusted(&self, cables: &TrustedCables) -> Result<(), Error> {
        let lines = cables
            .iter()
            .map(|(device, node)| format!("{device} {node}\n"));
        let text: String = lines.collect();
        Ok(write_secret(&self.folder.join("trusted"), text.as_bytes())?)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// The saved map. An unreadable file counts as an empty map: the other nodes have all entries.
    pub(super) fn map(&self) -> SavedMap {
        let mut bytes = Vec::new();
        let file = File::open(self.folder.join("map.json"));
        let read = file.and_then(|file| file.take(MAP_BYTES_MAX).read_to_end(&mut bytes));
        if read.is_err() {
            return SavedMap::default();
        }
        match serde_json::from_slice::<MapFile>(&bytes) {
            Ok(file) if file.form == MAP_FORM => SavedMap {
                map: Registers::from_saved(file.entries),
                former: Vec::new(),
                names: file.names,
            },
            _ => SavedMap {
                former: serde_json::from_slice(&bytes).unwrap_or_default(),
                ..SavedMap::default()
            },
        }
    }

    /// Saves the map with mode 0600, because it has hashes of API keys.
    pub(super) fn save_map(&self, map: &Registers, names: NodeNames) -> Result<(), Error> {
        let file = MapFile {
            form: MAP_FORM,
            entries: map.saved(),
            names,
        };
        let text = serde_json::to_vec(&file).expect("a map is JSON");
        Ok(write_secret(&self.folder.join("map.json"), &text)?)
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            let path = path.to_owned();
            Err(Error::File { path, source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::NodeId;
    use super::*;

    #[test]
    fn trusted_cables_are_read_again_and_other_lines_are_none() {
        let home = tempfile::tempdir().unwrap();
        let files = NodeFolder::new(home.path());
        assert!(files.trusted().is_empty());
        let cable = |name: &str, node| (name.to_owned(), NodeId([node; 16]));
        let cables = TrustedCables::from([cable("rdma_en5", 1), cable("rdma_en5", 2)]);
        files.save_trusted(&cables).unwrap();
        assert_eq!(files.trusted(), cables);
        let path = files.folder.join("trusted");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("rdma_en6\nrdma_en6 x\n{text}")).unwrap();
        assert_eq!(files.trusted(), cables);
    }

    #[test]
    fn a_key_whose_replacement_was_cut_off_can_be_replaced() {
        let home = tempfile::tempdir().unwrap();
        let files = NodeFolder::new(home.path());
        let [old, new] = [2, 1].map(|byte| ClusterKey::new([byte; 32]));
        let former = vec![old.clone()];
        files.save_renewed(&new, 5, &former).unwrap();
        assert_eq!(files.former_keys(&new), (5, former));
        assert_eq!(files.former_keys(&old), (4, Vec::new()));
    }
}
