//! Distribution of model files: a node that lacks a file fetches it from other nodes or the hub.
//!
//! ```text
//! owner -> fetch: {"model":{...},"bytes":N,"asks":false,"parts":true,"rooted":{...}}
//!                     node has it, or fetches what it needs from all nodes that have parts of it
//! node  -> pieces: see `file_ranges`
//! node  <- {"done":N} while it fetches, then {"ready":true} or {"refused":"why"}
//! ```
//! With `asks` a node that lacks the file refuses instead. With `parts` it fetches the groups
//! needed to open the file, and its workers request the rest. Every group is verified against the
//! root of the file's hash tree (`roots`). A file without a signed root is copied whole from the
//! owner, service `file`, and verified by its SHA-256. Bytes that no node has come from the hub
//! (`hub`).
//!
//! A disk may damage a copy. Each start of a worker compares the file's first bytes with the hash
//! tree, and the worker compares the bytes it computes with. `pull --to` compares every byte.
//! Damaged groups are fetched again.
//!
//! A model of several files is fetched by its manifest (`manifest`), file by file (`models`).
//!
//! Files on disk: `SHA256.gguf`, complete copies of any format, their `SHA256.sums` (`sums`), and
//! the files of [`VerifiedPartial`]. `SHA256.manifest` and the folder `SHA256.model`: a model of
//! several files.

mod fetch;
mod files;
mod messages;
mod models;
mod repair;
mod stored_file;

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use paceline_base::{hex, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, ServiceChannel};

use paceline_weights::gguf::Gguf;

use super::FileLookup;
use super::file_ranges;
use super::file_ranges::FileInventory;
use super::hub;
use super::hub::ModelHub;
use super::inventory::{self, WholeFile, tree_of};
use super::manifest;
use super::roots::{self, FileRoot, KnownRoot};
use crate::fleet::hosts::NodeConnection;
use crate::workers::connection::{ConnectionError, receive_message, send_message};
use crate::workers::host::ModelName;
use files::{hash, send_file};
use messages::{CopyReport, Fetch};
pub(super) use messages::{ensure, ensure_part, ensure_right, ensure_while, holders};
use models::Models;
pub(super) use models::{ModelIdentity, manifests_in};
use paceline_store::storage::{self, FileSystem};
use paceline_store::verified::checksums::{Checksums, hash_and_tree};

use paceline_store::verified::partial_file::{self, VerifiedPartial};
use paceline_store::verified::tree::HashGroups;
use paceline_worker::identity;
pub(super) use paceline_worker::partial_source::FOLDER as MODEL;
pub(super) use repair::CheckRange;
pub use repair::RepairReport;
use repair::RootOrigin;
pub use stored_file::{MendedFile, StoredFile};

/// Longest wait for the next bytes or message of another node.
const SILENCE: Duration = Duration::from_secs(30);

/// Interval of progress reports of a copy.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Poll interval for the end of a fetch.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Extension of a whole file that is being copied from one node.
const WHOLE_PART: &str = "part";

/// Extension of the file with the user's name for a copy.
pub(super) const NAME: &str = "name";

/// Extension of a complete copy of any format.
pub(super) const COPY: &str = "gguf";

/// Extension of a copy of a manifest.
pub(super) const MANIFEST: &str = "manifest";

/// Extensions of a partial download from the hub and of its metadata.
const PARTS_OF_HUB: [&str; 2] = ["gguf.partial", "gguf.partial.json"];

/// Checks whether this node may store a number of further model bytes; the error is the reason.
pub(super) type QuotaCheck = dyn Fn(u64) -> Result<(), String> + Send + Sync;

/// Receives a log line for people; must not block.
type CopyLog = dyn Fn(&str) + Send + Sync;

/// Reads `bytes` as messages about a copy, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    messages::parse(bytes);
    hub::parse(bytes);
    file_ranges::parse(bytes);
    roots::parse(bytes);
    manifest::parse(bytes);
}

/// A partial copy and the root it is verified against.
pub(super) struct PartialCopy {
    pub(super) partial: VerifiedPartial,
    rooted: KnownRoot,
    /// The node on whose request it is fetched.
    from: Option<NodeId>,
}

/// The groups needed to open a file and to identify it.
fn first_groups(rooted: &KnownRoot, groups: HashGroups) -> Vec<Range<u64>> {
    let lengths = [rooted.bytes, rooted.header, rooted.weights];
    let [bytes, header, weights] = lengths.map(|length| length as usize);
    let parts = identity::parts(bytes, header, weights);
    let parts = parts.map(|part| groups.around(&(part.start as u64..part.end as u64)));
    parts.collect()
}

/// Path, length and times of a file. The last time is the inode's change time, which every write
/// updates and no program can set.
type FileFingerprint = (PathBuf, u64, SystemTime, (i64, i64));

/// The model files of this machine: the user's store and copies from other nodes.
pub(super) struct ModelCopies {
    /// Finds a model in the user's store by its name.
    find: Box<FileLookup>,
    /// Where copies are kept.
    pub(super) folder: PathBuf,
    may_have: Box<QuotaCheck>,
    tell: Arc<CopyLog>,
    /// Source of bytes that no node has.
    hub: Option<Arc<dyn ModelHub>>,
    /// Locked briefly: never while a file is read.
    state: Mutex<CopyState>,
}

/// This process's knowledge of copies.
#[derive(Default)]
struct CopyState {
    /// Cached SHA-256 of unchanged files: hashing takes a second a gigabyte.
    known: HashMap<FileFingerprint, String>,
    /// Roots sent by other nodes, by SHA-256: the shared map may arrive later.
    roots: HashMap<String, RootOrigin>,
    /// By what is read or written: locked as long as that takes.
    turns: HashMap<String, Arc<Mutex<()>>>,
    /// SHA-256 of models fetched from the hub, so that each is logged once.
    of_hub: BTreeSet<String>,
    /// Partial copies, by SHA-256.
    parts: HashMap<String, Arc<PartialCopy>>,
    /// Nodes that sent wrong bytes to this process.
    liars: BTreeSet<NodeId>,
    /// Models of several files.
    models: Models,
}

/// The turn of copies of whole files: two copies of one model would share one file.
const WHOLE_FILES: &str = "whole files";

impl ModelCopies {
    pub(super) fn new(
        (find, folder): (Box<FileLookup>, PathBuf),
        may_have: Box<QuotaCheck>,
        tell: Arc<CopyLog>,
    ) -> Self {
        sweep(&folder);
        Self {
            find,
            folder,
            may_have,
            tell,
            hub: None,
            state: Mutex::default(),
        }
    }

    /// Adds the hub as source of bytes that no node has.
    pub(super) fn with_hub(self, hub: Arc<dyn ModelHub>) -> Self {
        Self {
            hub: Some(hub),
            ..self
        }
    }

    /// Whether this node has all or part of the file with this SHA-256. Reads no file.
    pub(super) fn has(&self, sha256: &str) -> bool {
        let lies = |ending: &str| {
            let copy = place_in(&self.folder, sha256, ending);
            copy.is_ok_and(|copy| copy.is_file())
        };
        let is_it = |((path, ..), sum): (&FileFingerprint, &String)| sum == sha256 && path.exists();
        let endings = [COPY, partial_file::FILE, MANIFEST];
        endings.into_iter().any(lies) || lock(&self.state).known.iter().any(is_it)
    }

    /// The lock for opening a partial copy, by its SHA-256, or for other work on files.
    fn turn(&self, of: &str) -> Arc<Mutex<()>> {
        let turns = &mut lock(&self.state).turns;
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(of.to_owned()).or_default())
    }

    /// The file for a user's model name: from the store, else a complete copy with that name.
    pub(super) fn of_user(&self, name: &str) -> Result<PathBuf, String> {
        self.own(name)
            .or_else(|reason| self.named(name).ok_or(reason))
    }

    /// The file of the store for a user's model name.
    fn own(&self, name: &str) -> Result<PathBuf, String> {
        (self.find)(name).map_err(|error| error.to_string())
    }

    /// The complete copy of a model with the user's name `name`.
    fn named(&self, name: &str) -> Option<PathBuf> {
        let entries = fs::read_dir(&self.folder).ok()?.flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        let is_it = |path: &&PathBuf| {
            path.extension().is_some_and(|ending| ending == NAME)
                && fs::read_to_string(path).is_ok_and(|told| told == name)
        };
        let sha256 = |path: &PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
        let mut named = paths.iter().filter(is_it).filter_map(sha256);
        named.find_map(|sha256| {
            let copy = place_in(&self.folder, &sha256, COPY).ok()?;
            if copy.is_file() {
                return Some(copy);
            }
            self.copy_of_model(&ModelName {
                name: name.to_owned(),
                sha256,
                manifest: true,
            })
            .ok()
        })
    }

    /// SHA-256 of a file in hexadecimal digits. Reads all of it the first time, and stores its hash
    /// tree too. A file of the store with checksums is not read: its bytes are compared on use.
    pub(super) fn hash(&self, path: &Path) -> io::Result<String> {
        let key = fingerprint(path)?;
        let known = || lock(&self.state).known.get(&key).cloned();
        let turn = self.turn(&format!("SHA-256 of {}", path.display()));
        let _turn = lock(&turn); // one thread reads the file
        if let Some(known) = known() {
            return Ok(known);
        }
        let (sum, tree) = match Checksums::read(path) {
            Ok(Some(known)) => (known.sha256, known.tree),
            // Damaged checksums end the load: `pull` writes new ones.
            _ => {
                let (sum, tree) = hash_and_tree(path, &mut |_| true)?;
                (hex(&sum), tree)
            }
        };
        if let Ok(kept) = place_in(&self.folder, &sum, partial_file::TREE) {
            // Where the disk is full, the tree is computed again when a node needs it.
            let _: io::Result<()> = inventory::keep(&tree, &kept);
        }
        lock(&self.state).known.insert(key, sum.clone());
        Ok(sum)
    }

    /// SHA-256 of the model file at `path`. A copy's file name contains it, since its bytes are
    /// verified on use. Other files are hashed.
    fn sum(&self, path: &Path) -> io::Result<String> {
        match self.copied(path) {
            Some(sha256) => Ok(sha256.to_owned()),
            None => self.hash(path),
        }
    }

    /// The SHA-256 in the name of a complete copy.
    fn copied<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let stem = path.file_stem()?.to_str()?;
        (place_in(&self.folder, stem, COPY).ok()? == path).then_some(stem)
    }

    /// Length of the model file at `path` in bytes. For a copy this is the signed length, since the
    /// file may be truncated.
    fn length(&self, agent: &Agent, path: &Path) -> io::Result<u64> {
        let rooted = self
            .copied(path)
            .map(|sha256| roots::of(&agent.map(), sha256));
        match rooted {
            Some(Ok(rooted)) => Ok(rooted.bytes),
            _ => fs::metadata(path).map(|facts| facts.len()),
        }
    }

    /// Turns a file in the folder of copies into a copy with the user's name `name`. Returns its
    /// SHA-256 in hexadecimal digits.
    ///
    /// # Errors
    /// The disk budget's reason, or the system's error.
    pub(super) fn keep(&self, file: &Path, name: &str) -> Result<String, String> {
        let failed = |error: io::Error| format!("{}: {error}", file.display());
        (self.may_have)(fs::metadata(file).map_err(failed)?.len())?;
        let sum = hash(file).map_err(failed)?;
        let place = place_in(&self.folder, &sum, COPY)?;
        let named = write_whole(&place.with_extension(NAME), name.as_bytes());
        let kept = named.and_then(|()| File::open(file)?.sync_all());
        let kept = kept.and_then(|()| storage::rename(&FileSystem, file, &place));
        kept.map(|()| sum).map_err(failed)
    }

    /// The complete model on this machine: a copy with this content, or the store's model of this
    /// name if its content matches.
    pub(super) fn find(&self, model: &ModelName) -> Result<PathBuf, String> {
        match model.manifest {
            true => self.find_model(model),
            false => self.find_file(model),
        }
    }

    /// A complete file of this machine: a model, a file of a model, or a manifest.
    fn find_file(&self, model: &ModelName) -> Result<PathBuf, String> {
        let copy = self.whole(model)?;
        if copy.is_file() {
            return Ok(copy);
        }
        if model.manifest {
            return self.write_manifest(model);
        }
        let path = self.own(&model.name)?;
        let found = self.own_file(&path, &model.sha256)?;
        found.map_err(|own| another(&model.name, &own))
    }

    /// As [`find`](Self::find), with the bytes of a copy verified and repaired.
    pub(super) fn find_right(
        &self,
        (agent, model): (&Agent, &ModelName),
        extent: CheckRange<'_>,
    ) -> Result<PathBuf, String> {
        let path = self.find(model)?;
        match model.manifest {
            true => self.check_model((agent, model), extent)?,
            false => drop(self.check((agent, model), None, extent, &|_| true)?),
        }
        Ok(path)
    }

    /// As [`find`](Self::find), or a partial copy that has the bytes needed to open it. Verifies
    /// those bytes.
    pub(super) fn find_part(&self, agent: &Agent, model: &ModelName) -> Result<PathBuf, String> {
        let reason = match self.find(model) {
            Ok(_) => return self.find_right((agent, model), CheckRange::Start),
            Err(reason) => reason,
        };
        if model.manifest {
            return self.find_partial_model(agent, model, reason);
        }
        if !self.place(model, partial_file::FILE)?.is_file() {
            return Err(reason);
        }
        let root = self.root(agent, model).ok_or(reason)?;
        let first = first_groups(&root.0, HashGroups::of(root.0.bytes));
        let held = self.held(agent, model, Some(root))?;
        self.fetch_groups((agent, model), &held, &first, &|_| true)?;
        Ok(held.partial.path.clone())
    }

    /// The path of a copy, by its content.
    fn place(&self, model: &ModelName, ending: &str) -> Result<PathBuf, String> {
        place_in(&self.folder, &model.sha256, ending)
    }

    /// The path of a complete copy of a file.
    fn whole(&self, model: &ModelName) -> Result<PathBuf, String> {
        self.place(model, if model.manifest { MANIFEST } else { COPY })
    }

    /// Signs the root of the model file at `path` and publishes it to the cluster. Reads all of the
    /// file the first time. Of a model of several files it signs the root of the manifest.
    pub(super) fn sign(&self, agent: &Agent, model: &ModelName, path: &Path) -> Result<(), String> {
        let failed = |error: &io::Error| format!("{}: {error}", path.display());
        if model.manifest {
            return self.sign_manifest(agent, model);
        }
        if let Ok(known) = roots::of(&agent.map(), &model.sha256) {
            return known.publish(agent, &model.sha256);
        }
        if self.copied(path).is_some() {
            self.check_sum(path, model)?;
        }
        let file = Gguf::open(path).map_err(|error| error.to_string())?;
        let contents = file.contents().map(|(_, header)| header);
        let headers: Vec<usize> = contents.collect();
        let [header] = headers[..] else {
            return Ok(());
        };
        let kept = self.place(model, partial_file::TREE)?;
        let tree = tree_of(path, &kept).map_err(|error| failed(&error))?;
        let signed = FileRoot::sign(agent, &model.sha256, &tree, header as u64)?;
        signed.publish(agent, &model.sha256)
    }

    /// Serves an owner's request that this node fetches a model.
    pub(super) fn answer_fetch(&self, agent: &Agent, channel: &ServiceChannel) {
        let line = NodeConnection(channel.clone());
        let fetched = match receive_message::<Fetch>(&line, SILENCE) {
            Ok(Some(fetch)) => {
                let mut told = |bytes: u64| send_message(&line, &CopyReport::Done(bytes));
                let fetched = self.fetch(agent, Some(channel.peer()), &fetch, &mut told);
                // Builds that do not request this would not parse it.
                fetched.map(|mended| mended.filter(|_| fetch.checks))
            }
            Ok(None) => Err("nothing was asked for".to_owned()),
            Err(broken) => Err(broken.to_string()),
        };
        // A lost owner does not receive the answer.
        let _: Result<(), _> = match fetched {
            Ok(Some(mended)) => send_message(&line, &CopyReport::Mended(mended)),
            Ok(None) => send_message(&line, &CopyReport::Ready),
            Err(reason) => send_message(&line, &CopyReport::Refused(reason)),
        };
    }

    /// Removes a copy of a model; returns the bytes freed.
    pub(super) fn forget(&self, sha256: &str) -> io::Result<u64> {
        Ok(self.forget_model(sha256)? + self.forget_file(sha256)?)
    }

    /// Removes all files about a copy of a file; returns the bytes freed.
    fn forget_file(&self, sha256: &str) -> io::Result<u64> {
        let held = lock(&self.state).parts.remove(sha256);
        let copy = self.folder.join(format!("{sha256}.{COPY}"));
        let freed = match (&held, fs::metadata(&copy)) {
            (_, Ok(facts)) => facts.len(),
            (Some(held), _) => held.partial.bytes_here(),
            (None, Err(_)) => 0,
        };
        let shard = self.folder.join(format!("{sha256}.{}", partial_file::FILE));
        let name = copy.with_extension(NAME);
        let of_hub = PARTS_OF_HUB.map(|ending| copy.with_extension(ending));
        let all = [copy, name].into_iter().chain(of_hub);
        let all = all.chain(partial_file::files_of(&shard));
        for file in all {
            match fs::remove_file(&file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(freed)
    }

    /// The partial copy of a model while it is fetched.
    pub(super) fn part(&self, sha256: &str) -> Option<Arc<PartialCopy>> {
        lock(&self.state).parts.get(sha256).cloned()
    }

    /// Serves ranges of a model to a fetching node.
    pub(super) fn answer_pieces(&self, agent: &Agent, channel: &ServiceChannel) {
        file_ranges::answer(channel, |model| self.inventory(agent, model));
    }

    /// The groups of a file that this node has.
    fn inventory(
        &self,
        agent: &Agent,
        model: &ModelName,
    ) -> Result<Box<dyn FileInventory>, String> {
        let reason = match self.find_file(model) {
            Ok(path) => {
                let whole = WholeFile::open(&path, &self.place(model, partial_file::TREE)?);
                let whole = whole.map_err(|error| format!("{}: {error}", path.display()))?;
                return Ok(Box::new(whole));
            }
            Err(reason) => reason,
        };
        match self.place(model, partial_file::FILE)?.is_file() {
            true => Ok(Box::new(self.held(agent, model, None)?)),
            false => Err(reason),
        }
    }

    /// Serves a whole model file to a fetching node.
    pub(super) fn answer_file(&self, channel: &ServiceChannel) {
        let line = NodeConnection(channel.clone());
        let sent = match receive_message::<ModelName>(&line, SILENCE) {
            Ok(Some(model)) => self.find_file(&model).and_then(|path| {
                send_file(&line, &path).map_err(|error| format!("{}: {error}", path.display()))
            }),
            _ => return,
        };
        if sent.is_err() {
            channel.close(); // the other end counts bytes
        }
    }
}

/// The signed root of a requested file, from the request or the map; `None` if it is of a file of
/// another length.
fn signed_root(agent: &Agent, fetch: &Fetch) -> Result<Option<KnownRoot>, String> {
    let (map, sha256) = (agent.map(), &fetch.model.sha256);
    let given = fetch.rooted.clone();
    let given = given.filter(|rooted| rooted.check(&map, sha256).is_ok());
    let rooted = given.map_or_else(|| roots::of(&map, sha256), Ok)?;
    Ok((rooted.bytes == fetch.bytes).then(|| rooted.into()))
}

/// Message about a model of this machine that has another SHA-256.
fn another(name: &str, sha256: &str) -> String {
    format!("the model {name:?} of this machine is another file (SHA-256 {sha256})")
}

fn fingerprint(path: &Path) -> io::Result<FileFingerprint> {
    let facts = fs::metadata(path)?;
    let written = (facts.ctime(), facts.ctime_nsec());
    Ok((path.to_owned(), facts.len(), facts.modified()?, written))
}

/// The path of a copy in a folder, by its content.
fn place_in(folder: &Path, sha256: &str, ending: &str) -> Result<PathBuf, String> {
    let is_hash = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit());
    match is_hash {
        true => Ok(folder.join(format!("{sha256}.{ending}"))),
        false => Err(format!("{sha256:?} is no SHA-256")),
    }
}

/// Receives the number of copied bytes; an error ends the copy.
type CopyProgress<'a> = dyn FnMut(u64) -> Result<(), ConnectionError> + 'a;

/// Writes a small file atomically, in an existing folder, and syncs it.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    storage::replace(&FileSystem, path, bytes)
}

/// Removes leftovers of earlier processes: parts of files that are complete by now, and files that
/// no process continues.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let ends_in = |ending: &str| path.extension().is_some_and(|own| own == ending);
        if ends_in(WHOLE_PART) || ends_in(storage::NEW) {
            let _: io::Result<()> = fs::remove_file(&path);
        }
        let is_part = ends_in(partial_file::FILE);
        let is_whole = |ending| path.with_extension(ending).is_file();
        if is_part && [COPY, MANIFEST].into_iter().any(is_whole) {
            let [shard, have, ..] = partial_file::files_of(&path);
            // A leftover only takes space.
            let _ = (fs::remove_file(shard), fs::remove_file(have));
        }
    }
}

#[cfg(test)]
mod model_tests;

#[cfg(test)]
pub(super) mod tests;
