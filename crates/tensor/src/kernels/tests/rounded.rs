//! BF16 weights with activations rounded to bf16.

use half::bf16;

use super::*;
use crate::rounding::{SMALLEST, round};

/// Columns: eight at a time, and a last one without a neighbour.
const COLS: usize = 75;
const ROWS: usize = 17;

/// `n` numbers of 16 bits with biased exponents in `exponents`, of both signs.
fn numbers(n: usize, exponents: &Range<u64>, random: &mut KernelRng) -> Vec<u16> {
    let mut number = || {
        let exponent = exponents.start + random.next() % (exponents.end - exponents.start);
        (exponent << 7 | random.next() & 0x807f) as u16
    };
    (0..n).map(|_| number()).collect()
}

/// Exponents from the smallest that `vdpbf16ps` is used for to products that nearly overflow; like
/// weights; and down to denormal ones. The instruction would take the denormal ones for zeros.
#[test]
fn rounded_products_equal_naive_whatever_the_exponents() {
    for (exponents, tiny) in [
        (71..185, false),
        (71..72, false),
        (110..130, false),
        (0..75, true),
    ] {
        let mut random = KernelRng(exponents.start);
        let weights = numbers(ROWS * COLS, &exponents, &mut random);
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let matrix = StoredMatrix::new(BlockType::BF16, ROWS, COLS, &bytes);
        // More bits than are kept, and some that round to the next exponent.
        let x = numbers(5 * COLS, &exponents, &mut random).into_iter();
        let x: Vec<f32> = x
            .map(|x| f32::from_bits(u32::from(x) << 16 | random.next() as u32 & 0xffff))
            .collect();
        let expected = x
            .chunks_exact(COLS)
            .map(|x| naive::matvec(matrix, 32, x, Precision::Eight));
        let expected = bits(&expected.flatten().collect::<Vec<f32>>());
        let options = PackOptions {
            leaf_cols: 32,
            as_f32: false,
        };
        for kernels in all_kernels() {
            let packed = PackedMatrix::new(matrix, options, kernels.pool()).unwrap();
            assert_eq!(packed.tiny, tiny, "{exponents:?}");
            for rows in [1, 5] {
                let acts = kernels.activations(rows, COLS, Precision::Eight, [&packed]);
                let got = product_bits(&kernels, &packed, acts, &x);
                let set = kernels.instruction_set().name();
                assert_eq!(
                    got,
                    expected[..rows * ROWS],
                    "{exponents:?}, {rows} rows on {set}"
                );
            }
        }
    }
}

#[test]
fn activations_become_the_nearest_bf16() {
    let mut random = KernelRng(1);
    let edges = [
        0.0,
        1.0,
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f81_8000),
        f32::MAX,
        f32::INFINITY,
        SMALLEST,
    ];
    let edges = edges.into_iter().flat_map(|x| [x, -x]);
    for x in edges.chain((0..100_000).map(|_| f32::from_bits(random.next() as u32))) {
        let nearest = bf16::from_f32(x).to_bits();
        let expected = if x.abs() < SMALLEST { 0 } else { nearest };
        assert_eq!(round(x), expected, "{x:e}");
    }
    assert!(bf16::from_bits(round(f32::NAN)).is_nan());
}

#[test]
#[cfg(target_arch = "x86_64")]
fn bf16_dot_products_are_used_here_or_skipped_by_name() {
    let Some(table) = InstructionSet::Avx512Vnni.table() else {
        return eprintln!("SKIPPED products by AVX-512 BF16: this processor has no AVX-512 VNNI");
    };
    if !is_x86_feature_detected!("avx512bf16") {
        return eprintln!("SKIPPED products by AVX-512 BF16: this processor has none");
    }
    assert_ne!(table.pairs(false) as usize, table.pairs(true) as usize);
}
