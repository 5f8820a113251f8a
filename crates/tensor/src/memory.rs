//! Memory for weights and caches, taken from the system page by page when it is first touched.
//!
//! - [`reserve`]: zeroed memory.
//! - Matrices below 16 MiB lie next to each other in shared mappings of huge pages. In pages of
//!   their own of 4 KiB, SmolLM2 decodes at 0.75 of the speed.
//! - [`OffsetBuffer`]: activations on pages of their own. Where they share pages with other data,
//!   one row of a product reads memory at 0.83 to 0.92 of the rate.

use std::fmt;
#[cfg(target_os = "linux")]
use std::fs;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};
use paceline_base::Bytes;

use crate::error::Error;

/// Size of a huge page: of a second-level page table entry on x86-64, and on AArch64 with pages
/// of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory.
///
/// # Errors
/// [`Error::Memory`].
pub(crate) fn reserve(bytes: usize) -> Result<MmapMut, Error> {
    MmapMut::map_anon(bytes.max(1)).map_err(|reason| Error::Memory {
        bytes: Bytes(bytes as u64),
        reason: reason.to_string(),
    })
}

/// Zeroed memory in huge pages where the system has them: a decode step streams all weights, and
/// pages of 4 KiB cost TLB misses. SmolLM2, whose matrices have 69 to 553 KB, decodes 1.3 times as
/// fast for it (docs/measurements.md).
///
/// Small memory lies side by side in a mapping that it shares with others. Large memory has a
/// mapping of its own; its rest behind the last whole huge page stays in small pages. So it takes
/// no more than is used.
pub(crate) struct HugeMap {
    place: Place,
    len: usize,
}

/// Where a [`HugeMap`] has its bytes.
enum Place {
    /// Offset of the first byte in a mapping. These bytes have no other owner.
    Own(Arc<Region>, usize),
    /// In a [`MemoryBlock`]; null while they are on a disk.
    Block(Arc<AtomicPtr<u8>>),
}

/// A mapping. Parts of it are given out one after another, none twice.
struct Region {
    map: MmapRaw,
    /// Offset of the first possible huge page.
    start: usize,
}

/// The region that small memory is taken from, and how much of it is given out.
struct SharedRegion {
    region: Arc<Region>,
    used: usize,
}

/// The process's shared region: memory packed one after another lies side by side.
static SHARED: Mutex<Option<SharedRegion>> = Mutex::new(None);

/// Size of a shared region. On average half a huge page is lost at its end: 1.6 %.
const SHARED_BYTES: usize = 64 << 20;

/// Least bytes for a mapping of its own. Half a huge page in small pages is at most 6 % of it. All
/// memory has its own mapping on systems without huge pages on request.
const OWN_FROM: usize = if cfg!(target_os = "linux") {
    16 << 20
} else {
    0
};

impl Region {
    fn new(len: usize) -> Result<Self, Error> {
        let map = MmapRaw::from(reserve(len.saturating_add(HUGE_PAGE))?);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(
            memmap2::Advice::HugePage,
            start,
            len / HUGE_PAGE * HUGE_PAGE,
        ); // refused: only slower
        Ok(Self { map, start })
    }
}

impl HugeMap {
    /// # Errors
    /// [`Error::Memory`].
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        if len >= OWN_FROM {
            let region = Arc::new(Region::new(len)?);
            let start = region.start;
            let place = Place::Own(region, start);
            return Ok(Self { place, len });
        }
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let next = match shared.take().filter(|old| len <= SHARED_BYTES - old.used) {
            Some(old) => old,
            None => SharedRegion {
                region: Arc::new(Region::new(SHARED_BYTES)?),
                used: 0,
            },
        };
        let SharedRegion { region, used } = shared.insert(next);
        let start = region.start + *used;
        *used = (*used + len).next_multiple_of(SMALL_PAGE);
        Ok(Self {
            place: Place::Own(Arc::clone(region), start),
            len,
        })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Gives the memory back. Until [`MatrixMemory::place`], the bytes are on a disk only.
    pub(crate) fn detach(&mut self) -> MatrixMemory {
        let at = Arc::new(AtomicPtr::default());
        *self = Self {
            place: Place::Block(Arc::clone(&at)),
            len: self.len,
        };
        MatrixMemory { at, len: self.len }
    }

    /// The memory, for a reader of a disk, up to the end of its last small page.
    ///
    /// # Panics
    /// If the bytes are on a disk only.
    pub(crate) fn block(&self) -> MemoryBlock {
        let Place::Own(region, start) = &self.place else {
            panic!("a matrix of {} B is on a disk", self.len);
        };
        MemoryBlock {
            region: Arc::clone(region),
            start: *start,
            len: self.len.next_multiple_of(SMALL_PAGE),
        }
    }

    /// # Panics
    /// If the bytes are on a disk only.
    fn address(&self) -> *mut u8 {
        match &self.place {
            Place::Own(region, start) => region.map.as_mut_ptr().wrapping_add(*start),
            Place::Block(at) => {
                let at = at.load(Ordering::Acquire);
                assert!(!at.is_null(), "a matrix of {} B is on a disk", self.len);
                at
            }
        }
    }
}

/// Memory for packed matrices that are read from a disk together. When others take their place,
/// these are read into the same pages: pages that the system zeroes cost more than their reads.
pub struct MemoryBlock {
    region: Arc<Region>,
    /// Offset of the first byte in the region.
    start: usize,
    len: usize,
}

/// Where a packed matrix has its bytes, if they come from a disk when they are needed.
#[derive(Clone, Debug)]
pub struct MatrixMemory {
    at: Arc<AtomicPtr<u8>>,
    len: usize,
}

impl fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryBlock({})", Bytes(self.len as u64))
    }
}

impl MemoryBlock {
    /// Reserves `len` bytes at a page, in huge pages as far as they fill some.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(len: usize) -> Result<Self, Error> {
        let region = Arc::new(Region::new(len)?);
        let start = region.start;
        Ok(Self { region, start, len })
    }

    /// Bytes of the block.
    pub const fn size(&self) -> usize {
        self.len
    }

    /// A part of the bytes, for a reader of a disk.
    ///
    /// # Panics
    /// If the part ends behind the block.
    ///
    /// # Safety
    /// Until the borrow ends, nobody else uses this part, and no kernel reads a matrix in it.
    #[allow(clippy::mut_from_ref, reason = "the contract gives it to one thread")]
    pub unsafe fn part(&self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.len, "{part:?}");
        // SAFETY: within the mapping, which lives as long as this; alone by the contract.
        unsafe {
            let start = self.region.map.as_mut_ptr();
            std::slice::from_raw_parts_mut(start.add(self.start + part.start), part.len())
        }
    }
}

impl MatrixMemory {
    /// Of `len` bytes that are on a disk only, for an engine that reads them itself.
    pub fn on_disk(len: usize) -> Self {
        let at = Arc::new(AtomicPtr::new(std::ptr::null_mut()));
        Self { at, len }
    }

    /// The bytes, where they are in memory.
    ///
    /// # Safety
    /// Until the borrow ends, the block that they were [placed](Self::place) in lives, and nothing
    /// is written to it.
    pub unsafe fn bytes(&self) -> Option<&[u8]> {
        let at = self.at.load(Ordering::Acquire);
        // SAFETY: `place` checked that as many bytes lie there; the rest is the caller's promise.
        (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at, self.len) })
    }

    /// Bytes of the matrix.
    pub const fn size(&self) -> usize {
        self.len
    }

    /// Has kernels read the matrix from `start` of `block` on.
    ///
    /// # Panics
    /// If it would end behind the block.
    ///
    /// # Safety
    /// No kernel reads the matrix before its bytes are there, after another write to them, or after
    /// the block is dropped.
    pub unsafe fn place(&self, block: &MemoryBlock, start: usize) {
        assert!(start + self.len <= block.len, "{start} in {block:?}");
        let first = block.region.map.as_mut_ptr();
        let at = first.wrapping_add(block.start + start);
        self.at.store(at, Ordering::Release);
    }

    /// Takes the bytes away: kernels that read the matrix panic until it is placed again.
    pub fn remove(&self) {
        self.at.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// Whether this process gets huge pages from now on. While weights are packed and given back it
/// must not: a part of a huge page stays in memory until the system splits it.
pub fn use_huge_pages(use_them: bool) {
    #[cfg(target_os = "linux")]
    {
        const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
        // Where all memory gets them, stacks and small objects would take more than they use.
        let are_for_all = || fs::read_to_string(SETTING).is_ok_and(|it| it.contains("[always]"));
        if !use_them || !are_for_all() {
            let _ = rustix::thread::disable_transparent_huge_pages(!use_them); // refused: slower
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = use_them;
}

impl Drop for HugeMap {
    /// Gives memory back whose neighbours in the mapping are still in use.
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if let Place::Own(region, start) = &self.place {
            let pages = paceline_base::whole_pages(&(*start..start + self.len));
            // SAFETY: these bytes have no other owner, and are not handed out again.
            let _ = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                let map = &region.map;
                map.unchecked_advise_range(advice, pages.start, pages.len())
            }; // refused: they go with the mapping
        }
    }
}

impl Deref for HugeMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a part of a mapping, which lives as long as this and was zeroed by the system, or
        // by the contract of [`MatrixMemory::place`]; nobody writes to it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.address(), self.len) }
    }
}

impl DerefMut for HugeMap {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `deref`, and borrowed by one.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.len) }
    }
}

impl fmt::Debug for HugeMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HugeMap({})", Bytes(self.len as u64))
    }
}

/// Bytes of a page, and those after which addresses share a set of a first cache of 64 sets.
const SMALL_PAGE: usize = 4096;

/// A type for which zero bytes are a value.
///
/// # Safety
/// They are.
pub(crate) unsafe trait Zeroed: Copy {}

// SAFETY: any byte is an i8.
unsafe impl Zeroed for i8 {}
// SAFETY: as above.
unsafe impl Zeroed for f32 {}

/// Zeroed values on pages of their own, from a chosen place of the first one on.
///
/// The place of a decode step's activations decides how fast its weights are read. Measured: one
/// row of 2048 columns against Q8_0 from memory, as a share of plain reads (Zen 4).
///
/// - As malloc put its three parts: 0.93.
/// - Side by side on one page: 0.83 to 0.92.
/// - On pages of their own but off cache lines: 0.91.
/// - At cache lines: 0.96 to 1.01.
///
/// (Q5_0 0.82 to 0.90, Q6_K 0.57 to 0.66; the machine code is the same.)
pub(crate) struct OffsetBuffer<T> {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Zeroed> OffsetBuffer<T> {
    /// `len` values, the first at an address that is `place` modulo the size of a page; a multiple
    /// of 64.
    pub(crate) fn new(len: usize, place: usize) -> Self {
        assert!(place.is_multiple_of(64), "place {place}");
        let place = place % SMALL_PAGE;
        let used = len.checked_mul(size_of::<T>()).expect("an address space");
        let bytes = vec![0u8; (place + used).next_multiple_of(SMALL_PAGE) + SMALL_PAGE];
        let to_page = 0usize.wrapping_sub(bytes.as_ptr().addr()) % SMALL_PAGE;
        Self {
            start: to_page + place,
            bytes,
            len,
            values: PhantomData,
        }
    }
}

impl<T> Deref for OffsetBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new`, for types that zeros are values of, left room for `len` behind `start`,
        // which is aligned to 64 bytes; vectors do not move their bytes.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().add(self.start).cast(), self.len) }
    }
}

impl<T> DerefMut for OffsetBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let first = self.bytes.as_mut_ptr();
        // SAFETY: as `deref`.
        unsafe { std::slice::from_raw_parts_mut(first.add(self.start).cast(), self.len) }
    }
}

impl<T> fmt::Debug for OffsetBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Placed({} values)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_begins_at_a_huge_page_and_all_of_it_is_usable() {
        for len in [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 9 * HUGE_PAGE + 5] {
            let mut memory = HugeMap::zeroed(len).unwrap();
            assert_eq!(memory.len(), len);
            if len >= OWN_FROM.max(1) {
                assert_eq!(memory.as_ptr().align_offset(HUGE_PAGE), 0, "{len}");
            }
            if let (Some(0), Some(last)) = (memory.first().copied(), memory.last_mut()) {
                *last = 7;
            }
        }
    }

    /// Side by side, in several regions, given up in between: none sees another's bytes.
    #[test]
    fn small_memory_is_zeroed_and_nobody_elses() {
        let mut kept = Vec::new();
        for i in 0..400u32 {
            let len = [1, 69_120, 552_960, 3 << 20][i as usize % 4];
            let mut memory = HugeMap::zeroed(len).unwrap();
            let untouched = memory.iter().all(|&byte| byte == 0);
            assert!(untouched, "{len} bytes, the {i}th");
            memory.fill(i as u8 | 1);
            if i % 3 > 0 {
                kept.push((i, memory));
            }
        }
        for (i, memory) in kept {
            assert!(memory.iter().all(|&byte| byte == i as u8 | 1), "the {i}th");
        }
    }

    #[test]
    fn memory_that_nobody_has_is_an_error() {
        assert!(matches!(
            HugeMap::zeroed(usize::MAX / 2),
            Err(Error::Memory { .. })
        ));
    }

    #[test]
    fn values_lie_where_asked() {
        for (len, place) in [(0, 0), (1, 64), (5000, 2048), (100_000, 4096 + 128)] {
            let mut values = OffsetBuffer::<i8>::new(len, place);
            values
                .iter_mut()
                .zip(1..)
                .for_each(|(v, i): (_, i64)| *v = i as i8);
            assert_eq!(
                (values.as_ptr().addr() % SMALL_PAGE, values.len()),
                (place % SMALL_PAGE, len)
            );
            assert!(values.iter().zip(1..).all(|(&v, i): (_, i64)| v == i as i8));
        }
    }
}
