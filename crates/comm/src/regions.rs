//! Memory of a process that others of this machine map, to use what is lent from it (`loan`) where
//! it lies: no copy on the way, and no call of the system.
//!
//! ```text
//! file:  data, whole pages   then a page:  0 check word   8 ended
//! ```
//!
//! A [`Memory`](crate::Memory) of a group over shared memory lies in such a file; which it is,
//! every group of the process can [`find`] by an address. A peer maps the file when something in it
//! is first lent to it, to read only, and only if nobody can cut it short. The owner marks it as
//! ended when the memory goes; peers look for that mark now and then and let go of the pages.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::ProtFlags;

use crate::file::File;
use crate::loan::{LOAN_BYTES, Place};
use crate::mapping::{Mapping, PAGE_BYTES};
use crate::{Pages, Registered};

/// Shortest memory that is shared, and shortest payload that is lent from it.
pub(crate) const SHARED_BYTES: usize = if cfg!(test) { LOAN_BYTES } else { 256 << 10 };

/// Most files of a process, each a descriptor of the 1024 that are usual, and most that a rank maps
/// of one peer.
const MOST: usize = 64;

/// The last page of a file.
#[repr(C)]
struct Tail {
    check: AtomicU64,
    ended: AtomicU64,
}

/// Where the files of this process are mapped: first address, bytes, and what a peer has to know.
static REGIONS: Mutex<BTreeMap<usize, (usize, Place)>> = Mutex::new(BTreeMap::new());

fn regions() -> MutexGuard<'static, BTreeMap<usize, (usize, Place)>> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file of this process, while its memory lives.
struct Region {
    start: usize,
    tail: Mapping,
    _file: File,
}

impl Drop for Region {
    fn drop(&mut self) {
        regions().remove(&self.start);
        tail(&self.tail, 0).ended.store(1, Ordering::Release);
    }
}

/// The tail of a file, at `offset` of a mapping.
fn tail(mapping: &Mapping, offset: usize) -> &Tail {
    assert!(offset.is_multiple_of(PAGE_BYTES) && offset + PAGE_BYTES <= mapping.bytes());
    // SAFETY: inside of the mapping and aligned; a tail consists of atomics, for which every value
    // is one.
    unsafe { &*mapping.start().add(offset).cast() }
}

/// Moves `pages`, which nobody has used yet, to a file that peers can map; `None` if they are few,
/// or the system has no such files to give.
///
/// # Panics
/// If the system has no memory left in between.
pub(crate) fn share(pages: &Arc<Pages>) -> Option<Registered> {
    let (start, bytes) = (pages.start() as usize, pages.bytes());
    if bytes < SHARED_BYTES || regions().len() >= MOST {
        return None;
    }
    let file = File::new((bytes + PAGE_BYTES) as u64).ok()?;
    let descriptor = file.descriptor()?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let last = Mapping::of(&file.file, (bytes, PAGE_BYTES), access).ok()?;
    let check = crate::tcp::random();
    tail(&last, 0).check.store(check, Ordering::Release);
    let moved = pages.mapping().replace(&file.file, 0, access);
    moved.expect("no memory to map a file where memory was");
    pages.mapping().populate();
    let place = Place {
        descriptor,
        check,
        offset: 0,
    };
    regions().insert(start, (bytes, place));
    let region = Region {
        start,
        tail: last,
        _file: file,
    };
    Some(Registered::new(region, pages))
}

/// Where `bytes` lie, if all of them are in a file of this process.
pub(crate) fn find(bytes: &[u8]) -> Option<Place> {
    let first = bytes.as_ptr() as usize;
    let regions = regions();
    let (start, (length, place)) = regions.range(..=first).next_back()?;
    let offset = first - start;
    let inside = offset <= *length && bytes.len() <= length - offset;
    inside.then_some(Place {
        offset: offset as u64,
        ..*place
    })
}

/// A file of a peer, mapped.
pub(crate) struct View {
    check: u64,
    mapping: Mapping,
    /// Bytes before the tail.
    bytes: usize,
}

impl View {
    /// Maps the file at `place` of `process`; `None` if that does not work, it can be cut short, or
    /// it is another.
    fn open(process: u32, place: &Place) -> Option<Self> {
        let file = File::open_at(process, place.descriptor)?;
        let length = usize::try_from(rustix::fs::fstat(&file).ok()?.st_size).ok()?;
        let bytes = length.checked_sub(PAGE_BYTES)?;
        if !length.is_multiple_of(PAGE_BYTES) {
            return None;
        }
        let mapping = Mapping::of(&file, (0, length), ProtFlags::READ).ok()?;
        let check = tail(&mapping, bytes).check.load(Ordering::Acquire);
        (check == place.check).then_some(Self {
            check,
            mapping,
            bytes,
        })
    }

    /// `count` bytes from `offset` on; `None` if the file has them not.
    pub(crate) fn bytes(&self, offset: u64, count: usize) -> Option<&[u8]> {
        let offset = usize::try_from(offset).ok()?;
        if offset > self.bytes || count > self.bytes - offset {
            return None;
        }
        // SAFETY: inside of the mapping, whose file keeps its length. The owner leaves lent bytes
        // as they are; one that does not changes values, every one of which is valid, and
        // whoever uses them looks afterwards whether they were taken back.
        Some(unsafe { std::slice::from_raw_parts(self.mapping.start().add(offset), count) })
    }

    fn has_ended(&self) -> bool {
        tail(&self.mapping, self.bytes)
            .ended
            .load(Ordering::Acquire)
            != 0
    }
}

/// What a rank has mapped of one peer.
#[derive(Default)]
pub(crate) struct Views {
    /// The oldest first.
    views: Vec<Arc<View>>,
    /// The last file that could not be mapped.
    refused: Option<u64>,
}

impl Views {
    /// The file at `place` of `process`, mapped if it is not yet; `None` if it cannot be.
    pub(crate) fn get(&mut self, process: u32, place: &Place) -> Option<Arc<View>> {
        if let Some(view) = self.views.iter().find(|view| view.check == place.check) {
            return Some(Arc::clone(view));
        }
        if self.refused == Some(place.check) {
            return None;
        }
        self.forget_ended();
        let Some(view) = View::open(process, place).map(Arc::new) else {
            self.refused = Some(place.check);
            return None;
        };
        if self.views.len() >= MOST {
            self.views.remove(0);
        }
        self.views.push(Arc::clone(&view));
        Some(view)
    }

    /// Lets go of memory that its owner has given up.
    pub(crate) fn forget_ended(&mut self) {
        self.views.retain(|view| !view.has_ended());
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
