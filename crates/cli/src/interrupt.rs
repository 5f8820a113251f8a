//! Handling of Ctrl-C and other signals.
//!
//! Work without cleanup ends at once, with code 1. Work with cleanup runs inside
//! [`Signals::orderly`]: the first signal only cancels it. A chat's answer runs inside
//! [`Signals::stoppable`]: Ctrl-C ends the answer, not the process. A second signal always ends the
//! process at once.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use anyhow::Context;
use paceline_store::{Cancel, Error};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

use crate::output::end_line;
use crate::{process, terminal};

/// A signal ends the process.
const ENDS: u8 = 0;
/// A signal cancels the work.
const ASKS: u8 = 1;
/// Ctrl-C cancels the work; other signals end the process.
const STOPS: u8 = 2;

/// The signal handlers of this process.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// Set by any signal.
    came: Arc<AtomicBool>,
    /// Set by signals other than Ctrl-C.
    ended: Arc<AtomicBool>,
    meaning: Arc<AtomicU8>,
}

impl Signals {
    /// Handles SIGINT, SIGTERM and, unless `nohup` ignores it, SIGHUP.
    pub(crate) fn install() -> anyhow::Result<Self> {
        let signals = Self {
            came: Arc::default(),
            ended: Arc::default(),
            meaning: Arc::default(),
        };
        signals
            .register()
            .context("cannot install a signal handler")?;
        Ok(signals)
    }

    fn register(&self) -> std::io::Result<()> {
        let (wake, waker) = UnixStream::pair()?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if signal == SIGHUP && process::ignores(signal) {
                continue;
            }
            // In this order: the first signal finds the flag unset, and does not end the process.
            flag::register_conditional_shutdown(signal, 1, Arc::clone(&self.came))?;
            flag::register(signal, Arc::clone(&self.came))?;
            if signal != SIGINT {
                flag::register(signal, Arc::clone(&self.ended))?;
            }
            pipe::register(signal, waker.try_clone()?)?;
        }
        let signals = self.clone();
        let builder = std::thread::Builder::new().name("signals".to_owned());
        builder.spawn(move || signals.end_when_woken(wake))?;
        Ok(())
    }

    /// Runs `work`, which cleans up and stops when cancelled.
    ///
    /// # Errors
    /// The errors of `work`; [`Error::Cancelled`] for a signal that came too late for it.
    pub(crate) fn orderly<T>(
        &self,
        work: impl FnOnce(&Cancel) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let before = self.meaning.swap(ASKS, Ordering::SeqCst); // as in the work around this one
        let result = work(&Cancel::from_flag(Arc::clone(&self.came)));
        self.meaning.store(before, Ordering::SeqCst);
        // A signal after the line above ends the process; an earlier one has set `came`.
        if result.is_ok() && self.came.load(Ordering::SeqCst) {
            return Err(Error::Cancelled.into());
        }
        result
    }

    /// Runs `work`, which Ctrl-C cancels; the process continues. Other signals end the process.
    pub(crate) fn stoppable<T>(&self, work: impl FnOnce(&Cancel) -> T) -> T {
        self.meaning.store(STOPS, Ordering::SeqCst);
        let result = work(&Cancel::from_flag(Arc::clone(&self.came)));
        while self.ended.load(Ordering::SeqCst) {
            // The process ends. Another line would leave the terminal in raw mode.
            std::thread::park();
        }
        // In this order, and twice: a Ctrl-C before the end of the work must end neither the
        // process nor later work.
        self.came.store(false, Ordering::SeqCst);
        self.meaning.store(ENDS, Ordering::SeqCst);
        self.came.store(false, Ordering::SeqCst);
        result
    }

    /// Ends the process on the first signal that is not handled otherwise.
    fn end_when_woken(&self, mut wake: UnixStream) {
        let mut byte = [0];
        while matches!(wake.read(&mut byte), Ok(1)) {
            let ended = self.ended.load(Ordering::SeqCst);
            let ends = match self.meaning.load(Ordering::SeqCst) {
                ASKS => false,
                STOPS => ended,
                _ => ended || self.came.load(Ordering::SeqCst),
            };
            if ends {
                end_line();
                terminal::restore();
                paceline_mlx::exit(1);
            }
        }
    }
}
