//! Pages of mapped memory.

use std::ops::Range;

/// The largest run of whole pages inside `range`, in offsets into a mapping; may be empty.
///
/// Mappings start on a page border. 64 KiB is the largest base page of the supported systems (Linux
/// on arm64 and ppc64). It is a multiple of the others (4 KiB, 16 KiB on Apple silicon), so
/// rounding to it is valid for all. Weights are far larger.
pub fn whole_pages(range: &Range<usize>) -> Range<usize> {
    const PAGE: usize = 64 << 10;
    let start = range
        .start
        .checked_next_multiple_of(PAGE)
        .unwrap_or(range.end);
    let end = range.end / PAGE * PAGE;
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_rounded_inwards() {
        const K: usize = 1 << 10;
        for (range, pages) in [
            (0..0, 0..0),
            (0..64 * K, 0..64 * K),
            (1..64 * K, 64 * K..64 * K),
            (1..128 * K, 64 * K..128 * K),
            (64 * K..200 * K, 64 * K..192 * K),
            (usize::MAX - 1..usize::MAX, usize::MAX..usize::MAX),
        ] {
            assert_eq!(whole_pages(&range), pages, "{range:?}");
        }
    }
}
