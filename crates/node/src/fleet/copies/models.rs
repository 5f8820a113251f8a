//! Models of several files: their manifests, their folders of copies, and fetches file by file.
//!
//! ```text
//! SHA256.manifest  the manifest, a copy like any other
//! SHA256.model/    inline files, and for each other file a link under its name: to a copy, to a
//!                  partial file, or to a file of the user's store
//! ```
//! Every file is fetched, verified, served and repaired by its own SHA-256, as a model of one file
//! is. Its root is the manifest's. Workers open the folder, or the first part inside it. A link is
//! replaced atomically once its file is complete.

mod files;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_base::lock;
use paceline_cluster::nodes::agent::Agent;
use paceline_weights::gguf::Gguf;

use super::files::{PartFile, hash_bytes, model_files, safetensors_header};
use super::repair::CheckRange;
use super::{
    FileFingerprint, MANIFEST, MODEL, ModelCopies, NAME, another, fingerprint, first_groups,
    partial_file, place_in, write_whole,
};
use crate::fleet::hub::{self, HubOrigin};
use crate::fleet::inventory::tree_of;
use crate::fleet::manifest::{
    INLINE_BYTES_MAX, INLINE_TOTAL_MAX, MANIFEST_BYTES_MAX, Manifest, ManifestFile,
};
use crate::fleet::roots::{self, FileRoot, KnownRoot};
use crate::workers::host::ModelName;
use paceline_store::verified::tree::{HashGroups, Tree, shown};

/// Manifests that this process has verified or computed.
#[derive(Default)]
pub(super) struct Models {
    /// By SHA-256 of the manifest.
    known: HashMap<String, Arc<Manifest>>,
    /// SHA-256 of the manifest of unchanged files of the user's.
    own: HashMap<Vec<FileFingerprint>, String>,
    /// By SHA-256 of a file: the SHA-256 of a manifest that has it, and its name there.
    parts: HashMap<String, (String, String)>,
}

impl Models {
    fn insert(&mut self, sha256: &str, manifest: &Arc<Manifest>) {
        for file in manifest.files() {
            let part = (sha256.to_owned(), file.name.clone());
            self.parts.insert(file.sha256.clone(), part);
        }
        self.known.insert(sha256.to_owned(), Arc::clone(manifest));
    }

    fn remove(&mut self, sha256: &str) {
        self.known.remove(sha256);
        self.parts.clear();
        for (sha256, manifest) in self.known.clone() {
            self.insert(&sha256, &manifest);
        }
    }
}

/// Identity and size of a model's files, as in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fleet) struct ModelIdentity {
    /// SHA-256 of the file, or of the manifest, in hexadecimal digits.
    pub(in crate::fleet) sha256: String,
    /// Length of all files.
    pub(in crate::fleet) bytes: u64,
    /// Whether it has several files.
    pub(in crate::fleet) manifest: bool,
}

/// A file of a model, and its root.
type ModelPart = (ModelName, KnownRoot);

impl ModelCopies {
    /// Identifies the model at `path`. Reads all of its files the first time.
    pub(in crate::fleet) fn identify(
        &self,
        agent: &Agent,
        path: &Path,
    ) -> Result<ModelIdentity, String> {
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let known = match self.model_of_copy(path) {
            Some(model) => Some((model.sha256.clone(), self.manifest(&model)?)),
            None => self.manifest_at(path)?,
        };
        Ok(match known {
            Some((sha256, manifest)) => ModelIdentity {
                sha256,
                bytes: manifest.bytes(),
                manifest: true,
            },
            None => ModelIdentity {
                sha256: self.sum(path).map_err(failed)?,
                bytes: self.length(agent, path).map_err(failed)?,
                manifest: false,
            },
        })
    }

    /// The model of several files whose folder of copies contains `path`.
    fn model_of_copy(&self, path: &Path) -> Option<ModelName> {
        let inside = path.strip_prefix(&self.folder).ok()?;
        let folder = Path::new(inside.components().next()?.as_os_str());
        let is_model = folder.extension().is_some_and(|ending| ending == MODEL);
        let sha256 = folder.file_stem().filter(|_| is_model)?.to_str()?;
        Some(ModelName {
            name: String::new(),
            sha256: sha256.to_owned(),
            manifest: true,
        })
    }

    /// The manifest of the user's model at `path`, and its SHA-256; `None` for a model of one file.
    /// Reads all files the first time.
    pub(super) fn manifest_at(
        &self,
        path: &Path,
    ) -> Result<Option<(String, Arc<Manifest>)>, String> {
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let Some(files) = model_files(path).map_err(failed)? else {
            return Ok(None);
        };
        let key = files.iter().map(|file| fingerprint(&file.path));
        let key: Vec<FileFingerprint> = key.collect::<Result<_, _>>().map_err(failed)?;
        let known = || {
            let models = &lock(&self.state).models;
            let sha256 = models.own.get(&key)?;
            Some((sha256.clone(), Arc::clone(models.known.get(sha256)?)))
        };
        let turn = self.turn(&path.display().to_string());
        let _turn = lock(&turn); // one thread reads the files
        if let Some(known) = known() {
            return Ok(Some(known));
        }
        let manifest = Arc::new(self.manifest_of(path, &files)?);
        let sha256 = hash_bytes(&manifest.to_bytes());
        let models = &mut lock(&self.state).models;
        models.insert(&sha256, &manifest);
        models.own.insert(key, sha256.clone());
        Ok(Some((sha256, manifest)))
    }

    /// Computes the manifest of these files. Reads all of them.
    fn manifest_of(&self, path: &Path, files: &[PartFile]) -> Result<Manifest, String> {
        let headers = headers(path, files)?;
        let (mut entries, mut inline, mut left) = (Vec::new(), BTreeMap::new(), INLINE_TOTAL_MAX);
        for (file, header) in files.iter().zip(headers) {
            let failed = |error: io::Error| format!("{}: {error}", file.path.display());
            let bytes = fs::metadata(&file.path).map_err(failed)?.len();
            let is_small = header.is_none() && bytes <= INLINE_BYTES_MAX.min(left);
            let text = is_small
                .then(|| fs::read_to_string(&file.path).ok())
                .flatten();
            if let Some(text) = text {
                left = left.saturating_sub(text.len() as u64);
                inline.insert(file.name.clone(), text);
                continue;
            }
            let sha256 = self.hash(&file.path).map_err(failed)?;
            let kept = place_in(&self.folder, &sha256, partial_file::TREE)?;
            let tree = tree_of(&file.path, &kept).map_err(failed)?;
            entries.push(ManifestFile {
                name: file.name.clone(),
                bytes: tree.groups.bytes,
                sha256,
                header: header.unwrap_or(bytes),
                root: shown(tree.root()),
            });
        }
        Manifest::new(entries, inline).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The verified manifest of a model, if it is on this machine.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub(super) fn manifest(&self, model: &ModelName) -> Result<Arc<Manifest>, String> {
        if let Some(known) = lock(&self.state).models.known.get(&model.sha256) {
            return Ok(Arc::clone(known));
        }
        let path = self.place(model, MANIFEST)?;
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(failed)?;
        let mut file = file.take(MANIFEST_BYTES_MAX + 1);
        file.read_to_end(&mut bytes).map_err(failed)?;
        if hash_bytes(&bytes) != model.sha256 {
            return Err(format!("{} is damaged", path.display()));
        }
        let manifest = Manifest::parse(&bytes);
        let manifest = manifest.map_err(|error| format!("{}: {error}", path.display()))?;
        let manifest = Arc::new(manifest);
        lock(&self.state).models.insert(&model.sha256, &manifest);
        Ok(manifest)
    }

    /// The user's model of this name, if its manifest has this SHA-256.
    fn own_model(&self, model: &ModelName) -> Result<PathBuf, String> {
        let path = self.own(&model.name)?;
        match self.manifest_at(&path)? {
            Some((sha256, _)) if sha256 == model.sha256 => Ok(path),
            Some((sha256, _)) => Err(another(&model.name, &sha256)),
            None => Err(format!(
                "the model {:?} of this machine is one file",
                model.name
            )),
        }
    }

    /// The file with this SHA-256 of the user's model at `path`, which may be its only one. The
    /// other value is the SHA-256 of the model.
    pub(super) fn own_file(
        &self,
        path: &Path,
        sha256: &str,
    ) -> Result<Result<PathBuf, String>, String> {
        let Some((own, manifest)) = self.manifest_at(path)? else {
            let own = self.hash(path);
            let own = own.map_err(|error| format!("{}: {error}", path.display()))?;
            return Ok(match own == sha256 {
                true => Ok(path.to_owned()),
                false => Err(own),
            });
        };
        let folder = if path.is_dir() {
            Some(path)
        } else {
            path.parent()
        };
        let mut files = manifest.files().iter();
        let file = files.find(|file| file.sha256 == sha256);
        let file = folder
            .zip(file)
            .map(|(folder, file)| folder.join(&file.name));
        Ok(file.ok_or(own))
    }

    /// Writes the manifest of the user's model of this name, for other nodes.
    pub(super) fn write_manifest(&self, model: &ModelName) -> Result<PathBuf, String> {
        self.own_model(model)?;
        let (manifest, path) = (self.manifest(model)?, self.place(model, MANIFEST)?);
        let written = fs::create_dir_all(&self.folder);
        let written = written.and_then(|()| write_whole(&path, &manifest.to_bytes()));
        written.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }

    /// Signs the root of a model's manifest and publishes it to the cluster.
    pub(super) fn sign_manifest(&self, agent: &Agent, model: &ModelName) -> Result<(), String> {
        self.find_file(model)?;
        if let Ok(known) = roots::of(&agent.map(), &model.sha256) {
            return known.publish(agent, &model.sha256);
        }
        let bytes = self.manifest(model)?.to_bytes();
        let header = bytes.len() as u64;
        let tree = Tree::read(&mut &*bytes, header).map_err(|error| error.to_string())?;
        let signed = FileRoot::sign(agent, &model.sha256, &tree, header)?;
        signed.publish(agent, &model.sha256)
    }

    /// The manifest with a file of this SHA-256, by its own SHA-256, and the file.
    fn part_entry(&self, sha256: &str) -> Option<(String, ManifestFile)> {
        let known = || {
            let models = &lock(&self.state).models;
            let (of, name) = models.parts.get(sha256)?;
            Some((of.clone(), models.known.get(of)?.file(name)?.clone()))
        };
        known().or_else(|| {
            for (sha256, _) in manifests_in(&self.folder) {
                // A damaged manifest is fetched again with its model.
                let _: Result<_, _> = self.manifest(&ModelName {
                    name: String::new(),
                    sha256,
                    manifest: true,
                });
            }
            known()
        })
    }

    /// SHA-256 of the manifest of a model with this file.
    pub(super) fn model_with(&self, sha256: &str) -> Option<String> {
        self.part_entry(sha256).map(|(of, _)| of)
    }

    /// The root of a file of a model of several files.
    pub(super) fn root_of_part(&self, agent: &Agent, model: &ModelName) -> Option<KnownRoot> {
        let (of, file) = self.part_entry(&model.sha256)?;
        let manifest = lock(&self.state).models.known.get(&of).cloned()?;
        Some(known_root(agent, (&of, &manifest), &file))
    }

    /// The origin of a file on the hub: its own, or by that of its model.
    pub(super) fn origin(&self, agent: &Agent, model: &ModelName) -> Option<HubOrigin> {
        if model.manifest {
            return None; // computed, so on no hub
        }
        let map = agent.map();
        let of_model = || {
            let (of, file) = self.part_entry(&model.sha256)?;
            let origin = hub::of(&map, &of)?;
            Some(HubOrigin {
                file: format!("{}{}", origin.file, file.name),
                bytes: file.bytes,
                sha256: file.sha256,
                ..origin
            })
        };
        hub::of(&map, &model.sha256).or_else(of_model)
    }

    /// The common origin on the hub of all files of the user's model at `path`. Its file is the
    /// folder of them, with a final `/` or empty.
    pub(in crate::fleet) fn model_origin(&self, sha256: &str, path: &Path) -> Option<HubOrigin> {
        let manifest = lock(&self.state).models.known.get(sha256).cloned()?;
        let folder = if path.is_dir() { path } else { path.parent()? };
        let origin = |file: &ManifestFile| {
            let origin = self.hub.as_ref()?.origin(&folder.join(&file.name))?;
            let folder = origin.file.strip_suffix(&file.name)?.to_owned();
            (origin.sha256 == file.sha256).then(|| HubOrigin {
                file: folder,
                bytes: manifest.bytes(),
                sha256: sha256.to_owned(),
                ..origin
            })
        };
        let mut origins = manifest.files().iter().map(origin);
        let first = origins.next()??;
        origins
            .all(|other| other.as_ref() == Some(&first))
            .then_some(first)
    }

    /// A model's name for people, with the file's name if it has several.
    pub(super) fn label(&self, model: &ModelName) -> String {
        match self.part_entry(&model.sha256) {
            Some((_, file)) => format!("{}: {}", model.name, file.name),
            None => model.name.clone(),
        }
    }

    /// Writes the user's name for a copy. The files of a model have none.
    pub(super) fn write_name(&self, model: &ModelName) -> io::Result<()> {
        let place = place_in(&self.folder, &model.sha256, NAME).map_err(io::Error::other)?;
        match self.part_entry(&model.sha256) {
            Some(_) => Ok(()),
            None => write_whole(&place, model.name.as_bytes()),
        }
    }

    /// The file of a model by its name in the model's folder; the model itself without a name.
    pub(super) fn file_of(&self, model: &ModelName, file: &str) -> Result<ModelName, String> {
        if file.is_empty() {
            return Ok(model.clone());
        }
        let manifest = self.manifest(model)?;
        let entry = manifest.file(file);
        let entry = entry.ok_or_else(|| format!("{} has no file {file:?}", model.name))?;
        Ok(part_name(model, entry))
    }

    /// The complete model of several files: the user's, else a folder of copies.
    pub(super) fn find_model(&self, model: &ModelName) -> Result<PathBuf, String> {
        let own = self.own_model(model);
        own.or_else(|reason| self.copy_of_model(model).map_err(|_| reason))
    }

    /// The folder of a model whose files are all complete, or the first part inside it.
    pub(super) fn copy_of_model(&self, model: &ModelName) -> Result<PathBuf, String> {
        let manifest = self.manifest(model)?;
        for file in manifest.files() {
            self.find_file(&part_name(model, file))?;
        }
        self.link(model, &manifest)
    }

    /// As [`find_part`](Self::find_part), for a model of several files; `reason` is why it is not
    /// complete.
    pub(super) fn find_partial_model(
        &self,
        agent: &Agent,
        model: &ModelName,
        reason: String,
    ) -> Result<PathBuf, String> {
        let Ok(manifest) = self.manifest(model) else {
            return Err(reason);
        };
        for (file, root) in parts(agent, model, &manifest) {
            if self.find_file(&file).is_ok() {
                let known = Some((root, None));
                self.check((agent, &file), known, CheckRange::Start, &|_| true)?;
                continue;
            }
            if !self.place(&file, partial_file::FILE)?.is_file() {
                return Err(reason);
            }
            let first = first_groups(&root, HashGroups::of(root.bytes));
            let held = self.held(agent, &file, Some((root, None)))?;
            self.fetch_groups((agent, &file), &held, &first, &|_| true)?;
        }
        self.link(model, &manifest)
    }
}

/// The manifests in a folder of copies, by SHA-256. Skips unreadable ones.
pub(in crate::fleet) fn manifests_in(folder: &Path) -> Vec<(String, Manifest)> {
    let read = |entry: fs::DirEntry| {
        let path = entry.path();
        let is_it = path.extension().is_some_and(|ending| ending == MANIFEST);
        let sha256 = path.file_stem().filter(|_| is_it)?.to_str()?.to_owned();
        let manifest = Manifest::parse(&fs::read(&path).ok()?).ok()?;
        Some((sha256, manifest))
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(read).collect()
}

/// A file of a model, as nodes request it.
fn part_name(model: &ModelName, file: &ManifestFile) -> ModelName {
    ModelName {
        name: model.name.clone(),
        sha256: file.sha256.clone(),
        manifest: false,
    }
}

/// The files of a model and their roots.
fn parts(agent: &Agent, model: &ModelName, manifest: &Manifest) -> Vec<ModelPart> {
    let part = |file: &ManifestFile| {
        let root = known_root(agent, (&model.sha256, manifest), file);
        (part_name(model, file), root)
    };
    manifest.files().iter().map(part).collect()
}

/// The root of a file, by the manifest with this SHA-256.
fn known_root(agent: &Agent, (of, manifest): (&str, &Manifest), file: &ManifestFile) -> KnownRoot {
    KnownRoot {
        bytes: file.bytes,
        header: file.header,
        root: file.root.clone(),
        weights: manifest.weights(),
        by: roots::of(&agent.map(), of).ok().map(|signed| signed.by),
    }
}

/// Bytes before the weights of each file; `None` for a file without weights.
fn headers(path: &Path, files: &[PartFile]) -> Result<Vec<Option<u64>>, String> {
    if !path.is_dir() {
        let model = Gguf::open(path).map_err(|error| error.to_string())?;
        let headers = model.contents().map(|(_, header)| Some(header as u64));
        return Ok(headers.collect());
    }
    let header = |file: &PartFile| match file.has_weights {
        true => safetensors_header(&file.path).map(Some),
        false => Ok(None),
    };
    let failed = |file: &PartFile, error| format!("{}: {error}", file.path.display());
    let all = files.iter();
    all.map(|file| header(file).map_err(|error| failed(file, error)))
        .collect()
}
