//! How long operations report and how they are stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Error;

/// Receives what a pull is doing. Called from the pulling thread only.
pub trait Progress {
    /// A part begins: `done` of `total` bytes are there already (`None`: size unknown). A part that
    /// starts over calls this again.
    fn start(&mut self, label: &str, total: Option<u64>, done: u64);
    /// `bytes` more of the current part are there.
    fn advance(&mut self, bytes: u64);
    /// A line worth telling a person.
    fn message(&mut self, text: &str);
    /// The current part is over, well or not.
    fn finish(&mut self);
}

/// Reports nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn start(&mut self, _label: &str, _total: Option<u64>, _done: u64) {}
    fn advance(&mut self, _bytes: u64) {}
    fn message(&mut self, _text: &str) {}
    fn finish(&mut self) {}
}

/// A request to stop, shared between threads. Long operations look at it at least every 100 ms.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Uses a flag that somebody else sets, such as a signal handler.
    pub const fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Asks all holders of a clone to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked to stop.
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
