//! Quantised activations as kernels read them; [`crate::activations`] makes them.

use paceline_base::KernelClass;

use crate::isa::{Isa, LANES};
use crate::memory::Zeroed;

/// Columns whose integers are taken together.
pub const CHUNK: usize = 32;

/// Spans whose largest magnitude is not above this are taken as zero: below it `127 / m`
/// (or 16256 / m) overflows to infinity.
const SMALLEST: f32 = 1e-34;

/// Precision of activations for integer kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 127 steps: one byte, as other engines do. Changes the most probable token in 2 to 4 of 100
    /// positions (docs/numerics.md).
    Eight,
    /// 16256 steps: two bytes.
    Fifteen,
}

impl Precision {
    /// That of a kernel class. Where weights are floats it matters for BF16 alone, whose
    /// activations are rounded to bf16 with [`Eight`](Self::Eight) ([`crate::matmul::pairs`]).
    pub const fn of(class: KernelClass) -> Self {
        match class {
            KernelClass::CpuQ8 => Self::Eight,
            _ => Self::Fifteen,
        }
    }

    /// Steps from zero to the largest magnitude of a span.
    pub(crate) const fn steps(self) -> f32 {
        match self {
            Self::Eight => 127.0,
            Self::Fifteen => 127.0 * 128.0,
        }
    }
}

/// Scale and sums of one chunk of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Meta {
    /// Value of one step of `q`, that of the span.
    pub(crate) scale: f32,
    /// Sums of the bytes of `q`, high and low (or all of it and 0), over each half of 16.
    pub(crate) sums: [[i32; 2]; 2],
    /// Sums over both halves, [small](Isa::small), for types with mins. (In copies for panels of
    /// words: the form of [`copied`](crate::batch::words::copied).)
    pub(crate) small: [i32; 2],
    /// Minus 8 times the same, for nibbles: both ready to be loaded.
    pub(crate) eight_less: [i32; 2],
}

impl Meta {
    /// The sums of the bytes over both halves.
    #[inline(always)]
    pub(crate) const fn whole(&self) -> [i32; 2] {
        let [first, second] = self.sums;
        [first[0] + second[0], first[1] + second[1]]
    }
}

// SAFETY: numbers all, for which zeros are values.
unsafe impl Zeroed for Meta {}

/// Read access for kernels, with raw pointers to keep bounds checks out of inner loops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantisedView<'a> {
    pub(crate) cols: usize,
    /// f32; bits of bf16 in a [`rounded_view`](crate::Activations::rounded_view). (With a pointer
    /// for each a small product takes 0.5 % more instructions.)
    pub(crate) values: *const f32,
    pub(crate) high: *const i8,
    pub(crate) low: *const i8,
    pub(crate) meta: *const Meta,
    pub(crate) _borrow: std::marker::PhantomData<&'a ()>,
}

// SAFETY: a view only reads, and borrows the activations for its lifetime.
unsafe impl Sync for QuantisedView<'_> {}

impl QuantisedView<'_> {
    /// The integers of chunk `c` of row `t`: `[high]` or `[high, low]`, and its scale and sums.
    ///
    /// # Safety
    /// Both lie within the activations, which have `TERMS` bytes for each integer.
    #[inline(always)]
    pub(crate) unsafe fn chunk<const TERMS: usize>(
        &self,
        t: usize,
        c: usize,
    ) -> ([*const i8; TERMS], Meta) {
        let start = t * self.cols + c * CHUNK;
        let mut bytes = [self.high; TERMS];
        // SAFETY: in bounds by the caller's promise.
        unsafe {
            bytes[0] = self.high.add(start);
            if TERMS == 2 {
                bytes[1] = self.low.add(start);
            }
            (bytes, *self.meta.add(start / CHUNK))
        }
    }

    /// The f32 values of row `t`.
    ///
    /// # Safety
    /// `t` is a row in use.
    #[inline(always)]
    pub(crate) unsafe fn values(&self, t: usize) -> *const f32 {
        // SAFETY: in bounds by the caller's promise.
        unsafe { self.values.add(t * self.cols) }
    }

    /// The bits of bf16 of row `t`, in a [`rounded_view`](crate::Activations::rounded_view).
    ///
    /// # Safety
    /// `t` is a row in use.
    #[inline(always)]
    pub(crate) unsafe fn rounded(&self, t: usize) -> *const u16 {
        // SAFETY: in bounds by the caller's promise.
        unsafe { self.values.cast::<u16>().add(t * self.cols) }
    }
}

/// Rounding of a span's values to integers.
#[derive(Clone, Copy)]
pub(crate) struct Rounding {
    /// Steps in a value of 1; 0 where all are taken as zero.
    inverse: f32,
    /// Value of a step.
    pub(crate) scale: f32,
}

impl Rounding {
    /// That of the `cols` values at `x`, a multiple of 16.
    ///
    /// # Safety
    /// Features of `S`; the values are there.
    #[inline(always)]
    pub(crate) unsafe fn of<S: Isa>(x: *const f32, cols: usize, precision: Precision) -> Self {
        // SAFETY: by the caller's promise.
        let largest = unsafe {
            let mut most = S::abs(S::load(x));
            for k in (LANES..cols).step_by(LANES) {
                most = S::max(S::abs(S::load(x.add(k))), most);
            }
            S::reduce_max(most)
        };
        // Written so that NaN counts as too small: it gives zeros, not wild integers.
        let usable = largest > SMALLEST && largest.is_finite();
        let steps = precision.steps();
        Self {
            inverse: if usable { steps / largest } else { 0.0 },
            scale: if usable { largest / steps } else { 0.0 },
        }
    }

    /// The integers of 16 values.
    ///
    /// # Safety
    /// See [`of`](Self::of).
    #[inline(always)]
    pub(crate) unsafe fn integers<S: Isa>(self, x: *const f32) -> S::I {
        // SAFETY: by the caller's promise.
        unsafe {
            if self.inverse > 0.0 {
                S::round(S::mul(S::load(x), S::splat(self.inverse)))
            } else {
                S::splat_i(0)
            }
        }
    }
}

/// The value of an integer's bytes: `128 high + low`, or the only byte.
#[inline(always)]
pub(crate) const fn joined<const TERMS: usize>([high, low]: [i32; 2]) -> i32 {
    if TERMS == 2 { 128 * high + low } else { high }
}
