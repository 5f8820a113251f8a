//! Measures the cost of a token on one rank of this machine. It times steps over some of the
//! model's own layers and rows of its head, layer by layer, as the model does.
//!
//! A probe takes a few tenths of a second. [`Model::sample`] packs the part. The kernels' meter
//! counts the time of products; the remaining time of a layer is overhead.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_engine::SamplingParams;
use paceline_model::{
    Batch, BatchSequence, BatchSize, LayerCache, LayerShape, LoadOptions, Logits, Model,
    WindowPages, WindowPool, Workspace, shape,
};
use paceline_plan::ModelShape;
use paceline_tensor::{Kernels, KvCache, Metered, PAGE};
use serde::{Deserialize, Serialize};

use super::layers::sampled;
use super::{Result, Setting};
use crate::Error;

/// Rows of the step that represents prefill.
pub(super) const PROMPT_ROWS: usize = 64;

/// Rows of the step that represents several concurrent answers: the minimum batch of the kernels
/// for many rows.
const FEW_ROWS: usize = 8;

/// Positions of the two attention probes; their difference gives the cost of a key. At the larger
/// one the keys of all probed layers exceed the last-level cache, as in a long response. They take
/// 47 MB for SmolLM2 and 37 MB for Gemma 3 270M. Hot in cache, a key of SmolLM2 took half as long
/// as at 7,900 positions.
const POSITIONS: [usize; 2] = [64, 2048];

/// Most passes of each measurement; their mean counts. Programs that run now will also run next to
/// the model and take as large a part of its time.
pub(super) const PASSES: usize = 64;

/// A measurement ends after the pass in which this time elapses, because the portable kernels are a
/// hundred times slower than the others.
pub(super) const ENOUGH: Duration = Duration::from_millis(200);

/// Measured times in seconds, for one kernel class and number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StepMeasurements {
    /// A layer's products for one row.
    pub(super) products: f64,
    /// The remaining cost of a layer for one row, without its keys.
    pub(super) other: f64,
    /// One key in one attention layer.
    pub(super) key: f64,
    /// The output head's product for one row.
    pub(super) head: f64,
    /// The remaining cost of a step: the last norm and sampling.
    pub(super) step: f64,
    /// A layer's products without experts, per row of a batch of [`FEW_ROWS`].
    pub(super) few_row: f64,
    pub(super) prompt_row: f64,
    /// The experts' part of a layer's products for one row; 0 without experts.
    pub(super) experts: f64,
    /// The experts of a row in a layer, if each has [`FEW_ROWS`] rows.
    pub(super) few_expert: f64,
    /// The same with the rows of a prompt.
    pub(super) prompt_expert: f64,
}

impl StepMeasurements {
    /// A layer's products without experts, per row of a batch of `rows`, 1 or more.
    pub(super) fn row_of(self, rows: f64) -> f64 {
        let one = (self.products - self.experts).max(0.0);
        between([one, self.few_row, self.prompt_row], rows)
    }

    /// The experts of a row in a layer, if each has `rows` rows, 1 or more.
    pub(super) fn experts_of(self, rows: f64) -> f64 {
        between([self.experts, self.few_expert, self.prompt_expert], rows)
    }

    /// The mean of two measurements.
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

/// Seconds per row of a batch of `rows`, from the times per row for one row, [`FEW_ROWS`] and a
/// prompt. Interpolates the total time linearly between them; beyond, the time per row is that of a
/// prompt.
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

/// The token of every row: the cost does not depend on it.
const TOKEN: u32 = 0;

/// A packed sample of a model, for repeated measurements.
pub(super) struct Probe {
    model: Model,
    /// Number of layers that each sampled layer represents.
    stands: Vec<f64>,
    /// All rows of the head, divided by the packed ones.
    head_share: f64,
    /// Size of the vocabulary.
    vocab: usize,
    /// The planner's shape of a model whose rows attend to chosen positions.
    sparse: Option<ModelShape>,
}

impl Probe {
    /// # Errors
    /// The file is invalid, or memory cannot be allocated.
    pub(super) fn new(setting: Setting<'_>, kernels: Arc<Kernels>) -> Result<Self> {
        let Setting { source, config, .. } = setting;
        if !config
            .layers
            .iter()
            .any(|layer| layer.cache == LayerCache::Rows)
        {
            let what = "no layer keeps keys and values";
            return Err(Error::NotMeasured { what });
        }
        let (sample, stands) = sampled(setting)?;
        let class = setting.class;
        let model = Model::sample(source, config, &sample, LoadOptions { class }, kernels)?;
        Ok(Self {
            model,
            stands,
            head_share: config.vocab as f64 / sample.head_rows as f64,
            vocab: config.vocab,
            sparse: Some(shape::of(source, config)).filter(|shape| shape.indexer.is_some()),
        })
    }

    /// Takes all measurements.
    ///
    /// # Errors
    /// Memory cannot be allocated.
    pub(super) fn measure(&self) -> Result<StepMeasurements> {
        let decode = self.decode()?;
        let mut bench = ProbeMemory::new(self)?;
        let rows = prompt_rows(decode.products * self.stands.len() as f64);
        let both = [rows.min(FEW_ROWS), rows];
        let [few, few_experts, many, many_experts] = typical(|| {
            let mut each = |rows: usize| -> Result<[f64; 2]> {
                let step = bench.step(0, rows)?;
                Ok([step.products.common, step.products.experts].map(|all| all / rows as f64))
            };
            let (few, many) = (each(both[0])?, each(both[1])?);
            Ok([few[0], few[1], many[0], many[1]])
        })?;
        Ok(StepMeasurements {
            // A batch costs no more than single rows, except in a disturbed pass.
            few_row: few.min(decode.few_row),
            prompt_row: many,
            few_expert: few_experts.min(decode.experts),
            prompt_expert: many_experts,
            ..decode
        })
    }

    /// Measures decoding only, and assumes that batched rows are no cheaper. Half of it runs on a
    /// new thread, as a model has its own. Threads stay on their cores, and a virtual host's cores
    /// may differ (one thread 25 % slower than another for a minute was seen).
    ///
    /// # Errors
    /// Memory cannot be allocated.
    pub(super) fn decode(&self) -> Result<StepMeasurements> {
        let here = self.decode_here()?;
        let there = thread::scope(|scope| scope.spawn(|| self.decode_here()).join());
        let there = there.ok().ok_or(Error::Ended {
            what: "the probe's thread",
        })??;
        Ok(here.mean(there))
    }

    fn decode_here(&self) -> Result<StepMeasurements> {
        let mut bench = ProbeMemory::new(self)?;
        // Interleaved, so that differences do not come from changes of the machine's speed.
        let [common, experts, near, far, head, last] = typical(|| {
            let near = bench.step(POSITIONS[0] - 1, 1)?;
            let far = bench.step(POSITIONS[1] - 1, 1)?;
            let last = near.last + bench.choose();
            let Metered { common, experts } = near.products;
            Ok([common, experts, near.layer, far.layer, near.head, last])
        })?;
        let (products, keys) = (common + experts, POSITIONS.map(|keys| self.keys(keys)));
        let key = (far - near).max(0.0) / (keys[1] - keys[0]).max(1e-9);
        Ok(StepMeasurements {
            products,
            other: (near - products - key * keys[0]).max(0.0),
            key,
            head: head * self.head_share,
            step: last,
            few_row: common,
            prompt_row: common,
            experts,
            few_expert: experts,
            prompt_expert: experts,
        })
    }

    /// Mean number of keys that a layer attends to at `positions` positions. An indexer's scores
    /// count as [the planner](ModelShape::equivalent_keys) counts them.
    fn keys(&self, positions: usize) -> f64 {
        if let Some(shape) = &self.sparse {
            return shape.equivalent_keys(positions as f64);
        }
        let layers = self.model.config().layers.iter();
        let keys = layers.map(|layer| match layer.cache {
            LayerCache::Rows | LayerCache::Of(_) => layer
                .window
                .map_or(positions, |window| window.min(positions))
                as f64,
            LayerCache::Compressed(of) => {
                let runs = of.runs.map_or(0, |runs| {
                    let most = runs.indexer.map_or(usize::MAX, |own| own.choice.top_k);
                    (positions / runs.len).min(most)
                });
                (of.window.min(positions) + runs) as f64
            }
            LayerCache::Delta(_) | LayerCache::State(_) | LayerCache::Conv(_) => 0.0,
        });
        mean_layer(&self.stands, keys)
    }
}

/// The mean of `each` sampled layer, weighted by the layers it represents.
fn mean_layer(stands: &[f64], each: impl Iterator<Item = f64>) -> f64 {
    let sum: f64 = stands.iter().zip(each).map(|(weight, x)| weight * x).sum();
    sum / stands.iter().sum::<f64>().max(1.0)
}

/// Seconds of a step.
struct Timed {
    /// A mean layer.
    layer: f64,
    products: Metered,
    /// The head's product.
    head: f64,
    /// Everything else after the layers.
    last: f64,
}

/// Buffers for steps of a sampled model, with keys and values of a long sequence.
struct ProbeMemory<'p> {
    probe: &'p Probe,
    ws: Workspace,
    cache: KvCache,
    pools: Vec<WindowPool>,
    /// The logits to sample from.
    logits: Vec<f32>,
}

impl<'p> ProbeMemory<'p> {
    fn new(probe: &'p Probe) -> Result<Self> {
        let model = &probe.model;
        let size = BatchSize::single(PROMPT_ROWS, POSITIONS[1]);
        let mut cache = model.new_cache(size, POSITIONS[1])?;
        let pages: Vec<usize> = cache.pool_pages().collect();
        for (index, layer) in model.config().layers.iter().enumerate() {
            keep(&mut cache, (index, layer), pages[model.kinds().of(index)]);
        }
        Ok(Self {
            ws: Workspace::new(model, size),
            pools: model.kinds().windows(pages),
            cache,
            logits: vec![0.5; probe.vocab],
            probe,
        })
    }

    /// Times a step of `rows` rows, the first at `position`; the last row produces logits.
    fn step(&mut self, position: usize, rows: usize) -> Result<Timed> {
        let (model, tokens) = (&self.probe.model, vec![TOKEN; rows]);
        let end = (position + rows).div_ceil(PAGE);
        let pages: Vec<u32> = (0..end as u32).collect();
        let window = |pool: &WindowPool| {
            let first_page = pool.first_page(position);
            WindowPages {
                first_page,
                pages: &pages[..end - first_page],
            }
        };
        let windows: Vec<WindowPages<'_>> = self.pools.iter().map(window).collect();
        let sequence = BatchSequence {
            tokens: &tokens,
            position,
            pages: &pages,
            windows: &windows,
            adapter: 0,
            logits: Logits::Last,
        };
        let batch = Batch {
            sequences: &[sequence],
        };
        let meter = model.kernels().meter();
        let mut each: Vec<(f64, Metered)> = Vec::with_capacity(self.probe.stands.len());
        meter.turn(true);
        let mut began = Instant::now();
        let mut behind = || {
            each.push((began.elapsed().as_secs_f64(), meter.drain()));
            began = Instant::now();
        };
        let ran = model.forward_observed(&batch, &mut self.ws, &mut self.cache, &mut behind);
        let (last, head) = (began.elapsed().as_secs_f64(), meter.drain().common);
        meter.turn(false);
        ran?;
        let mean =
            |of: fn(&(f64, Metered)) -> f64| mean_layer(&self.probe.stands, each.iter().map(of));
        Ok(Timed {
            layer: mean(|layer| layer.0),
            products: Metered {
                common: mean(|layer| layer.1.common),
                experts: mean(|layer| layer.1.experts),
            },
            head,
            last: (last - head).max(0.0),
        })
    }

    /// Seconds to sample a token.
    fn choose(&mut self) -> f64 {
        let greedy = SamplingParams::default();
        let kernels = self.probe.model.kernels();
        timed(|| {
            // The chosen token does not matter, and no error is possible here.
            let _ = greedy.first_token(kernels, &mut self.logits);
        })
    }
}

/// Writes keys and values into all pages of a layer: unwritten memory maps to a single page of
/// zeros.
fn keep(cache: &mut KvCache, (index, layer): (usize, &LayerShape), pages: usize) {
    if layer.cache != LayerCache::Rows {
        return;
    }
    // Values of latent attention are part of its keys.
    let value_dim = if layer.latent.is_some() {
        0
    } else {
        layer.value_dim
    };
    let [key, value] = [layer.head_dim, value_dim].map(|dim| vec![0.5; layer.kv_heads * dim]);
    for page in 0..pages as u32 {
        (0..PAGE).for_each(|slot| cache.write(index, page, slot, &key, &value));
    }
}

/// Rows that represent a prompt if one row takes `seconds`: fewer on a slow machine.
fn prompt_rows(seconds: f64) -> usize {
    let rows = ENOUGH.as_secs_f64() / seconds.max(1e-9);
    (rows as usize).clamp(1, PROMPT_ROWS)
}

/// The mean of `values`, which are not empty.
pub(super) fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len() as f64;
    values.sum::<f64>() / n
}

pub(super) fn timed(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// The mean of each figure of `f` over as many passes as [`ENOUGH`] allows, after one warm-up pass.
///
/// # Errors
/// The first error of `f`.
fn typical<const N: usize>(mut f: impl FnMut() -> Result<[f64; N]>) -> Result<[f64; N]> {
    let began = Instant::now();
    let (first, mut passes) = (f()?, Vec::new());
    while passes.len() < PASSES && began.elapsed() < ENOUGH {
        passes.push(f()?);
    }
    if passes.is_empty() {
        return Ok(first);
    }
    Ok(std::array::from_fn(|i| {
        mean(passes.iter().map(|pass| pass[i]))
    }))
}
