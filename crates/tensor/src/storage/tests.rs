//! The decoders against a second description of the layouts: [`exact_weight`] says for one column
//! of one block which bits make it, in exact arithmetic.
//!
//! `tests/stored.rs` compares with recorded decodes of another program.

use paceline_base::BlockType;

use super::grids::grid_step;
use super::random::{SplitMix64, halves, random_bytes, random_row};
use super::{Chunk, chunk, dequantise};

const CODEBOOK: [i32; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Every quantised type with chunks but those with grids, whose values no description has.
fn quantised() -> impl Iterator<Item = BlockType> {
    let has_chunks = |t: &BlockType| !t.computed().is_float() && grid_step(*t).is_none();
    BlockType::ALL.into_iter().filter(has_chunks)
}

/// Value of a half, from the definition in IEEE 754.
fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    }
}

/// `count` bits of `block` that start at bit `bit` of the byte at `at`; they run on into later
/// bytes.
fn bits(block: &[u8], at: usize, bit: usize, count: usize) -> i32 {
    let one = |i: usize| i32::from(block[at + i / 8] >> (i % 8) & 1);
    (0..count).map(|i| one(bit + i) << i).sum::<i32>()
}

/// Scale and doubled value of column `k` of a block of e2m1 codes.
fn exact_mxfp4(block: &[u8], k: usize) -> (f64, i32) {
    let [one, two, four, sign] = [0, 1, 2, 3].map(|i| bits(block, 1, 4 * k + i, 1));
    let doubled = match (four * 2 + two, one) {
        (0, one) => one,
        (e, one) => (2 + one) << (e - 1),
    };
    let scale = match block[0] {
        255 => f64::NAN,
        e => 2f64.powi(i32::from(e) - 128),
    };
    (scale, doubled * (1 - 2 * sign))
}

/// Scale, integer and bias of column `k` of a block of one of MLX's affine types.
fn exact_affine(affine: BlockType, block: &[u8], k: usize) -> (f64, i32, f64) {
    let width = affine.affine_bits().unwrap() as usize;
    let factor = |at: usize| {
        let bits = u16::from_le_bytes([block[at], block[at + 1]]);
        if affine.name().ends_with("_BF16") {
            f64::from(f32::from_bits(u32::from(bits) << 16))
        } else {
            half(bits)
        }
    };
    (factor(0), bits(block, 4, k * width, width), factor(2))
}

/// The half at a byte of a block.
fn half_at(block: &[u8], at: usize) -> f64 {
    half(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Integer `k` of 32 in the 16 bytes from `at` on, in the order of the legacy types.
fn nibble(block: &[u8], at: usize, k: usize) -> i32 {
    bits(block, at + k % 16, k / 16 * 4, 4)
}

/// Scale, integer factors, min and its factor of column `k` of a super-block.
fn exact_super(block_type: BlockType, block: &[u8], k: usize) -> (f64, i32, f64, i32) {
    let f16_at = |at: usize| half_at(block, at);
    let bits = |at: usize, bit: usize, count: usize| bits(block, at, bit, count);
    // The K-quants' orders within a super-block.
    let pair = |at: usize| bits(at + k / 64 * 32 + k % 32, k / 32 % 2 * 4, 4);
    let crumb = |at: usize| bits(at + k / 128 * 32 + k % 32, k / 32 % 4 * 2, 2);
    let mask = |at: usize| bits(at + k % 32, k / 32, 1);
    // The packed 6-bit scale and min of chunk j in the 12 bytes at 4.
    let packed = || match k / 32 {
        j @ 0..4 => (bits(4 + j, 0, 6), bits(8 + j, 0, 6)),
        j => (
            bits(8 + j, 0, 4) + 16 * bits(j, 6, 2),
            bits(8 + j, 4, 4) + 16 * bits(4 + j, 6, 2),
        ),
    };
    match block_type {
        BlockType::Q2_K => {
            let (scale, min) = (bits(k / 16, 0, 4), bits(k / 16, 4, 4));
            (f16_at(80), scale * crumb(16), -f16_at(82), min)
        }
        BlockType::Q3_K => {
            let s = k / 16;
            let scale = bits(96 + s % 8, s / 8 * 4, 4) + 16 * bits(104 + s % 4, s / 4 * 2, 2);
            (
                f16_at(108),
                (scale - 32) * (crumb(32) + 4 * mask(0) - 4),
                0.0,
                1,
            )
        }
        BlockType::Q4_K => {
            let (scale, min) = packed();
            (f16_at(0), scale * pair(16), -f16_at(2), min)
        }
        BlockType::Q5_K => {
            let (scale, min) = packed();
            (
                f16_at(0),
                scale * (pair(48) + 16 * mask(16)),
                -f16_at(2),
                min,
            )
        }
        BlockType::Q6_K => {
            let low = bits(k / 128 * 64 + k % 64, k / 64 % 2 * 4, 4);
            let value = low + 16 * crumb(128) - 32;
            (
                f16_at(208),
                i32::from(block[192 + k / 16] as i8) * value,
                0.0,
                1,
            )
        }
        BlockType::IQ4_XS => {
            let j = k / 32;
            let scale = bits(4, 4 * j, 4) + 16 * bits(2, 2 * j, 2) - 32;
            let code = nibble(block, 8 + 16 * j, k % 32);
            (f16_at(0), scale * CODEBOOK[code as usize], 0.0, 1)
        }
        other => unreachable!("{other} has no super-blocks"),
    }
}

/// Column `k` of a block. The products and the sum fit 53 bits, so the result is exact. A product
/// beyond f32, which only a scale in bfloat16 can reach, is infinite before anything is added.
fn exact_weight(block_type: BlockType, block: &[u8], k: usize) -> f64 {
    let f16_at = |at: usize| half_at(block, at);
    let nibble = |at: usize| nibble(block, at, k);
    let fifth = |at: usize| 16 * bits(block, at, k, 1);
    // (scale, integer factors, min, integer factor)
    let (d, q, m, n) = match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::BF16 => unreachable!("floats have no blocks"),
        BlockType::Q4_0 => (f16_at(0), nibble(2) - 8, 0.0, 1),
        BlockType::Q4_1 => (f16_at(0), nibble(4), f16_at(2), 1),
        BlockType::Q5_0 => (f16_at(0), nibble(6) + fifth(2) - 16, 0.0, 1),
        BlockType::Q5_1 => (f16_at(0), nibble(8) + fifth(4), f16_at(2), 1),
        BlockType::Q8_0 => (f16_at(0), i32::from(block[2 + k] as i8), 0.0, 1),
        BlockType::IQ4_NL => (f16_at(0), CODEBOOK[nibble(2) as usize], 0.0, 1),
        BlockType::MXFP4 => {
            let (scale, value) = exact_mxfp4(block, k);
            (scale, value, 0.0, 1)
        }
        BlockType::MXFP4_SPLIT => {
            let (scale, value) = exact_mxfp4(block, if k < 16 { 2 * k } else { 2 * k - 31 });
            (scale, value, 0.0, 1)
        }
        long if long.len() == 256 => exact_super(long, block, k),
        affine => {
            let (scale, integer, bias) = exact_affine(affine, block, k);
            (scale, integer, bias, 1)
        }
    };
    let product = d * f64::from(q);
    let reach = match (product as f32).is_infinite() {
        true => f64::from(product as f32),
        false => product,
    };
    reach + m * f64::from(n)
}

/// The formula in [`Chunk`]'s documentation, with the integers multiplied first as kernels do.
fn formula(chunk: &Chunk, k: usize) -> f32 {
    let integer = chunk.sub[k / 16] * i32::from(chunk.q[k]);
    chunk.scale * integer as f32 + chunk.min * chunk.min_sub[k / 16] as f32
}

#[track_caller]
fn assert_same(got: f32, exact: f64, context: impl Fn() -> String) {
    let want = exact as f32;
    assert!(
        got == want || got.is_nan() && want.is_nan(),
        "{}: {got:e}, not {want:e}",
        context()
    );
}

/// Chunk `index` of a row, as decoded values and by the formula, against the bits.
#[track_caller]
fn check_chunk(block_type: BlockType, row: &[u8], index: usize) {
    let chunk = chunk(block_type, row, index);
    for (k, weight) in chunk.weights().into_iter().enumerate() {
        let col = 32 * index + k;
        let block = &row[col / block_type.len() * block_type.bytes()..][..block_type.bytes()];
        let exact = exact_weight(block_type, block, col % block_type.len());
        assert_same(weight, exact, || {
            format!("{block_type} column {col} of {block:02x?}")
        });
        assert_same(formula(&chunk, k), exact, || {
            format!("{block_type} formula, {chunk:?} [{k}]")
        });
    }
}

#[test]
fn random_rows_decode_as_described() {
    for block_type in quantised() {
        let cols = 200 * block_type.len();
        let row = random_row(block_type, cols, 1);
        (0..cols / 32).for_each(|index| check_chunk(block_type, &row, index));
    }
}

/// Types whose weights are rounded once, at any scale: see `mlx.rs` for the others.
fn exact() -> impl Iterator<Item = BlockType> {
    quantised().filter(|t| t.affine_bits().is_none_or(|bits| super::offset(bits) == 0))
}

/// Scales of every bit pattern: zeros, subnormals, negatives, infinities and NaN.
#[test]
fn every_half_as_a_scale_decodes_as_described() {
    for block_type in exact() {
        let mut rng = SplitMix64(2);
        for bits in 0..=u16::MAX {
            let mut block = random_bytes(block_type.bytes(), &mut rng);
            for (i, &(at, _)) in halves(block_type).iter().enumerate() {
                // The second half, where there is one, takes every value too, in another order.
                let bits = if i == 0 {
                    bits
                } else {
                    bits.wrapping_mul(40_503)
                };
                block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            }
            check_chunk(
                block_type,
                &block,
                usize::from(bits) % (block_type.len() / 32),
            );
        }
    }
}

/// Blocks of all zero and all one bits reach both ends of each integer range.
#[test]
fn extreme_bits_decode_as_described() {
    for block_type in quantised() {
        for byte in [0x00, 0xff, 0x0f, 0xf0, 0x80, 0x7f, 0xaa, 0x55] {
            let mut block = vec![byte; block_type.bytes()];
            for &(at, factor) in halves(block_type) {
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(factor).to_le_bytes());
            }
            (0..block_type.len() / 32).for_each(|index| check_chunk(block_type, &block, index));
        }
    }
}

#[test]
fn dequantise_is_all_chunks_in_order() {
    for block_type in quantised() {
        let cols = 3 * block_type.len();
        let row = random_row(block_type, cols, 3);
        let mut out = vec![f32::NAN; cols];
        dequantise(block_type, &row, &mut out);
        let chunks: Vec<f32> = (0..cols / 32)
            .flat_map(|index| chunk(block_type, &row, index).weights())
            .collect();
        assert_eq!(out, chunks, "{block_type}");
    }
}

#[test]
fn every_f16_decodes_exactly() {
    let row: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut out = vec![0.0; 1 << 16];
    dequantise(BlockType::F16, &row, &mut out);
    for (bits, got) in (0..=u16::MAX).zip(out) {
        assert_same(got, half(bits), || format!("half {bits:#06x}"));
        assert_eq!(got.is_sign_negative(), bits >> 15 == 1, "half {bits:#06x}");
    }
}

#[test]
fn every_bf16_is_the_upper_half_of_an_f32() {
    let row: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let mut out = vec![0.0; 1 << 16];
    dequantise(BlockType::BF16, &row, &mut out);
    for (bits, got) in (0..=u16::MAX).zip(out) {
        assert_eq!(got.to_bits(), u32::from(bits) << 16);
    }
}

#[test]
fn nothing_decodes_to_nothing() {
    for block_type in BlockType::ALL {
        dequantise(block_type, &[], &mut []);
        assert!(random_row(block_type, 0, 4).is_empty());
    }
}

#[test]
#[should_panic(expected = "values of Q4_K")]
fn dequantise_refuses_part_of_a_block() {
    dequantise(BlockType::Q4_K, &[0; 144], &mut [0.0; 255]);
}

#[test]
#[should_panic(expected = "values of Q8_0")]
fn dequantise_refuses_bytes_that_do_not_fit() {
    dequantise(BlockType::Q8_0, &[0; 35], &mut [0.0; 32]);
}

#[test]
#[should_panic(expected = "float types have no chunk form")]
fn floats_have_no_chunks() {
    chunk(BlockType::BF16, &[0; 64], 0);
}

#[test]
#[should_panic(expected = "out of bounds")]
fn chunks_end_with_the_row() {
    chunk(BlockType::Q6_K, &[0; 210], 8);
}

#[test]
fn random_rows_look_like_weights() {
    for block_type in BlockType::ALL {
        let mut weights = vec![0.0; 1 << 16];
        let row = random_row(block_type, weights.len(), 5);
        dequantise(block_type, &row, &mut weights);
        let n = weights.len() as f64;
        let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / n;
        let square = weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / n;
        let deviation = (square - mean * mean).sqrt();
        // -8..=7 and the like lie half a step below 0: 0.0022 in Q4_0, the coarsest of them.
        assert!(mean.abs() < 0.003, "{block_type}: mean {mean}");
        assert!(
            (0.017..0.023).contains(&deviation),
            "{block_type}: deviation {deviation}"
        );
    }
}

#[test]
fn random_rows_depend_on_the_seed_alone() {
    for block_type in BlockType::ALL {
        assert_eq!(
            random_row(block_type, 512, 6),
            random_row(block_type, 512, 6)
        );
        assert_ne!(
            random_row(block_type, 512, 6),
            random_row(block_type, 512, 7)
        );
    }
}
