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
use paceline_formats::tensor::Tensor;
use paceline_model::{Config, Part, Role, Source};
use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, Kernels, KvCache, KvShape, KvType,
    PAGE, PackOptions, Packed, Precision, Product, StoredMatrix,
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

/// Blocks of exchanges.
const BLOCKS: usize = 7;

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
    /// The output head for one row.
    pub(super) head: f64,
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
    let layers = layers(source, config, class, kernels)?;
    let mut step = Step::new(config, class, kernels)?;
    let per_layer = |seconds: f64| seconds / layers.len() as f64;
    let all = typical(|| step.products(&layers, 1));
    let products = per_layer(all);
    let rows = prompt_rows(all);
    let prompt = per_layer(typical(|| step.products(&layers, rows)));
    let [near, far] = POSITIONS.map(|n| per_layer(typical(|| step.layers(&layers, n))));
    let key = (far - near).max(0.0) / (POSITIONS[1] - POSITIONS[0]) as f64;
    Ok(Measured {
        products,
        other: (near - products - key * POSITIONS[0] as f64).max(0.0),
        key,
        head: head(source, config, class, kernels, &mut step)?,
        prompt_row: prompt / rows as f64,
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
    let layers = layers(source, config, class, kernels)?;
    let mut step = Step::new(config, class, kernels)?;
    Ok(typical(|| step.products(&layers, 1)) / layers.len() as f64)
}

/// Rows that stand for a prompt where one takes `seconds`: fewer on a slow machine.
fn prompt_rows(seconds: f64) -> usize {
    let rows = ENOUGH.as_secs_f64() / seconds.max(1e-9);
    (rows as usize).clamp(1, PROMPT_ROWS)
}

/// Seconds of `f`: the median of as many passes as [`ENOUGH`] allows, after one to warm up.
fn typical(mut f: impl FnMut()) -> f64 {
    let began = Instant::now();
    let mut timed = || {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    let (first, mut passes) = (timed(), Vec::new());
    while passes.len() < PASSES && began.elapsed() < ENOUGH {
        passes.push(timed());
    }
    passes.sort_by(f64::total_cmp);
    passes.get(passes.len() / 2).copied().unwrap_or(first)
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

/// Seconds of the head for one row, from as many of its rows as [`PROBED_BYTES`] allows.
fn head(
    source: &Source,
    config: &Config,
    class: KernelClass,
    kernels: &Kernels,
    step: &mut Step<'_>,
) -> anyhow::Result<f64> {
    let own = source.opt_weight(config.family, Role::Output)?;
    let tensor = match own {
        Some(tensor) => tensor,
        None => source.weight(config.family, Role::TokenEmbedding)?,
    };
    let row = (tensor.bytes.len() / tensor.rows().max(1)).max(1);
    let rows = tensor.rows().min((PROBED_BYTES as usize / row).max(16));
    let packed = pack(&tensor, class, rows, kernels)?;
    let mut out = vec![0.0; packed.rows()];
    let seconds = typical(|| {
        step.normed.resize(1);
        kernels.fill_rows(&mut step.normed, |_, row| row.fill(0.5));
        product(kernels, &step.normed, [(&packed, &mut out[..])]);
    });
    Ok(seconds * tensor.rows() as f64 / rows as f64)
}

/// Buffers of a step.
struct Step<'k> {
    kernels: &'k Kernels,
    config: Config,
    normed: Activations,
    attended: Activations,
    hidden: Activations,
    wide: [Vec<f32>; 3],
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
            cache: KvCache::new(shape, POSITIONS[1].div_ceil(PAGE))?,
            scratch: kernels.attention_scratch(1, config.heads, config.head_dim, POSITIONS[1]),
        })
    }

    /// The products of all layers for `rows` rows, and nothing else.
    fn products(&mut self, layers: &[Layer], rows: usize) {
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
        for layer in layers {
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
    fn layers(&mut self, layers: &[Layer], positions: usize) {
        let (eps, kernels) = (self.config.norm_eps, self.kernels);
        let weight = vec![1.0; self.config.width];
        let residual = vec![0.25; self.config.width];
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(1);
        }
        for layer in layers {
            let norm = |x: &mut Activations| {
                kernels.fill_rows(x, |_, row| kernels.rms_norm(&residual, &weight, eps, row));
            };
            norm(&mut self.normed);
            self.attend(positions);
            norm(&mut self.normed);
            let [gate, up, _] = &self.wide;
            let n = self.config.ffn;
            kernels.fill_rows(&mut self.hidden, |_, row| {
                kernels.silu_mul(&gate[..n], &up[..n], row);
            });
            self.four_jobs(layer, 1);
        }
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
            exchange(&*group, width, 200)?,
            exchange(&*group, 1 << 18, 5)?,
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

/// Seconds of one all-gather of `n` numbers of each of two ranks: the fastest of some blocks, since
/// waiting for the other rank is no part of it.
fn exchange(group: &dyn Group, n: usize, times: usize) -> anyhow::Result<f64> {
    let (own, mut all) = (vec![1.0f32; n], vec![0.0f32; 2 * n]);
    let mut best = f64::INFINITY;
    for _ in 0..BLOCKS {
        let start = Instant::now();
        for _ in 0..times {
            let until = Deadline::at(Instant::now() + Duration::from_secs(10));
            group.all_gather(&own, &mut all, until)?;
        }
        best = best.min(start.elapsed().as_secs_f64() / times as f64);
    }
    Ok(best)
}
