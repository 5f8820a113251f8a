//! AVX2 with FMA, and AVX-VNNI: lanes 0..8 in the first register of each pair, 8..16 in the second.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one contract for all: the trait's callers guarantee features and pointers"
)]

mod dots;

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Isa, Words};
use dots::{Dots, MultiplyAdd, Vnni};

/// [`Isa::prefetch_ahead`] of x86. Assembly stays in place between the steps of a product; the
/// compiler moves the intrinsic's prefetches together.
#[inline(always)]
pub(super) unsafe fn prefetch_lines<const NEAR: usize, const FAR: usize>(p: *const u8) {
    unsafe {
        asm!(
            "prefetcht0 [{p} + {near}]",
            "prefetcht1 [{p} + {far}]",
            p = in(reg) p, near = const NEAR, far = const FAR,
            options(nostack, preserves_flags, readonly)
        );
    }
}

/// AVX2 alone: needs avx2, fma and f16c.
pub(crate) type Avx2 = Ymm<MultiplyAdd>;

/// With the dot products of AVX-VNNI: needs avxvnni too.
pub(crate) type AvxVnni = Ymm<Vnni>;

/// Registers of eight lanes, whose dot products are those of `D`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ymm<D>(PhantomData<D>);

type F = [__m256; 2];
type I = [__m256i; 2];

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($f:expr, $a:expr) => {
        unsafe { [$f($a[0]), $f($a[1])] }
    };
    ($f:expr, $a:expr, $b:expr) => {
        unsafe { [$f($a[0], $b[0]), $f($a[1], $b[1])] }
    };
    ($f:expr, $a:expr, $b:expr, $c:expr) => {
        unsafe { [$f($a[0], $b[0], $c[0]), $f($a[1], $b[1], $c[1])] }
    };
}

#[inline(always)]
unsafe fn splat_bytes(x: i8) -> I {
    unsafe { [_mm256_set1_epi8(x); 2] }
}

/// Thirty-two bytes, 0xff where the bit is set.
#[inline(always)]
unsafe fn spread32(bits: u32) -> __m256i {
    unsafe {
        let order = _mm256_setr_epi64x(
            0x0000_0000_0000_0000,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let select = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), order);
        _mm256_cmpeq_epi8(_mm256_and_si256(bytes, select), select)
    }
}

/// Sixteen bytes of E4M3 as f16, see [`Isa::load_e4m3`].
#[inline(always)]
pub(super) unsafe fn e4m3_halves(p: *const u8) -> __m256i {
    unsafe {
        // The sign is in bits 14 and 15 then.
        let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
        _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(!0x4000))
    }
}

/// Sixteen nibbles in 8 bytes, low ones first, as bytes.
#[inline(always)]
pub(super) unsafe fn nibble_bytes(p: *const u8) -> __m128i {
    unsafe {
        let low = _mm_loadl_epi64(p.cast());
        let both = _mm_unpacklo_epi8(low, _mm_srli_epi16::<4>(low));
        _mm_and_si128(both, _mm_set1_epi8(15))
    }
}

/// Sixteen bytes, each in the upper halves of both words of its lane; the lower ones are 0.
#[inline(always)]
unsafe fn raised_bytes(p: *const u8) -> I {
    unsafe {
        let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
        // Clears the first and third of each four bytes.
        let first = _mm256_setr_epi32(
            0x0080_0080,
            0x0180_0180,
            0x0280_0280,
            0x0380_0380,
            0x0480_0480,
            0x0580_0580,
            0x0680_0680,
            0x0780_0780,
        );
        let second = _mm256_add_epi32(first, _mm256_set1_epi32(0x0800_0800));
        [
            _mm256_shuffle_epi8(bytes, first),
            _mm256_shuffle_epi8(bytes, second),
        ]
    }
}

/// The products of pairs of columns of quads `2 * N` and `2 * N + 1`, added up.
#[inline(always)]
unsafe fn pair<const N: usize>(w: &[I; 8], x: *const i8) -> I {
    let (a, b) = unsafe {
        let x = x.cast::<u8>().add(8 * N);
        (splat_four(x), splat_four(x.add(4)))
    };
    let (first, second) = (w[2 * N], w[2 * N + 1]);
    let first = both!(_mm256_maddubs_epi16, first, a);
    let second = both!(_mm256_maddubs_epi16, second, b);
    both!(_mm256_add_epi16, first, second)
}

/// Four bytes in every lane.
#[inline(always)]
unsafe fn splat_four(x: *const u8) -> I {
    unsafe { [_mm256_set1_epi32(x.cast::<i32>().read_unaligned()); 2] }
}

impl<D: Dots> Isa for Ymm<D> {
    type F = F;
    type I = I;
    type W = I;
    const REGISTERS: usize = 8;
    const SIGNED_BIAS: i32 = D::SIGNED_BIAS;
    const FOURS: bool = D::FOURS;
    const PAIRED: bool = D::FOURS;
    const SMALL: i32 = 0xffff;

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_far(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_ahead<const NEAR: usize, const FAR: usize>(p: *const u8) {
        unsafe { prefetch_lines::<NEAR, FAR>(p) }
    }
    #[inline(always)]
    unsafe fn load_w(p: *const u8) -> I {
        unsafe {
            [
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(32).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_w(p: *mut u8, w: I) {
        unsafe {
            _mm256_storeu_si256(p.cast(), w[0]);
            _mm256_storeu_si256(p.add(32).cast(), w[1]);
        }
    }
    #[inline(always)]
    unsafe fn low_nibble(w: I) -> I {
        let mask = unsafe { splat_bytes(15) };
        both!(_mm256_and_si256, w, mask)
    }
    #[inline(always)]
    unsafe fn high_nibble(w: I) -> I {
        let shifted = both!(_mm256_srli_epi16::<4>, w);
        unsafe { Self::low_nibble(shifted) }
    }
    #[inline(always)]
    unsafe fn crumb<const INDEX: u32>(w: I) -> I {
        let count = unsafe { _mm_cvtsi32_si128(2 * INDEX as i32) };
        let mask = unsafe { splat_bytes(3) };
        let shifted = unsafe { [_mm256_srl_epi16(w[0], count), _mm256_srl_epi16(w[1], count)] };
        both!(_mm256_and_si256, shifted, mask)
    }
    #[inline(always)]
    unsafe fn spread_bits(p: *const u8, value: u8) -> I {
        let bits = unsafe { p.cast::<[u32; 2]>().read_unaligned() };
        let set = unsafe {
            [
                spread32(u32::from_le(bits[0])),
                spread32(u32::from_le(bits[1])),
            ]
        };
        let value = unsafe { splat_bytes(value as i8) };
        both!(_mm256_and_si256, set, value)
    }
    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], w: I) -> I {
        let table =
            unsafe { [_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())); 2] };
        both!(_mm256_shuffle_epi8, table, w)
    }
    #[inline(always)]
    unsafe fn mirrored(w: I, p: *const u8) -> I {
        let bits = unsafe { p.cast::<[u32; 2]>().read_unaligned() };
        let set = unsafe {
            [
                spread32(u32::from_le(bits[0])),
                spread32(u32::from_le(bits[1])),
            ]
        };
        // 128 - w is 129 + !w.
        let flipped = both!(_mm256_xor_si256, w, set);
        let value = unsafe { splat_bytes(129_u8 as i8) };
        let more = both!(_mm256_and_si256, set, value);
        both!(_mm256_add_epi8, flipped, more)
    }
    #[inline(always)]
    unsafe fn split(a: I, b: I) -> [I; 2] {
        let (a, b) = (both!(_mm256_castsi256_ps, a), both!(_mm256_castsi256_ps, b));
        let even = both!(_mm256_shuffle_ps::<0b10_00_10_00>, a, b);
        let odd = both!(_mm256_shuffle_ps::<0b11_01_11_01>, a, b);
        [
            both!(_mm256_castps_si256, even),
            both!(_mm256_castps_si256, odd),
        ]
    }
    #[inline(always)]
    unsafe fn dot_unsigned(acc: I, w: I, x: *const i8) -> I {
        let x = unsafe { splat_four(x.cast()) };
        both!(D::unsigned, acc, w, x)
    }
    #[inline(always)]
    unsafe fn dot_fours(acc: I, w: &[I; 4], x: *const i8, most: i32) -> I {
        let [a, b, c, d] = *w;
        unsafe {
            let x = x.cast::<u8>();
            let x = [
                splat_four(x),
                splat_four(x.add(4)),
                splat_four(x.add(8)),
                splat_four(x.add(12)),
            ];
            let x = [x[0][0], x[1][0], x[2][0], x[3][0]];
            [
                D::fours(acc[0], [a[0], b[0], c[0], d[0]], x, most),
                D::fours(acc[1], [a[1], b[1], c[1], d[1]], x, most),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_factor(p: *const u8) -> I {
        let raised = unsafe { raised_bytes(p) };
        both!(_mm256_srai_epi16::<8>, raised)
    }
    #[inline(always)]
    unsafe fn multiplied_factor(p: *const u8, multiplier: I) -> I {
        // (256 byte * multiplier + 2^14) >> 15
        let raised = unsafe { raised_bytes(p) };
        both!(_mm256_mulhrs_epi16, raised, multiplier)
    }
    #[inline(always)]
    unsafe fn dot_scaled(
        acc: I,
        w: &[I; 8],
        x: *const i8,
        (most, halves): (i32, bool),
        factors: [I; 2],
    ) -> I {
        // A 16-bit lane has the products of two columns of a pair of quads. It holds the sum of as
        // many pairs of at most 4 * 127 * most as fit into 16 bits.
        let holds = |pairs: i32| pairs * 4 * 127 * most <= i32::from(i16::MAX);
        assert!(holds(1), "at most {most}");
        let [a, b, c, d] = unsafe {
            [
                pair::<0>(w, x),
                pair::<1>(w, x),
                pair::<2>(w, x),
                pair::<3>(w, x),
            ]
        };
        if !holds(2) {
            let acc = both!(D::words, acc, a, factors[0]);
            let acc = both!(D::words, acc, b, factors[0]);
            let acc = both!(D::words, acc, c, factors[1]);
            return both!(D::words, acc, d, factors[1]);
        }
        let first = both!(_mm256_add_epi16, a, b);
        let second = both!(_mm256_add_epi16, c, d);
        if !halves && holds(4) {
            let all = both!(_mm256_add_epi16, first, second);
            return both!(D::words, acc, all, factors[0]);
        }
        let acc = both!(D::words, acc, first, factors[0]);
        both!(D::words, acc, second, factors[1])
    }
    #[inline(always)]
    unsafe fn less_offset(acc: I, factors: [I; 2], offset: i32, sums: [i32; 2]) -> I {
        // A factor of each half, times the offset, in the words of a lane: 128 * 32 at most.
        let [first, second] = factors;
        let factors = both!(_mm256_blend_epi16::<0b1010_1010>, first, second);
        let less = unsafe { [_mm256_set1_epi16(-offset as i16); 2] };
        let factors = both!(_mm256_mullo_epi16, factors, less);
        let sums = unsafe { [_mm256_set1_epi32((sums[0] & 0xffff) | (sums[1] << 16)); 2] };
        both!(D::words, acc, factors, sums)
    }
    #[inline(always)]
    unsafe fn high_crumb<const INDEX: u32>(w: I) -> I {
        let mask = unsafe { splat_bytes(0x30) };
        let shifted = match INDEX {
            0 => both!(_mm256_slli_epi16::<4>, w),
            1 => both!(_mm256_slli_epi16::<2>, w),
            2 => w,
            _ => both!(_mm256_srli_epi16::<2>, w),
        };
        both!(_mm256_and_si256, shifted, mask)
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: I, w: I, x: *const i8) -> I {
        let x = unsafe { splat_four(x.cast()) };
        both!(D::signed, acc, w, x)
    }

    #[inline(always)]
    unsafe fn small(x: I) -> I {
        let low = unsafe { [_mm256_set1_epi32(0xffff); 2] };
        both!(_mm256_and_si256, x, low)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> I {
        let halves = unsafe { [_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(p.add(8).cast())] };
        both!(_mm256_cvtepi8_epi32, halves)
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> I {
        let halves = unsafe { [_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(p.add(8).cast())] };
        both!(_mm256_cvtepu8_epi32, halves)
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> I {
        let halves = unsafe {
            let bytes = nibble_bytes(p);
            [bytes, _mm_unpackhi_epi64(bytes, bytes)]
        };
        both!(_mm256_cvtepu8_epi32, halves)
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const u8) -> I {
        let halves = unsafe { [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast())] };
        both!(_mm256_cvtepi16_epi32, halves)
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut i32, x: I) {
        unsafe { Self::store_w(p.cast(), x) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        let halves = unsafe { [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())] };
        both!(_mm256_cvtph_ps, halves)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> F {
        unsafe {
            let halves = e4m3_halves(p);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        let halves = unsafe { [_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())] };
        let wide = both!(_mm256_cvtepu16_epi32, halves);
        let bits = both!(_mm256_slli_epi32::<16>, wide);
        both!(_mm256_castsi256_ps, bits)
    }
    #[inline(always)]
    unsafe fn splat_bf16s(p: *const u16) -> [F; 2] {
        unsafe {
            let pair = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let odd = _mm256_and_si256(pair, _mm256_set1_epi32(!0xffff));
            [_mm256_slli_epi32::<16>(pair), odd].map(|x| [_mm256_castsi256_ps(x); 2])
        }
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        let mask = unsafe { [_mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX)); 2] };
        both!(_mm256_and_ps, a, mask)
    }
    #[inline(always)]
    unsafe fn keep_if_ge(a: F, b: F, value: F) -> F {
        let mask = both!(_mm256_cmp_ps::<_CMP_GE_OQ>, a, b);
        both!(_mm256_and_ps, mask, value)
    }
    #[inline(always)]
    unsafe fn scale_by_bits(x: F, n: F) -> F {
        let bits = both!(_mm256_castps_si256, n);
        let shifted = both!(_mm256_slli_epi32::<23>, bits);
        let x = both!(_mm256_castps_si256, x);
        let sum = both!(_mm256_add_epi32, x, shifted);
        both!(_mm256_castsi256_ps, sum)
    }
    #[inline(always)]
    unsafe fn reduce_max(x: F) -> f32 {
        unsafe {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_add_i(x: I) -> i32 {
        unsafe {
            let eight = _mm256_add_epi32(x[0], x[1]);
            let high = _mm256_extracti128_si256::<1>(eight);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), high);
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        unsafe {
            // packs interleaves 128-bit halves; the permutation puts them back in order.
            let words = _mm256_packs_epi32(x[0], x[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (low, high) = (
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(p.cast(), _mm_packs_epi16(low, high));
        }
    }
    operations! {
        shl4(w: I) -> I = both!(_mm256_slli_epi16::<4>, w);
        or(a: I, b: I) -> I = both!(_mm256_or_si256, a, b);
        factor(x: I) -> I = <Self as Words>::twice(x);
        splat_i(x: i32) -> I = [_mm256_set1_epi32(x); 2];
        add_i(a: I, b: I) -> I = both!(_mm256_add_epi32, a, b);
        mul_i(a: I, b: I) -> I = both!(_mm256_mullo_epi32, a, b);
        mul_add_small(acc: I, a: I, b: I) -> I = both!(D::words, acc, a, b);
        load_i(p: *const i32) -> I = Self::load_w(p.cast());
        shr4_i(a: I) -> I = both!(_mm256_srli_epi32::<4>, a);
        shl3_i(a: I) -> I = both!(_mm256_slli_epi32::<3>, a);
        shl7_i(a: I) -> I = both!(_mm256_slli_epi32::<7>, a);
        sar7_i(a: I) -> I = both!(_mm256_srai_epi32::<7>, a);
        and_i(a: I, b: I) -> I = both!(_mm256_and_si256, a, b);
        to_f(a: I) -> F = both!(_mm256_cvtepi32_ps, a);
        splat(x: f32) -> F = [_mm256_set1_ps(x); 2];
        load(p: *const f32) -> F = [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))];
        add(a: F, b: F) -> F = both!(_mm256_add_ps, a, b);
        sub(a: F, b: F) -> F = both!(_mm256_sub_ps, a, b);
        mul(a: F, b: F) -> F = both!(_mm256_mul_ps, a, b);
        div(a: F, b: F) -> F = both!(_mm256_div_ps, a, b);
        fma(a: F, b: F, c: F) -> F = both!(_mm256_fmadd_ps, a, b, c);
        max(a: F, b: F) -> F = both!(_mm256_max_ps, a, b);
        min(a: F, b: F) -> F = both!(_mm256_min_ps, a, b);
        round(x: F) -> I = both!(_mm256_cvtps_epi32, x);
    }
}

impl<D: Dots> Words for Ymm<D> {
    const ROLLED: bool = D::ROLLED;

    #[inline(always)]
    unsafe fn widen(w: I, signed: bool) -> [I; 2] {
        if signed {
            let raised = both!(_mm256_slli_epi16::<8>, w);
            [
                both!(_mm256_srai_epi16::<8>, raised),
                both!(_mm256_srai_epi16::<8>, w),
            ]
        } else {
            let mask = unsafe { [_mm256_set1_epi16(255); 2] };
            [
                both!(_mm256_and_si256, w, mask),
                both!(_mm256_srli_epi16::<8>, w),
            ]
        }
    }
    #[inline(always)]
    unsafe fn twice(x: I) -> I {
        let high = both!(_mm256_slli_epi32::<16>, x);
        both!(_mm256_blend_epi16::<0b1010_1010>, x, high)
    }
    #[inline(always)]
    unsafe fn dot_words(acc: I, w: I, x: *const i16) -> I {
        let x = unsafe { splat_four(x.cast()) };
        both!(D::words, acc, w, x)
    }
    #[inline(always)]
    unsafe fn shl_i<const N: u32>(a: I) -> I {
        let n = unsafe { _mm_cvtsi32_si128(N as i32) };
        unsafe { [_mm256_sll_epi32(a[0], n), _mm256_sll_epi32(a[1], n)] }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut i16, x: I) {
        unsafe {
            // packs interleaves 128-bit halves; the permutation puts them back in order.
            let words = _mm256_packs_epi32(x[0], x[1]);
            store_exchanged(p, _mm256_permute4x64_epi64::<0b11_01_10_00>(words));
        }
    }
    operations! {
        sub_words(a: I, b: I) -> I = both!(_mm256_sub_epi16, a, b);
        dot_lanes(acc: I, a: I, b: I) -> I = both!(D::words, acc, a, b);
        merge(low: I, high: I) -> I = both!(_mm256_blend_epi16::<0b1010_1010>, low, high);
    }
}

/// [`Words::store_words`] of 16 words.
#[inline(always)]
pub(super) unsafe fn store_exchanged(p: *mut i16, words: __m256i) {
    unsafe {
        let words = _mm256_shufflelo_epi16::<0b11_01_10_00>(words);
        let words = _mm256_shufflehi_epi16::<0b11_01_10_00>(words);
        _mm256_storeu_si256(p.cast(), words);
    }
}
