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
//! States of recurrent layers and routers are f32 in every class.
//!
//! **Not computed.** Class `cpu` has these, and MLX refuses them by name:
//!
//! | asked for | error | why |
//! |---|---|---|
//! | `mlx-exact` of layers that differ | [`Error::FamilyClass`] | experts' rows share a product |
//! | a memory of n-grams | [`Error::Ngrams`] | its tables are read by row from the file |
//! | an adapter that is not fused | [`Error::AdapterEngine`] | a fused model is as good |
//! | packed weights on disk | [`Error::PackedEngine`] | MLX packs them itself |
//! | storage types that differ within a layer | [`Error::MixedForms`] | experts are one array |
//! | a tensor split within a group of values | [`Error::CutGroup`] | a group has one scale |
//! | quantised latent keys, heads of odd sizes | [`Error::KvEngine`] | groups have 32 elements |
//! | training on a type without a form | [`Error::NoForm`] | gradients need the file's values |
//!
//! For other requests it takes what it has. Answers have no tokens forced at once, since the rows
//! of a step change each other's bits. They have drafts only where a request to load says so. Keys
//! and values have the type of activations, or 8 or 4 bits. Pages of recurrent layers and of
//! quantised keys are computed again, not read from disk.
//!
//! **Memory.** What weights and the full cache will take is known from the file's header and
//! compared with the device before anything is loaded. The cache begins small and grows with the
//! pages in use ([`Cache::grow`]). Sequences have [lanes](cache) in the memory that is left. MLX
//! copies weights from the mapped file: it may write to memory that it uses in place
//! ([`Array::as_bytes`]).

mod ahead;
mod alone;
mod cache;
mod compute;
mod constants;
mod counters;
mod decoding;
mod device;
mod draw;
mod exchange;
mod gates;
mod host;
mod logits;
mod matrix;
mod pages;
mod rank_bytes;
mod step;
mod stored;
mod weights;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_mlx::{Dtype, LibraryPaths};
use paceline_model::backend::PersistentCache;
use paceline_model::{
    BatchSize, Compute, Config, Error, ExchangeBytes, Kinds, Links, LoadedModel as Loaded,
    MemoryLimit, ModelSource, PackedFile, Rope, Shard, Split, StreamCounts, WindowPool,
};
use paceline_tensor::{Kernels, KvType, PAGE};

use ahead::Ahead;
use cache::{Cache, LaneLimits, LayerSizes, Ring, bits_of, check_kv};
use compute::OnMlx;
use counters::Counters;
use device::{Device, Disk, Facts, Reserved, periods};
use exchange::{Receive, Tally};
use rank_bytes::cache_shape;
use step::RankStep;
use weights::Ring as LayerRing;

pub use alone::{MlxForm, MlxMatrix, mlx_dtype};
pub use counters::MlxCounts;
pub use host::{EvaluationLimits, Host, Watch};
pub use paceline_mlx::{LibraryPaths as MlxPlaces, exit};
pub use rank_bytes::{MlxRankBytes, mlx_page_bytes};

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct MlxOptions {
    /// Where the library is.
    pub places: LibraryPaths,
    pub class: KernelClass,
    /// Type of keys and values, if not that of activations: of 8 or 4 bits.
    pub kv: Option<KvType>,
    /// Positions of the caches that will be reserved, to know before loading whether all fits.
    pub positions: usize,
    /// Rows of the largest step.
    pub rows: usize,
    /// Sequences that are computed at the same time: what recurrent states are counted for.
    pub sequences: usize,
    /// Layers whose input steps capture: see
    /// [`Model::with_captures`](paceline_model::Model::with_captures).
    pub captures: Vec<usize>,
    /// Most memory of weights, caches and a step. Experts that do not fit are then read from the
    /// model's files when a router chooses them. Layers of a model without experts, or with biases
    /// of experts, are read from a packed file in each step.
    pub memory: Option<MemoryLimit>,
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
    /// Layers whose input steps capture, in ascending order.
    captures: Vec<usize>,
    links: Option<Arc<Links>>,
    class: KernelClass,
    dtype: Dtype,
    /// Bits of quantised keys and values.
    bits: Option<usize>,
    kernels: Arc<Kernels>,
    weight_bytes: Bytes,
    device: String,
    notes: Vec<String>,
    host: Host<Device>,
    exchanged: Tally,
    counters: Counters,
    /// Whether it has a limit of memory.
    is_limited: bool,
    /// Whether the device interrupted the last step.
    interrupted: AtomicBool,
    /// Numbers caches.
    last_cache: AtomicU64,
}

impl MlxModel {
    /// Loads what `rank` holds in `split`: opens MLX, asks whether it fits, reads the weights.
    /// `progress(done, of)` is called now and then with numbers of layers. `kernels` choose tokens.
    /// Layers beyond a limit of memory are kept in `packed`.
    ///
    /// # Errors
    /// [`Error::Mlx`] when MLX cannot be used, or all is more than the device's memory;
    /// [`Error::StreamMemory`], [`Error::StreamPlace`] and [`Error::Packed`] with a limit;
    /// otherwise as [`Model::load_shard`](paceline_model::Model::load_shard).
    ///
    /// # Panics
    /// If there is no such rank, or the split is of another model.
    pub fn load(
        source: Arc<ModelSource>,
        split: &Split,
        rank: Rank,
        (options, packed): (MlxOptions, Option<PackedFile>),
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
        check_kv(&config, options.kv)?;
        let shard = split.shard(&config, rank);
        let (places, class) = (options.places.clone(), options.class);
        let is_limited = options.memory.is_some();
        let captures = config.captures(&options.captures);
        let bits = bits_of(options.kv);
        let patience = EvaluationLimits {
            limit: options.patience,
            last_words: Some(options.last_words),
            hang_note: options.places.hang_note.clone(),
        };
        let host = Host::start(patience, move |watch| Device::open(&places, watch))?;
        let (told, tell) = channel();
        let job = (config.clone(), shard.clone());
        let disk = Disk {
            packed,
            kernels: Arc::clone(&kernels),
        };
        let load = move |device: &mut Device| {
            let (config, shard) = job;
            let tell = |done, of| {
                let _ = told.send((done, of)); // nobody listens after a hang
            };
            device.load(&source, &config, &shard, (&options, disk), tell)
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
            captures,
            links: None,
            is_limited,
            interrupted: AtomicBool::new(false),
            last_cache: AtomicU64::new(0),
            config,
            shard,
            class,
            dtype,
            bits,
            kernels,
            weight_bytes,
            device,
            notes,
            host,
            exchanged: Tally::default(),
            counters: Counters::default(),
        })
    }

    /// Captures of the layers before `layer`.
    fn captures_before(&self, layer: usize) -> usize {
        self.captures.partition_point(|captured| *captured < layer)
    }

    /// Whether steps capture the rows after the output norm.
    fn captures_last(&self) -> bool {
        self.captures.last() == Some(&self.config.layers.len())
    }

    /// Counts since the model was loaded.
    pub fn counts(&self) -> MlxCounts {
        self.counters.now()
    }

    /// Counts of layers that a limit of memory keeps on disk; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Hung`].
    pub fn stream_counts(&self) -> Result<Option<StreamCounts>, Error> {
        self.host
            .call(|device| device.ring().map(LayerRing::counts), || ())
    }

    /// Notes for its owner, a line each: weights that MLX holds in another form than the file, or a
    /// device that is a test bed. Another says whether gates are compiled.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Lanes of a cache. Class `mlx-exact` has none, since its rows are sequences of their own.
    fn lane_limits(
        &self,
        shape: &cache::Shape,
        (size, windows): (BatchSize, &[WindowPool]),
    ) -> LaneLimits {
        let kinds = Kinds::new(&self.config);
        let layers = || self.shard.layers.clone().zip(&shape.layers);
        let has_rows = |(i, (sizes, _)): (usize, &(LayerSizes, usize))| {
            let is_row = matches!(
                sizes,
                LayerSizes::Rows { .. } | LayerSizes::Latent { .. } | LayerSizes::Pooled(_)
            );
            is_row && kinds.of(i) == 0
        };
        // Latent attention reads the pages that it shares with other layers by sequence.
        let is_latent = self.config.layers.iter().any(|it| it.latent.is_some());
        let ring = |(i, (sizes, _)): (usize, &(LayerSizes, usize))| {
            let kind = kinds.of(i);
            let window = windows.get(kind.checked_sub(1)?)?;
            let back = window.back.min(size.context);
            let has_ring = matches!(sizes, LayerSizes::Rows { .. }) && !is_latent;
            has_ring.then_some(Ring { kind, back })
        };
        // Compressed keys are by sequence, in pages.
        let mut all = self.config.layers.iter();
        let has_entries = all.any(|layer| rank_bytes::compressed_of(layer).is_some());
        LaneLimits {
            layers: layers().map(has_rows).collect(),
            rings: layers().map(ring).collect(),
            lanes: match self.is_exact() || has_entries {
                true => 0,
                false => size.sequences,
            },
            bytes: 0,
        }
    }

    /// Whether every row is computed by itself, and every product whole.
    fn is_exact(&self) -> bool {
        self.class == KernelClass::MlxExact
    }

    /// Whether its ranks exchange tokens and compute the next step before the leader announces it:
    /// those of a tensor split. Each has enough of the vocabulary for [`logits`] to take the
    /// largest logit on the device.
    fn shares_steps(&self) -> bool {
        let links = self.links.as_ref();
        let has_ranks = links.is_some_and(|links| links.stage.size() > 1);
        has_ranks
            && self.shard.stages == 1
            && self.shard.vocab_by_rank().iter().all(|part| part.len() > 2)
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

/// MLX's CPU for a test; without MLX a line says that it is skipped.
#[cfg(test)]
fn test_stream(test: &str) -> Option<paceline_mlx::Stream> {
    let Some(path) = std::env::var_os("PACELINE_MLXC") else {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc");
        return None;
    };
    let library = paceline_mlx::Library::load(path.as_ref()).expect("a library");
    Some(
        library
            .stream(paceline_mlx::DeviceKind::Cpu)
            .expect("a processor"),
    )
}

/// Refuses what MLX does not compute, and what a class does not.
fn refuse(config: &Config, class: KernelClass) -> Result<(), Error> {
    let alike = config.is_uniform() && config.experts().is_none();
    if class == KernelClass::MlxExact && !alike {
        let family = config.family.name();
        return Err(Error::FamilyClass { family, class });
    }
    if config.ngrams.is_some() {
        return Err(Error::Ngrams { engine: "mlx" });
    }
    Ok(())
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

    fn captures(&self) -> &[usize] {
        &self.captures
    }

    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn Loaded>> {
        let mut own = Arc::into_inner(self)?;
        // A device that hangs ends this process soon.
        if own.host.is_hung() {
            return None;
        }
        // After a failed read, another load writes the packed file again.
        let is_failed = |device: &mut Device| device.ring().is_some_and(LayerRing::is_failed);
        if own.is_limited && own.host.call(is_failed, || ()).unwrap_or(true) {
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
        let cached = (self.dtype, self.bits);
        let shape = cache_shape(&self.config, &self.shard, (size, positions), cached);
        let kinds = Kinds::new(&self.config);
        let windows = kinds.windows(kinds.pages(size, positions));
        let (pages, own) = (positions.div_ceil(PAGE), windows.clone());
        let mut lanes = self.lane_limits(&shape, (size, &windows));
        let ropes = self.config.ropes.iter();
        let ropes: Vec<Rope> = ropes.map(|rope| rope.for_context(size.context)).collect();
        let links = self.links.clone();
        let reserve = move |device: &mut Device| {
            let zeros = || Cache::new(&device.stream, &shape);
            let mut cache = device.watch.during_part(1, zeros)?;
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
            done: RankStep::default(),
            announced: 0,
            kept: PersistentCache::default(),
            model: self,
            id,
        }))
    }
}
