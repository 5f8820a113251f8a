//! A worker's view of a model file that is still incomplete or damaged.
//!
//! The host process on the worker's machine fetches the byte ranges that the worker requests. It
//! records each group that is present in a second file next to the model file ([`HAVE`]). Before a
//! read the worker checks that record and requests missing ranges. It packs one matrix while the
//! next ones arrive.
//!
//! Groups that were present before the load are compared with the hash tree next to the file
//! ([`TREE`]) before they are read; others are not. The host repairs groups that differ, in place.
//! A file of the user's own has no hash tree and is read as it is.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use paceline_formats::gguf::Gguf;
use paceline_formats::tensor::{Absent, Arrivals};
use paceline_model::{ModelSource, Shard};

use crate::Error;
use crate::fleet::damage::wrong_groups;
use crate::fleet::partial_file::{FILE, HAVE, TREE};
use crate::fleet::tree::{HashGroups, Tree};

/// Poll interval for new bytes; a group takes half a millisecond at 1 Gbit/s.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How often a worker compares damaged groups again. That takes 20 µs a group.
const COMPARE_EVERY: Duration = Duration::from_millis(10);

/// Longest wait without any new byte. The host gives up sooner, with the reason.
const SILENCE: Duration = Duration::from_secs(60);

/// A byte range of the file: first byte and end.
pub(crate) type ByteRange = (u64, u64);

/// A worker's request to its host about byte ranges of the model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RangeRequest {
    /// Fetch these missing ranges.
    Fetch(Vec<ByteRange>),
    /// Fetch these damaged ranges again.
    Repair(Vec<ByteRange>),
}

/// Sends a request to the host; must not block for long.
pub(crate) type RangeRequester = dyn Fn(RangeRequest) + Send + Sync;

/// Whether the file at `path` may be incomplete, by its extension.
pub(crate) fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == FILE)
}

/// Opens a model. A read of weights waits until they are present and compares them with the hash
/// tree. `ask` receives requests for missing and damaged ranges.
///
/// # Errors
/// As [`RangeSource::open`], and what the system says.
pub(crate) fn open(path: &Path, ask: Arc<RangeRequester>) -> Result<ModelSource, Error> {
    let arriving = PartialSource::new(path, ask).map_err(|source| Error::System {
        what: "look which parts of the model are here",
        source,
    })?;
    let Some(arriving) = arriving else {
        return Ok(ModelSource::open(path)?);
    };
    let file = Gguf::open_arriving(path, Arc::new(arriving));
    Ok(ModelSource::Gguf(
        file.map_err(paceline_model::Error::from)?,
    ))
}

/// Ranges that only this rank reads, in its read order, so that the host can prefetch them. Empty
/// where ranks share layers: each then reads rows of most matrices.
pub(crate) fn ahead(source: &ModelSource, shard: &Shard) -> Vec<ByteRange> {
    let ModelSource::Gguf(file) = source else {
        return Vec::new();
    };
    if shard.stage_ranks().len() != 1 {
        return Vec::new();
    }
    let named = |prefix: String| {
        let own = file
            .tensors()
            .filter(move |it| it.name().starts_with(&prefix));
        own.filter_map(|tensor| tensor.range())
    };
    let first = shard.embeds().then(|| named("token_embd.".to_owned()));
    let last = shard.has_head().then(|| named("output".to_owned()));
    let layers = shard
        .layers
        .clone()
        .flat_map(|i| named(format!("blk.{i}.")));
    let all = first.into_iter().flatten().chain(layers);
    joined(all.chain(last.into_iter().flatten()))
}

/// Merges adjacent ranges.
fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<ByteRange> {
    // Tensors begin at multiples of the file's alignment (32 by default); a gap up to this size is
    // padding.
    const PADDING: u64 = 4096;
    let mut parts: Vec<ByteRange> = Vec::new();
    for range in ranges {
        let (start, end) = (range.start as u64, range.end as u64);
        match parts.last_mut() {
            Some(part) if (part.1..=part.1 + PADDING).contains(&start) => part.1 = end,
            _ => parts.push((start, end)),
        }
    }
    parts
}

/// The state of a copy.
struct PartialSource {
    file: String,
    groups: HashGroups,
    /// `None` for a complete copy.
    have: Option<File>,
    /// The file and its hash tree, if there is one.
    tree: Option<(File, Tree)>,
    /// By group: whether it is present and verified.
    there: Vec<AtomicBool>,
    /// By group: whether it was present before the load and needs verification.
    is_old: Vec<bool>,
    ask: Arc<RangeRequester>,
}

impl PartialSource {
    /// The state of the file at `path`; `None` for a complete file without a hash tree.
    fn new(path: &Path, ask: Arc<RangeRequester>) -> io::Result<Option<Self>> {
        let (have, tree) = (is_partial(path), tree_of(path)?);
        if !have && tree.is_none() {
            return Ok(None);
        }
        let groups = HashGroups::of(std::fs::metadata(path)?.len());
        let have = have.then(|| File::open(path.with_extension(HAVE)));
        let have = have.transpose()?;
        let mut is_old = vec![1; groups.count() as usize];
        if let Some(have) = &have {
            have.read_exact_at(&mut is_old, 0)?;
        }
        let there = (0..groups.count()).map(|_| AtomicBool::new(false));
        Ok(Some(Self {
            file: path.display().to_string(),
            groups,
            have,
            there: there.collect(),
            is_old: is_old
                .iter()
                .map(|told| *told != 0 && tree.is_some())
                .collect(),
            tree,
            ask,
        }))
    }

    fn is_here(&self, groups: &Range<u64>) -> bool {
        let own = &self.there[groups.start as usize..groups.end as usize];
        own.iter().all(|there| there.load(Ordering::Acquire))
    }

    /// Verifies the groups that were present before the load and are not verified yet. Waits until
    /// the host has repaired those that differ.
    fn compare(&self, groups: &Range<u64>) -> Result<(), String> {
        let Some((file, tree)) = &self.tree else {
            return Ok(());
        };
        let is_open = |group: &u64| {
            let group = *group as usize;
            self.is_old[group] && !self.there[group].load(Ordering::Acquire)
        };
        let open: Vec<u64> = groups.clone().filter(is_open).collect();
        let wrong = |groups: &[u64]| wrong_groups(file, tree, groups, &|_| true);
        let mut left = wrong(&open);
        if !left.is_empty() {
            let spans = left.iter().map(|run| self.groups.span(run));
            let parts = spans.map(|span| (span.start, span.end)).collect();
            (self.ask)(RangeRequest::Repair(parts));
        }
        let mut since = Instant::now();
        while !left.is_empty() {
            if since.elapsed() > SILENCE {
                let reason = "they are damaged, and right ones did not come for";
                return Err(format!("{reason} {} s", SILENCE.as_secs()));
            }
            std::thread::sleep(COMPARE_EVERY);
            let groups: Vec<u64> = left.iter().cloned().flatten().collect();
            let still = wrong(&groups);
            if still != left {
                since = Instant::now();
            }
            left = still;
        }
        for group in open {
            self.there[group as usize].store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Updates which of the groups are present.
    fn look(&self, groups: &Range<u64>) -> io::Result<()> {
        let Some(have) = &self.have else {
            return Ok(());
        };
        let mut told = vec![0; (groups.end - groups.start) as usize];
        have.read_exact_at(&mut told, groups.start)?;
        for (index, told) in groups.clone().zip(told) {
            if told != 0 && !self.is_old[index as usize] {
                self.there[index as usize].store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    /// When the record of present groups last changed.
    fn changed(&self) -> Option<SystemTime> {
        let facts = self.have.as_ref()?.metadata();
        facts.and_then(|facts| facts.modified()).ok()
    }

    fn wait_for(&self, groups: &Range<u64>, bytes: ByteRange) -> Result<(), String> {
        self.compare(groups)?;
        let look = || self.look(groups).map_err(|error| error.to_string());
        look()?;
        if self.is_here(groups) {
            return Ok(());
        }
        (self.ask)(RangeRequest::Fetch(vec![bytes]));
        let (mut last, mut since) = (self.changed(), Instant::now());
        while !self.is_here(groups) {
            if since.elapsed() > SILENCE {
                return Err(format!("nothing came for {} s", SILENCE.as_secs()));
            }
            std::thread::sleep(LOOK_EVERY);
            look()?;
            let changed = self.changed();
            if changed != last {
                (last, since) = (changed, Instant::now());
            }
        }
        Ok(())
    }
}

/// The bytes and the hash tree of a file; `None` where there is no tree, or one of another length.
fn tree_of(path: &Path) -> io::Result<Option<(File, Tree)>> {
    let leaves = match std::fs::read(path.with_extension(TREE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        leaves => leaves?,
    };
    let file = File::open(path)?;
    let tree = Tree::from_bytes(file.metadata()?.len(), &leaves);
    Ok(tree.map(|tree| (file, tree)))
}

impl Arrivals for PartialSource {
    fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
        let bytes = (range.start as u64, range.end as u64);
        let groups = self.groups.around(&(bytes.0..bytes.1));
        if self.is_here(&groups) {
            return Ok(());
        }
        self.wait_for(&groups, bytes).map_err(|reason| Absent {
            file: self.file.clone(),
            range,
            reason,
        })
    }
}

impl std::fmt::Debug for PartialSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} as it arrives", self.file)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Mutex;

    use paceline_base::lock;

    use super::*;

    #[test]
    fn parts_are_asked_for_once_and_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.shard");
        let each = HashGroups::of(0).each as usize;
        std::fs::write(&path, vec![0; 3 * each]).unwrap();
        let have = path.with_extension(HAVE);
        std::fs::write(&have, [1, 0, 0]).unwrap();
        let asked: Arc<Mutex<Vec<ByteRange>>> = Arc::default();
        let (own, told) = (Arc::clone(&asked), have.clone());
        let ask = move |wish: RangeRequest| {
            let RangeRequest::Fetch(parts) = wish else {
                panic!("{wish:?}");
            };
            lock(&own).extend(parts);
            std::fs::write(&told, [1, 1, 0]).unwrap(); // the machine has fetched it
        };
        let arriving = PartialSource::new(&path, Arc::new(ask)).unwrap().unwrap();
        arriving.wait(0..each).unwrap();
        assert!(lock(&asked).is_empty(), "it is here");
        arriving.wait(each - 1..each + 1).unwrap();
        arriving.wait(each..each + 9).unwrap();
        assert_eq!(*lock(&asked), [(each as u64 - 1, each as u64 + 1)]);
        arriving.wait(7..7).unwrap();
        assert!(is_partial(&path) && !is_partial(&have));
    }

    #[test]
    fn parts_that_touch_are_one() {
        let ranges = [0..10, 32..64, 10_000..10_001, 64..70];
        let parts = joined(ranges.into_iter());
        assert_eq!(parts, [(0, 64), (10_000, 10_001), (64, 70)]);
    }
    /// A whole copy of four groups and its hash tree; its bytes.
    fn copy(dir: &Path) -> (PathBuf, Vec<u8>) {
        let (path, each) = (dir.join("m.gguf"), HashGroups::of(0).each as usize);
        let bytes: Vec<u8> = (0..3 * each + 9).map(|i| (i / 7) as u8).collect();
        let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        std::fs::write(path.with_extension(TREE), tree.to_bytes()).unwrap();
        (path, bytes)
    }

    /// Flips a bit of the file, whose length and time stay.
    fn flip(path: &Path, bytes: &[u8], at: usize) {
        let file = File::options().write(true).open(path).unwrap();
        let changed = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
        file.set_modified(changed).unwrap();
    }

    #[test]
    fn a_damaged_group_is_repaired_before_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes) = copy(dir.path());
        let each = HashGroups::of(0).each as usize;
        flip(&path, &bytes, each + 7);
        flip(&path, &bytes, 3 * each);
        let wishes: Arc<Mutex<Vec<RangeRequest>>> = Arc::default();
        let (heard, right, place) = (Arc::clone(&wishes), bytes.clone(), path.clone());
        let ask = move |wish: RangeRequest| {
            lock(&heard).push(wish);
            let file = File::options().write(true).open(&place).unwrap();
            file.write_all_at(&right[each..2 * each], each as u64)
                .unwrap();
        };
        let arriving = PartialSource::new(&path, Arc::new(ask)).unwrap().unwrap();
        arriving.wait(0..each).unwrap();
        arriving.wait(2 * each..3 * each).unwrap();
        assert!(lock(&wishes).is_empty(), "others' parts are not compared");
        arriving.wait(0..3 * each).unwrap();
        let each = each as u64;
        assert_eq!(
            *lock(&wishes),
            [RangeRequest::Repair(vec![(each, 2 * each)])]
        );
    }

    #[test]
    fn groups_that_were_here_before_are_compared_and_those_that_come_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, bytes) = copy(dir.path());
        let path = whole.with_extension(FILE);
        std::fs::rename(&whole, &path).unwrap();
        let each = HashGroups::of(0).each as usize;
        let have = path.with_extension(HAVE);
        std::fs::write(&have, [1, 1, 0, 0]).unwrap();
        flip(&path, &bytes, each);
        let wishes: Arc<Mutex<Vec<RangeRequest>>> = Arc::default();
        let (heard, right, place) = (Arc::clone(&wishes), bytes, path.clone());
        let ask = move |wish: RangeRequest| {
            match &wish {
                RangeRequest::Repair(_) => std::fs::write(&place, &right).unwrap(),
                RangeRequest::Fetch(_) => std::fs::write(&have, [1; 4]).unwrap(),
            }
            lock(&heard).push(wish);
        };
        let arriving = PartialSource::new(&path, Arc::new(ask)).unwrap().unwrap();
        arriving.wait(0..3 * each).unwrap();
        let each = each as u64;
        let expected = [
            RangeRequest::Repair(vec![(each, 2 * each)]),
            RangeRequest::Fetch(vec![(0, 3 * each)]),
        ];
        assert_eq!(*lock(&wishes), expected);
    }

    #[test]
    fn a_file_of_the_users_own_is_read_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = copy(dir.path());
        std::fs::remove_file(path.with_extension(TREE)).unwrap();
        assert!(
            PartialSource::new(&path, Arc::new(|_| ()))
                .unwrap()
                .is_none()
        );
    }
}
