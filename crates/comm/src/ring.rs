//! A ring buffer in memory that two ranks share: one writes, one reads, neither takes a lock.
//!
//! ```text
//! control, 256 bytes:  0 written (u64)   128 read (u64)        data: a power of two of bytes
//! ```
//!
//! `written` and `read` count all bytes ever, each stored by one side only, on its own cache line.
//! The writer copies, then stores `written` (release). The reader loads it (acquire), then copies.
//! So bytes are complete before they are visible. In the other direction, the reader's store of
//! `read` frees room. The counters may come from another process. So they are checked against the
//! size before use, and a broken peer can garble data but not reach other memory.
//!
//! `tests/loom.rs` runs this file under a model checker, with other atomics in `sync`.
//!
//! [`Bell`] handles waiting: a doorbell that the side which moved bytes rings if the other sleeps.

use crate::sync::{AtomicU32, AtomicU64, Ordering, copy_in, copy_out, fence};

/// Counters of a ring, in shared memory.
#[repr(C, align(128))]
pub(crate) struct Counters {
    written: CachePadded<AtomicU64>,
    read: CachePadded<AtomicU64>,
}

#[repr(C, align(128))]
struct CachePadded<T>(T);

#[cfg(test)]
impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            written: CachePadded(AtomicU64::new(0)),
            read: CachePadded(AtomicU64::new(0)),
        }
    }
}

pub(crate) struct Ring {
    counters: *const Counters,
    data: *mut u8,
    /// Bytes of data, a power of two.
    size: usize,
}

// SAFETY: the counters are atomic, and the protocol above separates the bytes that one side writes
// from those that the other reads, on any threads. The owner decides which thread is which side:
// see `write` and `read`.
unsafe impl Send for Ring {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ring {}

impl Ring {
    pub(crate) const COUNTER_BYTES: usize = size_of::<Counters>();

    /// A ring on this memory.
    ///
    /// # Safety
    /// `counters` and the `size` bytes of `data`, a power of two, stay valid as long as the ring.
    /// `counters` is aligned, and both were zero before the first side began.
    pub(crate) const unsafe fn new(counters: *const Counters, data: *mut u8, size: usize) -> Self {
        assert!(size.is_power_of_two());
        Self {
            counters,
            data,
            size,
        }
    }

    fn counters(&self) -> &Counters {
        // SAFETY: valid and aligned, as `new` was promised; all fields are atomic.
        unsafe { &*self.counters }
    }

    /// Bytes that can be read, and the position of the first.
    fn filled(&self) -> (usize, u64) {
        let read = self.counters().read.0.load(Ordering::Relaxed);
        let written = self.counters().written.0.load(Ordering::Acquire);
        let filled = usize::try_from(written.wrapping_sub(read)).unwrap_or(usize::MAX);
        (filled.min(self.size), read)
    }

    /// Bytes that can be written, and the position of the first.
    fn room(&self) -> (usize, u64) {
        let written = self.counters().written.0.load(Ordering::Relaxed);
        let read = self.counters().read.0.load(Ordering::Acquire);
        let filled = usize::try_from(written.wrapping_sub(read)).unwrap_or(usize::MAX);
        (self.size - filled.min(self.size), written)
    }

    /// Bytes ever written, for the writing side.
    pub(crate) fn written(&self) -> u64 {
        self.counters().written.0.load(Ordering::Relaxed)
    }

    /// Bytes ever read, for the reading side.
    pub(crate) fn taken(&self) -> u64 {
        self.counters().read.0.load(Ordering::Relaxed)
    }

    /// Whether a read would return bytes.
    pub(crate) fn is_filled(&self) -> bool {
        self.filled().0 > 0
    }

    /// Whether a write would find room.
    pub(crate) fn has_room(&self) -> bool {
        self.room().0 > 0
    }

    /// Writes as much of `head` followed by `body` as fits. Only one thread at a time may write.
    pub(crate) fn write(&self, head: &[u8], body: &[u8]) -> usize {
        let (room, start) = self.room();
        let first = head.len().min(room);
        let second = body.len().min(room - first);
        self.copy_in(start, &head[..first]);
        self.copy_in(start.wrapping_add(first as u64), &body[..second]);
        let count = first + second;
        if count > 0 {
            let written = start.wrapping_add(count as u64);
            self.counters().written.0.store(written, Ordering::Release);
        }
        count
    }

    /// Reads available bytes that fit. Only one thread at a time may read.
    pub(crate) fn read(&self, into: &mut [u8]) -> usize {
        let (filled, start) = self.filled();
        let count = filled.min(into.len());
        let (at, left) = self.place(start);
        let first = count.min(left);
        // SAFETY: `at + first` and `count - first` are at most `size`, so the source is within the
        // ring. The writer does not touch these bytes until `read` is stored below.
        unsafe {
            copy_out(self.data.add(at), into.as_mut_ptr(), first);
            copy_out(self.data, into.as_mut_ptr().add(first), count - first);
        }
        if count > 0 {
            let read = start.wrapping_add(count as u64);
            self.counters().read.0.store(read, Ordering::Release);
        }
        count
    }

    fn copy_in(&self, start: u64, bytes: &[u8]) {
        let (at, left) = self.place(start);
        let first = bytes.len().min(left);
        // SAFETY: as in `read`: within the ring, and the reader does not touch these bytes until
        // `written` is stored.
        unsafe {
            copy_in(bytes.as_ptr(), self.data.add(at), first);
            copy_in(bytes.as_ptr().add(first), self.data, bytes.len() - first);
        }
    }

    /// Offset of byte number `count`, and the bytes from there to the end of the ring.
    fn place(&self, count: u64) -> (usize, usize) {
        let at = usize::try_from(count & (self.size as u64 - 1)).unwrap_or(0);
        (at, self.size - at)
    }
}

/// Where a rank sleeps until one of its rings changes: two words in shared memory.
#[repr(C, align(128))]
pub(crate) struct Bell {
    /// Incremented by each ring of the bell.
    rung: AtomicU32,
    /// Threads that sleep or are about to.
    sleepers: AtomicU32,
    /// By lane: the rank's waiter must return even if no bytes moved.
    called: [AtomicU32; 2],
}

impl Bell {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the model checker")]
    pub(crate) fn new() -> Self {
        Self {
            rung: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            called: [AtomicU32::new(0), AtomicU32::new(0)],
        }
    }

    /// Wakes a thread that sleeps, or is about to, after bytes were moved.
    ///
    /// No wake-up is lost: both sides write, fence, and read what the other wrote. So either this
    /// side sees the sleeper, or the sleeper sees the bytes.
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
    }

    /// Wakes all threads that sleep or are about to.
    pub(crate) fn wake(&self) {
        self.rung.fetch_add(1, Ordering::SeqCst);
        crate::sync::futex_wake(&self.rung);
    }

    /// Ends the current or next sleep on both lanes.
    pub(crate) fn call(&self) {
        for called in &self.called {
            // A store would do, but loom allows an earlier swap to undo it.
            called.swap(1, Ordering::SeqCst);
        }
        self.wake();
    }

    /// Whether a waiter on `lane` was called; clears the flag.
    pub(crate) fn was_called(&self, lane: usize) -> bool {
        self.called[lane].swap(0, Ordering::SeqCst) != 0
    }

    /// Sleeps until the bell rings, unless `ready` reports work.
    pub(crate) fn sleep(&self, until: std::time::Instant, ready: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let rung = self.rung.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !ready() {
            crate::sync::futex_wait(&self.rung, rung, until);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
