//! Dot products of integers in registers of 32 bytes: AVX2's and AVX-VNNI's.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one contract for all: the trait's callers guarantee features"
)]

use std::arch::asm;
use std::arch::x86_64::*;

/// Dot products of integers, added to lanes of 32 bits. `x` of bytes lie in -127..=127.
pub(crate) trait Dots: Copy {
    /// See `Isa`.
    const SIGNED_BIAS: i32;
    /// See `Words`.
    const ROLLED: bool;
    /// See `Isa`.
    const FOURS: bool = false;
    /// Dot product of four unsigned bytes of at most 127 with four signed ones.
    unsafe fn unsigned(acc: __m256i, w: __m256i, x: __m256i) -> __m256i;
    /// [`unsigned`](Self::unsigned) for four registers, of bytes of at most `most`.
    #[inline(always)]
    unsafe fn fours(acc: __m256i, w: [__m256i; 4], x: [__m256i; 4], _most: i32) -> __m256i {
        unsafe {
            let acc = Self::unsigned(Self::unsigned(acc, w[0], x[0]), w[1], x[1]);
            Self::unsigned(Self::unsigned(acc, w[2], x[2]), w[3], x[3])
        }
    }
    /// Dot product of four signed bytes with four signed ones, plus the bias.
    unsafe fn signed(acc: __m256i, w: __m256i, x: __m256i) -> __m256i;
    /// Dot product of two signed words with two.
    unsafe fn words(acc: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// AVX2's, in two or three steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MultiplyAdd;

impl Dots for MultiplyAdd {
    const SIGNED_BIAS: i32 = 0;
    const ROLLED: bool = false;
    const FOURS: bool = true;

    #[inline(always)]
    unsafe fn unsigned(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // Pairs stay below 2 * 127 * 127 < 2^15: the 16-bit step cannot saturate.
        unsafe { add_pairs(acc, _mm256_maddubs_epi16(w, x)) }
    }
    #[inline(always)]
    unsafe fn fours(acc: __m256i, w: [__m256i; 4], x: [__m256i; 4], most: i32) -> __m256i {
        // Sums as many pairs of at most 2 * 127 * most as fit into 16 bits.
        unsafe {
            if 2 * 2 * 127 * most > i32::from(i16::MAX) {
                let acc = Self::unsigned(Self::unsigned(acc, w[0], x[0]), w[1], x[1]);
                return Self::unsigned(Self::unsigned(acc, w[2], x[2]), w[3], x[3]);
            }
            let first = _mm256_maddubs_epi16(w[0], x[0]);
            let first = _mm256_add_epi16(first, _mm256_maddubs_epi16(w[1], x[1]));
            let second = _mm256_maddubs_epi16(w[2], x[2]);
            let second = _mm256_add_epi16(second, _mm256_maddubs_epi16(w[3], x[3]));
            if 4 * 2 * 127 * most <= i32::from(i16::MAX) {
                return add_pairs(acc, _mm256_add_epi16(first, second));
            }
            add_pairs(add_pairs(acc, first), second)
        }
    }
    #[inline(always)]
    unsafe fn signed(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // |w| * (x with the sign of w): |w| <= 128, |x| <= 127, pairs at most 32,512.
        unsafe { Self::unsigned(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) }
    }
    #[inline(always)]
    unsafe fn words(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) }
    }
}

/// Adds pairs of words to lanes of 32 bits.
#[inline(always)]
unsafe fn add_pairs(acc: __m256i, pairs: __m256i) -> __m256i {
    unsafe { MultiplyAdd::words(acc, pairs, _mm256_set1_epi16(1)) }
}

/// AVX-VNNI's, in one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vnni;

impl Dots for Vnni {
    const SIGNED_BIAS: i32 = 128;
    /// Products as text cannot have an operand in memory, and the compiler spills accumulators in
    /// the middle of the unrolled loop. There 512 rows of Q6_K do 44 to 110 Gop/s, in a loop 130 to
    /// 152 (EPYC, Zen 5). AVX2 does 128, in a loop 115.
    const ROLLED: bool = true;

    #[inline(always)]
    unsafe fn unsigned(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(acc, w, x) }
    }
    #[inline(always)]
    unsafe fn signed(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // The instruction multiplies unsigned by signed: flipping the top bit adds 128.
        unsafe { Self::unsigned(acc, _mm256_xor_si256(w, _mm256_set1_epi8(-128)), x) }
    }
    #[inline(always)]
    unsafe fn words(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { dpwssd(acc, a, b) }
    }
}

/// `vpdpwssd` as text, as AVX-512 has it: the compiler makes two instructions of the
/// intrinsic.
#[inline]
#[target_feature(enable = "avxvnni")]
unsafe fn dpwssd(mut acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
    unsafe {
        asm!(
            "{{vex}} vpdpwssd {acc}, {a}, {b}",
            acc = inout(ymm_reg) acc, a = in(ymm_reg) a, b = in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}
