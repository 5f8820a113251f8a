//! Copies of models of several files: fetched, checked and linked by their manifests.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;

use super::super::messages::Fetch;
use super::super::repair::{CheckRange, RepairReport};
use super::super::{
    CopyProgress, MANIFEST, MODEL, ModelCopies, NAME, partial_file, place_in, signed_root,
    write_whole,
};
use super::{manifests_in, part_name, parts};
use crate::fleet::manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestFile};
use crate::fleet::roots;
use crate::workers::host::ModelName;

impl ModelCopies {
    /// Verifies and repairs the copies of a model's files. The user's own files are left as they
    /// are.
    pub(in crate::fleet::copies) fn check_model(
        &self,
        (agent, model): (&Agent, &ModelName),
        extent: CheckRange<'_>,
    ) -> Result<(), String> {
        let manifest = self.manifest(model)?;
        for (file, root) in parts(agent, model, &manifest) {
            self.check((agent, &file), Some((root, None)), extent, &|_| true)?;
        }
        Ok(())
    }

    /// Fetches a model of several files, or the bytes needed to open it. Verifies and repairs
    /// existing copies. Refuses what does not fit on the disk before it fetches any file.
    pub(in crate::fleet::copies) fn fetch_model(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        fetch: &Fetch,
        told: &mut CopyProgress<'_>,
    ) -> Result<Option<RepairReport>, String> {
        let model = &fetch.model;
        if self.own_model(model).is_ok() {
            return Ok(None);
        }
        let manifest = self.fetch_manifest(agent, from, fetch)?;
        if manifest.bytes() != fetch.bytes {
            let (got, expected) = (manifest.bytes(), fetch.bytes);
            return Err(format!(
                "its manifest lists {got} bytes, expected {expected}"
            ));
        }
        self.check_quota(fetch, &manifest)?;
        let (mut before, mut mended) = (0, None);
        for (file, root) in parts(agent, model, &manifest) {
            let (label, bytes) = (self.label(&file), root.bytes);
            let part = Fetch {
                model: file,
                bytes,
                asks: false,
                share: 0,
                rooted: None,
                ..*fetch
            };
            let mut done = 0;
            let mut told = |bytes: u64| {
                done = bytes;
                told(before + bytes)
            };
            let known = (Ok(Some(root)), from);
            let fetched = self.fetch_file(agent, known, &part, &mut told);
            let repaired = fetched.map_err(|reason| format!("{label}: {reason}"))?;
            before += if fetch.parts { done } else { bytes };
            mended = joined(mended, repaired);
        }
        self.link(model, &manifest).map(|_| mended)
    }

    /// The manifest of a model, fetched if it is missing or damaged.
    fn fetch_manifest(
        &self,
        agent: &Agent,
        from: Option<NodeId>,
        fetch: &Fetch,
    ) -> Result<Arc<Manifest>, String> {
        if let Ok(manifest) = self.manifest(&fetch.model) {
            return Ok(manifest);
        }
        let (sha256, rooted) = (&fetch.model.sha256, fetch.rooted.clone());
        let signed = rooted.or_else(|| roots::of(&agent.map(), sha256).ok());
        let bytes = signed.map_or(MANIFEST_BYTES_MAX, |signed| signed.bytes);
        if bytes > MANIFEST_BYTES_MAX {
            return Err(format!(
                "a manifest of {bytes} bytes, {MANIFEST_BYTES_MAX} are the most"
            ));
        }
        let whole = Fetch {
            model: fetch.model.clone(),
            bytes,
            asks: false,
            parts: false,
            share: 0,
            rooted: fetch.rooted.clone(),
            checks: true,
        };
        let known = (signed_root(agent, &whole), from);
        self.fetch_file(agent, known, &whole, &mut |_| Ok(()))?;
        lock(&self.state).parts.remove(sha256);
        for file in partial_file::files_of(&self.place(&fetch.model, partial_file::FILE)?) {
            let _: io::Result<()> = fs::remove_file(file); // a leftover only takes space
        }
        self.manifest(&fetch.model)
    }

    /// Checks whether the disk takes the missing bytes of all files, or of this node's share.
    fn check_quota(&self, fetch: &Fetch, manifest: &Manifest) -> Result<(), String> {
        let missing = |file: &ManifestFile| {
            let part = part_name(&fetch.model, file);
            if self.find_file(&part).is_ok() {
                return 0;
            }
            let path = self.place(&part, partial_file::FILE);
            let here = path.map_or(0, |path| partial_file::bytes_on_disk(&path));
            file.bytes.saturating_sub(here)
        };
        let missing: u64 = manifest.files().iter().map(missing).sum();
        match (fetch.parts, missing) {
            (_, 0) => Ok(()),
            (true, _) => self.check_share(fetch, manifest.bytes() - missing),
            (false, _) => (self.may_have)(missing),
        }
    }

    /// Brings the folder of a model up to date: inline files, and a link to each complete or
    /// partial file. Returns the path by which the model is opened.
    pub(super) fn link(&self, model: &ModelName, manifest: &Manifest) -> Result<PathBuf, String> {
        let turn = self.turn(&model.sha256);
        let _turn = lock(&turn);
        let folder = self.place(model, MODEL)?;
        for (name, text) in manifest.inline() {
            let path = folder.join(name);
            let written = write_inline(&path, text);
            written.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        for file in manifest.files() {
            let path = folder.join(&file.name);
            let linked = self.link_file(model, file, &path);
            linked.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        if !self.place(model, NAME)?.is_file() && !model.name.is_empty() {
            let named = self.write_name(model);
            named.map_err(|error| format!("{}: {error}", folder.display()))?;
        }
        Ok(match manifest.first_part() {
            Some(part) => folder.join(part),
            None => folder,
        })
    }

    fn link_file(&self, model: &ModelName, file: &ManifestFile, path: &Path) -> io::Result<()> {
        let part = part_name(model, file);
        let place = match self.find_file(&part) {
            Ok(whole) => whole,
            Err(_) => self
                .place(&part, partial_file::FILE)
                .map_err(io::Error::other)?,
        };
        let target = match place.strip_prefix(&self.folder) {
            // Relative, so that the folder of copies can be moved.
            Ok(name) => {
                let ups = "../".repeat(1 + file.name.matches('/').count());
                Path::new(&ups).join(name)
            }
            Err(_) => place,
        };
        if fs::read_link(path).is_ok_and(|known| known == target) {
            return Ok(());
        }
        let new = new_path(path)?;
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(&target, &new)?;
        fs::rename(&new, path)
    }

    /// Removes the folder and the manifest of a model of several files, and the copies of files
    /// that no other model has. Returns the bytes freed.
    pub(in crate::fleet::copies) fn forget_model(&self, sha256: &str) -> io::Result<u64> {
        let place = |sha256: &str, ending| {
            let place = place_in(&self.folder, sha256, ending);
            place.map_err(io::Error::other)
        };
        let (folder, manifest) = (place(sha256, MODEL)?, place(sha256, MANIFEST)?);
        let (own, mut others) =
            (manifests_in(&self.folder).into_iter()).partition::<Vec<_>, _>(|(of, _)| of == sha256);
        others.retain(|(of, _)| place(of, MODEL).is_ok_and(|folder| folder.is_dir()));
        let is_used = |file: &&ManifestFile| {
            let has = |(_, other): &(String, Manifest)| other.has(&file.sha256);
            let is_named = place(&file.sha256, NAME).is_ok_and(|name| name.is_file());
            is_named || others.iter().any(has)
        };
        let own = own.iter().flat_map(|(_, own)| own.files());
        let mut freed = 0;
        for file in own.filter(|file| !is_used(file)) {
            freed += self.forget_file(&file.sha256)?;
        }
        for removed in [fs::remove_dir_all(&folder), fs::remove_file(&manifest)] {
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        lock(&self.state).models.remove(sha256);
        Ok(freed)
    }
}

pub(super) fn joined(one: Option<RepairReport>, two: Option<RepairReport>) -> Option<RepairReport> {
    match (one, two) {
        (Some(one), Some(two)) => Some(RepairReport {
            blocks: one.blocks + two.blocks,
            bytes: one.bytes + two.bytes,
        }),
        (one, two) => one.or(two),
    }
}

/// A path next to `path`, in a folder that exists.
pub(super) fn new_path(path: &Path) -> io::Result<PathBuf> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    Ok(new.into())
}

/// Writes an inline file, unless it is there.
pub(super) fn write_inline(path: &Path, text: &str) -> io::Result<()> {
    let is_there = fs::metadata(path).is_ok_and(|facts| facts.size() == text.len() as u64)
        && fs::read(path).is_ok_and(|known| known == text.as_bytes());
    if is_there {
        return Ok(());
    }
    new_path(path)?;
    write_whole(path, text.as_bytes())
}
