//! Atomics, copies and the futex behind [`crate::ring`]. `tests/loom.rs` has another module of this
//! name, made of the model checker's.

pub(crate) use std::ptr::copy_nonoverlapping as copy_in;
pub(crate) use std::ptr::copy_nonoverlapping as copy_out;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use std::time::Instant;

/// Longest sleep where the system has no futex.
#[cfg(not(target_os = "linux"))]
const NAP: std::time::Duration = std::time::Duration::from_micros(50);

/// Sleeps while `word` is `value`, at most until `until`. May return early.
///
/// The futex is not private: the word may be in memory shared with other processes.
#[cfg(target_os = "linux")]
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, until: Instant) {
    use rustix::thread::futex;
    let left = until.saturating_duration_since(crate::deadline::now());
    let timeout = futex::Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // Every outcome means: look again.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&timeout));
}

/// Wakes all who sleep on `word`.
#[cfg(target_os = "linux")]
pub(crate) fn futex_wake(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

/// Elsewhere a rank naps and looks again: correct, and slower to wake.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, until: Instant) {
    let left = until.saturating_duration_since(crate::deadline::now());
    if word.load(Ordering::SeqCst) == value {
        std::thread::sleep(left.min(NAP));
    }
}

/// Whoever naps wakes up by itself.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wake(_word: &AtomicU32) {}
