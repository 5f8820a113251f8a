//! Cuts a body into chunks of one length.
//!
//! All chunks of a transfer are equally long, so that any chunk fits any posted receive. The last
//! chunk ends with the body, and overlaps the one before if the length does not divide.

use std::ops::Range;

/// Alignment of all chunks but the last within the body: a cache line.
const STEP: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunks {
    bytes: usize,
    size: usize,
    count: usize,
}

impl Chunks {
    /// Cuts `bytes`, at least one, into as few chunks as possible of at most `most`, a multiple of
    /// 64, and of similar length.
    pub(super) fn new(bytes: usize, most: usize) -> Self {
        let few = bytes.div_ceil(most);
        let size = bytes.div_ceil(few).next_multiple_of(STEP).min(bytes);
        Self {
            bytes,
            size,
            count: bytes.div_ceil(size),
        }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) const fn size(&self) -> usize {
        self.size
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Byte range of chunk `index` in the body.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let start = (index * self.size).min(self.bytes - self.size);
        start..start + self.size
    }

    /// Bytes of chunk `index` that are in no chunk before it.
    pub(super) fn fresh(&self, index: usize) -> usize {
        self.bytes.min((index + 1) * self.size) - self.bytes.min(index * self.size)
    }

    /// Whether chunk `index` shares bytes with another.
    pub(super) const fn overlaps(&self, index: usize) -> bool {
        self.count > 1 && index + 2 >= self.count && !self.bytes.is_multiple_of(self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of bodies: small, around chunk boundaries, and beyond 31 and 32 bits (JACCL's mesh
    /// counts in `int`, and stops at 2 GiB).
    const BYTES: [usize; 17] = [
        1,
        63,
        64,
        65,
        2304,
        16383,
        16384,
        16385,
        17000,
        32768,
        100_001,
        (1 << 20) + 1,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) + 5,
        (3 << 31) + 12_345,
        1 << 40,
    ];

    #[test]
    fn chunks_cover_a_body_and_only_the_last_two_overlap() {
        for bytes in BYTES {
            for most in [2048, 16384, 512 << 10] {
                let cut = Chunks::new(bytes, most);
                let last = cut.count() - 1;
                assert!(cut.size() <= most, "{cut:?}");
                assert_eq!(cut.range(last).end, bytes, "{cut:?}");
                assert_eq!(cut.range(0).start, 0, "{cut:?}");
                for index in [0, 1, 2, last / 2, last.saturating_sub(2), last] {
                    let index = index.min(last);
                    assert_eq!(cut.range(index).len(), cut.size(), "{cut:?}");
                    assert!(cut.fresh(index) > 0, "{cut:?} {index}");
                    if index > 0 && !cut.overlaps(index) {
                        let before = cut.range(index - 1);
                        assert_eq!(before.end, cut.range(index).start, "{cut:?} {index}");
                    }
                }
                let before = last.saturating_sub(1);
                assert!(cut.range(before).end >= cut.range(last).start, "{cut:?}");
                // Messages carry the number of chunks in 32 bits.
                assert!(u32::try_from(cut.count()).is_ok(), "{cut:?}");
            }
        }
    }

    #[test]
    fn every_byte_is_of_one_chunk_that_brings_it() {
        for bytes in BYTES.into_iter().filter(|bytes| *bytes < 4 << 20) {
            let cut = Chunks::new(bytes, 16384);
            let fresh: usize = (0..cut.count()).map(|index| cut.fresh(index)).sum();
            assert_eq!(fresh, bytes, "{cut:?}");
        }
    }
}
