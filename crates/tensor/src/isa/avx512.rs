//! AVX-512 with VNNI: one register holds all sixteen lanes.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one contract for all: the trait's callers guarantee features and pointers"
)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::transmute;

use super::avx2::{e4m3_halves, nibble_bytes, prefetch_lines, store_exchanged};
use super::{BytePlanes, Isa, Pairs, Words, e4m3_columns, grids};
use crate::storage::grids::{Eights, Fours};

mod vbmi;

/// Needs avx512f, avx512bw, avx512vl, avx512vnni and f16c.
pub(crate) type Avx512 = Zmm<false>;

/// With lookups of bytes in tables of registers: needs avx512vbmi too.
pub(crate) type Avx512Vbmi = Zmm<true>;

/// Registers of sixteen lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Zmm<const VBMI: bool>;

impl<const VBMI: bool> Isa for Zmm<VBMI> {
    type F = __m512;
    type I = __m512i;
    type W = __m512i;
    const REGISTERS: usize = 32;
    const SIGNED_BIAS: i32 = 128;
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
    unsafe fn store_w(p: *mut u8, w: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), w) }
    }
    #[inline(always)]
    unsafe fn crumb<const INDEX: u32>(w: __m512i) -> __m512i {
        let count = unsafe { _mm_cvtsi32_si128(2 * INDEX as i32) };
        unsafe { _mm512_and_si512(_mm512_srl_epi16(w, count), _mm512_set1_epi8(3)) }
    }
    #[inline(always)]
    unsafe fn spread_bits(p: *const u8, value: u8) -> __m512i {
        unsafe {
            let mask = u64::from_le_bytes(p.cast::<[u8; 8]>().read_unaligned());
            _mm512_maskz_set1_epi8(mask, value as i8)
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[i8; 16], w: __m512i) -> __m512i {
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), w)
        }
    }
    #[inline(always)]
    unsafe fn mirrored(w: __m512i, p: *const u8) -> __m512i {
        unsafe {
            let mask = u64::from_le_bytes(p.cast::<[u8; 8]>().read_unaligned());
            _mm512_mask_sub_epi8(w, mask, _mm512_set1_epi8(-128), w)
        }
    }
    #[inline(always)]
    unsafe fn split(a: __m512i, b: __m512i) -> [__m512i; 2] {
        unsafe {
            let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a, b);
            [_mm512_castps_si512(even), _mm512_castps_si512(odd)]
        }
    }
    #[inline(always)]
    unsafe fn eights<const N: usize>(grid: &'static Eights<N>, plane: *const u8) -> [__m512i; 8] {
        unsafe {
            if VBMI {
                vbmi::eights(grid, plane)
            } else {
                grids::eights::<Self, N>(grid, plane)
            }
        }
    }
    #[inline(always)]
    unsafe fn fours<const N: usize>(grid: &'static Fours<N>, plane: *const u8) -> [__m512i; 8] {
        unsafe {
            if VBMI {
                vbmi::fours(grid, plane)
            } else {
                grids::fours::<Self, N>(grid, plane)
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: __m512i, w: __m512i, x: *const i8) -> __m512i {
        // The instruction multiplies unsigned by signed: flipping the top bit adds 128.
        unsafe { Self::dot_unsigned(acc, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x) }
    }

    #[inline(always)]
    unsafe fn store_i(p: *mut i32, x: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn store_past(p: *mut f32, x: __m512) {
        unsafe { _mm512_stream_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn fence() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn load_e4m3s(p: *const u8) -> [__m512; 4] {
        unsafe {
            if VBMI {
                vbmi::e4m3s(p)
            } else {
                e4m3_columns::<Self>(p)
            }
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn splat_bf16s(p: *const u16) -> [__m512; 2] {
        unsafe {
            let pair = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
            let odd = _mm512_and_si512(pair, _mm512_set1_epi32(!0xffff));
            [_mm512_slli_epi32::<16>(pair), odd].map(|x| _mm512_castsi512_ps(x))
        }
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        unsafe {
            let mask = _mm512_set1_epi32(i32::MAX);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), mask))
        }
    }
    #[inline(always)]
    unsafe fn scale_by_bits(x: __m512, n: __m512) -> __m512 {
        unsafe {
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shifted))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: __m512i) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(x)) }
    }
    operations! {
        load_w(p: *const u8) -> __m512i = _mm512_loadu_si512(p.cast());
        low_nibble(w: __m512i) -> __m512i = _mm512_and_si512(w, _mm512_set1_epi8(15));
        high_nibble(w: __m512i) -> __m512i =
            _mm512_and_si512(_mm512_srli_epi16::<4>(w), _mm512_set1_epi8(15));
        shl4(w: __m512i) -> __m512i = _mm512_slli_epi16::<4>(w);
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        dot_unsigned(acc: __m512i, w: __m512i, x: *const i8) -> __m512i =
            _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned()));
        splat_i(x: i32) -> __m512i = _mm512_set1_epi32(x);
        add_i(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        mul_i(a: __m512i, b: __m512i) -> __m512i = _mm512_mullo_epi32(a, b);
        small(x: __m512i) -> __m512i = _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
        mul_add_small(acc: __m512i, a: __m512i, b: __m512i) -> __m512i = dpwssd(acc, a, b);
        load_i8(p: *const u8) -> __m512i = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
        load_u8(p: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        load_nibbles(p: *const u8) -> __m512i = _mm512_cvtepu8_epi32(nibble_bytes(p));
        load_i16(p: *const u8) -> __m512i = _mm512_cvtepi16_epi32(_mm256_loadu_si256(p.cast()));
        load_i(p: *const i32) -> __m512i = _mm512_loadu_si512(p.cast());
        shr4_i(a: __m512i) -> __m512i = _mm512_srli_epi32::<4>(a);
        shl3_i(a: __m512i) -> __m512i = _mm512_slli_epi32::<3>(a);
        shl7_i(a: __m512i) -> __m512i = _mm512_slli_epi32::<7>(a);
        sar7_i(a: __m512i) -> __m512i = _mm512_srai_epi32::<7>(a);
        and_i(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        to_f(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        load_f16(p: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        load_e4m3(p: *const u8) -> __m512 = _mm512_cvtph_ps(e4m3_halves(p));
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        keep_if_ge(a: __m512, b: __m512, value: __m512) -> __m512 =
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b), value);
        round(x: __m512) -> __m512i = _mm512_cvtps_epi32(x);
        reduce_max(x: __m512) -> f32 = _mm512_reduce_max_ps(x);
        reduce_add_i(x: __m512i) -> i32 = _mm512_reduce_add_epi32(x);
    }
}

/// `acc + sum of two products of words` per lane.
///
/// Written as text. The compiler makes a multiplication and an addition of the intrinsic. That
/// shortens a chain over one accumulator and costs a quarter of the speed with sixteen.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dpwssd(mut acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
    unsafe {
        asm!(
            "vpdpwssd {acc}, {w}, {x}",
            acc = inout(zmm_reg) acc, w = in(zmm_reg) w, x = in(zmm_reg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// Bits of `yes` where `mask` has them, else of `no`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn pick(mask: __m512i, yes: __m512i, no: __m512i) -> __m512i {
    const CHOOSE: i32 = 0b1100_1010; // of mask, yes and no: the manual's a ? b : c
    _mm512_ternarylogic_epi32::<CHOOSE>(mask, yes, no)
}

impl Words for Avx512 {
    #[inline(always)]
    unsafe fn widen(w: __m512i, signed: bool) -> [__m512i; 2] {
        unsafe {
            if signed {
                let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(w));
                [even, _mm512_srai_epi16::<8>(w)]
            } else {
                let even = _mm512_and_si512(w, _mm512_set1_epi16(255));
                [even, _mm512_srli_epi16::<8>(w)]
            }
        }
    }
    #[inline(always)]
    unsafe fn shl_i<const N: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn store_words(p: *mut i16, x: __m512i) {
        unsafe { store_exchanged(p, _mm512_cvtepi32_epi16(x)) }
    }
    operations! {
        twice(x: __m512i) -> __m512i =
            _mm512_mask_blend_epi16(0xaaaa_aaaa, x, _mm512_slli_epi32::<16>(x));
        sub_words(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi16(a, b);
        dot_words(acc: __m512i, w: __m512i, x: *const i16) -> __m512i =
            dpwssd(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned()));
        dot_lanes(acc: __m512i, a: __m512i, b: __m512i) -> __m512i = dpwssd(acc, a, b);
        merge(low: __m512i, high: __m512i) -> __m512i =
            _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
    }
}

impl BytePlanes for Avx512 {
    #[inline(always)]
    unsafe fn mul_add_wide(a: __m512i, b: __m512i, c: [__m512i; 2]) -> [__m512i; 2] {
        unsafe {
            let low = _mm512_add_epi16(_mm512_mullo_epi16(a, b), c[0]);
            let high = _mm512_add_epi16(_mm512_mulhi_epi16(a, b), c[1]);
            let carry = _mm512_cmplt_epu16_mask(low, c[0]);
            [
                low,
                _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn narrow([even, odd]: [__m512i; 2]) -> [__m512i; 2] {
        unsafe {
            let low = _mm512_set1_epi16(255);
            let high = pick(low, _mm512_srli_epi16::<8>(even), odd);
            [high, pick(low, even, _mm512_slli_epi16::<8>(odd))]
        }
    }
    operations! {
        sar16_i(a: __m512i) -> __m512i = _mm512_srai_epi32::<16>(a);
        mul_words(a: __m512i, b: __m512i) -> __m512i = _mm512_mullo_epi16(a, b);
        add_words(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi16(a, b);
    }
}

/// Two columns at a time by AVX-512 BF16. Needs avx512bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dpbf16;

impl Pairs<Avx512> for Dpbf16 {
    type Weights = __m512i;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        // Lane i takes element i of either column.
        const ROWS: [u16; 32] = {
            let mut rows = [0; 32];
            let mut i = 0;
            while i < 32 {
                rows[i] = (i / 2 + i % 2 * 16) as u16;
                i += 1;
            }
            rows
        };
        unsafe {
            let rows = _mm512_loadu_si512(ROWS.as_ptr().cast());
            let columns = _mm512_loadu_si512(p.cast());
            _mm512_permutexvar_epi16(rows, columns)
        }
    }

    #[inline(always)]
    unsafe fn dot(acc: __m512, w: __m512i, x: *const u16) -> __m512 {
        unsafe {
            let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
            let [w, x] = [w, x].map(|bits| transmute::<__m512i, __m512bh>(bits));
            _mm512_dpbf16_ps(acc, w, x)
        }
    }
}
