//! Rows of grids and values of FP8 by AVX-512 VBMI: a table of 128 bytes in two registers answers
//! 64 lookups at once.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one contract for all: callers guarantee features and pointers"
)]

use std::arch::x86_64::*;

use paceline_base::e4m3;

use crate::formats::grids::ROWS;
use crate::isa::LANES;
use crate::storage::grids::{Eights, Fours};

/// Bytes of `table` for the 64 indices at `plane + from`, of `COUNT`. Each further bit of the
/// indices is a plane of bits behind.
#[inline(always)]
unsafe fn look_up<const N: usize, const COUNT: usize>(
    table: &[u8; N],
    plane: *const u8,
    from: usize,
) -> __m512i {
    unsafe {
        let index = _mm512_loadu_si512(plane.add(from).cast());
        let table = table.as_ptr();
        let first = of_256(table, index);
        if N == 256 {
            return first;
        }
        let planes = plane.add(COUNT + from / 8);
        let second = of_256(table.add(256), index);
        let below = _mm512_mask_blend_epi8(bits(planes), first, second);
        if N == 512 {
            return below;
        }
        let third = of_256(table.add(512), index);
        let fourth = of_256(table.add(768), index);
        let above = _mm512_mask_blend_epi8(bits(planes), third, fourth);
        _mm512_mask_blend_epi8(bits(planes.add(COUNT / 8)), below, above)
    }
}

/// The 64 bits at `p`.
#[inline(always)]
unsafe fn bits(p: *const u8) -> u64 {
    unsafe { u64::from_le_bytes(p.cast::<[u8; 8]>().read_unaligned()) }
}

/// Bytes of a table of 256.
#[inline(always)]
unsafe fn of_256(table: *const u8, index: __m512i) -> __m512i {
    unsafe {
        let a = _mm512_loadu_si512(table.cast());
        let b = _mm512_loadu_si512(table.add(64).cast());
        let c = _mm512_loadu_si512(table.add(128).cast());
        let d = _mm512_loadu_si512(table.add(192).cast());
        let low = _mm512_permutex2var_epi8(a, index, b);
        let high = _mm512_permutex2var_epi8(c, index, d);
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
    }
}

/// For each eight columns: places of the rows' codes, each four times.
static PLACES: [[u8; 4 * LANES]; 4] = {
    let mut places = [[0; 4 * LANES]; 4];
    let mut i = 0;
    while i < 4 * 4 * LANES {
        let (block, at) = (i / (4 * LANES), i % (4 * LANES));
        // Byte 4 rank + j of `ROWS` in order is row ROWS[rank].
        places[block][4 * ROWS[at / 4] + at % 4] = (LANES * block + at / 4) as u8;
        i += 1;
    }
    places
};

/// Places in bits of the four codes of each of two rows.
const FIELDS: i64 = i64::from_le_bytes([0, 2, 4, 6, 32, 34, 36, 38]);

/// See `Isa`.
#[inline(always)]
pub(super) unsafe fn eights<const N: usize>(
    grid: &'static Eights<N>,
    plane: *const u8,
) -> [__m512i; 8] {
    unsafe {
        let values = _mm512_loadu_si512(grid.values.as_ptr().cast());
        let mut quads = [values; 8];
        let mut half = 0;
        while half < 2 {
            let codes = look_up::<N, 64>(&grid.codes[half], plane, 0);
            let mut block = 0;
            while block < 4 {
                let places = _mm512_loadu_si512(PLACES[block].as_ptr().cast());
                let of_rows = _mm512_permutexvar_epi8(places, codes);
                let of_columns = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(FIELDS), of_rows);
                quads[2 * block + half] = _mm512_permutexvar_epi8(of_columns, values);
                block += 1;
            }
            half += 1;
        }
        quads
    }
}

/// See `Isa`.
#[inline(always)]
pub(super) unsafe fn fours<const N: usize>(
    grid: &'static Fours<N>,
    plane: *const u8,
) -> [__m512i; 8] {
    unsafe {
        let mut quads = [_mm512_setzero_si512(); 8];
        let mut half = 0;
        while half < 2 {
            // A closure here is called, and so is every instruction in it.
            let a = look_up::<N, 128>(&grid.columns[0], plane, 64 * half);
            let b = look_up::<N, 128>(&grid.columns[1], plane, 64 * half);
            let c = look_up::<N, 128>(&grid.columns[2], plane, 64 * half);
            let d = look_up::<N, 128>(&grid.columns[3], plane, 64 * half);
            let low = [_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)];
            let high = [_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)];
            quads[4 * half] = _mm512_unpacklo_epi16(low[0], low[1]);
            quads[4 * half + 1] = _mm512_unpackhi_epi16(low[0], low[1]);
            quads[4 * half + 2] = _mm512_unpacklo_epi16(high[0], high[1]);
            quads[4 * half + 3] = _mm512_unpackhi_epi16(high[0], high[1]);
            half += 1;
        }
        quads
    }
}

/// Places of four columns of bytes: bytes interleaved twice become whole columns. Byte
/// `16 l + 8 c + 2 i + j` is column `2 c + j` of row `4 l + i`.
static COLUMNS: [u8; 64] = {
    let mut places = [0; 64];
    let mut at = 0;
    while at < 64 {
        let column = at / 8 % 2 * 2 + at % 2;
        let row = at / 16 * 4 + at / 2 % 4;
        places[at] = (LANES * column + row) as u8;
        at += 1;
    }
    places
};

/// The low and the high bytes of the values of E4M3 without a sign, divided by 256, as bf16: all
/// their bits.
static E4M3: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut byte = 0;
    while byte < 128 {
        // 127 is no number: 480 here, as in `Isa::load_e4m3`.
        let value = if byte < 127 { e4m3(byte as u8) } else { 480.0 };
        let bits = (value / 256.0).to_bits();
        (bytes[0][byte], bytes[1][byte]) = ((bits >> 16) as u8, (bits >> 24) as u8);
        byte += 1;
    }
    bytes
};

/// See `Isa`.
#[inline(always)]
pub(super) unsafe fn e4m3s(p: *const u8) -> [__m512; 4] {
    unsafe {
        let order = _mm512_loadu_si512(COLUMNS.as_ptr().cast());
        let bytes = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(p.cast()));
        let low = of_128(&E4M3[0], bytes);
        let sign = _mm512_and_si512(bytes, _mm512_set1_epi8(-128));
        let high = _mm512_or_si512(of_128(&E4M3[1], bytes), sign);
        let first = _mm512_unpacklo_epi8(low, high);
        let second = _mm512_unpackhi_epi8(low, high);
        let odd = _mm512_set1_epi32(!0xffff);
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
            _mm512_castsi512_ps(_mm512_and_si512(first, odd)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)),
            _mm512_castsi512_ps(_mm512_and_si512(second, odd)),
        ]
    }
}

/// Bytes of a table of 128, by the low seven bits.
#[inline(always)]
unsafe fn of_128(table: &[u8; 128], index: __m512i) -> __m512i {
    unsafe {
        let low = _mm512_loadu_si512(table.as_ptr().cast());
        let high = _mm512_loadu_si512(table.as_ptr().add(64).cast());
        _mm512_permutex2var_epi8(low, index, high)
    }
}
