//! Measures what a token costs on this machine: the products of some of a model's own layers, the
//! operations around them, attention, the output head, and an exchange between two ranks.
//!
//! A probe takes a few tenths of a second. It runs the kernels that a step runs, in its order,
//! on weights of the file; it does not run the model.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use paceline_base::{KernelClass, Rank};
use paceline_comm::tcp::{self, GroupId};
use paceline_comm::{Backend, Deadline, Group, Seat, Strict, Wires, init};
use paceline_engine::SamplingParams;
use paceline_formats::tensor::Tensor;
use paceline_model::{Activation, Config, Family, Part, Role, Source};
use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, Kernels, KvCache, KvShape, KvType,
    PAGE, PackOptions, Packed, Precision, Product, StoredMatrix, vector,
};
use serde::{Deserialize, Serialize};

/// Bytes of weights that are packed for a probe, or all of a smaller model: several times the last
/// cache of the machines at hand (32 MiB), so that they come from where the model's would.
const PROBED_BYTES: u64 = 160 << 20;

/// Rows of the step that stands for prefill.
const PROMPT_ROWS: usize = 64;

/// Positions of the two attention probes; their difference is the price of a key.
const POSITIONS: [usize; 2] = [64, 512];

/// Most passes of each measurement, of which the median counts: what runs beside this now will run
/// beside the model too.
const PASSES: usize = 15;

/// Blocks of small exchanges, some 80 ms by shared memory: what else runs takes a core for longer
/// than the few milliseconds that seven blocks took, and then all of them were slow (measured: 120
/// microseconds an exchange instead of 10).
const BLOCKS: usize = 40;

/// Blocks of large ones, a few milliseconds each.
const LARGE_BLOCKS: usize = 7;

/// A measurement ends after the pass in which this time is over: the portable kernels are a hundred
/// times slower than others, and whoever uses them waits for an answer too.
const ENOUGH: Duration = Duration::from_millis(200);

/// What was measured, in seconds; for one kernel class and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// A layer's products for one row.
    pub(super) products: f64,
    /// What else a layer costs for one row, without its keys.
    pub(super) other: f64,
    /// One key in one layer.
    pub(super) key: f64,
    /// The output head's product for one row.
    pub(super) head: f64,
    /// What a step costs besides: the last norm, the token chosen from the logits.
    pub(super) step: f64,
    /// A layer's products for a row of a prompt.
    pub(super) prompt_row: f64,
}

/// An exchange between ranks on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Wire {
    /// Seconds of an all-gather of one activation.
    pub(super) exchange: f64,
    /// Bytes a second of large messages.
    pub(super) bytes_per_s: f64,
}

/// Matrices of a layer.
struct Layer {
    qkv: [Packed; 3],
    output: Packed,
    gate_up: [Packed; 2],
    down: Packed,
}

/// Measures a model's layers with `kernels`.
///
/// # Errors
/// What is wrong with the file; what memory could not be had.
pub(super) fn probe(
    source: &Source,
    config: &Config,
    class: KernelClass,
    kernels: &Kernels,
) -> anyhow::Result<Measured> {
    let weights = Weights::pack(source, config, class, kernels)?;
    let mut step = Step::new(config, class, kernels)?;
    let per_layer = |seconds: f64| seconds / weights.layers.len() as f64;
    let [all, head] = step.token(&weights);
    let products = per_layer(all);
    let rows = prompt_rows(all);
    let [prompt] = typical(|| [timed(|| step.products(&weights, rows))]);
    let [near, far, last] = typical(|| {
        let near = timed(|| step.layers(&weights, POSITIONS[0]));
        step.head(&weights);
        let far = timed(|| step.layers(&weights, POSITIONS[1]));
        step.head(&weights);
        [near, far, timed(|| step.last())]
    });
    let [near, far] = [near, far].map(per_layer);
    let key = (far - near).max(0.0) / (POSITIONS[1] - POSITIONS[0]) as f64;
    Ok(Measured {
        products,
        other: (near - products - key * POSITIONS[0] as f64).max(0.0),
        key,
        head: head * weights.head_share,
        step: last,
        prompt_row: per_layer(prompt) / rows as f64,
    })
}

/// Seconds of a layer's products for one row, with `kernels`.
///
/// # Errors
/// What is wrong with the file; what memory could not be had.
pub(super) fn products(
    source: &Source,
    config: &Config,
    class: KernelClass,
    kernels: &Kernels,
) -> anyhow::Result<f64> {
    let weights = Weights::pack(source, config, class, kernels)?;
    let mut step = Step::new(config, class, kernels)?;
    let [all, _] = step.token(&weights);
    Ok(all / weights.layers.len() as f64)
}

/// Rows that stand for a prompt where one takes `seconds`: fewer on a slow machine.
fn prompt_rows(seconds: f64) -> usize {
    let rows = ENOUGH.as_secs_f64() / seconds.max(1e-9);
    (rows as usize).clamp(1, PROMPT_ROWS)
}

fn timed(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// What `f` measures: the median of each of its figures over as many passes as [`ENOUGH`] allows,
/// after one to warm up.
fn typical<const N: usize>(mut f: impl FnMut() -> [f64; N]) -> [f64; N] {
    let began = Instant::now();
    let (first, mut passes) = (f(), Vec::new());
    while passes.len() < PASSES && began.elapsed() < ENOUGH {
        passes.push(f());
    }
    std::array::from_fn(|i| {
        let mut column: Vec<f64> = passes.iter().map(|pass| pass[i]).collect();
        column.sort_by(f64::total_cmp);
        column.get(column.len() / 2).copied().unwrap_or(first[i])
    })
}

fn pack(
    tensor: &Tensor,
    class: KernelClass,
    rows: usize,
    kernels: &Kernels,
) -> anyhow::Result<Packed> {
    let whole = StoredMatrix {
        block_type: tensor.block_type,
        rows: tensor.rows(),
        cols: tensor.cols(),
        bytes: &tensor.bytes,
    };
    let options = PackOptions {
        as_f32: class == KernelClass::CpuF32,
        ..PackOptions::default()
    };
    let matrix = whole.row_range(0..rows.min(tensor.rows()));
    Ok(Packed::new(matrix, options, kernels.pool())?)
}

/// As many layers from the first as [`PROBED_BYTES`] allows, at least one.
fn layers(
    source: &Source,
    config: &Config,
    class: KernelClass,
    kernels: &Kernels,
) -> anyhow::Result<Vec<Layer>> {
    let (mut layers, mut bytes) = (Vec::new(), 0);
    for index in 0..config.layers.len() {
        let matrix = |part| -> anyhow::Result<Packed> {
            let tensor = source.weight(config.family, Role::Layer(index, part))?;
            pack(&tensor, class, usize::MAX, kernels)
        };
        let layer = Layer {
            qkv: [
                matrix(Part::Query)?,
                matrix(Part::Key)?,
                matrix(Part::Value)?,
            ],
            output: matrix(Part::AttentionOutput)?,
            gate_up: [matrix(Part::Gate)?, matrix(Part::Up)?],
            down: matrix(Part::Down)?,
        };
        let own = layer
            .qkv
            .iter()
            .chain(&layer.gate_up)
            .chain([&layer.output, &layer.down]);
        bytes += own.map(|matrix| matrix.bytes().0).sum::<u64>();
        layers.push(layer);
        if bytes >= PROBED_BYTES {
            break;
        }
    }
    Ok(layers)
}

/// Weights that are read in turn, as a step reads them: measured alone, a head that fits in the
/// last cache would be faster than it ever is between layers.
struct Weights {
    layers: Vec<Layer>,
    /// As many of its rows as [`PROBED_BYTES`] allows.
    head: Packed,
    /// All rows over those.
    head_share: f64,
}

impl Weights {
    fn pack(
        source: &Source,
        config: &Config,
        class: KernelClass,
        kernels: &Kernels,
    ) -> anyhow::Result<Self> {
        let tensor = match source.opt_weight(config.family, Role::Output)? {
            Some(tensor) => tensor,
            None => source.weight(config.family, Role::TokenEmbedding)?,
        };
        let row = (tensor.bytes.len() / tensor.rows().max(1)).max(1);
        let rows = tensor.rows().min((PROBED_BYTES as usize / row).max(16));
        Ok(Self {
            layers: layers(source, config, class, kernels)?,
            head: pack(&tensor, class, rows, kernels)?,
            head_share: tensor.rows() as f64 / rows as f64,
        })
    }
}

/// Buffers of a step.
struct Step<'k> {
    kernels: &'k Kernels,
    config: Config,
    normed: Activations,
    attended: Activations,
    hidden: Activations,
    wide: [Vec<f32>; 3],
    logits: Vec<f32>,
    angles: Vec<(f32, f32)>,
    cache: KvCache,
    scratch: AttentionScratch,
}

impl<'k> Step<'k> {
    fn new(config: &Config, class: KernelClass, kernels: &'k Kernels) -> anyhow::Result<Self> {
        let precision = (class != KernelClass::CpuF32).then_some(Precision::of(class));
        let rows = PROMPT_ROWS;
        let inner = config.heads * config.head_dim;
        let widest = config.ffn.max(inner).max(config.width);
        let shape = KvShape {
            layers: 1,
            heads: config.kv_heads,
            head_dim: config.head_dim,
            kv_type: KvType::of(class),
        };
        // Widths that are no whole runs of 32 have float weights, which read no integers.
        let activations = |cols: usize| {
            let precision = precision.filter(|_| cols.is_multiple_of(32));
            Activations::new(rows, cols, precision)
        };
        Ok(Self {
            kernels,
            config: config.clone(),
            normed: activations(config.width),
            attended: activations(inner),
            hidden: activations(config.ffn),
            wide: std::array::from_fn(|_| vec![0.5; rows * widest]),
            logits: vec![0.5; config.vocab],
            angles: Vec::new(),
            cache: KvCache::new(shape, POSITIONS[1].div_ceil(PAGE))?,
            scratch: kernels.attention_scratch(1, config.heads, config.head_dim, POSITIONS[1]),
        })
    }

    /// Seconds of the products of all layers and of the head, for one row.
    fn token(&mut self, weights: &Weights) -> [f64; 2] {
        typical(|| {
            let layers = timed(|| self.products(weights, 1));
            [layers, timed(|| self.head(weights))]
        })
    }

    fn head(&mut self, weights: &Weights) {
        let out = &mut self.logits[..weights.head.rows()];
        product(self.kernels, &self.normed, [(&weights.head, out)]);
    }

    /// What comes before the head and after it.
    fn last(&mut self) {
        self.norm();
        let greedy = SamplingParams::default();
        // What it chooses does not matter, nor does an error, which there is none of.
        let _ = greedy.first_token(self.kernels, &mut self.logits);
    }

    /// The norm before a half of a layer.
    fn norm(&mut self) {
        let width = self.config.width;
        let [residual, weight, _] = &self.wide;
        let (kernels, eps) = (self.kernels, self.config.norm_eps);
        kernels.fill_rows(&mut self.normed, |_, row| {
            kernels.rms_norm(&residual[..width], &weight[..width], eps, row);
        });
    }

    /// Norms over heads and after halves, where the family has them, and rotations.
    fn turn(&mut self) {
        let c = &self.config;
        let [q, k, out] = &mut self.wide;
        let (q, k) = (
            &mut q[..c.heads * c.head_dim],
            &mut k[..c.kv_heads * c.head_dim],
        );
        let heads = q
            .chunks_exact_mut(c.head_dim)
            .chain(k.chunks_exact_mut(c.head_dim));
        if matches!(c.family, Family::Qwen3 | Family::Gemma3) {
            let weight = &out[..c.head_dim];
            heads.for_each(|head| self.kernels.rms_norm_in_place(head, weight, c.norm_eps));
        }
        let pairs = c.ropes[c.layers[0].rope].pairs;
        vector::rope(q, c.head_dim, &self.angles, pairs);
        vector::rope(k, c.head_dim, &self.angles, pairs);
    }

    /// Adds what half a layer gives to the residual stream.
    fn add(&mut self) {
        let (width, eps) = (self.config.width, self.config.norm_eps);
        let [residual, delta, weight] = &mut self.wide;
        if self.config.family == Family::Gemma3 {
            let delta = &mut delta[..width];
            self.kernels.rms_norm_in_place(delta, &weight[..width], eps);
        }
        vector::add_assign(&mut residual[..width], &delta[..width]);
    }

    /// The products of all layers for `rows` rows, and nothing else.
    fn products(&mut self, weights: &Weights, rows: usize) {
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
        for layer in &weights.layers {
            self.four_jobs(layer, rows);
        }
    }

    fn four_jobs(&mut self, layer: &Layer, rows: usize) {
        let [a, b, c] = &mut self.wide;
        let [q, k, v] = &layer.qkv;
        let three = [(q, &mut a[..]), (k, &mut b[..]), (v, &mut c[..])];
        product_rows(self.kernels, &self.normed, three, rows);
        product_rows(
            self.kernels,
            &self.attended,
            [(&layer.output, &mut a[..])],
            rows,
        );
        let [gate, up] = &layer.gate_up;
        product_rows(
            self.kernels,
            &self.normed,
            [(gate, &mut a[..]), (up, &mut b[..])],
            rows,
        );
        product_rows(
            self.kernels,
            &self.hidden,
            [(&layer.down, &mut a[..])],
            rows,
        );
    }

    /// One row through all layers, with `positions` keys to attend to.
    fn layers(&mut self, weights: &Weights, positions: usize) {
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(1);
        }
        for wide in &mut self.wide {
            let row = wide.len() / PROMPT_ROWS;
            wide[..row].fill(0.5); // sums of sums would grow
        }
        self.angles.clear();
        let rope = &self.config.ropes[self.config.layers[0].rope];
        rope.angles(positions - 1..positions, &mut self.angles);
        for layer in &weights.layers {
            self.norm();
            self.turn();
            self.attend(positions);
            self.add();
            self.norm();
            self.activate();
            self.add();
            self.four_jobs(layer, 1);
        }
    }

    fn activate(&mut self) {
        let (kernels, n) = (self.kernels, self.config.ffn);
        let [gate, up, _] = &self.wide;
        let (gate, up) = (&gate[..n], &up[..n]);
        let activation = self.config.activation;
        kernels.fill_rows(&mut self.hidden, |_, row| match activation {
            Activation::Silu => kernels.silu_mul(gate, up, row),
            Activation::GeluTanh => kernels.gelu_mul(gate, up, row),
        });
    }

    /// Writes a key and attends to `positions` of them.
    fn attend(&mut self, positions: usize) {
        let c = &self.config;
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let last = positions - 1;
        let pages: Vec<u32> = (0..positions.div_ceil(PAGE) as u32).collect();
        let [a, b, out] = &mut self.wide;
        self.cache
            .write(0, (last / PAGE) as u32, last % PAGE, &a[..kv], &b[..kv]);
        let sequence = AttentionRows {
            rows: 1,
            position: last,
            pages: &pages,
        };
        let step = Attention {
            cache: &self.cache,
            layer: 0,
            heads: c.heads,
            group: c.heads / c.kv_heads,
            skipped: 0,
            window: None,
            queries: &a[..q],
            sequences: &[sequence],
        };
        self.kernels
            .attention(&step, &mut self.scratch, &mut out[..q]);
        self.kernels
            .fill_rows(&mut self.attended, |_, row| row.copy_from_slice(&out[..q]));
    }
}

fn product<'a, const N: usize>(
    kernels: &Kernels,
    x: &'a Activations,
    list: [(&'a Packed, &'a mut [f32]); N],
) {
    kernels.products(
        x,
        list.map(|(weights, out)| Product {
            weights,
            first_col: 0,
            out,
        }),
    );
}

fn product_rows<'a, const N: usize>(
    kernels: &Kernels,
    x: &'a Activations,
    list: [(&'a Packed, &'a mut [f32]); N],
    rows: usize,
) {
    let cut = list.map(|(weights, out)| (weights, &mut out[..rows * weights.rows()]));
    product(kernels, x, cut);
}

/// Measures exchanges of `width` numbers between two ranks on this machine, joined by `backend`.
///
/// # Errors
/// What the system refuses.
pub(super) fn wire(width: usize, backend: Backend) -> anyhow::Result<Wire> {
    let listeners = [listener()?, listener()?];
    let addrs = listeners.each_ref().map(tcp::Listener::addr);
    let id = GroupId::random();
    let run = |listener, rank| -> anyhow::Result<[f64; 2]> {
        let until = Instant::now() + Duration::from_secs(10);
        let (config, until) = (tcp::Config::default(), Deadline::at(until));
        let (rank, strict) = (Rank(rank), Strict::Yes);
        let seat = Seat {
            listener,
            rank,
            addrs: &addrs,
            id,
            config,
        };
        let group = init(backend, strict, seat, &Wires::default(), until)?;
        Ok([
            exchange(&*group, width, (BLOCKS, 200))?,
            exchange(&*group, 1 << 18, (LARGE_BLOCKS, 5))?,
        ])
    };
    let [first, second] = listeners;
    let [small, large] = thread::scope(|scope| {
        let other = scope.spawn(|| run(second, 1));
        let own = run(first, 0);
        other
            .join()
            .ok()
            .context("a rank of the probe ended early")??;
        own
    })?;
    Ok(Wire {
        exchange: small,
        bytes_per_s: 4.0 * f64::from(1 << 18) / (large - small).max(1e-6),
    })
}

fn listener() -> std::io::Result<tcp::Listener> {
    tcp::Listener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

/// Seconds of one all-gather of `n` numbers of each of two ranks: the fastest of some blocks of so
/// many each, since waiting for the other rank is no part of it.
fn exchange(group: &dyn Group, n: usize, (blocks, times): (usize, usize)) -> anyhow::Result<f64> {
    let (own, mut all) = (vec![1.0f32; n], vec![0.0f32; 2 * n]);
    let mut best = f64::INFINITY;
    for _ in 0..blocks {
        let start = Instant::now();
        for _ in 0..times {
            let until = Deadline::at(Instant::now() + Duration::from_secs(10));
            group.all_gather(&own, &mut all, until)?;
        }
        best = best.min(start.elapsed().as_secs_f64() / times as f64);
    }
    Ok(best)
}
