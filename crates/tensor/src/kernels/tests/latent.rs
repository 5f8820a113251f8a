//! Values that are the first elements of their keys, kept once.

use super::*;
use crate::kv::LayerStore;

/// The last `rows` of 150 rows, of `heads` heads of 48 elements over values of 32. Values are the
/// first of the keys: kept twice, or once.
fn latent(
    kv_type: KvType,
    once: bool,
    (heads, rows): (usize, usize),
    kernels: &Kernels,
) -> Vec<f32> {
    const DIMS: (usize, usize) = (48, 32);
    let shape = KvShape {
        heads: 1,
        head_dim: DIMS.0,
        value_dim: DIMS.1,
        kv_type,
    };
    let store = match once {
        true => LayerStore::Latent(shape),
        false => LayerStore::Rows(shape),
    };
    let mut cache = KvCache::new(&[(0, store); 2], &[4]).unwrap();
    cache.soil();
    let keys = KernelRng(5).floats(150 * DIMS.0, 1.0);
    let values: Vec<&[f32]> = keys
        .chunks_exact(DIMS.0)
        .map(|key| &key[..DIMS.1])
        .collect();
    let values = if once { vec![] } else { values.concat() };
    let sequence = |rows| AttentionRows {
        rows,
        position: 150 - rows,
        pages: &[2, 0, 3],
        first_page: 0,
    };
    kernels.write_kv(&mut cache, 1, &[sequence(150)], &keys, &values);
    let queries = KernelRng(6).floats(rows * heads * DIMS.0, 0.5);
    let step = AttentionStep {
        cache: &cache,
        layer: 1,
        heads,
        group: heads,
        skipped: 0,
        window: None,
        sinks: None,
        cap: None,
        queries: &queries,
        sequences: &[sequence(rows)],
    };
    let mut scratch = kernels.attention_scratch(1, heads, DIMS, 256);
    let mut out = vec![f32::NAN; rows * heads * DIMS.1];
    kernels.attention(&step, &mut scratch, &mut out);
    out
}

#[test]
fn values_within_keys_are_as_good_as_values() {
    for kv_type in [KvType::F16, KvType::F32, KvType::Q8] {
        for sizes in [(4, 1), (30, 1), (4, 70), (50, 3)] {
            for kernels in all_kernels() {
                let expected = latent(kv_type, false, sizes, &kernels);
                let got = latent(kv_type, true, sizes, &kernels);
                assert_eq!(
                    bits(&got),
                    bits(&expected),
                    "{kv_type:?} {sizes:?} {kernels:?}"
                );
            }
        }
    }
}
