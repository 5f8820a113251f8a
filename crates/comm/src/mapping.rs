//! Memory mapped from the system: whole pages that hold nothing else.
//!
//! RDMA devices need it: Apple's driver refuses small heap blocks, see the reference in
//! `comm-rdma`. Ranks that read each other's memory profit from it. The kernel looks up every page
//! that they read, so large mappings use huge pages. Aligned cache lines on both sides copy faster
//! (figures: docs/measurements.md).
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes of a page on any supported system: Apple silicon has 16 KiB, the others divide it.
pub(crate) const PAGE_BYTES: usize = 16 << 10;

/// A huge page on x86-64, and on AArch64 with small pages of 4 KiB.
const HUGE_BYTES: usize = 2 << 20;

/// Zeroed mapped memory of whole pages. From the length of a huge page on it uses huge pages, where
/// enabled (Linux, `transparent_hugepage` not `never`).
#[derive(derive_more::Debug)]
#[debug("{} mapped bytes", self.bytes)]
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
    /// Whether something else has mapped it and unmaps it.
    is_lent: bool,
}

// SAFETY: plain memory; the owner decides which part may be touched by which thread.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes`.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        if bytes < HUGE_BYTES {
            return Self::map(bytes);
        }
        let mapping = Self::map(bytes + HUGE_BYTES)?.aligned(bytes);
        mapping.advise();
        Ok(mapping)
    }

    /// Maps `bytes` of `file` from `offset` on; whole pages.
    pub(crate) fn of(
        file: &OwnedFd,
        (offset, bytes): (usize, usize),
        access: ProtFlags,
    ) -> std::io::Result<Self> {
        let mapping = Self::new(bytes)?;
        // SAFETY: nothing uses it yet.
        unsafe { mapping.replace(file, offset, access) }?;
        Ok(mapping)
    }

    /// Replaces this memory by bytes of `file`, from `offset` on.
    ///
    /// # Errors
    /// The system's error if the mapping fails. The addresses may then be unmapped.
    ///
    /// # Safety
    /// Nothing has used this memory before the call or uses it meanwhile; after an error nothing
    /// ever does.
    pub(crate) unsafe fn replace(
        &self,
        file: &OwnedFd,
        offset: usize,
        access: ProtFlags,
    ) -> std::io::Result<()> {
        let (start, flags) = (self.start.cast(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: these addresses are this mapping's own, and by the caller's promise no reference
        // points there.
        unsafe { mmap(start, self.bytes, access, flags, file, offset as u64) }?;
        Ok(())
    }

    /// Faults the pages in before use. Collapses them to huge pages, also of a file, if available
    /// (Linux 6.1, `MADV_COLLAPSE`, refused where pages are missing).
    #[cfg(target_os = "linux")]
    pub(crate) fn populate(&self) {
        use rustix::mm::{Advice, madvise};
        // SAFETY: pages of this mapping; their contents stay. If refused, pages are faulted in on
        // use.
        let _ = unsafe { madvise(self.start.cast(), self.bytes, Advice::LinuxPopulateWrite) };
        if self.bytes >= HUGE_BYTES {
            // SAFETY: as above. If refused, the pages are small and slower.
            unsafe { libc::madvise(self.start.cast(), self.bytes, libc::MADV_COLLAPSE) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn populate(&self) {}

    /// Replaces `bytes` from `start` on, both multiples of a page, by private memory with the same
    /// contents. Works for any mapping there, shared by any other process.
    ///
    /// Aborts the process if the system refuses: it would otherwise continue with memory that
    /// another process writes to.
    ///
    /// # Safety
    /// The pages belong to one mapping, and nothing in this process uses them meanwhile.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn make_private(start: *mut u8, bytes: usize) {
        use rustix::mm::{MremapFlags, mremap_fixed};
        let Ok(copy) = Self::map(bytes) else {
            std::process::abort()
        };
        let copy = std::mem::ManuallyDrop::new(copy);
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: both have `bytes` bytes and do not overlap. The copy then moves to `start`, whose
        // pages the caller vouches for.
        let moved = unsafe {
            copy.start.copy_from_nonoverlapping(start, bytes);
            mremap_fixed(copy.start.cast(), bytes, bytes, flags, start.cast())
        };
        if moved.is_err() {
            std::process::abort()
        }
    }

    /// Other processes never write to this one's memory here.
    ///
    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    pub(crate) unsafe fn make_private(_start: *mut u8, _bytes: usize) {}

    /// Maps `bytes` in pages of the usual size, which are faulted in on use.
    pub(crate) fn map(bytes: usize) -> std::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses the address, so no used memory is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        Ok(Self {
            start: start.cast(),
            bytes,
            is_lent: false,
        })
    }

    /// The `bytes` of it from a huge page boundary on; the rest, at most one huge page, is
    /// unmapped.
    fn aligned(self, bytes: usize) -> Self {
        let before = self.start.align_offset(HUGE_BYTES);
        // SAFETY: at most a huge page from the start, which is inside.
        let start = unsafe { self.start.add(before) };
        // SAFETY: as long as all of it less `before`, which is before its end.
        let end = unsafe { start.add(bytes) };
        let whole = std::mem::ManuallyDrop::new(self);
        let part = |start, bytes| Self {
            start,
            bytes,
            is_lent: false,
        };
        drop(part(whole.start, before));
        drop(part(end, whole.bytes - before - bytes));
        part(start, bytes)
    }

    #[cfg(target_os = "linux")]
    fn advise(&self) {
        use rustix::mm::{Advice, madvise};
        // SAFETY: pages of this mapping; the advice changes how they are mapped, not their
        // contents. If refused, they are only slower.
        let _ = unsafe { madvise(self.start.cast(), self.bytes, Advice::LinuxHugepage) };
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self) {}

    /// Memory of another owner, which stays as it is. It need not be whole pages.
    ///
    /// # Safety
    /// It stays mapped while the result lives.
    pub(crate) const unsafe fn lent(start: *mut u8, bytes: usize) -> Self {
        Self {
            start,
            bytes,
            is_lent: true,
        }
    }

    pub(crate) const fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// The first byte.
    pub const fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its length: whole pages, unless it is lent.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 && !self.is_lent {
            // SAFETY: mapped with this length; everything that points into it was dropped before.
            let _ = unsafe { munmap(self.start.cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_ones_begin_at_huge_pages_and_end_at_small_ones() {
        for bytes in [0, 1, PAGE_BYTES + 1, HUGE_BYTES, 5 * HUGE_BYTES / 2 + 1] {
            let mapping = Mapping::new(bytes).unwrap();
            assert!(mapping.bytes() >= bytes.max(1), "{bytes}");
            assert_eq!(mapping.bytes() % PAGE_BYTES, 0, "{bytes}");
            let align = if bytes < HUGE_BYTES { 4096 } else { HUGE_BYTES };
            assert_eq!(mapping.start() as usize % align, 0, "{bytes}");
            // SAFETY: `bytes()` bytes are mapped, and nothing else uses them.
            let all = unsafe { std::slice::from_raw_parts_mut(mapping.start(), mapping.bytes()) };
            assert!(all.iter().all(|byte| *byte == 0), "{bytes}");
            all.fill(7);
        }
    }
}
