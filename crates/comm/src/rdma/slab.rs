//! Memory for messages: mapped, not from the heap (Apple's driver refuses small heap blocks, see
//! the reference in `limits`), and registered once per device, however many cables it has.

use std::ptr;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::error::RdmaError;
use super::verbs::{Adapter, Region};

/// Bytes of a page on any system this runs on: Apple silicon has 16 KiB, others divide it.
const PAGE_BYTES: usize = 16 << 10;

/// Mapped memory, zeroed, of whole pages.
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; who may touch which part of it is up to the owner.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses the address, so nothing that is in use is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        let start = start.cast();
        Ok(Self { start, bytes })
    }

    pub(crate) const fn start(&self) -> *mut u8 {
        self.start
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; regions and slots that point into it went before.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

/// Registered memory of one device, cut into equal parts for its cables.
pub(super) struct Slab {
    // Dropped in this order: no memory is unmapped while it is registered.
    region: Region,
    mapping: Mapping,
}

impl Slab {
    /// Room for `parts` of `bytes` each.
    pub(super) fn new(
        adapter: &Arc<Adapter>,
        parts: usize,
        bytes: usize,
    ) -> Result<Self, RdmaError> {
        let mapping = Mapping::new(parts * bytes).map_err(|source| RdmaError::Verb {
            device: adapter.name().to_string(),
            call: "mmap",
            operands: format!("{parts} times {bytes} bytes"),
            source,
        })?;
        // SAFETY: the mapping goes after the region.
        let region = unsafe { Region::new(adapter, mapping.start(), mapping.bytes()) }?;
        Ok(Self { region, mapping })
    }

    /// The first byte.
    pub(super) const fn start(&self) -> *mut u8 {
        self.mapping.start()
    }

    pub(super) fn key(&self) -> u32 {
        self.region.key()
    }

    pub(super) fn adapter(&self) -> &Arc<Adapter> {
        self.region.adapter()
    }
}
