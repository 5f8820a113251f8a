//! The block types of 32 columns: one block is one chunk.
//!
//! Layouts are written `field: type`, in file order without padding. Nibbles are never
//! interleaved: byte i holds columns i (low nibble) and i + 16 (high nibble).

use paceline_base::BlockType;

use super::{Chunk, bytes_at, half_at};

/// The 16 values of a 4-bit code in IQ4_NL and IQ4_XS: `kvalues_iq4nl` in llama.cpp's
/// `ggml-common.h`.
pub(crate) const CODEBOOK: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Q4_0: `d: f16, qs: [u8; 16]`. weight = d * (nibble - 8).
pub(super) fn q4_0(block: &[u8; BlockType::Q4_0.bytes()]) -> Chunk {
    let q = nibbles(bytes_at(block, 2)).map(|nibble| nibble as i8 - 8);
    Chunk::scaled(half_at(block, 0), q)
}

/// Q4_1: `d: f16, m: f16, qs: [u8; 16]`. weight = d * nibble + m.
pub(super) fn q4_1(block: &[u8; BlockType::Q4_1.bytes()]) -> Chunk {
    let q = nibbles(bytes_at(block, 4)).map(|nibble| nibble as i8);
    Chunk::with_min(half_at(block, 0), half_at(block, 2), q)
}

/// Q5_0: `d: f16, qh: u32, qs: [u8; 16]`. Bit k of `qh` is bit 4 of column k.
/// weight = d * (value - 16).
pub(super) fn q5_0(block: &[u8; BlockType::Q5_0.bytes()]) -> Chunk {
    let q = five_bits(*bytes_at(block, 2), bytes_at(block, 6)).map(|value| value - 16);
    Chunk::scaled(half_at(block, 0), q)
}

/// Q5_1: `d: f16, m: f16, qh: u32, qs: [u8; 16]`. Bit k of `qh` is bit 4 of column k.
/// weight = d * value + m.
pub(super) fn q5_1(block: &[u8; BlockType::Q5_1.bytes()]) -> Chunk {
    let q = five_bits(*bytes_at(block, 4), bytes_at(block, 8));
    Chunk::with_min(half_at(block, 0), half_at(block, 2), q)
}

/// Q8_0: `d: f16, qs: [i8; 32]`. weight = d * value. llama.cpp writes -127..=127; a file may hold
/// -128 as well.
pub(super) fn q8_0(block: &[u8; BlockType::Q8_0.bytes()]) -> Chunk {
    let q = bytes_at(block, 2).map(|byte: u8| byte as i8);
    Chunk::scaled(half_at(block, 0), q)
}

/// IQ4_NL: `d: f16, qs: [u8; 16]`. weight = d * codebook\[nibble\].
pub(super) fn iq4_nl(block: &[u8; BlockType::IQ4_NL.bytes()]) -> Chunk {
    Chunk::scaled(half_at(block, 0), codebook(bytes_at(block, 2)))
}

/// 32 codebook values from 16 bytes of nibbles.
pub(super) fn codebook(qs: &[u8; 16]) -> [i8; Chunk::LEN] {
    nibbles(qs).map(|nibble| CODEBOOK[usize::from(nibble)])
}

/// 32 nibbles: the low ones of all 16 bytes, then the high ones.
pub(super) fn nibbles(qs: &[u8; 16]) -> [u8; Chunk::LEN] {
    std::array::from_fn(|k| if k < 16 { qs[k] & 15 } else { qs[k - 16] >> 4 })
}

/// 32 values 0..=31: nibbles with bit k of `qh` above them.
fn five_bits(qh: [u8; 4], qs: &[u8; 16]) -> [i8; Chunk::LEN] {
    let high = u32::from_le_bytes(qh);
    let low = nibbles(qs);
    std::array::from_fn(|k| (low[k] | ((high >> k & 1) << 4) as u8) as i8)
}
