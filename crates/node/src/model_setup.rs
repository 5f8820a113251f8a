//! Model setup: opens a model, splits it by the user's options, and loads it in this process or in
//! workers.
//!
//! ```text
//! Prepared (files, shape, ways to cut it) --here--> Loaded: an engine in this process
//!        |  forecast: which way first      '--over(crew)--> Loaded: an Instance
//! ```

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass, Rank, lock};
use paceline_comm::Backend;
use paceline_engine::{
    Draft, DraftCounters, DraftCounts, DraftNetwork, Engine, EngineConfig, GenerationRequest,
    Reply, RequestFailure, Runner, Service, Ticket,
};
use paceline_model::trace::{RankTrace, Tracer};
use paceline_model::{
    ADAPTERS_MAX, Config, ExpertUses, ModelSource, NextTokenHead, Split, SplitKind, draft_captures,
    kv_transfer_plan, load_draft_head,
};
use paceline_model_mlx::{MlxPlaces, MlxRankBytes};
use paceline_plan::prefill_offload::PrefillOffload;
use paceline_tensor::{Kernels, KvType};
use paceline_text::tokenizer::Tokenizer;
use tracing::warn;

use crate::classes::Classes;
use crate::forecast::machines::exchanges;
use crate::forecast::{Forecast, Setting, StreamFacts};
use crate::instance::SpeedObserver;
use crate::instance::prefill::{GroupEventSender, group_events};
use crate::instance::rebalancing::lighter;
use crate::prefill::UNDER_WAY_MAX;
use crate::sharding::asked;
use crate::supervisor::ChangeRecord;
use crate::workers::InstanceWorkers;
use crate::{Error, Instance, InstanceConfig, Observer, PlannedSplit, SharedForecast};
use paceline_worker::InstanceTraffic;
use paceline_worker::adapters::{AdapterOf, read_all};
use paceline_worker::load::{PackedPlace, ShardSpec, mlx_rank_bytes};
use paceline_worker::prefill_classes::{UnlikePrefill, page_type};
use paceline_worker::{identity, load_whole, texts};

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
    /// Type of keys and values, if not that of the class; not on MLX.
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
    ///
    /// # Errors
    /// [`Error::MixedStage`].
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
    /// [`PackedEngine`](paceline_model::Error::PackedEngine).
    pub fn keep_packed(&mut self, place: PackedPlace) -> Result<(), Error> {
        if !self.options.classes.on_cpu() {
            return Err(paceline_model::Error::PackedEngine { engine: "mlx" }.into());
        }
        self.packed = Some(place);
        Ok(())
    }

    /// Limits the memory of each machine for its workers, their weights and caches. Weights that do
    /// not fit are read from packed ones on disk while steps compute.
    ///
    /// # Errors
    /// [`Error::Model`] where a node computes on MLX, [`Error::Unlimited`] with a draft model or
    /// prefill nodes.
    pub fn limit_memory(&mut self, memory: Bytes) -> Result<(), Error> {
        if !self.options.classes.on_cpu() {
            return Err(paceline_model::Error::StreamEngine { engine: "mlx" }.into());
        }
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
            let place = (self.split(), Rank(rank), *class);
            let bytes = || mlx_rank_bytes((&self.source, &self.config), place, &self.engine);
            class.is_mlx().then(bytes).transpose()
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
        let setting = self.setting(self.options.probed);
        let forecast = Forecast::new(home, setting, nodes, kernels).ok();
        let forecast = forecast.map(|mut forecast| {
            if let Some(facts) = self.stream() {
                forecast.stream(facts);
            }
            forecast
        });
        self.forecast = forecast.map(|forecast| Arc::new(Mutex::new(forecast)));
        self.steers = nodes > 1 && self.options.kind == SplitKind::Auto;
        let cuts = self.cuts();
        self.cut = cuts[best(&cuts)].clone();
        self.steers &= self.draft.is_none() && !self.follows;
    }

    /// The memory of each rank, all on this machine, and the rate of the disk with the model.
    fn stream(&self) -> Option<StreamFacts> {
        let (Bytes(all), began) = (self.memory?, Instant::now());
        let read = paceline_model::read_sample(&self.packed.as_ref()?.model)?;
        Some(StreamFacts {
            memory: Bytes(all / u64::from(self.options.nodes.max(1))),
            disk: read as f64 / began.elapsed().as_secs_f64(),
        })
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

    /// The possible splits: all if the split is steered, or variants with less for one rank if
    /// shares are rebalanced.
    fn cuts(&self) -> Vec<PlannedSplit> {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let mut cuts = Vec::new();
        if let (true, Some(forecast)) = (self.steers, &forecast) {
            let (nodes, shares) = (self.options.nodes, &self.options.shares);
            cuts.extend(forecast.ways(&self.config, nodes, shares));
            cuts.retain(|cut| self.options.check(&self.config, &cut.split).is_ok());
        }
        if cuts.is_empty() {
            let known = |all: &Forecast| all.predict(&self.config, &self.cut.split).ok();
            let first = PlannedSplit {
                tok_s: forecast.as_deref().and_then(known).or(self.cut.tok_s),
                ..self.cut.clone()
            };
            let shares = &self.options.shares;
            let lighter = self.follows.then(|| lighter(&self.config, &first, shares));
            cuts.push(first);
            cuts.extend(lighter.into_iter().flatten());
            if !self.follows && self.draft.is_none() && self.prompts.is_none() {
                cuts.extend(self.rivals.iter().cloned());
            }
        }
        for cut in &mut cuts {
            if let Some(streamed) = forecast
                .as_ref()
                .and_then(|it| it.streamed(&self.config, cut))
            {
                cut.placement = streamed;
            }
            cut.placement.successors.clone_from(&self.successors);
        }
        cuts
    }

    /// Starts it on the workers of `workers`, one for each node; with `restart` a new epoch follows
    /// a failure. Returns at once: [`Instance::ready`] waits.
    ///
    /// # Errors
    /// [`Error::MixedStage`]; what the system refuses.
    pub fn over(
        &self,
        crew: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        self.begin(crew, restart, observer, None)
    }

    /// As [`over`](Self::over), with the workers of `prompts` as prefill nodes. These are restarted
    /// after any failure; meanwhile the decode nodes answer without them.
    ///
    /// # Errors
    /// As there.
    pub fn over_apart(
        &self,
        crew: Box<dyn InstanceWorkers>,
        prompts: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
    ) -> Result<Instance, Error> {
        let Some(of_prompts) = &self.prompts else {
            return self.over(crew, restart, observer);
        };
        let (here, there, heard) = group_events();
        // The decode instance reports their state.
        let quiet: Observer = Box::new(|_, _| {});
        let prompts = of_prompts.begin(prompts, true, quiet, Some(there))?;
        let instance = self.begin(crew, restart, observer, Some(here))?;
        // An instance that was started before answers even without them.
        let readers = (self.readers(of_prompts), !self.goes_on, self.engine.strict);
        instance.with_prompts(prompts, heard, readers)
    }

    /// The predicted prefill speeds of the decode and prefill ranks, until prompts are measured.
    /// They hold for nodes of one machine, which are measured.
    fn readers(&self, of_prompts: &Self) -> PrefillOffload {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let tok_s = |split: &Split| {
            let seconds = forecast.as_ref()?;
            let seconds = seconds.predict_prompt(&self.config, split, PREDICTED_PROMPT);
            Some(f64::from(PREDICTED_PROMPT) / seconds.ok()?)
        };
        // The forecast is of one class.
        let of_prompts = &of_prompts.cut.split;
        let there = tok_s(of_prompts).filter(|_| self.unlike.is_none());
        let predicted = PrefillOffload::predicted(tok_s(&self.cut.split), there);
        predicted.with_least(self.prompts_from)
    }

    fn begin(
        &self,
        crew: Box<dyn InstanceWorkers>,
        restart: bool,
        observer: Observer,
        hears: Option<GroupEventSender>,
    ) -> Result<Instance, Error> {
        let cuts = self.cuts();
        let first = best(&cuts);
        self.options.check(&self.config, &cuts[first].split)?;
        let spec = InstanceConfig {
            identity: self.identity()?.to_owned(),
            config: self.config.clone(),
            classes: self.options.classes.each().to_vec(),
            threads: self.options.threads,
            kv: self.options.kv,
            memory: self.memory,
            backend: self.options.backend,
            engine: self.engine.clone(),
            cuts,
            first,
            forecast: self.forecast.clone(),
            observer: self.observer.clone(),
            restart,
            spares: self.spares,
            draft: self.draft.as_ref().map(|draft| draft.identity.clone()),
            captures: self.captures(),
            adapters: self.adapters.clone(),
            follows: self.follows,
            goes_on: self.goes_on,
            hears,
            unlike: self.unlike.clone(),
        };
        Instance::begin(spec, crew, observer)
    }

    /// Wraps an instance of this model, ready to answer.
    pub fn loaded(self, instance: Instance) -> ServingModel {
        self.serving(Computing::Crew(instance))
    }

    /// Wraps a service on another machine or process as this model; `device` is its device.
    pub fn elsewhere(self, service: Arc<dyn Service>, device: String) -> ServingModel {
        ServingModel {
            forecast: None,
            ..self.serving(Computing::Elsewhere { service, device })
        }
    }

    fn serving(self, computing: Computing) -> ServingModel {
        ServingModel {
            computing,
            forecast: self.forecast,
            options: self.options,
            engine: self.engine,
            config: self.config,
            split: self.cut.split,
        }
    }

    /// Loads it whole, into this process.
    ///
    /// # Errors
    /// The model cannot be loaded, or MLX is not available for its class.
    pub fn here(
        mut self,
        tokenizer: Arc<Tokenizer>,
        mlx: &MlxPlaces,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<ServingModel, Error> {
        let split = Split::whole(&self.config);
        let wanted = ShardSpec {
            source: &self.source,
            split: &split,
            rank: Rank(0),
            class: self.options.classes.first(),
            kv: self.options.kv,
            engine: &self.engine,
            mlx,
            adapters: &read_all(&self.adapters, &self.config)?,
            captures: &self.captures(),
            packed: self.packed.as_ref(),
            memory: self.memory,
        };
        let model = wanted.load(None, Arc::clone(&kernels), progress)?;
        let (device, weights) = (model.device(), model.weight_bytes());
        let mut engine = Engine::new(model, tokenizer, self.engine.clone())?;
        if let Some(draft) = self.draft.take() {
            let loaded = self.load_draft(&draft, mlx, kernels);
            match loaded {
                Err(error) if Arc::ptr_eq(&draft.source, &self.source) => {
                    warn!(%error, "the model's prediction layer is not used");
                }
                loaded => engine.set_draft_model(&loaded?)?,
            }
        }
        Ok(self.serving(Computing::Here {
            tracer: engine.tracer().clone(),
            guesses: engine.draft_counters().clone(),
            runner: Runner::start(engine, Instant::now),
            weights,
            device,
        }))
    }

    /// Loads a draft on the device of the first rank.
    fn load_draft(
        &self,
        draft: &DraftModel,
        mlx: &MlxPlaces,
        kernels: Arc<Kernels>,
    ) -> Result<Draft, Error> {
        let class = self.options.classes.first();
        let network = match &draft.tokenizer {
            Some(tokenizer) => DraftNetwork::Model {
                model: {
                    let (source, numbers) = (&draft.source, (class, None));
                    load_whole(source, numbers, &self.engine, mlx, kernels, |_, _| {})?
                },
                tokenizer: Arc::clone(tokenizer),
            },
            None => {
                let (head, source) = (&*draft.source, &*self.source);
                DraftNetwork::Head(load_draft_head(head, source, class, kernels)?)
            }
        };
        let now = Instant::now;
        Ok(Draft { network, now })
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

/// Index of the split with the best prediction, the first among equals; the first if nothing is
/// predicted.
fn best(cuts: &[PlannedSplit]) -> usize {
    let speed = |i: usize| cuts[i].tok_s.unwrap_or(0.0);
    (0..cuts.len()).fold(0, |best, i| if speed(i) > speed(best) { i } else { best })
}

/// A model that is ready to answer.
#[derive(Debug)]
pub struct ServingModel {
    computing: Computing,
    forecast: Option<SharedForecast>,
    options: Options,
    engine: EngineConfig,
    config: Config,
    /// The initial split.
    split: Split,
}

#[derive(Debug)]
enum Computing {
    Here {
        tracer: Tracer,
        guesses: DraftCounters,
        runner: Runner,
        weights: Bytes,
        device: String,
    },
    Crew(Instance),
    /// It runs on a node.
    Elsewhere {
        service: Arc<dyn Service>,
        device: String,
    },
}

impl ServingModel {
    /// The service that answers.
    pub fn service(&self) -> &dyn Service {
        match &self.computing {
            Computing::Here { runner, .. } => runner,
            Computing::Crew(instance) => instance,
            Computing::Elsewhere { service, .. } => &**service,
        }
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

    /// The split in use.
    pub fn split(&self) -> &Split {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => &self.split,
            Computing::Crew(instance) => instance.split(),
        }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.split.ranks()
    }

    /// Packed weights of each rank; empty without workers.
    pub fn weights(&self) -> Vec<Bytes> {
        match &self.computing {
            Computing::Here { weights, .. } => vec![*weights],
            Computing::Elsewhere { .. } => Vec::new(),
            Computing::Crew(instance) => {
                let facts = instance.facts();
                facts.iter().map(|rank| Bytes(rank.weight_bytes)).collect()
            }
        }
    }

    /// The instruction set or device of the first rank.
    pub fn device(&self) -> String {
        match &self.computing {
            Computing::Here { device, .. } | Computing::Elsewhere { device, .. } => device.clone(),
            Computing::Crew(instance) => {
                let first = instance.facts().into_iter().next();
                first.map_or_else(String::new, |rank| rank.instruction_set)
            }
        }
    }

    /// Predicted decode tokens a second, corrected by runs before the start; `None` without
    /// measurements.
    pub fn predicted(&self) -> Option<f64> {
        match &self.computing {
            Computing::Elsewhere { .. } => None,
            Computing::Here { .. } => {
                let forecast = lock(self.forecast.as_ref()?);
                forecast.predict(&self.config, &self.split).ok()
            }
            Computing::Crew(instance) => instance.predicted(),
        }
    }

    /// As [`predicted`](Self::predicted) with `keys` in the cache.
    pub fn predicted_at(&self, keys: u32) -> Option<f64> {
        let forecast = lock(self.forecast.as_ref()?);
        forecast.predict_at(&self.config, self.split(), keys).ok()
    }

    /// Stores the decode speed of an answer with `keys` in the cache. Workers are measured in any
    /// case.
    pub fn learn(&self, keys: u32, decode_tok_s: f64) {
        if let (Computing::Here { .. }, Some(forecast)) = (&self.computing, &self.forecast) {
            lock(forecast).learn(&self.config, &self.split, (keys, decode_tok_s));
        }
    }

    /// Changes of the split so far.
    pub fn changes(&self) -> Vec<ChangeRecord> {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => Vec::new(),
            Computing::Crew(instance) => instance.changes(),
        }
    }

    /// Bytes moved by the nodes so far; `None` for one node, or if one does not answer.
    pub fn moved(&self) -> Option<InstanceTraffic> {
        match &self.computing {
            Computing::Here { .. } | Computing::Elsewhere { .. } => None,
            Computing::Crew(instance) => instance.moved(),
        }
    }

    /// Starts a trace on every rank, until [`answer_traces`](Self::traced).
    pub fn trace(&self) {
        match &self.computing {
            Computing::Here { tracer, .. } => tracer.start(),
            Computing::Crew(instance) => instance.trace(),
            Computing::Elsewhere { .. } => {} // `Fleet::trace` does that
        }
    }

    /// Ends a trace; returns the recordings of each rank, in rank order.
    ///
    /// # Errors
    /// As [`Instance::traced`].
    pub fn traced(&self) -> Result<Vec<RankTrace>, Error> {
        match &self.computing {
            Computing::Here { tracer, .. } => Ok(vec![tracer.stop()]),
            Computing::Crew(instance) => instance.traced(),
            Computing::Elsewhere { .. } => Ok(Vec::new()),
        }
    }

    /// Draft tokens verified so far; zero if a node does not answer.
    pub fn guesses(&self) -> DraftCounts {
        match &self.computing {
            Computing::Here { guesses, .. } => guesses.totals(),
            Computing::Crew(instance) => instance.guesses(),
            Computing::Elsewhere { .. } => DraftCounts::default(),
        }
    }

    /// How often the experts of each layer were chosen since the weights were loaded; empty without
    /// experts, or if a node does not answer.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        match &self.computing {
            Computing::Here { runner, .. } => {
                let uses = runner.inspect(|engine| engine.model().expert_uses());
                uses.unwrap_or_default()
            }
            Computing::Crew(instance) => instance.expert_uses(),
            Computing::Elsewhere { .. } => Vec::new(),
        }
    }

    /// Starts an answer.
    ///
    /// # Errors
    /// Refusals before computation starts.
    pub fn submit(&self, request: GenerationRequest) -> Result<ReplyStream<'_>, RequestFailure> {
        let (sender, replies) = channel();
        let sink = Box::new(move |reply| {
            let _ = sender.send((Instant::now(), reply)); // the receiver may be gone
        });
        let service = self.service();
        let ticket = service.submit(request, sink)?;
        Ok(ReplyStream {
            service,
            ticket,
            replies,
        })
    }
}

/// An answer that is being computed. Dropping it stops it.
#[derive(Debug)]
pub struct ReplyStream<'a> {
    service: &'a dyn Service,
    ticket: Ticket,
    replies: Receiver<(Instant, Reply)>,
}

impl ReplyStream<'_> {
    /// Waits for the next reply; returns its arrival time.
    ///
    /// # Errors
    /// [`Failure`] if the answer will not be completed.
    pub fn next(&self) -> Result<(Instant, Reply), RequestFailure> {
        Self::reply(self.replies.recv().ok())
    }

    /// As [`next`](Self::next), for at most `limit`; `None` when no reply came in that time.
    ///
    /// # Errors
    /// As of [`next`](Self::next).
    pub fn next_within(&self, limit: Duration) -> Result<Option<(Instant, Reply)>, RequestFailure> {
        match self.replies.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) => Ok(None),
            other => Self::reply(other.ok()).map(Some),
        }
    }

    fn reply(reply: Option<(Instant, Reply)>) -> Result<(Instant, Reply), RequestFailure> {
        match reply {
            Some((_, Reply::Failed(failure))) => Err(failure),
            Some(reply) => Ok(reply),
            None => Err(RequestFailure::Lost {
                reason: "what computed it ended".to_owned(),
            }),
        }
    }
}

impl Drop for ReplyStream<'_> {
    fn drop(&mut self) {
        self.service.cancel(self.ticket); // does nothing for one that is complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small model over two nodes, and the bytes of its files.
    fn over_two(kind: SplitKind) -> (u64, PreparedModel) {
        prepared("llama-rope3-sharded", KernelClass::Cpu, kind)
    }

    fn prepared(name: &str, class: KernelClass, kind: SplitKind) -> (u64, PreparedModel) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = folder.join("../../tests-data/golden/hf").join(name);
        let source = Arc::new(ModelSource::open(&folder).unwrap());
        let all = source.file_bytes().0;
        let options = Options {
            classes: Classes::same(class, 2),
            threads: 1,
            kv: None,
            nodes: 2,
            kind,
            shares: Vec::new(),
            backend: Backend::Any,
            probed: Backend::Tcp,
        };
        let sizes = |_: &Config| EngineConfig::single("m", 256);
        (all, PreparedModel::new(source, options, sizes).unwrap())
    }

    #[test]
    fn a_prediction_layer_of_the_own_files_is_used_unasked_on_the_cpu() {
        let layer = "glm4moe-bf16-mtp.gguf";
        for (name, (class, drafts), is_used) in [
            (layer, (KernelClass::Cpu, 0), true),
            ("qwen3next-bf16-mtp", (KernelClass::CpuF32, 0), true),
            (layer, (KernelClass::Mlx, 0), false),
            (layer, (KernelClass::Mlx, 3), true),
            ("llama-rope3-sharded", (KernelClass::Cpu, 0), false),
        ] {
            let mut model = prepared(name, class, SplitKind::Pipeline).1;
            model.engine.drafts = drafts;
            let got = model.guess_with_own_layer().unwrap();
            assert_eq!(got, is_used, "{name} {class}");
            assert_eq!(model.has_draft(), is_used);
            assert_eq!(model.engine.drafts > 0, is_used);
        }
    }

    #[test]
    fn each_rank_reads_its_layers_and_ends() {
        let (all, prepared) = over_two(SplitKind::Pipeline);
        let [first, second] = prepared.bytes_by_rank()[..] else {
            panic!("two ranks");
        };
        // All but the headers, whose share is a few hundredths here.
        assert!((all / 20 * 19..all).contains(&(first + second)), "{all}");
        assert!(first.min(second) > all / 4, "{first} {second}");
        let [one, two] = over_two(SplitKind::Tensor).1.bytes_by_rank()[..] else {
            panic!("two ranks");
        };
        assert_eq!(one, two);
        assert!((all / 20 * 9..=all / 2).contains(&one), "{one} of {all}");
    }

    #[test]
    fn a_split_is_left_for_one_with_fewer_exchanges_alone() {
        use SplitKind::{Pipeline, Tensor};
        let rivals = |kind, predicted: &[(SplitKind, f64)]| {
            let mut prepared = over_two(kind).1;
            prepared.steer_among(predicted);
            let cuts = prepared.cuts();
            assert_eq!(best(&cuts), 0, "it begins with its own");
            let others = cuts[1..].iter();
            others
                .map(|cut| cut.split.to_string())
                .collect::<Vec<String>>()
        };
        let both = |tensor, pipeline| [(Tensor, tensor), (Pipeline, pipeline)];
        assert_eq!(rivals(Tensor, &both(20.0, 9.0)), ["pipeline"]);
        assert_eq!(rivals(Pipeline, &both(9.0, 20.0)), [""; 0]);
        assert_eq!(rivals(Tensor, &[(Pipeline, 9.0)]), [""; 0]);
        assert_eq!(rivals(Tensor, &[]), [""; 0]);
    }
}
