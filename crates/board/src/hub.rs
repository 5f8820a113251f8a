//! Fetches bytes that no node of the cluster has from the hub, by the store's downloads but without
//! a store entry.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use paceline_base::CallbackError;
use paceline_node::fleet::{ByteSink, FetchProgress, HubOrigin, ModelHub};
use paceline_store::{
    Cancel, Home, PinnedFile, PullOptions, PullProgress, fetch_pinned, origin, read_pinned,
};

use crate::{MessageSink, chain};

/// Read timeout of the hub within a range. A worker waits for 60 s in all, and other nodes may have
/// used 13 s of them.
const STALL: Duration = Duration::from_secs(10);

/// Maximum attempts in a row at a range, for the same reason.
const ATTEMPTS: u32 = 2;

/// The hub with this machine's settings.
pub(crate) struct StoreHub {
    pub(crate) home: Home,
    pub(crate) options: PullOptions,
    /// Receives failed attempts.
    pub(crate) tell: MessageSink,
}

impl ModelHub for StoreHub {
    fn origin(&self, path: &Path) -> Option<HubOrigin> {
        let PinnedFile {
            repo,
            revision,
            file,
            bytes,
            sha256,
        } = origin(&self.home, path)?;
        Some(HubOrigin {
            repo,
            revision,
            file,
            bytes,
            sha256,
        })
    }

    fn whole(
        &self,
        origin: &HubOrigin,
        path: &Path,
        came: &FetchProgress<'_>,
    ) -> Result<(), CallbackError> {
        let parts = (
            path.parent(),
            path.file_name().and_then(|name| name.to_str()),
        );
        let (Some(folder), Some(name)) = parts else {
            return Err(format!("{}: no place for a file", path.display()).into());
        };
        let cancel = Cancel::default();
        let mut heard = RangeProgress {
            name,
            counts: false,
            at: 0,
            told: 0,
            came,
            cancel: &cancel,
            tell: &self.tell,
        };
        let (pinned, to) = (pinned(origin), (folder, name));
        let fetched = fetch_pinned(&pinned, to, &self.options, &cancel, &mut heard);
        fetched.map_err(|error| chain(&error).into())
    }

    fn read(
        &self,
        origin: &HubOrigin,
        span: Range<u64>,
        take: &mut ByteSink<'_>,
    ) -> Result<(), CallbackError> {
        let (pinned, cancel) = (pinned(origin), Cancel::default());
        let mut options = self.options.clone();
        options.deadlines.stall = options.deadlines.stall.min(STALL);
        options.retry.attempts = options.retry.attempts.min(ATTEMPTS);
        let read = read_pinned(&pinned, span, &options, &cancel, take);
        read.map_err(|error| chain(&error).into())
    }
}

fn pinned(origin: &HubOrigin) -> PinnedFile {
    let HubOrigin {
        repo,
        revision,
        file,
        bytes,
        sha256,
    } = origin.clone();
    PinnedFile {
        repo,
        revision,
        file,
        bytes,
        sha256,
    }
}

/// Reports a download's bytes, and cancels it once nobody waits for it.
struct RangeProgress<'a> {
    /// The file's name.
    name: &'a str,
    /// Whether the file's bytes arrive now; else existing bytes are hashed.
    counts: bool,
    /// Current offset.
    at: u64,
    /// Reported bytes; a retry begins before them.
    told: u64,
    came: &'a FetchProgress<'a>,
    cancel: &'a Cancel,
    tell: &'a MessageSink,
}

impl PullProgress for RangeProgress<'_> {
    fn start(&mut self, label: &str, _: Option<u64>, done: u64) {
        self.counts = label == self.name;
        self.at = 0;
        if self.counts {
            self.advance(done);
        }
    }

    fn advance(&mut self, bytes: u64) {
        self.at += if self.counts { bytes } else { 0 };
        let new = self.at.saturating_sub(self.told);
        self.told += new;
        if !(self.came)(new) {
            self.cancel.cancel();
        }
    }

    fn message(&mut self, text: &str) {
        (self.tell)(&format!("hub: {text}"));
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn bytes_are_counted_once_and_nobody_who_waits_ends_the_download() {
        let (sum, cancel) = (AtomicU64::new(0), Cancel::default());
        let came = |bytes: u64| sum.fetch_add(bytes, Ordering::Relaxed) + bytes < 100;
        let tell: MessageSink = Arc::new(|_| {});
        let mut heard = RangeProgress {
            name: "x.gguf",
            counts: false,
            at: 0,
            told: 0,
            came: &came,
            cancel: &cancel,
            tell: &tell,
        };
        heard.start("checking x.gguf", Some(60), 0);
        heard.advance(60);
        assert_eq!(sum.load(Ordering::Relaxed), 0, "they came before");
        heard.start("x.gguf", Some(100), 60);
        heard.advance(39);
        heard.finish();
        heard.start("x.gguf", Some(100), 99);
        assert_eq!(sum.load(Ordering::Relaxed), 99, "by an earlier attempt");
        assert!(!cancel.is_cancelled());
        heard.advance(1);
        assert_eq!(sum.load(Ordering::Relaxed), 100);
        assert!(cancel.is_cancelled());
    }
}
