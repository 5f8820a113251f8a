//! Model setup: opens a model, splits it by the user's options, and loads it in this process or in
//! workers.
//!
//! ```text
//! Prepared (files, shape, ways to cut it) --here--> Loaded: an engine in this process
//!        |  forecast: which way first      '--over(crew)--> Loaded: an Instance
//! ```

mod rehearsal;
mod serving_model;
mod starting;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_comm::Backend;
use paceline_engine::{Draft, EngineConfig};
use paceline_model::{
    ADAPTERS_MAX, Config, ModelSource, NextTokenHead, Split, SplitKind, draft_captures,
    kv_transfer_plan,
};
use paceline_model_mlx::MlxRankBytes;
use paceline_tensor::{Kernels, KvType};
use paceline_text::tokenizer::Tokenizer;

use crate::classes::Classes;
use crate::forecast::machines::exchanges;
use crate::forecast::{Forecast, Setting, measure_disk};
use crate::instance::SpeedObserver;
use crate::prefill::UNDER_WAY_MAX;
use crate::sharding::asked;
use crate::{Error, PlannedSplit, SharedForecast};
use paceline_worker::adapters::AdapterOf;
use paceline_worker::load::{PackedPlace, mlx_rank_bytes};
use paceline_worker::prefill_classes::{UnlikePrefill, page_type};
use paceline_worker::{identity, texts};
pub use rehearsal::Rehearsal;
pub use serving_model::{ReplyStream, ServingModel};
use starting::best;

/// Default maximum of draft tokens verified in a step. More than eight are rarely all right (a rate
/// of 0.8 each gives 0.17 for all eight).
pub const DRAFTS: usize = 8;

/// Prompt length in tokens for predictions of prefill speed.
const PREDICTED_PROMPT: u32 = 2048;

/// Options of a model's computation.
#[derive(Clone, Debug)]
pub struct Options {
    /// Kernel class of each node: the same within a stage.
    pub classes: Classes,
    /// Threads of each node.
    pub threads: usize,
    /// Type of keys and values, if not that of the class; on MLX of 8 or 4 bits alone.
    pub kv: Option<KvType>,
    pub nodes: u32,
    /// Kind of split: tensor, pipeline or both.
    pub kind: SplitKind,
    /// Relative share of each node; empty for equal shares.
    pub shares: Vec<u32>,
    /// Transport between the nodes.
    pub backend: Backend,
    /// Transport whose cost is measured for predictions.
    pub probed: Backend,
}

/// Nodes that read prompts for the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillOptions {
    pub nodes: u32,
    /// Uncached tokens from which a prompt is read there; `None`: those that are faster there.
    pub from: Option<u32>,
    /// Kernel class, if not that of the others.
    pub class: Option<KernelClass>,
}

impl Options {
    /// Type of keys and values on CPU nodes; `None` if all are on MLX.
    pub fn kv_type(&self) -> Option<KvType> {
        let class = self.classes.each().iter().find(|class| !class.is_mlx())?;
        Some(self.kv.unwrap_or(KvType::of(*class)))
    }

    /// Checks that the nodes of every stage of `split` have one kernel class.
    fn check(&self, config: &Config, split: &Split) -> Result<(), Error> {
        let classes = self.classes.each();
        for (node, class) in (0..).zip(classes) {
            let ranks = split.shard(config, Rank(node)).stage_ranks();
            let (a, b) = (classes[ranks.start as usize], *class);
            if a != b {
                return Err(Error::MixedStage { a, b });
            }
        }
        Ok(())
    }
}

/// A model that was opened and split without errors, and is not loaded yet.
#[derive(Debug)]
pub struct PreparedModel {
    source: Arc<ModelSource>,
    identity: OnceLock<String>,
    config: Config,
    options: Options,
    engine: EngineConfig,
    /// The initial split.
    cut: PlannedSplit,
    /// Nodes that own its instance after this one, in order.
    successors: Vec<usize>,
    forecast: Option<SharedForecast>,
    /// Receives measurements where several machines compute.
    observer: Option<SpeedObserver>,
    /// Whether a split is replaced when another turns out faster.
    steers: bool,
    /// The splits that replace the initial one where it turns out slower, predicted by the caller.
    rivals: Vec<PlannedSplit>,
    /// Time an epoch answers before standbys with a copy of each shard start.
    spares: Option<Duration>,
    /// Whether shares are rebalanced by the ranks' step times.
    follows: bool,
    goes_on: bool,
    draft: Option<DraftModel>,
    adapters: Vec<AdapterOf>,
    /// The same model on its prefill nodes.
    prompts: Option<Box<Self>>,
    /// Offload prompts of at least this many uncached tokens, without a comparison of speeds.
    prompts_from: Option<u32>,
    /// Set where the prefill nodes compute in another class than the others.
    unlike: Option<UnlikePrefill>,
    /// Where this process keeps packed weights.
    packed: Option<PackedPlace>,
    /// Most memory of each machine for workers and their caches.
    memory: Option<Bytes>,
}

/// The draft model of another one.
#[derive(Debug)]
struct DraftModel {
    source: Arc<ModelSource>,
    identity: String,
    /// `None` for a draft head.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Layers whose input a draft head reads.
    captures: Vec<usize>,
}

impl PreparedModel {
    /// Reads the shape and splits the model; `sizes` returns the engine's sizes for that shape.
    ///
    /// # Errors
    /// The model is invalid, or cannot be split like that.
    pub fn new(
        source: Arc<ModelSource>,
        options: Options,
        sizes: impl FnOnce(&Config) -> EngineConfig,
    ) -> Result<Self, Error> {
        let config = Config::read(&source)?;
        let placement = asked(&config, options.kind, options.nodes, &options.shares)?;
        let cut = PlannedSplit::new(&config, placement, None)?;
        Ok(Self {
            engine: sizes(&config),
            source,
            identity: OnceLock::new(),
            config,
            options,
            cut,
            successors: Vec::new(),
            forecast: None,
            observer: None,
            steers: false,
            rivals: Vec::new(),
            spares: None,
            follows: false,
            goes_on: false,
            draft: None,
            adapters: Vec::new(),
            prompts: None,
            prompts_from: None,
            unlike: None,
            packed: None,
            memory: None,
        })
    }

    /// Keeps packed weights on disk when [loaded here](Self::here).
    ///
    /// # Errors
    /// [`PackedEngine`](paceline_model::Error::PackedEngine) on MLX without a limit of memory.
    pub fn keep_packed(&mut self, place: PackedPlace) -> Result<(), Error> {
        if !self.options.classes.on_cpu() && self.memory.is_none() {
            return Err(paceline_model::Error::PackedEngine { engine: "mlx" }.into());
        }
        self.packed = Some(place);
        Ok(())
    }

    /// Limits the memory of each machine for its workers, their weights and caches. Weights that do
    /// not fit are read from packed ones on disk while steps compute.
    ///
    /// # Errors
    /// [`Error::Unlimited`] with a draft model or prefill nodes.
    pub fn limit_memory(&mut self, memory: Bytes) -> Result<(), Error> {
        self.memory = Some(memory);
        self.check_limit()
    }

    /// Checks that nothing is beyond a limit of memory.
    fn check_limit(&self) -> Result<(), Error> {
        let parts = [
            ("prefill nodes", self.prompts.is_some()),
            ("a draft model", self.draft.is_some()),
        ];
        match parts.into_iter().find(|(_, is_there)| *is_there) {
            Some((part, _)) if self.memory.is_some() => Err(Error::Unlimited { part }),
            _ => Ok(()),
        }
    }

    /// Whether packed weights are kept on disk.
    pub const fn keeps_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Adds an adapter, which requests select by `name`. Reads it. The weights are shared by all
    /// adapters.
    ///
    /// # Errors
    /// [`Error::SameAdapter`]; [`Error::AdapterOnMlx`] on MLX; [`Error::Adapter`] for invalid
    /// files, and [`Error::Model`] if it does not fit the model.
    pub fn adapt(&mut self, name: &str, path: &Path) -> Result<(), Error> {
        if !self.options.classes.on_cpu() {
            return Err(Error::AdapterOnMlx);
        }
        if self.adapters.iter().any(|known| known.name == name) {
            let name = name.to_owned();
            return Err(Error::SameAdapter { name });
        }
        let (got, most) = (self.adapters.len() + 1, ADAPTERS_MAX);
        if got > most {
            return Err(paceline_model::Error::Adapters { got, most }.into());
        }
        let adapter = AdapterOf::look(name, path, &self.config)?;
        self.adapters.push(adapter);
        Ok(())
    }

    /// The adapters of the model.
    pub fn adapters(&self) -> &[AdapterOf] {
        &self.adapters
    }

    /// Adds prefill nodes, which transfer KV pages to the decode ranks. Their split is the
    /// planner's default.
    ///
    /// # Errors
    /// - [`Error::MixedPrompts`]; [`Error::PromptsNear`] where answers must be exact.
    /// - [`Error::PromptStates`], [`Error::PromptsQuantised`]: pages that are not converted.
    /// - [`Error::Model`] for layers that cannot be transferred.
    /// - The model cannot be split over that many nodes.
    pub fn read_prompts_on(&mut self, wanted: PrefillOptions) -> Result<(), Error> {
        let nodes = wanted.nodes;
        let classes = (wanted.class, self.options.classes.each());
        let kv = self.options.kv;
        let (reading, unlike) = UnlikePrefill::of(classes, (kv, self.engine.strict), &self.config)?;
        let options = Options {
            classes: Classes::same(reading, nodes),
            kv: kv.filter(|_| !reading.is_mlx()),
            nodes,
            kind: SplitKind::Auto,
            shares: Vec::new(),
            ..self.options.clone()
        };
        let placement = asked(&self.config, options.kind, nodes, &options.shares)?;
        let cut = PlannedSplit::new(&self.config, placement, None)?;
        self.check_handed(&cut.split)?;
        self.identity()?;
        self.prompts_from = wanted.from;
        self.unlike.clone_from(&unlike);
        self.prompts = Some(Box::new(Self {
            source: Arc::clone(&self.source),
            identity: self.identity.clone(),
            config: self.config.clone(),
            options,
            engine: EngineConfig {
                cache_positions: self.engine.context,
                max_running: 1, // so it gives pages away that it has read before
                max_waiting: UNDER_WAY_MAX + 1, // a cancelled one may still be queued
                drafts: 0,
                ..self.engine.clone()
            },
            cut,
            successors: Vec::new(),
            forecast: None,
            observer: None,
            steers: false,
            rivals: Vec::new(),
            spares: None,
            follows: false,
            goes_on: self.goes_on,
            draft: None,
            adapters: Vec::new(),
            prompts: None,
            prompts_from: None,
            unlike,
            packed: None,
            memory: None,
        }));
        self.check_limit()
    }

    /// Checks that every decode rank can get its part of pages from ranks by the split `givers`.
    fn check_handed(&self, givers: &Split) -> Result<(), Error> {
        let kv = self.options.kv;
        let kv = kv.unwrap_or_else(|| page_type(self.options.classes.first()));
        for cut in self.cuts() {
            let takers = &cut.split;
            for to in (0..takers.ranks()).map(Rank) {
                kv_transfer_plan(&self.config, kv, (givers, Rank(0)), (takers, to))?;
            }
        }
        Ok(())
    }

    /// The same model on its prefill nodes, if there are some.
    pub fn prompts(&self) -> Option<&Self> {
        self.prompts.as_deref()
    }

    /// Adds a draft model or head for speculative decoding, which the leader loads whole. The
    /// model's own files stand for its multi-token prediction layer, if they have one. A draft has
    /// up to [`EngineConfig::drafts`] tokens a step, [`DRAFTS`] if that is 0. The initial split is
    /// kept, because speeds then depend on the text. Reads both vocabularies.
    ///
    /// # Errors
    /// [`Error::Engine`] for another vocabulary, and errors of the draft's files.
    pub fn guess_with(&mut self, source: Arc<ModelSource>) -> Result<(), Error> {
        let identity = identity(&source).map_err(|source| Error::System {
            what: "read the draft model's files",
            source,
        })?;
        let is_own = self.identity()? == identity;
        let captures = draft_captures(&source, &self.config, is_own)?;
        let tokenizer = match captures {
            Some(_) => None,
            None => Some(check_draft_model(&source, &self.source)?),
        };
        if self.engine.drafts == 0 {
            self.engine.drafts = DRAFTS;
        }
        self.draft = Some(DraftModel {
            source,
            identity,
            tokenizer,
            captures: captures.unwrap_or_default(),
        });
        self.check_limit()
    }

    /// Uses the multi-token prediction layer of the model's own files, if they have one, without a
    /// limit of memory. On MLX it does so only where drafts were asked for. Returns whether it
    /// does; another draft stays.
    ///
    /// # Errors
    /// As [`guess_with`](Self::guess_with).
    pub fn guess_with_own_layer(&mut self) -> Result<bool, Error> {
        let is_free = self.draft.is_none() && self.memory.is_none();
        let is_wanted = self.options.classes.on_cpu() || self.engine.drafts > 0;
        let is_free = is_free && is_wanted;
        if !is_free || !NextTokenHead::is_in(&self.source, &self.config) {
            return Ok(false);
        }
        self.guess_with(Arc::clone(&self.source))?;
        Ok(true)
    }

    /// Whether it has a draft model or head.
    pub const fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Layers whose input the draft reads.
    fn captures(&self) -> Vec<usize> {
        let draft = self.draft.as_ref();
        draft
            .map(|draft| draft.captures.clone())
            .unwrap_or_default()
    }

    /// The model's files.
    pub const fn source(&self) -> &Arc<ModelSource> {
        &self.source
    }

    /// The identity of the model's files, by [`paceline_worker::identity`]. Computed once, at its
    /// cost.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn identity(&self) -> Result<&str, Error> {
        if let Some(known) = self.identity.get() {
            return Ok(known);
        }
        let found = identity(&self.source).map_err(|source| Error::System {
            what: "read the model's files",
            source,
        })?;
        Ok(self.identity.get_or_init(|| found))
    }

    /// The shape.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The options of its computation.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Sizes of the engine.
    pub const fn engine(&self) -> &EngineConfig {
        &self.engine
    }

    /// The initial split.
    pub const fn split(&self) -> &Split {
        &self.cut.split
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.cut.split.ranks()
    }

    /// Fewest bytes of weights that each rank reads: equal parts of its stage. A matrix that is cut
    /// by columns is read by each rank of the stage.
    pub(crate) fn bytes_by_rank(&self) -> Vec<u64> {
        let bytes = |rank: u32| {
            let shard = self.split().shard(&self.config, Rank(rank));
            let all = self.source.locations(self.config.family, &shard);
            let all: u64 = all.iter().map(|(_, range)| range.len() as u64).sum();
            all / shard.stage_ranks().len().max(1) as u64
        };
        (0..self.nodes()).map(bytes).collect()
    }

    /// Bytes that each rank takes of its device on MLX; `None` on the CPU, whose memory is taken on
    /// use. Reads headers only.
    pub(crate) fn device_bytes(&self) -> Result<Vec<Option<MlxRankBytes>>, Error> {
        let of = |(rank, class): (u32, &KernelClass)| {
            let place = (self.split(), Rank(rank), (*class, self.options.kv));
            let sizes = (&self.engine, &self.captures()[..]);
            let bytes = || mlx_rank_bytes((&self.source, &self.config), place, sizes);
            let bytes = class.is_mlx().then(bytes).transpose()?;
            Ok::<_, paceline_model::Error>(bytes.map(|bytes| bytes.limited(self.memory)))
        };
        let all: Result<_, _> = (0..).zip(self.options.classes.each()).map(of).collect();
        Ok(all?)
    }

    /// Sets the nodes that own its instance after this one, as indices of its nodes.
    pub fn succeed(&mut self, successors: Vec<usize>) {
        self.successors = successors;
    }

    /// The setting of a forecast.
    pub fn setting(&self, backend: Backend) -> Setting<'_> {
        Setting {
            source: &self.source,
            config: &self.config,
            class: self.options.classes.first(),
            threads: self.options.threads,
            backend,
        }
    }

    /// Measures the model's speed on this machine, or loads earlier measurements from `home`. An
    /// automatic split is then chosen by the forecast, and replaced when it turns out slower.
    /// Without measurements nothing changes; a forecast is optional. Only our own kernels are
    /// measured.
    pub fn forecast(&mut self, home: &Path, kernels: impl Fn(usize) -> io::Result<Arc<Kernels>>) {
        let nodes = self.options.nodes;
        if !self.options.classes.on_cpu() {
            return;
        }
        if let Some(packed) = self.packed.as_ref().filter(|_| self.memory.is_some()) {
            measure_disk(home, &packed.model);
        }
        let setting = self.setting(self.options.probed);
        let forecast = Forecast::new(home, setting, nodes, kernels).ok();
        let forecast = forecast.map(|mut forecast| {
            if let Some(memory) = self.memory {
                forecast.stream(memory);
            }
            forecast
        });
        self.forecast = forecast.map(|forecast| Arc::new(Mutex::new(forecast)));
        self.steers = nodes > 1 && self.options.kind == SplitKind::Auto;
        let cuts = self.cuts();
        self.cut = cuts[best(&cuts)].clone();
        self.steers &= self.draft.is_none() && !self.follows;
    }

    /// Replaces the initial split by another of `predicted` where answers show that it is slower.
    /// Each has its decode tokens a second; without the initial split among them nothing changes.
    /// A split with more exchanges is no candidate: slow networks and busy machines make it slower
    /// still, against any prediction. Prefill nodes and draft models fix the split.
    pub fn steer_among(&mut self, predicted: &[(SplitKind, f64)]) {
        let cut = |(kind, tok_s): &(SplitKind, f64)| {
            let (nodes, shares) = (self.options.nodes, &self.options.shares);
            let placement = asked(&self.config, *kind, nodes, shares).ok()?;
            PlannedSplit::new(&self.config, placement, Some(*tok_s)).ok()
        };
        let mut cuts: Vec<PlannedSplit> = predicted.iter().filter_map(cut).collect();
        cuts.retain(|cut| self.options.check(&self.config, &cut.split).is_ok());
        let Some(own) = cuts.iter().position(|cut| cut.split == self.cut.split) else {
            return;
        };
        self.cut = cuts.remove(own);
        cuts.retain(|cut| exchanges(&cut.split) < exchanges(&self.cut.split));
        self.rivals = cuts;
    }

    /// Sends measurements of its ranks to `observer`.
    pub(crate) fn observe(&mut self, observer: SpeedObserver) {
        self.observer = Some(observer);
    }

    /// Keeps the chosen split, even if it turns out slower than another.
    pub const fn stay(&mut self) {
        self.steers = false;
    }

    /// Keeps a standby copy of each shard packed on another machine, if there is one. Starts once
    /// an epoch has answered for `after`. A recovery then needs no loading.
    pub const fn keep_spares(&mut self, after: Duration) {
        self.spares = Some(after);
    }

    /// Restarts its instance after any failure, because it was started before, by another owner.
    pub fn go_on(&mut self) {
        self.goes_on = true;
        if let Some(prompts) = &mut self.prompts {
            prompts.goes_on = true;
        }
    }

    /// Rebalances shares: ranks on busy machines give work to the others while they are slower.
    /// Replaces other changes of the split. Has no effect with one rank or on MLX.
    pub fn follow_use(&mut self) {
        self.follows = self.options.nodes > 1 && self.options.classes.on_cpu();
        self.steers &= !self.follows;
    }
}

/// Checks whether a draft fits a model, and gives the tokenizer of a draft model.
///
/// # Errors
/// [`Error::Engine`] for another vocabulary; errors of its files.
pub(crate) fn check_draft_model(
    draft: &ModelSource,
    model: &ModelSource,
) -> Result<Arc<Tokenizer>, Error> {
    Config::read(draft)?;
    let tokenizer = Arc::new(texts::tokenizer(draft)?);
    Draft::check(&tokenizer, &texts::tokenizer(model)?)?;
    Ok(tokenizer)
}

#[cfg(test)]
mod tests;
