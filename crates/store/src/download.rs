//! Resumable download of a file from the hub.
//!
//! `FILE.partial` has the received bytes. `FILE.partial.json` identifies the source: the address
//! and the ETag. A later attempt requests the rest with `Range` and `If-Range`. A server with a
//! changed copy, or without ranges, sends the whole file; both restart the download. The file gets
//! its name only after size and hash are verified.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::hash::{Hasher, expect_sha256, hash_file};
use crate::http::{HttpClient, HubResponse};
use crate::index::{FileRecord, PARTIAL_SUFFIX};
use crate::options::PullOptions;
use crate::progress::{Cancel, PullProgress};
use crate::{Error, disk};

/// Progress that resets the count of consecutive failures: [`RetryPolicy`](crate::RetryPolicy)
/// names it.
pub(crate) const PROGRESS_BYTES: u64 = 1 << 20;

/// Fresh starts of a download after which it fails. A resumed file may be wrong once by what was on
/// the disk, and once by a copy that the server changed.
const FRESH_STARTS_MAX: u32 = 3;

/// Maximum `.partial.json`; it has an address and an ETag.
const NOTE_BYTES_MAX: u64 = 16 << 10;
/// Maximum file of unknown size. Only small text files have no size from the hub's list or the
/// server; the largest, a tokenizer.json, has some 30 MB.
const UNKNOWN_SIZE_MAX: u64 = 64 << 20;

/// Options, cancellation and progress of a pull.
pub(crate) struct PullContext<'a> {
    pub(crate) options: &'a PullOptions,
    pub(crate) cancel: &'a Cancel,
    pub(crate) progress: &'a mut dyn PullProgress,
}

#[derive(Clone, Debug)]
pub(crate) struct DownloadSpec {
    /// Address on the hub, before redirects.
    pub(crate) url: String,
    /// The model's folder.
    pub(crate) dir: PathBuf,
    /// Path inside the folder.
    pub(crate) file: String,
    /// Size and hash, if known in advance.
    pub(crate) bytes: Option<u64>,
    pub(crate) sha256: Option<String>,
}

/// Source of a partial file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PartialNote {
    url: String,
    etag: String,
}

/// Present bytes of a partial file, with their running hash.
#[derive(Debug, Default)]
struct PartialBytes {
    bytes: u64,
    hasher: Hasher,
    etag: Option<String>,
}

#[derive(Debug)]
struct AttemptFailure {
    error: Error,
    gained: u64,
    /// A resumed file was wrong and is removed; a fresh start may succeed.
    start_over: bool,
}

impl From<Error> for AttemptFailure {
    fn from(error: Error) -> Self {
        Self {
            error,
            gained: 0,
            start_over: false,
        }
    }
}

/// Downloads a file, with retries. An existing file with the right size and hash is kept.
///
/// # Errors
/// The last error of network, hub or disk. The partial file stays unless its bytes were wrong.
pub(crate) fn fetch(
    client: &mut HttpClient,
    wanted: &DownloadSpec,
    ctx: &mut PullContext<'_>,
) -> Result<FileRecord, Error> {
    if let Some(record) = already_there(wanted, ctx)? {
        return Ok(record);
    }
    let policy = &ctx.options.retry;
    let (mut failures, mut fresh_starts) = (0, 0);
    loop {
        let outcome = attempt(client, wanted, ctx);
        ctx.progress.finish();
        let failure = match outcome {
            Ok(record) => return Ok(record),
            Err(failure) => failure,
        };
        failures = if failure.gained >= PROGRESS_BYTES {
            1
        } else {
            failures + 1
        };
        // Progress resets the count of failures, so a server could ask for fresh starts for ever.
        fresh_starts += u32::from(failure.start_over);
        let is_worth_it = failure.start_over && fresh_starts < FRESH_STARTS_MAX;
        let again = is_worth_it || failure.error.is_transient();
        if !again || failures >= policy.attempts {
            return Err(failure.error);
        }
        let wait = policy.wait(failures);
        ctx.progress.message(&format!(
            "{}; trying again in {:.1} s ({failures} of {} attempts failed)",
            failure.error,
            wait.as_secs_f64(),
            policy.attempts
        ));
        sleep(wait, ctx.cancel)?;
    }
}

/// Checks for a complete file from an interrupted multi-file pull.
fn already_there(
    wanted: &DownloadSpec,
    ctx: &mut PullContext<'_>,
) -> Result<Option<FileRecord>, Error> {
    let path = wanted.dir.join(&wanted.file);
    let (Some(bytes), Some(sha256)) = (wanted.bytes, &wanted.sha256) else {
        return Ok(None);
    };
    if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file() && meta.len() == bytes) {
        return Ok(None);
    }
    ctx.progress
        .start(&format!("checking {}", wanted.file), Some(bytes), 0);
    let hashed = hash_file(&path, ctx.cancel, |n| ctx.progress.advance(n));
    ctx.progress.finish();
    let same = hashed?.1.hex() == *sha256;
    let record = || FileRecord {
        path: wanted.file.clone(),
        bytes,
        sha256: sha256.clone(),
        stamp: None,
    };
    Ok(same.then(record))
}

fn attempt(
    client: &mut HttpClient,
    wanted: &DownloadSpec,
    ctx: &mut PullContext<'_>,
) -> Result<FileRecord, AttemptFailure> {
    let partial = PartialDownload::new(wanted);
    if let Some(dir) = partial.path.parent() {
        disk::create_dir(dir)?;
    }
    let mut present = partial.open(wanted, ctx)?;
    if present.bytes > 0 && wanted.bytes.is_some_and(|bytes| present.bytes >= bytes) {
        // All bytes are present; only the final step is missing.
        return partial.accept(wanted, present, None).map_err(after_resume);
    }
    let (response, total) = ask(client, wanted, &partial, &mut present, ctx)?;
    let started_at = present.bytes;
    let announced = response.announced.sha256.clone();
    let received = receive(&response, wanted, &partial, &mut present, total, ctx);
    if received.is_err() && present.bytes == 0 {
        let _ = partial.remove(); // what says nothing is not left on a disk that is full, say
    }
    received.map_err(|error| AttemptFailure {
        gained: present.bytes - started_at,
        start_over: false,
        error,
    })?;
    let accepted = partial.accept(wanted, present, announced);
    accepted.map_err(if started_at > 0 {
        after_resume
    } else {
        AttemptFailure::from
    })
}

/// Requests the rest of the file, or all of it; returns the response with the total size. Empties
/// `present` when the server sends the file from its start.
fn ask(
    client: &mut HttpClient,
    wanted: &DownloadSpec,
    partial: &PartialDownload,
    present: &mut PartialBytes,
    ctx: &mut PullContext<'_>,
) -> Result<(HubResponse, Option<u64>), AttemptFailure> {
    let resumed = present.bytes;
    let mut headers = Vec::new();
    if let Some(etag) = present.etag.as_ref().filter(|_| resumed > 0) {
        headers.push(("range", format!("bytes={resumed}-")));
        headers.push(("if-range", etag.clone()));
    }
    let response = client.get(&wanted.url, &headers, ctx.cancel)?;
    let continues = continues(&response, present);
    // 416: the server's copy is shorter than the partial file, so it is another file. 206 with
    // another range than requested: the bytes would not fit.
    if response.status == 416 || (response.status == 206 && !continues) {
        partial.remove()?;
        let error = Error::HttpStatus {
            url: wanted.url.clone(),
            status: response.status,
        };
        return Err(AttemptFailure {
            error,
            gained: 0,
            start_over: true,
        });
    }
    client.check_status(&response, &wanted.url)?;
    let total = announced_total(&response);
    refuse_other_file(wanted, &response, total)?;
    if response.status != 206 {
        if resumed > 0 {
            ctx.progress
                .message("the server cannot go on where this file ends; starting over");
        }
        *present = PartialBytes::default();
    }
    Ok((response, total))
}

/// A wrong resumed file may have been wrong before: worth a fresh start.
fn after_resume(error: Error) -> AttemptFailure {
    let wrong = matches!(
        error,
        Error::HashMismatch { .. } | Error::SizeMismatch { .. }
    );
    AttemptFailure {
        error,
        gained: 0,
        start_over: wrong,
    }
}

/// Writes the body. On return `present` is up to date, also after errors.
fn receive(
    response: &HubResponse,
    wanted: &DownloadSpec,
    partial: &PartialDownload,
    present: &mut PartialBytes,
    total: Option<u64>,
    ctx: &mut PullContext<'_>,
) -> Result<(), Error> {
    let total = total.or(wanted.bytes);
    let limit = total.unwrap_or(UNKNOWN_SIZE_MAX);
    let to_come = |present: &PartialBytes| total.unwrap_or(0).saturating_sub(present.bytes);
    let free_space = ctx.options.free_space;
    disk::check_space(free_space, &wanted.dir, to_come(present))?;
    let file = partial.begin(wanted, response, present)?;
    let mut sink = disk::ModelFileSink {
        file,
        path: &partial.path,
        free_space,
    };
    ctx.progress.start(&wanted.file, total, present.bytes);
    while let Some(data) = response.next(present.bytes, ctx.cancel)? {
        let length = present.bytes + data.len() as u64;
        if length > limit {
            partial.remove()?;
            return Err(size_mismatch(wanted, limit, length));
        }
        sink.write(&data, to_come(present))?;
        present.hasher.update(&data);
        present.bytes = length;
        ctx.progress.advance(data.len() as u64);
    }
    sink.sync()?;
    match total {
        Some(total) if present.bytes < total => Err(Error::ConnectionLost {
            url: wanted.url.clone(),
            got: Bytes(present.bytes),
            cause: format!("{} bytes were announced", total),
        }),
        _ => Ok(()),
    }
}

/// Rejects another file by the announced hash and size, before the body is read.
fn refuse_other_file(
    wanted: &DownloadSpec,
    response: &HubResponse,
    total: Option<u64>,
) -> Result<(), Error> {
    if let (Some(expected), Some(got)) = (&wanted.sha256, &response.announced.sha256) {
        expect_sha256(&wanted.url, expected, got)?;
    }
    let announced = response.announced.bytes.into_iter().chain(total);
    match (
        wanted.bytes,
        announced.into_iter().find(|got| Some(*got) != wanted.bytes),
    ) {
        (Some(expected), Some(got)) => Err(size_mismatch(wanted, expected, got)),
        _ => Ok(()),
    }
}

fn size_mismatch(wanted: &DownloadSpec, expected: u64, got: u64) -> Error {
    Error::SizeMismatch {
        what: wanted.url.clone(),
        expected: Bytes(expected),
        got: Bytes(got),
    }
}

/// Total size, from `Content-Range` or `Content-Length`.
fn announced_total(response: &HubResponse) -> Option<u64> {
    if response.status == 206 {
        return content_range(response.header("content-range")?).map(|(_, total)| total);
    }
    response.header("content-length")?.parse().ok()
}

/// Parses `bytes` as a `content-range` and as a note, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    if let Some((start, total)) = std::str::from_utf8(bytes).ok().and_then(content_range) {
        assert!(start < total, "{start} of {total}");
    }
    let _ = serde_json::from_slice::<PartialNote>(bytes);
}

/// Start and total of `bytes START-END/TOTAL`.
pub(crate) fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.split_once('-')?;
    let (start, end, total) = (
        start.parse().ok()?,
        end.parse::<u64>().ok()?,
        total.parse().ok()?,
    );
    (start <= end && end < total).then_some((start, total))
}

/// Whether a 206 response starts exactly at the end of the partial file.
fn continues(response: &HubResponse, present: &PartialBytes) -> bool {
    let start = response
        .header("content-range")
        .and_then(content_range)
        .map(|(start, _)| start);
    let etag_kept = match (response.header("etag"), &present.etag) {
        (Some(now), Some(before)) => now == before,
        _ => true,
    };
    start == Some(present.bytes) && present.bytes > 0 && etag_kept
}

/// The partial file and its note.
#[derive(Debug)]
struct PartialDownload {
    path: PathBuf,
    note: PathBuf,
}

impl PartialDownload {
    fn new(wanted: &DownloadSpec) -> Self {
        let path = wanted.dir.join(format!("{}{PARTIAL_SUFFIX}", wanted.file));
        let note = wanted
            .dir
            .join(format!("{}{PARTIAL_SUFFIX}.json", wanted.file));
        Self { path, note }
    }

    /// Hashes the resumable bytes; none without a usable note.
    fn open(
        &self,
        wanted: &DownloadSpec,
        ctx: &mut PullContext<'_>,
    ) -> Result<PartialBytes, Error> {
        let note = read_note(&self.note).filter(|note| note.url == wanted.url);
        let length = fs::symlink_metadata(&self.path)
            .map_or(0, |meta| if meta.is_file() { meta.len() } else { 0 });
        let Some(note) = note.filter(|_| length > 0) else {
            return Ok(PartialBytes::default());
        };
        ctx.progress
            .start(&format!("checking {}", wanted.file), Some(length), 0);
        let hashed = hash_file(&self.path, ctx.cancel, |n| ctx.progress.advance(n));
        ctx.progress.finish();
        let (bytes, hasher) = hashed?;
        Ok(PartialBytes {
            bytes,
            hasher,
            etag: Some(note.etag),
        })
    }

    /// Opens the partial file for appending, emptied unless bytes are present, and writes its note.
    /// Without a strong ETag it cannot be resumed, so there is no note.
    fn begin(
        &self,
        wanted: &DownloadSpec,
        response: &HubResponse,
        present: &mut PartialBytes,
    ) -> Result<File, Error> {
        if present.bytes == 0 {
            disk::remove_file(&self.note)?;
            let strong = |etag: &&str| etag.starts_with('"') && etag.len() > 2;
            if let Some(etag) = response.header("etag").filter(strong) {
                let note = PartialNote {
                    url: wanted.url.clone(),
                    etag: etag.to_owned(),
                };
                let text = serde_json::to_vec(&note).expect("strings always serialise");
                disk::write_atomic(&self.note, &text)?;
            }
        }
        let fresh = present.bytes == 0;
        let mut options = OpenOptions::new();
        options
            .create(true)
            .write(true)
            .append(!fresh)
            .truncate(fresh);
        options
            .open(&self.path)
            .map_err(|error| Error::io("open", &self.path, error))
    }

    /// Verifies size and hash and renames the file. Wrong bytes are removed.
    fn accept(
        &self,
        wanted: &DownloadSpec,
        present: PartialBytes,
        announced: Option<String>,
    ) -> Result<FileRecord, Error> {
        let length = present.bytes;
        let sha256 = present.hasher.hex();
        let checked = match wanted.bytes {
            Some(expected) if expected != length => Err(size_mismatch(wanted, expected, length)),
            _ => match wanted.sha256.as_ref().or(announced.as_ref()) {
                Some(expected) => expect_sha256(&wanted.url, expected, &sha256),
                None => Ok(()),
            },
        };
        if let Err(error) = checked {
            self.remove()?;
            return Err(error);
        }
        disk::rename(&self.path, &wanted.dir.join(&wanted.file))?;
        disk::remove_file(&self.note)?;
        Ok(FileRecord {
            path: wanted.file.clone(),
            bytes: length,
            sha256,
            stamp: None,
        })
    }

    fn remove(&self) -> Result<(), Error> {
        disk::remove_file(&self.path)?;
        disk::remove_file(&self.note)
    }
}

fn read_note(path: &Path) -> Option<PartialNote> {
    let mut text = Vec::new();
    File::open(path)
        .ok()?
        .take(NOTE_BYTES_MAX)
        .read_to_end(&mut text)
        .ok()?;
    let note: PartialNote = serde_json::from_slice(&text).ok()?;
    // It goes into a request header.
    let legal = note.etag.bytes().all(|b| (0x20..0x7f).contains(&b));
    (legal && note.etag.starts_with('"')).then_some(note)
}

/// Sleeps unless cancelled.
pub(crate) fn sleep(wait: Duration, cancel: &Cancel) -> Result<(), Error> {
    let deadline = Instant::now() + wait;
    loop {
        cancel.check()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(Duration::from_millis(50)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        for (text, parsed) in [
            ("bytes 5-9/10", Some((5, 10))),
            ("bytes 0-0/1", Some((0, 1))),
            ("bytes 5-9/*", None),
            ("bytes */10", None),
            ("bytes 9-5/10", None),
            ("bytes 5-10/10", None),
            ("items 5-9/10", None),
            ("bytes 5-9/99999999999999999999", None),
            ("", None),
        ] {
            assert_eq!(content_range(text), parsed, "{text}");
        }
    }

    #[test]
    fn notes_that_could_smuggle_headers_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.partial.json");
        for (text, usable) in [
            (r#"{"url":"u","etag":"\"a\""}"#, true),
            (r#"{"url":"u","etag":"\"a\"\r\nx: y"}"#, false),
            (r#"{"url":"u","etag":"W/\"a\""}"#, false),
            (r#"{"url":"u"}"#, false),
            ("", false),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(read_note(&path).is_some(), usable, "{text}");
        }
    }
}
