//! Measures what a token costs one rank on this machine: the products of some of a model's own
//! layers, the operations around them, attention and the output head.
//!
//! A probe takes a few tenths of a second. It runs the kernels that a step runs, in its order,
//! on weights of the file; it does not run the model.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::{KernelClass, Rank};
use paceline_engine::SamplingParams;
use paceline_model::{Activation, Config, LeafCut, Part, Role, Shard, Split};
use paceline_tensor::{
    Activations, Attention, AttentionRows, AttentionScratch, Kernels, KvCache, KvShape, KvType,
    PAGE, PackOptions, Packed, Precision, Product, StoredMatrix, vector,
};
use serde::{Deserialize, Serialize};

use super::{Result, Setting};
use crate::Error;

/// Bytes of weights that are packed for a probe, or all of a smaller model: several times the last
/// cache of the machines at hand (32 MiB), so that they come from where the model's would.
const PROBED_BYTES: u64 = 160 << 20;

/// Rows of the step that stands for prefill.
const PROMPT_ROWS: usize = 64;

/// Rows of the step that stands for several answers together: the fewest that kernels for many rows
/// take at once.
const FEW_ROWS: usize = 8;

/// Positions of the two attention probes; their difference is the price of a key. So many keys of
/// all probed layers are more than the last cache holds (SmolLM2 47 MB, Gemma 3 270M 37 MB), as
/// those of a long answer are: hot in cache a key of SmolLM2 took half as long as it does at 7,900.
const POSITIONS: [usize; 2] = [64, 2048];

/// Most passes of each measurement, of which the mean counts: what runs beside this now will run
/// beside the model too, and take as large a part of its time.
pub(super) const PASSES: usize = 64;

/// A measurement ends after the pass in which this time is over: the portable kernels are a hundred
/// times slower than others, and whoever uses them waits for an answer too.
pub(super) const ENOUGH: Duration = Duration::from_millis(200);

/// What was measured, in seconds; for one kernel class and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
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
    /// A layer's products for each of [`FEW_ROWS`] rows together.
    pub(super) few_row: f64,
    /// A layer's products for a row of a prompt.
    pub(super) prompt_row: f64,
}

impl Measured {
    /// A layer's products for each of `rows` together, 1 or more: in proportion between what was
    /// measured, and as in a prompt beyond.
    pub(super) fn row_of(self, rows: f64) -> f64 {
        let (few, many) = (FEW_ROWS as f64, PROMPT_ROWS as f64);
        let few = (few, few * self.few_row);
        let many = (many, many * self.prompt_row);
        let between = |from: (f64, f64), to: (f64, f64)| {
            from.1 + (to.1 - from.1) * (rows - from.0) / (to.0 - from.0)
        };
        let all = match rows {
            _ if rows <= few.0 => between((1.0, self.products), few),
            _ if rows <= many.0 => between(few, many),
            _ => rows * self.prompt_row,
        };
        all / rows
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
        }
    }
}

/// A rank's part of the matrices of a layer.
pub(super) struct Layer {
    qkv: [Packed; 3],
    output: Roots,
    gate_up: [Packed; 2],
    down: Roots,
}

/// Columns of a matrix whose products are summed over ranks, each root of its leaves apart with the
/// first of its columns among the rank's.
type Roots = Vec<(usize, Packed)>;

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
        let mut step = Step::new(
            self.config,
            self.class,
            &self.kernels,
            &whole(self.config),
            1,
        )?;
        let rows = prompt_rows(decode.products * layers.len() as f64);
        let both = [rows.min(FEW_ROWS), rows];
        let seconds = typical(|| both.map(|rows| timed(|| step.products(layers, rows, |_, _| {}))));
        let row = |i: usize| seconds[i] / (both[i] * layers.len()) as f64;
        Ok(Measured {
            // Rows together cost no more than one after the other, but in a disturbed pass.
            few_row: row(0).min(decode.products),
            prompt_row: row(1),
            ..decode
        })
    }

    /// Measures what decoding takes, and takes rows together to be no cheaper. Half of it in a
    /// thread of its own, as a model has one: threads stay where they are, and the host does not
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
        let layers = weights.layers.len();
        let mut step = Step::new(
            self.config,
            self.class,
            &self.kernels,
            &whole(self.config),
            layers,
        )?;
        // In turns, so that differences are not those of the machine's own pace.
        let [all, head, near, far, last] = typical(|| {
            let all = timed(|| step.products(&weights.layers, 1, |_, _| {}));
            let head = timed(|| step.head(weights));
            let near = timed(|| step.layers(weights, POSITIONS[0]));
            step.head(weights);
            let far = timed(|| step.layers(weights, POSITIONS[1]));
            step.head(weights);
            [all, head, near, far, timed(|| step.last())]
        });
        let [products, near, far] = [all, near, far].map(|all| all / weights.layers.len() as f64);
        let key = (far - near).max(0.0) / (POSITIONS[1] - POSITIONS[0]) as f64;
        Ok(Measured {
            products,
            other: (near - products - key * POSITIONS[0] as f64).max(0.0),
            key,
            head: head * weights.head_share,
            step: last,
            few_row: products,
            prompt_row: products,
        })
    }
}

/// Rows that stand for a prompt where one takes `seconds`: fewer on a slow machine.
fn prompt_rows(seconds: f64) -> usize {
    let rows = ENOUGH.as_secs_f64() / seconds.max(1e-9);
    (rows as usize).clamp(1, PROMPT_ROWS)
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

/// What `f` measures: the mean of each of its figures over as many passes as [`ENOUGH`] allows,
/// after one to warm up.
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

/// What packs a rank's part of a model as the model does.
struct Packing<'a> {
    setting: Setting<'a>,
    kernels: &'a Kernels,
    shard: &'a Shard,
    /// Of the tensors that were read, whole, so that ranks stop together.
    bytes: Cell<u64>,
}

impl Packing<'_> {
    /// What `cut` makes of a tensor. Gives the file's pages back, as the model's loader does: a
    /// probe is to need no more memory than the model.
    fn packed<T>(
        &self,
        role: Role,
        leaf_cols: usize,
        cut: impl FnOnce(StoredMatrix<'_>, PackOptions) -> Result<T, paceline_tensor::Error>,
    ) -> Result<T> {
        let Setting { source, config, .. } = self.setting;
        let tensor = source.weight(config.family, role)?;
        self.bytes.set(self.bytes.get() + tensor.bytes.len() as u64);
        let whole = StoredMatrix {
            block_type: tensor.block_type,
            rows: tensor.rows(),
            cols: tensor.cols(),
            bytes: &tensor.bytes,
        };
        let options = PackOptions {
            as_f32: self.setting.class == KernelClass::CpuF32,
            leaf_cols,
        };
        let packed = cut(whole, options)?;
        tensor.bytes.discard();
        Ok(packed)
    }

    fn rows(&self, role: Role, rows: Range<usize>) -> Result<Packed> {
        self.packed(role, 0, |whole, options| {
            Packed::new(whole.row_range(rows), options, self.kernels.pool())
        })
    }

    fn roots(&self, role: Role, cut: &LeafCut) -> Result<Roots> {
        let first = cut.columns().start;
        self.packed(role, cut.leaf_cols, |whole, options| {
            let root = |columns: Range<usize>| {
                let first_col = columns.start - first;
                let packed = Packed::of_columns(whole, columns, options, self.kernels.pool())?;
                Ok((first_col, packed))
            };
            cut.root_columns().into_iter().map(root).collect()
        })
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        if self.setting.config.latent.is_some() {
            let what = "latent attention is not measured";
            return Err(paceline_model::Error::Layer { layer: index, what }.into());
        }
        let (shard, head_dim) = (self.shard, self.setting.config.head_dim);
        let of = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let role = |part| Role::Layer(index, part);
        let rows = |part, rows| self.rows(role(part), rows);
        Ok(Layer {
            qkv: [
                rows(Part::Query, of(&shard.usual.heads))?,
                rows(Part::Key, of(&shard.usual.kv_heads))?,
                rows(Part::Value, of(&shard.usual.kv_heads))?,
            ],
            output: self.roots(role(Part::AttentionOutput), &shard.usual.attention)?,
            gate_up: [rows(Part::Gate, shard.ffn())?, rows(Part::Up, shard.ffn())?],
            down: self.roots(role(Part::Down), &shard.usual.feed_forward)?,
        })
    }

    /// As many of the shard's layers as [`PROBED_BYTES`] allows for all ranks, at least one.
    fn layers(&self) -> Result<Vec<Layer>> {
        let (mut layers, bytes) = (Vec::new(), PROBED_BYTES / self.shard.stages as u64);
        // Layers of other sizes are taken to cost as much.
        let config = self.setting.config;
        if config.layers.iter().any(|layer| layer.experts.is_some()) {
            let what = "layers with experts are not probed";
            return Err(Error::NotMeasured { what });
        }
        let usual = self.shard.layers.clone();
        for index in usual.filter(|index| config.is_usual(*index)) {
            layers.push(self.layer(index)?);
            if self.bytes.get() >= bytes {
                break;
            }
        }
        if layers.is_empty() {
            let what = "a rank has no layer of the model's usual sizes";
            return Err(Error::NotMeasured { what });
        }
        Ok(layers)
    }
}

/// Weights that are read in turn, as a step reads them: measured alone, a head that fits in the
/// last cache would be faster than it ever is between layers.
pub(super) struct Weights {
    pub(super) layers: Vec<Layer>,
    /// As many of its rows as [`PROBED_BYTES`] allows for all ranks.
    head: Packed,
    /// All rows of the rank over those.
    pub(super) head_share: f64,
}

impl Weights {
    /// Rows of the head that are here.
    pub(super) fn head_rows(&self) -> usize {
        self.head.rows()
    }

    /// The part of a rank.
    pub(super) fn pack(setting: Setting<'_>, kernels: &Kernels, shard: &Shard) -> Result<Self> {
        let Setting { source, config, .. } = setting;
        let (role, tensor) = match source.opt_weight(config.family, Role::Output)? {
            Some(tensor) => (Role::Output, tensor),
            None => {
                let role = Role::TokenEmbedding;
                (role, source.weight(config.family, role)?)
            }
        };
        let row = (tensor.bytes.len() / tensor.rows().max(1)).max(1);
        let (own, ranks) = (shard.vocab(), shard.stage_ranks().len());
        let rows = own.len().min((PROBED_BYTES as usize / ranks / row).max(16));
        let packing = Packing {
            setting,
            kernels,
            shard,
            bytes: Cell::new(0),
        };
        Ok(Self {
            layers: packing.layers()?,
            head: packing.rows(role, own.start..own.start + rows)?,
            head_share: own.len() as f64 / rows.max(1) as f64,
        })
    }
}

/// Buffers of a rank's step, with keys and values of so many layers.
pub(super) struct Step<'k> {
    kernels: &'k Kernels,
    config: Config,
    normed: Activations,
    attended: Activations,
    hidden: Activations,
    wide: [Vec<f32>; 3],
    sums: [Sum; 2],
    logits: Vec<f32>,
    angles: Vec<(f32, f32)>,
    cache: KvCache,
    scratch: AttentionScratch,
}

impl<'k> Step<'k> {
    pub(super) fn new(
        config: &Config,
        class: KernelClass,
        kernels: &'k Kernels,
        shard: &Shard,
        layers: usize,
    ) -> Result<Self> {
        let precision = (class != KernelClass::CpuF32).then_some(Precision::of(class));
        let rows = PROMPT_ROWS;
        let widest = config.ffn.max(config.heads * config.head_dim);
        let widest = widest.max(config.width);
        let shape = KvShape {
            heads: config.kv_heads,
            head_dim: config.head_dim,
            value_dim: config.head_dim,
            kv_type: KvType::of(class),
        };
        // Widths that are no whole runs of 32 have float weights, which read no integers.
        let activations = |cols: usize, leaf_cols: usize| {
            let precision = precision.filter(|_| cols.is_multiple_of(32));
            Activations::new(rows, cols, leaf_cols, precision)
        };
        let mut step = Self {
            kernels,
            config: config.clone(),
            normed: activations(config.width, 0),
            attended: activations(
                shard.usual.attention.columns().len(),
                shard.usual.attention.leaf_cols,
            ),
            hidden: activations(shard.ffn().len(), shard.usual.feed_forward.leaf_cols),
            wide: std::array::from_fn(|_| vec![0.5; rows * widest]),
            sums: [&shard.usual.attention, &shard.usual.feed_forward].map(|cut| Sum {
                first: cut.roots_before(),
                values: vec![0.5; cut.all_roots() * rows * config.width],
            }),
            logits: vec![0.5; config.vocab],
            angles: Vec::new(),
            cache: KvCache::uniform(shape, layers, POSITIONS[1].div_ceil(PAGE))?,
            scratch: kernels.attention_scratch(1, config.heads, config.head_dim, POSITIONS[1]),
        };
        for layer in 0..layers {
            (0..POSITIONS[1]).for_each(|position| step.keep(layer, position));
        }
        Ok(step)
    }

    /// Writes a key and a value: memory that nobody wrote to is all one page of zeros.
    fn keep(&mut self, layer: usize, position: usize) {
        let (page, kv) = (position / PAGE, self.config.kv_heads * self.config.head_dim);
        let [a, b, _] = &self.wide;
        self.cache
            .write(layer, page as u32, position % PAGE, &a[..kv], &b[..kv]);
    }

    pub(super) fn head(&mut self, weights: &Weights) {
        let out = &mut self.logits[..weights.head.rows()];
        product(self.kernels, &self.normed, [(&weights.head, out)]);
    }

    /// So many of the logits that [`head`](Self::head) left, at most as many as there are rows.
    pub(super) fn logits(&mut self, n: usize) -> &mut [f32] {
        &mut self.logits[..n]
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
        if c.family.norms_heads() {
            let weight = &out[..c.head_dim];
            heads.for_each(|head| self.kernels.rms_norm_in_place(head, weight, c.norm_eps));
        }
        let pairs = c.ropes[c.layers[0].rope].pairs;
        self.kernels.rope(q, c.head_dim, &self.angles, pairs);
        self.kernels.rope(k, c.head_dim, &self.angles, pairs);
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

    /// The products of `layers` for `rows` rows, and nothing else but `between`, which comes after
    /// each half of a layer with the number of that half and the room of its sum, in which this
    /// rank's roots are.
    pub(super) fn products(
        &mut self,
        layers: &[Layer],
        rows: usize,
        mut between: impl FnMut(usize, &mut [f32]),
    ) {
        for x in [&mut self.normed, &mut self.attended, &mut self.hidden] {
            x.resize(rows);
            self.kernels.fill_rows(x, |_, row| row.fill(0.5));
        }
        for layer in layers {
            self.four_jobs(layer, rows, &mut between);
        }
    }

    fn four_jobs(
        &mut self,
        layer: &Layer,
        rows: usize,
        between: &mut impl FnMut(usize, &mut [f32]),
    ) {
        let (kernels, [a, b, c]) = (self.kernels, &mut self.wide);
        let (n, [attention, feed_forward]) = (rows * self.config.width, &mut self.sums);
        let [q, k, v] = &layer.qkv;
        let three = [(q, &mut a[..]), (k, &mut b[..]), (v, &mut c[..])];
        product_rows(kernels, &self.normed, three, rows);
        between(0, attention.of(kernels, &self.attended, &layer.output, n));
        let [gate, up] = &layer.gate_up;
        let two = [(gate, &mut a[..]), (up, &mut b[..])];
        product_rows(kernels, &self.normed, two, rows);
        between(1, feed_forward.of(kernels, &self.hidden, &layer.down, n));
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
        for (index, layer) in weights.layers.iter().enumerate() {
            self.norm();
            self.turn();
            self.attend(index, positions);
            self.add();
            self.norm();
            self.activate();
            self.add();
            self.four_jobs(layer, 1, &mut |_, _| {});
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
    fn attend(&mut self, layer: usize, positions: usize) {
        let last = positions - 1;
        self.keep(layer, last);
        let c = &self.config;
        let q = c.heads * c.head_dim;
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
            layer,
            heads: c.heads,
            group: c.heads / c.kv_heads,
            skipped: 0,
            window: None,
            sinks: None,
            queries: &a[..q],
            sequences: &[sequence],
        };
        self.kernels
            .attention(&step, &mut self.scratch, &mut out[..q]);
        self.kernels
            .fill_rows(&mut self.attended, |_, row| row.copy_from_slice(&out[..q]));
    }
}

/// Room for a sum over ranks.
struct Sum {
    /// Roots of the ranks before.
    first: usize,
    values: Vec<f32>,
}

impl Sum {
    /// x (T, in) -> the room for n = T x width values of each root of any rank, with this rank's
    /// `roots` in their place.
    fn of(&mut self, kernels: &Kernels, x: &Activations, roots: &Roots, n: usize) -> &mut [f32] {
        let mine = self.values[self.first * n..].chunks_exact_mut(n);
        let products = mine.zip(roots).map(|(out, (first_col, weights))| Product {
            weights,
            first_col: *first_col,
            out,
        });
        kernels.products(x, products);
        let all = self.values.len() / PROMPT_ROWS;
        let rows = x.rows();
        &mut self.values[..all * rows]
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
