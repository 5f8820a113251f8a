//! Registered memory: buffers that a group's devices may read and write in place.
//!
//! A buffer that is used in every step is allocated once, as [`RegisteredMemory`], and passed to
//! calls like any slice. Over RDMA (`comm-rdma`) it is registered with the devices, and payloads
//! sent from it or received into it are not copied. Over shared memory ([`shm`](crate::shm)) the
//! other processes map it, and long payloads are reduced and copied directly from it (Linux). Other
//! transports treat it like other memory. From 2 MiB on it uses huge pages, as far as available.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::{Element, Group};

/// The pages of a [`RegisteredMemory`].
#[derive(derive_more::Debug)]
#[debug("{} mapped bytes", self.bytes())]
pub struct Pages {
    mapping: Mapping,
    /// Bytes in use, from the first on.
    used: usize,
}

impl Pages {
    /// Memory of another owner, such as a device's library, to be registered with a group by
    /// [`register_pages`](Group::register_pages). Over shared memory it stays unregistered: its
    /// pages cannot be moved to a file.
    ///
    /// # Safety
    /// The memory stays mapped while the pages or a registration of them live. Nothing uses it
    /// while a call borrows it mutably.
    pub unsafe fn lent(memory: &mut [u8]) -> Arc<Self> {
        let used = memory.len();
        Arc::new(Self {
            // SAFETY: the caller's promise.
            mapping: unsafe { Mapping::lent(memory.as_mut_ptr(), used) },
            used,
        })
    }

    /// The first byte.
    pub const fn start(&self) -> *mut u8 {
        self.mapping.start()
    }

    /// Number of mapped bytes.
    pub const fn bytes(&self) -> usize {
        self.mapping.bytes()
    }

    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    pub(crate) const fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// Guard that keeps pages registered with a group.
#[derive(derive_more::Debug)]
#[debug("{_pages:?}, registered")]
pub struct MemoryRegistration {
    // Dropped in this order: no memory is unmapped while it is registered.
    _registration: Box<dyn Send + Sync>,
    _pages: Arc<Pages>,
}

impl MemoryRegistration {
    /// Keeps `registration`, which may point to `pages`, until the guard is dropped.
    pub fn new(registration: impl Send + Sync + 'static, pages: &Arc<Pages>) -> Self {
        Self {
            _registration: Box::new(registration),
            _pages: Arc::clone(pages),
        }
    }
}

/// `(n,)` elements, zeroed at first, on whole pages of their own.
pub struct RegisteredMemory<T> {
    registered: Option<MemoryRegistration>,
    pages: Arc<Pages>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> RegisteredMemory<T> {
    /// Allocates `len` elements, registered with `group` and all groups split off it, if the
    /// transport uses that.
    ///
    /// Costs one memory region on each device of this rank; Apple's devices have some 100. Over
    /// shared memory it costs a descriptor, and about a millisecond per MiB to fault its pages in.
    /// Without a free region or descriptor the memory is not registered.
    ///
    /// # Panics
    /// If the system has no memory, as for a `Vec`.
    pub fn new(group: Option<&dyn Group>, len: usize) -> Self {
        Self::with(len, |pages| group?.register_pages(pages))
    }

    /// As [`new`](Self::new), registered by the closure `register`.
    ///
    /// # Panics
    /// If the system has no memory.
    pub fn with(
        len: usize,
        register: impl FnOnce(&Arc<Pages>) -> Option<MemoryRegistration>,
    ) -> Self {
        let layout = Layout::array::<T>(len).expect("less than half of the address space");
        let mapping = Mapping::new(layout.size());
        let pages = Arc::new(Pages {
            mapping: mapping.unwrap_or_else(|_| handle_alloc_error(layout)),
            used: layout.size(),
        });
        Self {
            registered: (len > 0).then(|| register(&pages)).flatten(),
            pages,
            len,
            element: PhantomData,
        }
    }

    /// Whether devices use it in place.
    pub const fn is_registered(&self) -> bool {
        self.registered.is_some()
    }
}

impl<T: Element> Deref for RegisteredMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: mapped for `len` elements, whose every bit pattern is a value (zero is one of
        // `bool`, and calls normalise bytes of a `bool`); borrowed as `self` is. A device writes
        // only during a call that borrows it mutably.
        unsafe { slice::from_raw_parts(self.pages.start().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for RegisteredMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and pages belong to one `RegisteredMemory` only.
        unsafe { slice::from_raw_parts_mut(self.pages.start().cast(), self.len) }
    }
}

impl<T> fmt::Debug for RegisteredMemory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match &self.registered {
            Some(_) => "registered",
            None => "not registered",
        };
        write!(f, "{} elements, {how}", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local;

    #[test]
    fn memory_is_zeroed_and_its_holders() {
        let mut memory = RegisteredMemory::<f32>::new(None, 5000);
        assert!(memory.iter().all(|value| *value == 0.0));
        memory.fill(2.0);
        assert_eq!((memory.len(), memory[4999]), (5000, 2.0));
        assert_eq!(format!("{memory:?}"), "5000 elements, not registered");
        assert!(RegisteredMemory::<u8>::new(None, 0).is_empty());
        let groups = local::ranks(1);
        assert!(!RegisteredMemory::<f64>::new(Some(&groups[0]), 3).is_registered());
    }
}
