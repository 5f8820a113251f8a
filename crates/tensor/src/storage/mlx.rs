//! The block types of MLX's folders: 32 columns of one row, joined from the tensors `weight`,
//! `scales` and `biases` by `paceline-formats::mlx`.
//!
//! ```text
//! AFFINEb_T   scale: T, bias: T, q: [u8; 4 b]    weight = scale * q + bias, q in 0..2^b
//! MXFP4       scale: u8, q: [u8; 16]             weight = 2^(scale - 127) * e2m1(q)
//! ```
//!
//! Integers follow one another without gaps, value k in the bits from b k on, least significant
//! first. The words of MLX's tensors are little-endian. Source: `mlx/backend/cpu/quantized.cpp`.
//! Values of e2m1 are 0, 1/2, 1, 3/2, 2, 3, 4, 6 and the same with a sign. A scale of 255 is NaN
//! (OCP Microscaling Formats 1.0, section 5.4.1).
//!
//! [`Chunk`] holds signed bytes, as the kernels want them. Values of 3, 6 and 8 bits are moved down
//! by half their range, and the bias moved up by as many scales. That is one more rounding where
//! the bias is smaller than a scale by more than 2^13, which no quantiser writes.

use half::bf16;
use paceline_base::BlockType;

use super::{Chunk, bytes_at, legacy};

/// The 16 values of an e2m1 code, doubled.
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Offset subtracted from the integers of a type, for the kernels' range.
pub(crate) const fn offset(bits: u32) -> i32 {
    match bits {
        3 | 6 | 8 => 1 << (bits - 1),
        _ => 0,
    }
}

/// A block of affine integers.
pub(super) fn affine(block_type: BlockType, bits: u32, block: &[u8]) -> Chunk {
    let [scale, bias] = scales(block_type, block);
    let offset = offset(bits);
    let q = integers(bits, &block[4..]).map(|value| (i32::from(value) - offset) as i8);
    let min = match offset {
        0 => bias, // not 0 * scale + bias, which is NaN for an infinite scale
        some => (some as f32).mul_add(scale, bias),
    };
    Chunk::with_min(scale, min, q)
}

/// Scale and bias of a block of affine integers.
fn scales(block_type: BlockType, block: &[u8]) -> [f32; 2] {
    [0, 2].map(|at| {
        if is_brain(block_type) {
            bf16::from_le_bytes(*bytes_at(block, at)).to_f32()
        } else {
            super::half_at(block, at)
        }
    })
}

/// Whether the scales of an affine type are bfloat16.
pub(super) const fn is_brain(block_type: BlockType) -> bool {
    matches!(
        block_type,
        BlockType::AFFINE2_BF16
            | BlockType::AFFINE3_BF16
            | BlockType::AFFINE4_BF16
            | BlockType::AFFINE5_BF16
            | BlockType::AFFINE6_BF16
            | BlockType::AFFINE8_BF16
    )
}

/// 32 integers of `bits` bits, at most 8, one after the other.
fn integers(bits: u32, packed: &[u8]) -> [u8; Chunk::LEN] {
    std::array::from_fn(|k| {
        let at = k * bits as usize;
        let (low, high) = (packed[at / 8], packed.get(at / 8 + 1).copied().unwrap_or(0));
        let word = u16::from_le_bytes([low, high]) >> (at % 8);
        (word & ((1 << bits) - 1)) as u8
    })
}

/// A block of [`BlockType::MXFP4`].
pub(super) fn mxfp4(block: &[u8; BlockType::MXFP4.bytes()]) -> Chunk {
    let codes = integers(4, &block[1..]);
    Chunk::scaled(
        half_power(block[0]).to_f32(),
        codes.map(|code| E2M1_DOUBLED[usize::from(code)]),
    )
}

/// A block of [`BlockType::MXFP4_SPLIT`]: `scale: u8, qs: [u8; 16]`, byte i with columns i (low
/// nibble) and i + 16 (high nibble), as llama.cpp writes it.
pub(super) fn mxfp4_split(block: &[u8; BlockType::MXFP4_SPLIT.bytes()]) -> Chunk {
    let codes = legacy::nibbles(bytes_at(block, 1));
    Chunk::scaled(
        half_power(block[0]).to_f32(),
        codes.map(|code| E2M1_DOUBLED[usize::from(code)]),
    )
}

/// Half of what an e8m0 scale stands for, 2^(scale - 128): exact in bfloat16, the smallest two as
/// subnormal numbers.
fn half_power(scale: u8) -> bf16 {
    bf16::from_bits(match scale {
        255 => 0x7fc0,
        0 => 0x0020,
        1 => 0x0040,
        n => (u16::from(n) - 1) << 7,
    })
}

/// The code of a doubled e2m1 value; zero has the one without a sign.
pub(crate) fn e2m1_code(doubled: i8) -> u8 {
    let code = E2M1_DOUBLED.iter().position(|&value| value == doubled);
    code.unwrap_or(0) as u8
}
