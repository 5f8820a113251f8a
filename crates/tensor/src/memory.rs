//! Memory for weights and caches, taken from the system page by page when it is first touched.

use std::fmt;
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
}
