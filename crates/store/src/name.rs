//! Names: of models in the store, and of repositories on the hub.
//!
//! | name | folder in the store |
//! |---|---|
//! | `smollm2` (alias) | `smollm2` |
//! | `owner/repo` (folder of safetensors) | `owner--repo` |
//! | `owner/repo:sub/file.gguf` | `owner--repo--sub%2Ffile.gguf` |
//!
//! The mapping is invertible because neither aliases nor hub ids may have `--`. Names from the
//! command line or the network reach the file system only this way.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::Error;

/// Maximum owner or repository name, from the hub's rules.
const PART_LEN_MAX: usize = 96;
/// Maximum path of a file inside a repository.
const FILE_LEN_MAX: usize = 200;
/// Maximum file name on common file systems (ext4, APFS, XFS).
const DIR_LEN_MAX: usize = 255;

/// A repository on the hub: `owner/repo`, checked against the hub's naming rules.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{}/{}", self.owner, self.repo)]
pub struct HubId {
    owner: String,
    repo: String,
}

impl HubId {
    /// Parses `owner/repo`.
    ///
    /// # Errors
    /// [`Error::BadHubId`] names the violated rule.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = |reason| Error::BadHubId {
            spec: text.to_owned(),
            reason,
        };
        let (owner, repo) = text
            .split_once('/')
            .ok_or_else(|| bad("expected owner/name"))?;
        for part in [owner, repo] {
            check_part(part).map_err(bad)?;
        }
        Ok(Self {
            owner: owner.to_owned(),
            repo: repo.to_owned(),
        })
    }
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if part.is_empty() || part.len() > PART_LEN_MAX {
        return Err("owner and name have 1 to 96 characters");
    }
    if !part.bytes().all(legal) {
        return Err("only letters, digits, '-', '_' and '.' are allowed");
    }
    if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
        return Err("owner and name neither start nor end with '-' or '.'");
    }
    if part.contains("--") || part.contains("..") {
        return Err("'--' and '..' are not allowed");
    }
    Ok(())
}

/// Checks an untrusted relative path: plain components only, so that it stays inside a folder.
pub(crate) fn check_file_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() || path.len() > FILE_LEN_MAX {
        return Err("a file path has 1 to 200 bytes");
    }
    if path.contains(|c: char| c.is_control() || c == '\\') {
        return Err("a file path has no control characters or backslashes");
    }
    if path
        .split('/')
        .any(|part| part.is_empty() || part == "." || part == "..")
    {
        return Err("a file path is relative, without '.', '..' or empty parts");
    }
    Ok(())
}

/// Name of a model in the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryName(String);

impl EntryName {
    /// An alias of the catalogue, whose test limits aliases to `[a-z0-9.-]` without `--`.
    pub(crate) fn alias(alias: &str) -> Self {
        Self(alias.to_owned())
    }

    /// The safetensors folder of a repository.
    pub(crate) fn folder(id: &HubId) -> Self {
        Self(id.to_string())
    }

    /// A GGUF model of a repository, named by its (first) file.
    pub(crate) fn gguf(id: &HubId, file: &str) -> Result<Self, Error> {
        let name = Self(format!("{id}:{file}"));
        let bad = |reason| Error::BadHubId {
            spec: name.0.clone(),
            reason,
        };
        check_file_path(file).map_err(bad)?;
        if name.dir_name().len() > DIR_LEN_MAX {
            return Err(bad("the name is too long for a folder name"));
        }
        Ok(name)
    }

    /// The name as people type it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn hub_parts(&self) -> Option<(&str, Option<&str>)> {
        self.0.contains('/').then(|| match self.0.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (self.0.as_str(), None),
        })
    }

    /// The folder's name in the store.
    pub(crate) fn dir_name(&self) -> String {
        let Some((repo, file)) = self.hub_parts() else {
            return self.0.clone();
        };
        let mut dir = repo.replacen('/', "--", 1);
        if let Some(file) = file {
            dir.push_str("--");
            dir.extend(utf8_percent_encode(file, IN_NAME));
        }
        dir
    }

    /// The name of a folder; `None` if no name maps to it.
    pub(crate) fn from_dir_name(dir: &str) -> Option<Self> {
        let mut parts = dir.splitn(3, "--");
        let name = match (parts.next()?, parts.next(), parts.next()) {
            (alias, None, _) => Self::checked_alias(alias)?,
            (owner, Some(repo), None) => Self::folder(&hub_id(owner, repo)?),
            (owner, Some(repo), Some(file)) => {
                let file = percent_decode_str(file).decode_utf8().ok()?;
                Self::gguf(&hub_id(owner, repo)?, &file).ok()?
            }
        };
        (name.dir_name() == dir).then_some(name)
    }

    fn checked_alias(alias: &str) -> Option<Self> {
        check_part(alias).is_ok().then(|| Self::alias(alias))
    }
}

impl fmt::Display for EntryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn hub_id(owner: &str, repo: &str) -> Option<HubId> {
    HubId::parse(&format!("{owner}/{repo}")).ok()
}

/// Unreserved characters (RFC 3986, section 2.3, without `~`) stay.
const IN_NAME: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Percent-encodes a relative path for a URL, except `/`.
pub(crate) fn escape_path(path: &str) -> String {
    const IN_PATH: &AsciiSet = &IN_NAME.remove(b'/');
    utf8_percent_encode(path, IN_PATH).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hub_ids_follow_the_hubs_rules() {
        for good in ["a/b", "HuggingFaceTB/SmolLM2-135M-Instruct", "o_1/x.y-z"] {
            assert_eq!(HubId::parse(good).unwrap().to_string(), good);
        }
        let long = format!("a/{}", "x".repeat(97));
        for bad in [
            "a", "/b", "a/", "a/b/c", "../b", "a/..", "a/b..c", "a--b/c", "-a/b", "a/b.", "a b/c",
            "a/b\n", "ä/b", "a/b%2f", "a/b?x", "a/b#y", "a\\b/c", "", &long,
        ] {
            assert!(
                matches!(HubId::parse(bad), Err(Error::BadHubId { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn file_paths_stay_inside() {
        for good in ["a.gguf", "Q4/a.gguf", "a b.gguf", "..a"] {
            assert_eq!(check_file_path(good), Ok(()), "{good:?}");
        }
        for bad in [
            "", "/a", "../a", "a/../b", "a//b", "a/", ".", "a\\b", "a\0b", "a\n", "\u{9b}",
        ] {
            assert!(check_file_path(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_map_to_one_flat_folder_each() {
        let id = HubId::parse("own/repo").unwrap();
        for (name, dir) in [
            (EntryName::alias("smollm2"), "smollm2"),
            (EntryName::folder(&id), "own--repo"),
            (
                EntryName::gguf(&id, "m.Q4_1.gguf").unwrap(),
                "own--repo--m.Q4_1.gguf",
            ),
            (
                EntryName::gguf(&id, "sub/m%--x.gguf").unwrap(),
                "own--repo--sub%2Fm%25--x.gguf",
            ),
        ] {
            assert_eq!(name.dir_name(), dir);
            assert_eq!(EntryName::from_dir_name(dir), Some(name));
        }
        for foreign in [
            "..",
            ".locks",
            "a--b--..",
            "a--b--%2",
            "a--b--%2f",
            "a----b",
            "x y",
        ] {
            assert_eq!(EntryName::from_dir_name(foreign), None, "{foreign:?}");
        }
        assert!(EntryName::gguf(&id, &"x".repeat(200)).is_ok());
        assert!(EntryName::gguf(&id, &"/%".repeat(100)).is_err());
    }

    proptest! {
        #[test]
        fn any_accepted_file_round_trips(file in "\\PC{1,60}") {
            let id = HubId::parse("own/repo").unwrap();
            if let Ok(name) = EntryName::gguf(&id, &file) {
                let dir = name.dir_name();
                prop_assert!(!dir.contains('/'));
                prop_assert_eq!(EntryName::from_dir_name(&dir), Some(name));
            }
        }
    }
}
