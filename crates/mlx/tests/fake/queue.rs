//! MLX on a device with a queue, while the file of `PACELINE_SLOW` exists. An evaluation waits for
//! the oldest submission and adds a byte to the file `PACELINE_SLOW_LOG`. It is `1` where another
//! submission is queued, so that the device computes while the host works, else `0`. A wait for all
//! of the queue adds `s`. All else is from the library that this one is linked with.

mod real;

use std::ffi::c_int;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use real::Handle;

/// Submissions that nobody waited for.
static QUEUED: AtomicUsize = AtomicUsize::new(0);

fn is_slow() -> bool {
    std::env::var_os("PACELINE_SLOW").is_some_and(|file| std::fs::exists(file).is_ok_and(|it| it))
}

fn note(byte: &[u8]) {
    let log = std::env::var_os("PACELINE_SLOW_LOG").unwrap();
    let log = std::fs::File::options().append(true).create(true).open(log);
    log.unwrap().write_all(byte).unwrap();
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_async_eval(arrays: Handle) -> c_int {
    if is_slow() {
        QUEUED.fetch_add(1, Ordering::Relaxed);
    }
    type Submit = extern "C" fn(Handle) -> c_int;
    let real: Submit = unsafe { std::mem::transmute(real::function(c"mlx_async_eval")) };
    real(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_eval(arrays: Handle) -> c_int {
    if is_slow() {
        // Arrays that were not submitted are, and waited for.
        let queued = QUEUED.load(Ordering::Relaxed).saturating_sub(1);
        QUEUED.store(queued, Ordering::Relaxed);
        note(if queued > 0 { b"1" } else { b"0" });
    }
    real::eval(arrays)
}

#[unsafe(no_mangle)]
pub extern "C" fn mlx_synchronize(stream: Handle) -> c_int {
    if is_slow() {
        note(b"s");
    }
    type Wait = extern "C" fn(Handle) -> c_int;
    let real: Wait = unsafe { std::mem::transmute(real::function(c"mlx_synchronize")) };
    real(stream)
}
