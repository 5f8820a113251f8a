//! Typed slices with the type erased, so that the trait [`Group`](crate::Group) stays object-safe.

use std::fmt;

use half::{bf16, f16};

/// Declares the element types once: name, Rust type, bytes, number on the wire, text.
macro_rules! dtypes {
    ($($name:ident $type:ty, $bytes:literal, $code:literal, $text:literal;)*) => {
        /// The type of the elements of a buffer, as it is announced to the other ranks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the names are Rust's own")]
        pub enum Dtype {
            $($name,)*
        }

        impl Dtype {
            /// Every type there is.
            pub const ALL: [Self; 14] = [$(Self::$name,)*];

            /// Bytes of one element.
            pub const fn bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }

            /// Its number on the wire.
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$name => $code,)*
                }
            }

            /// The dtype with this number.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for Dtype {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$name => $text,)*
                })
            }
        }

        $(
            impl Element for $type {
                const DTYPE: Dtype = Dtype::$name;
            }
            impl sealed::Plain for $type {}
            const _: () = assert!(size_of::<$type>() == $bytes);
        )*
    };
}

dtypes! {
    Bool bool, 1, 1, "bool";
    I8 i8, 1, 2, "i8";
    I16 i16, 2, 3, "i16";
    I32 i32, 4, 4, "i32";
    I64 i64, 8, 5, "i64";
    U8 u8, 1, 6, "u8";
    U16 u16, 2, 7, "u16";
    U32 u32, 4, 8, "u32";
    U64 u64, 8, 9, "u64";
    F16 f16, 2, 10, "f16";
    Bf16 bf16, 2, 11, "bf16";
    F32 f32, 4, 12, "f32";
    F64 f64, 8, 13, "f64";
    Complex64 Complex64, 8, 14, "complex64";
}

/// A complex number of two `f32`, as MLX's and NumPy's `complex64`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Complex64 {
    /// Real part.
    pub re: f32,
    /// Imaginary part.
    pub im: f32,
}

/// A Rust type that can be sent between ranks.
///
/// Sealed. No implementor has padding. Every bit pattern is a value, except for `bool`: a
/// [`DataMut`] normalises its bytes before it returns the slice.
pub trait Element: sealed::Plain {
    /// How this type is announced.
    const DTYPE: Dtype;
}

mod sealed {
    pub trait Plain: Copy + Send + Sync + 'static {}
}

/// A slice that is read: `(len,)` elements of [`Dtype`], in the byte order of this machine.
#[derive(Clone, Copy, derive_more::Debug)]
#[debug("{} {}", self.len(), self.dtype)]
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

    /// Elements of `dtype` by their bytes, aligned or not; bytes of a `bool` other than 0 are true.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of elements.
    pub const fn of_bytes(dtype: Dtype, bytes: &'a [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(dtype.bytes()), "whole elements");
        Self { dtype, bytes }
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

/// A slice that is written: as [`Data`], but exclusive.
#[derive(derive_more::Debug)]
#[debug("{} {}", self.len(), self.dtype)]
pub struct DataMut<'a> {
    dtype: Dtype,
    bytes: &'a mut [u8],
}

impl<'a> DataMut<'a> {
    /// A view of `values`; nothing is copied.
    pub const fn new<T: Element>(values: &'a mut [T]) -> Self {
        let size = size_of_val(values);
        // SAFETY: as in `Data::new`, borrowed exclusively. Every bit pattern is a value of an
        // `Element`, so no write through this view can make an invalid one; the exception, `bool`,
        // is normalised by `drop`, which nobody in this crate, and nobody else can write, skips.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size) };
        Self {
            dtype: T::DTYPE,
            bytes,
        }
    }

    /// Elements of `dtype` by their bytes, aligned or not. Bytes of a `bool` become 0 or 1.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of elements.
    pub const fn of_bytes(dtype: Dtype, bytes: &'a mut [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(dtype.bytes()), "whole elements");
        Self { dtype, bytes }
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

    /// All elements as bytes, to be overwritten. Not public: see `drop`.
    pub(crate) const fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// Lets `write` overwrite the bytes of all elements. Nonzero bytes of a `bool` become true,
    /// even if `write` panics.
    pub fn write<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        // A view of its own, whose drop normalises the bytes.
        let mut view = DataMut::of_bytes(self.dtype, self.bytes);
        write(view.bytes_mut())
    }

    /// Overwrites all elements; nonzero bytes of a `bool` are true.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub fn copy_from_bytes(&mut self, bytes: &[u8]) {
        self.bytes.copy_from_slice(bytes);
        self.tidy();
    }

    fn tidy(&mut self) {
        if self.dtype == Dtype::Bool {
            for byte in &mut *self.bytes {
                *byte = u8::from(*byte != 0);
            }
        }
    }
}

impl Drop for DataMut<'_> {
    /// Bytes from another process may be no valid `bool`: they become one.
    fn drop(&mut self) {
        self.tidy();
    }
}

/// Number of elements that each rank contributes to a gather; every rank knows all of them
/// beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementCounts<'a> {
    /// Every rank contributes this many.
    Even(usize),
    /// Rank r contributes `counts[r]`, which may be 0.
    Each(&'a [usize]),
}

impl ElementCounts<'_> {
    /// Elements of `rank`. `Each` must have an entry for it.
    pub fn of(&self, rank: usize) -> usize {
        match self {
            Self::Even(count) => *count,
            Self::Each(counts) => counts[rank],
        }
    }

    /// Sum of the elements of all ranks before `rank`; saturates.
    pub fn before(&self, rank: usize) -> usize {
        match self {
            Self::Even(count) => count.saturating_mul(rank),
            Self::Each(counts) => Self::Each(&counts[..rank]).total(rank),
        }
    }

    /// Sum of the elements of `size` ranks; saturates.
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
        assert_eq!(Data::new::<f32>(&[]).bytes(), [0_u8; 0]);
    }

    #[test]
    fn bytes_of_a_bool_are_put_in_order() {
        let mut values = [false, true, false];
        DataMut::new(&mut values)
            .bytes_mut()
            .copy_from_slice(&[0, 7, 1]);
        assert_eq!(values, [false, true, true]);
        let mut view = DataMut::new(&mut values);
        view.write(|bytes| bytes.copy_from_slice(&[9, 0, 1]));
        std::mem::forget(view); // in order before it is dropped
        assert_eq!(values, [true, false, true]);
    }

    #[test]
    fn every_dtype_has_a_number_of_its_own() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        assert_eq!(Dtype::from_code(0), None);
        assert_eq!(Dtype::from_code(15), None);
    }

    #[test]
    fn counts_add_up() {
        let uneven = ElementCounts::Each(&[3, 0, 5]);
        assert_eq!((uneven.of(2), uneven.total(3), uneven.max()), (5, 8, 5));
        let even = ElementCounts::Even(4);
        assert_eq!((even.of(2), even.total(3), even.max()), (4, 12, 4));
        assert_eq!(ElementCounts::Each(&[usize::MAX, 1]).total(2), usize::MAX);
        assert_eq!(ElementCounts::Each(&[]).max(), 0);
    }
}
