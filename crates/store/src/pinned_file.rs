//! A hub file at one commit, with known hash: for nodes that need specific bytes.
//!
//! [`origin`] returns the source of a stored model, [`fetch_pinned`] downloads all of it to any
//! folder, and [`read_pinned`] reads a range. None of them writes to the store.

use std::ops::Range;
use std::path::Path;

use paceline_base::Bytes;

use crate::catalogue::Catalogue;
use crate::download::{self, DownloadSpec, PROGRESS_BYTES, PullContext, content_range, sleep};
use crate::hash::{expect_sha256, is_sha256};
use crate::http::HttpClient;
use crate::index::{self, FileRecord, State, StoreEntry};
use crate::name::{HubId, check_file_path, escape_path};
use crate::options::PullOptions;
use crate::progress::{Cancel, PullProgress};
use crate::{Error, Home};

/// A file on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedFile {
    /// `owner/name`.
    pub repo: String,
    /// A commit of 40 hexadecimal digits, or `main` if the hub named none.
    pub revision: String,
    /// Path inside the repository.
    pub file: String,
    pub bytes: u64,
    /// Its SHA-256, lower-case hex.
    pub sha256: String,
}

impl PinnedFile {
    /// Rejects values that could form another URL.
    fn check(&self) -> Result<(), Error> {
        HubId::parse(&self.repo)?;
        let bad = |reason| Error::BadHubId {
            spec: format!("{} at {}: {}", self.repo, self.revision, self.file),
            reason,
        };
        check_file_path(&self.file).map_err(bad)?;
        if !is_revision(&self.revision) {
            return Err(bad("a commit has 40 hexadecimal digits"));
        }
        if !is_sha256(&self.sha256) {
            return Err(bad("a SHA-256 has 64 hexadecimal digits"));
        }
        Ok(())
    }

    fn url(&self, client: &HttpClient) -> String {
        let Self { repo, revision, .. } = self;
        client.url(&format!(
            "{repo}/resolve/{revision}/{}",
            escape_path(&self.file)
        ))
    }
}

fn is_revision(text: &str) -> bool {
    text == "main" || (text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Source of the file of a stored model at `path`. `None` for the user's own files, and for records
/// without a repository.
pub fn origin(home: &Home, path: &Path) -> Option<PinnedFile> {
    let entries = index::list(home).ok()?.into_iter();
    let folder = |entry: &StoreEntry| home.entry_dir(&entry.name);
    let entry = entries
        .into_iter()
        .find(|entry| path.starts_with(folder(entry)))?;
    let State::Complete { source, files, .. } = &entry.state else {
        return None;
    };
    let is_it = |file: &&FileRecord| folder(&entry).join(&file.path) == path;
    let file = files.iter().find(is_it)?;
    let pinned = |repo: &str, revision: &str, path: &str| PinnedFile {
        repo: repo.to_owned(),
        revision: revision.to_owned(),
        file: path.to_owned(),
        bytes: file.bytes,
        sha256: file.sha256.clone(),
    };
    let found = match Catalogue::BUILTIN.find(entry.name.as_str()) {
        // Its wheels have the same bytes.
        Some(model) => {
            let hub = model.hub.as_ref().filter(|_| model.sha256 == file.sha256)?;
            pinned(hub.repo, hub.revision, hub.file)
        }
        None => {
            let (repo, revision) = source.strip_prefix("hub ")?.rsplit_once(" at ")?;
            pinned(repo, revision, &file.path)
        }
    };
    found.check().is_ok().then_some(found)
}

/// Downloads a file to `folder` as `name`. Resumes `NAME.partial` of an earlier call. The file gets
/// its name only after size and hash are verified.
pub fn fetch_pinned(
    pinned: &PinnedFile,
    (folder, name): (&Path, &str),
    options: &PullOptions,
    cancel: &Cancel,
    progress: &mut dyn PullProgress,
) -> Result<(), Error> {
    pinned.check()?;
    let mut client = HttpClient::new(&options.hub, &options.deadlines)?;
    let wanted = DownloadSpec {
        url: pinned.url(&client),
        dir: folder.to_owned(),
        file: name.to_owned(),
        bytes: Some(pinned.bytes),
        sha256: Some(pinned.sha256.clone()),
    };
    let mut ctx = PullContext {
        options,
        cancel,
        progress,
    };
    download::fetch(&mut client, &wanted, &mut ctx).map(drop)
}

/// Reads the bytes `span` of a file; `take` receives them in order, in chunks, until it returns
/// false. Broken connections are resumed. The bytes are *not* verified: a range has no hash of its
/// own.
///
/// # Errors
/// See [`Error`]. `take` received the bytes before the failure.
pub fn read_pinned(
    pinned: &PinnedFile,
    span: Range<u64>,
    options: &PullOptions,
    cancel: &Cancel,
    take: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<(), Error> {
    pinned.check()?;
    let mut client = HttpClient::new(&options.hub, &options.deadlines)?;
    let policy = &options.retry;
    let (mut at, mut failures) = (span.start, 0);
    while at < span.end {
        let before = at;
        let mut counted = |data: &[u8]| {
            at += data.len() as u64;
            take(data)
        };
        match read_once(&mut client, pinned, before..span.end, cancel, &mut counted) {
            Ok(()) => return Ok(()),
            Err(error) => {
                failures = if at - before >= PROGRESS_BYTES {
                    1
                } else {
                    failures + 1
                };
                if !error.is_transient() || failures >= policy.attempts {
                    return Err(error);
                }
                sleep(policy.wait(failures), cancel)?;
            }
        }
    }
    Ok(())
}

fn read_once(
    client: &mut HttpClient,
    pinned: &PinnedFile,
    span: Range<u64>,
    cancel: &Cancel,
    take: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<(), Error> {
    let url = pinned.url(client);
    let range = format!("bytes={}-{}", span.start, span.end.saturating_sub(1));
    let response = client.get(&url, &[("range", range)], cancel)?;
    client.check_status(&response, &url)?;
    if let Some(got) = &response.announced.sha256 {
        expect_sha256(&url, &pinned.sha256, got)?;
    }
    // A server without ranges sends the file from its start.
    let told = response.header("content-range").and_then(content_range);
    let (mut at, total) = match (response.status, told) {
        (206, Some((start, total))) if start == span.start => (start, total),
        (206, _) => return Err(Error::HttpStatus { url, status: 206 }),
        _ => (0, pinned.bytes),
    };
    if total != pinned.bytes {
        return Err(Error::SizeMismatch {
            what: url,
            expected: Bytes(pinned.bytes),
            got: Bytes(total),
        });
    }
    while at < span.end {
        let Some(data) = response.next(at, cancel)? else {
            return Err(Error::ConnectionLost {
                url,
                got: Bytes(at),
                cause: format!("bytes up to {} were asked for", span.end),
            });
        };
        let here = at..at + data.len() as u64;
        at = here.end;
        let (start, end) = (here.start.max(span.start), here.end.min(span.end));
        if start < end {
            let part = (start - here.start) as usize..(end - here.start) as usize;
            if !take(&data[part]) {
                return Ok(());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_become_addresses() {
        let good = PinnedFile {
            repo: "own/tiny".into(),
            revision: "0".repeat(40),
            file: "sub/tiny.gguf".into(),
            bytes: 5,
            sha256: "a".repeat(64),
        };
        assert!(good.check().is_ok());
        let with = |change: fn(&mut PinnedFile)| {
            let mut other = good.clone();
            change(&mut other);
            other.check()
        };
        let changes: [fn(&mut PinnedFile); 6] = [
            |it| it.repo = "own".into(),
            |it| it.repo = "own/../x".into(),
            |it| it.revision = "../../x".into(),
            |it| it.revision = "0".repeat(39),
            |it| it.file = "../tiny.gguf".into(),
            |it| it.sha256 = "a".into(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            assert!(
                matches!(with(change), Err(Error::BadHubId { .. })),
                "{number}"
            );
        }
        let main = PinnedFile {
            revision: "main".into(),
            ..good
        };
        assert!(main.check().is_ok());
    }
}
