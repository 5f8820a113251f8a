//! Shared files: memory of a process that others of this machine map. They use payloads from it
//! (`single_copy`) in place, without a copy and without a system call.
//!
//! ```text
//! file:  data, whole pages   then a page:  0 check word   8 ended
//! ```
//!
//! A [`RegisteredMemory`](crate::Memory) of a group over shared memory is in such a file. Every
//! group of the process can [`find`] the file by an address. A peer maps the file at the first
//! transfer from it, and only if it cannot be truncated. The owner marks it as ended when the
//! memory is dropped. Peers poll that mark and unmap the pages.
//!
//! A peer writes to the file only while a transfer allows that: during a call that has the memory
//! exclusively borrowed. If the call fails first, the owner cannot know whether the peer still
//! writes: a stopped one may resume. So the owner reclaims the bytes ([`take_back`]): it replaces
//! the shared pages by private ones. No reference of a peer points to shared pages: it uses them as
//! [`PeerBytes`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::mm::ProtFlags;

use crate::file::MemoryFile;
use crate::locks::lock;
use crate::mapping::{Mapping, PAGE_BYTES};
use crate::peer_bytes::{PeerBytes, PeerBytesMut};
use crate::single_copy::{LOAN_BYTES, MappedLocation};
use crate::{MemoryRegistration, Pages};

/// Shortest memory that is shared, and shortest payload that is transferred from it.
///
/// All-reduce between two processes on an EPYC VM, November 2026, medians of three, with files
/// shared from 256 KiB and from 32 KiB on:
///
/// - 16 KiB, by rings: 5.7 and 5.6 us;
/// - 64 KiB: 12.5 and 2.9 us;
/// - 256 KiB, whose halves are transferred: 43 and 5.4 us;
/// - 1 MiB: 22 us both.
pub(crate) const SHARED_BYTES: usize = if cfg!(test) { LOAN_BYTES } else { 32 << 10 };

/// Most files of a process, each a descriptor of the usual limit of 1024, and most that a rank maps
/// of one peer.
const MOST: usize = 64;

/// The last page of a file.
#[repr(C)]
struct Tail {
    check: AtomicU64,
    ended: AtomicU64,
}

/// Where a file of this process is mapped.
#[derive(Clone, Copy)]
struct Mapped {
    /// Whole pages.
    bytes: usize,
    /// Bytes in use, from the first on.
    used: usize,
    /// The location that a peer needs.
    place: MappedLocation,
}

/// Mapped files by their first address.
static REGIONS: Mutex<BTreeMap<usize, Mapped>> = Mutex::new(BTreeMap::new());

/// Files of this process, including ended ones.
static FILES: AtomicUsize = AtomicUsize::new(0);

/// Guard that counts one file of the process.
struct FileCount(&'static AtomicUsize);

impl FileCount {
    /// `None` if `files` counts [`MOST`] already. Safe for concurrent callers.
    fn take(files: &'static AtomicUsize) -> Option<Self> {
        let one_more = |count: usize| (count < MOST).then_some(count + 1);
        let taken = files.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.ok().map(|_| Self(files))
    }
}

impl Drop for FileCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn regions() -> MutexGuard<'static, BTreeMap<usize, Mapped>> {
    lock(&REGIONS)
}

/// A file of this process, while its memory lives.
struct Region {
    start: usize,
    tail: Mapping,
    _file: MemoryFile,
    _counted: FileCount,
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
    // SAFETY: inside of the mapping and aligned; a tail consists of atomics, for which every bit
    // pattern is valid.
    unsafe { &*mapping.start().add(offset).cast() }
}

/// Moves `pages`, of a new [`RegisteredMemory`](crate::Memory), to a file that peers can map.
/// `None` if they are few or lent, or the system has no such files.
///
/// # Panics
/// If the system runs out of memory in between.
pub(crate) fn share(pages: &Arc<Pages>) -> Option<MemoryRegistration> {
    let (start, bytes) = (pages.start() as usize, pages.bytes());
    if bytes < SHARED_BYTES || pages.mapping().is_lent() {
        return None;
    }
    let counted = FileCount::take(&FILES)?;
    let file = MemoryFile::new((bytes + PAGE_BYTES) as u64).ok()?;
    let descriptor = file.descriptor()?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let last = Mapping::of(&file.file, (bytes, PAGE_BYTES), access).ok()?;
    let check = crate::join::random();
    tail(&last, 0).check.store(check, Ordering::Release);
    // SAFETY: nothing has used the pages yet, and after an error nothing does: it panics.
    let moved = unsafe { pages.mapping().replace(&file.file, 0, access) };
    moved.expect("no memory to map a file where memory was");
    pages.mapping().populate();
    let place = MappedLocation {
        descriptor,
        check,
        offset: 0,
        writable: false,
    };
    let used = pages.used();
    regions().insert(start, Mapped { bytes, used, place });
    let region = Region {
        start,
        tail: last,
        _file: file,
        _counted: counted,
    };
    Some(MemoryRegistration::new(region, pages))
}

/// The file that contains all of these bytes, and its start address. The bytes are not read.
fn region_of(bytes: *const [u8]) -> Option<(usize, Mapped)> {
    let (first, regions) = (bytes.cast::<u8>() as usize, regions());
    let (start, mapped) = regions.range(..=first).next_back()?;
    let offset = first - start;
    let inside = offset <= mapped.bytes && bytes.len() <= mapped.bytes - offset;
    inside.then_some((*start, *mapped))
}

/// Location of `bytes`, if all of them are in a file of this process.
pub(crate) fn find(bytes: &[u8]) -> Option<MappedLocation> {
    let (start, mapped) = region_of(bytes)?;
    Some(MappedLocation {
        offset: (bytes.as_ptr() as usize - start) as u64,
        ..mapped.place
    })
}

/// As [`find`], of a part of `whole` that a peer may write to. The part has its pages to itself, so
/// that they can be reclaimed.
pub(crate) fn find_writable(bytes: &[u8], whole: &[u8]) -> Option<MappedLocation> {
    let (start, mapped) = region_of(whole)?;
    let (pages, whole) = (pages_of(start, bytes), whole.as_ptr_range());
    let (first, end) = (whole.start as usize, whole.end as usize);
    let is_alone = pages.start >= first && (pages.end <= end || end == start + mapped.used);
    let place = find(bytes).filter(|_| is_alone)?;
    Some(MappedLocation {
        writable: true,
        ..place
    })
}

/// Page addresses of the bytes, of memory that begins at `start`.
fn pages_of(start: usize, bytes: *const [u8]) -> Range<usize> {
    let first = bytes.cast::<u8>() as usize;
    let end = first + bytes.len();
    let after = |address: usize| (address - start).next_multiple_of(PAGE_BYTES);
    first - (first - start) % PAGE_BYTES..start + after(end)
}

/// Reclaims the pages of `bytes`, which a peer may write to. The file is not used for later
/// transfers.
///
/// # Safety
/// [`find_writable`] found them, and the caller has the whole borrowed exclusively.
pub(crate) unsafe fn take_back(bytes: *const [u8]) {
    let Some((start, mapped)) = region_of(bytes) else {
        return;
    };
    let pages = pages_of(start, bytes);
    regions().remove(&start);
    // Memory beyond the file would be replaced.
    assert!(pages.end <= start + mapped.bytes, "pages of the file");
    let before = bytes.cast::<u8>() as usize - pages.start;
    let first = bytes.cast::<u8>().cast_mut().wrapping_sub(before);
    // SAFETY: pages of this file's mapping that hold nothing else.
    unsafe { Mapping::make_private(first, pages.len()) };
}

/// A mapped file of a peer.
pub(crate) struct MappedView {
    check: u64,
    mapping: Mapping,
    /// Bytes before the tail.
    bytes: usize,
}

impl MappedView {
    /// Maps the file at `place` of `process`; `None` if that fails, the file can be truncated, or
    /// it is another file.
    fn open(process: u32, place: &MappedLocation) -> Option<Self> {
        let file = MemoryFile::open_at(process, place.descriptor)?;
        let length = usize::try_from(rustix::fs::fstat(&file).ok()?.st_size).ok()?;
        let bytes = length.checked_sub(PAGE_BYTES)?;
        if !length.is_multiple_of(PAGE_BYTES) {
            return None;
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = Mapping::of(&file, (0, length), access).ok()?;
        let check = tail(&mapping, bytes).check.load(Ordering::Acquire);
        (check == place.check).then_some(Self {
            check,
            mapping,
            bytes,
        })
    }

    /// Address of `count` bytes from `offset` on; `None` if the file is shorter.
    fn place(&self, offset: u64, count: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset <= self.bytes && count <= self.bytes - offset;
        inside.then(|| self.mapping.start().wrapping_add(offset))
    }

    /// `count` bytes from `offset` on; `None` if the file is shorter. The caller checks afterwards
    /// whether the transfer was revoked.
    pub(crate) fn bytes(&self, offset: u64, count: usize) -> Option<PeerBytes<'_>> {
        let start = self.place(offset, count)?;
        // SAFETY: inside of the mapping, whose file keeps its length.
        Some(unsafe { PeerBytes::new(start, count) })
    }

    /// The same bytes, writable.
    ///
    /// # Safety
    /// The owner allows writes in this transfer, and nothing else in this process uses this view of
    /// them.
    pub(crate) unsafe fn bytes_mut(&self, offset: u64, count: usize) -> Option<PeerBytesMut<'_>> {
        let start = self.place(offset, count)?;
        // SAFETY: as above, and by the caller's promise.
        Some(unsafe { PeerBytesMut::new(start, count) })
    }

    fn has_ended(&self) -> bool {
        tail(&self.mapping, self.bytes)
            .ended
            .load(Ordering::Acquire)
            != 0
    }
}

/// The mapped files of one peer.
#[derive(Default)]
pub(crate) struct Views {
    /// Oldest first.
    views: Vec<Arc<MappedView>>,
    /// The last file that could not be mapped.
    refused: Option<u64>,
}

impl Views {
    /// The file at `place` of `process`, mapped on demand; `None` if that fails.
    pub(crate) fn get(&mut self, process: u32, place: &MappedLocation) -> Option<Arc<MappedView>> {
        if let Some(view) = self.views.iter().find(|view| view.check == place.check) {
            return Some(Arc::clone(view));
        }
        if self.refused == Some(place.check) {
            return None;
        }
        self.forget_ended();
        let Some(view) = MappedView::open(process, place).map(Arc::new) else {
            self.refused = Some(place.check);
            return None;
        };
        if self.views.len() >= MOST {
            self.views.remove(0);
        }
        self.views.push(Arc::clone(&view));
        Some(view)
    }

    /// Unmaps files that their owner has ended.
    pub(crate) fn forget_ended(&mut self) {
        self.views.retain(|view| !view.has_ended());
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
