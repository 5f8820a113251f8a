//! The end of a process that has opened MLX.

use std::ffi::c_int;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    /// POSIX: ends the process, and nothing that was registered for its end is run.
    fn _exit(code: c_int) -> !;
}

/// Whether this process has loaded the library.
static LOADED: AtomicBool = AtomicBool::new(false);

/// Notes that the library's exit handlers are registered.
pub(crate) fn note_loaded() {
    LOADED.store(true, Ordering::Relaxed);
}

/// Ends this process with `code`, after standard output was flushed. Exit handlers run unless this
/// process has loaded MLX: those of its CUDA build abort, and a device that hangs blocks them.
pub fn exit(code: i32) -> ! {
    // A reader that is gone does not change how the process ends.
    let _ = std::io::stdout().flush();
    if LOADED.load(Ordering::Relaxed) {
        end_process(code)
    }
    std::process::exit(code)
}

/// Ends this process at once. MLX waits for its devices when a process ends in order, and one that
/// hangs never answers.
pub fn end_process(code: i32) -> ! {
    // SAFETY: takes any number and does not return.
    unsafe { _exit(code) }
}
