//! Finds damage in a model file: the groups whose bytes differ from its hash tree.
//!
//! A disk may lose bytes, a program may overwrite them, and a power cut may lose writes. The file's
//! length and times may show none of it. So the bytes themselves are compared, before a rank
//! computes with them or a node offers its copy (`copies`).

use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use paceline_base::lock;

use super::tree::{HashGroups, Tree};
use crate::storage::StoredFile;

/// Bytes per thread: BLAKE3 takes 250 µs for them, quick sums 120 µs, a thread start some 20 µs.
const THREAD_BYTES: u64 = 1 << 20;

/// Most threads: eight with 3 GB/s each read memory as fast as most machines can.
const THREADS_MAX: usize = 8;

/// Receives the number of further bytes compared; false ends the search.
pub type Count<'a> = dyn Fn(u64) -> bool + Sync + 'a;

/// Reference for the groups of a file.
pub trait GroupCheck: Sync {
    /// How the file is divided.
    fn groups(&self) -> HashGroups;

    /// Whether a group may have these bytes.
    fn holds(&self, index: u64, bytes: &[u8]) -> bool;
}

/// Bytes of a file, by group.
pub trait GroupBytes: Sync {
    /// The bytes at `span`, in `buffer` unless they are in memory already.
    ///
    /// # Errors
    /// The file ends before, or the system's error.
    fn bytes<'a>(&'a self, span: Range<u64>, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]>;
}

impl<F: StoredFile + ?Sized> GroupBytes for F {
    fn bytes<'a>(&'a self, span: Range<u64>, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        buffer.resize((span.end - span.start) as usize, 0);
        self.read_at(buffer, span.start)?;
        Ok(buffer)
    }
}

impl GroupCheck for Tree {
    fn groups(&self) -> HashGroups {
        self.groups
    }

    fn holds(&self, index: u64, bytes: &[u8]) -> bool {
        self.holds(index, bytes)
    }
}

/// Finds the groups among `groups` whose bytes in `file` differ from `check`, as runs. Unreadable
/// bytes count as wrong. Cost: reads all of `groups`, with several threads if they are many.
pub fn wrong_groups<F: GroupBytes + ?Sized>(
    file: &F,
    check: &dyn GroupCheck,
    groups: &[u64],
    count: &Count<'_>,
) -> Vec<Range<u64>> {
    let bytes = check.groups().each.saturating_mul(groups.len() as u64);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let useful = usize::try_from(bytes / THREAD_BYTES).unwrap_or(usize::MAX);
    let threads = useful.min(cores).clamp(1, THREADS_MAX);
    let search = DamageSearch {
        file,
        check,
        groups,
        next: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
        wrong: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| search.run(count));
        }
        search.run(count);
    });
    let mut wrong = lock(&search.wrong).clone();
    wrong.sort_unstable();
    runs(&wrong)
}

/// The given groups of a complete file that differ from the tree, and all groups beyond a
/// truncated end.
pub fn compare(
    copy: &dyn StoredFile,
    tree: &Tree,
    mut groups: Vec<Range<u64>>,
    count: &Count<'_>,
) -> io::Result<Vec<Range<u64>>> {
    let bytes = copy.bytes()?;
    groups.push(tree.groups.around(&(bytes..u64::MAX)));
    let groups: Vec<u64> = merged(groups).into_iter().flatten().collect();
    let mut wrong = wrong_groups(copy, tree, &groups, count);
    if wrong.is_empty() && bytes > tree.groups.bytes {
        // Its groups are right, but the file is too long.
        let last = tree.groups.count() - 1;
        wrong.push(last..last + 1);
    }
    Ok(wrong)
}

/// Sorts runs and merges overlapping and adjacent ones, so that no group is fetched twice.
pub fn merged(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
    runs.sort_by_key(|run| (run.start, run.end));
    let mut merged: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => merged.push(run),
        }
    }
    merged
}

/// A search by several threads. Each thread takes the next group.
struct DamageSearch<'a, F: ?Sized> {
    file: &'a F,
    check: &'a dyn GroupCheck,
    groups: &'a [u64],
    next: AtomicUsize,
    is_over: AtomicBool,
    wrong: Mutex<Vec<u64>>,
}

impl<F: GroupBytes + ?Sized> DamageSearch<'_, F> {
    fn run(&self, count: &Count<'_>) {
        let mut buffer = Vec::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&index) = self.groups.get(next) else {
                return;
            };
            let span = self.check.groups().span(&(index..index + 1));
            let len = span.end - span.start;
            let bytes = self.file.bytes(span, &mut buffer);
            if !bytes.is_ok_and(|bytes| self.check.holds(index, bytes)) {
                lock(&self.wrong).push(index);
            }
            if !count(len) {
                self.is_over.store(true, Ordering::Relaxed);
            }
        }
    }
}

fn runs(groups: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &index in groups {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    const EACH: usize = 64 << 10;

    /// A file of 100 groups and a bit, its bytes and its tree.
    fn file() -> (File, Vec<u8>, Tree) {
        let bytes: Vec<u8> = (0..100 * EACH + 9).map(|i| (i / 7) as u8).collect();
        let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        (file, bytes, tree)
    }

    /// First and end of each run of wrong groups.
    fn wrong(file: &File, tree: &Tree, groups: Range<u64>) -> Vec<(u64, u64)> {
        let groups: Vec<u64> = groups.collect();
        pairs(&wrong_groups(file, tree, &groups, &|_| true))
    }

    fn pairs(runs: &[Range<u64>]) -> Vec<(u64, u64)> {
        runs.iter().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn a_flipped_bit_is_found_in_its_group_alone() {
        let (file, bytes, tree) = file();
        assert_eq!(wrong(&file, &tree, 0..101), []);
        for at in [3 * EACH, 4 * EACH + 1, 100 * EACH + 8] {
            file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
        }
        assert_eq!(wrong(&file, &tree, 0..101), [(3, 5), (100, 101)]);
        assert_eq!(wrong(&file, &tree, 5..100), [], "not what was asked for");
    }

    #[test]
    fn all_that_a_cut_file_lacks_is_wrong() {
        let (file, bytes, tree) = file();
        file.set_len(bytes.len() as u64 - 10).unwrap();
        assert_eq!(wrong(&file, &tree, 0..101), [(99, 101)]);
        file.set_len(0).unwrap();
        assert_eq!(wrong(&file, &tree, 0..101), [(0, 101)]);
    }

    #[test]
    fn a_search_ends_when_its_caller_says_so() {
        let (file, _, tree) = file();
        file.set_len(0).unwrap();
        let few = wrong_groups(&file, &tree, &[0, 1, 2], &|_| false);
        assert_eq!(pairs(&few), [(0, 1)]);
    }
}
