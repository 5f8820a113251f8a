//! A disk in memory that loses, tears and damages what was written.
//!
//! Processes see all writes at once. A power cut keeps what was synced. Of the rest it keeps any
//! sectors of a file, and any first part of the changes of names: a journal has them in order.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use paceline_base::lock;
use paceline_store::storage::{OpenMode, Storage, StoredFile};

use crate::scenario::SimRandom;

/// Bytes that a disk writes whole.
const SECTOR: usize = 512;

/// A disk; clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct SimDisk(Arc<Mutex<DiskState>>);

#[derive(Debug)]
struct DiskState {
    random: SimRandom,
    files: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    /// Names that survive a power cut.
    durable: BTreeMap<PathBuf, usize>,
    /// Changes of names since the last sync of the folder.
    changes: Vec<NameChange>,
    is_full: bool,
    /// Whether a sync has an effect.
    syncs: bool,
}

/// The inode that a path leads to from now on; `None` for a removed name.
type NameChange = Vec<(PathBuf, Option<usize>)>;

#[derive(Debug)]
struct Inode {
    bytes: Vec<u8>,
    /// Bytes that survive a power cut.
    durable: Vec<u8>,
    /// Sectors written since the last sync.
    dirty: BTreeSet<usize>,
    modified: SystemTime,
}

impl Inode {
    const fn new() -> Self {
        Self {
            bytes: Vec::new(),
            durable: Vec::new(),
            dirty: BTreeSet::new(),
            modified: SystemTime::UNIX_EPOCH,
        }
    }

    fn write(&mut self, bytes: &[u8], at: usize) {
        let end = at + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[at..end].copy_from_slice(bytes);
        self.dirty.extend(at / SECTOR..end.div_ceil(SECTOR));
    }

    /// Loses the power: each sector that was not synced survives with a probability.
    fn cut_power(&mut self, random: &mut SimRandom, survive_per_mille: u64) {
        let mut kept = std::mem::take(&mut self.durable);
        if kept.len() != self.bytes.len() && random.chance(500) {
            kept.resize(self.bytes.len(), 0);
        }
        for sector in std::mem::take(&mut self.dirty) {
            let start = sector * SECTOR;
            let end = (start + SECTOR).min(self.bytes.len()).min(kept.len());
            if start < end && random.chance(survive_per_mille) {
                kept[start..end].copy_from_slice(&self.bytes[start..end]);
            }
        }
        self.bytes.clone_from(&kept);
        self.durable = kept;
    }
}

impl SimDisk {
    /// An empty disk; `syncs` is false for one that only claims to sync.
    pub(crate) fn new(seed: u64, syncs: bool) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            random: SimRandom::new(seed),
            files: Vec::new(),
            names: BTreeMap::new(),
            durable: BTreeMap::new(),
            changes: Vec::new(),
            is_full: false,
            syncs,
        })))
    }

    /// Sets whether writes fail.
    pub(crate) fn fill(&self, is_full: bool) {
        lock(&self.0).is_full = is_full;
    }

    /// The power fails and returns; open files must not be used any more.
    pub(crate) fn cut_power(&self) {
        let mut state = lock(&self.0);
        let DiskState {
            random,
            files,
            names,
            durable,
            changes,
            ..
        } = &mut *state;
        let survive = [0, 500, 1000][random.below(3) as usize];
        for file in files {
            file.cut_power(random, survive);
        }
        let kept = random.below(changes.len() as u64 + 1) as usize;
        let changes = std::mem::take(changes);
        for (path, inode) in changes.into_iter().take(kept).flatten() {
            set_name(durable, path, inode);
        }
        names.clone_from(durable);
    }

    /// Flips a bit of a file, whose length and times stay; false if there is no such byte.
    pub(crate) fn flip(&self, path: &Path, at: u64) -> bool {
        let mut state = lock(&self.0);
        let Some(inode) = state.names.get(path).copied() else {
            return false;
        };
        let Inode { bytes, durable, .. } = &mut state.files[inode];
        for own in [bytes, durable] {
            if let Some(byte) = own.get_mut(at as usize) {
                *byte ^= 1 << (at % 8);
            }
        }
        at < state.files[inode].bytes.len() as u64
    }

    /// Cuts a file to `bytes`, on the disk too.
    pub(crate) fn cut(&self, path: &Path, bytes: u64) {
        let mut state = lock(&self.0);
        if let Some(inode) = state.names.get(path).copied() {
            let file = &mut state.files[inode];
            file.bytes.truncate(bytes as usize);
            file.durable.truncate(bytes as usize);
        }
    }

    /// All bytes of a file; `None` if there is none.
    pub(crate) fn bytes_of(&self, path: &Path) -> Option<Vec<u8>> {
        let state = lock(&self.0);
        let inode = state.names.get(path)?;
        Some(state.files[*inode].bytes.clone())
    }

    fn rename_all(state: &mut DiskState, change: NameChange) {
        for (path, inode) in &change {
            set_name(&mut state.names, path.clone(), *inode);
        }
        state.changes.push(change);
    }
}

fn set_name(names: &mut BTreeMap<PathBuf, usize>, path: PathBuf, inode: Option<usize>) {
    match inode {
        Some(inode) => drop(names.insert(path, inode)),
        None => drop(names.remove(&path)),
    }
}

impl Storage for SimDisk {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Box<dyn StoredFile>> {
        let mut state = lock(&self.0);
        let known = state.names.get(path).copied();
        let inode = match (known, mode) {
            (Some(inode), OpenMode::Truncate) => {
                let file = &mut state.files[inode];
                let sectors = file.bytes.len().div_ceil(SECTOR);
                file.dirty.extend(0..sectors);
                file.bytes.clear();
                inode
            }
            (Some(inode), _) => inode,
            (None, OpenMode::Read | OpenMode::Write) => {
                return Err(io::ErrorKind::NotFound.into());
            }
            (None, OpenMode::Create | OpenMode::Truncate) => {
                let inode = state.files.len();
                state.files.push(Inode::new());
                Self::rename_all(&mut state, vec![(path.to_owned(), Some(inode))]);
                inode
            }
        };
        let disk = self.clone();
        Ok(Box::new(SimFile { disk, inode }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = lock(&self.0);
        let inode = state.names.get(from).copied();
        let inode = inode.ok_or(io::ErrorKind::NotFound)?;
        let change = vec![(to.to_owned(), Some(inode)), (from.to_owned(), None)];
        Self::rename_all(&mut state, change);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = lock(&self.0);
        if state.names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = state.names.get(from).copied();
        let inode = inode.ok_or(io::ErrorKind::NotFound)?;
        Self::rename_all(&mut state, vec![(to.to_owned(), Some(inode))]);
        Ok(())
    }

    fn sync_folder(&self, _: &Path) -> io::Result<()> {
        let mut state = lock(&self.0);
        if state.syncs {
            state.changes.clear();
            state.durable = state.names.clone();
        }
        Ok(())
    }
}

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    inode: usize,
}

impl SimFile {
    fn with<T>(&self, run: impl FnOnce(&mut Inode) -> T) -> T {
        run(&mut lock(&self.disk.0).files[self.inode])
    }
}

impl StoredFile for SimFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.with(|file| file.bytes.len() as u64))
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.with(|file| {
            let at = at as usize;
            let own = file.bytes.get(at..at + bytes.len());
            let own = own.ok_or(io::ErrorKind::UnexpectedEof)?;
            bytes.copy_from_slice(own);
            Ok(())
        })
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut state = lock(&self.disk.0);
        let is_full = state.is_full;
        // A full disk takes some of the bytes.
        let taken = match is_full {
            true => state.random.below(bytes.len() as u64 + 1) as usize,
            false => bytes.len(),
        };
        state.files[self.inode].write(&bytes[..taken], at as usize);
        match is_full {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }

    fn set_bytes(&self, bytes: u64) -> io::Result<()> {
        self.with(|file| file.bytes.resize(bytes as usize, 0));
        Ok(())
    }

    fn modified(&self) -> io::Result<SystemTime> {
        Ok(self.with(|file| file.modified))
    }

    fn set_modified(&self, time: SystemTime) -> io::Result<()> {
        self.with(|file| file.modified = time);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if lock(&self.disk.0).syncs {
            self.with(|file| {
                file.durable.clone_from(&file.bytes);
                file.dirty.clear();
            });
        }
        Ok(())
    }
}
