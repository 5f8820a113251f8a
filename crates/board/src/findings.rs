//! The user's own findings: files in the folder `kb` of paceline's home.
//!
//! Files are read at every start. A broken file is reported and skipped, so a slip in an editor
//! removes neither the other files nor the built-in findings. `add` checks a copy in memory and
//! then renames it into place: a bad or interrupted `add` changes nothing.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use paceline_base::printable;
use paceline_kb::report::{Added, TextPage, json, show};
use paceline_kb::{
    Area, Contents, FILE_BYTES_MAX, Finding, KnowledgeBase, SearchResult, Unknown, UserFile,
};
use serde_json::Value;

/// Errors of knowledge base commands.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no finding has the id {id}")]
    NoSuchFinding { id: u32, near: Vec<u32> },
    #[error("no topic is called {name:?}")]
    NoSuchTopic { name: String, near: Vec<String> },
    #[error("{name:?} is part of the names of {} topics, need one", choices.len())]
    AmbiguousTopic { name: String, choices: Vec<String> },
    /// A query without words, or of stop words only.
    #[error("nothing to look for in {text:?}")]
    NoWords { text: String },
    #[error("{} is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{} has no name that its findings could be kept under", path.display())]
    NoName { path: PathBuf },
    /// The file is invalid by itself or with the other files.
    #[error("{} is not taken: {source}", path.display())]
    Invalid {
        path: PathBuf,
        source: paceline_kb::Error,
    },
    /// Another of the user's files refers to findings that would be removed.
    #[error("your findings in {name} would be left out then: {source}")]
    Orphan {
        name: String,
        source: paceline_kb::Error,
    },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        /// Why not.
        source: Box<Error>,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        /// Why not.
        source: Box<Error>,
    },
    #[error(transparent)]
    System(#[from] io::Error),
    #[error("{} is there already, with other findings", kept.display())]
    Taken {
        /// The file in the knowledge base's folder.
        kept: PathBuf,
    },
}

/// Maximum files to read; more means a wrong folder.
const FILES_MAX: usize = 1000;
/// Maximum bytes of all files: sixteen of the largest, half a second of parsing.
const BYTES_MAX: usize = 16 * FILE_BYTES_MAX;

/// Policy for an existing file of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictPolicy {
    /// Keeps it and rejects the new one.
    Refuse,
    Replace,
}

/// A loaded file of the folder.
#[derive(Debug)]
struct FindingsFile {
    name: String,
    bytes: Vec<u8>,
}

/// Receives a line for people.
pub type WarningSink<'a> = &'a dyn Fn(&str);

/// Loads the built-in findings and the user's below `root`. Reports skipped files.
pub fn load(root: Option<&Path>, tell: WarningSink<'_>) -> KnowledgeBase {
    // Without a home only the built-in findings are loaded.
    let folder = root.map(folder);
    let kept = folder.as_deref().map(|folder| kept_files(folder, tell));
    let kept = kept.unwrap_or_default();
    let (kb, refused) = KnowledgeBase::with_files(&views(&kept));
    for (place, error) in refused {
        warn(tell, &kept[place].name, &error.to_string());
    }
    kb
}

fn folder(root: &Path) -> PathBuf {
    root.join("kb")
}

fn views(kept: &[FindingsFile]) -> Vec<UserFile<'_>> {
    kept.iter()
        .map(|file| UserFile {
            name: &file.name,
            bytes: &file.bytes,
        })
        .collect()
}

fn warn(tell: WarningSink<'_>, name: &str, reason: &str) {
    let line = format!("warning: your findings in {name} are left out: {reason}");
    tell(&printable(&line));
}

/// The `.toml` files of the folder, by name.
fn kept_files(folder: &Path, tell: WarningSink<'_>) -> Vec<FindingsFile> {
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
            Ok(_) if kept.len() == FILES_MAX => warn(tell, &name, "too many files"),
            Ok(bytes) if total + bytes.len() > BYTES_MAX => warn(tell, &name, "too much together"),
            Ok(bytes) => {
                total += bytes.len();
                kept.push(FindingsFile { name, bytes });
            }
            Err(error) => warn(tell, &name, &crate::chain(&error)),
        }
    }
    kept
}

/// A leading dot marks an unfinished file.
fn is_ours(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
        && !file_name(path).starts_with('.')
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Reads at most one byte over the limit, enough to detect oversize.
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    // Opening a pipe would block.
    if !fs::metadata(path)?.is_file() {
        return Err(Error::NotAFile { path: path.into() });
    }
    let mut bytes = Vec::new();
    let limit = FILE_BYTES_MAX as u64 + 1;
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Maximum findings listed with an answer.
const RELATED: usize = 3;

/// Shows a skill or a topic by its name or part of it; `exists` checks linked command lines.
///
/// # Errors
/// [`Error::AmbiguousTopic`], [`Error::NoSuchTopic`].
pub fn area(
    kb: &KnowledgeBase,
    name: &str,
    exists: fn(&str) -> bool,
    page: &mut TextPage,
) -> Result<Value, Error> {
    match kb.area(name) {
        Area::Skill(skill) => {
            show::skill(kb, skill, page);
            Ok(json::skill(kb, skill))
        }
        Area::Topic(topic) => {
            show::topic(kb, topic, page);
            Ok(json::topic(kb, topic, exists))
        }
        Area::Ambiguous(topics) => Err(Error::AmbiguousTopic {
            name: name.to_owned(),
            choices: topics.iter().map(|topic| topic.slug()).collect(),
        }),
        Area::Unknown(near) => Err(Error::NoSuchTopic {
            name: name.to_owned(),
            near: near.into_iter().map(str::to_owned).collect(),
        }),
    }
}

/// The finding of this id.
pub fn finding(kb: &KnowledgeBase, id: u32) -> Result<&Finding, Error> {
    kb.finding(id).ok_or_else(|| Error::NoSuchFinding {
        id,
        near: kb.ids_near(id, 3),
    })
}

/// Shows at most `limit` findings by words. The returned lines are about unknown words.
pub fn search(
    kb: &KnowledgeBase,
    query: &str,
    limit: usize,
    page: &mut TextPage,
) -> Result<(Value, Vec<String>), Error> {
    let found = kb.search(query, limit);
    if found.n_words == 0 {
        return Err(Error::NoWords {
            text: query.to_owned(),
        });
    }
    show::search(kb, &found, page);
    Ok((json::search(kb, query, &found), notes(&found)))
}

fn notes(found: &SearchResult) -> Vec<String> {
    let note = |unknown: &Unknown| {
        let meant = match unknown.nearest.join(" or ") {
            near if near.is_empty() => String::new(),
            near => format!("; did you mean {near}?"),
        };
        let line = format!("note: no finding has the word {}{meant}", unknown.word);
        printable(&line).into_owned()
    };
    let nothing = (found.n_found == 0).then(|| "nothing found".to_owned());
    found.unknown.iter().map(note).chain(nothing).collect()
}

/// Answers a question, with related findings.
pub fn ask(kb: &KnowledgeBase, question: &str, page: &mut TextPage) -> Result<Value, Error> {
    let near = kb.search(question, RELATED);
    if near.n_words == 0 {
        return Err(Error::NoWords {
            text: question.to_owned(),
        });
    }
    let fit = kb.ask(question);
    show::ask(kb, fit, &near, page);
    Ok(json::ask(kb, question, fit, &near))
}

/// Adds the file at `path` to the knowledge base below `root`.
///
/// # Errors
/// - [`Error::Invalid`] with all errors of the file;
/// - [`Error::Taken`] for an existing name;
/// - [`Error::Orphan`] when another file refers to replaced findings;
/// - the system's errors.
///
/// An error leaves the knowledge base unchanged.
pub fn add(
    root: &Path,
    path: &Path,
    taken: ConflictPolicy,
    tell: WarningSink<'_>,
) -> Result<Added, Error> {
    let folder = folder(root);
    let target = folder.join(kept_name(path)?);
    let bytes = read(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    let name = file_name(&target);
    let kept = kept_files(&folder, tell);
    let contents = check(&kept, &name, &bytes, path)?;
    let before = kept.iter().find(|file| file.name == name);
    let changed = before.is_none_or(|file| file.bytes != bytes);
    if changed && (before.is_some() || target.exists()) && taken == ConflictPolicy::Refuse {
        return Err(Error::Taken { kept: target });
    }
    if changed {
        write(&folder, &target, &bytes, taken).map_err(|source| Error::Write {
            path: target.clone(),
            source: Box::new(source),
        })?;
    }
    Ok(Added {
        contents,
        path: target,
        changed,
    })
}

/// Checks `bytes` as the file `name`, replacing one of this name; returns its contents.
fn check(kept: &[FindingsFile], name: &str, bytes: &[u8], path: &Path) -> Result<Contents, Error> {
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
    // Replacing a file may remove findings that another refers to.
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

/// The file's name with the extension `.toml`.
fn kept_name(path: &Path) -> Result<String, Error> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let usable = |stem: &&str| !stem.starts_with('.') && !stem.chars().any(char::is_control);
    match stem.filter(usable) {
        Some(stem) => Ok(format!("{stem}.toml")),
        None => Err(Error::NoName { path: path.into() }),
    }
}

/// Writes a temporary file and renames it, so that readers never see a partial file.
fn write(folder: &Path, target: &Path, bytes: &[u8], taken: ConflictPolicy) -> Result<(), Error> {
    fs::create_dir_all(folder)?;
    let mut temp = tempfile::Builder::new()
        .prefix(".add-")
        .tempfile_in(folder)?;
    temp.write_all(bytes)?;
    temp.as_file().sync_all()?;
    let placed = if taken == ConflictPolicy::Replace {
        temp.persist(target).map(drop)
    } else {
        temp.persist_noclobber(target).map(drop)
    };
    match placed {
        // A concurrent `add` of the same name won.
        Err(failed) if failed.error.kind() == ErrorKind::AlreadyExists => Err(Error::Taken {
            kept: target.into(),
        }),
        Err(failed) => Err(failed.error.into()),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use paceline_plan::{Calibration, Catalogue};

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
        let kept = kept_files(dir.path(), &|_| {});
        let names: Vec<&str> = kept.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["a.toml", "b.toml"]);
        assert!(kept_files(&dir.path().join("nothing"), &|_| {}).is_empty());
    }

    /// The planner's assumptions that finding `id` contradicts, as text.
    fn assumed(id: u32) -> String {
        let kb = KnowledgeBase::built_in();
        let all = kb.assumptions_on(id).into_iter();
        all.map(|a| a.assumes.clone())
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn the_planner_does_assume_what_it_is_said_to() {
        let catalogue = Catalogue::builtin().unwrap();
        let link = |kind: &str| catalogue.link(kind).unwrap();
        let machine = |kind: &str| catalogue.machine(kind).unwrap();
        let calibration = Calibration::builtin().unwrap();
        let constant = |name: &str| {
            let mut all = calibration.parameters();
            all.find(|p| p.name == name).map(|p| p.value).unwrap()
        };
        let large = machine("mac-studio-m3-ultra-512");
        let [small_price, large_price] = ["mac-studio-m3-ultra-256", "mac-studio-m3-ultra-512"]
            .map(|kind| machine(kind).price_usd.unwrap());
        let dollars = |usd: f64| format!("${},{:03}", usd as u64 / 1000, usd as u64 % 1000);
        let gbit = |kind: &str| {
            let gbit = link(kind).bandwidth_gbit_s_theoretical.unwrap() as u64;
            format!("{},{:03}", gbit / 1000, gbit % 1000)
        };
        let us = |seconds: f64| (seconds * 1e6).round();
        for (id, figure) in [
            (
                306,
                format!("{} µs a message over RDMA", us(link("tb5-rdma").alpha())),
            ),
            (306, format!("{} µs over TCP", us(link("tb5-tcp").alpha()))),
            (
                306,
                format!("about {} µs with RDMA", us(constant("handover.gpu.rdma"))),
            ),
            (
                306,
                format!("{:.2} ms with sockets", constant("handover.gpu.tcp") * 1e3),
            ),
            (420, format!("{} W idle", large.idle_w.unwrap())),
            (420, format!("{} W at full load", large.load_w.unwrap())),
            (425, dollars(large_price)),
            (425, dollars(small_price)),
            (425, dollars(2.0 * (large_price + small_price))),
            (
                437,
                format!("{} and {} Gbit/s", gbit("nvlink4"), gbit("nvlink5")),
            ),
        ] {
            let text = assumed(id);
            assert!(text.contains(&figure), "{figure:?} is not in {text:?}");
        }
    }
}
