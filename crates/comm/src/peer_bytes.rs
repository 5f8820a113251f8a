//! Bytes of a peer, used where they are.
//!
//! A broken or stopped peer process may write to them at the same time; a correct one does not. So
//! no reference points to them: they are copied through raw pointers. A copy of bytes that change
//! meanwhile has old or new ones. The copier checks afterwards whether the copy is valid
//! (`single_copy`).

use std::marker::PhantomData;

use crate::sync::copy_raw;

/// Peer bytes, read only.
#[derive(Clone, Copy, Debug)]
pub struct PeerBytes<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a ()>,
}

impl<'a> PeerBytes<'a> {
    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    /// They stay mapped and readable throughout `'a`.
    pub const unsafe fn new(start: *const u8, len: usize) -> Self {
        Self {
            start,
            len,
            memory: PhantomData,
        }
    }

    /// Bytes of this process that nobody writes to.
    pub const fn of(bytes: &'a [u8]) -> Self {
        // SAFETY: borrowed for as long.
        unsafe { Self::new(bytes.as_ptr(), bytes.len()) }
    }

    pub const fn len(self) -> usize {
        self.len
    }

    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `count` bytes from `at` on.
    ///
    /// # Panics
    /// If the range exceeds them.
    pub fn part(self, at: usize, count: usize) -> Self {
        assert!(
            at <= self.len && count <= self.len - at,
            "{count} bytes from {at} on, of {}",
            self.len
        );
        // SAFETY: inside of these bytes, as was just seen.
        unsafe { Self::new(self.start.add(at), count) }
    }

    /// Copies all of them.
    ///
    /// # Panics
    /// If `into` has another length.
    pub fn copy_to(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.len, "bytes of two buffers");
        // SAFETY: both have `len` bytes; `into` is borrowed exclusively, so they do not overlap.
        unsafe { copy_raw(self.start, into.as_mut_ptr(), self.len) };
    }

    /// Element `index`, of `N` bytes, counted from the first byte.
    ///
    /// # Safety
    /// It ends within these bytes.
    #[inline(always)]
    pub(crate) const unsafe fn element<const N: usize>(self, index: usize) -> [u8; N] {
        // SAFETY: by the caller's promise; arrays of bytes need no alignment.
        unsafe { self.start.cast::<[u8; N]>().add(index).read() }
    }
}

/// Peer bytes, readable and writable.
#[derive(Debug)]
pub struct PeerBytesMut<'a>(PeerBytes<'a>);

impl<'a> PeerBytesMut<'a> {
    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    /// They stay mapped, readable and writable, throughout `'a`. In this process nothing else uses
    /// them meanwhile, and no reference points to them.
    pub const unsafe fn new(start: *mut u8, len: usize) -> Self {
        // SAFETY: by the caller's promise.
        Self(unsafe { PeerBytes::new(start, len) })
    }

    /// A read-only view.
    pub const fn read(&self) -> PeerBytes<'_> {
        self.0
    }

    /// Writes `bytes` at offset `at`.
    ///
    /// # Panics
    /// If they exceed the end.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        let place = self.0.part(at, bytes.len());
        // SAFETY: as long, and writable by `new`'s promise; `bytes` do not overlap, since no
        // reference points there.
        unsafe { copy_raw(bytes.as_ptr(), place.start.cast_mut(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_elements_are_those_of_the_bytes() {
        let bytes: Vec<u8> = (0..100).collect();
        let lent = PeerBytes::of(&bytes);
        for (at, count) in [(0, 0), (0, 100), (100, 0), (3, 8), (99, 1)] {
            let part = lent.part(at, count);
            let mut copied = vec![0; count];
            part.copy_to(&mut copied);
            assert_eq!(copied, bytes[at..at + count], "{at} {count}");
            assert_eq!(part.len(), count);
        }
        // SAFETY: bytes 12 to 15 of a hundred.
        assert_eq!(unsafe { lent.element::<4>(3) }, [12, 13, 14, 15]);
        let mut into = bytes.clone();
        // SAFETY: the bytes of `into`, which nobody uses until the last write.
        let mut lent = unsafe { PeerBytesMut::new(into.as_mut_ptr(), into.len()) };
        lent.write(98, &[7, 8]);
        lent.write(100, &[]);
        assert_eq!(lent.read().len(), 100);
        assert_eq!(into[97..], [97, 7, 8]);
    }

    #[test]
    fn there_is_no_part_beyond_the_end() {
        let bytes = [0; 10];
        for (at, count) in [(0, 11), (10, 1), (11, 0), (1, usize::MAX), (usize::MAX, 1)] {
            let part = || PeerBytes::of(&bytes).part(at, count).len();
            assert!(std::panic::catch_unwind(part).is_err(), "{at} {count}");
        }
    }
}
