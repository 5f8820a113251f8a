//! Atomics, copies and the futex behind [`crate::ring`]. `tests/loom.rs` has another module of this
//! name, built from the model checker's types.

pub(crate) use std::ptr::copy_nonoverlapping as copy_out;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use std::time::Instant;

/// Shortest copy into a ring that bypasses the caches.
///
/// Two processes on the two cores of an EPYC VM, November 2026, all-reduce of f32, median of plain
/// and of streaming copies:
///
/// - 4 KiB: 3.3 and 2.0 us;
/// - 1 MiB: 590 and 168 us;
/// - 16 MiB: 9.8 and 2.8 ms.
///
/// At other hours lines passed quickly between the cores (the host moves them). The same three then
/// took 1.3 and 1.5 us, 215 and 190 us, 3.9 and 3.7 ms. At 1 KiB both kinds cost the same.
#[cfg(target_arch = "x86_64")]
const STREAM_BYTES: usize = 2 << 10;

/// Copies into memory that another core has read and will read next, by streaming stores.
///
/// A plain store would first fetch each line from that core, one after the other. Streaming stores
/// do not. They are complete when this returns, so that a release store after it orders them like
/// others.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_in(from: *const u8, into: *mut u8, count: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    if count < STREAM_BYTES {
        // SAFETY: the caller's promise.
        return unsafe { from.copy_to_nonoverlapping(into, count) };
    }
    let head = into.align_offset(LINE).min(count);
    let whole = (count - head) / LINE * LINE;
    // SAFETY: all offsets are at most `count`, for which the caller vouches. `into + head` is a
    // multiple of 64; streaming stores need 16. SSE2 is part of x86_64.
    unsafe {
        from.copy_to_nonoverlapping(into, head);
        for at in (head..head + whole).step_by(size_of::<__m128i>()) {
            let value = _mm_loadu_si128(from.add(at).cast());
            _mm_stream_si128(into.add(at).cast(), value);
        }
        _mm_sfence();
        let done = head + whole;
        from.add(done)
            .copy_to_nonoverlapping(into.add(done), count - done);
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use std::ptr::copy_nonoverlapping as copy_in;

/// Shortest copy between buffers that bypasses the caches. A plain copy reads every target line
/// from memory before it writes it. The C library streams only copies longer than the last cache,
/// which it takes for 320 MiB on that machine.
///
/// Two processes on an EPYC VM with a last cache of 32 MiB, November 2026, medians of three, plain
/// and streamed:
///
/// - all-to-all of 16 MiB: 4.1 and 2.5 ms; of 4 MiB: 0.61 and 0.28 ms;
/// - all-gather of 16 MiB: 3.8 and 3.3 ms;
/// - two handovers of 16 MiB, where the received data is used at once: 1.9 ms both; of 4 MiB: 0.29
///   and 0.52 ms.
const LONG_BYTES: usize = 8 << 20;

/// Copies `from` to `into`.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy(into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "bytes of two buffers");
    // SAFETY: both have `from.len()` bytes and do not overlap, since one is borrowed exclusively.
    unsafe { copy_raw(from.as_ptr(), into.as_mut_ptr(), from.len()) };
}

/// Like [`copy`], for memory to which no reference may point.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_raw(from: *const u8, into: *mut u8, count: usize) {
    if count < LONG_BYTES {
        // SAFETY: the caller's promise.
        unsafe { from.copy_to_nonoverlapping(into, count) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { copy_in(from, into, count) };
    }
}

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
    // After every outcome the caller checks again.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&timeout));
}

#[cfg(target_os = "linux")]
pub(crate) fn futex_wake(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
}

/// Elsewhere a rank naps and polls: correct, and slower to wake.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, until: Instant) {
    let left = until.saturating_duration_since(crate::deadline::now());
    if word.load(Ordering::SeqCst) == value {
        std::thread::sleep(left.min(NAP));
    }
}

/// No-op: a napping thread wakes by itself.
#[cfg(not(target_os = "linux"))]
pub(crate) fn futex_wake(_word: &AtomicU32) {}
