//! Quantised blocks as GGUF files store them, and what they mean.
//!
//! Two views of the same bytes:
//!
//! - [`dequantise`] gives plain `f32`, for embedding rows, norms and the kernel class `cpu-f32`.
//! - [`chunk`] gives 32 weights as small integers with their scales ([`Chunk`]), the form that the
//!   kernel class `cpu` is defined on. Repacking at load and the naive kernels start from it.
//!
//! ```text
//! legacy block (Q4_0 .. Q8_0, IQ4_NL)   32 columns = 1 chunk
//! MLX block    (AFFINEb_T, MXFP4)        32 columns = 1 chunk
//! GGUF's MXFP4 (MXFP4_SPLIT)             32 columns = 1 chunk
//! super-block  (Q2_K .. IQ4_XS, IQ2, IQ3)  256 columns = chunks 0 1 2 3 4 5 6 7
//!                                                    each with a sub-scale per 32 or 2 x 16
//! decoded      (IQ1, TQ, NVFP4, FP8, FP4)  no chunks: the kernels take them as f32
//! ```
//!
//! Each layout is documented on the function that reads it, in `legacy.rs`, `k_quants.rs` and
//! `mlx.rs`, or in the modules `grids` and `decoded`.
//! They are facts about the format (`ggml/src/ggml-common.h`, decoded by `dequantize_row_*` in
//! `ggml/src/ggml-quants.c` of llama.cpp); numbers are little-endian.
//!
//! **Exactness.** A half has 11 significant bits. The integers that multiply it have at most 12
//! together (Q6_K: `sub * q` is up to 4096). So every product of a scale with its integers is exact
//! in `f32`, in any order. Types without a min therefore decode exactly. A type with a min adds two
//! exact products, so its weights are rounded once. No order of evaluation can change a value.
//!
//! Nothing here checks bytes from outside. Every bit pattern of a block is valid: a scale may be
//! infinite or NaN, and then so are its weights. Whole blocks are the reader's duty.

mod decoded;
mod finite;
pub(crate) mod grids;
mod k_quants;
mod legacy;
mod mlx;
pub mod random;
#[cfg(test)]
mod tests;
pub(crate) mod units;

use half::f16;
use paceline_base::BlockType;

pub(crate) use decoded::{BLOCK_LEN_MAX, decode};
pub use finite::not_finite;
pub(crate) use legacy::CODEBOOK;
pub(crate) use mlx::{E2M1_DOUBLED, e2m1_code, offset};

use grids::GridChunk;
use mlx::is_brain;

/// 32 consecutive weights of a row as integers, in the form that the kernel class `cpu` computes
/// with:
///
/// `weight[k] = scale * sub[k / 16] * q[k] + min * min_sub[k / 16]`
///
/// | type | `q` | `sub` | `scale` | `min` | `min_sub` |
/// |---|---|---|---|---|---|
/// | Q4_0 | -8..=7 | 1 | d | none | 0 |
/// | Q5_0 | -16..=15 | 1 | d | none | 0 |
/// | Q8_0 | -128..=127 | 1 | d | none | 0 |
/// | IQ4_NL | codebook, -127..=113 | 1 | d | none | 0 |
/// | Q4_1 | 0..=15 | 1 | d | m | 1 |
/// | Q5_1 | 0..=31 | 1 | d | m | 1 |
/// | Q2_K | 0..=3 | 0..=15 | d | -dmin | 0..=15 |
/// | Q3_K | -4..=3 | -32..=31 | d | none | 0 |
/// | Q4_K | 0..=15 | 1 | d * (0..=63) | -(dmin * (0..=63)) | 1 |
/// | Q5_K | 0..=31 | 1 | d * (0..=63) | -(dmin * (0..=63)) | 1 |
/// | Q6_K | -32..=31 | -128..=127 | d | none | 0 |
/// | IQ4_XS | codebook, -127..=113 | 1 | d * (-32..=31) | none | 0 |
/// | AFFINE2, 4, 5 | 0..=3, 15, 31 | 1 | s | b | 1 |
/// | AFFINE3, 6, 8 | -4..=3, -32..=31, -128..=127 | 1 | s | b + 4 s, 32 s, 128 s | 1 |
/// | IQ2 | grid, -43..=43 | 1..=31, odd | d / 8 | none | 0 |
/// | IQ3_XXS, IQ3_S | grid, -62..=62 | 1..=31, odd | d / 4, d | none | 0 |
/// | MXFP4, MXFP4_SPLIT | twice e2m1, -12..=12 | 1 | 2^(s - 128) | none | 0 |
///
/// The halves of the block are d, m and dmin; s and b are the scale and bias of MLX's types. A min
/// of "none" is -0.0, the float that changes no sum. Kernels that treat types with and without a
/// min differently should ask the type, not this number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// The integers, with the type's fixed zero offset (where it has one) already subtracted.
    pub q: [i8; Chunk::LEN],
    /// Integer scale of each half of 16.
    pub sub: [i32; 2],
    /// Scale of the whole chunk; exact.
    pub scale: f32,
    /// Integer factor of `min` for each half of 16.
    pub min_sub: [i32; 2],
    /// Added to each weight, times `min_sub`; exact.
    pub min: f32,
}

impl Chunk {
    /// Weights in a chunk.
    pub const LEN: usize = 32;

    /// The 32 weights, equal to the bit to the decode of the `gguf` package, the sign of zero
    /// included (`tests/stored.rs`).
    pub fn weights(&self) -> [f32; Self::LEN] {
        let step = self.sub.map(|sub| self.scale * sub as f32);
        let base = self.min_sub.map(|sub| self.min * sub as f32);
        std::array::from_fn(|k| step[k / 16] * f32::from(self.q[k]) + base[k / 16])
    }

    /// A chunk with one scale and no min.
    const fn scaled(scale: f32, q: [i8; Self::LEN]) -> Self {
        Self::sub_scaled(scale, [1, 1], q)
    }

    /// A chunk with a scale per half of 16 and no min.
    const fn sub_scaled(scale: f32, sub: [i32; 2], q: [i8; Self::LEN]) -> Self {
        Self {
            q,
            sub,
            scale,
            min_sub: [0, 0],
            min: -0.0,
        }
    }

    /// A chunk with one scale and one min.
    const fn with_min(scale: f32, min: f32, q: [i8; Self::LEN]) -> Self {
        Self {
            q,
            sub: [1, 1],
            scale,
            min_sub: [1, 1],
            min,
        }
    }
}

/// The scales of a chunk of a super-block as the file has them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawScales {
    /// d, and *minus* dmin where the type has one.
    pub(crate) header: [Option<f16>; 2],
    /// Byte-sized scales of this chunk, in the order of [`crate::formats`].
    pub(crate) bytes: [Option<u8>; 2],
}

/// The raw scales of chunk `index` of a row of super-blocks, see [`chunk`]; none for other types.
pub(crate) fn raw_scales(block_type: BlockType, row: &[u8], index: usize) -> RawScales {
    let (bytes, part) = (block_type.bytes(), index % (block_type.len() / Chunk::LEN));
    let start = index / (block_type.len() / Chunk::LEN) * bytes;
    let block = &row[start..start + bytes];
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
    let byte_pair = |a: u8, b: u8| [Some(a), Some(b)];
    let (header, bytes) = match block_type {
        BlockType::Q2_K => {
            let bytes = byte_pair(block[2 * part], block[2 * part + 1]);
            ([Some(half(80)), Some(-half(82))], bytes)
        }
        BlockType::Q3_K => {
            let sub = chunk(block_type, row, index)
                .sub
                .map(|sub| Some(sub as i8 as u8));
            ([Some(half(108)), None], sub)
        }
        BlockType::Q4_K | BlockType::Q5_K => {
            let (scale, min) = k_quants::scale_and_min(bytes_at(block, 4), part);
            ([Some(half(0)), Some(-half(2))], byte_pair(scale, min))
        }
        BlockType::Q6_K => {
            let bytes = byte_pair(block[192 + 2 * part], block[193 + 2 * part]);
            ([Some(half(208)), None], bytes)
        }
        BlockType::IQ4_XS => {
            let scale = k_quants::iq4_xs_scale(bytes_at(block, 0), part);
            ([Some(half(0)), None], [Some(scale as i8 as u8), None])
        }
        _ => match grid_chunk(block_type, row, index) {
            Some(grid) => ([Some(half(0)), None], grid.factors().map(Some)),
            None => ([None; 2], [None; 2]),
        },
    };
    RawScales { header, bytes }
}

/// Chunk `index` of a row of a type with a grid; `None` for other types.
pub(crate) fn grid_chunk(block_type: BlockType, row: &[u8], index: usize) -> Option<GridChunk> {
    grids::grid_step(block_type)?;
    let block = &row[index / 8 * block_type.bytes()..][..block_type.bytes()];
    Some(GridChunk::of(block_type, block, index % 8))
}

/// Chunk `index` of a row of stored blocks: its columns `32 * index ..` of
/// [`row_bytes`](BlockType::row_bytes) bytes in `row`.
///
/// # Panics
/// On a bug of the caller: `block_type` is a float type or [decoded](BlockType::is_decoded), or
/// `row` ends before chunk `index`.
pub fn chunk(block_type: BlockType, row: &[u8], index: usize) -> Chunk {
    let (super_block, part) = (index / 8, index % 8);
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => {
            panic!("chunk {index} of a {block_type} row: float types have no chunk form")
        }
        decoded if decoded.is_decoded() => {
            panic!("chunk {index} of a {block_type} row: decoded types have no chunk form")
        }
        BlockType::Q4_0 => legacy::q4_0(block(row, index)),
        BlockType::Q4_1 => legacy::q4_1(block(row, index)),
        BlockType::Q5_0 => legacy::q5_0(block(row, index)),
        BlockType::Q5_1 => legacy::q5_1(block(row, index)),
        BlockType::Q8_0 => legacy::q8_0(block(row, index)),
        BlockType::IQ4_NL => legacy::iq4_nl(block(row, index)),
        BlockType::Q2_K => k_quants::q2_k(block(row, super_block), part),
        BlockType::Q3_K => k_quants::q3_k(block(row, super_block), part),
        BlockType::Q4_K => k_quants::q4_k(block(row, super_block), part),
        BlockType::Q5_K => k_quants::q5_k(block(row, super_block), part),
        BlockType::Q6_K => k_quants::q6_k(block(row, super_block), part),
        BlockType::IQ4_XS => k_quants::iq4_xs(block(row, super_block), part),
        grid if grids::grid_step(grid).is_some() => grids::chunk(grid, row, index),
        BlockType::MXFP4 => mlx::mxfp4(block(row, index)),
        BlockType::MXFP4_SPLIT => mlx::mxfp4_split(block(row, index)),
        other => {
            let bits = other.affine_bits().expect("no type is left but the affine");
            let bytes = other.bytes();
            mlx::affine(other, bits, &row[index * bytes..][..bytes])
        }
    }
}

/// Decodes the whole blocks in `bytes` to `f32`: `out` is `(n,)`, `bytes` is
/// `block_type.row_bytes(n)` long; n may be 0.
///
/// Equal to the bit to the decode of the `gguf` package, the sign of zero included
/// (`tests/stored.rs`); a NaN may differ in its payload.
///
/// # Panics
/// On a bug of the caller: the lengths do not fit each other.
pub fn dequantise(block_type: BlockType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        block_type.row_bytes(out.len()),
        Some(bytes.len()),
        "bytes needed for {} values of {block_type}, and bytes given",
        out.len()
    );
    match block_type {
        BlockType::F32 => decode_each(bytes, out, f32::from_le_bytes),
        BlockType::F16 => decode_each(bytes, out, |pair| f16::from_le_bytes(pair).to_f32()),
        BlockType::BF16 => decode_each(bytes, out, |[low, high]| {
            f32::from_le_bytes([0, 0, low, high]) // bfloat16 is the upper half of an f32
        }),
        decoded if decoded.is_decoded() => {
            let blocks = bytes.chunks_exact(decoded.bytes());
            for (block, values) in blocks.zip(out.chunks_exact_mut(decoded.len())) {
                decode(decoded, block, values);
            }
        }
        quantised => {
            for (index, weights) in out.as_chunks_mut().0.iter_mut().enumerate() {
                *weights = chunk(quantised, bytes, index).weights();
            }
        }
    }
}

/// Decodes blocks of one value.
fn decode_each<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *value = decode(*bytes);
    }
}

/// Block `index` of a row of blocks of N bytes.
fn block<const N: usize>(row: &[u8], index: usize) -> &[u8; N] {
    &row.as_chunks().0[index]
}

/// The N bytes of a block that start at `at`. The readers pass constants inside the block.
fn bytes_at<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..]
        .first_chunk()
        .expect("a field lies inside its block")
}

/// The half-precision field that starts at byte `at`. Exact: every half is an `f32`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes(*bytes_at(block, at)).to_f32()
}
