//! Measures the cost of a token for a rank on this machine. It covers the products of some of a
//! model's own layers, the operations around them, attention and the output head.
//!
//! A probe takes a few tenths of a second. It runs the kernels that a step runs, in its order,
//! on weights of the file; it does not run the model.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank};
use paceline_engine::SamplingParams;
use paceline_model::{Activation, Config, LayerCache, LayerShape, LeafCut, Shard, Split};
use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, Kernels, KvCache, KvShape, KvType,
    LayerStore, MAX_PRODUCTS, PAGE, Packed, Precision, Product, vector,
};
use serde::{Deserialize, Serialize};

use super::layers::{Expert, Half, Job, Layer, Weights};
use super::{Result, Setting};
use crate::Error;

/// Rows of the step that stands for prefill.
const PROMPT_ROWS: usize = 64;

/// Rows of the step that stands for several answers together: the fewest that kernels for many rows
/// take at once.
const FEW_ROWS: usize = 8;

/// Positions of the two attention probes; their difference is the price of a key. So many keys of
/// all probed layers are more than the last cache holds (SmolLM2 47 MB, Gemma 3 270M 37 MB). The
/// keys of a long answer are more too: hot in cache a key of SmolLM2 took half as long as it does
/// at 7,900.
const POSITIONS: [usize; 2] = [64, 2048];

/// Most passes of each measurement, of which the mean counts. Programs that run beside this now
/// will run beside the model too, and take as large a part of its time.
pub(super) const PASSES: usize = 64;

/// A measurement ends after the pass in which this time is over. The portable kernels are a hundred
/// times slower than others, and their users wait for an answer too.
pub(super) const ENOUGH: Duration = Duration::from_millis(200);

/// Measured times in seconds, for one kernel class and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// A layer's products for one row.
    pub(super) products: f64,
    /// The rest of a layer's cost for one row, without its keys.
    pub(super) other: f64,
    /// A key in one layer that attends.
    pub(super) key: f64,
    /// The output head's product for one row.
    pub(super) head: f64,
    /// The rest of a step: the last norm, the token chosen from the logits.
    pub(super) step: f64,
    /// A layer's products but for experts', for each of [`FEW_ROWS`] rows together.
    pub(super) few_row: f64,
    /// The same for a row of a prompt.
    pub(super) prompt_row: f64,
    /// The experts' part of a layer's products for one row; 0 without experts.
    pub(super) experts: f64,
    /// The experts of a row in a layer, where each has [`FEW_ROWS`] rows.
    pub(super) few_expert: f64,
    /// The same with as many rows as stand for a prompt.
    pub(super) prompt_expert: f64,
}

impl Measured {
    /// A layer's products but for experts', for each of `rows` together, 1 or more.
    pub(super) fn row_of(self, rows: f64) -> f64 {
        let one = (self.products - self.experts).max(0.0);
        between([one, self.few_row, self.prompt_row], rows)
    }

    /// The experts of a row in a layer, where each has `rows` rows, 1 or more.
    pub(super) fn experts_of(self, rows: f64) -> f64 {
        between([self.experts, self.few_expert, self.prompt_expert], rows)
    }

    /// Of two measurements.
    fn mean(self, other: Self) -> Self {
        Self {
            products: f64::midpoint(self.products, other.products),
            other: f64::midpoint(self.other, other.other),
            key: f64::midpoint(self.key, other.key),
            head: f64::midpoint(self.head, other.head),
            step: f64::midpoint(self.step, other.step),
            few_row: f64::midpoint(self.few_row, other.few_row),
            prompt_row: f64::midpoint(self.prompt_row, other.prompt_row),
            experts: f64::midpoint(self.experts, other.experts),
            few_expert: f64::midpoint(self.few_expert, other.few_expert),
            prompt_expert: f64::midpoint(self.prompt_expert, other.prompt_expert),
        }
    }
}

/// Seconds for each of `rows` rows, from the times of one, of each of [`FEW_ROWS`] and of a prompt.
/// The time of all rows is in proportion between measured numbers of rows, and as in a prompt
/// beyond.
fn between([one, few, many]: [f64; 3], rows: f64) -> f64 {
    let (few_rows, many_rows) = (FEW_ROWS as f64, PROMPT_ROWS as f64);
    let (few, prompt) = ((few_rows, few_rows * few), (many_rows, many_rows * many));
    let line = |from: (f64, f64), to: (f64, f64)| {
        from.1 + (to.1 - from.1) * (rows - from.0) / (to.0 - from.0)
    };
    let all = match rows {
        _ if rows <= few_rows => line((1.0, one), few),
        _ if rows <= many_rows => line(few, prompt),
        _ => rows * many,
    };
    all / rows
}

/// A model's weights, as many as are probed, ready to be measured again and again.
pub(super) struct Probe<'a> {
    config: &'a Config,
    class: KernelClass,
    kernels: Arc<Kernels>,
    weights: Weights,
}

/// All of a model.
fn whole(config: &Config) -> Shard {
    Split::whole(config).shard(config, Rank(0))
}

impl<'a> Probe<'a> {
    /// # Errors
    /// What is wrong with the file; what memory could not be had.
    pub(super) fn new(setting: Setting<'a>, kernels: Arc<Kernels>) -> Result<Self> {
        Ok(Self {
            config: setting.config,
            class: setting.class,
            weights: Weights::pack(setting, &kernels, &whole(setting.config))?,
            kernels,
        })
    }

    /// Measures now.
    ///
    /// # Errors
    /// What memory could not be had.
    pub(super) fn measure(&self) -> Result<Measured> {
        let decode = self.decode()?;
        let layers = &self.weights.layers;
        let mut step = Step::new(self.config, self.class, &self.kernels, &self.weights, 1)?;
        let rows = prompt_rows(decode.products * layers.len() as f64);
        let both = [rows.min(FEW_ROWS), rows];
        let [few, few_experts, many, many_experts] = typical(|| {
            let [few, many] = both.map(|rows| {
                let took = step.products(layers, rows, |_, _| {});
                [took.common, took.experts].map(|seconds| seconds / rows as f64)
            });
            [few[0], few[1], many[0], many[1]]
        });
        Ok(Measured {
            // Rows together cost no more than one after the other, but in a disturbed pass.
            few_row: few.min(decode.few_row),
            prompt_row: many,
            few_expert: few_experts.min(decode.experts),
            prompt_expert: many_experts,
            ..decode
        })
    }

    /// Measures the times of decoding, and takes rows together to be no cheaper. Half of it runs in
    /// a thread of its own, as a model has one. Threads stay where they are, and the host does not
    /// lend all cores alike (one thread 25 % below another for a minute was seen).
    ///
    /// # Errors
    /// What memory could not be had.
    pub(super) fn decode(&self) -> Result<Measured> {
        let here = self.decode_here()?;
        let there = thread::scope(|scope| scope.spawn(|| self.decode_here()).join());
        let there = there.ok().ok_or(Error::Ended {
            what: "the probe's thread",
        })??;
        Ok(here.mean(there))
    }

    fn decode_here(&self) -> Result<Measured> {
        let weights = &self.weights;
        let kept = weights.layers.iter().filter(|layer| layer.attends).count();
        let mut step = Step::new(self.config, self.class, &self.kernels, weights, kept)?;
        // In turns, so that differences are not those of the machine's own pace.
        let [common, experts, head, near, far, last] = typical(|| {
            let took = step.products(&weights.layers, 1, |_, _| {});
            let head = timed(|| step.head(weights));
            let near = step.layers(weights, POSITIONS[0]);
            step.head(weights);
            let far = step.layers(weights, POSITIONS[1]);
            step.head(weights);
            let last = timed(|| step.last());
            [took.common, took.experts, head, near, far, last]
        });
        let products = common + experts;
        let key = (far - near).max(0.0) / (POSITIONS[1] - POSITIONS[0]) as f64;
        let attending = mean_of(&weights.layers, |layer| f64::from(u8::from(layer.attends)));
        Ok(Measured {
            products,
            other: (near - products - key * POSITIONS[0] as f64).max(0.0),
            key: key / attending,
            head: head * weights.head_share,
            step: last,
            few_row: common,
            prompt_row: common,
            experts,
            few_expert: experts,
            prompt_expert: experts,
        })
    }
}

/// Rows that stand for a prompt where one takes `seconds`: fewer on a slow machine.
fn prompt_rows(seconds: f64) -> usize {
    let rows = ENOUGH.as_secs_f64() / seconds.max(1e-9);
    (rows as usize).clamp(1, PROMPT_ROWS)
}

/// The mean over the layers that `layers` stand for.
pub(super) fn mean_of(layers: &[Layer], mut of: impl FnMut(&Layer) -> f64) -> f64 {
    let (mut sum, mut all) = (0.0, 0.0);
    for layer in layers {
        sum += layer.weight * of(layer);
        all += layer.weight;
    }
    sum / f64::max(all, 1.0)
}

/// Of what is not empty.
pub(super) fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len() as f64;
    values.sum::<f64>() / n
}

pub(super) fn timed(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// The mean of each figure that `f` measures, over as many passes as [`ENOUGH`] allows, after one
/// to warm up.
fn typical<const N: usize>(mut f: impl FnMut() -> [f64; N]) -> [f64; N] {
    let began = Instant::now();
    let (first, mut passes) = (f(), Vec::new());
    while passes.len() < PASSES && began.elapsed() < ENOUGH {
        passes.push(f());
    }
    if passes.is_empty() {
        return first;
    }
    std::array::from_fn(|i| mean(passes.iter().map(|pass| pass[i])))
}

/// Seconds of a layer's products, by one row or several together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Took {
    /// Without experts, with what came between.
    pub(super) common: f64,
    /// Of as many experts as a rank has of a row's on average.
    pub(super) experts: f64,
}

impl Took {
    pub(super) fn all(self) -> f64 {
        self.common + self.experts
    }
}

/// The input of products of a width.
struct Input {
    /// Columns, and those of a leaf.
    of: (usize, usize),
    x: Activations,
}

/// Buffers of a rank's step.
pub(super) struct Step<'k> {
    kernels: &'k Kernels,
    config: Config,
    /// The layer whose attention is measured.
    attention: LayerShape,
    /// The residual's first.
    inputs: Vec<Input>,
    /// Output of products.
    room: Vec<f32>,
    /// A row each, of the widest input.
    wide: [Vec<f32>; 3],
    /// Room for a sum over ranks.
    sum: Vec<f32>,
    logits: Vec<f32>,
    angles: Vec<(f32, f32)>,
    cache: KvCache,
    scratch: AttentionScratch,
}

impl<'k> Step<'k> {
    /// For the layers of `weights`, with keys and values of `kept` layers.
    pub(super) fn new(
        config: &Config,
        class: KernelClass,
        kernels: &'k Kernels,
        weights: &Weights,
        kept: usize,
    ) -> Result<Self> {
        let attention = attending(config)?;
        let store = KvShape {
            heads: attention.kv_heads,
            head_dim: attention.head_dim,
            value_dim: attention.value_dim,
            kv_type: KvType::of(class),
        };
        let store = match attention.latent {
            Some(_) => LayerStore::Latent(store),
            None => LayerStore::Rows(store),
        };
        let inputs = inputs(config, class, &weights.layers);
        let widest = inputs.iter().map(|input| input.of.0).max().unwrap_or(0);
        let queries = attention.heads * attention.head_dim.max(attention.value_dim);
        let widest = widest.max(queries).max(config.ffn);
        let halves = || {
            let layers = weights.layers.iter();
            layers.flat_map(|layer| [&layer.attention, &layer.feed_forward])
        };
        let roots = halves().map(|half| half.cut.all_roots()).max();
        let rows = PROMPT_ROWS;
        let pages = POSITIONS[1].div_ceil(PAGE);
        let mut step = Self {
            kernels,
            config: config.clone(),
            inputs,
            room: vec![0.5; rows * outputs(&weights.layers)],
            wide: std::array::from_fn(|_| vec![0.5; widest]),
            sum: vec![0.5; roots.unwrap_or(0) * rows * config.width],
            logits: vec![0.5; config.vocab],
            angles: Vec::new(),
            cache: KvCache::new(&vec![(0, store); kept], &[pages])?,
            scratch: kernels.attention_scratch(
                1,
                attention.heads,
                attention.value_dim,
                POSITIONS[1],
            ),
            attention,
        };
        for layer in 0..kept {
            (0..POSITIONS[1]).for_each(|position| step.keep(layer, position));
        }
        Ok(step)
    }

    /// Writes a key and a value: memory that nobody wrote to is all one page of zeros.
    fn keep(&mut self, layer: usize, position: usize) {
        let (page, of) = (position / PAGE, &self.attention);
        // Values of latent attention are part of its keys.
        let value_dim = if of.latent.is_some() { 0 } else { of.value_dim };
        let (k, v) = (of.kv_heads * of.head_dim, of.kv_heads * value_dim);
        let [a, b, _] = &self.wide;
        self.cache
            .write(layer, page as u32, position % PAGE, &a[..k], &b[..v]);
    }

    pub(super) fn head(&mut self, weights: &Weights) {
        let out = &mut self.logits[..weights.head.rows()];
        let product = alone(&weights.head, out);
        self.kernels.products(&self.inputs[0].x, [product]);
    }

    /// So many of the logits that [`head`](Self::head) left, at most as many as there are rows.
    pub(super) fn logits(&mut self, n: usize) -> &mut [f32] {
        &mut self.logits[..n]
    }

    /// Runs the operations before the head and after it.
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
        kernels.fill_rows(&mut self.inputs[0].x, |_, row| {
            kernels.rms_norm(&residual[..width], &weight[..width], eps, row);
        });
    }

    /// Norms over heads and after halves, where the family has them, and rotations.
    fn turn(&mut self) {
        let (c, of) = (&self.config, &self.attention);
        let [q, k, out] = &mut self.wide;
        let (q, k) = (
            &mut q[..of.heads * of.head_dim],
            &mut k[..of.kv_heads * of.head_dim],
        );
        let heads = q
            .chunks_exact_mut(of.head_dim)
            .chain(k.chunks_exact_mut(of.head_dim));
        if c.family.norms_heads() {
            let weight = &out[..of.head_dim];
            heads.for_each(|head| self.kernels.rms_norm_in_place(head, weight, c.norm_eps));
        }
        let pairs = c.ropes[of.rope].pairs;
        self.kernels.rope(q, of.head_dim, &self.angles, pairs);
        self.kernels.rope(k, of.head_dim, &self.angles, pairs);
    }

    /// Adds what half a layer gives to the residual stream.
    fn add(&mut self) {
        let (width, eps) = (self.config.width, self.config.norm_eps);
        let [residual, delta, weight] = &mut self.wide;
        if self.config.family.norms_after_halves() {
            let delta = &mut delta[..width];
            self.kernels.rms_norm_in_place(delta, &weight[..width], eps);
        }
        vector::add_assign(&mut residual[..width], &delta[..width]);
    }

    /// Prepares for `rows` rows.
    fn resize(&mut self, rows: usize) {
        for Input { x, .. } in &mut self.inputs {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
    }

    /// Computes the products of `layers` for `rows` rows, and those of experts. Calls `between`
    /// after each half of a layer with the room of its sum, in which this rank's roots are. Every
    /// expert has all rows. Returns the seconds of a mean layer.
    pub(super) fn products(
        &mut self,
        layers: &[Layer],
        rows: usize,
        mut between: impl FnMut(&LeafCut, &mut [f32]),
    ) -> Took {
        self.resize(rows);
        let mut experts = 0.0;
        let mut all = 0.0;
        let common = mean_of(layers, |layer| {
            let took = self.layer(layer, rows, &mut between);
            experts += layer.weight * took.experts;
            all += layer.weight;
            took.common
        });
        Took {
            common,
            experts: experts / f64::max(all, 1.0),
        }
    }

    fn layer(
        &mut self,
        layer: &Layer,
        rows: usize,
        between: &mut impl FnMut(&LeafCut, &mut [f32]),
    ) -> Took {
        let began = Instant::now();
        self.half(&layer.attention, rows, between);
        let halfway = began.elapsed().as_secs_f64();
        let experts = timed(|| {
            for expert in &layer.experts {
                self.expert(expert, rows);
            }
        });
        let rest = timed(|| self.half(&layer.feed_forward, rows, between));
        Took {
            common: halfway + rest,
            experts: experts * layer.even,
        }
    }

    fn half(&mut self, half: &Half, rows: usize, between: &mut impl FnMut(&LeafCut, &mut [f32])) {
        for job in &half.jobs {
            let x = &self.inputs[place(&self.inputs, job.input)].x;
            multiply(self.kernels, x, &job.matrices, &mut self.room);
        }
        let n = rows * self.config.width;
        let sum = &mut self.sum[..half.cut.all_roots() * n];
        let first = half.cut.roots_before() * n;
        let own = &mut sum[first..first + half.roots * n];
        if half.sum.matrices.is_empty() {
            own.fill(0.5); // sums of sums would grow
        } else {
            let x = &self.inputs[place(&self.inputs, half.sum.input)].x;
            multiply(self.kernels, x, &half.sum.matrices, own);
        }
        between(&half.cut, sum);
    }

    /// An expert on `rows` rows, as the model computes it.
    fn expert(&mut self, [gate, up, down]: &Expert, rows: usize) {
        let (kernels, activation) = (self.kernels, self.config.activation);
        let n = rows * gate.rows();
        let (wide, out) = self.room.split_at_mut(n + rows * up.rows());
        let (gates, ups) = wide.split_at_mut(n);
        let x = place(&self.inputs, (gate.cols(), 0));
        let both = [alone(gate, &mut *gates), alone(up, &mut *ups)];
        kernels.products(&self.inputs[x].x, both);
        let at = place(&self.inputs, (down.cols(), 0));
        let ffn = down.cols();
        kernels.fill_rows(&mut self.inputs[at].x, |i, row| {
            let own = i * ffn..(i + 1) * ffn;
            match activation {
                Activation::Silu => kernels.silu_mul(&gates[own.clone()], &ups[own], row),
                Activation::GeluTanh => kernels.gelu_mul(&gates[own.clone()], &ups[own], row),
            }
        });
        let out = alone(down, &mut out[..rows * down.rows()]);
        kernels.products(&self.inputs[at].x, [out]);
    }

    /// Seconds of a mean layer for one row, with `positions` keys to attend to.
    fn layers(&mut self, weights: &Weights, positions: usize) -> f64 {
        self.resize(1);
        for wide in &mut self.wide {
            wide.fill(0.5); // sums of sums would grow
        }
        self.angles.clear();
        let rope = &self.config.ropes[self.attention.rope];
        rope.angles(positions - 1..positions, &mut self.angles);
        let mut kept = 0;
        mean_of(&weights.layers, |layer| {
            timed(|| {
                self.norm();
                if layer.attends {
                    self.turn();
                    self.attend((kept, layer), positions);
                    kept += 1;
                }
                self.add();
                self.norm();
                if layer.experts.is_empty() {
                    self.activate(layer);
                }
                self.add();
                self.layer(layer, 1, &mut |_, _| {});
            })
        })
    }

    fn activate(&mut self, layer: &Layer) {
        let at = place(&self.inputs, layer.feed_forward.sum.input);
        let (kernels, input) = (self.kernels, &mut self.inputs[at]);
        let n = input.of.0;
        let [gate, up, _] = &self.wide;
        let (gate, up) = (&gate[..n], &up[..n]);
        let activation = self.config.activation;
        kernels.fill_rows(&mut input.x, |_, row| match activation {
            Activation::Silu => kernels.silu_mul(gate, up, row),
            Activation::GeluTanh => kernels.gelu_mul(gate, up, row),
        });
    }

    /// Writes a key and attends to `positions` of them.
    fn attend(&mut self, (kept, layer): (usize, &Layer), positions: usize) {
        let last = positions - 1;
        self.keep(kept, last);
        let of = &self.attention;
        let (q, read) = (of.heads * of.head_dim, of.heads * of.value_dim);
        let pages: Vec<u32> = (0..positions.div_ceil(PAGE) as u32).collect();
        let [a, _, out] = &mut self.wide;
        let sequence = AttentionRows {
            rows: 1,
            position: last,
            pages: &pages,
            first_page: 0,
        };
        let step = Attention {
            cache: &self.cache,
            layer: kept,
            heads: of.heads,
            group: of.heads / of.kv_heads,
            skipped: 0,
            window: None,
            sinks: None,
            queries: &a[..q],
            sequences: &[sequence],
        };
        self.kernels
            .attention(&step, &mut self.scratch, &mut out[..read]);
        let at = place(&self.inputs, layer.attention.sum.input);
        self.kernels.fill_rows(&mut self.inputs[at].x, |_, row| {
            row.copy_from_slice(&out[..row.len()]);
        });
    }
}

/// The first layer that keeps keys and values: others are taken to attend as it does.
fn attending(config: &Config) -> Result<LayerShape> {
    let keeps = |layer: &&LayerShape| matches!(layer.cache, LayerCache::Rows);
    let found = config.layers.iter().find(keeps).copied();
    found.ok_or(Error::NotMeasured {
        what: "no layer keeps keys and values",
    })
}

/// An input for each width that products of `layers` read, and for the residual.
fn inputs(config: &Config, class: KernelClass, layers: &[Layer]) -> Vec<Input> {
    let precision = (class != KernelClass::CpuF32).then_some(Precision::of(class));
    let jobs = layers.iter().flat_map(Layer::jobs).map(|job| job.input);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let experts = experts.flat_map(|[gate, _, down]| [(gate.cols(), 0), (down.cols(), 0)]);
    let mut inputs: Vec<Input> = Vec::new();
    for of in std::iter::once((config.width, 0))
        .chain(jobs)
        .chain(experts)
    {
        if inputs.iter().all(|input| input.of != of) {
            // Widths that are no whole runs of 32 have float weights, which read no integers.
            let precision = precision.filter(|_| of.0.is_multiple_of(32));
            let x = Activations::new(PROMPT_ROWS, of.0, of.1, precision);
            inputs.push(Input { of, x });
        }
    }
    inputs
}

/// The place of the input of so many columns and columns of a leaf.
fn place(inputs: &[Input], of: (usize, usize)) -> usize {
    let found = inputs.iter().position(|input| input.of == of);
    found.expect("an input for each job was made")
}

/// The most numbers that a row of an input gives in any job or expert.
fn outputs(layers: &[Layer]) -> usize {
    let jobs = layers.iter().flat_map(Layer::jobs).map(Job::outputs);
    let experts = layers.iter().flat_map(|layer| &layer.experts);
    let experts = experts.map(|expert| expert.iter().map(Packed::rows).sum());
    jobs.chain(experts).max().unwrap_or(0)
}

/// A product with all columns of an input.
fn alone<'a>(weights: &'a Packed, out: &'a mut [f32]) -> Product<'a> {
    Product {
        weights,
        first_col: 0,
        out,
    }
}

/// x by all of `matrices`, one behind the other in `room`.
fn multiply(
    kernels: &Kernels,
    x: &Activations,
    matrices: &[(usize, Packed)],
    mut room: &mut [f32],
) {
    for some in matrices.chunks(MAX_PRODUCTS) {
        let mut products = Vec::with_capacity(some.len());
        for (first_col, weights) in some {
            let (out, rest) = room.split_at_mut(x.rows() * weights.rows());
            room = rest;
            products.push(Product {
                weights,
                first_col: *first_col,
                out,
            });
        }
        kernels.products(x, products);
    }
}
