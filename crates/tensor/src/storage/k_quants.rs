//! The super-block types of 256 columns: eight chunks share the block's halves and hold their own
//! integer scales.
//!
//! Layouts are written `field: type`, in file order without padding. Index `part` is the chunk's
//! place in its super-block, 0..8. Index k is the column in the chunk, 0..32. Index s = 2 * part +
//! k / 16 is the column's sub-block of 16, 0..16.

use paceline_base::BlockType;

use super::{Chunk, bytes_at, half_at, legacy};

/// Q2_K: `scales: [u8; 16], qs: [u8; 64], d: f16, dmin: f16`.
///
/// Byte s of `scales` is the scale (low nibble) and the min (high nibble) of sub-block s. For `qs`
/// see [`crumbs`]. weight = d * scale * value - dmin * min.
pub(super) fn q2_k(block: &[u8; BlockType::Q2_K.bytes()], part: usize) -> Chunk {
    let scales: &[u8; 2] = bytes_at(block, 2 * part);
    Chunk {
        q: crumbs(bytes_at(block, 16), part).map(|value| value as i8),
        sub: scales.map(|byte| i32::from(byte & 15)),
        scale: half_at(block, 80),
        min_sub: scales.map(|byte| i32::from(byte >> 4)),
        min: -half_at(block, 82),
    }
}

/// Q3_K: `hmask: [u8; 32], qs: [u8; 64], scales: [u8; 12], d: f16`.
///
/// Bit `part` of `hmask[k]` is bit 2 of column k. For the lower two see [`crumbs`], for `scales`
/// see [`q3_k_scale`]. The weight is d * (scale - 32) * (value - 4).
pub(super) fn q3_k(block: &[u8; BlockType::Q3_K.bytes()], part: usize) -> Chunk {
    let hmask: &[u8; 32] = bytes_at(block, 0);
    let low = crumbs(bytes_at(block, 32), part);
    let q = std::array::from_fn(|k| (low[k] | (hmask[k] >> part & 1) << 2) as i8 - 4);
    let scales = bytes_at(block, 96);
    let sub = [0, 1].map(|half| q3_k_scale(scales, 2 * part + half));
    Chunk::sub_scaled(half_at(block, 108), sub, q)
}

/// Q4_K: `d: f16, dmin: f16, scales: [u8; 12], qs: [u8; 128]`.
///
/// For `scales` see [`scale_and_min`], for `qs` see [`paired_nibbles`].
/// weight = d * scale * value - dmin * min.
pub(super) fn q4_k(block: &[u8; BlockType::Q4_K.bytes()], part: usize) -> Chunk {
    let q = paired_nibbles(bytes_at(block, 16), part).map(|nibble| nibble as i8);
    with_packed_scales(block, part, q)
}

/// Q5_K: `d: f16, dmin: f16, scales: [u8; 12], qh: [u8; 32], qs: [u8; 128]`.
///
/// Like [`q4_k`], and bit `part` of `qh[k]` is bit 4 of column k.
pub(super) fn q5_k(block: &[u8; BlockType::Q5_K.bytes()], part: usize) -> Chunk {
    let qh: &[u8; 32] = bytes_at(block, 16);
    let low = paired_nibbles(bytes_at(block, 48), part);
    let q = std::array::from_fn(|k| (low[k] | (qh[k] >> part & 1) << 4) as i8);
    with_packed_scales(block, part, q)
}

/// Q6_K: `ql: [u8; 128], qh: [u8; 64], scales: [i8; 16], d: f16`.
///
/// Each half of 128 columns has 64 bytes of `ql` and 32 of `qh`. Chunks 0 and 1 are the low nibbles
/// of the first and second 32 bytes of `ql`, chunks 2 and 3 the high nibbles. `qh[k]` holds the
/// upper two bits of column k of chunk i at bits 2i and 2i + 1. The weight is d * scale * (value -
/// 32).
pub(super) fn q6_k(block: &[u8; BlockType::Q6_K.bytes()], part: usize) -> Chunk {
    let (half, quarter) = (part / 4, part % 4);
    let ql: &[u8; 32] = bytes_at(block, 64 * half + 32 * (quarter % 2));
    let qh: &[u8; 32] = bytes_at(block, 128 + 32 * half);
    let scales: &[u8; 2] = bytes_at(block, 192 + 2 * part);
    let q = std::array::from_fn(|k| {
        let low = ql[k] >> (4 * (quarter / 2)) & 15;
        let high = qh[k] >> (2 * quarter) & 3;
        (low | high << 4) as i8 - 32
    });
    Chunk::sub_scaled(
        half_at(block, 208),
        scales.map(|byte| i32::from(byte as i8)),
        q,
    )
}

/// IQ4_XS: `d: f16, scales_h: u16, scales_l: [u8; 4], qs: [u8; 128]`.
///
/// The chunk's scale has four bits in nibble `part` of `scales_l` (low nibble first) and two above
/// them in `scales_h` at bit 2 * part. Its 16 bytes of `qs` are laid out as in IQ4_NL.
/// weight = d * (scale - 32) * codebook\[nibble\].
pub(super) fn iq4_xs(block: &[u8; BlockType::IQ4_XS.bytes()], part: usize) -> Chunk {
    let scale = iq4_xs_scale(block, part);
    let q = legacy::codebook(bytes_at(block, 8 + 16 * part));
    Chunk::scaled(half_at(block, 0) * f32::from(scale), q)
}

/// The scale of chunk `part` of an IQ4_XS block, -32..=31; see [`iq4_xs`].
pub(super) fn iq4_xs_scale(block: &[u8; BlockType::IQ4_XS.bytes()], part: usize) -> i16 {
    let low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
    let high = u16::from_le_bytes(*bytes_at(block, 2)) >> (2 * part) & 3;
    i16::from(low) + (high << 4) as i16 - 32
}

/// The chunk of a Q4_K or Q5_K block, which begin alike: `d: f16, dmin: f16, scales: [u8; 12]`.
fn with_packed_scales(block: &[u8], part: usize, q: [i8; Chunk::LEN]) -> Chunk {
    let (scale, min) = scale_and_min(bytes_at(block, 4), part);
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    Chunk::with_min(d * f32::from(scale), -(dmin * f32::from(min)), q)
}

/// The 6-bit scale and min, both 0..=63, of chunk `part` of a Q4_K or Q5_K block.
///
/// ```text
/// byte 0..4    bits 0-5: scale of chunk 0..4     bits 6-7: bits 4-5 of the scale of chunk 4..8
/// byte 4..8    bits 0-5: min of chunk 0..4       bits 6-7: bits 4-5 of the min of chunk 4..8
/// byte 8..12   bits 0-3: bits 0-3 of the scale,  bits 4-7: bits 0-3 of the min of chunk 4..8
/// ```
/// Source: `get_scale_min_k4` in llama.cpp's `ggml-quants.c`.
pub(super) fn scale_and_min(packed: &[u8; 12], part: usize) -> (u8, u8) {
    if part < 4 {
        return (packed[part] & 63, packed[part + 4] & 63);
    }
    let low = packed[part + 4];
    let (high_scale, high_min) = (packed[part - 4] >> 6, packed[part] >> 6);
    (low & 15 | high_scale << 4, low >> 4 | high_min << 4)
}

/// The scale of sub-block `s` of a Q3_K block, -32..=31.
///
/// Its lower four bits are nibble s of bytes 0..8 (all low nibbles first, then all high ones). Its
/// upper two bits are at bit 2 * (s / 4) of byte 8 + s % 4.
fn q3_k_scale(packed: &[u8; 12], s: usize) -> i32 {
    let low = packed[s % 8] >> (4 * (s / 8)) & 15;
    let high = packed[8 + s % 4] >> (2 * (s / 4)) & 3;
    i32::from(low | high << 4) - 32
}

/// The 2-bit values of a chunk. Per half of 128 columns (32 bytes), chunk i is at bits 2i and 2i +
/// 1 of all its bytes.
fn crumbs(qs: &[u8; 64], part: usize) -> [u8; Chunk::LEN] {
    let bytes: &[u8; 32] = bytes_at(qs, 32 * (part / 4));
    bytes.map(|byte| byte >> (2 * (part % 4)) & 3)
}

/// The nibbles of a chunk: 32 bytes hold an even chunk (low nibbles) and the odd one after it
/// (high nibbles).
fn paired_nibbles(qs: &[u8; 128], part: usize) -> [u8; Chunk::LEN] {
    let bytes: &[u8; 32] = bytes_at(qs, 32 * (part / 2));
    bytes.map(|byte| byte >> (4 * (part % 2)) & 15)
}
