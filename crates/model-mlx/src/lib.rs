//! Models on MLX: the same families, sources and splits as on the CPU, other arithmetic.
//!
//! ```text
//! caller's thread                        thread `mlx` (host.rs)
//! MlxModel::load  -- places, source -->  library, stream, weights (weights.rs, stored.rs)
//! Compute         -- plan of a step -->  graph (step.rs), cache (cache.rs), evaluation
//!                 <-- rows of logits --  exchanges with other ranks, through our groups
//!                                        the next step, if it can be told (ahead.rs)
//! ```
//!
//! **Numbers.** Each kernel class has its own:
//!
//! - Class `mlx` computes in the type of the model's floats, as `mlx-lm` does. Bits are the same
//!   run after run, and for pipeline splits, since activations travel between stages without loss.
//!   They are not promised over batch shapes: MLX has kernels for one row, few and many. Nor are
//!   they over tensor splits: ranks' parts are rounded before they are added.
//! - Class `mlx-f32` has activations, scales and cache in f32, and differs from naive kernels by
//!   their rounding alone.
//! - Class `mlx-exact` pays for the same bits over batches and tensor splits. Every row is a
//!   sequence and a product of its own. Ranks share every matrix by its outputs, so that each dot
//!   product is whole; each sum takes two gathers instead of one. It is there for dense models
//!   whose layers are all alike.
//!
//! States of delta nets and routers are f32 in every class.
//!
//! **Not computed.** Class `cpu` has these, and MLX refuses them by name:
//!
//! | asked for | error | why |
//! |---|---|---|
//! | recurrent layers, but gated delta nets | [`Error::Recurrence`] | MLX has no scan |
//! | `mlx-exact` of layers that differ | [`Error::FamilyClass`] | experts' rows share a product |
//! | an adapter that is not fused | [`Error::AdapterEngine`] | a fused model is as good |
//! | storage types that differ within a layer | [`Error::MixedForms`] | experts are one array |
//! | a tensor split within a group of values | [`Error::CutGroup`] | a group has one scale |
//! | training on a type without a form | [`Error::NoForm`] | gradients need the file's values |
//!
//! For other requests it takes what it has. Answers have no drafts and no tokens forced at once,
//! since several rows take several times as long as one, and have other bits. Keys and values have
//! the type of activations. Pages of delta nets are computed again, not read from disk.
//!
//! **Memory.** What weights and the full cache will take is known from the file's header and
//! compared with the device before anything is loaded. The cache begins small and grows with the
//! pages in use ([`Cache::grow`]). Sequences have [lanes](cache) in the memory that is left. MLX
//! copies weights from the mapped file: it may write to memory that it uses in place
//! ([`Array::as_bytes`]).

mod ahead;
mod alone;
mod cache;
mod counters;
mod decoding;
mod draw;
mod exchange;
mod gates;
mod host;
mod logits;
mod matrix;
mod pages;
mod step;
mod stored;
mod weights;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_mlx::{Array, Dtype, Library, LibraryPaths, MemoryLimits, Stream};
use paceline_model::backend::{
    PersistentCache, PlanLimits, StepPlan, WeightReader, depth, steps_max,
};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Compute, Config, Error, ExchangeBytes, Experts, FollowOutcome,
    Kinds, LayerCache, LayerCut, LayerShape, Links, LoadedModel as Loaded, ModelSource, PageStore,
    PersistedPage, Rope, Shard, Split, WindowPages, WindowPool,
};
use paceline_tensor::{AttentionRows, Kernels, PAGE, StateRule};

use ahead::{Ahead, NextStep};
use cache::{Cache, DeltaSizes, LaneLimits, LayerSizes, SpanKind, UNKNOWN_PAGE};
use counters::Counters;
use exchange::{Receive, Tally};
use gates::Gates;
use logits::StepLogits;
use pages::DevicePages;
use step::{Parts, Step, Triangles};
use weights::{Loader, Weights};

pub use alone::{MlxForm, MlxMatrix, mlx_dtype};
pub use counters::MlxCounts;
pub use host::{EvaluationLimits, Host, Watch};
pub use paceline_mlx::{LibraryPaths as MlxPlaces, exit};

/// Memory that MLX keeps for reuse: as much as a step takes, and not less than this. Below 64 MiB,
/// a few layers' rows, every step would ask the system again.
const CACHE_MIN: u64 = 64 << 20;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct MlxOptions {
    /// Where the library is.
    pub places: LibraryPaths,
    pub class: KernelClass,
    /// Positions of the caches that will be reserved, to know before loading whether all fits.
    pub positions: usize,
    /// Rows of the largest step.
    pub rows: usize,
    /// Sequences that are computed at the same time: what states of delta nets are counted for.
    pub sequences: usize,
    /// The first evaluation, which takes longer, counts as a device that hangs; later ones by the
    /// times of those before.
    pub patience: Duration,
    /// Time from a detected hang to the end of the process, which no blocked call can delay.
    pub last_words: Duration,
}

impl MlxOptions {
    /// Longest first evaluation unless told otherwise. The longest there should be, 512 rows of a
    /// 70B model on a small GPU, is half a minute; a first one also compiles kernels.
    pub const PATIENCE: Duration = Duration::from_secs(300);

    /// Enough for a worker to tell its parent, and for other ranks to hear of it: these take 2 s.
    pub const LAST_WORDS: Duration = Duration::from_secs(10);
}

/// A model, or one rank's shard of it, on MLX.
#[derive(Debug)]
pub struct MlxModel {
    config: Config,
    shard: Shard,
    leader: Rank,
    links: Option<Arc<Links>>,
    class: KernelClass,
    dtype: Dtype,
    kernels: Arc<Kernels>,
    weight_bytes: Bytes,
    device: String,
    notes: Vec<String>,
    host: Host<Device>,
    exchanged: Tally,
    counters: Counters,
    /// Whether the device interrupted the last step.
    interrupted: AtomicBool,
    /// Numbers caches.
    last_cache: AtomicU64,
}

/// State of the thread `mlx`.
struct Device {
    stream: Stream,
    watch: Watch,
    loaded: Option<(Weights, Constants)>,
    /// Bytes that weights, cache and steps leave for lanes.
    room: u64,
    caches: HashMap<u64, Reserved>,
}

/// A cache and what steps on it need.
struct Reserved {
    cache: Cache,
    /// See [`step::Parts::periods`].
    periods: Vec<Array>,
    receive: Receive,
    ahead: Ahead,
    size: BatchSize,
    pages: usize,
    windows: Vec<WindowPool>,
}

/// Arrays and tables that follow from the configuration.
#[derive(Debug)]
struct Constants {
    gates: Gates,
    embedding_scale: Array,
    /// Each once.
    span_kinds: Vec<SpanKind>,
    /// Which of them a layer of the whole model has; unused where it has no keys.
    span_kind_of: Vec<usize>,
    /// Of each layer held, the query heads of each KV head that this rank holds; empty when all
    /// have as many.
    groups: Vec<Vec<Range<i32>>>,
    /// Which pages a layer of the whole model has.
    kinds: Kinds,
    /// For the rows of a page of delta nets.
    triangles: Triangles,
}

impl Constants {
    /// With lines for the model's owner.
    fn new(
        stream: &Stream,
        config: &Config,
        shard: &Shard,
        dtype: Dtype,
    ) -> Result<(Self, Vec<String>), Error> {
        let (gates, notes) = Gates::new(stream, config, dtype)?;
        let kinds = Kinds::new(config);
        let (span_kinds, span_kind_of) = span_kinds(config, &kinds);
        let constants = Self {
            gates,
            embedding_scale: stream.scalar(config.embedding_scale, dtype)?,
            span_kinds,
            span_kind_of,
            groups: groups(config, shard),
            kinds,
            triangles: Triangles::new(stream)?,
        };
        Ok((constants, notes))
    }
}

/// See [`Constants::span_kinds`] and [`Constants::span_kind_of`].
fn span_kinds(config: &Config, kinds: &Kinds) -> (Vec<SpanKind>, Vec<usize>) {
    let mut all = Vec::new();
    let of = config.layers.iter().enumerate().map(|(i, layer)| {
        if matches!(layer.cache, LayerCache::Delta(_)) {
            return 0;
        }
        let own = SpanKind {
            kind: kinds.of(i),
            window: layer.window,
        };
        let known = all.iter().position(|known| *known == own);
        known.unwrap_or_else(|| {
            all.push(own);
            all.len() - 1
        })
    });
    let of = of.collect();
    (all, of)
}

/// See [`Constants::groups`].
fn groups(config: &Config, shard: &Shard) -> Vec<Vec<Range<i32>>> {
    let layers = config.layers[shard.layers.clone()].iter();
    let layers = layers.zip(shard.each_layer());
    layers.map(|(shape, cut)| groups_of(shape, cut)).collect()
}

fn groups_of(shape: &LayerShape, cut: &LayerCut) -> Vec<Range<i32>> {
    let (group, heads) = (shape.heads / shape.kv_heads, &cut.heads);
    let of = |kv: usize| {
        let start = (kv * group).max(heads.start) - heads.start;
        let end = ((kv + 1) * group).min(heads.end) - heads.start;
        start as i32..end as i32
    };
    let is_net = matches!(shape.cache, LayerCache::Delta(_));
    let kv_heads = cut.kv_heads.clone().filter(|_| !is_net);
    let groups: Vec<Range<i32>> = kv_heads.map(of).collect();
    let even = groups.iter().all(|g| g.len() == groups[0].len());
    if even { Vec::new() } else { groups }
}

impl MlxModel {
    /// Loads what `rank` holds in `split`: opens MLX, asks whether it fits, reads the weights.
    /// `progress(done, of)` is called now and then with numbers of layers. `kernels` choose tokens.
    ///
    /// # Errors
    /// [`Error::Mlx`] when MLX cannot be used, or all is more than the device's memory;
    /// otherwise as [`Model::load_shard`](paceline_model::Model::load_shard).
    ///
    /// # Panics
    /// If there is no such rank, or the split is of another model.
    pub fn load(
        source: Arc<ModelSource>,
        split: &Split,
        rank: Rank,
        options: MlxOptions,
        kernels: Arc<Kernels>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        if !options.class.is_mlx() {
            let (class, engine) = (options.class, "mlx");
            return Err(Error::Class { class, engine });
        }
        let mut config = Config::read(&source)?;
        paceline_model::backend::read_rope_factors(&source, &mut config)?;
        refuse(&config, options.class)?;
        let shard = split.shard(&config, rank);
        let (places, class) = (options.places.clone(), options.class);
        let patience = EvaluationLimits {
            limit: options.patience,
            last_words: Some(options.last_words),
            hang_note: options.places.hang_note.clone(),
        };
        let host = Host::start(patience, move |watch| Device::open(&places, watch))?;
        let (told, tell) = channel();
        let job = (config.clone(), shard.clone());
        let load = move |device: &mut Device| {
            let (config, shard) = job;
            let tell = |done, of| {
                let _ = told.send((done, of)); // nobody listens after a hang
            };
            device.load(&source, &config, &shard, &options, tell)
        };
        let hear = || tell.try_iter().for_each(|(done, of)| progress(done, of));
        let Facts {
            dtype,
            weight_bytes,
            device,
            notes,
        } = host.call(load, hear)??;
        Ok(Self {
            leader: split.leader(),
            links: None,
            interrupted: AtomicBool::new(false),
            last_cache: AtomicU64::new(0),
            config,
            shard,
            class,
            dtype,
            kernels,
            weight_bytes,
            device,
            notes,
            host,
            exchanged: Tally::default(),
            counters: Counters::default(),
        })
    }

    /// Counts since the model was loaded.
    pub fn counts(&self) -> MlxCounts {
        self.counters.now()
    }

    /// Notes for its owner, a line each: weights that MLX holds in another form than the file, or a
    /// device that is a test bed. Another says whether gates are compiled.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Lanes of a cache. Class `mlx-exact` has none, since its rows are sequences of their own.
    fn lane_limits(&self, shape: &cache::Shape, size: BatchSize) -> LaneLimits {
        let kinds = Kinds::new(&self.config);
        let layers = self.shard.layers.clone().zip(&shape.layers);
        let has_rows = |(i, (sizes, _)): (usize, &(LayerSizes, usize))| {
            let is_row = matches!(sizes, LayerSizes::Rows { .. } | LayerSizes::Latent { .. });
            is_row && kinds.of(i) == 0
        };
        LaneLimits {
            layers: layers.map(has_rows).collect(),
            lanes: if self.is_exact() { 0 } else { size.sequences },
            bytes: 0,
        }
    }

    /// Whether every row is computed by itself, and every product whole.
    fn is_exact(&self) -> bool {
        self.class == KernelClass::MlxExact
    }

    /// Joins this shard with those of the other ranks.
    ///
    /// # Panics
    /// If the groups are not those of its rank and stage.
    #[must_use]
    pub fn link(mut self, links: Links) -> Self {
        links.check(&self.shard);
        self.links = Some(Arc::new(links));
        self
    }
}

/// Refuses what MLX does not compute, and what a class does not.
fn refuse(config: &Config, class: KernelClass) -> Result<(), Error> {
    let has_state = |layer: &LayerShape| match layer.cache {
        LayerCache::State(_) | LayerCache::Conv(_) => true,
        LayerCache::Delta(net) => net.rule == StateRule::Sum,
        _ => false,
    };
    let alike = config.is_uniform() && config.experts().is_none();
    if class == KernelClass::MlxExact && !alike {
        let family = config.family.name();
        return Err(Error::FamilyClass { family, class });
    }
    if config.layers.iter().any(has_state) {
        return Err(Error::Recurrence { engine: "mlx" });
    }
    if config.streams.is_some() {
        return Err(Error::Streams { engine: "mlx" });
    }
    Ok(())
}

/// Facts of a loaded model.
struct Facts {
    dtype: Dtype,
    weight_bytes: Bytes,
    device: String,
    notes: Vec<String>,
}

impl Device {
    fn open(places: &LibraryPaths, watch: Watch) -> Result<Self, Error> {
        let library = Library::open(places)?;
        let stream = library.stream(library.best_device()?)?;
        Ok(Self {
            stream,
            watch,
            loaded: None,
            room: 0,
            caches: HashMap::new(),
        })
    }

    fn load(
        &mut self,
        source: &ModelSource,
        config: &Config,
        shard: &Shard,
        options: &MlxOptions,
        progress: impl FnMut(usize, usize),
    ) -> Result<Facts, Error> {
        let names = WeightReader { source, config };
        let tied = names.is_tied()?;
        let dtype = weights::activations(&names, config.family, options.class)?;
        self.admit(&names, shard, options, (tied, dtype))?;
        let loader = Loader {
            stream: &self.stream,
            names,
            config,
            shard,
            dtype,
            by_outputs: options.class == KernelClass::MlxExact,
            kept: RefCell::default(),
            nearest: RefCell::default(),
        };
        let (weights, weight_bytes) = loader.load(tied, progress)?;
        let (constants, measured) = Constants::new(&self.stream, config, shard, dtype)?;
        let notes = loader.notes().into_iter().chain(measured).collect();
        self.loaded = Some((weights, constants));
        let (library, device) = (self.stream.library(), self.stream.device());
        let name = self.stream.device_name().unwrap_or_default();
        let backend = library.backend(device)?;
        let device = format!("mlx {} {backend} {name}", library.version());
        Ok(Facts {
            dtype,
            weight_bytes,
            device: device.trim_end().to_owned(),
            notes,
        })
    }

    /// Refuses what does not fit, and sets MLX's limits by what does.
    fn admit(
        &mut self,
        names: &WeightReader<'_>,
        shard: &Shard,
        options: &MlxOptions,
        (tied, dtype): (bool, Dtype),
    ) -> Result<(), Error> {
        let size = BatchSize {
            rows: options.rows,
            logit_rows: options.sequences,
            sequences: options.sequences,
            context: options.positions,
        };
        let planned = MlxRankBytes::of(names, shard, size, (tied, dtype))?;
        let MlxRankBytes { weights, step, .. } = planned;
        let cache = |positions| cache_shape(names.config, shard, (size, positions), dtype).bytes();
        let needed = |positions| Bytes(weights.0 + cache(positions) + step.0);
        let available = self.stream.available()?;
        let positions = options.positions;
        if needed(positions) > available {
            let cache = planned.cache;
            return Err(Error::DevicePositions {
                positions,
                needed: needed(positions),
                what: format!("weights {weights}, cache {cache}, a step {step}"),
                device: self.stream.library().backend(self.stream.device())?,
                available,
                fitting: most_fitting(positions, |fewer| needed(fewer) <= available),
            });
        }
        self.room = available.0 - needed(positions).0;
        Ok(self.stream.library().limit(MemoryLimits {
            memory: available,
            cache: Bytes(step.0.max(CACHE_MIN)),
            wired: needed(positions),
        })?)
    }

    /// Drops a cache once the device has computed the step ahead on it, if there is one. MLX that
    /// computes while its process ends breaks the heap.
    fn forget(&mut self, cache: u64) {
        let Some(reserved) = self.caches.remove(&cache) else {
            return;
        };
        if reserved.ahead.is_submitted() {
            let wait = || self.stream.synchronize();
            let _ = self.watch.during_part(1, wait); // nobody reads that step, nor its error
        }
    }

    /// Computes this rank's part of a step; the number of rows of logits.
    fn step(
        &mut self,
        model: &MlxModel,
        cache: u64,
        words: &[u32],
        logits: &mut Vec<f32>,
    ) -> Result<Option<usize>, Error> {
        let reserved = self.caches.get_mut(&cache).ok_or(Error::Gone)?;
        let loaded = self.loaded.as_ref().ok_or(Error::Gone)?;
        let pages = (reserved.pages, &*reserved.windows);
        let limits = PlanLimits::new(reserved.size, pages, (model.config.vocab, 0));
        let Some(plan) = StepPlan::read(words, &limits)? else {
            return Ok(None);
        };
        let windows: Vec<WindowPages<'_>> = plan.windows(words).collect();
        let sequences = plan.batch(words, &windows);
        let sequences: Vec<BatchSequence<'_>> = if model.is_exact() {
            sequences.flat_map(rows_of).collect()
        } else {
            sequences.collect()
        };
        let batch = Batch {
            sequences: &sequences,
        };
        let on = OnDevice {
            model,
            loaded,
            stream: &self.stream,
            watch: &self.watch,
        };
        on.step(reserved, (words, &batch), logits).map(Some)
    }
}

/// The model, weights and stream of every step.
struct OnDevice<'a> {
    model: &'a MlxModel,
    loaded: &'a (Weights, Constants),
    stream: &'a Stream,
    watch: &'a Watch,
}

/// Positions per radian of each pair, for each rope.
fn periods(stream: &Stream, ropes: &[Rope]) -> Result<Vec<Array>, Error> {
    let of = |rope: &Rope| {
        let periods: Vec<f32> = rope.frequencies.iter().map(|f| (1.0 / f) as f32).collect();
        Ok(stream.array_f32(&periods, &[periods.len() as i32])?)
    };
    ropes.iter().map(of).collect()
}

impl<'a> OnDevice<'a> {
    /// Makes the graph of a step.
    fn graph(
        &self,
        reserved: &'a mut Reserved,
        batch: &'a Batch<'a>,
        tokens: Option<Array>,
    ) -> Result<Step<'a>, Error> {
        let (weights, constants) = self.loaded;
        reserved.receive.forget();
        let parts = Parts {
            model: self.model,
            weights,
            periods: &reserved.periods,
            constants,
            stream: self.stream,
            cache: &mut reserved.cache,
            receive: &mut reserved.receive,
            watch: self.watch,
        };
        let mut step = Step::new(parts, batch, tokens)?;
        step.layers()?;
        Ok(step)
    }

    /// Computes the step of the plan in `words`, or takes its results if it was submitted before.
    /// Then submits the step that probably follows. Returns the rows of logits.
    fn step(
        &self,
        reserved: &mut Reserved,
        (words, batch): (&[u32], &Batch<'_>),
        rows: &mut Vec<f32>,
    ) -> Result<usize, Error> {
        let ahead = reserved.ahead.take(words);
        match &ahead {
            Some(_) => reserved.cache.name_pages(&rows_in_cache(batch)),
            None => reserved.cache.end_lanes_before(UNKNOWN_PAGE),
        }
        let next = self.next(reserved, batch);
        let is_ahead = ahead.is_some();
        let is_submitted = is_ahead || next.is_some();
        let counters = &self.model.counters;
        counters.steps_ahead.add(u64::from(is_ahead));
        let logits = match ahead {
            Some(logits) => logits,
            None => {
                let mut step = self.graph(reserved, batch, None)?;
                let Some(logits) = step.logits()? else {
                    return step.finish(rows);
                };
                match is_submitted {
                    true => step.submit(&logits)?,
                    false => step.evaluate(&logits)?,
                }
                logits
            }
        };
        let submitted = next.map(|next| self.submit(reserved, &logits, next));
        if is_submitted {
            let wait = || self.stream.eval(logits.arrays());
            // The wait for a step that began earlier says nothing of the time that a step takes.
            match is_ahead {
                true => self.watch.during_part(batch.rows(), wait)?,
                false => self.watch.during(batch.rows(), wait)?,
            }
        }
        if let Some((next, of_next)) = submitted.transpose()?.flatten() {
            let tokens = logits.host_tokens()?;
            reserved.ahead.submitted(&next, &tokens, of_next);
        }
        let bytes = logits.read(self.stream, rows)?;
        counters.logit_bytes.add(bytes);
        Ok(batch.logit_rows())
    }

    /// The step that probably follows `batch`. `None` where other ranks compute too, since they get
    /// the tokens with the plan.
    fn next<'b>(&self, reserved: &Reserved, batch: &Batch<'b>) -> Option<NextStep<'b>> {
        if self.model.links.is_some() || reserved.ahead.pauses() {
            return None;
        }
        let next = NextStep::after(batch, &reserved.windows, reserved.size.context)?;
        let unknown = vec![0; next.rows()];
        let is_in_lanes = |batch: &Batch<'_>| reserved.cache.is_in_lanes(&rows_in_cache(batch));
        let may_begin = || next.with((&unknown, UNKNOWN_PAGE), is_in_lanes);
        (!next.begins_pages() || may_begin()).then_some(next)
    }

    /// Submits the step `next`, whose tokens are those of `logits`; with its logits.
    fn submit<'b>(
        &self,
        reserved: &mut Reserved,
        logits: &StepLogits,
        next: NextStep<'b>,
    ) -> Result<Option<(NextStep<'b>, StepLogits)>, Error> {
        let Some(tokens) = logits.tokens(self.stream)? else {
            return Ok(None);
        };
        let unknown = vec![0; next.rows()];
        let of_next = next.with((&unknown, UNKNOWN_PAGE), |batch| {
            let mut step = self.graph(reserved, batch, Some(tokens))?;
            let logits = step.logits()?;
            if let Some(logits) = &logits {
                step.submit(logits)?;
            }
            Ok::<_, Error>(logits)
        })?;
        Ok(of_next.map(|logits| (next, logits)))
    }
}

/// The most positions, in whole pages and fewer than `positions`, for which `fits` holds; 0 if for
/// none. It holds for all fewer.
fn most_fitting(positions: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut fitting, mut more) = (0, positions.div_ceil(PAGE));
    while fitting + 1 < more {
        let middle = fitting.midpoint(more);
        match fits(middle * PAGE) {
            true => fitting = middle,
            false => more = middle,
        }
    }
    fitting * PAGE
}

/// Rows of a step in the pages that keep all positions.
fn rows_in_cache<'a>(batch: &Batch<'a>) -> Vec<AttentionRows<'a>> {
    batch.sequences.iter().map(|s| s.rows_of(0)).collect()
}

/// Each token of a sequence as one of its own, on the same pages.
fn rows_of(sequence: BatchSequence<'_>) -> impl Iterator<Item = BatchSequence<'_>> {
    let last = sequence.tokens.len() - 1;
    (0..=last).map(move |i| BatchSequence {
        tokens: &sequence.tokens[i..=i],
        position: sequence.position + i,
        pages: sequence.pages,
        windows: sequence.windows,
        adapter: sequence.adapter,
        logits: match i < last {
            true => sequence.logits.before_the_last(),
            false => sequence.logits,
        },
    })
}

/// Values of a row in passing: the residual, its norm and sum; queries, keys, values and scores.
/// Gate, up and their product follow, of every expert that a row has. Logits are small in
/// comparison: one row for each sequence.
fn widest(c: &Config, shard: &Shard) -> usize {
    let shapes = c.layers[shard.layers.clone()].iter();
    let widths = shapes.zip(shard.each_layer()).map(|(shape, cut)| {
        let heads = cut.heads.len() * shape.head_dim.max(shape.value_dim);
        let dense = match shape.has_dense() {
            true => cut.dense().columns().len(),
            false => 0,
        };
        let of_experts = |experts: Experts| experts.used * (3 * experts.width + 2 * c.width);
        4 * (heads + dense) + shape.experts.map_or(0, of_experts)
    });
    4 * c.width + widths.max().unwrap_or(0)
}

/// Sizes of the caches of `shard`'s layers, for steps of up to `size` and `positions` positions.
fn cache_shape(
    c: &Config,
    shard: &Shard,
    (size, positions): (BatchSize, usize),
    dtype: Dtype,
) -> cache::Shape {
    let kinds = Kinds::new(c);
    let pages = kinds.pages(size, positions);
    let layers = shard.layers.clone().zip(shard.each_layer());
    let layers = layers.map(|(i, cut)| (layer_sizes(&c.layers[i], cut), pages[kinds.of(i)]));
    cache::Shape {
        layers: layers.collect(),
        dtype,
    }
}

/// Bytes of a rank on MLX.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlxRankBytes {
    /// Weights in MLX's form.
    pub weights: Bytes,
    /// Keys, values and states.
    pub cache: Bytes,
    /// Results of one step.
    pub step: Bytes,
}

impl MlxRankBytes {
    /// Of `shard` in `class`, for steps of `size`; its context is the positions of all sequences.
    /// Reads headers only. The rank's worker admits it by the same sum.
    ///
    /// # Errors
    /// The files lack a matrix, or it has another shape.
    pub fn planned(
        (source, config): (&ModelSource, &Config),
        shard: &Shard,
        class: KernelClass,
        size: BatchSize,
    ) -> Result<Self, Error> {
        let names = WeightReader { source, config };
        let tied = names.is_tied()?;
        let dtype = weights::activations(&names, config.family, class)?;
        Self::of(&names, shard, size, (tied, dtype))
    }

    fn of(
        names: &WeightReader<'_>,
        shard: &Shard,
        size: BatchSize,
        (tied, dtype): (bool, Dtype),
    ) -> Result<Self, Error> {
        let c = names.config;
        Ok(Self {
            weights: weights::planned(names, shard, tied, dtype)?,
            cache: Bytes(cache_shape(c, shard, (size, size.context), dtype).bytes()),
            step: Bytes(4 * (size.rows * widest(c, shard) + shard.vocab().len()) as u64),
        })
    }

    /// All of them.
    pub const fn total(self) -> Bytes {
        Bytes(self.weights.0 + self.cache.0 + self.step.0)
    }
}

/// Bytes that [`PAGE`] more positions take on MLX over all layers, in a long context: layers with
/// a window keep only part of them. `class` computes with 2 bytes a value, or with 4.
pub fn mlx_page_bytes(config: &Config, class: KernelClass) -> usize {
    const MANY: usize = 1 << 20;
    let is_wide = class == KernelClass::MlxF32 || config.family.needs_wide_activations();
    let dtype = if is_wide { Dtype::F32 } else { Dtype::F16 };
    let shard = Split::whole(config).shard(config, Rank(0));
    let bytes = |positions| {
        let sizes = (BatchSize::single(1, 1), positions);
        cache_shape(config, &shard, sizes, dtype).bytes()
    };
    ((bytes(2 * MANY) - bytes(MANY)) / (MANY / PAGE) as u64) as usize
}

/// Sizes of one layer's cache.
const fn layer_sizes(shape: &LayerShape, cut: &LayerCut) -> LayerSizes {
    let (heads, kv_heads) = (
        cut.heads.end - cut.heads.start,
        cut.kv_heads.end - cut.kv_heads.start,
    );
    let (key, value) = (shape.head_dim, shape.value_dim);
    if heads == 0 {
        return LayerSizes::Nothing;
    }
    match (shape.cache, shape.latent) {
        (LayerCache::Of(_) | LayerCache::State(_) | LayerCache::Conv(_), _) => LayerSizes::Nothing,
        (LayerCache::Delta(_), _) => {
            let of = DeltaSizes {
                heads,
                key_heads: kv_heads,
                key,
                value,
                channels: 2 * kv_heads * key + heads * value,
            };
            LayerSizes::Delta(of)
        }
        (LayerCache::Rows, Some(latent)) => {
            let index = latent.index_dim();
            LayerSizes::Latent {
                key: key + index,
                value,
                index,
            }
        }
        (LayerCache::Rows, None) => LayerSizes::Rows {
            heads: kv_heads,
            key,
            value,
        },
    }
}

impl Loaded for MlxModel {
    fn config(&self) -> &Config {
        &self.config
    }

    fn shard(&self) -> &Shard {
        &self.shard
    }

    fn class(&self) -> KernelClass {
        self.class
    }

    fn weight_bytes(&self) -> Bytes {
        self.weight_bytes
    }

    fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn links(&self) -> Option<&Arc<Links>> {
        self.links.as_ref()
    }

    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn Loaded>> {
        let mut own = Arc::into_inner(self)?;
        // A device that hangs ends this process soon.
        if own.host.is_hung() {
            return None;
        }
        (own.links, own.exchanged) = (None, Tally::default());
        Some(Arc::new(own))
    }

    fn linked(self: Arc<Self>, links: Links) -> Option<Arc<dyn Loaded>> {
        Some(Arc::new(Arc::into_inner(self)?.link(links)))
    }

    fn exchanged(&self) -> ExchangeBytes {
        self.exchanged.now()
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error> {
        self.config.check_context(size.context)?;
        let id = self.last_cache.fetch_add(1, Ordering::Relaxed);
        let shape = cache_shape(&self.config, &self.shard, (size, positions), self.dtype);
        let kinds = Kinds::new(&self.config);
        let windows = kinds.windows(kinds.pages(size, positions));
        let (pages, own) = (positions.div_ceil(PAGE), windows.clone());
        let mut lanes = self.lane_limits(&shape, size);
        let ropes = self.config.ropes.iter();
        let ropes: Vec<Rope> = ropes.map(|rope| rope.for_context(size.context)).collect();
        let links = self.links.clone();
        let reserve = move |device: &mut Device| {
            let mut cache = Cache::new(&device.stream, &shape)?;
            lanes.bytes = device.room;
            cache.allow_lanes(lanes);
            let reserved = Reserved {
                cache,
                periods: periods(&device.stream, &ropes)?,
                receive: Receive::new(&device.stream, links.as_ref())?,
                ahead: Ahead::default(),
                size,
                pages,
                windows: own,
            };
            device.caches.insert(id, reserved);
            Ok::<_, Error>(())
        };
        self.host.call(reserve, || ())??;
        Ok(Box::new(OnMlx {
            pages,
            windows,
            words: Vec::new(),
            logits: Vec::new(),
            announced: 0,
            kept: PersistentCache::default(),
            model: self,
            id,
        }))
    }
}

/// A model on MLX with a cache.
#[derive(Debug)]
struct OnMlx {
    model: Arc<MlxModel>,
    id: u64,
    pages: usize,
    windows: Vec<WindowPool>,
    /// The plan of the step.
    words: Vec<u32>,
    /// `(R, vocabulary)`; at the leader.
    logits: Vec<f32>,
    /// Announced steps that are not computed yet.
    announced: u64,
    kept: PersistentCache,
}

impl OnMlx {
    /// Has the plan in `words` computed.
    fn step(&mut self) -> Result<Option<usize>, Error> {
        let (model, id) = (Arc::clone(&self.model), self.id);
        let words = std::mem::take(&mut self.words);
        let mut logits = std::mem::take(&mut self.logits);
        let step = move |device: &mut Device| {
            let done = device.step(&model, id, &words, &mut logits);
            (done, words, logits)
        };
        let (done, words, logits) = self.model.host.call(step, || ())?;
        let interrupted = matches!(&done, Err(error) if error.is_interrupted());
        self.model.interrupted.store(interrupted, Ordering::Relaxed);
        (self.words, self.logits) = (words, logits);
        done
    }
}

impl Compute for OnMlx {
    fn pages(&self) -> usize {
        self.pages
    }

    fn windows(&self) -> &[WindowPool] {
        &self.windows
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error> {
        let shard = &self.model.shard;
        assert!(shard.leads(), "{} does not lead", shard.rank);
        StepPlan::write(batch, &mut self.words);
        if let Some(links) = &self.model.links {
            match self.announced.checked_sub(1) {
                Some(left) => {
                    self.announced = left;
                    links.trace.next_step();
                }
                None => links.announce(&self.words)?,
            }
        }
        Ok(self.step()?.unwrap_or(0))
    }

    /// Class `mlx-exact` has the tokens of a host.
    fn draws_tokens(&self) -> bool {
        self.model.links.is_none() && !self.model.is_exact()
    }

    fn depth(&self) -> usize {
        let model = &self.model;
        model.links.as_ref().map_or(1, |_| depth(&model.shard))
    }

    fn steps_max(&self) -> usize {
        steps_max(self.depth())
    }

    fn announce(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        let Some(links) = &self.model.links else {
            return Ok(());
        };
        StepPlan::write(batch, &mut self.words);
        self.announced += 1;
        links.announce_step(&self.words, self.announced)
    }

    fn logits_mut(&mut self, i: usize) -> &mut [f32] {
        let vocab = self.model.config.vocab;
        &mut self.logits[i * vocab..(i + 1) * vocab]
    }

    fn idle(&mut self) -> Result<(), Error> {
        match &self.model.links {
            Some(links) => links.announce_idle(),
            None => Ok(()),
        }
    }

    fn follow(&mut self) -> Result<FollowOutcome, Error> {
        let model = Arc::clone(&self.model);
        let links = model.links.as_ref().expect("a follower is linked");
        links.next_plan(model.leader, &mut self.words)?;
        let mut pages = DevicePages::new(&model, self.id, (self.pages, &self.windows));
        let of = (&**links, model.leader);
        if self.kept.handle_message(of, &self.words, &mut pages)? {
            return Ok(FollowOutcome::Idle);
        }
        Ok(match self.step()? {
            Some(_) => FollowOutcome::Step,
            None => FollowOutcome::Idle,
        })
    }

    fn attach(&mut self, store: Box<dyn PageStore>) {
        let is_state = |layer: &LayerShape| matches!(layer.cache, LayerCache::Delta(_));
        if !self.model.config.layers.iter().any(is_state) {
            self.kept = PersistentCache::in_store(store);
        }
    }

    fn store(&self) -> Option<&dyn PageStore> {
        self.kept.store()
    }

    fn persist_pages(&mut self, pages: &[PersistedPage]) -> Result<(), Error> {
        let own = DevicePages::new(&self.model, self.id, (self.pages, &self.windows));
        self.kept.keep(self.model.links.as_deref(), &own, pages)
    }

    fn restore_pages(&mut self, pages: &[PersistedPage]) -> Result<usize, Error> {
        let mut own = DevicePages::new(&self.model, self.id, (self.pages, &self.windows));
        self.kept
            .recall(self.model.links.as_deref(), &mut own, pages)
    }
}

impl Drop for OnMlx {
    fn drop(&mut self) {
        let id = self.id;
        // A thread that is gone has dropped it.
        let _ = self.model.host.call(move |device| device.forget(id), || ());
    }
}
