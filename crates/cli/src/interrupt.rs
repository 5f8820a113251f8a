//! Ctrl-C and its relatives.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use paceline_store::Cancel;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// A token that the first SIGINT, SIGTERM or SIGHUP cancels; a second one ends the process with
/// code 1 at once, in case the orderly end takes too long.
pub(crate) fn cancel_on_signals() -> anyhow::Result<Cancel> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // In this order: the first signal finds the flag unset and only sets it.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&flag))
            .and_then(|_| flag::register(signal, Arc::clone(&flag)))
            .context("cannot install a signal handler")?;
    }
    Ok(Cancel::from_flag(flag))
}

/// From now on the first signal ends the process at once: for work that leaves nothing behind.
pub(crate) fn end_on_signals(cancel: &Cancel) {
    // The handler that ends the process looks at the same flag.
    cancel.cancel();
}
