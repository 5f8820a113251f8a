//! The models on this node's disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use paceline_store::verified::partial_file;

use super::super::copies;
use super::super::copies::{COPY, MODEL, NAME};
use super::{Holding, OwnStore};

/// The user's models and all copies, by name.
pub(super) fn all(store: &OwnStore, folder: &Path, used: &[(String, String)]) -> Vec<Holding> {
    let mut models = (store.list)();
    for model in &mut models {
        model.is_loaded = used.iter().any(|(_, name)| *name == model.name);
    }
    let mut copies = copies_in(folder);
    for copy in &mut copies {
        let own = copy.sha256.as_ref();
        copy.is_loaded = used.iter().any(|(sha256, _)| Some(sha256) == own);
    }
    models.extend(copies);
    models.sort_by(|a, b| (&a.name, a.is_copy).cmp(&(&b.name, b.is_copy)));
    models
}

pub(super) fn copies_in(folder: &Path) -> Vec<Holding> {
    let mut found: BTreeMap<String, Holding> = BTreeMap::new();
    let (models, parts) = models_in(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let mut path = entry.path();
        if path.extension().is_some_and(|ending| ending == "partial") {
            path.set_extension(""); // a partial download from the hub
            if path.is_file() {
                continue;
            }
        }
        let is_whole = path.extension().is_some_and(|ending| ending == COPY);
        let is_part = path
            .extension()
            .is_some_and(|ending| ending == partial_file::FILE);
        let (Some(stem), Ok(facts)) = (path.file_stem(), entry.metadata()) else {
            continue;
        };
        if !is_whole && (!is_part || path.with_extension(COPY).is_file()) {
            continue;
        }
        let sha256 = stem.to_string_lossy().into_owned();
        let name = fs::read_to_string(path.with_extension(NAME));
        if name.is_err() && parts.contains(&sha256) {
            continue; // counted with its model
        }
        let copy = Holding {
            name: name.unwrap_or_else(|_| sha256.clone()),
            bytes: facts.len(),
            here_bytes: match is_whole {
                true => facts.len(),
                false => partial_file::bytes_on_disk(&entry.path()),
            },
            sha256: Some(sha256.clone()),
            is_copy: true,
            ..Holding::default()
        };
        found.insert(sha256, copy);
    }
    found.into_values().chain(models).collect()
}

/// The models of several files in a folder of copies, and the SHA-256 of their files.
pub(super) fn models_in(folder: &Path) -> (Vec<Holding>, BTreeSet<String>) {
    let mut parts = BTreeSet::new();
    let place = |sha256: &str, ending: &str| folder.join(format!("{sha256}.{ending}"));
    let mut models = Vec::new();
    for (sha256, manifest) in copies::manifests_in(folder) {
        if !place(&sha256, MODEL).is_dir() {
            continue; // the files are the user's
        }
        // A file of several models counts with the first.
        let new = manifest.files().iter();
        let new = new.filter(|file| parts.insert(file.sha256.clone()));
        let here = new.map(|file| match fs::metadata(place(&file.sha256, COPY)) {
            Ok(facts) => facts.len(),
            Err(_) => partial_file::bytes_on_disk(&place(&file.sha256, partial_file::FILE)),
        });
        let here_bytes = here.sum();
        let name = fs::read_to_string(place(&sha256, NAME));
        models.push(Holding {
            name: name.unwrap_or_else(|_| sha256.clone()),
            bytes: manifest.bytes(),
            here_bytes,
            sha256: Some(sha256),
            is_copy: true,
            ..Holding::default()
        });
    }
    (models, parts)
}
