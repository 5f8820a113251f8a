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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use paceline_base::{hex, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, ServiceChannel};
use paceline_cluster::nodes::member::Life;
use paceline_fleet::{InstanceSpec, specs};
use paceline_weights::gguf::Gguf;

use super::file_ranges::{self, FileFetch, FileInventory, Short};
use super::hub::{self, HubOrigin, ModelHub};
use super::inventory::{self, WholeFile, tree_of};
use super::manifest;
use super::roots::{self, FileRoot, KnownRoot};
use super::{FILE, FileLookup};
use crate::fleet::hosts::NodeConnection;
use crate::workers::connection::{ConnectionError, receive_message, send_message};
use crate::workers::host::ModelName;
use files::{copy, hash, send_file};
use messages::{CopyReport, Fetch, fetch};
pub(super) use messages::{ensure, ensure_part, ensure_right, ensure_while, holders};
use models::Models;
pub(super) use models::{ModelIdentity, manifests_in};
use paceline_store::storage::{self, FileSystem};
use paceline_store::verified::checksums::{Checksums, hash_and_tree};
use paceline_store::verified::damage::{Count, merged};
use paceline_store::verified::partial_file::{self, VerifiedPartial};
use paceline_store::verified::sums::SUMS;
use paceline_store::verified::tree::{HashGroups, Tree, shown};
use paceline_worker::identity;
use paceline_worker::partial_source::ByteRange;
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
    /// Cached SHA-256 of unchanged files: hashing takes a second a gigabyte.
    known: Mutex<HashMap<FileFingerprint, String>>,
    /// Roots sent by other nodes, by SHA-256: the shared map may arrive later.
    roots: Mutex<HashMap<String, RootOrigin>>,
    /// Locked while a whole file is copied: two copies of one model would share one file.
    turn: Mutex<()>,
    /// By SHA-256: locked while a partial copy is opened, which reads all present bytes.
    turns: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    /// Source of bytes that no node has.
    hub: Option<Arc<dyn ModelHub>>,
    /// SHA-256 of models fetched from the hub, so that each is logged once.
    of_hub: Mutex<BTreeSet<String>>,
    /// Partial copies, by SHA-256.
    parts: Mutex<HashMap<String, Arc<PartialCopy>>>,
    /// Nodes that sent wrong bytes to this process.
    liars: Mutex<BTreeSet<NodeId>>,
    /// Models of several files.
    models: Mutex<Models>,
}

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
            known: Mutex::default(),
            roots: Mutex::default(),
            turn: Mutex::default(),
            turns: Mutex::default(),
            hub: None,
            of_hub: Mutex::default(),
            parts: Mutex::default(),
            liars: Mutex::default(),
            models: Mutex::default(),
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
        endings.into_iter().any(lies) || lock(&self.known).iter().any(is_it)
    }

    /// The lock for opening a partial copy.
    fn turn(&self, sha256: &str) -> Arc<Mutex<()>> {
        let mut turns = lock(&self.turns);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(turns.entry(sha256.to_owned()).or_default())
    }

    /// The file for a user's model name: from the store, else a complete copy with that name.
    pub(super) fn of_user(&self, name: &str) -> Result<PathBuf, String> {
        (self.find)(name).or_else(|reason| self.named(name).ok_or(reason))
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
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn hash(&self, path: &Path) -> io::Result<String> {
        let key = fingerprint(path)?;
        let known = || lock(&self.known).get(&key).cloned();
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
        lock(&self.known).insert(key, sum.clone());
        Ok(sum)
    }

    /// SHA-256 of the model file at `path`. A copy's file name contains it, since its bytes are
    /// verified on use. Other files are hashed.
    ///
    /// # Errors
    /// As [`hash`](Self::hash).
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
    ///
    /// # Errors
    /// The system's error.
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
        let path = (self.find)(&model.name)?;
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
    ///
    /// # Errors
    /// The system's error, or why the root cannot be published.
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

    /// Fetches all of a model to this node and waits for it. Uses all nodes that have parts, or the
    /// node `from` if the root is not signed. `progress` receives byte counts.
    pub(super) fn take(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        wanted: &InstanceSpec,
        progress: &dyn Fn(u64),
    ) -> Result<(), String> {
        let mut told = |bytes: u64| -> Result<(), ConnectionError> {
            progress(bytes);
            Ok(())
        };
        self.fetch(agent, from, &fetch(agent, wanted), &mut told)
            .map(drop)
    }

    /// Fetches the bytes needed to open a model file with a signed root.
    pub(super) fn take_part(&self, agent: &Agent, wanted: &InstanceSpec) -> Result<(), String> {
        let fetch = Fetch {
            parts: true,
            ..fetch(agent, wanted)
        };
        if wanted.manifest {
            let fetched = self.fetch_model(agent, None, &fetch, &mut |_| Ok(()));
            return fetched.map(drop);
        }
        let rooted = KnownRoot::from(roots::of(&agent.map(), &wanted.sha256)?);
        let held = self.held(agent, &fetch.model, Some((rooted.clone(), None)))?;
        self.fetch_parts(agent, &fetch, (&held, &rooted), &mut |_| Ok(()))
    }

    fn fetch(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<Option<RepairReport>, String> {
        if fetch.asks {
            let lacks = |_| "it has no copy of the model".to_owned();
            return self.find(&fetch.model).map(|_| None).map_err(lacks);
        }
        match fetch.model.manifest {
            true => self.fetch_model(agent, from, fetch, told),
            false => self.fetch_file(agent, (signed_root(agent, fetch), from), fetch, told),
        }
    }

    /// Fetches a file, or verifies it if it is here, by its root; `None` if the known root is of
    /// another length.
    fn fetch_file(
        &self,
        agent: &Agent,
        (rooted, from): (Result<Option<KnownRoot>, String>, Option<NodeId>),
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<Option<RepairReport>, String> {
        if self.find_file(&fetch.model).is_ok() {
            let known = rooted.ok().flatten().map(|rooted| (rooted, from));
            let extent = if fetch.checks {
                CheckRange::All
            } else {
                CheckRange::Start
            };
            let run = |count: &Count<'_>| self.check((agent, &fetch.model), known, extent, count);
            return watched(run, told);
        }
        let here = partial_file::bytes_on_disk(&self.place(&fetch.model, partial_file::FILE)?);
        self.check_share(fetch, here)?;
        self.get(agent, (rooted, from), fetch, told).map(|()| None)
    }

    /// Checks whether the disk takes what this node's workers will fetch, besides the bytes `here`.
    fn check_share(&self, fetch: &Fetch, here: u64) -> Result<(), String> {
        match fetch.share.saturating_sub(here) {
            0 => Ok(()),
            bytes => (self.may_have)(bytes),
        }
    }

    /// Fetches a missing model, by its root if that is known; `None` if the root is of another
    /// length.
    fn get(
        &self,
        agent: &Agent,
        (rooted, from): (Result<Option<KnownRoot>, String>, Option<NodeId>),
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let reason = match (rooted, from) {
            (Ok(Some(rooted)), _) => {
                match self.held(agent, &fetch.model, Some((rooted.clone(), from))) {
                    Ok(held) => return self.fetch_parts(agent, fetch, (&held, &rooted), told),
                    Err(reason) => reason,
                }
            }
            (_, Some(from)) => match self.copy_from(agent, from, fetch, told) {
                Ok(()) => return Ok(()),
                Err(reason) => reason,
            },
            (Ok(None), None) => "the signed root is of a file of another length".to_owned(),
            (Err(reason), None) => reason,
        };
        self.whole_from_hub(agent, fetch, &reason, told)
    }

    /// Fetches groups of a model from all nodes that have some, and from the hub if none has them.
    fn fetch_parts(
        &self,
        agent: &Agent,
        fetch: &Fetch,
        (held, rooted): (&PartialCopy, &KnownRoot),
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let model = &fetch.model;
        let wanted = match fetch.parts {
            true => first_groups(rooted, held.partial.groups()),
            false => std::iter::once(0..held.partial.groups().count()).collect(),
        };
        let run = |count: &Count<'_>| self.fetch_groups((agent, model), held, &wanted, count);
        watched(run, told)?;
        match fetch.parts {
            true => Ok(()),
            false => self.seal(agent, model, held),
        }
    }

    /// Fetches all of a model from the hub; `reason` is why no node has it.
    fn whole_from_hub(
        &self,
        agent: &Agent,
        fetch: &Fetch,
        reason: &str,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let model = &fetch.model;
        let (hub, origin) = self.on_hub((agent, model), fetch.bytes, reason)?;
        let _turn = lock(&self.turn);
        if self.find_file(model).is_ok() {
            return Ok(()); // copied meanwhile
        }
        // Bytes already downloaded count as part of the budget.
        let [begun, _] = PARTS_OF_HUB;
        let begun = fs::metadata(self.place(model, begun)?).map_or(0, |facts| facts.len());
        (self.may_have)(fetch.bytes.saturating_sub(begun))?;
        let place = self.whole(model)?;
        let named = fs::create_dir_all(&self.folder).and_then(|()| self.write_name(model));
        named.map_err(|error| format!("{}: {error}", place.display()))?;
        let run = |count: &Count<'_>| hub.whole(&origin, &place, count);
        let had = watched(run, told);
        had.map_err(|failed| unavailable(agent, model, reason, Some(&failed)))
    }

    /// Fetches runs of groups from the hub; `reason` is why no node has them.
    fn groups_from_hub(
        &self,
        (agent, model): (&Agent, &ModelName),
        (partial, runs): (&VerifiedPartial, &[Range<u64>]),
        reason: &str,
        told: &Count<'_>,
    ) -> Result<(), String> {
        let bytes = partial.groups().bytes;
        let (hub, origin) = self.on_hub((agent, model), bytes, reason)?;
        let fill = |run: &Range<u64>| hub::fill(&**hub, &origin, partial, run, told);
        let filled = runs.iter().try_for_each(fill);
        filled.map_err(|failed| unavailable(agent, model, reason, Some(&failed)))
    }

    /// The hub and the model's origin on it, if the length matches. Logs its first use for a model.
    fn on_hub(
        &self,
        (agent, model): (&Agent, &ModelName),
        bytes: u64,
        reason: &str,
    ) -> Result<(&Arc<dyn ModelHub>, HubOrigin), String> {
        let origin = self.origin(agent, model);
        let origin = origin.filter(|origin| origin.bytes == bytes);
        let Some((hub, origin)) = self.hub.as_ref().zip(origin) else {
            return Err(unavailable(agent, model, reason, None));
        };
        if lock(&self.of_hub).insert(model.sha256.clone()) {
            let name = &model.name;
            (self.tell)(&format!("{name}: {reason}: asking the hub for {origin}"));
        }
        Ok((hub, origin))
    }

    /// The partial copy of a model, verified by the root `told`; creates it if there is none.
    fn held(
        &self,
        agent: &Agent,
        model: &ModelName,
        told: Option<RootOrigin>,
    ) -> Result<Arc<PartialCopy>, String> {
        let is_it = |held: &Arc<PartialCopy>| {
            let told = told.as_ref();
            told.is_none_or(|(rooted, _)| rooted.root == held.rooted.root)
        };
        let known = || lock(&self.parts).get(&model.sha256).cloned().filter(is_it);
        if let Some(held) = known() {
            return Ok(held);
        }
        let turn = self.turn(&model.sha256);
        let _turn = lock(&turn);
        if let Some(held) = known() {
            return Ok(held);
        }
        self.end_other(&model.sha256)?;
        let (rooted, from) = match told {
            Some(told) => told,
            None => match roots::of(&agent.map(), &model.sha256) {
                Ok(rooted) => (rooted.into(), None),
                Err(reason) => (self.root_of_part(agent, model).ok_or(reason)?, None),
            },
        };
        let path = self.place(model, partial_file::FILE)?;
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let tree = self.leaves(agent, model, (&rooted, from))?;
        let open = || {
            self.write_name(model)?;
            VerifiedPartial::open(&FileSystem, &path, tree)
        };
        let partial = open().map_err(failed)?;
        let held = Arc::new(PartialCopy {
            partial,
            rooted,
            from,
        });
        lock(&self.parts).insert(model.sha256.clone(), Arc::clone(&held));
        Ok(held)
    }

    /// Ends the partial copy of a file that is verified by another root: two manifests, one of them
    /// wrong, contradict each other. Its groups are verified again by the root of the next one.
    ///
    /// # Errors
    /// It is being fetched or served.
    fn end_other(&self, sha256: &str) -> Result<(), String> {
        let mut parts = lock(&self.parts);
        match parts.get(sha256) {
            Some(held) if Arc::strong_count(held) > 1 => Err(format!(
                "another model's manifest gives the file with SHA-256 {sha256} the root {}, by \
                 which it is in use now",
                held.rooted.root
            )),
            _ => {
                parts.remove(sha256);
                Ok(())
            }
        }
    }

    /// The leaves below a root, from this node or from one that has the file.
    fn leaves(
        &self,
        agent: &Agent,
        model: &ModelName,
        (rooted, from): (&KnownRoot, Option<NodeId>),
    ) -> Result<Tree, String> {
        let groups = HashGroups::of(rooted.bytes);
        let accept = |leaves: &[u8]| {
            let tree = Tree::from_bytes(rooted.bytes, leaves)?;
            (shown(tree.root()) == rooted.root).then_some(tree)
        };
        let kept = self.place(model, partial_file::TREE)?;
        if let Some(tree) = fs::read(&kept).ok().and_then(|kept| accept(&kept)) {
            return Ok(tree);
        }
        let sources = self.sources(agent, model, [rooted.by, from]);
        let tree = file_ranges::leaves(agent, (model, groups), &sources, accept)?;
        let written = write_whole(&kept, &tree.to_bytes());
        written.map_err(|error| format!("{}: {error}", kept.display()))?;
        Ok(tree)
    }

    /// Nodes that may have parts of a model: the given nodes, the instances' nodes, their sources,
    /// then all others, which may have a copy. Excludes dead nodes and nodes that sent wrong bytes.
    fn sources(
        &self,
        agent: &Agent,
        model: &ModelName,
        first: impl IntoIterator<Item = Option<NodeId>>,
    ) -> Vec<file_ranges::RangeSource> {
        let (map, views) = (agent.map(), agent.nodes());
        let of = self.model_with(&model.sha256);
        let of = of.as_deref().unwrap_or(&model.sha256);
        let is_it = |wanted: &InstanceSpec| wanted.sha256 == of;
        let records = specs(&map).filter(|(.., wanted)| is_it(wanted));
        let of_records = records.flat_map(|(.., wanted)| {
            let source = wanted.source.into_iter();
            source.chain(wanted.nodes).collect::<Vec<_>>()
        });
        let others = views.iter().map(|view| view.id);
        let first = first.into_iter().flatten();
        let mut ids: Vec<NodeId> = first.chain(of_records).chain(others).collect();
        let mut seen = BTreeSet::new();
        let lives = |id: NodeId| matches!(agent.life(id), Life::Alive | Life::Suspect);
        ids.retain(|id| *id != agent.id() && lives(*id) && seen.insert(*id));
        ids.retain(|id| !lock(&self.liars).contains(id));
        let name = |id: NodeId| {
            let view = views.iter().find(|view| view.id == id);
            view.map_or_else(|| id.to_string(), |view| view.facts.name.clone())
        };
        let sources = ids
            .into_iter()
            .map(|id| file_ranges::RangeSource { id, name: name(id) });
        sources.take(file_ranges::SOURCES_MAX).collect()
    }

    /// Fetches the missing groups of `wanted`.
    fn fetch_groups(
        &self,
        (agent, model): (&Agent, &ModelName),
        held: &PartialCopy,
        wanted: &[Range<u64>],
        told: &Count<'_>,
    ) -> Result<(), String> {
        let partial = &held.partial;
        let missing = || -> Vec<Range<u64>> {
            let wanted = wanted.iter();
            merged(wanted.flat_map(|run| partial.missing(run)).collect())
        };
        if missing().is_empty() {
            return Ok(());
        }
        let _turn = lock(&partial.turn);
        let missing = missing();
        if missing.is_empty() {
            return Ok(()); // fetched meanwhile
        }
        let span = |run: &Range<u64>| partial.groups().span(run);
        let bytes = missing.iter().map(|run| span(run).end - span(run).start);
        if !partial.is_copy() {
            (self.may_have)(bytes.sum())?;
        }
        let sources = self.sources(agent, model, [held.rooted.by, held.from]);
        let lied = |source: &file_ranges::RangeSource, lie: &str| {
            lock(&self.liars).insert(source.id);
            let (name, model) = (&source.name, self.label(model));
            (self.tell)(&format!("warning: {model}: {name}: {lie}"));
        };
        let fetching = FileFetch {
            agent,
            model,
            partial,
            sources: &sources,
            told,
            lied: &lied,
        };
        match fetching.run(&missing) {
            Ok(()) => Ok(()),
            Err(Short::Ended(reason)) => Err(reason),
            Err(Short::Lacking(reason)) => {
                let left: Vec<Range<u64>> = missing
                    .iter()
                    .flat_map(|run| partial.missing(run))
                    .collect();
                let left = (partial, left.as_slice());
                self.groups_from_hub((agent, model), left, &reason, told)
            }
        }
    }

    /// Fetches ranges of a model's file that a worker requests, while `goes_on` returns true.
    /// `file` is its name in the model's folder, empty for a model of one file.
    ///
    /// # Errors
    /// The unavailable bytes, and the failure of each source.
    pub(super) fn bring(
        &self,
        agent: &Agent,
        (model, file): (&ModelName, &str),
        parts: &[ByteRange],
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        let model = &self.file_of(model, file)?;
        let held = self.held(agent, model, None)?;
        let wanted = CheckRange::Parts(parts).groups(&held.rooted, held.partial.groups());
        self.fetch_groups((agent, model), &held, &wanted, &|_| goes_on())
    }

    /// Turns a complete partial file into a copy. Verifies its SHA-256 as well, in case the root
    /// was signed for another file.
    fn seal(&self, agent: &Agent, model: &ModelName, held: &PartialCopy) -> Result<(), String> {
        let path = &held.partial.path;
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let sum = hash(path).map_err(failed)?;
        if sum != model.sha256 {
            let wrong = held.partial.recheck(&(0..held.partial.groups().count()));
            if !wrong.map_err(failed)?.is_empty() {
                return Err(format!("{} was changed after it came", path.display()));
            }
            self.forget_file(&model.sha256).map_err(failed)?;
            let mut views = agent.nodes().into_iter();
            let by = held.rooted.by.map_or_else(String::new, |by| {
                let view = views.find(|view| view.id == by);
                view.map_or_else(|| by.to_string(), |view| view.facts.name)
            });
            return Err(format!(
                "{by} has signed the root of another file, whose SHA-256 is {sum}"
            ));
        }
        let copy = self.whole(model)?;
        held.partial.publish(&FileSystem, &copy).map_err(failed)?;
        // Without sums, loads compare the copy with its tree.
        let _: io::Result<()> = held.partial.make_sums(&copy.with_extension(SUMS));
        Ok(())
    }

    /// Removes a copy of a model; returns the bytes freed.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn forget(&self, sha256: &str) -> io::Result<u64> {
        Ok(self.forget_model(sha256)? + self.forget_file(sha256)?)
    }

    /// Removes all files about a copy of a file; returns the bytes freed.
    fn forget_file(&self, sha256: &str) -> io::Result<u64> {
        let held = lock(&self.parts).remove(sha256);
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
        lock(&self.parts).get(sha256).cloned()
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

    /// Copies a whole file from one node.
    fn copy_from(
        &self,
        agent: &Agent,
        from: NodeId,
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<(), String> {
        let _turn = lock(&self.turn);
        if self.find_file(&fetch.model).is_ok() {
            return Ok(()); // copied meanwhile
        }
        (self.may_have)(fetch.bytes)?;
        let place = self.whole(&fetch.model)?;
        fs::create_dir_all(&self.folder).map_err(|e| format!("{}: {e}", self.folder.display()))?;
        let partial = place.with_extension(WHOLE_PART);
        let opened = agent.open(from, FILE, SILENCE);
        let file = NodeConnection(opened.map_err(|error| error.to_string())?);
        send_message(&file, &fetch.model).map_err(|broken| broken.to_string())?;
        let copied = copy(&file, &partial, fetch, told);
        let copied = copied.map_err(|error| format!("{}: {error}", partial.display()));
        let right = copied.and_then(|copied| match copied == fetch.model.sha256 {
            true => Ok(()),
            false => Err(format!(
                "the copy has SHA-256 {copied}, which is another file"
            )),
        });
        if right.is_err() {
            // The next fetch starts anew.
            let _: io::Result<()> = fs::remove_file(&partial);
        }
        right?;
        let named = write_whole(&place.with_extension(NAME), fetch.model.name.as_bytes());
        let kept = named.and_then(|()| storage::rename(&FileSystem, &partial, &place));
        kept.map_err(|e| format!("{}: {e}", place.display()))
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

/// As [`hub::unavailable`], for this node.
fn unavailable(agent: &Agent, model: &ModelName, nodes: &str, hub: Option<&str>) -> String {
    let views = agent.nodes();
    let own = views.first().map_or("", |own| own.facts.name.as_str());
    hub::unavailable((model.name.as_str(), own), (nodes, hub))
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

/// Runs a fetch on its own thread and reports its progress until it ends.
fn watched<T: Send>(
    run: impl FnOnce(&Count<'_>) -> Result<T, String> + Send,
    told: &mut CopyProgress<'_>,
) -> Result<T, String> {
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let count = |bytes: u64| {
        done.fetch_add(bytes, Ordering::Relaxed);
        !is_over.load(Ordering::Relaxed)
    };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| run(&count));
        let mut last = Instant::now();
        while !running.is_finished() {
            if last.elapsed() >= TELL_EVERY {
                last = Instant::now();
                if told(done.load(Ordering::Relaxed)).is_err() {
                    is_over.store(true, Ordering::Relaxed);
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let ended = running.join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Writes a small file atomically, in an existing folder, and syncs it.
///
/// # Errors
/// The system's error.
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
