//! Ctrl-C and its relatives.
//!
//! Work that leaves nothing behind ends at once, with code 1. Work that has something to put in
//! order runs inside of [`Signals::orderly`]: there the first signal only asks it to stop. A second
//! signal ends the process at once in any case.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use paceline_store::{Cancel, Error};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

use crate::output::end_line;
use crate::process;

/// The signal handlers of this process.
#[derive(Debug)]
pub(crate) struct Signals {
    /// Whether a signal came.
    came: Arc<AtomicBool>,
    /// Whether work is under way that looks at `came` itself.
    orderly: Arc<AtomicBool>,
}

impl Signals {
    /// Takes over SIGINT, SIGTERM and, unless `nohup` has it ignored, SIGHUP.
    ///
    /// # Errors
    /// What the system says when it refuses a handler or a thread.
    pub(crate) fn install() -> anyhow::Result<Self> {
        let signals = Self {
            came: Arc::default(),
            orderly: Arc::default(),
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
            pipe::register(signal, waker.try_clone()?)?;
        }
        let orderly = Arc::clone(&self.orderly);
        let builder = std::thread::Builder::new().name("signals".to_owned());
        builder.spawn(move || end_when_woken(wake, &orderly))?;
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
        self.orderly.store(true, Ordering::SeqCst);
        let result = work(&Cancel::from_flag(Arc::clone(&self.came)));
        self.orderly.store(false, Ordering::SeqCst);
        // A signal after the line above finds `orderly` unset, one before it has set `came`.
        if result.is_ok() && self.came.load(Ordering::SeqCst) {
            return Err(Error::Cancelled.into());
        }
        result
    }
}

/// Ends the process on the first signal outside of orderly work.
fn end_when_woken(mut wake: UnixStream, orderly: &AtomicBool) {
    let mut byte = [0];
    while matches!(wake.read(&mut byte), Ok(1)) {
        if !orderly.load(Ordering::SeqCst) {
            end_line();
            std::process::exit(1);
        }
    }
}
