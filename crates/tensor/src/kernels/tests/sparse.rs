//! The positions that a lightning indexer chooses, and attention over them.

use super::*;
use crate::kv::LayerStore;

const DIMS: (usize, usize) = (48, 32);
const INDEX: usize = 32;
const HEADS: usize = 5;
const INDEX_HEADS: usize = 7;
const POSITIONS: usize = 150;
const PAGES: [u32; 3] = [2, 0, 3];

fn shape(kv_type: KvType) -> KvShape {
    KvShape {
        heads: 1,
        head_dim: DIMS.0,
        value_dim: DIMS.1,
        kv_type,
    }
}

fn last(rows: usize) -> AttentionRows<'static> {
    AttentionRows {
        rows,
        position: POSITIONS - rows,
        pages: &PAGES,
        first_page: 0,
    }
}

/// Index keys: some are equal, so that scores are, too.
fn index_keys() -> Vec<f32> {
    let mut keys = KernelRng(8).floats(POSITIONS * INDEX, 1.0);
    keys.copy_within(40 * INDEX..60 * INDEX, 90 * INDEX);
    keys
}

/// Positions and attention of the last `rows` rows.
fn sparse(
    kv_type: KvType,
    (rows, top_k): (usize, usize),
    kernels: &Kernels,
) -> (Vec<u32>, Vec<f32>) {
    let store = LayerStore::Indexed(shape(kv_type), INDEX);
    let mut cache = KvCache::new(&[(0, store); 2], &[4]).unwrap();
    cache.soil();
    let keys = KernelRng(5).floats(POSITIONS * DIMS.0, 1.0);
    kernels.write_kv(&mut cache, 1, &[last(POSITIONS)], &keys, &[]);
    kernels.write_index(&mut cache, 1, &[last(POSITIONS)], &index_keys());
    let mut scratch = SparseScratch::new(
        kernels,
        store,
        HEADS,
        (
            Choice {
                top_k,
                pool: 1,
                local: 0,
            },
            256,
        ),
    )
    .unwrap();
    let step = IndexStep {
        cache: &cache,
        layer: 1,
        heads: INDEX_HEADS,
        queries: &KernelRng(9).floats(POSITIONS * INDEX_HEADS * INDEX, 1.0)
            [(POSITIONS - rows) * INDEX_HEADS * INDEX..],
        weights: &KernelRng(10).floats(POSITIONS * INDEX_HEADS, 1.0)
            [(POSITIONS - rows) * INDEX_HEADS..],
        sequences: &[last(rows)],
    };
    let mut selected = vec![u32::MAX; rows * top_k];
    kernels.select(&step, &mut scratch, &mut selected);
    let queries = KernelRng(6).floats(POSITIONS * HEADS * DIMS.0, 0.5);
    let step = AttentionStep {
        cache: &cache,
        layer: 1,
        heads: HEADS,
        group: HEADS,
        skipped: 0,
        window: None,
        sinks: None,
        cap: None,
        queries: &queries[(POSITIONS - rows) * HEADS * DIMS.0..],
        sequences: &[last(rows)],
    };
    let mut out = vec![f32::NAN; rows * HEADS * DIMS.1];
    kernels.sparse_attention(&step, &selected, &mut scratch, &mut out);
    if top_k >= POSITIONS {
        let mut plain = vec![f32::NAN; rows * HEADS * DIMS.1];
        let mut scratch = kernels.attention_scratch(rows, HEADS, DIMS, 256);
        kernels.attention(&step, &mut scratch, &mut plain);
        assert_eq!(
            bits(&out),
            bits(&plain),
            "all positions, {kv_type:?} {kernels:?}"
        );
    }
    (selected, out)
}

/// The definition in f32: scores in order, the best first, the earlier of equals.
fn defined(position: usize, top_k: usize) -> Vec<u32> {
    let queries = KernelRng(9).floats(POSITIONS * INDEX_HEADS * INDEX, 1.0);
    let weights = KernelRng(10).floats(POSITIONS * INDEX_HEADS, 1.0);
    let keys = index_keys();
    let score = |j: usize| {
        (0..INDEX_HEADS).fold(0.0f32, |score, h| {
            let query = &queries[(position * INDEX_HEADS + h) * INDEX..][..INDEX];
            let pairs = query.iter().zip(&keys[j * INDEX..]);
            let s = pairs.fold(0.0f32, |s, (q, k)| q.mul_add(*k, s));
            weights[position * INDEX_HEADS + h].mul_add(s.max(0.0), score)
        })
    };
    let mut all: Vec<(f32, u32)> = (0..=position).map(|j| (score(j), j as u32)).collect();
    all.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    let mut best: Vec<u32> = all.into_iter().take(top_k).map(|(_, j)| j).collect();
    best.sort_unstable();
    best
}

/// Every instruction set and number of threads chooses the same positions and has the same bits,
/// also for a row alone. In f32 the positions are those of the definition.
#[test]
fn a_row_attends_to_the_best_positions() {
    for kv_type in [KvType::F16, KvType::F32, KvType::Q8] {
        for top_k in [24, 150] {
            let naive = sparse(kv_type, (POSITIONS, top_k), &all_kernels()[0]);
            for kernels in all_kernels() {
                let all = sparse(kv_type, (POSITIONS, top_k), &kernels);
                let one = sparse(kv_type, (1, top_k), &kernels);
                let is_last = one.0[..] == all.0[(POSITIONS - 1) * top_k..];
                assert!(
                    is_last && all.0 == naive.0,
                    "{kv_type:?} {top_k} {kernels:?}"
                );
                assert_eq!(
                    bits(&all.1),
                    bits(&naive.1),
                    "{kv_type:?} {top_k} {kernels:?}"
                );
                let row = HEADS * DIMS.1;
                assert_eq!(bits(&one.1), bits(&all.1[(POSITIONS - 1) * row..]));
            }
            for position in (0..POSITIONS).filter(|_| kv_type == KvType::F32) {
                let expected = defined(position, top_k);
                let got = &naive.0[position * top_k..][..expected.len()];
                assert_eq!(got, expected, "position {position}, {top_k}");
            }
        }
    }
}

/// A row's attention is that over a cache with the chosen positions alone.
#[test]
fn other_positions_do_not_matter() {
    const TOP_K: usize = 70;
    for kv_type in [KvType::F16, KvType::F32, KvType::Q8] {
        let kernels = &all_kernels()[0];
        let (selected, out) = sparse(kv_type, (1, TOP_K), kernels);
        let keys = KernelRng(5).floats(POSITIONS * DIMS.0, 1.0);
        let chosen = selected
            .iter()
            .map(|j| &keys[*j as usize * DIMS.0..][..DIMS.0]);
        let chosen = chosen.collect::<Vec<_>>().concat();
        let sequence = |rows| AttentionRows {
            rows,
            position: TOP_K - rows,
            pages: &[1, 0],
            first_page: 0,
        };
        let store = LayerStore::Latent(shape(kv_type));
        let mut cache = KvCache::new(&[(0, store)], &[2]).unwrap();
        kernels.write_kv(&mut cache, 0, &[sequence(TOP_K)], &chosen, &[]);
        let queries = KernelRng(6).floats(POSITIONS * HEADS * DIMS.0, 0.5);
        let step = AttentionStep {
            cache: &cache,
            layer: 0,
            heads: HEADS,
            group: HEADS,
            skipped: 0,
            window: None,
            sinks: None,
            cap: None,
            queries: &queries[(POSITIONS - 1) * HEADS * DIMS.0..],
            sequences: &[sequence(1)],
        };
        let mut scratch = kernels.attention_scratch(1, HEADS, DIMS, 128);
        let mut expected = vec![f32::NAN; HEADS * DIMS.1];
        kernels.attention(&step, &mut scratch, &mut expected);
        assert_eq!(bits(&out), bits(&expected), "{kv_type:?}");
    }
}

/// Rows choose the pools of the definition, alone and with others. The last one attends to them as
/// to a cache of these positions alone.
#[test]
fn a_row_attends_to_the_best_pools_and_the_rest() {
    let choice = Choice {
        top_k: 24,
        pool: 4,
        local: 0,
    };
    for kv_type in KvType::ALL {
        let shape = KvShape {
            heads: 2,
            ..shape(kv_type)
        };
        let store = LayerStore::Pooled(shape, INDEX);
        let naive = pooled(store, choice, POSITIONS, &all_kernels()[0]);
        for kernels in all_kernels() {
            let [all, one] = [POSITIONS, 1].map(|rows| pooled(store, choice, rows, &kernels));
            let room = choice.room();
            assert!(all.0 == naive.0 && one.0[..] == all.0[(POSITIONS - 1) * room..]);
            let row = 2 * HEADS * DIMS.1;
            assert_eq!(bits(&all.1), bits(&naive.1), "{kv_type:?} {kernels:?}");
            assert_eq!(bits(&one.1), bits(&all.1[(POSITIONS - 1) * row..]));
        }
        for position in [0, 25, 26, 27, 28, 140, 149] {
            let expected = defined_pools(position, choice);
            let got = &naive.0[position * choice.room()..][..expected.len()];
            assert_eq!(got, expected, "position {position}");
        }
    }
}

/// Keys of pools are means of their inputs, weighted by the softmax of gates and biases. All
/// kernels have the same bits, also where a pool is of two steps.
#[test]
fn keys_of_pools_are_weighted_by_their_gates() {
    const POOL: usize = 4;
    let rows = KernelRng(8).floats(POSITIONS * 2 * INDEX, 3.0);
    let biases = KernelRng(11).floats(POOL * INDEX, 1.0);
    let store = LayerStore::IndexedPools(shape(KvType::F16), INDEX);
    let made = |parts: &[Range<usize>], kernels: &Kernels| -> Vec<f32> {
        let mut cache = KvCache::new(&[(0, store); 2], &[4]).unwrap();
        cache.soil();
        for part in parts {
            let sequences = [AttentionRows {
                rows: part.len(),
                position: part.start,
                ..last(0)
            }];
            let mut own = rows[part.start * 2 * INDEX..part.end * 2 * INDEX].to_vec();
            kernels.write_index(&mut cache, 1, &sequences, &own);
            kernels.weigh_pools(&mut cache, 1, (&sequences, POOL), &mut own, &biases);
        }
        let ends = (POOL - 1..POSITIONS).step_by(POOL);
        let places = ends.flat_map(|end| (0..INDEX).map(move |d| (end, d)));
        let writer = cache.writer(1);
        let read = |(end, d): (usize, usize)| {
            let mut key = [f32::NAN];
            // SAFETY: the cache is this thread's own.
            unsafe { writer.index_line(PAGES[end / PAGE], end % PAGE, d, &mut key) }
            key[0]
        };
        places.map(read).collect()
    };
    let naive = made(std::slice::from_ref(&(0..POSITIONS)), &all_kernels()[0]);
    for (i, key) in naive.iter().enumerate() {
        let (pool, d) = (i / INDEX, i % INDEX);
        let at = |n: usize, d: usize| f64::from(rows[(pool * POOL + n) * 2 * INDEX + d]);
        let gate = |n: usize| at(n, INDEX + d) + f64::from(biases[n * INDEX + d]);
        let weights = [0, 1, 2, 3].map(|n| gate(n).exp());
        let sum: f64 = (0..POOL).map(|n| at(n, d) * weights[n]).sum();
        let far = (f64::from(*key) - sum / weights.iter().sum::<f64>()).abs();
        assert!(far < 3e-6, "pool {pool}, element {d}: {far}"); // some roundings of numbers to 3
    }
    for kernels in all_kernels() {
        let parts = made(&[0..70, 70..POSITIONS], &kernels);
        assert_eq!(bits(&parts), bits(&naive), "{kernels:?}");
    }
}

/// As [`sparse`], over pools and two KV heads; the prompt was written in two parts.
fn pooled(
    store: LayerStore,
    choice: Choice,
    rows: usize,
    kernels: &Kernels,
) -> (Vec<u32>, Vec<f32>) {
    let mut cache = KvCache::new(&[(0, store); 2], &[4]).unwrap();
    cache.soil();
    let [keys, values] = [(5, DIMS.0), (7, DIMS.1)]
        .map(|(seed, dim)| KernelRng(seed).floats(POSITIONS * 2 * dim, 1.0));
    kernels.write_kv(&mut cache, 1, &[last(POSITIONS)], &keys, &values);
    let index = index_keys();
    for part in [0..70, 70..POSITIONS] {
        let sequences = [AttentionRows {
            rows: part.len(),
            position: part.start,
            ..last(0)
        }];
        let mut rows = index[part.start * INDEX..part.end * INDEX].to_vec();
        kernels.write_index(&mut cache, 1, &sequences, &rows);
        let pools = (&sequences[..], choice.pool);
        kernels.pool_index(&mut cache, 1, pools, &mut rows, |_, _| {});
    }
    let mut scratch = SparseScratch::new(kernels, store, 2 * HEADS, (choice, 256)).unwrap();
    let step = IndexStep {
        cache: &cache,
        layer: 1,
        heads: INDEX_HEADS,
        queries: &KernelRng(9).floats(POSITIONS * INDEX_HEADS * INDEX, 1.0)
            [(POSITIONS - rows) * INDEX_HEADS * INDEX..],
        weights: &vec![0.25; rows * INDEX_HEADS],
        sequences: &[last(rows)],
    };
    let mut selected = vec![u32::MAX; rows * choice.room()];
    kernels.select(&step, &mut scratch, &mut selected);
    let query = 2 * HEADS * DIMS.0;
    let queries = &KernelRng(6).floats(POSITIONS * query, 0.5)[(POSITIONS - rows) * query..];
    let step = AttentionStep {
        cache: &cache,
        layer: 1,
        heads: 2 * HEADS,
        group: HEADS,
        skipped: 0,
        window: None,
        sinks: None,
        cap: None,
        queries,
        sequences: &[last(rows)],
    };
    let mut out = vec![f32::NAN; rows * 2 * HEADS * DIMS.1];
    kernels.sparse_attention(&step, &selected, &mut scratch, &mut out);
    check_last(
        &step,
        &selected[(rows - 1) * choice.room()..],
        [&keys, &values],
        kernels,
        &out,
    );
    (selected, out)
}

/// Attention of the last row over a cache of the selected positions alone has its bits.
fn check_last(
    step: &AttentionStep<'_>,
    selected: &[u32],
    [keys, values]: [&[f32]; 2],
    kernels: &Kernels,
    out: &[f32],
) {
    let shape = step.cache.rows(1);
    let chosen = 24 + POSITIONS % 4;
    let of = |all: &[f32], dim: usize| -> Vec<f32> {
        let rows = selected[..chosen].iter().map(|at| *at as usize * 2 * dim);
        rows.flat_map(|at| all[at..at + 2 * dim].to_vec()).collect()
    };
    let mut cache = KvCache::uniform(shape, 1, 4).unwrap();
    let whole = [AttentionRows {
        rows: chosen,
        position: 0,
        ..last(0)
    }];
    kernels.write_kv(
        &mut cache,
        0,
        &whole,
        &of(keys, DIMS.0),
        &of(values, DIMS.1),
    );
    let (query, value) = (2 * HEADS * DIMS.0, 2 * HEADS * DIMS.1);
    let rows = step.sequences[0].rows;
    let sequences = [AttentionRows {
        rows: 1,
        position: chosen - 1,
        ..last(0)
    }];
    let alone = AttentionStep {
        cache: &cache,
        layer: 0,
        queries: &step.queries[(rows - 1) * query..],
        sequences: &sequences,
        ..*step
    };
    let mut expected = vec![f32::NAN; value];
    let mut scratch = kernels.attention_scratch(1, 2 * HEADS, DIMS, 256);
    kernels.attention(&alone, &mut scratch, &mut expected);
    assert_eq!(
        bits(&expected),
        bits(&out[(rows - 1) * value..]),
        "{kernels:?}"
    );
}

/// The definition: the pools of the best means, and the positions behind the last whole pool.
fn defined_pools(position: usize, choice: Choice) -> Vec<u32> {
    let Choice { top_k, pool, .. } = choice;
    let queries = KernelRng(9).floats(POSITIONS * INDEX_HEADS * INDEX, 1.0);
    let index = index_keys();
    let pools = (position + 1) / pool;
    let mean = |i: usize, d: usize| {
        let rows = i * pool..(i + 1) * pool;
        rows.fold(0.0f32, |sum, j| sum + index[j * INDEX + d]) / pool as f32
    };
    let score = |i: usize| {
        (0..INDEX_HEADS).fold(0.0f32, |score, h| {
            let query = &queries[(position * INDEX_HEADS + h) * INDEX..][..INDEX];
            let pairs = query.iter().enumerate();
            let s = pairs.fold(0.0f32, |s, (d, q)| q.mul_add(mean(i, d), s));
            0.25f32.mul_add(s.max(0.0), score)
        })
    };
    let mut all: Vec<(f32, usize)> = (0..pools).map(|i| (score(i), i)).collect();
    all.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    let best = all.into_iter().take(top_k / pool);
    let mut chosen: Vec<u32> = best
        .flat_map(|(_, i)| i * pool..(i + 1) * pool)
        .chain(pools * pool..=position)
        .map(|at| at as u32)
        .collect();
    chosen.sort_unstable();
    chosen
}
