//! Complete copies of models from other nodes, by their users' names: models for this machine's own
//! commands too.

use std::fs;
use std::path::{Path, PathBuf};

use super::copies::{COPY, MODEL, NAME, manifests_in};

/// The complete copy in `folder` that its user calls `name`: a file, or the folder of a model of
/// several files. Reads the names of all copies.
pub fn whole_copy(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let paths = entries.map(|entry| entry.path());
    let is_named = |path: &PathBuf| {
        let is_name = path.extension().is_some_and(|ending| ending == NAME);
        is_name && fs::read_to_string(path).is_ok_and(|of| of == name)
    };
    let mut whole = paths
        .filter(is_named)
        .filter_map(|path| whole(folder, &path));
    whole.next()
}

/// The copy whose name is in the file at `path`, if it is complete.
fn whole(folder: &Path, path: &Path) -> Option<PathBuf> {
    let file = path.with_extension(COPY);
    if file.is_file() {
        return Some(file);
    }
    let (of, manifests) = (path.file_stem()?, manifests_in(folder));
    let (_, manifest) = manifests.iter().find(|(sha256, _)| **sha256 == *of)?;
    let has = |sha256: &str| folder.join(format!("{sha256}.{COPY}")).is_file();
    let is_whole = manifest.files().iter().all(|file| has(&file.sha256));
    let links = path.with_extension(MODEL);
    (is_whole && links.is_dir()).then_some(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_copy_is_found_by_its_name_and_a_partial_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("aa.name", "smollm2");
        write("aa.shard", "holes");
        assert_eq!(whole_copy(folder.path(), "smollm2"), None);
        write("aa.gguf", "GGUF");
        let found = whole_copy(folder.path(), "smollm2");
        assert_eq!(found, Some(folder.path().join("aa.gguf")));
        assert_eq!(whole_copy(folder.path(), "smollm"), None);
        assert_eq!(whole_copy(&folder.path().join("none"), "smollm2"), None);
    }
}
