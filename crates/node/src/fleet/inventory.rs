//! Inventory: the complete and partial model files that a node serves to others.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::copies::{PartialCopy, write_whole};
use super::file_ranges::FileInventory;
use paceline_store::verified::partial_file::GroupRun;
use paceline_store::verified::tree::{HashGroups, Tree};

/// A complete file.
pub(super) struct WholeFile {
    path: PathBuf,
    /// Path of its stored leaves.
    kept: PathBuf,
    file: File,
    groups: HashGroups,
}

impl WholeFile {
    /// Opens the file at `path`, whose leaves are or will be stored at `kept`.
    pub(super) fn open(path: &Path, kept: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let groups = HashGroups::of(file.metadata()?.len());
        let (path, kept) = (path.to_owned(), kept.to_owned());
        Ok(Self {
            path,
            kept,
            file,
            groups,
        })
    }
}

/// The hash tree of the complete file at `path`, with leaves stored at `kept`. Computed the first
/// time, which reads all of the file.
pub(super) fn tree_of(path: &Path, kept: &Path) -> io::Result<Tree> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let known = fs::read(kept).ok();
    if let Some(tree) = known.and_then(|known| Tree::from_bytes(bytes, &known)) {
        return Ok(tree);
    }
    let tree = Tree::read(&mut file, bytes)?;
    keep(&tree, kept)?;
    Ok(tree)
}

/// Stores the leaves of a tree at `kept`, unless they are there.
pub(super) fn keep(tree: &Tree, kept: &Path) -> io::Result<()> {
    let leaves = tree.to_bytes();
    if fs::read(kept).is_ok_and(|known| known == leaves) {
        return Ok(());
    }
    if let Some(folder) = kept.parent() {
        fs::create_dir_all(folder)?;
    }
    write_whole(kept, &leaves)
}

impl FileInventory for WholeFile {
    fn runs(&self) -> Vec<GroupRun> {
        vec![(0, self.groups.count())]
    }

    fn leaves(&self) -> io::Result<Vec<u8>> {
        tree_of(&self.path, &self.kept).map(|tree| tree.to_bytes())
    }

    fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
        if groups.start >= groups.end || groups.end > self.groups.count() {
            return Ok(None);
        }
        let span = self.groups.span(groups);
        let mut bytes = vec![0; (span.end - span.start) as usize];
        self.file.read_exact_at(&mut bytes, span.start)?;
        Ok(Some(bytes))
    }

    fn groups(&self) -> HashGroups {
        self.groups
    }
}

impl FileInventory for Arc<PartialCopy> {
    fn runs(&self) -> Vec<GroupRun> {
        self.partial.runs()
    }

    fn leaves(&self) -> io::Result<Vec<u8>> {
        Ok(self.partial.leaves())
    }

    fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
        self.partial.give(groups)
    }

    fn groups(&self) -> HashGroups {
        self.partial.groups()
    }
}
