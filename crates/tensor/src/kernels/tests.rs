//! Fast against naive, bit for bit, for every instruction set this machine has.

use std::ops::Range;

use super::*;
use crate::activations::Precision;
use crate::attention::PAGE;
use crate::kv::{KEY_LEVELS, KvCache, KvShape, KvType, VALUE_LEVELS};
use crate::packing::{PackOptions, StoredMatrix};
use crate::{naive, storage};
use half::f16;
use paceline_base::{BlockType, tree};

mod capped;
mod fp8;
mod latent;
mod rounded;
mod sparse;

/// A small generator: the tests need variety, not quality (Steele et al. 2014, SplitMix64).
struct KernelRng(u64);

impl KernelRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.float() * scale).collect()
    }
}

fn all_kernels() -> Vec<Kernels> {
    let sets = InstructionSet::available();
    assert!(!sets.is_empty());
    let with = |set| [1, 3].map(|threads| Kernels::with_set(set, threads).unwrap());
    let all = sets.into_iter().flat_map(with);
    #[cfg(target_arch = "x86_64")]
    let all = all.chain([Kernels {
        table: crate::dispatch::EMULATED,
        pool: ThreadPool::new(1).unwrap(),
        meter: Meter::default(),
    }]);
    all.collect()
}

/// `cargo xtask neon` runs this file: it says so where the emulator knows less than we want.
#[test]
#[cfg(target_arch = "aarch64")]
fn i8mm_is_here_or_skipped_by_name() {
    let set = InstructionSet::NeonI8mm;
    if set.table().is_none() {
        eprintln!(
            "SKIPPED products of {}: this processor has no i8mm",
            set.name()
        );
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Rows of every type that this column count allows.
fn types_for(cols: usize) -> impl Iterator<Item = BlockType> {
    BlockType::ALL
        .into_iter()
        .filter(move |t| cols.is_multiple_of(t.len()))
}

fn stored_rows(block_type: BlockType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let row = |r| storage::random::random_row(block_type, cols, seed * 1000 + r as u64);
    (0..rows).flat_map(row).collect()
}

/// Batch sizes for a matrix of `rows` rows: below a panel, a tile and parts of it, and for some
/// matrices more than a block. Several threads only share the groups.
fn batches(rows: usize, threads: usize) -> &'static [usize] {
    const ALL: [usize; 5] = [1, 2, 7, 35, 131];
    match (rows, threads) {
        (17, 1) => &ALL,
        (_, 1) => &ALL[..4],
        _ => &ALL[3..4],
    }
}

fn check_product(block_type: BlockType, rows: usize, cols: usize, leaf_cols: usize, scale: f32) {
    let seed = (rows * 31 + cols * 7 + leaf_cols) as u64;
    let bytes = stored_rows(block_type, rows, cols, seed);
    let matrix = StoredMatrix::new(block_type, rows, cols, &bytes);
    let mut random = KernelRng(seed);
    let x: Vec<Vec<f32>> = (0..9).map(|_| random.floats(cols, scale)).collect();
    for precision in [Precision::Eight, Precision::Fifteen] {
        let expected: Vec<Vec<f32>> = x
            .iter()
            .map(|x| naive::matvec(matrix, leaf_cols, x, precision))
            .collect();
        compare_product(matrix, leaf_cols, precision, &x, &expected);
    }
}

fn compare_product(
    matrix: StoredMatrix<'_>,
    leaf_cols: usize,
    precision: Precision,
    x: &[Vec<f32>],
    expected: &[Vec<f32>],
) {
    let StoredMatrix {
        block_type,
        rows,
        cols,
        ..
    } = matrix;
    for kernels in all_kernels() {
        let options = PackOptions {
            leaf_cols,
            as_f32: false,
        };
        let packed = PackedMatrix::new(matrix, options, kernels.pool()).unwrap();
        for &batch in batches(rows, kernels.pool().threads()) {
            let mut acts = kernels.activations(batch, cols, precision, [&packed]);
            kernels.fill_rows(&mut acts, |t, row| row.copy_from_slice(&x[t % x.len()]));
            let mut out = vec![f32::NAN; batch * rows];
            kernels.products(&acts, [Product::new(&packed, &mut out)]);
            for (t, out) in out.chunks_exact(rows).enumerate() {
                let case = format!(
                    "{block_type} {rows}x{cols} leaf {leaf_cols} {precision:?} batch {batch} row {t} on {} x {}",
                    kernels.instruction_set().name(),
                    kernels.pool().threads()
                );
                assert_eq!(bits(out), bits(&expected[t % x.len()]), "{case}");
            }
        }
    }
}

#[test]
fn products_of_narrow_matrices_equal_naive() {
    for (rows, cols) in [(1, 32), (16, 64), (17, 96), (35, 256)] {
        products_equal_naive(rows, cols, &[0, 32, 64, 160]);
    }
}

#[test]
fn products_of_wide_matrices_equal_naive() {
    // Wide enough for several blocks of rows, and with the most leaves that a model has.
    check_product(BlockType::Q4_0, 16, 8192, 128, 3.0);
    products_equal_naive(48, 576, &[0, 160]);
    products_equal_naive(20, 768, &[32, 64]);
}

fn products_equal_naive(rows: usize, cols: usize, leaves: &[usize]) {
    for block_type in types_for(cols) {
        for &leaf_cols in leaves {
            check_product(block_type, rows, cols, leaf_cols, 3.0);
        }
    }
}

/// The largest products, where sums come nearest to the exact range of f32. For Q6_K, extreme
/// weights are multiplied by extreme scales (and by the one whose parts are largest). Q4_0 and Q5_0
/// are tested at their ends too, since sums of pairs of theirs barely fit into 16 bits.
#[test]
fn the_largest_products_equal_naive() {
    let d = half::f16::ONE.to_le_bytes();
    for fill in [0, 0xff] {
        for scale in [-128i8, 127, 126, -127] {
            let scales = [scale.cast_unsigned(); 16];
            check_repeated(BlockType::Q6_K, &[&[fill; 192], &scales[..], &d].concat());
        }
        check_repeated(BlockType::Q4_0, &[&d[..], &[fill; 16]].concat());
        check_repeated(BlockType::Q5_0, &[&d[..], &[fill; 20]].concat());
    }
}

/// Rows of 256 columns of one block again and again. Activations have all magnitudes from 127 times
/// 128 down, of one sign and of the other.
fn check_repeated(block_type: BlockType, block: &[u8]) {
    let (rows, cols) = (17, 256);
    assert_eq!(block.len(), block_type.bytes());
    let bytes = block.repeat(rows * cols / block_type.len());
    let matrix = StoredMatrix::new(block_type, rows, cols, &bytes);
    let x = (0..9).map(|t| {
        let steps = |k: usize| 127.0 * 128.0 - (k % 32 * t * 7) as f32;
        (0..cols)
            .map(|k| steps(k) * if t % 2 == 0 { 1.0 } else { -1.0 })
            .collect()
    });
    let x: Vec<Vec<f32>> = x.collect();
    for precision in [Precision::Eight, Precision::Fifteen] {
        let naive = |x: &Vec<f32>| naive::matvec(matrix, 0, x, precision);
        let expected: Vec<Vec<f32>> = x.iter().map(naive).collect();
        compare_product(matrix, 0, precision, &x, &expected);
    }
}

/// A rank that owns columns `cut` computes one product for each root of its leaves. The canonical
/// tree over the roots of both sides of a cut must give the bits of the whole.
fn check_column_cut(
    matrix: StoredMatrix<'_>,
    leaf_cols: usize,
    (batch, cut): (usize, usize),
    kernels: &Kernels,
) {
    let StoredMatrix {
        block_type, cols, ..
    } = matrix;
    let leaves = cols.div_ceil(leaf_cols);
    let float = block_type.computed().is_float();
    let x = KernelRng(cut as u64).floats(batch * cols, 2.0);
    let options = PackOptions {
        leaf_cols,
        as_f32: false,
    };
    let product = |columns: Range<usize>, held: Range<usize>| {
        let packed =
            PackedMatrix::of_columns(matrix, columns.clone(), options, kernels.pool()).unwrap();
        let precision = (!float).then_some(Precision::Fifteen);
        let mut acts = Activations::new(batch, held.len(), leaf_cols, precision);
        kernels.fill_rows(&mut acts, |t, row| {
            row.copy_from_slice(&x[t * cols..][held.clone()]);
        });
        let mut out = vec![f32::NAN; batch * matrix.rows];
        let product = Product {
            weights: &packed,
            first_col: columns.start - held.start,
            out: &mut out,
        };
        kernels.products(&acts, [product]);
        out
    };
    let whole = product(0..cols, 0..cols);
    let (mut nodes, mut values) = (Vec::new(), Vec::new());
    for range in [0..cut, cut..leaves] {
        let columns = |r: Range<usize>| r.start * leaf_cols..cols.min(r.end * leaf_cols);
        for root in tree::roots(range.clone(), leaves) {
            values.extend(product(
                columns(root.leaves(leaves)),
                columns(range.clone()),
            ));
            nodes.push(root);
        }
    }
    let sum = tree::combine(leaves, &nodes, &mut values);
    let set = kernels.instruction_set().name();
    assert_eq!(
        bits(sum),
        bits(&whole),
        "{block_type} cut at {cut} on {set}"
    );
}

#[test]
fn products_of_column_ranges_combine_to_the_bits_of_the_whole() {
    // 768 columns: cuts at multiples of 96 fall into blocks of 256; 17 rows leave a partial group.
    for block_type in types_for(768) {
        let bytes = stored_rows(block_type, 17, 768, 3);
        let matrix = StoredMatrix::new(block_type, 17, 768, &bytes);
        for kernels in all_kernels() {
            for cut in 0..=8 {
                check_column_cut(matrix, 96, (2, cut), &kernels);
            }
            check_column_cut(matrix, 96, (33, 3), &kernels);
        }
    }
}

#[test]
fn float_products_take_any_width() {
    for cols in [1, 3, 5, 33, 50] {
        for block_type in [BlockType::F32, BlockType::F16, BlockType::BF16] {
            check_product(block_type, 19, cols, 32, 1.0);
        }
    }
}

#[test]
fn extreme_activations_equal_naive() {
    for scale in [0.0, 1e-40, 1e-36, 1e-34, 1e-30, 1e30] {
        for block_type in types_for(256) {
            check_product(block_type, 18, 256, 64, scale);
        }
    }
}

#[test]
fn several_matrices_in_one_job_give_what_each_gives_alone() {
    let types = [BlockType::Q4_1, BlockType::Q8_0, BlockType::F16];
    let shapes = [(64, 96), (17, 96), (100, 96)];
    let mut random = KernelRng(7);
    let x = random.floats(5 * 96, 2.0);
    for kernels in all_kernels() {
        let mut acts = Activations::new(5, 96, 0, Some(Precision::Fifteen));
        kernels.fill_rows(&mut acts, |t, row| {
            row.copy_from_slice(&x[t * 96..(t + 1) * 96])
        });
        let packed: Vec<PackedMatrix> = types
            .iter()
            .zip(shapes)
            .map(|(&block_type, (rows, cols))| {
                let bytes = stored_rows(block_type, rows, cols, 5);
                let matrix = StoredMatrix::new(block_type, rows, cols, &bytes);
                PackedMatrix::new(matrix, PackOptions::default(), kernels.pool()).unwrap()
            })
            .collect();
        let mut outs = shapes.map(|(rows, _)| vec![0.0; 5 * rows]);
        let [a, b, c] = &mut outs;
        kernels.products(
            &acts,
            [
                Product::new(&packed[0], a),
                Product::new(&packed[1], b),
                Product::new(&packed[2], c),
            ],
        );
        for (w, out) in packed.iter().zip(&outs) {
            let mut alone = vec![0.0; out.len()];
            kernels.products(&acts, [Product::new(w, &mut alone)]);
            assert_eq!(bits(out), bits(&alone));
        }
    }
}

/// The bits of a product, by activations that are as `acts` makes them.
fn product_bits(kernels: &Kernels, w: &PackedMatrix, mut acts: Activations, x: &[f32]) -> Vec<u32> {
    let cols = acts.cols();
    kernels.fill_rows(&mut acts, |t, row| {
        row.copy_from_slice(&x[t * cols..][..cols]);
    });
    let mut out = vec![0.0; acts.rows() * w.rows()];
    let product = Product::new(w, &mut out);
    kernels.products(&acts, [product]);
    bits(&out)
}

#[test]
fn activations_have_what_their_products_read() {
    const COLS: usize = 256;
    let x = KernelRng(9).floats(64 * COLS, 2.0);
    for kernels in all_kernels() {
        let packed = [BlockType::Q4_1, BlockType::Q6_K, BlockType::F16].map(|block_type| {
            let bytes = stored_rows(block_type, 17, COLS, 5);
            let matrix = StoredMatrix::new(block_type, 17, COLS, &bytes);
            PackedMatrix::new(matrix, PackOptions::default(), kernels.pool()).unwrap()
        });
        for (rows, precision) in [
            (1, Precision::Fifteen),
            (64, Precision::Fifteen),
            (64, Precision::Eight),
        ] {
            for readers in [&packed[..0], &packed[..1], &packed[..2], &packed[2..]] {
                let wanted = || kernels.activations(rows, COLS, precision, readers);
                let acts = wanted();
                let integers = readers.iter().any(PackedMatrix::reads_integers);
                assert_eq!(acts.precision(), integers.then_some(precision));
                for form in RowFormat::ALL {
                    let reads = |w: &PackedMatrix| {
                        let batch = kernels.table.batch;
                        batch.and_then(|batch| batch.form(w.block_type, precision, rows))
                            == Some(form)
                    };
                    let panels = readers.iter().any(reads);
                    assert_eq!(acts.panel_rows(form).has_buffers(), panels, "{form:?}");
                }
                for w in readers {
                    let all = Activations::new(rows, COLS, 0, Some(precision));
                    let all = product_bits(&kernels, w, all, &x);
                    assert_eq!(product_bits(&kernels, w, wanted(), &x), all);
                }
            }
        }
    }
}

#[test]
fn quantised_activations_equal_naive() {
    let mut random = KernelRng(3);
    let mut x = random.floats(864, 5.0);
    x[256..512].fill(0.0);
    x[512..768].fill(-0.5); // ties
    x[600] = 127.0;
    for (kernels, precision) in all_kernels()
        .iter()
        .flat_map(|k| [Precision::Eight, Precision::Fifteen].map(|precision| (k, precision)))
    {
        let mut acts = Activations::new(1, x.len(), 0, Some(precision));
        kernels.fill_rows(&mut acts, |_, row| row.copy_from_slice(&x));
        let spans = naive::quantise(&x, acts.span(), precision);
        let chunks = spans
            .iter()
            .flat_map(|(q, scale)| q.chunks(CHUNK).map(move |q| (q, scale)));
        for (c, (q, scale)) in chunks.enumerate() {
            let (got, meta) = acts.quantised_chunk(0, c);
            assert_eq!(
                (&got[..], meta.scale.to_bits()),
                (q, scale.to_bits()),
                "chunk {c}"
            );
            let half = |h: usize| q[16 * h..16 * h + 16].iter().sum::<i32>();
            let joined = |[high, low]: [i32; 2]| match precision {
                Precision::Eight => high,
                Precision::Fifteen => 128 * high + low,
            };
            assert_eq!(meta.sums.map(joined), [half(0), half(1)]);
        }
    }
}

#[test]
fn exp_is_close_and_the_same_everywhere() {
    let mut worst = 0.0f64;
    for i in -9000..8900 {
        let x = i as f32 / 100.0;
        let expected = f64::from(x).exp();
        let got = naive::exp(x);
        if x < -87.33 {
            assert_eq!(got.to_bits(), 0, "exp({x})");
        } else if x < 88.37 {
            worst = worst.max((f64::from(got) / expected - 1.0).abs());
        }
        for set in InstructionSet::available() {
            let mut out = [0.0; 16];
            // SAFETY: the set is available.
            unsafe { (set.table().unwrap().exp)(&[x; 16], &mut out) };
            assert_eq!(
                out[15].to_bits(),
                got.to_bits(),
                "exp({x}) on {}",
                set.name()
            );
        }
    }
    assert!(worst < 1.3e-7, "relative error {worst}"); // 2^-23 = 1.19e-7
    assert_eq!(naive::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(naive::exp(0.0), 1.0);
}

#[test]
fn row_operations_are_the_same_everywhere_and_right() {
    let mut random = KernelRng(11);
    for n in [1, 15, 16, 17, 64, 576] {
        let (x, w) = (random.floats(n, 4.0), random.floats(n, 2.0));
        let mut reference: Option<Vec<Vec<u32>>> = None;
        for kernels in all_kernels() {
            let mut out = [(); 3].map(|()| vec![0.0; n]);
            kernels.rms_norm(&x, &w, 1e-5, &mut out[0]);
            kernels.silu_mul(&x, &w, &mut out[1]);
            kernels.gelu_mul(&x, &w, &mut out[2]);
            let got: Vec<_> = out.iter().map(|o| bits(o)).collect();
            assert_eq!(
                &got,
                reference.get_or_insert(got.clone()),
                "n {n} {kernels:?}"
            );
            let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let scale = 1.0 / (squares / n as f64 + 1e-5).sqrt();
            for i in 0..n {
                let (x, w) = (f64::from(x[i]), f64::from(w[i]));
                let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                let gelu = 0.5 * x * (1.0 + z.tanh()) * w;
                let expected = [x * scale * w, x / (1.0 + (-x).exp()) * w, gelu];
                for (out, expected) in out.iter().zip(expected) {
                    assert!(
                        (f64::from(out[i]) - expected).abs() < 2e-6,
                        "n {n} element {i}"
                    );
                }
            }
        }
    }
}

struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    kv_type: KvType,
    sinks: bool,
}

/// Scores of sinks, below, among and above those of keys.
const SINKS: [f32; 26] = {
    let mut sinks = [0.0; 26];
    let mut i = 0;
    while i < sinks.len() {
        sinks[i] = (i as f32 * 1.7) % 9.0 - 4.0;
        i += 1;
    }
    sinks
};

/// Keys and values of `n` positions, as the cache rounds them.
fn history(case: &Case, n: usize, seed: u64) -> [Vec<Vec<f32>>; 2] {
    let mut random = KernelRng(seed);
    let len = case.kv_heads * case.head_dim;
    let round = |x: Vec<f32>, levels: u8| -> Vec<f32> {
        let heads = x.chunks(case.head_dim);
        match case.kv_type {
            KvType::F16 => x.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
            KvType::F32 => x,
            KvType::Q8 => heads.flat_map(naive::q8).collect(),
            KvType::Q4 => heads.flat_map(|head| naive::q4(head, levels)).collect(),
        }
    };
    [KEY_LEVELS, VALUE_LEVELS].map(|levels| {
        let rows = (0..n).map(|_| round(random.floats(len, 2.0), levels));
        rows.collect()
    })
}

fn naive_row(
    case: &Case,
    query: &[f32],
    [keys, values]: &[Vec<Vec<f32>>; 2],
    n: usize,
) -> Vec<f32> {
    let d = case.head_dim;
    let head = |h: usize| {
        let kv = h / (case.heads / case.kv_heads);
        let cut = |rows: &'_ [Vec<f32>]| -> Vec<Vec<f32>> {
            rows[..n]
                .iter()
                .map(|r| r[kv * d..(kv + 1) * d].to_vec())
                .collect()
        };
        let (k, v) = (cut(keys), cut(values));
        let (k, v): (Vec<&[f32]>, Vec<&[f32]>) = (
            k.iter().map(|r| &r[..]).collect(),
            v.iter().map(|r| &r[..]).collect(),
        );
        naive::attention(
            &query[h * d..(h + 1) * d],
            &k,
            &v,
            case.window.unwrap_or(usize::MAX),
            case.sinks.then_some(SINKS[h]),
        )
    };
    (0..case.heads).flat_map(head).collect()
}

/// Two sequences of different length in one batch, pages scattered, stale pages full of infinity.
fn check_attention(case: &Case, lengths: [usize; 2], rows: [usize; 2], kernels: &Kernels) {
    let shape = KvShape {
        heads: case.kv_heads,
        head_dim: case.head_dim,
        value_dim: case.head_dim,
        kv_type: case.kv_type,
    };
    let mut cache = KvCache::uniform(shape, 2, 16).unwrap();
    let infinite = vec![f32::INFINITY; case.kv_heads * case.head_dim];
    for page in 0..16 {
        (0..PAGE).for_each(|slot| cache.write(1, page, slot, &infinite, &infinite));
    }
    let pages: [Vec<u32>; 2] = [
        (0..8).map(|i| 2 * i).collect(),
        (0..8).map(|i| 15 - 2 * i).collect(),
    ];
    let histories = [history(case, lengths[0], 1), history(case, lengths[1], 2)];
    for (s, [keys, values]) in histories.iter().enumerate() {
        for (i, (k, v)) in keys.iter().zip(values).enumerate() {
            cache.write(1, pages[s][i / PAGE], i % PAGE, k, v);
        }
    }
    let mut random = KernelRng(9);
    let row_len = case.heads * case.head_dim;
    let queries = random.floats((rows[0] + rows[1]) * row_len, 0.5);
    let sequences = [0, 1].map(|s| AttentionRows {
        rows: rows[s],
        position: lengths[s] - rows[s],
        pages: &pages[s],
        first_page: 0,
    });
    let step = AttentionStep {
        cache: &cache,
        layer: 1,
        heads: case.heads,
        group: case.heads / case.kv_heads,
        skipped: 0,
        window: case.window,
        sinks: case.sinks.then_some(&SINKS[..case.heads]),
        cap: None,
        queries: &queries,
        sequences: &sequences,
    };
    let mut scratch = kernels.attention_scratch(2, case.heads, (case.head_dim, case.head_dim), 512);
    let mut out = vec![f32::NAN; queries.len()];
    kernels.attention(&step, &mut scratch, &mut out);
    let mut row = 0;
    for s in 0..2 {
        for i in 0..rows[s] {
            let n = lengths[s] - rows[s] + i + 1;
            let query = &queries[row * row_len..(row + 1) * row_len];
            let expected = naive_row(case, query, &histories[s], n);
            let got = &out[row * row_len..(row + 1) * row_len];
            assert_eq!(
                bits(got),
                bits(&expected),
                "sequence {s} row {i} {kernels:?}"
            );
            row += 1;
        }
    }
}

#[test]
fn attention_equals_naive() {
    let shapes = [
        (3, 1, 64),
        (9, 3, 16),
        (4, 4, 80),
        (10, 2, 32),
        (4, 1, 256),
        (26, 1, 48),
    ];
    for (i, (heads, kv_heads, head_dim)) in shapes.into_iter().enumerate() {
        for (j, window) in [None, Some(1), Some(40), Some(70)].into_iter().enumerate() {
            let kv_type = KvType::ALL[(i + j) % 4];
            let case = Case {
                heads,
                kv_heads,
                head_dim,
                window,
                kv_type,
                sinks: i % 2 == 1,
            };
            for kernels in all_kernels() {
                check_attention(&case, [1, 64], [1, 1], &kernels);
                check_attention(&case, [65, 200], [1, 1], &kernels);
                check_attention(&case, [130, 20], [70, 20], &kernels);
                check_attention(&case, [150, 3], [33, 3], &kernels);
            }
        }
    }
}

/// 0.27 and 0.15 of f32, as the documents say.
#[test]
fn pages_take_the_bits_of_their_type() {
    for (kv_type, of_f32) in KvType::ALL.into_iter().zip([0.5, 1.0, 0.27, 0.15]) {
        for head_dim in [64, 128, 576] {
            let shape = KvShape {
                heads: 3,
                head_dim,
                value_dim: head_dim,
                kv_type,
            };
            let bits = 8.0 * shape.page_bytes() as f64 / (3 * 2 * PAGE * head_dim) as f64;
            assert!((bits - kv_type.stored_bits()).abs() < 1e-9, "{shape:?}");
            assert!(bits <= 32.0 * of_f32, "{shape:?}: {bits} bits");
        }
    }
}

/// Rotated queries have the products of the others with rotated keys, a second rotation undoes the
/// first, and a large element becomes small.
#[test]
fn heads_are_rotated_and_back() {
    let kernels = &all_kernels()[0];
    for dim in [1, 16, 64, 256] {
        let mut random = KernelRng(dim as u64);
        let [mut keys, mut queries] = [(); 2].map(|()| random.floats(3 * 2 * dim, 1.0));
        keys[1] = 50.0;
        let stored = [keys.clone(), queries.clone()];
        let products = |a: &[f32], b: &[f32]| -> Vec<f32> {
            let heads = a.chunks_exact(dim).zip(b.chunks_exact(dim));
            let one = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| a * b).sum();
            heads.map(one).collect()
        };
        let expected = products(&keys, &queries);
        kernels.rotate_heads(&mut keys, 2 * dim, dim);
        kernels.rotate_heads(&mut queries, 2 * dim, dim);
        for (got, expected) in products(&keys, &queries).iter().zip(expected) {
            assert!((got - expected).abs() < 1e-3, "{dim}: {got}, {expected}");
        }
        let is_spread = keys.iter().all(|x| x.abs() < 20.0);
        assert!(is_spread || dim == 1, "{dim}: {keys:?}");
        for (mut x, stored) in [keys, queries].into_iter().zip(stored) {
            kernels.rotate_heads(&mut x, 2 * dim, dim);
            let same = x.iter().zip(stored).all(|(x, y)| (x - y).abs() < 1e-4);
            assert!(same, "{dim}: {x:?}");
        }
    }
}

/// Attention over the query heads `heads` of `case` alone, with only the KV heads they need.
fn attention_of(case: &Case, heads: Range<usize>, rows: usize, kernels: &Kernels) -> Vec<f32> {
    let (group, d) = (case.heads / case.kv_heads, case.head_dim);
    let kv = heads.start / group..(heads.end - 1) / group + 1;
    let shape = KvShape {
        heads: kv.len(),
        head_dim: d,
        value_dim: d,
        kv_type: case.kv_type,
    };
    let mut cache = KvCache::uniform(shape, 1, 4).unwrap();
    let [keys, values] = history(case, 150, 4);
    let held = kv.start * d..kv.end * d;
    for (i, (k, v)) in keys.iter().zip(&values).enumerate() {
        let (k, v) = (&k[held.clone()], &v[held.clone()]);
        cache.write(0, (i / PAGE) as u32, i % PAGE, k, v);
    }
    let all = KernelRng(11).floats(rows * case.heads * d, 0.5);
    let mine = |row: &[f32]| row[heads.start * d..heads.end * d].to_vec();
    let queries: Vec<f32> = all.chunks_exact(case.heads * d).flat_map(mine).collect();
    let sequence = AttentionRows {
        rows,
        position: 150 - rows,
        pages: &[0, 1, 2],
        first_page: 0,
    };
    let step = AttentionStep {
        cache: &cache,
        layer: 0,
        heads: heads.len(),
        group,
        skipped: heads.start % group,
        window: case.window,
        sinks: None,
        cap: None,
        queries: &queries,
        sequences: &[sequence],
    };
    let mut scratch = kernels.attention_scratch(1, heads.len(), (d, d), 256);
    let mut out = vec![f32::NAN; queries.len()];
    kernels.attention(&step, &mut scratch, &mut out);
    out
}

#[test]
fn attention_over_some_heads_equals_those_of_all() {
    let case = Case {
        heads: 9,
        kv_heads: 3,
        head_dim: 32,
        window: None,
        kv_type: KvType::F16,
        sinks: false,
    };
    for kernels in all_kernels() {
        for rows in [1, 40] {
            let all = attention_of(&case, 0..9, rows, &kernels);
            for heads in [0..5, 5..9, 4..5, 2..7, 0..1, 3..6, 1..9] {
                let got = attention_of(&case, heads.clone(), rows, &kernels);
                let mine = |row: &[f32]| row[heads.start * 32..heads.end * 32].to_vec();
                let expected: Vec<f32> = all.chunks_exact(9 * 32).flat_map(mine).collect();
                assert_eq!(bits(&got), bits(&expected), "heads {heads:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn an_instruction_set_that_is_absent_is_named() {
    let absent = InstructionSet::ALL
        .into_iter()
        .find(|set| set.table().is_none());
    let absent = absent.expect("no machine has both AVX-512 and NEON");
    let error = Kernels::with_set(absent, 1).unwrap_err().to_string();
    assert!(
        error.contains(absent.name()) && error.contains("scalar"),
        "{error}"
    );
}
