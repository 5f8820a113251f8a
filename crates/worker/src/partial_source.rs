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
#[derive(derive_more::Debug)]
#[debug("{} as it arrives", self.path.display())]
struct PartialSource {
    path: PathBuf,
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

#[cfg(test)]
mod tests;
