//! Attention with a soft cap of scores.

use super::*;

const DIM: usize = 32;
const POSITIONS: usize = 100;
const CAP: f32 = 1.5;

fn capped(kernels: &Kernels, rows: usize) -> Vec<f32> {
    let shape = KvShape {
        heads: 1,
        head_dim: DIM,
        value_dim: DIM,
        kv_type: KvType::F32,
    };
    let mut cache = KvCache::uniform(shape, 1, 2).unwrap();
    let [keys, values] = [1, 2].map(|seed| KernelRng(seed).floats(POSITIONS * DIM, 1.0));
    let sequence = |rows| AttentionRows {
        rows,
        position: POSITIONS - rows,
        pages: &[1, 0],
        first_page: 0,
    };
    kernels.write_kv(&mut cache, 0, &[sequence(POSITIONS)], &keys, &values);
    let queries = KernelRng(3).floats(POSITIONS * DIM, 1.0);
    let step = AttentionStep {
        cache: &cache,
        layer: 0,
        heads: 1,
        group: 1,
        skipped: 0,
        window: None,
        sinks: None,
        cap: Some(CAP),
        queries: &queries[(POSITIONS - rows) * DIM..],
        sequences: &[sequence(rows)],
    };
    let mut scratch = kernels.attention_scratch(rows, 1, (DIM, DIM), 128);
    let mut out = vec![f32::NAN; rows * DIM];
    kernels.attention(&step, &mut scratch, &mut out);
    out
}

/// The definition in f64.
fn defined(row: usize) -> Vec<f64> {
    let [keys, values, queries] =
        [1, 2, 3].map(|seed| KernelRng(seed).floats(POSITIONS * DIM, 1.0));
    let query = &queries[row * DIM..][..DIM];
    let weight = |j: usize| {
        let pairs = query.iter().zip(&keys[j * DIM..]);
        let score: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let cap = f64::from(CAP);
        (cap * (score / cap).tanh()).exp()
    };
    let weights: Vec<f64> = (0..=row).map(weight).collect();
    let total: f64 = weights.iter().sum();
    let value = |d: usize| {
        let of = |(j, w): (usize, &f64)| w * f64::from(values[j * DIM + d]);
        weights.iter().enumerate().map(of).sum::<f64>() / total
    };
    (0..DIM).map(value).collect()
}

#[test]
fn scores_are_capped() {
    let first = capped(&all_kernels()[0], POSITIONS);
    for (row, got) in first.chunks_exact(DIM).enumerate() {
        for (got, expected) in got.iter().zip(defined(row)) {
            let distance = (f64::from(*got) - expected).abs();
            assert!(distance < 1e-5, "row {row}: {got}, expected {expected}");
        }
    }
    for kernels in all_kernels() {
        assert_eq!(
            bits(&capped(&kernels, POSITIONS)),
            bits(&first),
            "{kernels:?}"
        );
        let last = capped(&kernels, 1);
        assert_eq!(
            bits(&last),
            bits(&first[(POSITIONS - 1) * DIM..]),
            "{kernels:?}"
        );
    }
}
