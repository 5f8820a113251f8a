//! Work for `cargo xtask instructions`, which counts its instructions: `instructions WORK ROUNDS`.
//!
//! Every round does the same, on one thread of the AVX2 kernels; callgrind cannot run AVX-512 or
//! AMX. So the cost of more rounds is the cost of a round: starting and packing cancel out.

use std::process::ExitCode;

use paceline_base::BlockType;
use paceline_tensor::storage::random::random_row;
use paceline_tensor::{
    Activations, AttentionRows, AttentionStep, InstructionSet, Kernels, KvCache, KvShape, KvType,
    PAGE, PackOptions, PackedMatrix, Precision, Product, StoredMatrix,
};

/// Width of rows: whole super-blocks.
const COLS: usize = 512;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [work, rounds] = &args[..] else {
        return ExitCode::from(2);
    };
    // An old machine, or another architecture: nothing to count.
    let Ok(kernels) = Kernels::with_set(InstructionSet::Avx2, 1) else {
        return ExitCode::from(3);
    };
    let rounds: usize = rounds.parse().unwrap_or(1);
    match &work[..] {
        "attention-decode" => attention(&kernels, KvType::F16, 1, rounds),
        "attention-decode-q8" => attention(&kernels, KvType::Q8, 1, rounds),
        "attention-decode-q4" => attention(&kernels, KvType::Q4, 1, rounds),
        "attention-prompt" => attention(&kernels, KvType::F16, 64, rounds),
        "rows" => rows(&kernels, rounds),
        _ => {
            let Some((name, batch)) = work.split_once('-') else {
                return ExitCode::from(2);
            };
            let Some(block_type) = BlockType::ALL.into_iter().find(|t| t.name() == name) else {
                return ExitCode::from(2);
            };
            let batch = if batch == "decode" { 1 } else { 32 };
            product(&kernels, block_type, batch, rounds);
        }
    }
    ExitCode::SUCCESS
}

/// A matrix of 128 rows times `batch` rows, quantising them included.
fn product(kernels: &Kernels, block_type: BlockType, batch: usize, rounds: usize) {
    let rows = 128;
    let bytes: Vec<u8> = (0..rows as u64)
        .flat_map(|seed| random_row(block_type, COLS, seed))
        .collect();
    let stored = StoredMatrix::new(block_type, rows, COLS, &bytes);
    let weights =
        PackedMatrix::new(stored, PackOptions::default(), kernels.pool()).expect("memory");
    let precision = (!block_type.is_float()).then_some(Precision::Fifteen);
    let mut x = Activations::new(batch, COLS, 0, precision);
    let mut out = vec![0.0; batch * rows];
    for _ in 0..rounds {
        kernels.fill_rows(&mut x, |_, row| fill(row));
        let product = Product::new(&weights, &mut out);
        kernels.products(&x, [product]);
    }
}

/// Nine heads of 64 on three KV heads, `rows` rows behind 512 positions, and writing them.
fn attention(kernels: &Kernels, kv_type: KvType, rows: usize, rounds: usize) {
    let (heads, kv_heads, head_dim, position) = (9, 3, 64, 512);
    let shape = KvShape {
        heads: kv_heads,
        head_dim,
        value_dim: head_dim,
        kv_type,
    };
    let pages: Vec<u32> = (0..(position + rows).div_ceil(PAGE) as u32).collect();
    let mut cache = KvCache::uniform(shape, 1, pages.len()).expect("memory");
    let mut queries = vec![0.0; rows * heads * head_dim];
    fill(&mut queries);
    let values = queries[..rows * kv_heads * head_dim].to_vec();
    let mut out = vec![0.0; queries.len()];
    let mut scratch = kernels.attention_scratch(1, heads, (head_dim, head_dim), position + rows);
    for _ in 0..rounds {
        let sequences = [AttentionRows {
            rows,
            position,
            pages: &pages,
            first_page: 0,
        }];
        kernels.write_kv(&mut cache, 0, &sequences, &values, &values);
        let step = AttentionStep {
            cache: &cache,
            layer: 0,
            heads,
            group: heads / kv_heads,
            skipped: 0,
            window: None,
            sinks: None,
            cap: None,
            queries: &queries,
            sequences: &sequences,
        };
        kernels.attention(&step, &mut scratch, &mut out);
    }
}

/// Norms and gated activations of some rows.
fn rows(kernels: &Kernels, rounds: usize) {
    let mut x = vec![0.0; 16 * COLS];
    fill(&mut x);
    let mut out = vec![0.0; COLS];
    for _ in 0..rounds {
        for row in x.chunks_exact(COLS) {
            kernels.rms_norm(row, &x[..COLS], 1e-5, &mut out);
            kernels.silu_mul(row, &x[..COLS], &mut out);
            kernels.gelu_mul(row, &x[..COLS], &mut out);
        }
    }
}

fn fill(x: &mut [f32]) {
    for (i, x) in x.iter_mut().enumerate() {
        *x = ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
    }
}
