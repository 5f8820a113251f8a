//! Downloads and verification of models, for commands and API clients.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use paceline_base::Bytes;
use paceline_node::fleet::{MendedFile, StoredFile, whole_copy};
use paceline_serve::{PullStep, Puller};
use paceline_store::verified::{ChecksumError, has_checksums, record_checksums};
use paceline_store::{
    Cancel, DownloadPlan, EntryName, Error, FileRecord, Home, Kind, PullOptions, PullProgress,
    PulledModel, Resolution, ResolvedModel, State, StoreEntry, check_used, fetch_pinned,
    find_for_removal, list, origin, pull, recorded_files, resolve, usual_name, verify,
};
use serde_json::{Value, json};

use crate::MessageSink;

/// The node's command that repairs a [`StoredFile`].
pub const MEND: &str = "mend";

/// Interval of progress steps to clients.
const STEP_EVERY: Duration = Duration::from_millis(200);

/// Files from this size on show the progress of their first comparison, of 0.7 s a gigabyte.
const SHOWN_BYTES: u64 = 1 << 30;

/// How a model came to this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullOutcome {
    /// Downloaded now.
    Fetched,
    /// Present: downloaded earlier or by another process.
    InStore,
    /// Present and verified.
    Checked,
    /// Present with wrong bytes, and downloaded again.
    Mended,
    /// Not a model of the store.
    Own,
}

impl PullOutcome {
    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Fetched => "pulled",
            Self::InStore => "already in the store",
            Self::Checked => "already in the store, checked",
            Self::Mended => "was damaged, fetched again",
            Self::Own => "your own file, nothing to pull",
        }
    }
}

/// The complete copy of a model that a cluster left on this machine, in place of a download.
pub fn copied(home: &Home, spec: &str) -> Option<ResolvedModel> {
    let Ok(Resolution::NeedsDownload(plan)) = resolve(home, spec) else {
        return None;
    };
    let folder = copies(home);
    let copy = whole_copy(&folder, spec).or_else(|| whole_copy(&folder, &plan.name()))?;
    match resolve(home, copy.to_str()?) {
        Ok(Resolution::Path(found)) => Some(found),
        _ => None,
    }
}

/// The folder of copies from other nodes.
pub(crate) fn copies(home: &Home) -> PathBuf {
    home.root().join("copies")
}

/// A store with the settings of downloads.
#[expect(
    missing_debug_implementations,
    reason = "what shows progress says nothing"
)]
pub struct StorePulls<'a> {
    pub home: &'a Home,
    /// Hub, pip, retries, deadlines.
    pub options: &'a PullOptions,
    pub cancel: &'a Cancel,
    /// Makes a progress display per file.
    pub progress: &'a dyn Fn() -> Box<dyn PullProgress>,
    /// Receives lines for people.
    pub tell: &'a dyn Fn(&str),
    /// Repairs a damaged file from other machines; `None` where no node of this machine can.
    pub peers: &'a dyn Fn(&StoredFile) -> Option<MendedFile>,
}

impl StorePulls<'_> {
    /// Downloads or verifies the model `spec`; returns how it came here. One with wrong bytes is
    /// downloaded again if its record names a source.
    ///
    /// # Errors
    /// As of [`resolve`], [`pull`] and [`verify`]; [`Error::Damaged`].
    pub fn fetch_or_verify(&self, spec: &str) -> Result<(ResolvedModel, PullOutcome), Error> {
        let found = match resolve(self.home, spec)? {
            Resolution::Path(found) => found,
            Resolution::NeedsDownload(plan) => {
                if let Some(found) = self.mend_cut(spec) {
                    self.record_checksums(&found)?;
                    return Ok((found, PullOutcome::Mended));
                }
                let pulled = self.fetch(spec, &plan)?;
                let came = if pulled.fetched {
                    PullOutcome::Fetched
                } else {
                    PullOutcome::InStore
                };
                self.record_checksums(&pulled.found)?;
                return Ok((pulled.found, came));
            }
        };
        let Some(name) = &found.name else {
            return Ok((found, PullOutcome::Own));
        };
        let checked = verify(self.home, name, self.cancel, &mut *(self.progress)());
        let came = match checked {
            Ok(()) => PullOutcome::Checked,
            Err(error @ Error::HashMismatch { .. }) => {
                self.mend(name, error)?;
                PullOutcome::Mended
            }
            Err(error) => return Err(error),
        };
        self.record_checksums(&found)?;
        Ok((found, came))
    }

    /// As [`record_checksums_of`], with progress.
    fn record_checksums(&self, found: &ResolvedModel) -> Result<(), Error> {
        let mut shown: Option<(String, Box<dyn PullProgress>)> = None;
        let mut count = |file: &FileRecord, bytes| {
            let is_new = shown.as_ref().is_none_or(|(path, _)| *path != file.path);
            if is_new && file.bytes >= SHOWN_BYTES {
                let mut progress = (self.progress)();
                progress.start(&format!("checking {}", file.path), Some(file.bytes), 0);
                if let Some((_, mut before)) = shown.replace((file.path.clone(), progress)) {
                    before.finish();
                }
            }
            if let Some((_, progress)) = &mut shown {
                progress.advance(bytes);
            }
            !self.cancel.is_cancelled()
        };
        let recorded = record_checksums_of(self.home, found, &mut count);
        if let Some((_, mut last)) = shown {
            last.finish();
        }
        match recorded {
            _ if self.cancel.is_cancelled() => Err(Error::Cancelled),
            // A read-only store is no reason not to run the model.
            Err(error @ Error::Io { .. }) => {
                (self.tell)(&format!("warning: {error}"));
                Ok(())
            }
            other => other,
        }
    }

    /// Downloads the damaged files of a stored model again; `error` is the first damage.
    fn mend(&self, name: &EntryName, mut error: Error) -> Result<(), Error> {
        let mut mended = None;
        loop {
            let path = match &error {
                // By its path, as `verify` names it.
                Error::HashMismatch { what, .. } if mended.as_ref() != Some(what) => what.clone(),
                _ => return Err(error),
            };
            let mut files = recorded_files(self.home, name)?.into_iter();
            let file = files.find(|(of, _)| of == Path::new(&path));
            if !file.is_some_and(|(path, file)| self.mend_from_peers(name, (&path, file))) {
                self.fetch_again(name, Path::new(&path), error)?;
            }
            mended = Some(path);
            match verify(self.home, name, self.cancel, &mut *(self.progress)()) {
                Ok(()) => return Ok(()),
                Err(next) => error = next,
            }
        }
    }

    /// Whether other machines have supplied the damaged bytes of a stored file.
    fn mend_from_peers(&self, name: &EntryName, (path, file): (&Path, FileRecord)) -> bool {
        let mended = (self.peers)(&StoredFile {
            model: name.to_string(),
            path: path.to_owned(),
            sha256: file.sha256,
            bytes: file.bytes,
        });
        let Some(MendedFile { mended, ranges }) = mended else {
            return false;
        };
        let (path, bytes) = (path.display(), Bytes(mended.bytes));
        (self.tell)(&format!(
            "warning: {path} was damaged at bytes {ranges}; mended ({bytes})"
        ));
        true
    }

    /// The model `spec` after other machines have completed its files that were cut; `None` if it
    /// has none, or they have not.
    fn mend_cut(&self, spec: &str) -> Option<ResolvedModel> {
        let name = find_for_removal(self.home, spec).ok()?;
        let mut cut = recorded_files(self.home, &name).ok()?;
        cut.retain(|(path, file)| path.metadata().is_ok_and(|it| it.len() != file.bytes));
        let mut cut = cut.into_iter().peekable();
        let is_whole = cut.peek().is_none();
        if is_whole || !cut.all(|(path, file)| self.mend_from_peers(&name, (&path, file))) {
            return None;
        }
        match resolve(self.home, spec).ok()? {
            Resolution::Path(found) => Some(found),
            Resolution::NeedsDownload(_) => None,
        }
    }

    /// Downloads the file at `path` again; `error` is its damage.
    fn fetch_again(&self, name: &EntryName, path: &Path, error: Error) -> Result<(), Error> {
        let error = damaged(name.as_str(), error);
        let place = (path.parent(), path.file_name());
        let (Some(pinned), (Some(folder), Some(file))) = (origin(self.home, path), place) else {
            return Err(error); // from nowhere known
        };
        (self.tell)(&format!("warning: {error}; fetching it again"));
        let (file, mut progress) = (file.to_string_lossy(), (self.progress)());
        let to = (folder, &*file);
        match fetch_pinned(&pinned, to, self.options, self.cancel, &mut *progress) {
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(failed) => {
                (self.tell)(&format!("warning: cannot fetch {name} again: {failed}"));
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    /// Finds the model `spec`, downloads it if there is not even a copy of the cluster's, and
    /// records its use. `may` can reject a download.
    ///
    /// # Errors
    /// As of [`resolve`] and [`pull`]; [`Error::Damaged`]; that of `may`.
    pub fn ensure<E: From<Error>>(
        &self,
        spec: &str,
        may: impl FnOnce() -> Result<(), E>,
    ) -> Result<ResolvedModel, E> {
        let found = match resolve(self.home, spec)? {
            Resolution::Path(found) => found,
            Resolution::NeedsDownload(plan) => match copied(self.home, spec) {
                Some(copy) => {
                    (self.tell)(&format!("{spec}: the copy that its cluster left here"));
                    copy
                }
                None => {
                    may()?;
                    self.fetch(spec, &plan)?.found
                }
            },
        };
        if let Some(name) = &found.name {
            let (now, mut progress) = (SystemTime::now(), (self.progress)());
            match check_used(self.home, name, now, self.cancel, &mut *progress) {
                Ok(()) => {}
                Err(error @ (Error::HashMismatch { .. } | Error::Cancelled)) => {
                    return Err(damaged(name.as_str(), error).into());
                }
                // A read-only store is no reason not to run the model.
                Err(error) => {
                    (self.tell)(&format!("warning: cannot note the use of {name}: {error}"))
                }
            }
        }
        self.record_checksums(&found)?;
        Ok(found)
    }

    fn fetch(&self, spec: &str, plan: &DownloadPlan) -> Result<PulledModel, Error> {
        if let Some(usual) = usual_name(spec) {
            let mark = if usual.checked.is_none() {
                ", not verified here"
            } else {
                ""
            };
            (self.tell)(&format!("{spec} means {}{mark}", usual.hub));
            if let Some(architecture) = &usual.uncomputed {
                (self.tell)(&format!(
                    "warning: this version does not compute {architecture} models"
                ));
            }
        }
        if let Some(model) = plan.catalogue_model() {
            let (alias, about, bytes) = (model.alias, model.about, model.bytes);
            (self.tell)(&format!("{alias}: {about}, {bytes}"));
            (self.tell)(&format!(
                "licence: {}, {}",
                model.licence, model.licence_url
            ));
        }
        let (mut progress, now) = ((self.progress)(), SystemTime::now());
        pull(
            self.home,
            plan,
            self.options,
            self.cancel,
            &mut *progress,
            now,
        )
    }
}

/// Makes loads of a stored model compare the weights that they read. Compares all of the weights
/// with the store's record the first time. `count` receives the number of bytes read of a file;
/// false ends the call with an error.
///
/// # Errors
/// [`Error::Damaged`]. After [`Error::Io`] loads read the weights as they are.
pub(crate) fn record_checksums_of(
    home: &Home,
    found: &ResolvedModel,
    count: &mut dyn FnMut(&FileRecord, u64) -> bool,
) -> Result<(), Error> {
    let Some(name) = &found.name else {
        return Ok(());
    };
    for (path, file) in weights_of(home, found)? {
        let recorded = record_checksums(&path, &file.sha256, &mut |bytes| count(&file, bytes));
        recorded.map_err(|error| match error {
            ChecksumError::Io { path, error: cause } => Error::Io {
                action: "note the checksums of",
                path,
                cause,
            },
            error @ ChecksumError::Differs { .. } => Error::Damaged {
                name: name.to_string(),
                reason: error.to_string(),
            },
        })?;
    }
    Ok(())
}

/// Compares a stored model with the store's record at its first use on a node.
pub(crate) fn check_first_use(home: &Home, found: &ResolvedModel) -> Result<(), Error> {
    let files = weights_of(home, found)?;
    if files.iter().all(|(path, _)| has_checksums(path)) {
        return Ok(());
    }
    match record_checksums_of(home, found, &mut |_, _| true) {
        // Where none can be written, the node identifies the file by its own SHA-256.
        Err(Error::Io { .. }) => Ok(()),
        other => other,
    }
}

fn weights_of(home: &Home, found: &ResolvedModel) -> Result<Vec<(PathBuf, FileRecord)>, Error> {
    let entries = list(home)?;
    let entry = entries
        .into_iter()
        .find(|entry| Some(&entry.name) == found.name.as_ref());
    let Some(State::Complete { files, .. }) = entry.map(|entry| entry.state) else {
        return Ok(Vec::new());
    };
    let path = |file: &FileRecord| match found.kind {
        Kind::Safetensors => found.path.join(&file.path),
        // The first file's path has the folders of all.
        Kind::Gguf => {
            let folders = Path::new(&files[0].path).components().count();
            let folder = found.path.ancestors().nth(folders).unwrap_or(&found.path);
            folder.join(&file.path)
        }
    };
    let weights = files.iter().filter(|file| file.has_weights());
    Ok(weights.map(|file| (path(file), file.clone())).collect())
}

/// Reports wrong bytes of a stored file as damage to the store, not as a failed download.
fn damaged(name: &str, error: Error) -> Error {
    match error {
        Error::HashMismatch { .. } => Error::Damaged {
            name: name.to_owned(),
            reason: error.to_string(),
        },
        other => other,
    }
}

/// Size of a model of the store, or of a single file; `None` for a folder elsewhere.
pub fn size(home: &Home, found: &ResolvedModel) -> Result<Option<Bytes>, Error> {
    let Some(name) = &found.name else {
        if found.kind != Kind::Gguf {
            return Ok(None);
        }
        let bytes = std::fs::metadata(&found.path).map(|facts| Bytes(facts.len()));
        return bytes.map(Some).map_err(|cause| Error::Io {
            action: "look at",
            path: found.path.clone(),
            cause,
        });
    };
    let entries = list(home)?;
    Ok(entries
        .iter()
        .find(|entry| entry.name == *name)
        .map(StoreEntry::file_bytes))
}

/// A local model as a JSON object.
pub fn object(found: &ResolvedModel, bytes: Option<Bytes>, came: PullOutcome) -> Value {
    json!({
        "name": found.name.as_ref().map(EntryName::as_str),
        "path": found.path.to_string_lossy(),
        "type": found.kind,
        "bytes": bytes.map(|bytes| bytes.0),
        "fetched": matches!(came, PullOutcome::Fetched | PullOutcome::Mended),
    })
}

/// Downloads models for API clients, who cannot name paths. `smollm2:latest` is `smollm2`.
pub fn puller(home: Home, options: PullOptions, say: MessageSink) -> Puller {
    let pull = move |name: &str, tell: &mut dyn FnMut(PullStep) -> bool, over: &Arc<AtomicBool>| {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        if Path::new(name).exists() {
            return Ok(false);
        }
        let plan = match resolve(&home, name) {
            Ok(Resolution::Path(_)) => return Ok(true),
            Ok(Resolution::NeedsDownload(plan)) => plan,
            // Does not reveal which files exist here.
            Err(Error::UnknownModel { .. } | Error::NoSuchPath { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let cancel = Cancel::from_flag(Arc::clone(over));
        let mut steps = PullSteps::new(tell, &say, cancel.clone());
        let now = SystemTime::now();
        let pulled = pull(&home, &plan, &options, &cancel, &mut steps, now);
        pulled.map(|_| true).map_err(Into::into)
    };
    Puller(Arc::new(pull))
}

/// Reports a pull's progress to a client, and cancels the pull when the client has left.
struct PullSteps<'a> {
    tell: &'a mut dyn FnMut(PullStep) -> bool,
    say: &'a MessageSink,
    cancel: Cancel,
    step: PullStep,
    told: Instant,
}

impl<'a> PullSteps<'a> {
    fn new(
        tell: &'a mut dyn FnMut(PullStep) -> bool,
        say: &'a MessageSink,
        cancel: Cancel,
    ) -> Self {
        let step = PullStep {
            part: String::new(),
            total: None,
            done: 0,
        };
        let told = Instant::now();
        Self {
            tell,
            say,
            cancel,
            step,
            told,
        }
    }

    fn step(&mut self) {
        self.told = Instant::now();
        if !(self.tell)(self.step.clone()) {
            self.cancel.cancel();
        }
    }
}

impl PullProgress for PullSteps<'_> {
    fn start(&mut self, label: &str, total: Option<u64>, done: u64) {
        self.step = PullStep {
            part: label.to_owned(),
            total,
            done,
        };
        self.step();
    }

    fn advance(&mut self, bytes: u64) {
        self.step.done += bytes;
        if self.told.elapsed() >= STEP_EVERY {
            self.step();
        }
    }

    fn message(&mut self, text: &str) {
        (self.say)(text);
    }

    fn finish(&mut self) {
        self.step();
    }
}

#[cfg(test)]
mod tests {
    use paceline_store::SilentProgress;

    use super::*;

    #[test]
    fn a_copy_of_the_cluster_is_taken_before_a_download() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let folder = copies(&home);
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        write("aa.name", "smollm2");
        let pulls = StorePulls {
            home: &home,
            options: &PullOptions::default(),
            cancel: &Cancel::default(),
            progress: &|| Box::new(SilentProgress),
            tell: &|_| {},
            peers: &|_| None,
        };
        let ensure = || pulls.ensure("smollm2", || Err(Error::Cancelled));
        assert!(matches!(ensure(), Err(Error::Cancelled)), "a part is none");
        write("aa.gguf", "GGUF and the rest");
        assert_eq!(ensure().unwrap().path, folder.join("aa.gguf"));
    }
}
