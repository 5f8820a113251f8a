//! Matrices of FP8, and the bytes that matrices of every type take.

use super::*;

#[test]
fn matrices_take_the_bytes_that_are_planned() {
    let kernels = Kernels::with_set(InstructionSet::Scalar, 1).unwrap();
    for (rows, cols) in [(35, 768), (16, 96), (1, 32), (17, 3)] {
        for block_type in types_for(cols) {
            let bytes = stored_rows(block_type, rows, cols, 3);
            let matrix = StoredMatrix::new(block_type, rows, cols, &bytes);
            let options = PackOptions::default();
            let packed = PackedMatrix::new(matrix, options, kernels.pool()).unwrap();
            let planned = PackedMatrix::planned_bytes(block_type, [rows, cols], 32);
            assert_eq!(packed.bytes(), planned, "{block_type} {rows}x{cols}");
        }
    }
}

/// A matrix of FP8 with every value, scales of `scale_cols` columns, and one value that is none.
fn fp8_matrix(rows: usize, cols: usize, scale_cols: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (row, block) in (0..rows).flat_map(|row| (0..cols / 32).map(move |block| (row, block))) {
        let run = block * 32 / scale_cols;
        bytes.extend((0.01 + (row * 7 + run) as f32 * 1e-3).to_le_bytes());
        let value = |k: usize| ((row * cols + block * 32 + k) * 89 % 256) as u8;
        bytes.extend(
            (0..32)
                .map(value)
                .map(|v| if v & 127 == 127 { 0 } else { v }),
        );
    }
    let last = bytes.len() - 1;
    bytes[last] = 127;
    bytes
}

#[test]
fn fp8_takes_a_byte_for_a_value_and_its_scales() {
    const ROWS: usize = 35;
    for (cols, scale_cols, runs) in [(512, 128, 4), (512, 512, 1), (384, 256, 2), (96, 32, 3)] {
        let bytes = fp8_matrix(ROWS, cols, scale_cols);
        let matrix = StoredMatrix::new(BlockType::FP8, ROWS, cols, &bytes);
        let x = KernelRng(3).floats(9 * cols, 2.0);
        let naive = |x: &[f32]| naive::matvec(matrix, 0, x, Precision::Fifteen);
        let expected: Vec<Vec<f32>> = x.chunks(cols).map(naive).collect();
        for kernels in all_kernels() {
            let packed = PackedMatrix::new(matrix, PackOptions::default(), kernels.pool()).unwrap();
            assert_eq!(packed.bytes().0 as usize, 3 * 16 * (cols + 4 * runs));
            let planned = PackedMatrix::planned_bytes(BlockType::FP8, [ROWS, cols], scale_cols);
            assert_eq!(packed.bytes(), planned);
            for batch in [1, 4, 9] {
                let acts = Activations::new(batch, cols, 0, None);
                let got = product_bits(&kernels, &packed, acts, &x);
                for (got, expected) in got.chunks(ROWS).zip(&expected) {
                    assert_eq!(got[..ROWS - 1], bits(&expected[..ROWS - 1]));
                    let [got, expected] = [f32::from_bits(got[ROWS - 1]), expected[ROWS - 1]];
                    assert!(got.is_nan() && expected.is_nan());
                }
            }
        }
    }
}
