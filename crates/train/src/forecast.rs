//! What a training would take, before anything is loaded.

use paceline_model::Config;
use paceline_tensor::Kernels;
use paceline_tensor::chain::{Sizes, Strided, Target};

use crate::net::{KEPT_BYTES, layer_bytes};
use crate::params::Lora;
use crate::weights::{Method, TARGETS, sizes};

/// What is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// What is trained.
    pub method: Method,
    /// The size of adapters.
    pub lora: Lora,
    /// Names out of [`TARGETS`].
    pub targets: &'a [String],
    /// Bytes of the model's files.
    pub file_bytes: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Leaves of a step, of one sequence each.
    pub leaves: usize,
    /// Worker processes.
    pub nodes: usize,
}

/// What it takes.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Forecast {
    /// Numbers that are trained.
    pub numbers: u64,
    /// Bytes of a process that computes leaves.
    pub memory_bytes: u64,
    /// Floating-point operations of a step, all nodes together.
    pub step_flop: f64,
    /// Bytes that a step exchanges, all nodes together.
    pub exchange_bytes: u64,
}

/// Counts.
pub fn forecast(config: &Config, plan: Plan<'_>) -> Forecast {
    let table = (config.vocab * config.width) as u64;
    let (mut inner, mut pairs) = (0, 0);
    for shape in &config.layers {
        for (part, [rows, cols]) in TARGETS.iter().zip(sizes(config.width, shape)) {
            inner += (rows * cols) as u64;
            if plan.targets.iter().any(|name| name == part.2) {
                pairs += (plan.lora.rank * (rows + cols)) as u64;
            }
        }
    }
    let tables = if plan.tied { table } else { 2 * table };
    let all = inner + tables;
    let numbers = if plan.method == Method::Full {
        all
    } else {
        pairs
    };
    let tokens = plan.tokens as f64;
    let attention: f64 = config
        .layers
        .iter()
        .map(|l| (l.heads * l.head_dim) as f64)
        .sum();
    let attention = 4.0 * attention * tokens * tokens;
    let products = 2.0 * (inner + table) as f64 * tokens;
    let layers = config.layers.len();
    let layer = layer_bytes(config, plan.tokens);
    let again = layers.saturating_sub(KEPT_BYTES / layer.max(1)) as f64 / layers.max(1) as f64;
    let passes = 2.0
        + again
        + if plan.method == Method::Full {
            1.0
        } else {
            0.0
        };
    let base = if plan.method == Method::Qlora {
        plan.file_bytes
    } else {
        4 * all
    };
    let depth = u64::from(plan.leaves.next_power_of_two().trailing_zeros());
    let logits = 4 * (plan.tokens.min(256) * config.vocab) as u64;
    let kept = (layers * layer).min(KEPT_BYTES) as u64;
    // Values, moments, a leaf's gradient and those that the tree holds.
    let state = 4 * numbers * (5 + depth);
    let roots = if plan.nodes > 1 {
        2 * plan.nodes as u64
    } else {
        0
    };
    Forecast {
        numbers,
        memory_bytes: base + state + kept + layer as u64 + 2 * logits,
        step_flop: plan.leaves as f64 * (passes * products + (passes + 1.0) * attention),
        exchange_bytes: 4 * numbers * roots,
    }
}

/// Operations a second of the products of training, by `clock`: some tenths of a second.
pub fn measured_flops(kernels: &Kernels, clock: &dyn Fn() -> f64) -> f64 {
    let sizes = Sizes {
        m: 256,
        n: 1536,
        k: 576,
    };
    let (a, b) = (vec![1.0; sizes.m * sizes.k], vec![1.0; sizes.k * sizes.n]);
    let mut c = vec![0.0; sizes.m * sizes.n];
    let (start, mut times) = (clock(), 0);
    while times < 3 || clock() - start < 0.2 {
        let at = Target::rows(&mut c, sizes.n);
        kernels.chains(
            sizes,
            Strided::rows(&a, sizes.k),
            Strided::rows(&b, sizes.k).t(),
            at,
        );
        times += 1;
    }
    let flop = 2.0 * (sizes.m * sizes.n * sizes.k) as f64 * f64::from(times);
    flop / (clock() - start).max(1e-9)
}
