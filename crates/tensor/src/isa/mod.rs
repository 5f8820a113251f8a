//! Sixteen-lane arithmetic, once per instruction set.
//!
//! Every fast kernel is written once, generic over [`Isa`], and compiled per instruction set by the
//! `kernels!` macro in [`crate::dispatch`]. A *lane* is one row of the weight matrix (or one
//! channel, or one position). Sums never cross lanes except in [`reduce_add`]. So the order of
//! float operations within a lane is the same for 4-, 8- and 16-wide registers, and all
//! implementations give the same bits. [`Scalar`] spells that order out.
//!
//! All methods are `inline(always)` and must be called from a function compiled with the target
//! features of the implementation. Only the entry points in `dispatch` do that, after detection.

/// Functions of one expression, for the implementations of [`Isa`] and its parts.
macro_rules! operations {
    ($($name:ident($($arguments:tt)*) -> $out:ty = $body:expr;)*) => {
        operations! {
            #[inline(always)]
            $($name($($arguments)*) -> $out = $body;)*
        }
    };
    (#[$inline:meta] $($name:ident($($arguments:tt)*) -> $out:ty = $body:expr;)*) => {$(
        #[$inline]
        #[allow(unused_unsafe, reason = "some are register arithmetic alone")]
        unsafe fn $name($($arguments)*) -> $out {
            // SAFETY: the trait's callers guarantee features and pointers.
            unsafe { $body }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod grids;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::{Avx2, AvxVnni};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Avx512Vbmi, Dpbf16};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Neon, smmla};
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) use scalar::Called;
pub(crate) use scalar::Scalar;

use crate::storage::grids::{Eights, Fours};

/// Lanes of [`Isa::F`] and [`Isa::I`].
pub(crate) const LANES: usize = 16;

/// Sixteen lanes of f32 and i32, and 64 bytes of weights (16 rows by 4 columns, row-major).
///
/// # Safety
/// Every method requires that the CPU has the implementation's features, and that pointers are
/// valid for the number of bytes each method names. No alignment is required.
pub(crate) trait Isa: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen i32.
    type I: Copy;
    /// Sixty-four bytes: byte `4 * lane + j` belongs to lane `lane`.
    type W: Copy;
    /// Number of [`F`](Self::F) registers of the machine: loops keep that many values live.
    const REGISTERS: usize;

    // ---- weights ----

    /// Prefetches the cache line at `p`: a hint, `p` need not be valid.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// The same, into the second cache.
    #[inline(always)]
    unsafe fn prefetch_far(_p: *const u8) {}
    /// Prefetches the lines `NEAR` bytes behind `p` into L1 and `FAR` bytes behind it into L2.
    #[inline(always)]
    unsafe fn prefetch_ahead<const NEAR: usize, const FAR: usize>(_p: *const u8) {}
    /// Loads 64 bytes.
    unsafe fn load_w(p: *const u8) -> Self::W;
    /// Stores 64 bytes.
    unsafe fn store_w(p: *mut u8, w: Self::W);
    /// The low four bits of each byte.
    unsafe fn low_nibble(w: Self::W) -> Self::W;
    /// The high four bits of each byte, shifted down.
    unsafe fn high_nibble(w: Self::W) -> Self::W;
    /// Bits `2 * INDEX` and `2 * INDEX + 1` of each byte, shifted down; `INDEX` is 0..=3.
    unsafe fn crumb<const INDEX: u32>(w: Self::W) -> Self::W;
    /// Each byte shifted left by four; the high four bits must be zero.
    unsafe fn shl4(w: Self::W) -> Self::W;
    /// Bitwise or.
    unsafe fn or(a: Self::W, b: Self::W) -> Self::W;
    /// Byte `i` is `value` where bit `i` of the 64 bits (8 bytes, little endian) at `p` is set.
    unsafe fn spread_bits(p: *const u8, value: u8) -> Self::W;
    /// `table[byte]` for bytes 0..=15.
    unsafe fn lookup(table: &[i8; 16], w: Self::W) -> Self::W;
    /// 128 less byte `i` where bit `i` of the 64 bits (8 bytes, little endian) at `p` is set.
    unsafe fn mirrored(w: Self::W, p: *const u8) -> Self::W;
    /// Of each 16 bytes of both: the fours at 0 and 2 of `a`, then of `b`, and those at 1 and 3.
    unsafe fn split(a: Self::W, b: Self::W) -> [Self::W; 2];
    /// The quads of the 64 indices at `plane` ([`crate::formats::grids`]).
    #[inline(always)]
    unsafe fn eights<const N: usize>(grid: &'static Eights<N>, plane: *const u8) -> [Self::W; 8] {
        // SAFETY: passed on.
        unsafe { grids::eights::<Self, N>(grid, plane) }
    }
    /// The quads of the 128 indices at `plane`.
    #[inline(always)]
    unsafe fn fours<const N: usize>(grid: &'static Fours<N>, plane: *const u8) -> [Self::W; 8] {
        // SAFETY: passed on.
        unsafe { grids::fours::<Self, N>(grid, plane) }
    }

    /// Adds to each lane the dot product of its four bytes, unsigned and at most 127, with the
    /// four signed bytes at `x`. Exact.
    unsafe fn dot_unsigned(acc: Self::I, w: Self::W, x: *const i8) -> Self::I;
    /// Whether [`dot_fours`](Self::dot_fours) takes fewer instructions than its parts.
    const FOURS: bool = false;
    /// [`dot_unsigned`](Self::dot_unsigned) of four registers, one after the other, with the
    /// sixteen signed bytes at `x`: weights are at most `most`.
    #[inline(always)]
    unsafe fn dot_fours(mut acc: Self::I, w: &[Self::W; 4], x: *const i8, _most: i32) -> Self::I {
        let mut g = 0;
        while g < w.len() {
            // SAFETY: passed on.
            acc = unsafe { Self::dot_unsigned(acc, w[g], x.add(4 * g)) };
            g += 1;
        }
        acc
    }
    /// Whether [`dot_scaled`](Self::dot_scaled) takes fewer instructions than its parts.
    const PAIRED: bool = false;
    /// Integers of 16 bits as [`dot_scaled`](Self::dot_scaled) takes them: *factors*.
    #[inline(always)]
    unsafe fn factor(x: Self::I) -> Self::I {
        x
    }
    /// Sixteen signed bytes as factors.
    #[inline(always)]
    unsafe fn load_factor(p: *const u8) -> Self::I {
        // SAFETY: passed on.
        unsafe { Self::factor(Self::load_i8(p)) }
    }
    /// `(byte * multiplier + 64) >> 7` of sixteen bytes of at most 127, as factors, which
    /// `multiplier` is too.
    #[inline(always)]
    unsafe fn multiplied_factor(p: *const u8, multiplier: Self::I) -> Self::I {
        // SAFETY: passed on; here factors are integers as they are.
        unsafe {
            let products = Self::mul_i(Self::load_u8(p), multiplier);
            Self::sar7_i(Self::add_i(products, Self::splat_i(64)))
        }
    }
    /// Adds to each lane two [dot products](Self::dot_unsigned) with the 32 signed bytes at `x`,
    /// each times its factor. The first is of the first four registers, the second of the last
    /// four. Weights are at most `most`, which is at most 64; without `halves` both factors are the
    /// same.
    #[inline(always)]
    unsafe fn dot_scaled(
        mut acc: Self::I,
        w: &[Self::W; 8],
        x: *const i8,
        (_most, _halves): (i32, bool),
        factors: [Self::I; 2],
    ) -> Self::I {
        let mut half = 0;
        while half < 2 {
            // SAFETY: passed on; here factors are integers as they are.
            unsafe {
                let mut dots = Self::splat_i(0);
                let mut g = 4 * half;
                while g < 4 * half + 4 {
                    dots = Self::dot_unsigned(dots, w[g], x.add(4 * g));
                    g += 1;
                }
                acc = Self::add_i(acc, Self::mul_i(dots, factors[half]));
            }
            half += 1;
        }
        acc
    }
    /// Subtracts `offset` times each factor times its sum from each lane. Factors are signed bytes,
    /// sums have 12 bits, and `offset` is at most 32.
    #[inline(always)]
    unsafe fn less_offset(
        mut acc: Self::I,
        factors: [Self::I; 2],
        offset: i32,
        sums: [i32; 2],
    ) -> Self::I {
        let mut half = 0;
        while half < 2 {
            // SAFETY: register arithmetic; here factors are integers as they are.
            unsafe {
                let less = Self::splat_i(-offset * sums[half]);
                acc = Self::add_i(acc, Self::mul_i(factors[half], less));
            }
            half += 1;
        }
        acc
    }
    /// Crumb `INDEX` of each byte, at its bits 4 and 5.
    #[inline(always)]
    unsafe fn high_crumb<const INDEX: u32>(w: Self::W) -> Self::W {
        // SAFETY: register arithmetic.
        unsafe { Self::shl4(Self::crumb::<INDEX>(w)) }
    }
    /// Like [`dot_unsigned`](Self::dot_unsigned) for signed bytes, **plus** `SIGNED_BIAS` times the
    /// sum of the four bytes at `x`, which must lie in -127..=127. The caller subtracts the bias
    /// once per chunk.
    unsafe fn dot_signed(acc: Self::I, w: Self::W, x: *const i8) -> Self::I;
    /// See [`dot_signed`](Self::dot_signed): 128 where the instruction takes unsigned weights.
    const SIGNED_BIAS: i32;

    // ---- i32 lanes ----

    /// The same value in every lane.
    unsafe fn splat_i(x: i32) -> Self::I;
    /// Wrapping addition.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the product.
    unsafe fn mul_i(a: Self::I, b: Self::I) -> Self::I;
    /// The part of a number of 16 bits that [`small`](Self::small) keeps: all of it, or its low
    /// half.
    const SMALL: i32 = -1;
    /// Numbers of 16 bits as [`mul_add_small`](Self::mul_add_small) takes its factors.
    unsafe fn small(x: Self::I) -> Self::I;
    /// `acc + a * b`, where `a` has 16 bits and `b` is [`small`](Self::small), or of 15 bits and
    /// not negative. It is one instruction where a product of 32 bits takes two.
    unsafe fn mul_add_small(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Sixteen signed bytes, widened.
    unsafe fn load_i8(p: *const u8) -> Self::I;
    /// Sixteen unsigned bytes, widened.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// Sixteen nibbles in 8 bytes, low ones first, widened.
    unsafe fn load_nibbles(p: *const u8) -> Self::I;
    /// Sixteen signed words, widened.
    unsafe fn load_i16(p: *const u8) -> Self::I;
    /// Loads 16 i32.
    unsafe fn load_i(p: *const i32) -> Self::I;
    /// Stores 16 i32.
    unsafe fn store_i(p: *mut i32, x: Self::I);
    /// Logical right shift of every lane by four.
    unsafe fn shr4_i(a: Self::I) -> Self::I;
    /// Each lane shifted left by three.
    unsafe fn shl3_i(a: Self::I) -> Self::I;
    /// Left shift of every lane by seven.
    unsafe fn shl7_i(a: Self::I) -> Self::I;
    /// Arithmetic right shift of every lane by seven.
    unsafe fn sar7_i(a: Self::I) -> Self::I;
    /// Bitwise and.
    unsafe fn and_i(a: Self::I, b: Self::I) -> Self::I;
    /// Nearest f32, ties to even.
    unsafe fn to_f(a: Self::I) -> Self::F;

    // ---- f32 lanes ----

    /// The same value in every lane.
    unsafe fn splat(x: f32) -> Self::F;
    /// Loads 16 f32.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Stores 16 f32.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// Before other threads may read what was [stored past](Self::store_past) the caches.
    #[inline(always)]
    unsafe fn fence() {}
    /// Stores 16 f32 to a cache line, past the caches where there is a way: it will not be read
    /// soon.
    #[inline(always)]
    unsafe fn store_past(p: *mut f32, x: Self::F) {
        // SAFETY: passed on.
        unsafe { Self::store(p, x) }
    }
    /// Loads 16 f16, exactly.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// The f16 at `p` in every lane, exactly.
    #[inline(always)]
    unsafe fn splat_f16(p: *const u16) -> Self::F {
        // SAFETY: sixteen f16; the features by the caller.
        unsafe { Self::load_f16([*p; LANES].as_ptr()) }
    }
    /// Sixteen bytes of FP8's E4M3, exactly, divided by 256. Its NaN are 1.875.
    ///
    /// E4M3 has the bias 7 and f16 has 15. Its exponent and fraction, read as the low bits of an
    /// f16's exponent and the top of its fraction, are a number 2^8 times smaller.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// [`load_e4m3`](Self::load_e4m3) of four columns.
    #[inline(always)]
    unsafe fn load_e4m3s(p: *const u8) -> [Self::F; 4] {
        // SAFETY: passed on.
        unsafe { e4m3_columns::<Self>(p) }
    }
    /// Loads 16 bf16, exactly.
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    /// Each of the two bf16 at `p` in every lane, exactly.
    unsafe fn splat_bf16s(p: *const u16) -> [Self::F; 2];
    /// `a + b`.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; operands are never NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; operands are never NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// `|a|`.
    unsafe fn abs(a: Self::F) -> Self::F;
    /// `value` where `a >= b`, else zero.
    unsafe fn keep_if_ge(a: Self::F, b: Self::F, value: Self::F) -> Self::F;
    /// Adds `bits(n) << 23` to the bits of `x`: scales `x` by a power of two, see [`exp`].
    unsafe fn scale_by_bits(x: Self::F, n: Self::F) -> Self::F;
    /// Nearest i32, ties to even; values lie within an i32.
    unsafe fn round(x: Self::F) -> Self::I;
    /// The largest lane; no lane is NaN. The order does not matter.
    unsafe fn reduce_max(x: Self::F) -> f32;
    /// The wrapping sum of the lanes. The order does not matter.
    unsafe fn reduce_add_i(x: Self::I) -> i32;
    /// Stores 16 signed bytes; values lie in -128..=127.
    unsafe fn store_i8(p: *mut i8, x: Self::I);
}

/// Products of 16-bit integers, where an instruction set has them at half the rate of bytes or
/// better. An [`Isa::W`] is 32 words; words `2 * lane` and `2 * lane + 1` are lane `lane`'s.
///
/// # Safety
/// See [`Isa`].
pub(crate) trait Words: Isa {
    /// Whether loops of two turns around loops of dot products had better not be unrolled: see
    /// where it is `true`.
    const ROLLED: bool = false;
    /// The bytes of each lane as words, signed or not: bytes 0 and 2 of it, and bytes 1 and 3.
    unsafe fn widen(w: Self::W, signed: bool) -> [Self::W; 2];
    /// The low word of each lane, twice.
    unsafe fn twice(x: Self::I) -> Self::W;
    /// Wrapping difference of words.
    unsafe fn sub_words(a: Self::W, b: Self::W) -> Self::W;
    /// Adds to each lane the dot product of its two words with the two at `x`. Exact while the
    /// sums fit.
    unsafe fn dot_words(acc: Self::I, w: Self::W, x: *const i16) -> Self::I;
    /// Adds to each lane the dot product of its two words in `a` and in `b`.
    unsafe fn dot_lanes(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// The low words of the lanes of one, the high ones of the other.
    unsafe fn merge(low: Self::I, high: Self::I) -> Self::I;
    /// Each lane shifted left by `N`.
    unsafe fn shl_i<const N: u32>(a: Self::I) -> Self::I;
    /// Stores 16 integers that fit, of every four the middle two exchanged: pairs as
    /// [`widen`](Self::widen) gives them.
    unsafe fn store_words(p: *mut i16, x: Self::I);
}

/// Words as two planes of bytes, for sets that multiply matrices of them.
///
/// # Safety
/// See [`Isa`].
#[cfg(target_arch = "x86_64")]
pub(crate) trait BytePlanes: Words {
    /// Arithmetic right shift of every lane by 16.
    unsafe fn sar16_i(a: Self::I) -> Self::I;
    /// Words times words plus integers of 32 bits, their low and their high words: of the sums the
    /// low and the high words.
    unsafe fn mul_add_wide(a: Self::W, b: Self::W, c: [Self::W; 2]) -> [Self::W; 2];
    /// Low 16 bits of the products of words.
    unsafe fn mul_words(a: Self::W, b: Self::W) -> Self::W;
    /// Wrapping sum of words.
    unsafe fn add_words(a: Self::W, b: Self::W) -> Self::W;
    /// The bytes that [`widen`](Words::widen) made words of, put together again: the high bytes of
    /// the words, signed, and the low ones, unsigned.
    unsafe fn narrow(pair: [Self::W; 2]) -> [Self::W; 2];
}

/// Operations for panels of signed bytes, for sets that multiply matrices of them.
///
/// # Safety
/// See [`Isa`].
#[cfg(target_arch = "aarch64")]
pub(crate) trait Bytes: Isa {
    /// Each byte less `offset`, wrapping.
    unsafe fn less(w: Self::W, offset: u8) -> Self::W;
    /// The quads of a chunk in the order in which the set's matrix instruction takes them.
    #[inline(always)]
    unsafe fn arranged(quads: [Self::W; 8]) -> [Self::W; 8] {
        quads
    }
}

/// See [`Isa::load_e4m3s`].
///
/// # Safety
/// See [`Isa`].
#[inline(always)]
unsafe fn e4m3_columns<S: Isa>(p: *const u8) -> [S::F; 4] {
    // SAFETY: passed on.
    unsafe {
        let mut columns = [S::load_e4m3(p); 4];
        let mut j = 1;
        while j < columns.len() {
            columns[j] = S::load_e4m3(p.add(LANES * j));
            j += 1;
        }
        columns
    }
}

/// Multiplication of two columns of BF16 weights with two activations in bf16.
pub(crate) trait Pairs<S: Isa>: Copy {
    /// Two columns of 16 rows.
    type Weights: Copy;
    /// Loads column `k` and, behind it, `k + 1`.
    ///
    /// # Safety
    /// Both are there; features.
    unsafe fn load(p: *const u8) -> Self::Weights;
    /// `fma(w[k], x[k], fma(w[k + 1], x[k + 1], acc))` for the two activations at `x`.
    ///
    /// # Safety
    /// Both are there; features.
    unsafe fn dot(acc: S::F, w: Self::Weights, x: *const u16) -> S::F;
}

/// Bytes of a column of BF16 weights.
pub(crate) const BF16_COLUMN: usize = 2 * LANES;

/// Columns one after the other, on any instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InTurn;

impl<S: Isa> Pairs<S> for InTurn {
    type Weights = [S::F; 2];

    #[inline(always)]
    unsafe fn load(p: *const u8) -> [S::F; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let second = S::load_bf16(p.add(BF16_COLUMN).cast());
            [S::load_bf16(p.cast()), second]
        }
    }

    #[inline(always)]
    unsafe fn dot(acc: S::F, w: [S::F; 2], x: *const u16) -> S::F {
        // SAFETY: by the caller's promise.
        unsafe {
            let x = S::splat_bf16s(x);
            S::fma(w[0], x[0], S::fma(w[1], x[1], acc))
        }
    }
}

/// The sum of the lanes: lane `i` plus lane `i + 8`, then 4, 2, 1.
///
/// # Safety
/// See [`Isa`].
#[inline(always)]
pub(crate) unsafe fn reduce_add<S: Isa>(x: S::F) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: `lanes` holds 16 f32.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// e to the power of each lane, error below 2 units in the last place. It is 0 below -87.33, and
/// inputs above 88.37 are taken as 88.37.
///
/// Cody and Waite reduction with a polynomial of degree 6 (coefficients of Cephes `expf`, Moshier
/// 1992). The rounding to an integer uses the constant 1.5 * 2^23, whose addition leaves the
/// integer in the low mantissa bits. No conversion instruction is needed, so every instruction set
/// does the same float operations.
///
/// # Safety
/// See [`Isa`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Isa>(x: S::F) -> S::F {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.37;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512, exact in f32
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLY: [f32; 6] = [
        1.987_569_2e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        5e-1,
    ];
    // SAFETY: register arithmetic only; the caller guarantees the features.
    unsafe {
        let clamped = S::max(S::min(x, S::splat(HIGHEST)), S::splat(LOWEST));
        let shifted = S::fma(clamped, S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
        let n = S::sub(shifted, S::splat(ROUND));
        let r = S::fma(n, S::splat(-LN2_HIGH), clamped);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(POLY[0]);
        let mut i = 1;
        while i < POLY.len() {
            p = S::fma(p, r, S::splat(POLY[i]));
            i += 1;
        }
        let p = S::fma(p, S::mul(r, r), r);
        let p = S::add(p, S::splat(1.0));
        S::keep_if_ge(x, S::splat(LOWEST), S::scale_by_bits(p, shifted))
    }
}
