//! Progress reports and cancellation of long operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Error;

/// Receives the progress of a pull. Called from the pulling thread only.
pub trait PullProgress {
    /// A part starts with `done` of `total` bytes present (`None`: size unknown). Called again if
    /// the part starts over.
    fn start(&mut self, label: &str, total: Option<u64>, done: u64);
    /// `bytes` more of the current part arrived.
    fn advance(&mut self, bytes: u64);
    /// A message for people.
    fn message(&mut self, text: &str);
    /// The current part ended, successfully or not.
    fn finish(&mut self);
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
