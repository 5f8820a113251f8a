//! Registered memory of callers, which devices read and write in place.
//!
//! A send from registered memory is posted from there: the head from a slot, the body in place. The
//! call that sends does not end before the peer has the bytes, so the caller can reuse them at
//! once. Memory registered by a group also serves the groups split off it: they have the same
//! devices.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::error::RdmaError;
use super::verbs::{MemoryRegion, RdmaAdapter};

/// The registered memory of a process, for all senders.
#[derive(Default)]
pub(super) struct Registry(RwLock<Vec<Arc<RegisteredRange>>>);

/// A range of memory, registered with every device of a rank.
struct RegisteredRange {
    start: usize,
    bytes: usize,
    regions: Vec<MemoryRegion>,
}

impl Registry {
    /// The memory key of these bytes at `adapter`, if they are registered.
    pub(super) fn key(&self, adapter: &Arc<RdmaAdapter>, bytes: &[u8]) -> Option<u32> {
        let start = bytes.as_ptr() as usize;
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let all = known.iter().flat_map(|registered| &registered.regions);
        let mut own = all.filter(|region| Arc::ptr_eq(region.adapter(), adapter));
        own.find(|region| region.holds(start, bytes.len()))
            .map(MemoryRegion::key)
    }

    /// # Safety
    /// The memory stays mapped until the result is removed.
    unsafe fn add(
        &self,
        adapters: &[Arc<RdmaAdapter>],
        start: *mut u8,
        bytes: usize,
    ) -> Result<Arc<RegisteredRange>, RdmaError> {
        // SAFETY: the caller's promise.
        let region = |adapter| unsafe { MemoryRegion::new(adapter, start, bytes) };
        let registered = Arc::new(RegisteredRange {
            start: start as usize,
            bytes,
            regions: adapters.iter().map(region).collect::<Result<_, _>>()?,
        });
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.push(Arc::clone(&registered));
        Ok(registered)
    }

    fn remove(&self, registered: &Arc<RegisteredRange>) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|one| !Arc::ptr_eq(one, registered));
    }
}

/// Guard of caller's memory that devices may read.
pub struct Registration {
    registered: Arc<RegisteredRange>,
    registry: Arc<Registry>,
}

impl Registration {
    /// # Safety
    /// As [`Rdma::register`](super::Rdma::register).
    pub(super) unsafe fn new(
        registry: &Arc<Registry>,
        adapters: &[Arc<RdmaAdapter>],
        start: *mut u8,
        bytes: usize,
    ) -> Result<Self, RdmaError> {
        // SAFETY: the caller's promise; it is removed below.
        let registered = unsafe { registry.add(adapters, start, bytes) }?;
        let registry = Arc::clone(registry);
        Ok(Self {
            registered,
            registry,
        })
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RegisteredRange { start, bytes, .. } = &*self.registered;
        write!(f, "{bytes} registered bytes at {start:#x}")
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.remove(&self.registered);
    }
}
