//! Progress reports and cancellation of long operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use paceline_base::Bytes;

use crate::Error;
use crate::name::EntryName;

/// Receives the progress of a pull. Called from the pulling thread only.
pub trait PullProgress {
    /// The files on the hub are selected; none is downloaded yet.
    fn selected(&mut self, _model: &PullPreview) {}
    /// A part starts with `done` of `total` bytes present (`None`: size unknown). Called again if
    /// the part starts over.
    fn start(&mut self, label: &str, total: Option<u64>, done: u64);
    /// `bytes` more of the current part arrived.
    fn advance(&mut self, bytes: u64);
    /// The files in transfer, when the current part is several: an entry for each connection,
    /// with an empty label while it is idle. Called before each `start` and `advance` of the part.
    fn files(&mut self, _current: &[FileProgress]) {}
    /// A message for people.
    fn message(&mut self, text: &str);
    /// The current part ended, successfully or not.
    fn finish(&mut self);
}

/// The files that [`pull`](crate::pull()) would download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullPreview {
    pub name: EntryName,
    /// Repository and commit, as text.
    pub source: String,
    /// As the publisher has it; foreign text.
    pub licence: Option<String>,
    /// Paths in order, with sizes as far as the hub has them.
    pub files: Vec<(String, Option<Bytes>)>,
}

impl PullPreview {
    /// Total size of the files; `None` if the hub does not have all sizes.
    pub fn bytes(&self) -> Option<Bytes> {
        let all = self
            .files
            .iter()
            .map(|(_, bytes)| bytes.map(|bytes| bytes.0));
        all.sum::<Option<u64>>().map(Bytes)
    }
}

/// A file in transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileProgress {
    pub label: String,
    pub total: Option<u64>,
    /// Bytes that are present.
    pub done: u64,
}

/// Reports nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentProgress;

impl PullProgress for SilentProgress {
    fn start(&mut self, _label: &str, _total: Option<u64>, _done: u64) {}
    fn advance(&mut self, _bytes: u64) {}
    fn message(&mut self, _text: &str) {}
    fn finish(&mut self) {}
}

/// A cancellation flag, shared between threads. Long operations check it at least every 100 ms.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Uses a flag set elsewhere, such as by a signal handler.
    pub const fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Cancels the operations of all clones.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The same as an error, for `?`.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_cancelled() {
            Err(Error::Cancelled)
        } else {
            Ok(())
        }
    }
}
