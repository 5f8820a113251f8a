//! The index of the store: one JSON record per model, in its folder.
//!
//! A model is complete if its record exists, which is written last and atomically. Records are
//! untrusted input: sizes, names and paths are checked. A record that does not match its folder
//! makes the model *damaged*; its paths never leave the store.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use paceline_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::gguf_name::best_fits;
use crate::hash::{expect_sha256, hash_file, is_sha256};
use crate::lock::Lock;
use crate::name::{EntryName, HubId, check_file_path};
use crate::progress::{Cancel, PullProgress};
use crate::usual_names::usual_name;
use crate::{Catalogue, Error, Home, disk};

pub(crate) const RECORD_FILE: &str = "paceline.json";
/// Suffix of a resumable download.
pub(crate) const PARTIAL_SUFFIX: &str = ".partial";
/// Maximum record. A record of 1,000 files is about 300 kB.
const RECORD_BYTES_MAX: u64 = 1 << 20;
const RECORD_VERSION: u32 = 1;
/// Maximum depth inside a model's folder: file paths of at most 200 bytes cannot nest deeper.
const DEPTH_MAX: u32 = 101;

/// Storage form of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A GGUF file, or the first of a split one.
    Gguf,
    /// A folder with config.json, tokenizer and safetensors.
    Safetensors,
}

/// A model on this machine, ready for use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedModel {
    /// The GGUF file (the first of a split one), or the folder.
    pub path: PathBuf,
    pub kind: Kind,
    /// Its name in the store; `None` for the user's own files.
    pub name: Option<EntryName>,
}

impl ResolvedModel {
    /// The hub repository with its safetensors, if known.
    pub fn weights(&self) -> Option<&str> {
        let name = self.name.as_ref()?.as_str();
        match self.kind {
            Kind::Safetensors => Some(name),
            Kind::Gguf => Some(Catalogue::BUILTIN.find(name)?.weights),
        }
    }
}

/// A file of a stored model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Path inside the model's folder, with `/`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
    /// File identity when its hash was last compared; `None` in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<FileIdentity>,
}

impl FileRecord {
    /// Whether it is a file of weights, by its name.
    pub fn has_weights(&self) -> bool {
        let ends = |ending: &str| self.path.ends_with(ending);
        ends(".gguf") || ends(".safetensors")
    }
}

/// Marks of a file that change when it is written or replaced, besides its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: i64,
    pub inode: u64,
}

impl FileIdentity {
    /// `None` if the file is inaccessible.
    fn of(path: &Path) -> Option<Self> {
        let meta = fs::symlink_metadata(path).ok()?;
        let seconds = meta.mtime().saturating_mul(1_000_000_000);
        Some(Self {
            modified_ns: seconds.saturating_add(meta.mtime_nsec()),
            inode: meta.ino(),
        })
    }
}

/// The record of a complete model on disk. Times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelRecord {
    pub(crate) version: u32,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) source: String,
    pub(crate) files: Vec<FileRecord>,
    pub(crate) pulled_at: u64,
    pub(crate) last_used: Option<u64>,
}

/// Whether a stored model can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// All files are present.
    Complete {
        /// GGUF or folder.
        kind: Kind,
        source: String,
        /// Its files; `StoreEntry::path` is the first one for GGUF models.
        files: Vec<FileRecord>,
        pulled_at: SystemTime,
        last_used: Option<SystemTime>,
    },
    /// An interrupted pull; pulling again resumes it.
    Partial,
    /// The record or the files have changed.
    Damaged {
        /// The fault in it.
        reason: String,
    },
}

/// A model in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEntry {
    pub name: EntryName,
    /// The GGUF file or the folder.
    pub path: PathBuf,
    /// Disk usage, with partial files.
    pub bytes: Bytes,
    /// Whether it is usable.
    pub state: State,
}

impl StoreEntry {
    /// The model for use.
    ///
    /// # Errors
    /// [`Error::Damaged`], also for partial ones.
    pub fn found(&self) -> Result<ResolvedModel, Error> {
        let damaged = |reason: &str| Error::Damaged {
            name: self.name.to_string(),
            reason: reason.into(),
        };
        match &self.state {
            State::Complete { kind, .. } => Ok(ResolvedModel {
                path: self.path.clone(),
                kind: *kind,
                name: Some(self.name.clone()),
            }),
            State::Partial => Err(damaged("the download is not complete")),
            State::Damaged { reason } => Err(damaged(reason)),
        }
    }

    /// Bytes of the model's files alone.
    pub fn file_bytes(&self) -> Bytes {
        match &self.state {
            State::Complete { files, .. } => Bytes(files.iter().map(|file| file.bytes).sum()),
            _ => self.bytes,
        }
    }

    /// Number of the model's files; `None` unless all are there.
    pub fn file_count(&self) -> Option<usize> {
        match &self.state {
            State::Complete { files, .. } => Some(files.len()),
            State::Partial | State::Damaged { .. } => None,
        }
    }

    /// Its repository on the hub.
    fn repo(&self) -> Option<&str> {
        self.name.hub_parts().map(|(repo, _)| repo)
    }

    /// Its (first) GGUF file in the repository.
    pub(crate) fn file(&self) -> Option<&str> {
        self.name.hub_parts()?.1
    }

    /// Whether all files are there.
    pub const fn is_complete(&self) -> bool {
        matches!(self.state, State::Complete { .. })
    }
}

/// All models of the store, by name. Skips folders that no model name maps to.
///
/// # Errors
/// The models folder exists but cannot be read.
pub fn list(home: &Home) -> Result<Vec<StoreEntry>, Error> {
    let dir = home.models_dir();
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", &dir, error)),
    };
    let mut found: Vec<StoreEntry> = entries
        .flatten()
        .filter_map(|item| EntryName::from_dir_name(item.file_name().to_str()?))
        .filter_map(|name| entry(home, &name))
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The entry `name`; `None` if its folder is missing, empty, or not a folder.
pub(crate) fn entry(home: &Home, name: &EntryName) -> Option<StoreEntry> {
    let dir = home.entry_dir(name);
    if !fs::symlink_metadata(&dir).is_ok_and(|meta| meta.is_dir()) {
        return None;
    }
    let bytes = Bytes(disk::tree_bytes(&dir, DEPTH_MAX));
    let (path, state) = match read_record(home, name) {
        Ok(Some(record)) => (model_path(&dir, &record), record.into_state()),
        Ok(None) if bytes.0 == 0 => return None,
        Ok(None) => (dir, State::Partial),
        Err(reason) => (dir, State::Damaged { reason }),
    };
    Some(StoreEntry {
        name: name.clone(),
        path,
        bytes,
        state,
    })
}

fn model_path(dir: &Path, record: &ModelRecord) -> PathBuf {
    match record.kind {
        Kind::Gguf => dir.join(&record.files[0].path),
        Kind::Safetensors => dir.to_path_buf(),
    }
}

impl ModelRecord {
    fn into_state(self) -> State {
        State::Complete {
            kind: self.kind,
            source: self.source,
            files: self.files,
            pulled_at: from_unix(self.pulled_at),
            last_used: self.last_used.map(from_unix),
        }
    }

    /// Checks all invariants that later code relies on.
    fn check(&self, name: &EntryName) -> Result<(), String> {
        if self.version != RECORD_VERSION {
            return Err(format!(
                "layout version {}, expected {RECORD_VERSION}",
                self.version
            ));
        }
        if self.name != name.as_str() {
            return Err(format!("it names {:?}", self.name));
        }
        if self.files.is_empty() {
            return Err("it lists no files".into());
        }
        self.files.iter().try_for_each(check_file_record)
    }
}

fn check_file_record(file: &FileRecord) -> Result<(), String> {
    check_file_path(&file.path).map_err(|rule| format!("file {:?}: {rule}", file.path))?;
    match is_sha256(&file.sha256) {
        true => Ok(()),
        false => Err(format!("file {}: no sha256", file.path)),
    }
}

fn check_file(file: &FileRecord, dir: &Path) -> Result<(), String> {
    match fs::symlink_metadata(dir.join(&file.path)) {
        Ok(meta) if !meta.is_file() => Err(format!("{} is not a file", file.path)),
        Ok(meta) if meta.len() == file.bytes => Ok(()),
        Ok(meta) => Err(format!(
            "{} has {} bytes, expected {}",
            file.path,
            meta.len(),
            file.bytes
        )),
        Err(error) => Err(format!("{}: {error}", file.path)),
    }
}

/// Reads and checks a record and the lengths of its files; `None` if missing. The error describes
/// the damage.
pub(crate) fn read_record(home: &Home, name: &EntryName) -> Result<Option<ModelRecord>, String> {
    let (record, dir) = (parse_record(home, name)?, home.entry_dir(name));
    let mut files = record.iter().flat_map(|record| &record.files);
    files.try_for_each(|file| check_file(file, &dir))?;
    Ok(record)
}

/// Reads and checks a record, without its files.
fn parse_record(home: &Home, name: &EntryName) -> Result<Option<ModelRecord>, String> {
    let dir = home.entry_dir(name);
    let file = match fs::File::open(dir.join(RECORD_FILE)) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let mut text = Vec::new();
    file.take(RECORD_BYTES_MAX)
        .read_to_end(&mut text)
        .map_err(|error| error.to_string())?;
    let record: ModelRecord = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    record.check(name)?;
    Ok(Some(record))
}

/// Marks a model as complete. Called with its lock held, after all files are durable.
pub(crate) fn write_new_record(
    home: &Home,
    name: &EntryName,
    kind: Kind,
    source: String,
    files: Vec<FileRecord>,
    now: SystemTime,
) -> Result<(), Error> {
    let files = stamped(home, name, files);
    let record = ModelRecord {
        version: RECORD_VERSION,
        name: name.to_string(),
        kind,
        source,
        files,
        pulled_at: to_unix(now),
        last_used: None,
    };
    write_record(home, name, &record)
}

/// Updates the files' identities.
fn stamped(home: &Home, name: &EntryName, mut files: Vec<FileRecord>) -> Vec<FileRecord> {
    let dir = home.entry_dir(name);
    for file in &mut files {
        file.stamp = FileIdentity::of(&dir.join(&file.path));
    }
    files
}

fn write_record(home: &Home, name: &EntryName, record: &ModelRecord) -> Result<(), Error> {
    let mut text = serde_json::to_vec_pretty(record).expect("plain fields always serialise");
    text.push(b'\n');
    disk::write_atomic(&home.entry_dir(name).join(RECORD_FILE), &text)
}

/// Checks a model before its use at `now`, and records the use. Sizes were compared when it was
/// found. Files without weights are hashed again, and so is a file whose time or inode changed.
/// Cost: a stat of each file, and one pass over these.
///
/// # Errors
/// [`Error::HashMismatch`] names a changed file. With a missing, damaged or read-only record the
/// model is still usable.
pub fn check_used(
    home: &Home,
    name: &EntryName,
    now: SystemTime,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
) -> Result<(), Error> {
    let mut record = sound_record(home, name)?;
    let dir = home.entry_dir(name);
    for file in &mut record.files {
        let path = dir.join(&file.path);
        let stamp = FileIdentity::of(&path);
        // Records of earlier versions have none, and are accepted once.
        if file.stamp.is_some() && file.stamp != stamp {
            check_hash(&path, file, cancel, progress)?;
        } else if !file.has_weights() {
            // Weights are compared when a load reads them.
            let (_, hashed) = hash_file(&path, cancel, |_| {})?;
            expect_sha256(&path.display().to_string(), &file.sha256, &hashed.hex())?;
        }
        file.stamp = stamp;
    }
    record.last_used = Some(to_unix(now));
    write_record(home, name, &record)
}

/// The files of a stored model by its record, with their paths. Their bytes are not checked.
///
/// # Errors
/// [`Error::Damaged`], [`Error::NotInStore`].
pub fn recorded_files(home: &Home, name: &EntryName) -> Result<Vec<(PathBuf, FileRecord)>, Error> {
    let folder = home.entry_dir(name);
    let files = sound((home, name), parse_record(home, name))?.files;
    let files = files.into_iter();
    Ok(files.map(|file| (folder.join(&file.path), file)).collect())
}

fn sound_record(home: &Home, name: &EntryName) -> Result<ModelRecord, Error> {
    sound((home, name), read_record(home, name))
}

fn sound(
    (home, name): (&Home, &EntryName),
    record: Result<Option<ModelRecord>, String>,
) -> Result<ModelRecord, Error> {
    let damaged = |reason| Error::Damaged {
        name: name.to_string(),
        reason,
    };
    let record = record.map_err(damaged)?;
    record.ok_or_else(|| not_in_store(home, name.as_str()))
}

fn check_hash(
    path: &Path,
    file: &FileRecord,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
) -> Result<(), Error> {
    progress.start(&format!("checking {}", file.path), Some(file.bytes), 0);
    let hashed = hash_file(path, cancel, |n| progress.advance(n));
    progress.finish();
    expect_sha256(&path.display().to_string(), &file.sha256, &hashed?.1.hex())
}

/// Verifies the hashes of all files of a stored model. Cost: one pass over the bytes.
///
/// # Errors
/// [`Error::HashMismatch`] names the first file that differs; [`Error::Damaged`],
/// [`Error::NotInStore`].
pub fn verify(
    home: &Home,
    name: &EntryName,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
) -> Result<(), Error> {
    let mut record = sound_record(home, name)?;
    for file in &record.files {
        let path = home.entry_dir(name).join(&file.path);
        check_hash(&path, file, cancel, progress)?;
    }
    record.files = stamped(home, name, record.files);
    // A read-only store is verified all the same.
    let _ = write_record(home, name, &record);
    Ok(())
}

/// The result of [`remove`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedModel {
    pub name: EntryName,
    pub bytes: Bytes,
    /// Number of its files; `None` if it was not complete.
    pub files: Option<usize>,
}

/// Removes a model, complete or not. `spec` is a name from [`list`] or any other name that `pull`
/// accepts. It may also be a hub id with exactly one stored model, or a path inside the store. The
/// user's own files are never removed.
///
/// # Errors
/// [`Error::NotInStore`], [`Error::AmbiguousEntry`], [`Error::OutsideStore`] and [`Error::Busy`]
/// leave everything as it was.
pub fn remove(home: &Home, spec: &str) -> Result<RemovedModel, Error> {
    let name = find_for_removal(home, spec)?;
    let dir = home.entry_dir(&name);
    let _lock = Lock::try_acquire(&home.lock_path(&name))?.ok_or_else(|| Error::Busy {
        name: name.to_string(),
    })?;
    let Some(entry) = entry(home, &name) else {
        return Err(not_in_store(home, spec));
    };
    // Removed first: an interrupted removal leaves a partial model.
    disk::remove_file(&dir.join(RECORD_FILE))?;
    fs::remove_dir_all(&dir).map_err(|error| Error::io("remove", &dir, error))?;
    Ok(RemovedModel {
        name,
        bytes: entry.bytes,
        files: entry.file_count(),
    })
}

/// The model that [`remove`] would remove for `spec`, complete or not.
///
/// # Errors
/// [`Error::NotInStore`], [`Error::AmbiguousEntry`], [`Error::OutsideStore`].
pub fn find_for_removal(home: &Home, spec: &str) -> Result<EntryName, Error> {
    let entries = list(home)?;
    let spec = stored_name(spec);
    if let Some(entry) = entries.iter().find(|entry| entry.name.as_str() == spec) {
        return Ok(entry.name.clone());
    }
    let mut fits = of_spec(&entries, spec);
    match (fits.pop(), fits.is_empty()) {
        (Some(only), true) => Ok(only.name.clone()),
        (Some(last), false) => {
            fits.push(last);
            let names = fits.iter().map(|entry| entry.name.to_string()).collect();
            Err(Error::AmbiguousEntry {
                spec: spec.into(),
                names,
            })
        }
        (None, _) => {
            name_of_path(home, Path::new(spec)).unwrap_or_else(|| Err(not_in_store(home, spec)))
        }
    }
}

/// The entries of `owner/name` or `owner/name:selector`.
fn of_spec<'a>(entries: &'a [StoreEntry], spec: &str) -> Vec<&'a StoreEntry> {
    let (repo, selector) = match spec.split_once(':') {
        Some((repo, selector)) => (repo, Some(selector)),
        None => (spec, None),
    };
    let is_of_repo = |entry: &&StoreEntry| entry.repo() == Some(repo);
    let of_repo = entries.iter().filter(is_of_repo);
    match selector {
        Some(selector) => of_selector(of_repo, selector),
        None => of_repo.collect(),
    }
}

/// The GGUF models among the entries of one repository that `selector` names best.
pub(crate) fn of_selector<'a>(
    entries: impl Iterator<Item = &'a StoreEntry>,
    selector: &str,
) -> Vec<&'a StoreEntry> {
    let files = entries.filter(|entry| entry.file().is_some());
    best_fits(
        files.collect(),
        |entry| entry.file().unwrap_or_default(),
        selector,
    )
}

/// The store name of a download of `spec`, which may be another name of a model in the catalogue or
/// the usual names.
fn stored_name(spec: &str) -> &str {
    match Catalogue::BUILTIN.find(spec) {
        Some(model) => model.alias,
        None => usual_name(spec).map_or(spec, |usual| &usual.hub),
    }
}

/// The model of a path inside the store; `None` if nothing exists there.
fn name_of_path(home: &Home, path: &Path) -> Option<Result<EntryName, Error>> {
    let outside = || Error::OutsideStore { path: path.into() };
    let path = fs::canonicalize(path).ok()?;
    let inside = fs::canonicalize(home.models_dir()).ok().and_then(|models| {
        let first = path.strip_prefix(models).ok()?.components().next()?;
        EntryName::from_dir_name(first.as_os_str().to_str()?)
    });
    Some(inside.ok_or_else(outside))
}

/// The error for an unknown name, with the stored ones.
pub(crate) fn not_in_store(home: &Home, spec: &str) -> Error {
    let known = list(home).unwrap_or_default();
    let known = known.iter().map(|entry| entry.name.to_string()).collect();
    Error::NotInStore {
        spec: spec.to_owned(),
        known,
    }
}

/// Complete models of a repository on this machine.
pub(crate) fn complete_of_repo(home: &Home, id: &HubId) -> Result<Vec<StoreEntry>, Error> {
    let repo = id.to_string();
    let of_repo = |entry: &StoreEntry| entry.is_complete() && entry.repo() == Some(&repo);
    Ok(list(home)?.into_iter().filter(of_repo).collect())
}

fn to_unix(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Times out of range become 1970.
fn from_unix(seconds: u64) -> SystemTime {
    UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds))
        .unwrap_or(UNIX_EPOCH)
}
