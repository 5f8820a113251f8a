//! State and steps of the thread `mlx`: the stream, the weights, and caches with their steps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_mlx::{Array, Dtype, Library, LibraryPaths, MemoryLimits, Stream};
use paceline_model::backend::{LayerWriter, PlanLimits, StepPlan, WeightReader};
use paceline_model::{
    Batch, BatchSequence, BatchSize, Config, Error, MemoryLimit, ModelSource, PackedFile, Rope,
    Shard, WindowPages, WindowPool,
};
use paceline_tensor::Kernels;

use super::ahead::{Ahead, NextStep, Results};
use super::cache::{Cache, UNKNOWN_PAGE, bits_of};
use super::constants::Constants;
use super::exchange::Receive;
use super::host::Watch;
use super::logits::StepLogits;
use super::rank_bytes::{Held, MlxRankBytes, cache_shape, most_fitting};
use super::step::{Parts, RankStep, Step, rows_after, rows_in_cache};
use super::weights::{self, Ring, RingPlan, RingWriter, ShardFiles, Weights};
use super::{MlxModel, MlxOptions};

/// Memory that MLX keeps for reuse: as much as a step takes, and not less than this. Below 64 MiB,
/// a few layers' rows, every step would ask the system again.
const CACHE_MIN: u64 = 64 << 20;

/// State of the thread `mlx`.
pub(super) struct Device {
    pub(super) stream: Stream,
    pub(super) watch: Watch,
    pub(super) loaded: Option<(Weights, Constants)>,
    /// Bytes that weights, cache and steps leave for lanes.
    pub(super) room: u64,
    pub(super) caches: HashMap<u64, Reserved>,
}

/// A cache and what steps on it need.
pub(super) struct Reserved {
    pub(super) cache: Cache,
    /// See [`step::Parts::periods`].
    pub(super) periods: Vec<Array>,
    pub(super) receive: Receive,
    pub(super) ahead: Ahead,
    pub(super) size: BatchSize,
    pub(super) pages: usize,
    pub(super) windows: Vec<WindowPool>,
}

/// The packed file of layers that do not fit into memory.
pub(super) struct Disk {
    pub(super) packed: Option<PackedFile>,
    /// Its threads compute hashes.
    pub(super) kernels: Arc<Kernels>,
}

impl Disk {
    /// For a rank that holds `layers`.
    ///
    /// # Errors
    /// [`Error::StreamPlace`] without a file.
    fn ring(&mut self, plan: RingPlan, layers: &Range<usize>) -> Result<RingWriter, Error> {
        let packed = self.packed.take().ok_or(Error::StreamPlace)?;
        Ok(RingWriter {
            writer: LayerWriter::new(packed),
            plan,
            kernels: Arc::clone(&self.kernels),
            passing: layers.start + plan.stay..layers.end,
            arrays: Vec::new(),
        })
    }
}

/// Facts of a loaded model.
pub(super) struct Facts {
    pub(super) dtype: Dtype,
    pub(super) weight_bytes: Bytes,
    pub(super) device: String,
    pub(super) notes: Vec<String>,
}

impl Device {
    pub(super) fn open(places: &LibraryPaths, watch: Watch) -> Result<Self, Error> {
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

    pub(super) fn load(
        &mut self,
        source: &Arc<ModelSource>,
        config: &Config,
        shard: &Shard,
        (options, mut disk): (&MlxOptions, Disk),
        progress: impl FnMut(usize, usize),
    ) -> Result<Facts, Error> {
        let names = WeightReader { source, config };
        let tied = names.is_tied()?;
        let dtype = weights::activations(&names, config.family, options.class)?;
        let held = self.admit(&names, shard, options, (tied, dtype))?;
        let ring = match held {
            Held::Ring(plan) => Some(disk.ring(plan, &shard.layers)?),
            Held::Whole | Held::Slots(_) => None,
        };
        let slots = match held {
            Held::Slots(slots) => Some(slots),
            Held::Whole | Held::Ring(_) => None,
        };
        let files = Arc::new(ShardFiles {
            source: Arc::clone(source),
            config: config.clone(),
            shard: shard.clone(),
            dtype,
            by_outputs: options.class == KernelClass::MlxExact,
            slots,
        });
        let loader = files.loader(&self.stream);
        let (weights, weight_bytes) = loader.load(tied, ring, progress)?;
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
    ) -> Result<Held, Error> {
        let size = BatchSize {
            rows: options.rows,
            logit_rows: options.sequences,
            sequences: options.sequences,
            context: options.positions,
        };
        let form = (tied, dtype);
        let cached = (dtype, bits_of(options.kv));
        let whole = MlxRankBytes::of(names, shard, size, (tied, cached))?;
        let whole = whole.capturing((names.config, shard), size.rows, &options.captures);
        // A card has memory of its own: what the process has does not count.
        let own = |limit: MemoryLimit| match self.stream.shares_memory()? {
            true => Ok::<_, Error>(limit.left()),
            false => Ok(limit.bytes()),
        };
        let left = options.memory.map(own).transpose()?;
        let (planned, held) = match (options.memory, left) {
            (Some(limit), Some(left)) => {
                let held = whole.within((names, shard, form), left);
                held.map_err(|error| of_process(error, limit.bytes()))?
            }
            _ => (whole, Held::Whole),
        };
        let MlxRankBytes { weights, step, .. } = planned;
        let cache = |positions| cache_shape(names.config, shard, (size, positions), cached).bytes();
        let needed = |positions| Bytes(weights.0 + cache(positions) + step.0);
        let all = self.stream.available()?;
        let available = left.map_or(all, |left| left.min(all));
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
        self.stream.library().limit(MemoryLimits {
            memory: all, // of this process, for its other models too
            cache: match options.memory {
                Some(_) => step,
                None => Bytes(step.0.max(CACHE_MIN)),
            },
            wired: needed(positions),
        })?;
        Ok(held)
    }

    /// Layers on disk, if there are some.
    pub(super) fn ring(&self) -> Option<&Ring> {
        self.loaded
            .as_ref()
            .and_then(|(weights, _)| weights.ring.as_ref())
    }

    /// Drops a cache once the device has computed the step ahead on it, if there is one. MLX that
    /// computes while its process ends breaks the heap.
    pub(super) fn forget(&mut self, cache: u64) {
        let Some(reserved) = self.caches.remove(&cache) else {
            return;
        };
        if reserved.ahead.is_submitted() {
            let wait = || self.stream.synchronize();
            let _ = self.watch.during_part(1, wait); // nobody reads that step, nor its error
        }
    }

    /// Computes this rank's part of a step; the number of rows of logits.
    pub(super) fn step(
        &mut self,
        model: &MlxModel,
        cache: u64,
        words: &[u32],
        out: &mut RankStep,
    ) -> Result<Option<usize>, Error> {
        let step = |on: &OnDevice<'_>, reserved: &mut Reserved, batch: &Batch<'_>| match model
            .shares_steps()
        {
            true => on.step_of_ranks(reserved, (words, batch), out),
            false => on.step(reserved, (words, batch), out),
        };
        self.with_plan(model, (cache, words, &[]), step)
    }

    /// Computes the step that probably follows the last one, if the ranks are to do so before the
    /// leader announces it.
    pub(super) fn step_ahead(&mut self, model: &MlxModel, cache: u64) {
        let reserved = self.caches.get(&cache);
        let planned = reserved.and_then(|reserved| reserved.ahead.planned());
        let Some((words, unknown)) = planned else {
            return;
        };
        let step = |on: &OnDevice<'_>, reserved: &mut Reserved, batch: &Batch<'_>| {
            on.rank_step(reserved, batch, RankStep::default())
        };
        let step = self.with_plan(model, (cache, &words, &unknown), step);
        let step = step.and_then(|step| step.ok_or(Error::Gone));
        if let Some(reserved) = self.caches.get_mut(&cache) {
            reserved.ahead.computed(step);
        }
    }

    /// Runs `run` with the step of the plan in `words`; `None` for a plan without one. The leader
    /// has not named the pages at the places `unknown` yet.
    fn with_plan<T>(
        &mut self,
        model: &MlxModel,
        (cache, words, unknown): (u64, &[u32], &[usize]),
        run: impl FnOnce(&OnDevice<'_>, &mut Reserved, &Batch<'_>) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let reserved = self.caches.get_mut(&cache).ok_or(Error::Gone)?;
        let loaded = self.loaded.as_ref().ok_or(Error::Gone)?;
        let pages = (reserved.pages, &*reserved.windows);
        let limits = PlanLimits::new(reserved.size, pages, (model.config.vocab, 0));
        let mut named = words.to_vec();
        unknown.iter().for_each(|place| named[*place] = 0);
        let Some(plan) = StepPlan::read(&named, &limits)? else {
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
        run(&on, reserved, &batch).map(Some)
    }
}

/// The model, weights and stream of every step.
struct OnDevice<'a> {
    model: &'a MlxModel,
    loaded: &'a (Weights, Constants),
    stream: &'a Stream,
    watch: &'a Watch,
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
        out: &mut RankStep,
    ) -> Result<usize, Error> {
        let ahead = match reserved.ahead.take(words)? {
            Some(Results::Logits(logits)) => Some(*logits),
            _ => None,
        };
        match &ahead {
            Some(_) => reserved.cache.name_pages(&rows_in_cache(batch)),
            None => reserved.cache.end_lanes_before(UNKNOWN_PAGE),
        }
        let may_begin = reserved.cache.is_in_lanes(&rows_after(batch));
        let next = self.next(reserved, batch, may_begin);
        let is_ahead = ahead.is_some();
        let is_submitted = is_ahead || next.is_some();
        let counters = &self.model.counters;
        counters.steps_ahead.add(u64::from(is_ahead));
        let logits = match ahead {
            Some(logits) => logits,
            None => {
                let mut step = self.graph(reserved, batch, None)?;
                let Some(logits) = step.logits()? else {
                    *out = step.finish(std::mem::take(out))?;
                    return Ok(out.rows);
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
            let results = Results::Logits(Box::new(of_next));
            reserved.ahead.note(&next, &tokens, Some(results));
        }
        let bytes = logits.read(self.stream, &mut out.logits)?;
        logits.read_captured(&mut out.captured)?;
        counters.logit_bytes.add(bytes);
        Ok(batch.logit_rows())
    }

    /// As [`step`](Self::step), of a rank of a tensor split. The step that follows is computed by
    /// [`step_ahead`](Device::step_ahead).
    fn step_of_ranks(
        &self,
        reserved: &mut Reserved,
        (words, batch): (&[u32], &Batch<'_>),
        out: &mut RankStep,
    ) -> Result<usize, Error> {
        *out = match reserved.ahead.take(words)? {
            Some(Results::Ranks(done)) => {
                self.model.counters.steps_ahead.add(1);
                reserved.cache.name_pages(&rows_in_cache(batch));
                done
            }
            _ => {
                reserved.cache.end_lanes_before(UNKNOWN_PAGE);
                self.rank_step(reserved, batch, std::mem::take(out))?
            }
        };
        let next = self.next(reserved, batch, out.may_begin);
        if let (Some(tokens), Some(next)) = (&out.tokens, next) {
            reserved.ahead.note(&next, tokens, None);
        }
        Ok(out.rows)
    }

    /// A step of several ranks, with the memory of `done`.
    fn rank_step(
        &self,
        reserved: &mut Reserved,
        batch: &Batch<'_>,
        done: RankStep,
    ) -> Result<RankStep, Error> {
        self.graph(reserved, batch, None)?.finish(done)
    }

    /// The step that probably follows `batch`. `None` where other stages compute too, and where it
    /// begins a page although that needs [more than lanes](Cache::is_in_lanes). `None` too with a
    /// limit of memory, since making its graph waits for the disk.
    fn next<'b>(
        &self,
        reserved: &Reserved,
        batch: &Batch<'b>,
        may_begin: bool,
    ) -> Option<NextStep<'b>> {
        let is_split = self.model.links.is_some() && !self.model.shares_steps();
        if is_split || self.model.is_limited || reserved.ahead.pauses() {
            return None;
        }
        let next = NextStep::after(batch, &reserved.windows, reserved.size.context)?;
        (may_begin || !next.begins_pages()).then_some(next)
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

/// `error`, of what a limit leaves, as one of the whole limit `given`.
fn of_process(error: Error, given: Bytes) -> Error {
    match error {
        Error::StreamMemory {
            given: left,
            needed,
            units,
        } => Error::StreamMemory {
            given,
            needed: Bytes(needed.0 + given.0.saturating_sub(left.0)),
            units,
        },
        other => other,
    }
}

/// Positions per radian of each pair, for each rope.
pub(super) fn periods(stream: &Stream, ropes: &[Rope]) -> Result<Vec<Array>, Error> {
    let of = |rope: &Rope| {
        let periods: Vec<f32> = rope.frequencies.iter().map(|f| (1.0 / f) as f32).collect();
        Ok(stream.array_f32(&periods, &[periods.len() as i32])?)
    };
    ropes.iter().map(of).collect()
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
