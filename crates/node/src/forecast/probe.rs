//! Measures what a token costs one rank on this machine. It times steps of some of a model's own
//! layers and of some rows of its head. They are computed layer by layer, as the model does.
//!
//! A probe takes a few tenths of a second. [`Model::sample`] packs the part; the kernels' meter
//! says what of a layer is products, and what is left is the rest.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_engine::SamplingParams;
use paceline_model::{
    Batch, BatchSequence, BatchSize, LayerCache, LayerShape, LoadOptions, Logits, Model,
    WindowPages, WindowPool, Workspace,
};
use paceline_tensor::{Kernels, KvCache, Metered, PAGE};
use serde::{Deserialize, Serialize};

use super::layers::sampled;
use super::{Result, Setting};
use crate::Error;

/// Rows of the step that stands for prefill.
pub(super) const PROMPT_ROWS: usize = 64;

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

/// Every token of a probe: what a row computes does not depend on it.
const TOKEN: u32 = 0;

/// A part of a model, ready to be measured again and again.
pub(super) struct Probe {
    model: Model,
    /// Layers that each of the part's stands for.
    stands: Vec<f64>,
    /// All rows of the head over those that are here.
    head_share: f64,
    /// Numbers that a token is chosen from.
    vocab: usize,
}

impl Probe {
    /// # Errors
    /// What is wrong with the file; what memory could not be had.
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
        })
    }

    /// Measures now.
    ///
    /// # Errors
    /// What memory could not be had.
    pub(super) fn measure(&self) -> Result<Measured> {
        let decode = self.decode()?;
        let mut bench = Bench::new(self)?;
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
        let mut bench = Bench::new(self)?;
        // In turns, so that differences are not those of the machine's own pace.
        let [common, experts, near, far, head, last] = typical(|| {
            let near = bench.step(POSITIONS[0] - 1, 1)?;
            let far = bench.step(POSITIONS[1] - 1, 1)?;
            let last = near.last + bench.choose();
            let Metered { common, experts } = near.products;
            Ok([common, experts, near.layer, far.layer, near.head, last])
        })?;
        let (products, keys) = (common + experts, POSITIONS.map(|keys| self.keys(keys)));
        let key = (far - near).max(0.0) / (keys[1] - keys[0]).max(1e-9);
        Ok(Measured {
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

    /// Keys that a mean layer looks at with `positions` of them.
    fn keys(&self, positions: usize) -> f64 {
        let layers = self.model.config().layers.iter();
        let keys = layers.map(|layer| match layer.cache {
            LayerCache::Rows | LayerCache::Of(_) => layer
                .window
                .map_or(positions, |window| window.min(positions))
                as f64,
            LayerCache::Delta(_) | LayerCache::State(_) => 0.0,
        });
        mean_layer(&self.stands, keys)
    }
}

/// The mean of `each` layer of a part over the layers that these stand for.
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
    /// What else comes behind the layers.
    last: f64,
}

/// Memory for steps of a part of a model, with keys and values of a long sequence.
struct Bench<'p> {
    probe: &'p Probe,
    ws: Workspace,
    cache: KvCache,
    pools: Vec<WindowPool>,
    /// What a token is chosen from.
    logits: Vec<f32>,
}

impl<'p> Bench<'p> {
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

    /// Times a step of `rows` rows, the first of which is at `position`; the last gives logits.
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
            each.push((began.elapsed().as_secs_f64(), meter.take()));
            began = Instant::now();
        };
        let ran = model.forward_observed(&batch, &mut self.ws, &mut self.cache, &mut behind);
        let (last, head) = (began.elapsed().as_secs_f64(), meter.take().common);
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

    /// Seconds until a token is chosen.
    fn choose(&mut self) -> f64 {
        let greedy = SamplingParams::default();
        let kernels = self.probe.model.kernels();
        timed(|| {
            // What it chooses does not matter, nor does an error, which there is none of.
            let _ = greedy.first_token(kernels, &mut self.logits);
        })
    }
}

/// Writes keys and values into all pages of a layer: memory that nobody wrote to is all one page of
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
