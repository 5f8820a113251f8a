//! Typed slices with the type erased, so that the trait [`Group`](crate::Group) stays object-safe.

use std::fmt;

/// The type of the elements of a buffer, as it is announced to the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are Rust's own")]
pub enum Dtype {
    U8,
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F32 => 4,
        }
    }

    /// Its number on the wire.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::U8 => 6,
            Self::F32 => 12,
        }
    }

    /// The dtype with this number.
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        match code {
            6 => Some(Self::U8),
            12 => Some(Self::F32),
            _ => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::F32 => "f32",
        })
    }
}

/// A Rust type that can travel between ranks: [`u8`] and [`f32`].
///
/// Sealed. Every implementor has no padding, and every bit pattern of its size is a value.
pub trait Element: sealed::Plain {
    /// How this type is announced.
    const DTYPE: Dtype;
}

impl Element for u8 {
    const DTYPE: Dtype = Dtype::U8;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

mod sealed {
    pub trait Plain: Copy + Send + Sync + 'static {}
    impl Plain for u8 {}
    impl Plain for f32 {}
}

/// A slice that is read: `(len,)` elements of [`Dtype`], in the byte order of this machine.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

impl<'a> Data<'a> {
    /// A view of `values`; nothing is copied.
    pub const fn new<T: Element>(values: &'a [T]) -> Self {
        // SAFETY: the pointer and the size are those of a live slice that stays borrowed for 'a,
        // and `Element` has no padding, so every one of these bytes is initialised.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
        };
        Self {
            dtype: T::DTYPE,
            bytes,
        }
    }

    /// Element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty, reason = "no caller asks")]
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// All elements as bytes.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl fmt::Debug for Data<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.len(), self.dtype)
    }
}

/// A slice that is written: as [`Data`], but exclusive.
pub struct DataMut<'a> {
    dtype: Dtype,
    bytes: &'a mut [u8],
}

impl<'a> DataMut<'a> {
    /// A view of `values`; nothing is copied.
    pub const fn new<T: Element>(values: &'a mut [T]) -> Self {
        let size = size_of_val(values);
        // SAFETY: as in `Data::new`, borrowed exclusively; and since every bit pattern is a value
        // of an `Element`, no write through this view can make an invalid one.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size) };
        Self {
            dtype: T::DTYPE,
            bytes,
        }
    }

    /// Element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty, reason = "no caller asks")]
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    /// All elements as bytes.
    pub const fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// All elements as bytes, to be overwritten.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl fmt::Debug for DataMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.len(), self.dtype)
    }
}

/// How many elements each rank brings to a gather; every rank knows all of them beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts<'a> {
    /// Every rank brings this many.
    Even(usize),
    /// Rank r brings `counts[r]`, which may be 0.
    Each(&'a [usize]),
}

impl Counts<'_> {
    /// What `rank` brings. `Each` must have an entry for it.
    pub fn of(&self, rank: usize) -> usize {
        match self {
            Self::Even(count) => *count,
            Self::Each(counts) => counts[rank],
        }
    }

    /// What `size` ranks bring together; saturates.
    pub fn total(&self, size: usize) -> usize {
        match self {
            Self::Even(count) => count.saturating_mul(size),
            Self::Each(counts) => counts
                .iter()
                .fold(0, |sum, count| sum.saturating_add(*count)),
        }
    }

    /// The largest share.
    pub fn max(&self) -> usize {
        match self {
            Self::Even(count) => *count,
            Self::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_have_the_bytes_of_their_slice() {
        let mut values = [1.0_f32, -2.0];
        let data = Data::new(&values);
        assert_eq!((data.dtype(), data.len()), (Dtype::F32, 2));
        assert_eq!(
            data.bytes(),
            [1.0_f32.to_ne_bytes(), (-2.0_f32).to_ne_bytes()].concat()
        );
        DataMut::new(&mut values).bytes_mut()[4..].copy_from_slice(&7.5_f32.to_ne_bytes());
        assert_eq!(values, [1.0, 7.5]);
        assert_eq!(Data::new::<f32>(&[]).bytes(), []);
    }

    #[test]
    fn counts_add_up() {
        let uneven = Counts::Each(&[3, 0, 5]);
        assert_eq!((uneven.of(2), uneven.total(3), uneven.max()), (5, 8, 5));
        let even = Counts::Even(4);
        assert_eq!((even.of(2), even.total(3), even.max()), (4, 12, 4));
        assert_eq!(Counts::Each(&[usize::MAX, 1]).total(2), usize::MAX);
        assert_eq!(Counts::Each(&[]).max(), 0);
    }
}
