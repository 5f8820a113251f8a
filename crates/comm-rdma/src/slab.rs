//! Slot memory: mapped, not from the heap, and registered once per device for all of its cables.

use std::sync::Arc;

use paceline_comm::provider::Mapping;

use super::error::RdmaError;
use super::verbs::{MemoryRegion, RdmaAdapter};

/// Registered memory of one device, cut into equal parts for its cables.
pub(super) struct Slab {
    // Dropped in this order: no memory is unmapped while it is registered.
    region: MemoryRegion,
    mapping: Mapping,
}

impl Slab {
    /// Allocates `parts` of `bytes` each.
    pub(super) fn new(
        adapter: &Arc<RdmaAdapter>,
        parts: usize,
        bytes: usize,
    ) -> Result<Self, RdmaError> {
        let mapping = Mapping::new(parts * bytes).map_err(|source| RdmaError::Verb {
            device: adapter.name().to_string(),
            call: "mmap",
            operands: format!("{parts} times {bytes} bytes"),
            source,
        })?;
        // SAFETY: the mapping is dropped after the region.
        let region = unsafe { MemoryRegion::new(adapter, mapping.start(), mapping.bytes()) }?;
        Ok(Self { region, mapping })
    }

    /// The first byte.
    pub(super) const fn start(&self) -> *mut u8 {
        self.mapping.start()
    }

    pub(super) fn key(&self) -> u32 {
        self.region.key()
    }

    pub(super) fn adapter(&self) -> &Arc<RdmaAdapter> {
        self.region.adapter()
    }
}
