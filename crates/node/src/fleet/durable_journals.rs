//! Journals of this node's streamed answers on its disk, for `up --durable`. With them a client
//! gets the rest of its answer after a power cut of all nodes.
//!
//! ```text
//! stream --put--> index (offsets, bounds) --> queue --> thread: writes, then one sync for all
//! start: DIR/ID --> JournalStore, from which this node and others read
//! ```
//! A file has the text of a journal. After a power cut its end may be missing, and the answer is
//! computed again from there. So only the first segment of a journal waits for the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::Inner;
use super::journals::{
    COPIES_BYTES_MAX, COPIES_MAX, JournalCallback, JournalStore, JournalStored, QUEUE_MAX,
    ReplicatedSegment, STAY,
};
use paceline_store::storage::{FileSystem, OpenMode, Storage, replace};

/// How long a segment waits for others before it is written and synced. With a sync of up to 30 ms,
/// as slow SSDs take, files are at most 50 ms late (issue 54).
const GROUP: Duration = Duration::from_millis(15);

/// How often expired files are removed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a journal is kept after a start. Machines that lost their power return one by one.
const RETURN_STAY: Duration = Duration::from_secs(600);

/// Pause before a journal is written again after its disk refused.
const PAUSE: Duration = Duration::from_secs(2);

/// Most bytes of an id, which is the name of a file.
const ID_BYTES_MAX: usize = 64;

/// Receives lines for people.
type Tell = Arc<dyn Fn(&str) + Send + Sync>;

/// The journals on disk.
pub(super) struct DurableJournals {
    index: Arc<Mutex<JournalIndex>>,
    queue: SyncSender<Task>,
    began: Instant,
}

/// Work of the writing thread, in order.
enum Task {
    Write(ReplicatedSegment),
    /// Reports whether the journal with this id is on disk.
    Sync(String, JournalCallback),
}

/// The journals on disk and in the queue.
#[derive(Default)]
struct JournalIndex(BTreeMap<String, IndexEntry>);

struct IndexEntry {
    bytes: u64,
    touched: Instant,
    /// Why it is not on disk, and since when.
    failed: Option<(String, Instant)>,
}

impl JournalIndex {
    /// Records a segment that is to be written.
    fn put(&mut self, piece: &ReplicatedSegment, now: Instant) -> JournalStored {
        let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if !piece.id.bytes().all(is_named) || !(1..=ID_BYTES_MAX).contains(&piece.id.len()) {
            return JournalStored::No("its id is no name of a file".to_owned());
        }
        let is_new = !self.0.contains_key(&piece.id);
        if is_new && (piece.at > 0 || piece.bytes.is_empty()) {
            return JournalStored::Gap;
        }
        let others = self.0.iter().filter(|(id, _)| **id != piece.id);
        let others: u64 = others.map(|(_, it)| it.bytes).sum();
        let end = piece.at + piece.bytes.len() as u64;
        if (is_new && self.0.len() >= COPIES_MAX) || others + end > COPIES_BYTES_MAX as u64 {
            return JournalStored::No("the journals on disk leave no room".to_owned());
        }
        let entry = self.0.entry(piece.id.clone()).or_insert(IndexEntry {
            bytes: 0,
            touched: now,
            failed: None,
        });
        match &entry.failed {
            Some((reason, since)) if now.saturating_duration_since(*since) < PAUSE => {
                return JournalStored::No(reason.clone());
            }
            Some(_) if piece.at > 0 => return JournalStored::Gap,
            _ if piece.at > entry.bytes => return JournalStored::Gap,
            _ => {}
        }
        entry.touched = entry.touched.max(now);
        if !piece.bytes.is_empty() {
            (entry.bytes, entry.failed) = (end, None);
        }
        JournalStored::Yes
    }

    /// Removes the ids that expired, and returns them.
    fn expire(&mut self, now: Instant) -> Vec<String> {
        let is_old = |it: &IndexEntry| now.saturating_duration_since(it.touched) > STAY;
        let old = self.0.iter().filter(|(_, it)| is_old(it));
        let old: Vec<String> = old.map(|(id, _)| id.clone()).collect();
        self.0.retain(|_, it| !is_old(it));
        old
    }

    fn fail(&mut self, id: &str, reason: &str, now: Instant) {
        if let Some(entry) = self.0.get_mut(id) {
            entry.failed = Some((reason.to_owned(), now));
        }
    }

    fn is_written(&self, id: &str) -> JournalStored {
        match self.0.get(id) {
            None => JournalStored::Gap,
            Some(entry) => match &entry.failed {
                Some((reason, _)) => JournalStored::No(reason.clone()),
                None => JournalStored::Yes,
            },
        }
    }
}

impl DurableJournals {
    /// Reads the journals in `folder` to `shelf`, and starts the writing thread, which ends with
    /// this value.
    ///
    /// # Errors
    /// The folder cannot be made or read, or the thread does not start.
    pub(super) fn open(folder: PathBuf, shelf: &JournalStore, tell: Tell) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        fs::set_permissions(&folder, Permissions::from_mode(0o700))?;
        let began = Instant::now();
        let until = began + (RETURN_STAY - STAY);
        let mut index = JournalIndex::default();
        for (id, bytes) in read_all(&folder)? {
            let piece = ReplicatedSegment { id, at: 0, bytes };
            if index.put(&piece, until) == JournalStored::Yes {
                shelf.put(piece, until);
            }
        }
        let index = Arc::new(Mutex::new(index));
        let (queue, tasks) = sync_channel(QUEUE_MAX);
        let mut writer = Writer {
            storage: Box::new(FileSystem),
            folder,
            index: Arc::clone(&index),
            tell,
            is_told: false,
        };
        let thread = std::thread::Builder::new().name("durable".to_owned());
        thread.spawn(move || writer.run(&tasks))?;
        Ok(Self {
            index,
            queue,
            began,
        })
    }

    /// Writes a segment soon. [`synced`](Self::synced) reports whether it is on disk.
    pub(super) fn put(&self, piece: &ReplicatedSegment) -> JournalStored {
        let stored = lock(&self.index).put(piece, Instant::now());
        if stored != JournalStored::Yes || piece.bytes.is_empty() {
            return stored;
        }
        match self.queue.try_send(Task::Write(piece.clone())) {
            Ok(()) => JournalStored::Yes,
            Err(_) => {
                let reason = "the disk is slower than the answers";
                lock(&self.index).fail(&piece.id, reason, Instant::now());
                JournalStored::No(reason.to_owned())
            }
        }
    }

    /// Calls `done` once the segments of `id` so far are on disk, or are refused. Does not block.
    pub(super) fn synced(&self, id: String, done: JournalCallback) {
        use std::sync::mpsc::TrySendError::{Disconnected, Full};
        if let Err(Full(task) | Disconnected(task)) = self.queue.try_send(Task::Sync(id, done))
            && let Task::Sync(_, done) = task
        {
            done(JournalStored::No(
                "the disk is slower than the answers".to_owned(),
            ));
        }
    }

    /// Whether other nodes may still return from the power cut that this node returned from.
    pub(super) fn is_newly_started(&self) -> bool {
        self.began.elapsed() <= STAY
    }
}

impl Inner {
    /// Stores a segment of this node's streams: on another node, and on disk with `--durable`,
    /// where one of them suffices. Only the first segment waits for the disk: an answer can be
    /// computed again from any beginning.
    pub(super) fn keep(self: &Arc<Self>, piece: ReplicatedSegment, done: JournalCallback) {
        let Some(disk) = &self.durable else {
            return self.copier.put(piece, done);
        };
        let (stored, id) = (disk.put(&piece), piece.id.clone());
        if piece.at > 0 || stored != JournalStored::Yes {
            let done = move |remote| done(either(stored, remote));
            return self.copier.put(piece, Box::new(done));
        }
        let inner = Arc::clone(self);
        let then = move |remote| match &inner.durable {
            Some(disk) => disk.synced(id, Box::new(|stored| done(either(stored, remote)))),
            None => done(remote),
        };
        self.copier.put(piece, Box::new(then));
    }

    /// Whether this node started so recently that other nodes, which may have a journal on disk,
    /// are not back.
    pub(super) fn is_newly_back(&self) -> bool {
        let durable = self.durable.as_ref();
        durable.is_some_and(DurableJournals::is_newly_started)
    }
}

/// The result of two copies.
fn either(disk: JournalStored, remote: JournalStored) -> JournalStored {
    match (disk, remote) {
        (JournalStored::Gap, _) | (_, JournalStored::Gap) => JournalStored::Gap,
        (JournalStored::Yes, _) => JournalStored::Yes,
        (JournalStored::No(_), remote) => remote,
    }
}

/// Writes journals and syncs them in groups.
struct Writer {
    storage: Box<dyn Storage>,
    folder: PathBuf,
    index: Arc<Mutex<JournalIndex>>,
    tell: Tell,
    /// Whether the last failure was told.
    is_told: bool,
}

impl Writer {
    fn run(&mut self, tasks: &Receiver<Task>) {
        loop {
            match tasks.recv_timeout(LOOK_EVERY) {
                Ok(first) => self.write(group(first, tasks)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            for id in lock(&self.index).expire(Instant::now()) {
                // A file that stays is removed after the next start.
                let _ = fs::remove_file(self.folder.join(id));
            }
        }
    }

    fn write(&mut self, tasks: Vec<Task>) {
        let (mut changed, mut told) = (BTreeSet::new(), Vec::new());
        for task in tasks {
            match task {
                Task::Sync(id, done) => told.push((id, done)),
                Task::Write(piece) => {
                    let written = self.write_one(&piece);
                    self.check(&piece.id, written);
                    changed.insert(piece.id);
                }
            }
        }
        for id in changed {
            let path = self.folder.join(&id);
            let file = self.storage.open(&path, OpenMode::Write);
            let synced = file.and_then(|file| file.sync());
            self.check(&id, synced);
        }
        for (id, done) in told {
            let stored = lock(&self.index).is_written(&id);
            done(stored);
        }
    }

    /// Writes a segment; a journal that begins anew replaces its file at once.
    fn write_one(&self, piece: &ReplicatedSegment) -> io::Result<()> {
        let path = self.folder.join(&piece.id);
        if piece.at == 0 {
            return replace(&*self.storage, &path, &piece.bytes);
        }
        let file = self.storage.open(&path, OpenMode::Write)?;
        if file.bytes()? != piece.at {
            file.set_bytes(piece.at)?;
        }
        file.write_at(&piece.bytes, piece.at)
    }

    fn check(&mut self, id: &str, done: io::Result<()>) {
        let Err(error) = done else {
            return;
        };
        let reason = error.to_string();
        lock(&self.index).fail(id, &reason, Instant::now());
        if !std::mem::replace(&mut self.is_told, true) {
            let folder = self.folder.display();
            (self.tell)(&format!(
                "warning: {folder}: open answers are not on disk: {reason}"
            ));
        }
    }
}

/// `first` and the tasks that arrive within [`GROUP`]. A report waits for no others.
fn group(first: Task, tasks: &Receiver<Task>) -> Vec<Task> {
    let until = Instant::now() + GROUP;
    let mut all = vec![first];
    while all.len() < QUEUE_MAX && !matches!(all.last(), Some(Task::Sync(..))) {
        match tasks.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(task) => all.push(task),
            Err(_) => break,
        }
    }
    all
}

/// The journals in a folder: their whole lines. Incomplete files are removed.
fn read_all(folder: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut all = Vec::new();
    for file in fs::read_dir(folder)? {
        let file = file?;
        let whole = (file.metadata()?.len() <= COPIES_BYTES_MAX as u64)
            .then(|| fs::read(file.path()))
            .transpose()?
            .map(whole_lines);
        match (file.file_name().into_string(), whole) {
            (Ok(id), Some(bytes)) if !bytes.is_empty() && !id.contains('.') => {
                all.push((id, bytes));
            }
            _ => fs::remove_file(file.path())?,
        }
    }
    Ok(all)
}

/// The lines before a torn end: text of JSON has no byte 0, which a file has where blocks are lost.
fn whole_lines(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0);
    bytes.truncate(end.unwrap_or(bytes.len()));
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    bytes.truncate(end.map_or(0, |last| last + 1));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::journals::tests::piece;

    fn open(folder: &Path) -> (DurableJournals, JournalStore) {
        let shelf = JournalStore::default();
        let tell: Tell = Arc::new(|line| panic!("{line}"));
        let journals = DurableJournals::open(folder.to_owned(), &shelf, tell).unwrap();
        (journals, shelf)
    }

    fn synced(journals: &DurableJournals, id: &str) -> JournalStored {
        let (tell, told) = sync_channel(1);
        journals.synced(id.to_owned(), Box::new(move |it| tell.send(it).unwrap()));
        told.recv().unwrap()
    }

    #[test]
    fn journals_are_read_after_a_power_cut() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("journals");
        let (journals, _) = open(&folder);
        for (at, text) in [(0, "head\n"), (5, "one\n"), (5, "1\n"), (7, "two\n")] {
            assert_eq!(journals.put(&piece("a", at, text)), JournalStored::Yes);
        }
        assert_eq!(journals.put(&piece("b", 0, "other\n")), JournalStored::Yes);
        assert_eq!(synced(&journals, "a"), JournalStored::Yes);
        assert_eq!(synced(&journals, "c"), JournalStored::Gap);
        std::mem::forget(journals); // as after SIGKILL
        // The disk's possible effects on bytes that were not synced.
        let torn = fs::read(folder.join("b")).unwrap();
        fs::write(folder.join("b"), [&torn[..], b"torn\0\0\0{}\n"].concat()).unwrap();
        fs::write(folder.join("d"), "no whole line").unwrap();
        fs::write(folder.join("e.new"), "head\n").unwrap();
        let (journals, shelf) = open(&folder);
        let found = |id| shelf.find(id, Instant::now());
        assert_eq!(found("a"), Some(b"head\n1\ntwo\n".to_vec()));
        assert_eq!(found("b"), Some(b"other\n".to_vec()));
        assert_eq!((found("d"), found("e")), (None, None));
        assert!(!folder.join("d").exists() && journals.is_newly_started());
        // It continues where it was, and its files are the user's alone.
        assert_eq!(journals.put(&piece("b", 6, "more\n")), JournalStored::Yes);
        assert_eq!(synced(&journals, "b"), JournalStored::Yes);
        assert_eq!(fs::read(folder.join("b")).unwrap(), b"other\nmore\n");
        let mode = fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn one_copy_suffices_and_each_lack_is_told() {
        use JournalStored::{Gap, No, Yes};
        let no = |reason: &str| No(reason.to_owned());
        assert_eq!(either(Yes, no("alone")), Yes);
        assert_eq!(either(no("full"), Yes), Yes);
        assert_eq!(either(no("full"), no("alone")), no("alone"));
        assert_eq!((either(Gap, Yes), either(Yes, Gap)), (Gap, Gap));
    }

    #[test]
    fn the_index_has_bounds_gaps_and_an_end() {
        let (mut index, now) = (JournalIndex::default(), Instant::now());
        assert_eq!(index.put(&piece("a", 4, "x"), now), JournalStored::Gap);
        assert_eq!(index.put(&piece("a", 0, "one"), now), JournalStored::Yes);
        assert_eq!(index.put(&piece("a", 4, "x"), now), JournalStored::Gap);
        for id in ["", "../a", "a/b", "a.new", &"a".repeat(65)] {
            let stored = index.put(&piece(id, 0, "x"), now);
            assert!(matches!(stored, JournalStored::No(_)), "{id}: {stored:?}");
        }
        // A full disk is asked again after a pause, from the beginning.
        index.fail("a", "no space", now);
        let full = JournalStored::No("no space".to_owned());
        assert_eq!(index.put(&piece("a", 3, "x"), now), full);
        let later = now + PAUSE;
        assert_eq!(index.put(&piece("a", 3, "x"), later), JournalStored::Gap);
        assert_eq!(index.put(&piece("a", 0, "onex"), later), JournalStored::Yes);
        assert_eq!(index.expire(later + STAY), Vec::<String>::new());
        assert_eq!(index.expire(later + STAY + GROUP), ["a"]);
        for number in 0..COPIES_MAX {
            index.put(&piece(&number.to_string(), 0, "x"), later);
        }
        let stored = index.put(&piece("y", 0, "x"), later);
        assert!(matches!(stored, JournalStored::No(_)), "{stored:?}");
    }
}
