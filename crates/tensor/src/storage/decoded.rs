//! The types without kernels of their own: each block is decoded to f32, and products are those of
//! f32 weights.
//!
//! ```text
//! IQ1_S     d: f16, grid: [u8; 32], { high: u16 } of 32            d (2 s + 1) * (grid +- 1/8)
//! IQ1_M     grid: [u8; 32], high: [u8; 16], { scales: u16 } of 64  the same
//! TQ1_0     qs: [u8; 48], qh: [u8; 4], d: f16                      d * (0..=2 - 1), base 3
//! TQ2_0     qs: [u8; 64], d: f16                                   d * (0..=3 - 1)
//! NVFP4     scales: [ue4m3; 4], { qs: [u8; 8] } of 16              scale * e2m1
//! FP8       scale: f32, [e4m3; 32]                                 scale * e4m3, rounded
//! FP4       scales: [f32; 2], qs: [u8; 16]                         scale * e2m1, rounded
//! ```
//!
//! A *grid* is a codebook of rows of 8 values, as in [`super::grids`].
//!
//! **Exactness.** Up to NVFP4 the factors of a weight have at most 22 bits together. So products
//! are exact in f32 in any order. A scale in f32 times an 8-bit float is rounded once.
//!
//! Source: `ggml/src/ggml-common.h` and `dequantize_row_*` in `ggml/src/ggml-quants.c` of
//! llama.cpp.

use paceline_base::{BlockType, e4m3, ue4m3};

use super::grids::IQ1;
use super::mlx::E2M1_DOUBLED;
use super::{bytes_at, half_at};

/// Values of the longest block.
pub(crate) const BLOCK_LEN_MAX: usize = 256;

/// Decodes one block: `block` is `block_type.bytes()` bytes, `out` is `(block_type.len(),)`.
///
/// # Panics
/// On a bug of the caller: another type than those of this module, or other lengths.
pub(crate) fn decode(block_type: BlockType, block: &[u8], out: &mut [f32]) {
    match block_type {
        BlockType::IQ1_S => iq1_s(block, out),
        BlockType::IQ1_M => iq1_m(block, out),
        BlockType::TQ1_0 => tq1_0(block, out),
        BlockType::TQ2_0 => tq2_0(block, out),
        BlockType::NVFP4 => nvfp4(block, out),
        BlockType::FP8 => fp8(block, out),
        BlockType::FP4 => fp4(block, out),
        other => unreachable!("{other} has kernels of its own"),
    }
}

/// Nibble `index` of some bytes, low nibbles first.
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 15
}

/// `step` times each value of IQ1's grid, moved up or down by an eighth.
fn shifted(step: f32, row: &[i8; 8], down: bool, out: &mut [f32; 8]) {
    let eighth = if down { -1.0 } else { 1.0 };
    for (out, &value) in out.iter_mut().zip(row) {
        *out = step * 0.125 * (f32::from(value) + eighth);
    }
}

fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let high = u16::from_le_bytes(*bytes_at(block, 34 + 2 * (i / 4)));
        let step = d * f32::from(2 * (high >> 12 & 7) + 1);
        let upper = usize::from(high >> (3 * (i % 4)) & 7);
        let row = &IQ1[usize::from(block[2 + i]) | upper << 8];
        shifted(step, row, high >> 15 == 1, out);
    }
}

/// The scale of a block has four bits at the top of each of the four words.
fn iq1_m(block: &[u8], out: &mut [f32]) {
    let word = |i: usize| u16::from_le_bytes(*bytes_at(block, 48 + 2 * i));
    let d = iq1_m_scale(block).to_f32();
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = word(i / 8) >> (3 * (i % 8 / 2)) & 7;
        let high = nibble(&block[32..48], i);
        let row = &IQ1[usize::from(block[i]) | usize::from(high & 7) << 8];
        shifted(d * f32::from(2 * scale + 1), row, high >> 3 == 1, out);
    }
}

/// The half that the words of an IQ1_M block hold by parts.
pub(super) fn iq1_m_scale(block: &[u8]) -> half::f16 {
    let top = |i: usize| u16::from(block[49 + 2 * i] >> 4) << (4 * i);
    half::f16::from_bits(top(0) | top(1) | top(2) | top(3))
}

/// A byte holds five digits of base 3 (the last four bytes: four), times 256 / 243, the first one
/// highest. Columns run over the bytes of 32, then of 16, then of 4, for each digit in turn.
fn tq1_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 52);
    let mut at = 0;
    for (bytes, digits) in [(0..32, 5), (32..48, 5), (48..52, 4)] {
        let mut power = 1u8;
        for _ in 0..digits {
            for byte in &block[bytes.clone()] {
                let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
                out[at] = d * (f32::from(digit) - 1.0);
                at += 1;
            }
            power = power.wrapping_mul(3);
        }
    }
}

/// Columns run over 32 bytes for each of their four fields of 2 bits in turn.
fn tq2_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 64);
    for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let bytes: &[u8; 32] = bytes_at(block, i / 4 * 32);
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = d * (f32::from(byte >> (2 * (i % 4)) & 3) - 1.0);
        }
    }
}

/// Low nibbles are columns 0..8 of each 16, high nibbles 8..16.
fn nvfp4(block: &[u8], out: &mut [f32]) {
    for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = ue4m3(block[i]) * 0.5;
        let (low, high) = out.split_at_mut(8);
        let bytes: &[u8; 8] = bytes_at(block, 4 + 8 * i);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = scale * doubled(byte & 15);
            *high = scale * doubled(byte >> 4);
        }
    }
}

/// Twice the value of a code of E2M1.
fn doubled(code: u8) -> f32 {
    f32::from(E2M1_DOUBLED[usize::from(code & 15)])
}

/// The values of FP8's E4M3.
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = e4m3(byte as u8);
        byte += 1;
    }
    values
};

fn fp8(block: &[u8], out: &mut [f32]) {
    let scale = f32::from_le_bytes(*bytes_at(block, 0));
    for (out, &byte) in out.iter_mut().zip(&block[4..]) {
        *out = scale * E4M3[usize::from(byte)];
    }
}

/// Neighbours in a byte, the first in its low half.
fn fp4(block: &[u8], out: &mut [f32]) {
    for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = f32::from_le_bytes(*bytes_at(block, 4 * i));
        let bytes: &[u8; 8] = bytes_at(block, 8 + 8 * i);
        for (pair, byte) in out.as_chunks_mut().0.iter_mut().zip(bytes) {
            *pair = [byte & 15, byte >> 4].map(|code| scale * (doubled(code) * 0.5));
        }
    }
}
