//! The user's own findings: files in the folder `kb` of paceline's home.
//!
//! Files are read at every start, and one that is broken is told of and left out, so that a slip in
//! an editor takes neither the other files nor the built-in findings away. `add` checks a copy in
//! memory first and puts it in place by renaming: a bad or interrupted `add` changes nothing.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use paceline_kb::report::Added;
use paceline_kb::{Contents, FILE_BYTES_MAX, KnowledgeBase, UserFile};

use super::Error;
use crate::home;
use crate::output::{printable, tell};

/// Most files that are read; beyond this somebody mistook the folder for another.
const FILES_MAX: usize = 1000;
/// Most bytes of all files together: sixteen of the largest, half a second of reading.
const BYTES_MAX: usize = 16 * FILE_BYTES_MAX;

/// A file of the folder.
#[derive(Debug)]
struct Kept {
    name: String,
    bytes: Vec<u8>,
}

/// The built-in findings and the user's. Tells of files that are left out.
pub(super) fn load() -> KnowledgeBase {
    // Without a home there are no own findings; the built-in ones need none.
    let folder = home::home().ok().map(|home| folder(home.root()));
    let kept = folder.as_deref().map(kept_files).unwrap_or_default();
    let (kb, refused) = KnowledgeBase::with_files(&views(&kept));
    for (place, error) in refused {
        warn(&kept[place].name, &error.to_string());
    }
    kb
}

fn folder(root: &Path) -> PathBuf {
    root.join("kb")
}

fn views(kept: &[Kept]) -> Vec<UserFile<'_>> {
    kept.iter()
        .map(|file| UserFile {
            name: &file.name,
            bytes: &file.bytes,
        })
        .collect()
}

fn warn(name: &str, reason: &str) {
    let line = format!("warning: your findings in {name} are left out: {reason}");
    tell(printable(&line));
}

/// The `.toml` files of the folder, by name.
fn kept_files(folder: &Path) -> Vec<Kept> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<PathBuf> = paths.filter(|path| is_ours(path)).collect();
    paths.sort();
    let mut kept = Vec::new();
    let mut total = 0;
    for path in paths {
        let name = file_name(&path);
        match read(&path) {
            Ok(_) if kept.len() == FILES_MAX => warn(&name, "too many files"),
            Ok(bytes) if total + bytes.len() > BYTES_MAX => warn(&name, "too much together"),
            Ok(bytes) => {
                total += bytes.len();
                kept.push(Kept { name, bytes });
            }
            Err(error) => warn(&name, &format!("{error:#}")),
        }
    }
    kept
}

/// Names that begin with a dot are those of unfinished files.
fn is_ours(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
        && !file_name(path).starts_with('.')
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// At most a byte more than a file may have: enough to see that it has too many.
fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path)?.is_file() {
        return Err(Error::NotAFile { path: path.into() }.into());
    }
    let mut bytes = Vec::new();
    let limit = FILE_BYTES_MAX as u64 + 1;
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Puts the file at `path` into the knowledge base.
///
/// # Errors
/// [`Error::Invalid`] with everything that is wrong with it, [`Error::Taken`] when its name is,
/// [`Error::Orphan`] when another file rests on what it would replace, and what the system says;
/// the knowledge base is then as it was.
pub(super) fn add(path: &Path, replace: bool) -> anyhow::Result<Added> {
    let folder = folder(home::home()?.root());
    let target = folder.join(kept_name(path)?);
    let bytes = read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let name = file_name(&target);
    let kept = kept_files(&folder);
    let contents = check(&kept, &name, &bytes, path)?;
    let before = kept.iter().find(|file| file.name == name);
    let changed = before.is_none_or(|file| file.bytes != bytes);
    if changed && (before.is_some() || target.exists()) && !replace {
        return Err(Error::Taken { kept: target }.into());
    }
    if changed {
        write(&folder, &target, &bytes, replace)
            .with_context(|| format!("cannot write {}", target.display()))?;
    }
    Ok(Added {
        contents,
        path: target,
        changed,
    })
}

/// What `bytes` would bring as the file called `name`, in the place of one that has this name.
fn check(kept: &[Kept], name: &str, bytes: &[u8], path: &Path) -> Result<Contents, Error> {
    let mut views = views(kept);
    let (_, refused) = KnowledgeBase::with_files(&views);
    let broken: Vec<&str> = refused
        .iter()
        .map(|(place, _)| views[*place].name)
        .collect();
    views.retain(|file| file.name != name);
    let (kb, _) = KnowledgeBase::with_files(&views);
    let file = UserFile { name, bytes };
    let contents = kb.check(file).map_err(|source| Error::Invalid {
        path: path.into(),
        source,
    })?;
    // Replacing a file may take findings away that another one rests on.
    views.push(file);
    let (_, refused) = KnowledgeBase::with_files(&views);
    let orphan = refused
        .into_iter()
        .map(|(place, source)| (views[place].name, source))
        .find(|(name, _)| !broken.contains(name));
    match orphan {
        None => Ok(contents),
        Some((name, source)) => Err(Error::Orphan {
            name: name.to_owned(),
            source,
        }),
    }
}

/// The file's own name, with the extension that the folder is searched for.
fn kept_name(path: &Path) -> Result<String, Error> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let usable = |stem: &&str| !stem.starts_with('.') && !stem.chars().any(char::is_control);
    match stem.filter(usable) {
        Some(stem) => Ok(format!("{stem}.toml")),
        None => Err(Error::NoName { path: path.into() }),
    }
}

/// Writes beside the target, then renames, so that no reader ever sees half a file.
fn write(folder: &Path, target: &Path, bytes: &[u8], replace: bool) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    let mut temp = tempfile::Builder::new()
        .prefix(".add-")
        .tempfile_in(folder)?;
    temp.write_all(bytes)?;
    temp.as_file().sync_all()?;
    let placed = if replace {
        temp.persist(target).map(drop)
    } else {
        temp.persist_noclobber(target).map(drop)
    };
    match placed {
        // Another `add` of the same name was faster.
        Err(failed) if failed.error.kind() == ErrorKind::AlreadyExists => Err(Error::Taken {
            kept: target.into(),
        }
        .into()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_kept_under_their_own_name() {
        for (path, name) in [
            ("/tmp/own.toml", Some("own.toml")),
            ("findings.txt", Some("findings.toml")),
            ("a/b", Some("b.toml")),
            ("my findings.v2.toml", Some("my findings.v2.toml")),
            (".hidden.toml", None),
            ("/", None),
            ("..", None),
            ("a\nb.toml", None),
        ] {
            assert_eq!(kept_name(Path::new(path)).ok().as_deref(), name, "{path}");
        }
    }

    #[test]
    fn only_finished_toml_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.toml", "a.toml", ".add-1.toml", "c.txt", "toml"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        fs::create_dir(dir.path().join("d.toml")).unwrap();
        let kept = kept_files(dir.path());
        let names: Vec<&str> = kept.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["a.toml", "b.toml"]);
        assert!(kept_files(&dir.path().join("nothing")).is_empty());
    }
}
