//! Memory mapped from the system: whole pages that nothing else lies on.
//!
//! Devices want it: Apple's driver refuses small blocks of the heap, see the reference in
//! `comm-rdma`. Ranks that read each other's memory want it too. The system looks up every page
//! that they read, so large mappings are huge pages. Lines are copied faster when they are whole on
//! both sides (figures: docs/measurements.md).

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes of a page on any system this runs on: Apple silicon has 16 KiB, others divide it.
pub(crate) const PAGE_BYTES: usize = 16 << 10;

/// A huge page on x86-64, and on AArch64 with small pages of 4 KiB.
const HUGE_BYTES: usize = 2 << 20;

/// Mapped memory, zeroed, of whole pages; in huge ones from their length on, where the system has
/// them (Linux, `transparent_hugepage` not `never`).
pub struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; who may touch which part of it is up to the owner.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Room for `bytes`.
    ///
    /// # Errors
    /// What the system says when it has none.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        if bytes < HUGE_BYTES {
            return Self::map(bytes);
        }
        let mapping = Self::map(bytes + HUGE_BYTES)?.aligned(bytes);
        mapping.advise();
        Ok(mapping)
    }

    /// `bytes` of `file`, whole pages of it from `offset` on.
    ///
    /// # Errors
    /// What the system says when it does not map them.
    pub(crate) fn of(
        file: &OwnedFd,
        (offset, bytes): (usize, usize),
        access: ProtFlags,
    ) -> std::io::Result<Self> {
        let mapping = Self::new(bytes)?;
        // SAFETY: nobody else has it yet.
        unsafe { mapping.replace(file, offset, access) }?;
        Ok(mapping)
    }

    /// Puts bytes of `file`, from `offset` on, in place of this memory.
    ///
    /// # Errors
    /// What the system says when it does not map them. Then nothing may be mapped here any more.
    ///
    /// # Safety
    /// Nobody has used this memory yet, nor does meanwhile; after an error nobody ever does.
    pub(crate) unsafe fn replace(
        &self,
        file: &OwnedFd,
        offset: usize,
        access: ProtFlags,
    ) -> std::io::Result<()> {
        let (start, flags) = (self.start.cast(), MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: these addresses are this mapping's own, and by the caller's promise no reference
        // leads there.
        unsafe { mmap(start, self.bytes, access, flags, file, offset as u64) }?;
        Ok(())
    }

    /// Has the pages there before they are used. Makes huge ones of them, also of a file, as far as
    /// the system has some (Linux 6.1, `MADV_COLLAPSE`, refused where pages are missing).
    #[cfg(target_os = "linux")]
    pub(crate) fn populate(&self) {
        use rustix::mm::{Advice, madvise};
        // SAFETY: pages of this mapping; what they hold stays. Refused, pages come when they are
        // used.
        let _ = unsafe { madvise(self.start.cast(), self.bytes, Advice::LinuxPopulateWrite) };
        if self.bytes >= HUGE_BYTES {
            // SAFETY: as above. Refused, they are small, and used slower.
            unsafe { libc::madvise(self.start.cast(), self.bytes, libc::MADV_COLLAPSE) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn populate(&self) {}

    /// Puts private memory with the same contents in the place of `bytes` from `start` on, both of
    /// whole pages. It does so whatever is mapped there, and whichever other process has it mapped.
    ///
    /// Ends the process if the system cannot do that: it would go on with memory that another
    /// process writes to.
    ///
    /// # Safety
    /// These are pages of one mapping, and nobody in this process uses them meanwhile.
    #[cfg(target_os = "linux")]
    pub(crate) unsafe fn make_private(start: *mut u8, bytes: usize) {
        use rustix::mm::{MremapFlags, mremap_fixed};
        let Ok(copy) = Self::map(bytes) else {
            std::process::abort()
        };
        let copy = std::mem::ManuallyDrop::new(copy);
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: both have so many bytes, and are apart; the copy then is at `start`, whose pages
        // the caller vouches for.
        let moved = unsafe {
            copy.start.copy_from_nonoverlapping(start, bytes);
            mremap_fixed(copy.start.cast(), bytes, bytes, flags, start.cast())
        };
        if moved.is_err() {
            std::process::abort()
        }
    }

    /// No other process writes to memory of this one.
    ///
    /// # Safety
    /// None.
    #[cfg(not(target_os = "linux"))]
    pub(crate) unsafe fn make_private(_start: *mut u8, _bytes: usize) {}

    /// Room for `bytes` in pages of the usual size, of which only those that are used are there.
    ///
    /// # Errors
    /// What the system says when it has none.
    pub(crate) fn map(bytes: usize) -> std::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses the address, so nothing that is in use is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        let start = start.cast();
        Ok(Self { start, bytes })
    }

    /// The `bytes` of it that begin at a huge page; the rest, at most one such page, is given back.
    fn aligned(self, bytes: usize) -> Self {
        let before = self.start.align_offset(HUGE_BYTES);
        // SAFETY: at most a huge page from the start, which is inside.
        let start = unsafe { self.start.add(before) };
        // SAFETY: as long as all of it less `before`, which is before its end.
        let end = unsafe { start.add(bytes) };
        let whole = std::mem::ManuallyDrop::new(self);
        drop(Self {
            start: whole.start,
            bytes: before,
        });
        drop(Self {
            start: end,
            bytes: whole.bytes - before - bytes,
        });
        Self { start, bytes }
    }

    #[cfg(target_os = "linux")]
    fn advise(&self) {
        use rustix::mm::{Advice, madvise};
        // SAFETY: pages of this mapping; the advice changes how they are mapped, not what they
        // hold. Refused, they are only slower.
        let _ = unsafe { madvise(self.start.cast(), self.bytes, Advice::LinuxHugepage) };
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self) {}

    /// The first byte.
    pub const fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its length: whole pages.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mapped bytes", self.bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: mapped with this length; what points into it went before.
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
            // SAFETY: so many bytes are mapped, and nobody else has them.
            let all = unsafe { std::slice::from_raw_parts_mut(mapping.start(), mapping.bytes()) };
            assert!(all.iter().all(|byte| *byte == 0), "{bytes}");
            all.fill(7);
        }
    }
}
