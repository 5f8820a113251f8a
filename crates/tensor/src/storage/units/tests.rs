//! Weights of every type against the file's, and weights without a step.

use half::f16;
use paceline_base::BlockType;

use super::{LARGEST, LARGEST_WIDE, UNIT, UNIT_CHUNKS, Unit, WIDE_MIN, exact_part, grain, is_wide};
use crate::storage::random::random_row;
use crate::storage::{Chunk, chunk, dequantise};

const COLS: usize = 2 * UNIT + 64;

fn quantised() -> impl Iterator<Item = BlockType> {
    BlockType::ALL
        .into_iter()
        .filter(|t| !t.computed().is_float())
}

/// Rows of whole blocks, of a last unit that has fewer chunks where blocks are smaller than units.
fn row(block_type: BlockType, seed: u64) -> Vec<u8> {
    let cols = COLS / block_type.len() * block_type.len();
    random_row(block_type, cols, seed)
}

/// The integers of a row's weights, and the step of each.
fn integers(block_type: BlockType, row: &[u8]) -> Vec<(i32, f32)> {
    let cols = row.len() / block_type.bytes() * block_type.len();
    let chunks = 0..cols / Chunk::LEN;
    let of_chunk = |c: usize| {
        let unit = Unit::of(block_type, row, c / UNIT_CHUNKS);
        let factors = unit.factors[c % UNIT_CHUNKS];
        let q = chunk(block_type, row, c).q.into_iter().enumerate();
        q.map(move |(k, q)| {
            let half = k / (Chunk::LEN / 2);
            let integer = factors.scale[half] * i32::from(q) + factors.min[half];
            (integer, unit.step)
        })
    };
    chunks.flat_map(of_chunk).collect()
}

#[test]
fn weights_fit_their_bits_and_are_near_the_files() {
    for block_type in quantised() {
        for seed in 0..50 {
            let row = row(block_type, seed);
            let integers = integers(block_type, &row);
            let mut exact = vec![0.0; integers.len()];
            dequantise(block_type, &row, &mut exact);
            let bits = if is_wide(block_type) {
                LARGEST_WIDE
            } else {
                LARGEST
            };
            for (unit, exact) in integers.chunks(UNIT).zip(exact.chunks(UNIT)) {
                let largest = exact.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                // Half a step of a scale, times q, and of a min.
                let most = 33.0 * f32::from(u8::from(!is_wide(block_type))).max(2.0);
                for (&(integer, step), &w) in unit.iter().zip(exact) {
                    assert!(integer.abs() as f32 <= bits, "{block_type}: {integer}");
                    let off = (integer as f32 * step - w).abs();
                    let allowed = (most * step.abs()).max(largest * 1e-6);
                    assert!(
                        off <= allowed,
                        "{block_type} {seed}: {w} by {off}, steps of {step}"
                    );
                    assert!(off <= largest / 250.0, "{block_type} {seed}: {w} by {off}");
                }
            }
        }
    }
}

#[test]
fn types_with_integer_scales_are_exact() {
    for block_type in quantised().filter(|t| exact_part(*t).is_some()) {
        let row = row(block_type, 7);
        let mut exact = vec![0.0; 2 * UNIT];
        dequantise(block_type, &row, &mut exact);
        for ((integer, step), exact) in integers(block_type, &row).into_iter().zip(exact) {
            assert_eq!(integer as f32 * step, exact, "{block_type}");
        }
    }
}

/// Blocks of Q4_0 with these scales, all weights `q`.
fn q4_0(scales: &[f32], q: i8) -> Vec<u8> {
    let nibble = (q + 8) as u8;
    let block = |&scale: &f32| {
        let [a, b] = f16::from_f32(scale).to_le_bytes();
        let mut block = [nibble << 4 | nibble; 18];
        (block[0], block[1]) = (a, b);
        block
    };
    scales.iter().flat_map(block).collect()
}

#[test]
fn scales_down_to_a_quarter_of_the_largest_are_exact() {
    // Eleven bits each, as halves have them.
    let scales = [
        0.99,
        0.250_122_07,
        0.999_511_7,
        0.333_251_95,
        -0.7,
        0.4,
        0.27,
        0.6,
    ]
    .map(|scale| f16::from_f32(scale).to_f32());
    let row = q4_0(&scales, -8);
    for (c, scale) in scales.into_iter().enumerate() {
        let (integer, step) = integers(BlockType::Q4_0, &row)[c * Chunk::LEN];
        assert_eq!(integer as f32 * step, -8.0 * scale, "scale {scale}");
    }
}

#[test]
fn steps_are_powers_of_two_and_mins_of_wide_types_multiples() {
    for block_type in quantised().filter(|t| t.len() <= 128 && t.len() != UNIT) {
        let unit = Unit::of(block_type, &row(block_type, 3), 0);
        assert_eq!(
            unit.step.to_bits() & 0x7f_ffff,
            0,
            "{block_type}: {}",
            unit.step
        );
        for factors in unit.factors {
            assert_eq!(factors.min[0] % grain(block_type), 0, "{block_type}");
        }
    }
    assert_eq!(grain(BlockType::Q8_0), WIDE_MIN);
}

#[test]
fn no_weights_and_no_numbers_are_told() {
    for (scale, step) in [
        (0.0, 0.0f32),
        (f32::INFINITY, f32::NAN),
        (f32::NAN, f32::NAN),
    ] {
        let unit = Unit::of(BlockType::Q4_0, &q4_0(&[0.5, scale, 0.25], 3), 0);
        let zeros = Unit::of(BlockType::Q4_0, &q4_0(&[scale; 8], 3), 0);
        assert_eq!(zeros.step.is_nan(), step.is_nan(), "scales of {scale}");
        assert_eq!(unit.step.is_nan(), step.is_nan(), "one scale of {scale}");
        assert!(step.is_nan() || zeros.step == 0.0, "{}", zeros.step);
    }
}

#[test]
#[should_panic(expected = "no unit")]
fn a_unit_of_no_row_is_a_bug() {
    Unit::of(BlockType::Q4_0, &[], 0);
}
