//! Memory of a process that others of this machine map. They use what is lent from it (`loan`)
//! where it lies: no copy on the way, and no call of the system.
//!
//! ```text
//! file:  data, whole pages   then a page:  0 check word   8 ended
//! ```
//!
//! A [`Memory`](crate::Memory) of a group over shared memory lies in such a file. Every group of
//! the process can [`find`] the file by an address. A peer maps the file when something in it is
//! first lent to it, and only if nobody can cut it short. The owner marks it as ended when the
//! memory goes. Peers look for that mark now and then and let go of the pages.
//!
//! A peer writes to it only while a loan allows that: during a call that has the memory exclusively
//! borrowed. If the call fails first, the owner cannot know whether the peer still writes: a
//! stopped one may go on. So it takes the bytes back ([`take_back`]): private pages take the place
//! of those that the peer has. No reference of a peer leads to them: it uses them as [`Lent`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::mm::ProtFlags;

use crate::file::File;
use crate::lent::{Lent, LentMut};
use crate::loan::{LOAN_BYTES, Place};
use crate::locks::lock;
use crate::mapping::{Mapping, PAGE_BYTES};
use crate::{Pages, Registered};

/// Shortest memory that is shared, and shortest payload that is lent from it.
///
/// All-reduce between two processes on an EPYC VM, November 2026, medians of three, with files
/// shared from 256 KiB and from 32 KiB on:
///
/// - 16 KiB, by rings: 5.7 and 5.6 us;
/// - 64 KiB: 12.5 and 2.9 us;
/// - 256 KiB, whose halves are lent: 43 and 5.4 us;
/// - 1 MiB: 22 us both.
pub(crate) const SHARED_BYTES: usize = if cfg!(test) { LOAN_BYTES } else { 32 << 10 };

/// Most files of a process, each a descriptor of the 1024 that are usual, and most that a rank maps
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
    /// Bytes that somebody uses, from the first on.
    used: usize,
    /// The location that a peer has to know.
    place: Place,
}

/// Mapped files by their first address.
static REGIONS: Mutex<BTreeMap<usize, Mapped>> = Mutex::new(BTreeMap::new());

/// Files that this process has, whether peers may still map them or not.
static FILES: AtomicUsize = AtomicUsize::new(0);

/// A count of a file that a process has, while it has it.
struct Counted(&'static AtomicUsize);

impl Counted {
    /// `None` if `files` counts [`MOST`] already, whoever else asks at the same time.
    fn take(files: &'static AtomicUsize) -> Option<Self> {
        let one_more = |count: usize| (count < MOST).then_some(count + 1);
        let taken = files.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        taken.ok().map(|_| Self(files))
    }
}

impl Drop for Counted {
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
    _file: File,
    _counted: Counted,
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

/// Moves `pages`, of a [`Memory`](crate::Memory) that is being made, to a file that peers can map.
/// `None` if they are few, or the system has no such files to give.
///
/// # Panics
/// If the system has no memory left in between.
pub(crate) fn share(pages: &Arc<Pages>) -> Option<Registered> {
    let (start, bytes) = (pages.start() as usize, pages.bytes());
    if bytes < SHARED_BYTES {
        return None;
    }
    let counted = Counted::take(&FILES)?;
    let file = File::new((bytes + PAGE_BYTES) as u64).ok()?;
    let descriptor = file.descriptor()?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let last = Mapping::of(&file.file, (bytes, PAGE_BYTES), access).ok()?;
    let check = crate::join::random();
    tail(&last, 0).check.store(check, Ordering::Release);
    // SAFETY: nobody has used the pages yet, and after an error nobody does: it panics.
    let moved = unsafe { pages.mapping().replace(&file.file, 0, access) };
    moved.expect("no memory to map a file where memory was");
    pages.mapping().populate();
    let place = Place {
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
    Some(Registered::new(region, pages))
}

/// The file with all of these bytes, and where it begins. They are not read.
fn region_of(bytes: *const [u8]) -> Option<(usize, Mapped)> {
    let (first, regions) = (bytes.cast::<u8>() as usize, regions());
    let (start, mapped) = regions.range(..=first).next_back()?;
    let offset = first - start;
    let inside = offset <= mapped.bytes && bytes.len() <= mapped.bytes - offset;
    inside.then_some((*start, *mapped))
}

/// Where `bytes` lie, if all of them are in a file of this process.
pub(crate) fn find(bytes: &[u8]) -> Option<Place> {
    let (start, mapped) = region_of(bytes)?;
    Some(Place {
        offset: (bytes.as_ptr() as usize - start) as u64,
        ..mapped.place
    })
}

/// As [`find`], of a part of `whole` that a peer may write to. Nobody else has anything on its
/// pages, so that they can be taken back.
pub(crate) fn find_writable(bytes: &[u8], whole: &[u8]) -> Option<Place> {
    let (start, mapped) = region_of(whole)?;
    let (pages, whole) = (pages_of(start, bytes), whole.as_ptr_range());
    let (first, end) = (whole.start as usize, whole.end as usize);
    let is_alone = pages.start >= first && (pages.end <= end || end == start + mapped.used);
    let place = find(bytes).filter(|_| is_alone)?;
    Some(Place {
        writable: true,
        ..place
    })
}

/// The addresses of the pages on which bytes lie, of memory that begins at `start`.
fn pages_of(start: usize, bytes: *const [u8]) -> Range<usize> {
    let first = bytes.cast::<u8>() as usize;
    let end = first + bytes.len();
    let after = |address: usize| (address - start).next_multiple_of(PAGE_BYTES);
    first - (first - start) % PAGE_BYTES..start + after(end)
}

/// Makes the pages of `bytes`, which were lent to be written, this process's alone. The file is not
/// lent from any more.
///
/// # Safety
/// [`find_writable`] found them, and whoever calls has the whole borrowed exclusively.
pub(crate) unsafe fn take_back(bytes: *const [u8]) {
    let Some((start, mapped)) = region_of(bytes) else {
        return;
    };
    let pages = pages_of(start, bytes);
    regions().remove(&start);
    // Beyond it lies memory of others, which would be replaced.
    assert!(pages.end <= start + mapped.bytes, "pages of the file");
    let before = bytes.cast::<u8>() as usize - pages.start;
    let first = bytes.cast::<u8>().cast_mut().wrapping_sub(before);
    // SAFETY: pages of this file's mapping on which nobody else has anything.
    unsafe { Mapping::make_private(first, pages.len()) };
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
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = Mapping::of(&file, (0, length), access).ok()?;
        let check = tail(&mapping, bytes).check.load(Ordering::Acquire);
        (check == place.check).then_some(Self {
            check,
            mapping,
            bytes,
        })
    }

    /// Where `count` bytes from `offset` on are; `None` if the file has them not.
    fn place(&self, offset: u64, count: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset <= self.bytes && count <= self.bytes - offset;
        inside.then(|| self.mapping.start().wrapping_add(offset))
    }

    /// `count` bytes from `offset` on; `None` if the file has them not. Whoever uses them looks
    /// afterwards whether they were taken back meanwhile.
    pub(crate) fn bytes(&self, offset: u64, count: usize) -> Option<Lent<'_>> {
        let start = self.place(offset, count)?;
        // SAFETY: inside of the mapping, whose file keeps its length.
        Some(unsafe { Lent::new(start, count) })
    }

    /// The same to be written.
    ///
    /// # Safety
    /// The owner has lent them for that, and nobody else in this process uses this view of them.
    pub(crate) unsafe fn bytes_mut(&self, offset: u64, count: usize) -> Option<LentMut<'_>> {
        let start = self.place(offset, count)?;
        // SAFETY: as above, and by the caller's promise.
        Some(unsafe { LentMut::new(start, count) })
    }

    fn has_ended(&self) -> bool {
        tail(&self.mapping, self.bytes)
            .ended
            .load(Ordering::Acquire)
            != 0
    }
}

/// The files that a rank has mapped of one peer.
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
