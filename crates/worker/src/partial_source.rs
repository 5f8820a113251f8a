//! A worker's view of a model whose files are still incomplete or damaged.
//!
//! The host process on the worker's machine fetches the byte ranges that the worker requests. It
//! records each group that is present in a second file next to the model file ([`HAVE`]). Before a
//! read the worker checks that record and requests missing ranges. It packs one matrix while the
//! next ones arrive.
//!
//! A model of several files is a folder whose entries have the files' names and link to them:
//!
//! ```text
//! SHA256.model/config.json                          a file of its own
//! SHA256.model/model-00001-of-00002.safetensors ->  ../FILESHA256.shard
//! ```
//! Requests name a file by its path in that folder. The worker opens the folder, or the first part
//! of a split GGUF file in it.
//!
//! Groups that were present before the load are compared with the hash tree next to the file
//! ([`TREE`]) before they are read; others are not. The host repairs groups that differ, in place.
//! A file of the user's store is compared with its [`Checksums`]. Any other file of the user's has
//! no hash tree and is read as it is.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use paceline_base::lock;
use paceline_model::{ModelFamily, ModelSource, Shard};
use paceline_weights::tensor::{Absent, Arrivals, MappedBytes};

use crate::Error;
use paceline_store::verified::checksums::{Checksums, sums_beside};
use paceline_store::verified::damage::{GroupBytes, wrong_groups};
use paceline_store::verified::partial_file::{FILE, HAVE, TREE};
use paceline_store::verified::sums::{GroupSums, SUMS};
use paceline_store::verified::tree::{HashGroups, Tree};

/// Poll interval for new bytes; a group takes half a millisecond at 1 Gbit/s.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// How often a worker compares damaged groups again. That takes 20 µs a group.
const COMPARE_EVERY: Duration = Duration::from_millis(10);

/// A wait fails after an interval of this length without any new byte of the model. The host gives
/// up sooner, with the reason.
const SILENCE: Duration = Duration::from_secs(60);

/// Extension of the folder of a model of several files.
pub const FOLDER: &str = "model";

/// Most prefetches that a worker announces. A stage of DeepSeek-V3, whose 163 files each have a few
/// layers, announces some hundred.
pub const AHEAD_MAX: usize = 1024;

/// A byte range of the file: first byte and end.
pub type ByteRange = (u64, u64);

/// A worker's request to its host about byte ranges of the model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RangeRequest {
    /// Fetch these missing ranges.
    Fetch {
        /// The file's name in the model's folder; empty for a model of one file.
        file: String,
        parts: Vec<ByteRange>,
    },
    /// Fetch these damaged ranges again.
    Repair { file: String, parts: Vec<ByteRange> },
}

/// Sends a request to the host; must not block for long.
pub type RangeRequester = dyn Fn(RangeRequest) + Send + Sync;

/// Whether a file of the model at `path` may be incomplete.
pub fn is_partial(path: &Path) -> bool {
    match model_folder(path) {
        Some(folder) => has_partial(&folder),
        None => is_shard(path),
    }
}

/// Whether a file in `folder` may be incomplete.
fn has_partial(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => has_partial(&entry.path()),
        _ => is_shard(&entry.path()),
    })
}

/// Whether the file that `path` is or links to may be incomplete, by its extension.
fn is_shard(path: &Path) -> bool {
    resolved(path).extension().is_some_and(|it| it == FILE)
}

/// The file that `path` links to, or `path`.
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The folder of the model at `path`; `None` for a model of one file.
fn model_folder(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let is_folder = |it: &&Path| it.extension().is_some_and(|ending| ending == FOLDER);
    let folder = path.ancestors().skip(1).find(is_folder);
    folder.filter(|_| path.is_symlink()).map(Path::to_owned)
}

/// The name of `file` in requests of a model with this folder.
fn name_in(folder: Option<&Path>, file: &Path) -> String {
    let name = folder.and_then(|folder| file.strip_prefix(folder).ok());
    name.map_or_else(String::new, |name| name.display().to_string())
}

/// Opens a model whose weights are compared with the checksums of the store when they are read.
///
/// # Errors
/// As of [`ModelSource::open`]; damage before the weights.
pub fn open_checked(path: &Path) -> Result<ModelSource, Error> {
    open(path, None)
}

/// Opens a model. A read of weights waits until they are present and compares them with the hash
/// tree. `ask` receives requests for missing and damaged ranges; without it, damage is an error.
///
/// # Errors
/// As [`ModelSource::open_arriving`]; damage before the weights that stays.
pub fn open(path: &Path, ask: Option<Arc<RangeRequester>>) -> Result<ModelSource, Error> {
    let folder = model_folder(path);
    let records = Arc::default();
    let opened: Mutex<Vec<Option<Arc<PartialSource>>>> = Mutex::default();
    let find = |file: &Path, mapped: &MappedBytes| {
        let name = name_in(folder.as_deref(), file);
        let source = PartialSource::new((file, mapped), name, (ask.as_ref(), &records))?;
        let source = source.map(Arc::new);
        lock(&opened).push(source.clone());
        Ok(source.map(|source| source as Arc<dyn Arrivals>))
    };
    let source = ModelSource::open_arriving(path, &find)?;
    let headers: Vec<usize> = match &source {
        ModelSource::Gguf(file) => file.contents().map(|(_, header)| header).collect(),
        ModelSource::Hf(folder) => folder.contents().map(|(_, header)| header).collect(),
    };
    let files = std::mem::take(&mut *lock(&opened));
    let mut is_old = false;
    for (file, header) in files.iter().zip(headers) {
        let Some(file) = file else { continue };
        let groups = file.groups.around(&(0..header as u64));
        is_old |= !file.wrong(&file.open_groups(&groups)).is_empty();
        file.wait(0..header).map_err(paceline_model::Error::from)?;
    }
    match is_old {
        // Its header was read before it was repaired.
        true => Ok(ModelSource::open_arriving(path, &find)?),
        false => Ok(source),
    }
}

/// Ranges of incomplete files that only this rank reads, in its read order, so that the host can
/// prefetch them. Each run of ranges of one file has the file's name in requests. Empty where ranks
/// share layers: each then reads rows of most matrices.
pub fn ahead(
    model: &Path,
    source: &ModelSource,
    (family, shard): (ModelFamily, &Shard),
) -> Vec<(String, Vec<ByteRange>)> {
    if shard.stage_ranks().len() != 1 {
        return Vec::new();
    }
    let mut runs: Vec<(&Path, Vec<Range<usize>>)> = Vec::new();
    for (file, range) in source.locations(family, shard) {
        match runs.last_mut() {
            Some((last, ranges)) if *last == file => ranges.push(range),
            _ => runs.push((file, vec![range])),
        }
    }
    let folder = model_folder(model);
    let partial = runs.into_iter().filter(|(file, _)| is_shard(file));
    let named = partial.map(|(file, ranges)| {
        let parts = joined(ranges.into_iter());
        (name_in(folder.as_deref(), file), parts)
    });
    named.take(AHEAD_MAX).collect()
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

/// The records of present groups of a model's incomplete files.
type Records = Mutex<Vec<File>>;

/// When one of the records last changed.
fn changed(records: &Records) -> Option<SystemTime> {
    let records = lock(records);
    let changes = records.iter().map(|record| record.metadata()?.modified());
    changes.flatten().max()
}

/// Detects that no byte of the model comes any more. A host fetches one range after the other, so
/// bytes of one file may come while a read of another waits.
struct SilenceTimer<'a> {
    records: &'a Records,
    last: Option<SystemTime>,
    since: Instant,
}

impl<'a> SilenceTimer<'a> {
    fn new(records: &'a Records) -> Self {
        Self {
            records,
            last: changed(records),
            since: Instant::now(),
        }
    }

    /// Whether an interval ended in which nothing came; else the next one begins at its end.
    fn is_over(&mut self) -> bool {
        if self.since.elapsed() <= SILENCE {
            return false;
        }
        let next = Self::new(self.records);
        let is_over = next.last == self.last;
        *self = next;
        is_over
    }
}

/// A file that is mapped for its readers. Comparing the mapped bytes costs no copy, and compares
/// what the readers see.
struct ReadFile {
    file: File,
    mapped: MappedBytes,
}

impl GroupBytes for ReadFile {
    fn bytes<'a>(&'a self, span: Range<u64>, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        match self.mapped.resident(span.start as usize..span.end as usize) {
            Some(bytes) => Ok(bytes),
            None => self.file.bytes(span, buffer),
        }
    }
}

/// The state of a copy.
struct PartialSource {
    /// Its path, for errors.
    path: PathBuf,
    /// Its name in requests.
    name: String,
    groups: HashGroups,
    /// `None` for a complete copy.
    have: Option<File>,
    /// The file and its hash tree, if there is one.
    tree: Option<(ReadFile, Tree)>,
    /// Quick sums of a complete file.
    sums: Option<GroupSums>,
    /// By group: whether it is present and verified.
    there: Vec<AtomicBool>,
    /// By group: whether it was present before the load and needs verification.
    is_old: Vec<bool>,
    /// `None` if nothing repairs the file.
    ask: Option<Arc<RangeRequester>>,
    records: Arc<Records>,
}

impl PartialSource {
    /// The state of the file that `path` is or links to; `None` for a complete file without a hash
    /// tree. `name` is its name in requests.
    fn new(
        (path, mapped): (&Path, &MappedBytes),
        name: String,
        (ask, records): (Option<&Arc<RangeRequester>>, &Arc<Records>),
    ) -> io::Result<Option<Self>> {
        let (shown, path) = (path, &resolved(path));
        let (have, tree) = (is_shard(path), tree_of(path, mapped)?);
        if !have && tree.is_none() {
            return Ok(None);
        }
        let groups = HashGroups::of(std::fs::metadata(path)?.len());
        let have = have.then(|| File::open(path.with_extension(HAVE)));
        let have = have.transpose()?;
        let mut is_old = vec![1; groups.count() as usize];
        if let Some(have) = &have {
            have.read_exact_at(&mut is_old, 0)?;
            lock(records).push(have.try_clone()?);
        }
        let there = (0..groups.count()).map(|_| AtomicBool::new(false));
        Ok(Some(Self {
            path: shown.to_owned(),
            name,
            groups,
            have,
            there: there.collect(),
            is_old: is_old
                .iter()
                .map(|told| *told != 0 && tree.is_some())
                .collect(),
            sums: tree.as_ref().and_then(|(_, tree)| sums_of(path, tree)),
            tree,
            ask: ask.map(Arc::clone),
            records: Arc::clone(records),
        }))
    }

    fn is_here(&self, groups: &Range<u64>) -> bool {
        let own = &self.there[groups.start as usize..groups.end as usize];
        own.iter().all(|there| there.load(Ordering::Acquire))
    }

    /// The groups that were present before the load and are not verified yet.
    fn open_groups(&self, groups: &Range<u64>) -> Vec<u64> {
        let is_open = |group: &u64| {
            let group = *group as usize;
            self.is_old[group] && !self.there[group].load(Ordering::Acquire)
        };
        groups.clone().filter(is_open).collect()
    }

    /// The groups that differ from the hash tree, as runs.
    fn wrong(&self, groups: &[u64]) -> Vec<Range<u64>> {
        let Some((file, tree)) = &self.tree else {
            return Vec::new();
        };
        let Some(sums) = &self.sums else {
            return wrong_groups(file, tree, groups, &|_| true);
        };
        let unlike = wrong_groups(file, sums, groups, &|_| true);
        let unlike: Vec<u64> = unlike.into_iter().flatten().collect();
        wrong_groups(file, tree, &unlike, &|_| true)
    }

    /// Verifies the groups that were present before the load and are not verified yet. Waits until
    /// the host has repaired those that differ.
    fn compare(&self, groups: &Range<u64>) -> Result<(), String> {
        let open = self.open_groups(groups);
        let mut left = self.wrong(&open);
        if !left.is_empty() {
            let Some(ask) = &self.ask else {
                return Err("the file is damaged there".to_owned());
            };
            let spans = left.iter().map(|run| self.groups.span(run));
            let parts = spans.map(|span| (span.start, span.end)).collect();
            let file = self.name.clone();
            ask(RangeRequest::Repair { file, parts });
        }
        let mut silence = SilenceTimer::new(&self.records);
        while !left.is_empty() {
            if silence.is_over() {
                let reason = "they are damaged, and right ones did not come for";
                return Err(format!("{reason} {} s", SILENCE.as_secs()));
            }
            std::thread::sleep(COMPARE_EVERY);
            let groups: Vec<u64> = left.iter().cloned().flatten().collect();
            let still = self.wrong(&groups);
            if still != left {
                silence = SilenceTimer::new(&self.records);
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

    fn wait_for(&self, groups: &Range<u64>, bytes: ByteRange) -> Result<(), String> {
        self.compare(groups)?;
        let look = || self.look(groups).map_err(|error| error.to_string());
        look()?;
        if self.is_here(groups) {
            return Ok(());
        }
        let Some(ask) = &self.ask else {
            return Err("the file is not complete".to_owned());
        };
        ask(RangeRequest::Fetch {
            file: self.name.clone(),
            parts: vec![bytes],
        });
        let mut silence = SilenceTimer::new(&self.records);
        while !self.is_here(groups) {
            if silence.is_over() {
                return Err(format!("nothing came for {} s", SILENCE.as_secs()));
            }
            std::thread::sleep(LOOK_EVERY);
            look()?;
        }
        Ok(())
    }
}

/// The quick sums of the file at `path` with this tree.
fn sums_of(path: &Path, tree: &Tree) -> Option<GroupSums> {
    let beside = GroupSums::read(&sums_beside(path), tree);
    beside.or_else(|| GroupSums::read(&path.with_extension(SUMS), tree))
}

/// The bytes and the hash tree of a file; `None` where there is no tree.
///
/// # Errors
/// The tree is damaged, or of a file of another length; the system's error.
fn tree_of(path: &Path, mapped: &MappedBytes) -> io::Result<Option<(ReadFile, Tree)>> {
    let mapped = mapped.clone();
    if let Some(known) = Checksums::read(path)? {
        let file = File::open(path)?;
        return Ok(Some((ReadFile { file, mapped }, known.tree)));
    }
    let leaves = match std::fs::read(path.with_extension(TREE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        leaves => leaves?,
    };
    let file = File::open(path)?;
    let other = || {
        let reason = format!("{} has a hash tree of another length", path.display());
        io::Error::new(io::ErrorKind::InvalidData, reason)
    };
    let tree = Tree::from_bytes(file.metadata()?.len(), &leaves).ok_or_else(other)?;
    Ok(Some((ReadFile { file, mapped }, tree)))
}

impl Arrivals for PartialSource {
    fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
        let bytes = (range.start as u64, range.end as u64);
        let groups = self.groups.around(&(bytes.0..bytes.1));
        if self.is_here(&groups) {
            return Ok(());
        }
        self.wait_for(&groups, bytes).map_err(|reason| Absent {
            file: self.path.display().to_string(),
            range,
            reason,
        })
    }
}

impl std::fmt::Debug for PartialSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} as it arrives", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use paceline_base::{BlockType, Rank};
    use paceline_model::{Config, Split};
    use paceline_weights::gguf::testing::GgufWriter;
    use sha2::Digest as _;

    use super::*;

    /// The state of the only file of a model.
    fn source_of(
        path: &Path,
        ask: impl Fn(RangeRequest) + Send + Sync + 'static,
    ) -> Option<PartialSource> {
        let ask: Arc<RangeRequester> = Arc::new(ask);
        let mapped = MappedBytes::open(path).unwrap();
        PartialSource::new(
            (path, &mapped),
            String::new(),
            (Some(&ask), &Arc::default()),
        )
        .unwrap()
    }

    fn fetch(file: &str, part: ByteRange) -> RangeRequest {
        let (file, parts) = (file.to_owned(), vec![part]);
        RangeRequest::Fetch { file, parts }
    }

    fn repair(file: &str, part: ByteRange) -> RangeRequest {
        let (file, parts) = (file.to_owned(), vec![part]);
        RangeRequest::Repair { file, parts }
    }

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
            let RangeRequest::Fetch { parts, .. } = wish else {
                panic!("{wish:?}");
            };
            lock(&own).extend(parts);
            std::fs::write(&told, [1, 1, 0]).unwrap(); // the machine has fetched it
        };
        let arriving = source_of(&path, ask).unwrap();
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
        let arriving = source_of(&path, ask).unwrap();
        arriving.wait(0..each).unwrap();
        arriving.wait(2 * each..3 * each).unwrap();
        assert!(lock(&wishes).is_empty(), "others' parts are not compared");
        arriving.wait(0..3 * each).unwrap();
        let each = each as u64;
        assert_eq!(*lock(&wishes), [repair("", (each, 2 * each))]);
    }

    /// Readers keep the mapping of the file that another one replaces.
    #[test]
    fn the_bytes_that_are_read_are_those_that_are_compared() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes) = copy(dir.path());
        let each = HashGroups::of(0).each as usize;
        flip(&path, &bytes, each + 7);
        let mapped = MappedBytes::open(&path).unwrap();
        if mapped.resident(0..1).is_none() {
            eprintln!("SKIPPED compared mappings: Linux 5.14 has the call");
            return;
        }
        let right = dir.path().join("right");
        std::fs::write(&right, bytes).unwrap();
        std::fs::rename(right, &path).unwrap();
        let source = PartialSource::new((&path, &mapped), String::new(), (None, &Arc::default()));
        let source = source.unwrap().unwrap();
        source.wait(0..each).unwrap();
        source.wait(each..2 * each).unwrap_err();
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
                RangeRequest::Repair { .. } => std::fs::write(&place, &right).unwrap(),
                RangeRequest::Fetch { .. } => std::fs::write(&have, [1; 4]).unwrap(),
            }
            lock(&heard).push(wish);
        };
        let arriving = source_of(&path, ask).unwrap();
        arriving.wait(0..3 * each).unwrap();
        let each = each as u64;
        let expected = [repair("", (each, 2 * each)), fetch("", (0, 3 * each))];
        assert_eq!(*lock(&wishes), expected);
    }

    #[test]
    fn a_file_of_the_users_own_is_read_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = copy(dir.path());
        std::fs::remove_file(path.with_extension(TREE)).unwrap();
        assert!(source_of(&path, |_| ()).is_none());
    }

    /// Bits flip in a store's file whose length and times stay.
    #[test]
    fn damage_of_a_stores_file_is_an_error_and_no_weight() {
        let dir = tempfile::tempdir().unwrap();
        let (path, each) = (dir.path().join("m.gguf"), HashGroups::of(0).each as usize);
        let file = GgufWriter::new().tensor("a", BlockType::F32, &[each], vec![1; 4 * each]);
        let file = file.tensor("b", BlockType::F32, &[each], vec![2; 4 * each]);
        file.write(&path);
        let bytes = std::fs::read(&path).unwrap();
        let sha256 = paceline_base::hex(&sha2::Sha256::digest(&bytes));
        paceline_store::verified::record_checksums(&path, &sha256, &mut |_| true).unwrap();
        let tensor = |source: &ModelSource, name: &str| {
            let ModelSource::Gguf(file) = source else {
                panic!("a file");
            };
            file.tensor(name).unwrap().bytes.arrived().map(drop)
        };
        let source = open_checked(&path).unwrap();
        assert!(tensor(&source, "a").is_ok() && tensor(&source, "b").is_ok());

        flip(&path, &bytes, bytes.len() - 1);
        let source = open_checked(&path).unwrap();
        tensor(&source, "a").unwrap();
        let error = tensor(&source, "b").unwrap_err();
        assert!(error.to_string().contains("m.gguf"), "{error}");
        assert!(error.reason.contains("damaged"), "{error}");

        let header = open_checked(&path).map(drop);
        assert!(header.is_ok(), "its header is right");
        flip(&path, &bytes, 40);
        assert!(open_checked(&path).is_err());
    }

    /// Requests that were sent, and the bytes and copy of each file by its name.
    #[derive(Clone, Default)]
    struct Machine {
        heard: Arc<Mutex<Vec<RangeRequest>>>,
        files: BTreeMap<String, (Vec<u8>, PathBuf)>,
    }

    impl Machine {
        /// The folder of a model of these files, with the first `present` bytes of each.
        fn fetching(dir: &Path, files: Vec<(String, Vec<u8>, usize)>) -> (Self, PathBuf) {
            let (mut machine, model) = (Self::default(), dir.join("of.model"));
            std::fs::create_dir(&model).unwrap();
            for (i, (name, bytes, present)) in files.into_iter().enumerate() {
                let copy = dir.join(format!("{i}.shard"));
                let groups = HashGroups::of(bytes.len() as u64);
                let start = groups.around(&(0..present as u64));
                let mut have = vec![0; groups.count() as usize];
                have[..start.end as usize].fill(1);
                let mut holed = bytes.clone();
                holed[groups.span(&start).end as usize..].fill(0);
                std::fs::write(&copy, holed).unwrap();
                std::fs::write(copy.with_extension(HAVE), have).unwrap();
                let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
                std::fs::write(copy.with_extension(TREE), tree.to_bytes()).unwrap();
                let target = Path::new("..").join(copy.file_name().unwrap());
                std::os::unix::fs::symlink(target, model.join(&name)).unwrap();
                machine.files.insert(name, (bytes, copy));
            }
            (machine, model)
        }

        /// Fetches a whole file once ranges of it are requested.
        fn serve(&self) -> Arc<RangeRequester> {
            let machine = self.clone();
            Arc::new(move |wish| {
                let RangeRequest::Fetch { file, .. } = &wish else {
                    panic!("{wish:?}");
                };
                let (bytes, copy) = &machine.files[file];
                std::fs::write(copy, bytes).unwrap();
                let count = HashGroups::of(bytes.len() as u64).count() as usize;
                std::fs::write(copy.with_extension(HAVE), vec![1; count]).unwrap();
                lock(&machine.heard).push(wish);
            })
        }

        fn heard(&self) -> Vec<RangeRequest> {
            std::mem::take(&mut lock(&self.heard))
        }
    }

    fn fetch_of((file, range): (&Path, Range<usize>)) -> RangeRequest {
        let name = file.file_name().unwrap().to_str().unwrap();
        fetch(name, (range.start as u64, range.end as u64))
    }

    /// Tensors of a folder lie in three files, which are still empty but for their headers.
    #[test]
    fn requests_name_the_file_in_the_models_folder() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR"));
        let golden = golden.join("../../tests-data/golden/hf/llama-rope3-sharded");
        let complete = ModelSource::open(&golden).unwrap();
        let (mut weights, mut others) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(&golden).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let bytes = std::fs::read(&path).unwrap();
            match path.extension() == Some("safetensors".as_ref()) {
                true => weights.push((name, bytes, 5000)),
                false => others.push((name, bytes)),
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let (machine, model) = Machine::fetching(dir.path(), weights);
        for (name, bytes) in others {
            std::fs::write(model.join(name), bytes).unwrap();
        }
        let source = open(&model, Some(machine.serve())).unwrap();
        assert!(is_partial(&model) && !is_partial(&golden));
        let (ModelSource::Hf(folder), ModelSource::Hf(whole)) = (&source, &complete) else {
            panic!("folders");
        };

        let config = Config::read(&source).unwrap();
        let split = Split::plan(&config, "pipeline".parse().unwrap(), 2, &[]).unwrap();
        let shard = split.shard(&config, Rank(1));
        let expected = source.locations(config.family, &shard);
        let runs = ahead(&model, &source, (config.family, &shard));
        for (file, range) in expected {
            let (start, end) = (range.start as u64, range.end as u64);
            let holds = |part: &ByteRange| part.0 <= start && end <= part.1;
            let is_in = |(name, parts): &(String, Vec<ByteRange>)| {
                model.join(name) == file && parts.iter().any(holds)
            };
            assert!(runs.iter().any(is_in), "{}: {range:?}", file.display());
        }
        assert_eq!(ahead(&golden, &complete, (config.family, &shard)), []);
        assert_eq!(machine.heard(), [], "nothing was read");

        for name in ["lm_head.weight", "model.layers.2.mlp.gate_proj.weight"] {
            let bytes = folder.tensor(name).unwrap().bytes;
            assert_eq!(*bytes, *whole.tensor(name).unwrap().bytes, "{name}");
            assert_eq!(machine.heard(), [fetch_of(folder.location(name).unwrap())]);
        }
    }

    #[test]
    fn parts_of_a_split_file_are_requested_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let each = HashGroups::of(0).each as usize;
        let part = |no: u32| {
            let file = GgufWriter::new()
                .meta("split.no", no)
                .meta("split.count", 2u32)
                .meta("split.tensors.count", 2u32);
            let bytes = vec![1 + no as u8; 3 * each];
            file.tensor(&no.to_string(), BlockType::F32, &[3 * each / 4], bytes)
        };
        let name = |no| format!("m-0000{no}-of-00002.gguf");
        let parts = [0, 1].map(|no| (name(no + 1), part(no).to_bytes(), 1));
        let (machine, model) = Machine::fetching(dir.path(), parts.into());
        let first = model.join(name(1));
        assert!(is_partial(&first) && is_shard(&first) && !is_shard(&model));
        let source = open(&first, Some(machine.serve())).unwrap();
        let ModelSource::Gguf(file) = &source else {
            panic!("a file");
        };
        assert!(
            file.tensor("1")
                .unwrap()
                .bytes
                .iter()
                .all(|byte| *byte == 2)
        );
        let own = file.location("1").unwrap();
        assert_eq!(own.0, model.join(name(2)));
        assert_eq!(machine.heard(), [fetch_of(own)]);
        for no in [1, 2] {
            let link = model.join(name(no));
            std::fs::remove_file(&link).unwrap();
            part(no - 1).write(&link);
        }
        assert!(!is_partial(&first), "files of its own are complete");
    }
}
