//! A partial model file: present groups are verified against the hash tree before they are stored
//! and announced.
//!
//! ```text
//! SHA256.shard  the file at its full length, with holes; a complete one is the file
//! SHA256.have   a byte for each group: 1 if present. Workers read it while they load
//! SHA256.tree   the leaves of its hash tree
//! ```
//! A group is verified by the tree, then written, then marked in `have`. Groups of an earlier
//! process are verified again: a power cut may keep the mark of a group and lose its bytes.
//!
//! A complete copy with damaged groups is treated the same while they are fetched again
//! ([`VerifiedPartial::of_copy`]). It keeps its name and has no [`HAVE`] file.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use paceline_base::lock;

use super::damage::wrong_groups;
use super::sums::{GroupSums, SUMS};
use super::tree::{HashGroups, Tree};
use crate::storage::{self, OpenMode, Storage, StoredFile};

/// Extension of the file.
pub const FILE: &str = "shard";

/// Extension of the record of present groups.
pub const HAVE: &str = "have";

/// Extension of the file of leaves.
pub const TREE: &str = "tree";

/// Fixed modification time of a partial file. New bytes change no byte that was read, and a worker
/// keeps packed weights while the modification time is unchanged.
const CHANGED: Duration = Duration::from_secs(1_000_000_000);

/// A run of consecutive groups: first and end.
pub type GroupRun = (u64, u64);

/// A file with some groups present.
#[derive(Debug)]
pub struct VerifiedPartial {
    pub path: PathBuf,
    tree: Tree,
    file: Box<dyn StoredFile>,
    /// The record of present groups; `None` for a complete copy under repair.
    have: Option<Box<dyn StoredFile>>,
    /// The modification time that the file must keep.
    changed: SystemTime,
    there: Mutex<Vec<bool>>,
    /// Locked during a fetch, so that no group is fetched twice at once.
    pub turn: Mutex<()>,
}

impl VerifiedPartial {
    /// Opens the partial file with these leaves, or creates it. `path` ends in [`FILE`].
    pub fn open(storage: &dyn Storage, path: &Path, tree: Tree) -> io::Result<Self> {
        let count = tree.groups.count() as usize;
        let old = storage.open(path, OpenMode::Read);
        let is_new = old.and_then(|old| old.bytes()).ok() != Some(tree.groups.bytes);
        let open = |path: &Path| storage.open(path, OpenMode::Create);
        // In this order: a file without its record would pass for complete.
        let have = open(&path.with_extension(HAVE))?;
        if is_new {
            have.set_bytes(0)?;
        }
        have.set_bytes(count as u64)?;
        let file = open(path)?;
        file.set_bytes(tree.groups.bytes)?;
        let partial = Self {
            path: path.to_owned(),
            tree,
            file,
            have: Some(have),
            changed: SystemTime::UNIX_EPOCH + CHANGED,
            there: Mutex::new(vec![false; count]),
            turn: Mutex::default(),
        };
        partial.check()?;
        partial.file.set_modified(partial.changed)?;
        Ok(partial)
    }

    /// Opens the complete copy at `path`, whose groups `wrong` differ from these leaves and can be
    /// replaced in place. Corrects the file's length. Keeps its modification time, by which workers
    /// keep packed weights.
    pub fn of_copy(
        storage: &dyn Storage,
        path: &Path,
        tree: Tree,
        wrong: &[Range<u64>],
    ) -> io::Result<Self> {
        let file = storage.open(path, OpenMode::Write)?;
        let changed = file.modified()?;
        if file.bytes()? != tree.groups.bytes {
            file.set_bytes(tree.groups.bytes)?;
        }
        let mut there = vec![true; tree.groups.count() as usize];
        for index in wrong.iter().cloned().flatten() {
            there[index as usize] = false;
        }
        file.set_modified(changed)?;
        Ok(Self {
            path: path.to_owned(),
            tree,
            file,
            have: None,
            changed,
            there: Mutex::new(there),
            turn: Mutex::default(),
        })
    }

    /// Verifies the groups marked as present. Cost: reads them all.
    fn check(&self) -> io::Result<()> {
        let mut told = vec![0; self.groups().count() as usize];
        if let Some(have) = &self.have {
            have.read_at(&mut told, 0)?;
        }
        for (index, _) in told.iter().enumerate().filter(|(_, told)| **told != 0) {
            lock(&self.there)[index] = true;
        }
        self.recheck(&(0..self.groups().count())).map(drop)
    }

    /// Finds present groups of `wanted` whose bytes are damaged, as runs, and marks them missing.
    /// Cost: reads the present ones.
    pub fn recheck(&self, wanted: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let here = {
            let there = lock(&self.there);
            runs(&there, true, wanted)
        };
        let here: Vec<u64> = here.into_iter().flatten().collect();
        let wrong = wrong_groups(&*self.file, &self.tree, &here, &|_| true);
        for index in wrong.iter().cloned().flatten() {
            if let Some(have) = &self.have {
                have.write_at(&[0], index)?;
            }
            lock(&self.there)[index as usize] = false;
        }
        Ok(wrong)
    }

    /// Whether it is a complete copy under repair, whose space on disk is already used.
    pub const fn is_copy(&self) -> bool {
        self.have.is_none()
    }

    /// How the file is divided into groups.
    pub const fn groups(&self) -> HashGroups {
        self.tree.groups
    }

    /// Its leaves, concatenated.
    pub fn leaves(&self) -> Vec<u8> {
        self.tree.to_bytes()
    }

    /// Stores the bytes of a group; returns false and stores nothing if they do not match the tree.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    pub fn take(&self, index: u64, bytes: &[u8]) -> io::Result<bool> {
        if !self.tree.holds(index, bytes) {
            return Ok(false);
        }
        let at = self.groups().span(&(index..index + 1)).start;
        self.file.write_at(bytes, at)?;
        self.file.set_modified(self.changed)?;
        if let Some(have) = &self.have {
            have.write_at(&[1], index)?;
        }
        lock(&self.there)[index as usize] = true;
        Ok(true)
    }

    /// The missing groups of `wanted`.
    pub fn missing(&self, wanted: &Range<u64>) -> Vec<Range<u64>> {
        let there = lock(&self.there);
        runs(&there, false, wanted)
    }

    /// The present groups.
    pub fn runs(&self) -> Vec<GroupRun> {
        let there = lock(&self.there);
        let all = runs(&there, true, &(0..there.len() as u64));
        all.into_iter().map(|run| (run.start, run.end)).collect()
    }

    pub fn bytes_here(&self) -> u64 {
        let runs = self.runs().into_iter();
        let bytes = runs.map(|(start, end)| {
            let span = self.groups().span(&(start..end));
            span.end - span.start
        });
        bytes.sum()
    }

    /// Whether all groups are present.
    pub fn is_complete(&self) -> bool {
        lock(&self.there).iter().all(|there| *there)
    }

    /// The bytes of groups, if all of them are present.
    pub fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
        let is_sane = groups.start < groups.end && groups.end <= self.groups().count();
        match is_sane && self.missing(groups).is_empty() {
            true => self.read(groups).map(Some),
            false => Ok(None),
        }
    }

    fn read(&self, groups: &Range<u64>) -> io::Result<Vec<u8>> {
        let span = self.groups().span(groups);
        let mut bytes = vec![0; (span.end - span.start) as usize];
        self.file.read_at(&mut bytes, span.start)?;
        Ok(bytes)
    }

    /// Gives the complete file the name `copy` too. The bytes survive a power cut before the name
    /// does. Workers that have the file open are not affected.
    pub fn publish(&self, storage: &dyn Storage, copy: &Path) -> io::Result<()> {
        self.sync()?;
        storage::publish(storage, &self.path, copy)
    }

    /// Writes the sums of the complete file to `place`.
    ///
    /// # Errors
    /// As of [`GroupSums::make`].
    pub fn make_sums(&self, place: &Path) -> io::Result<()> {
        GroupSums::make(&*self.file, &self.tree, place)
    }

    /// Flushes all writes to disk.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync()?;
        self.have.as_ref().map_or(Ok(()), |have| have.sync())
    }
}

/// Runs of groups within `wanted` that are present (`is`) or missing.
fn runs(there: &[bool], is: bool, wanted: &Range<u64>) -> Vec<Range<u64>> {
    let end = wanted.end.min(there.len() as u64);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for index in (wanted.start..end).filter(|index| there[*index as usize] == is) {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

/// Bytes that a file with holes takes on the disk; 0 if there is none.
pub fn bytes_on_disk(path: &Path) -> u64 {
    // In units of 512 bytes.
    let used = |facts: fs::Metadata| facts.blocks().saturating_mul(512).min(facts.len());
    fs::metadata(path).map_or(0, used)
}

/// The files of a partial file at `path`, and of the copy that it becomes.
pub fn files_of(path: &Path) -> [PathBuf; 4] {
    // In this order, so that a leftover does not pass for a complete file.
    [
        path.to_owned(),
        path.with_extension(HAVE),
        path.with_extension(TREE),
        path.with_extension(SUMS),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::storage::FileSystem;

    const EACH: usize = 64 << 10;

    fn model() -> (tempfile::TempDir, PathBuf, Vec<u8>, Tree) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.shard");
        let bytes: Vec<u8> = (0..3 * EACH + 9).map(|i| (i / 7) as u8).collect();
        let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
        (dir, path, bytes, tree)
    }

    #[test]
    fn right_groups_are_kept_and_wrong_ones_leave_nothing() {
        let (_dir, path, bytes, tree) = model();
        let partial = VerifiedPartial::open(&FileSystem, &path, tree.clone()).unwrap();
        assert_eq!(partial.missing(&(0..9)), vec![0..4]);
        let mut wrong = bytes[EACH..2 * EACH].to_vec();
        wrong[5] ^= 4;
        assert!(!partial.take(1, &wrong).unwrap());
        assert!(partial.runs().is_empty());
        assert!(partial.take(1, &bytes[EACH..2 * EACH]).unwrap());
        assert!(partial.take(3, &bytes[3 * EACH..]).unwrap());
        assert_eq!(partial.missing(&(0..4)), vec![0..1, 2..3]);
        assert_eq!(partial.runs(), [(1, 2), (3, 4)]);
        assert_eq!(partial.bytes_here(), EACH as u64 + 9);
        assert_eq!(
            partial.give(&(1..2)).unwrap().unwrap(),
            &bytes[EACH..2 * EACH]
        );
        for none in [0..1, 1..4, 3..5, 2..2] {
            assert_eq!(partial.give(&none).unwrap(), None, "{none:?}");
        }
        assert!(!partial.is_complete());
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes.len() as u64);
    }

    #[test]
    fn what_was_left_is_checked_and_goes_on() {
        let (_dir, path, bytes, tree) = model();
        let partial = VerifiedPartial::open(&FileSystem, &path, tree.clone()).unwrap();
        let changed = || fs::metadata(&path).unwrap().modified().unwrap();
        let began = changed();
        for index in [0, 1, 3] {
            let end = bytes.len().min((index + 1) * EACH);
            assert!(
                partial
                    .take(index as u64, &bytes[index * EACH..end])
                    .unwrap()
            );
        }
        assert_eq!(changed(), began, "packed weights of it stay of use");
        drop(partial);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[!bytes[EACH]], EACH as u64).unwrap();
        let again = VerifiedPartial::open(&FileSystem, &path, tree.clone()).unwrap();
        assert_eq!(again.runs(), [(0, 1), (3, 4)], "the damaged one is gone");
        let told = fs::read(path.with_extension(HAVE)).unwrap();
        assert_eq!(told, [1, 0, 0, 1]);
        file.set_len(7).unwrap();
        let anew = VerifiedPartial::open(&FileSystem, &path, tree).unwrap();
        assert!(anew.runs().is_empty(), "another file was in its place");
    }

    #[test]
    fn what_the_disk_does_not_take_is_not_told() {
        let (_dir, path, bytes, tree) = model();
        let mut partial = VerifiedPartial::open(&FileSystem, &path, tree).unwrap();
        partial.file = Box::new(File::open(&path).unwrap()); // refuses writes, like a full disk
        assert!(partial.take(0, &bytes[..EACH]).is_err());
        assert!(partial.runs().is_empty());
        assert_eq!(fs::read(path.with_extension(HAVE)).unwrap(), [0; 4]);
    }
}
