//! Ctrl-C and its relatives.
//!
//! Work that leaves nothing behind ends at once, with code 1. Work that has something to put in
//! order runs inside of [`Signals::orderly`]: there the first signal only asks it to stop. A chat's
//! answer runs inside of [`Signals::stoppable`]: Ctrl-C ends it, and not the process. A second
//! signal ends the process at once in any case.

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
/// A signal asks the work to stop.
const ASKS: u8 = 1;
/// Ctrl-C asks the work to stop; other signals end the process.
const STOPS: u8 = 2;

/// The signal handlers of this process.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// Whether a signal came.
    came: Arc<AtomicBool>,
    /// Whether one other than Ctrl-C came.
    ended: Arc<AtomicBool>,
    /// The current meaning of a signal.
    meaning: Arc<AtomicU8>,
}

impl Signals {
    /// Takes over SIGINT, SIGTERM and, unless `nohup` has it ignored, SIGHUP.
    ///
    /// # Errors
    /// What the system says when it refuses a handler or a thread.
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
            // In this order: the first signal finds the flag unset and does not end the process.
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

    /// Runs `work`, which stops and puts things in order when its argument is cancelled.
    ///
    /// # Errors
    /// Those of `work`; [`Error::Cancelled`] when a signal came too late for it to notice.
    pub(crate) fn orderly<T>(
        &self,
        work: impl FnOnce(&Cancel) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.meaning.store(ASKS, Ordering::SeqCst);
        let result = work(&Cancel::from_flag(Arc::clone(&self.came)));
        self.meaning.store(ENDS, Ordering::SeqCst);
        // A signal after the line above ends the process, one before it has set `came`.
        if result.is_ok() && self.came.load(Ordering::SeqCst) {
            return Err(Error::Cancelled.into());
        }
        result
    }

    /// Runs `work`, which stops when its argument is cancelled, as Ctrl-C does; the process goes
    /// on. Other signals end the process.
    pub(crate) fn stoppable<T>(&self, work: impl FnOnce(&Cancel) -> T) -> T {
        self.meaning.store(STOPS, Ordering::SeqCst);
        let result = work(&Cancel::from_flag(Arc::clone(&self.came)));
        // In this order, and twice: a Ctrl-C that came before the end of the work ends nothing
        // else, neither the process nor the work after this.
        self.came.store(false, Ordering::SeqCst);
        self.meaning.store(ENDS, Ordering::SeqCst);
        self.came.store(false, Ordering::SeqCst);
        result
    }

    /// Ends the process on the first signal that nothing else is made of.
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
                terminal::restore();
                end_line();
                std::process::exit(1);
            }
        }
    }
}
