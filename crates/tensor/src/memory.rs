//! Memory for weights and caches, taken from the system page by page when it is first touched.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;
use paceline_base::Bytes;

use crate::Error;

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
/// pages of 4 KiB cost TLB misses.
///
/// It begins where a huge page may begin, so that all of it but the rest behind the last whole
/// one is in huge pages. That rest stays in small ones: they take no more memory than is used.
pub(crate) struct HugeMap {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl HugeMap {
    /// # Errors
    /// [`Error::Memory`].
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        let huge = len / HUGE_PAGE * HUGE_PAGE;
        if huge == 0 {
            let map = reserve(len)?;
            return Ok(Self { map, start: 0, len });
        }
        let map = reserve(len.saturating_add(HUGE_PAGE))?;
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(memmap2::Advice::HugePage, start, huge); // refused: only slower
        Ok(Self { map, start, len })
    }
}

impl Deref for HugeMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.start..self.start + self.len]
    }
}

impl DerefMut for HugeMap {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.len]
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

/// Zeroed values on pages of their own, from a chosen place of the first one on.
///
/// Where the activations of a decode step lie decides how fast its weights are read. One row of
/// 2048 columns against Q8_0 from memory, of plain reads (Zen 4): as malloc put its three parts
/// 0.93, side by side on one page 0.83 to 0.92, on pages of their own but off cache lines 0.91, at
/// cache lines 0.96 to 1.01. (Q5_0 0.82 to 0.90, Q6_K 0.57 to 0.66; the machine code is the same.)
pub(crate) struct Placed<T> {
    bytes: Vec<u8>,
    place: usize,
    start: usize,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Zeroed> Placed<T> {
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
            place,
            bytes,
            len,
            values: PhantomData,
        }
    }
}

impl<T> Deref for Placed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new`, for types of which zeros are values, left room for `len` behind `start`,
        // which is aligned to 64 bytes; vectors do not move their bytes.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().add(self.start).cast(), self.len) }
    }
}

impl<T> DerefMut for Placed<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let first = self.bytes.as_mut_ptr();
        // SAFETY: as `deref`.
        unsafe { std::slice::from_raw_parts_mut(first.add(self.start).cast(), self.len) }
    }
}

impl<T: Zeroed> Clone for Placed<T> {
    fn clone(&self) -> Self {
        let mut new = Self::new(self.len, self.place);
        new.copy_from_slice(self);
        new
    }
}

impl<T> fmt::Debug for Placed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Placed({} values)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_begins_at_a_huge_page_and_all_of_it_is_usable() {
        for len in [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut memory = HugeMap::zeroed(len).unwrap();
            assert_eq!(memory.len(), len);
            if len >= HUGE_PAGE {
                assert_eq!(memory.as_ptr().align_offset(HUGE_PAGE), 0, "{len}");
            }
            if let (Some(0), Some(last)) = (memory.first().copied(), memory.last_mut()) {
                *last = 7;
            }
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
    fn values_lie_where_asked_also_in_copies() {
        for (len, place) in [(0, 0), (1, 64), (5000, 2048), (100_000, 4096 + 128)] {
            let mut values = Placed::<i8>::new(len, place);
            values
                .iter_mut()
                .zip(1..)
                .for_each(|(v, i): (_, i64)| *v = i as i8);
            let copy = values.clone();
            for one in [&values, &copy] {
                assert_eq!(
                    (one.as_ptr().addr() % SMALL_PAGE, one.len()),
                    (place % SMALL_PAGE, len)
                );
                assert!(one.iter().zip(1..).all(|(&v, i): (_, i64)| v == i as i8));
            }
        }
    }
}
