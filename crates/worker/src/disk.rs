//! The prefix cache on disk: KV pages of one rank, so that known prompts are not computed again
//! after a restart.
//!
//! ```text
//! prefixes/{space}/{name}-{pool}     a page: header, bytes, SHA-256 of both
//! ```
//!
//! A *space* names everything but the tokens that determines a page's bytes: model, numerics
//! revision and kernel class, and the rank's shard. A writer thread writes each file under a
//! temporary name and renames it. So a process may be killed at any time, and several processes may
//! share the folder. An incomplete or foreign file is ignored with a line in the log, and its page
//! is computed again.
//!
//! These files reveal prompts, so the folder is private to the user (0700).

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use paceline_base::{Bytes, hex};
use paceline_model::{LoadedModel, PageName, PageStore, PersistedPage};
use sha2::{Digest, Sha256};
use tracing::{debug, warn};

/// Revision of the files.
const VERSION: u32 = 2;

/// The beginning of a file.
const MAGIC: &[u8; 8] = b"plpage\r\n";

/// Bytes of a header: magic, version, space, name, pool and length.
pub const HEAD: usize = 8 + 4 + 16 + 32 + 4 + 8;

/// Bytes of the sum at the end of a file.
pub const SUM: usize = 32;

/// Offset of the space in a header; name and pool follow it.
const SPACE_AT: usize = 8 + 4;
const NAME_AT: usize = SPACE_AT + 16;
const POOL_AT: usize = NAME_AT + 32;

/// Most bytes of queued pages. A prompt of 2,000 tokens of a 0.5B model is 25 MB and takes a second
/// to compute. Pages beyond the queue are dropped.
const QUEUE_BYTES: u64 = 64 << 20;

const QUEUE_PAGES: usize = 4096;

/// Each preceding page makes a page count as used this much earlier. Later pages are useless
/// without the earlier ones, so they are removed first. Longer than a page takes to compute at 7
/// tokens a second.
const AGE: Duration = Duration::from_secs(10);

/// A temporary file older than this is abandoned and removed.
const PART_AGE: Duration = Duration::from_secs(3600);

/// Folder and size limit of the prefix cache on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCache {
    /// The folder; created when needed.
    pub folder: PathBuf,
    /// Most bytes of all files. Two concurrent processes keep to it together; each further one may
    /// exceed it by a sixteenth.
    pub limit: Bytes,
}

impl DiskCache {
    /// Creates the folder, private to the user. Call it before workers start: their sandbox can
    /// only allow an existing folder.
    pub fn make(&self) -> io::Result<()> {
        make_private(&self.folder)
    }
}

/// The page store of one rank.
#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    space: [u8; 16],
    /// Pages written or queued, as far as this process knows.
    here: HashSet<(PageName, u32)>,
    /// Bytes of the largest page seen.
    largest: u64,
    queue: SyncSender<PendingWrite>,
    queued: Arc<AtomicU64>,
}

/// A page to be written.
#[derive(Debug)]
struct PendingWrite {
    path: PathBuf,
    age: Duration,
    head: [u8; HEAD],
    bytes: Vec<u8>,
}

impl Disk {
    /// Opens the store of the rank with these `weights` of the model with this `identity`.
    ///
    /// # Errors
    /// If the folder or the writer thread cannot be created.
    pub fn open(cache: &DiskCache, identity: &str, weights: &dyn LoadedModel) -> io::Result<Self> {
        let (numbers, shard) = (weights.numbers(), weights.shard());
        Self::in_space(cache, &format!("{identity}/{numbers}/{shard:?}"))
    }

    fn in_space(cache: &DiskCache, of: &str) -> io::Result<Self> {
        let space = space(of);
        let folder = cache.folder.join(hex(&space));
        make_private(&cache.folder)?;
        make_private(&folder)?;
        let here = known(&folder)?;
        debug!(folder = %folder.display(), pages = here.len(), "prefix cache");
        let (queue, waiting) = sync_channel(QUEUE_PAGES);
        let queued = Arc::new(AtomicU64::new(0));
        let writer = PageWriter {
            root: cache.folder.clone(),
            limit: cache.limit.0,
            written: 0,
            queued: Arc::clone(&queued),
            has_failed: false,
        };
        let thread = std::thread::Builder::new().name("prefix cache".to_owned());
        thread.spawn(move || writer.run(&waiting))?;
        Ok(Self {
            folder,
            space,
            here,
            largest: cache.limit.0 / 16,
            queue,
            queued,
        })
    }

    fn path(&self, page: &PersistedPage) -> PathBuf {
        let name: Vec<u8> = bytes_of(&page.name).collect();
        self.folder.join(format!("{}-{}", hex(&name), page.pool))
    }

    fn head(&self, page: &PersistedPage, len: usize) -> [u8; HEAD] {
        head(&self.space, (&page.name, page.pool), len)
    }
}

/// The header of `len` bytes of a page, by its name and pool.
pub fn head(space: &[u8; 16], (name, pool): (&PageName, u32), len: usize) -> [u8; HEAD] {
    let mut head = Vec::with_capacity(HEAD);
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend(space);
    head.extend(bytes_of(name));
    head.extend(pool.to_le_bytes());
    head.extend((len as u64).to_le_bytes());
    head.try_into().expect("the parts of a header")
}

/// Name and pool in a header of `space`; `None` for another space. The caller compares the length
/// that follows them.
pub fn page_of(space: &[u8; 16], bytes: &[u8; HEAD]) -> Option<(PageName, u32)> {
    let mut name = PageName::default();
    for (word, bytes) in name.0.iter_mut().zip(bytes[NAME_AT..].as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    let pool = u32::from_le_bytes(*bytes[POOL_AT..].first_chunk()?);
    let len = u64::from_le_bytes(*bytes[POOL_AT + 4..].first_chunk()?);
    (head(space, (&name, pool), len as usize) == *bytes).then_some((name, pool))
}

/// The space as a hash of `of`, which names everything but the tokens that determines a page's
/// bytes.
pub fn space(of: &str) -> [u8; 16] {
    let hash = Sha256::digest(format!("{VERSION}/{}/{of}", crate::NUMERICS));
    *hash.first_chunk().expect("a hash has 32 bytes")
}

/// The name of a page of `tokens` that follows the page `before`.
pub fn name(before: &PageName, tokens: &[u32]) -> PageName {
    let mut hash = Sha256::new();
    hash.update(bytes_of(before).collect::<Vec<u8>>());
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    let hash = hash.finalize();
    let mut name = PageName::default();
    for (to, word) in name.0.iter_mut().zip(hash.as_chunks().0) {
        *to = u32::from_le_bytes(*word);
    }
    name
}

impl PageStore for Disk {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        name(before, tokens)
    }

    fn has(&self, page: &PersistedPage) -> bool {
        self.here.contains(&(page.name, page.pool))
    }

    fn put(&mut self, page: &PersistedPage, bytes: &[u8]) {
        let (len, queued) = (bytes.len() as u64, self.queued.load(Ordering::Relaxed));
        let has_room = queued == 0 || queued + len <= QUEUE_BYTES;
        if !has_room || len > self.largest {
            return;
        }
        let waiting = PendingWrite {
            path: self.path(page),
            age: AGE * page.index,
            head: self.head(page, bytes.len()),
            bytes: bytes.to_vec(),
        };
        self.queued.fetch_add(len, Ordering::Relaxed);
        if self.queue.try_send(waiting).is_ok() {
            self.here.insert((page.name, page.pool));
        } else {
            self.queued.fetch_sub(len, Ordering::Relaxed);
        }
    }

    fn get(&mut self, page: &PersistedPage, into: &mut [u8]) -> bool {
        let (path, head) = (self.path(page), self.head(page, into.len()));
        let Err(error) = read(&path, &head, into, AGE * page.index) else {
            return true;
        };
        if error.kind() == io::ErrorKind::NotFound {
            debug!(file = %path.display(), "a page of the prefix cache is gone");
        } else {
            warn!(file = %path.display(), %error, "a page of the prefix cache is ignored");
        }
        self.forget(page);
        false
    }

    fn forget(&mut self, page: &PersistedPage) {
        self.here.remove(&(page.name, page.pool));
    }
}

/// Reads a page and updates its time of use.
fn read(path: &Path, head: &[u8; HEAD], into: &mut [u8], age: Duration) -> io::Result<()> {
    let bad = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let mut file = File::open(path)?;
    if file.metadata()?.len() != (HEAD + into.len() + SUM) as u64 {
        return bad("it has another length");
    }
    let (mut start, mut sum) = ([0; HEAD], [0; SUM]);
    file.read_exact(&mut start)?;
    if start != *head {
        return bad("it is of another model, page or version");
    }
    file.read_exact(into)?;
    file.read_exact(&mut sum)?;
    if sum != summed(head, into) {
        return bad("its checksum is wrong");
    }
    // If this fails, the page is only removed sooner.
    let _ = file.set_modified(SystemTime::now() - age);
    Ok(())
}

/// The checksum of a page and its header.
pub fn summed(head: &[u8; HEAD], bytes: &[u8]) -> [u8; SUM] {
    let hash = Sha256::new().chain_update(head).chain_update(bytes);
    hash.finalize().into()
}

/// Writer thread: writes pages and enforces the size limit.
struct PageWriter {
    root: PathBuf,
    limit: u64,
    /// Bytes written since the last sweep.
    written: u64,
    queued: Arc<AtomicU64>,
    has_failed: bool,
}

impl PageWriter {
    /// Runs until the queue is closed.
    fn run(mut self, queue: &Receiver<PendingWrite>) {
        self.sweep();
        while let Ok(page) = queue.recv() {
            let written = self.write(&page);
            self.queued
                .fetch_sub(page.bytes.len() as u64, Ordering::Relaxed);
            if let Err(error) = written
                && !std::mem::replace(&mut self.has_failed, true)
            {
                warn!(file = %page.path.display(), %error, "the prefix cache cannot be written");
            }
        }
    }

    fn write(&mut self, page: &PendingWrite) -> io::Result<()> {
        let len = (HEAD + page.bytes.len() + SUM) as u64;
        if self.written + len > self.limit / 16 {
            self.sweep();
        }
        let part = page
            .path
            .with_extension(format!("{}.part", std::process::id()));
        let written = write_whole(&part, page).and_then(|()| fs::rename(&part, &page.path));
        if written.is_err() {
            let _ = fs::remove_file(&part); // the error is logged
        }
        self.written += len;
        written
    }

    /// Removes the least recently used files until seven eighths of the limit remain in use. The
    /// rest is for pages that processes write before their next sweep.
    fn sweep(&mut self) {
        self.written = 0;
        let mut files = files(&self.root);
        files.sort();
        let mut total: u64 = files.iter().map(|(_, len, _)| len).sum();
        for (used, len, path) in files {
            let part = path.extension().is_some_and(|end| end == "part");
            let is_left = part && used.elapsed().is_ok_and(|age| age > PART_AGE);
            let is_over = total > self.limit / 8 * 7;
            if (is_left || is_over) && fs::remove_file(&path).is_ok() {
                total -= len;
            }
        }
    }
}

fn write_whole(path: &Path, page: &PendingWrite) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(path)?;
    file.write_all(&page.head)?;
    file.write_all(&page.bytes)?;
    file.write_all(&summed(&page.head, &page.bytes))?;
    file.set_modified(SystemTime::now() - page.age)
}

/// Time of last use, bytes and path of each page, over all spaces. Ignores other files.
fn files(root: &Path) -> Vec<(SystemTime, u64, PathBuf)> {
    let spaces = fs::read_dir(root).into_iter().flatten().flatten();
    let files = spaces.filter_map(|space| fs::read_dir(space.path()).ok());
    let facts = |file: fs::DirEntry| {
        let facts = file.metadata().ok()?;
        let is_page = facts.is_file() && parse(file.file_name().to_str()?).is_some();
        let used = facts.modified().ok().filter(|_| is_page)?;
        Some((used, facts.len(), file.path()))
    };
    files.flatten().flatten().filter_map(facts).collect()
}

fn known(folder: &Path) -> io::Result<HashSet<(PageName, u32)>> {
    let (mut here, mut foreign) = (HashSet::new(), 0);
    for file in fs::read_dir(folder)? {
        match file?.file_name().to_str().and_then(parse) {
            Some((page, "")) => {
                here.insert(page);
            }
            Some(_) => {} // not renamed
            None => foreign += 1,
        }
    }
    if foreign > 0 {
        warn!(folder = %folder.display(), files = foreign, "no pages of the prefix cache: ignored");
    }
    Ok(here)
}

/// The page of a file name, and the rest of that name.
fn parse(name: &str) -> Option<((PageName, u32), &str)> {
    let (digits, rest) = name.split_at_checked(64)?;
    let (pool, rest) = match rest.split_once('.') {
        Some((pool, rest)) if rest.ends_with("part") => (pool, rest),
        Some(_) => return None,
        None => (rest, ""),
    };
    let pool = pool.strip_prefix('-')?.parse().ok()?;
    let mut name = PageName::default();
    for (i, word) in name.0.iter_mut().enumerate() {
        let digits = digits.get(8 * i..8 * (i + 1))?;
        *word = u32::from_str_radix(digits, 16).ok()?.swap_bytes();
    }
    Some(((name, pool), rest))
}

/// Creates a folder that only the user can open.
fn make_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

fn bytes_of(name: &PageName) -> impl Iterator<Item = u8> {
    name.0.into_iter().flat_map(u32::to_le_bytes)
}

#[cfg(test)]
mod tests;
