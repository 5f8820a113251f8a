//! Time of attention by depth: `cargo bench -p paceline-tensor --bench attention -- [THREADS]`.
//!
//! The bench times one decode row, then 512 rows of a prompt, at several depths of the KV cache.
//! The shapes are those of real models, over as many layers as make the cache larger than a core's
//! share of the last-level cache. It prints microseconds per layer: median, 10th and 90th
//! percentile. It also prints bytes of keys and values per second and multiply-adds per second.

#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::time::Instant;

use paceline_tensor::{
    AttentionRows, AttentionScratch, AttentionStep, Kernels, KvCache, KvShape, KvType, PAGE,
};

/// Name, query heads, KV heads, elements of a head.
const SHAPES: [(&str, usize, usize, usize); 4] = [
    ("SmolLM2-135M", 9, 3, 64),
    ("Gemma-3-270M", 4, 1, 256),
    ("Llama-3.2-1B", 32, 8, 64),
    ("Llama-3.1-8B", 32, 8, 128),
];

/// Bytes of keys and values over all layers: more than the last cache of a core's complex.
const STREAMED: usize = 128 << 20;

const ROUNDS: usize = 15;

fn main() {
    let threads = std::env::args().filter_map(|arg| arg.parse().ok()).next();
    let kernels = Kernels::new(threads.unwrap_or(1)).expect("threads");
    println!(
        "{} on {} threads",
        kernels.instruction_set().name(),
        kernels.pool().threads()
    );
    for kv_type in KvType::ALL {
        for shape in SHAPES {
            for (depth, rows) in [(512, 1), (4096, 1), (16384, 1), (512, 512), (4096, 512)] {
                AttentionBench::new(shape, kv_type, depth, rows, &kernels).report(shape.0);
            }
        }
    }
}

struct AttentionBench<'k> {
    kernels: &'k Kernels,
    heads: usize,
    rows: usize,
    depth: usize,
    cache: KvCache,
    queries: Vec<f32>,
    out: Vec<f32>,
    pages: Vec<u32>,
    scratch: AttentionScratch,
}

impl<'k> AttentionBench<'k> {
    fn new(
        (_, heads, kv_heads, head_dim): (&str, usize, usize, usize),
        kv_type: KvType,
        depth: usize,
        rows: usize,
        kernels: &'k Kernels,
    ) -> Self {
        let pages = depth.div_ceil(PAGE);
        let shape = KvShape {
            heads: kv_heads,
            head_dim,
            value_dim: head_dim,
            kv_type,
        };
        let bytes = pages * shape.page_bytes();
        let layers = if rows == 1 {
            STREAMED.div_ceil(bytes)
        } else {
            1
        };
        let mut cache = KvCache::uniform(shape, layers, pages).expect("memory");
        let len = kv_heads * head_dim;
        let value = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
        let row: Vec<f32> = (0..len).map(value).collect();
        for (layer, i) in (0..layers).flat_map(|layer| (0..depth).map(move |i| (layer, i))) {
            cache.write(layer, (i / PAGE) as u32, i % PAGE, &row, &row);
        }
        Self {
            kernels,
            heads,
            rows,
            depth,
            queries: (0..rows * heads * head_dim)
                .map(|i| 0.1 * value(i))
                .collect(),
            out: vec![0.0; rows * heads * head_dim],
            pages: (0..pages as u32).collect(),
            scratch: kernels.attention_scratch(1, heads, (head_dim, head_dim), depth),
            cache,
        }
    }

    fn all_layers(&mut self) -> f64 {
        let start = Instant::now();
        let layers = self.cache.layers().count();
        for layer in 0..layers {
            let sequence = AttentionRows {
                rows: self.rows,
                position: self.depth - self.rows,
                pages: &self.pages,
                first_page: 0,
            };
            let step = AttentionStep {
                cache: &self.cache,
                layer,
                heads: self.heads,
                group: self.heads / self.cache.rows(0).heads,
                skipped: 0,
                window: None,
                sinks: None,
                cap: None,
                queries: &self.queries,
                sequences: &[sequence],
            };
            self.kernels
                .attention(&step, &mut self.scratch, &mut self.out);
        }
        start.elapsed().as_secs_f64() * 1e6 / layers as f64
    }

    fn report(&mut self, name: &str) {
        self.all_layers();
        let mut us: Vec<f64> = (0..ROUNDS).map(|_| self.all_layers()).collect();
        us.sort_by(f64::total_cmp);
        let [low, median, high] = [0.1, 0.5, 0.9].map(|q| us[(q * (ROUNDS - 1) as f64) as usize]);
        let shape = self.cache.rows(0);
        let bytes = self.pages.len() * shape.page_bytes();
        let seen: usize = (self.depth - self.rows..self.depth).map(|p| p + 1).sum();
        let work = 4 * seen * self.heads * shape.head_dim;
        println!(
            "{name} {:?} depth {:5} rows {:3}: {median:9.1} us ({low:.1} .. {high:.1}), \
             {:6.1} GB/s, {:6.1} Gop/s",
            shape.kv_type,
            self.depth,
            self.rows,
            bytes as f64 / median / 1e3,
            work as f64 / median / 1e3
        );
    }
}
