//! Resolves the user's MODEL argument.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;

use crate::catalogue::{Catalogue, CatalogueModel};
use crate::gguf_name::{GgufRole, gguf_models, of_role};
use crate::index::{self, Kind, ResolvedModel, StoreEntry};
use crate::name::{EntryName, HubId, check_file_path};
use crate::select::selectors;
use crate::usual_names::{usual_name, usual_names};
use crate::{Error, GgufChoice, Home};

/// The result of [`resolve`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    Path(ResolvedModel),
    /// It must be downloaded first, with [`pull`](crate::pull).
    NeedsDownload(DownloadPlan),
}

/// A model to download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DownloadPlan {
    pub(crate) target: DownloadTarget,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DownloadTarget {
    Catalogue(&'static CatalogueModel),
    Hub { id: HubId, selector: Option<String> },
}

impl DownloadPlan {
    /// The model's name, as a user would write it.
    pub fn name(&self) -> String {
        match &self.target {
            DownloadTarget::Catalogue(model) => model.alias.to_owned(),
            DownloadTarget::Hub { id, selector: None } => id.to_string(),
            DownloadTarget::Hub {
                id,
                selector: Some(selector),
            } => format!("{id}:{selector}"),
        }
    }

    /// The catalogue's entry, with licence and description; `None` for others.
    pub const fn catalogue_model(&self) -> Option<&'static CatalogueModel> {
        match self.target {
            DownloadTarget::Catalogue(model) => Some(model),
            DownloadTarget::Hub { .. } => None,
        }
    }

    /// The size, if known without the hub.
    pub fn bytes(&self) -> Option<Bytes> {
        self.catalogue_model().map(|model| model.bytes)
    }
}

/// Resolves `spec`: an alias of the built-in catalogue or a usual name such as `qwen3:8b`, else an
/// existing path, else a hub id `owner/name[:file-or-quantisation]`. Reads only the local disk. A
/// file or folder of an alias' name needs `./`, so that the working folder cannot replace a model.
///
/// # Errors
/// [`Error::UnknownModel`] with close names, [`Error::NoSuchPath`], [`Error::NotAModel`],
/// [`Error::BadHubId`], [`Error::AmbiguousGguf`] when several stored models match,
/// [`Error::SeveralGguf`] for a folder with more than one model.
pub fn resolve(home: &Home, spec: &str) -> Result<Resolution, Error> {
    resolve_in(home, Catalogue::BUILTIN, spec)
}

/// [`resolve`] with another catalogue.
pub fn resolve_in(home: &Home, catalogue: Catalogue, spec: &str) -> Result<Resolution, Error> {
    if let Some(model) = catalogue.find(spec) {
        let stored = index::entry(home, &EntryName::alias(model.alias));
        return match stored.filter(StoreEntry::is_complete) {
            Some(entry) => entry.found().map(Resolution::Path),
            None => Ok(Resolution::NeedsDownload(DownloadPlan {
                target: DownloadTarget::Catalogue(model),
            })),
        };
    }
    if let Some(usual) = usual_name(spec) {
        return resolve_hub(home, &usual.hub);
    }
    let path = Path::new(spec);
    if !spec.is_empty() && path.exists() {
        return inspect(path).map(Resolution::Path);
    }
    if looks_like_path(spec) {
        return Err(Error::NoSuchPath { path: path.into() });
    }
    if spec.contains('/') {
        return resolve_hub(home, spec);
    }
    Err(Error::UnknownModel {
        spec: spec.into(),
        close: close_names(home, catalogue, spec),
    })
}

/// Whether a text cannot be a hub id, or is more likely a path.
fn looks_like_path(spec: &str) -> bool {
    let before_colon = spec.split(':').next().unwrap_or(spec);
    spec.starts_with(['/', '.', '~'])
        || before_colon.matches('/').count() > 1
        || (spec.ends_with(".gguf") && !spec.contains(':'))
        || spec.ends_with(".safetensors")
}

fn resolve_hub(home: &Home, spec: &str) -> Result<Resolution, Error> {
    let (repo, selector) = match spec.split_once(':') {
        Some((repo, selector)) => (repo, Some(selector)),
        None => (spec, None),
    };
    let id = HubId::parse(repo)?;
    if let Some(selector) = selector {
        let bad = |reason| Error::BadHubId {
            spec: spec.into(),
            reason,
        };
        check_file_path(selector).map_err(bad)?;
    }
    let stored = index::complete_of_repo(home, &id)?;
    match &stored_choice(&stored, selector)[..] {
        [] => {
            let selector = selector.map(str::to_owned);
            Ok(Resolution::NeedsDownload(DownloadPlan {
                target: DownloadTarget::Hub { id, selector },
            }))
        }
        [only] => only.found().map(Resolution::Path),
        several => Err(Error::AmbiguousGguf {
            repo: id.to_string(),
            choices: stored_choices(several),
        }),
    }
}

fn stored_choices(several: &[&StoreEntry]) -> Vec<GgufChoice> {
    let files: Vec<&str> = several.iter().filter_map(|entry| entry.file()).collect();
    let choice = |(entry, selector): (&&StoreEntry, String)| GgufChoice {
        selector,
        files: entry.file_count().unwrap_or(1),
        bytes: Some(entry.file_bytes()),
    };
    several.iter().zip(selectors(&files)).map(choice).collect()
}

/// The stored models for a selector; without one, the folder wins.
fn stored_choice<'a>(stored: &'a [StoreEntry], selector: Option<&str>) -> Vec<&'a StoreEntry> {
    let folder = stored.iter().find(|entry| entry.file().is_none());
    match (selector, folder) {
        (Some(selector), _) => index::of_selector(stored.iter(), selector),
        (None, Some(folder)) => vec![folder],
        (None, None) => stored.iter().collect(),
    }
}

fn inspect(path: &Path) -> Result<ResolvedModel, Error> {
    let not = |reason| Error::NotAModel {
        path: path.into(),
        reason,
    };
    let meta = fs::metadata(path).map_err(|error| Error::io("read", path, error))?;
    let kind = if meta.is_dir() {
        if let Err(lacks) = has_model_files(path) {
            return inspect(&gguf_in(path)?.ok_or(lacks)?);
        }
        Kind::Safetensors
    } else if meta.is_file() {
        let mut magic = [0; 4];
        let read = fs::File::open(path).and_then(|mut file| file.read(&mut magic));
        let n = read.map_err(|error| Error::io("read", path, error))?;
        if &magic[..n] != b"GGUF" {
            return Err(not("it does not begin with the letters GGUF"));
        }
        Kind::Gguf
    } else {
        return Err(not("it is neither a file nor a folder"));
    };
    Ok(ResolvedModel {
        path: path.into(),
        kind,
        name: None,
    })
}

/// The only GGUF model of a folder, by its first file; `None` without one.
fn gguf_in(dir: &Path) -> Result<Option<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(|error| Error::io("list", dir, error))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    let all = gguf_models(names.iter().map(String::as_str));
    let models = match of_role(&all, GgufRole::Model) {
        none if none.is_empty() => of_role(&all, GgufRole::Draft),
        models => models,
    };
    let mut models: Vec<String> = models.iter().map(|model| model.file().to_owned()).collect();
    if models.len() > 1 {
        return Err(Error::SeveralGguf {
            path: dir.into(),
            choices: models,
        });
    }
    Ok(models.pop().map(|name| dir.join(name)))
}

fn has_model_files(dir: &Path) -> Result<(), Error> {
    let not = |reason| Error::NotAModel {
        path: dir.into(),
        reason,
    };
    if !dir.join("config.json").is_file() {
        return Err(not("the folder has neither a .gguf file nor a config.json"));
    }
    let entries = fs::read_dir(dir).map_err(|error| Error::io("list", dir, error))?;
    let mut names = entries.flatten().map(|entry| entry.file_name());
    if !names.any(|name| {
        Path::new(&name)
            .extension()
            .is_some_and(|e| e == "safetensors")
    }) {
        return Err(not("the folder has no .safetensors file"));
    }
    Ok(())
}

/// Known names within an edit distance of a third of `spec`'s length, or that begin with it; at
/// most three.
fn close_names(home: &Home, catalogue: Catalogue, spec: &str) -> Vec<String> {
    // Bounds the quadratic cost; no known name is longer.
    if spec.len() > 100 {
        return Vec::new();
    }
    let stored = index::list(home).unwrap_or_default();
    let names = catalogue.iter().map(|model| model.alias.to_owned());
    let names = names.chain(usual_names().iter().map(|usual| usual.name.clone()));
    let names = names.chain(stored.iter().map(|entry| entry.name.to_string()));
    let wanted = spec.to_lowercase();
    let limit = (wanted.len() / 3).max(1);
    let mut close: Vec<(usize, String)> = names
        .map(|name| match name.to_lowercase() {
            lower if !wanted.is_empty() && lower.starts_with(&wanted) => (0, name),
            lower => (strsim::levenshtein(&lower, &wanted), name),
        })
        .filter(|(distance, _)| *distance <= limit)
        .collect();
    close.sort();
    close.dedup();
    close.into_iter().map(|(_, name)| name).take(3).collect()
}
