//! A loaded model on the CPU kernels, whole or as one rank's shard.
//!
//! [`Model::forward`] runs a step on the leader, [`Model::follow`] on the other ranks. The engine
//! calls both through [`Compute`](crate::Compute). Layer code is in `families`, buffers are in
//! `step`.

mod sample;
mod token_keys;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_tensor::{
    Kernels, KvCache, KvType, LayerStore, PAGE, PackedMatrix, Precision, memory,
};

use crate::adapter::{Adapter, AdapterId, Adapters};
use crate::config;
use crate::expert_usage::{ExpertUses, LayerUses};
use crate::links::Links;
use crate::packed_file::PackedFile;
use crate::page_store::PersistentCache;
use crate::plan::StepPlan;
use crate::split::{Shard, Split};
use crate::step::halves::{self, HALVES_FROM, HalfSchedule, HalfTurn};
use crate::step::{Batch, BatchSequence, BatchSize, ForwardStep, PlanLimits, Workspace};
use crate::streaming::{MemoryLimit, StreamCounts, StreamUnit, Streamer};
use crate::trace::{Kind, SECOND_HALF, Tracer};
use crate::weights::{
    self, Experts, HeadStreams, LayerShard, Linear, PerLayerInputs, ShardLoader, StoredTensor,
    WeightReader,
};
use crate::{Config, Error, Kinds, ModelSource, WindowPages};

pub use sample::ModelSample;

/// Options of loading a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// Kernel class: it defines the bits of results.
    pub class: KernelClass,
}

/// A model, or one rank's shard of it: packed weights, ready to compute.
#[derive(Debug)]
pub struct Model {
    config: Config,
    shard: Shard,
    leader: Rank,
    links: Option<Arc<Links>>,
    class: KernelClass,
    kv_type: KvType,
    kernels: Arc<Kernels>,
    kinds: Kinds,
    /// In the first stage, and in all stages of models with per-layer embeddings.
    embedding: Option<StoredTensor>,
    /// Per-layer embeddings, if the model has them.
    per_layer: Option<PerLayerInputs>,
    layers: Vec<LayerShard>,
    uses: Vec<LayerUses>,
    /// Norm and output head, in the last stage.
    head: Option<(Vec<f32>, Linear)>,
    head_streams: Option<HeadStreams>,
    /// From the embedding to further residual streams, in the first stage.
    first_streams: Vec<PackedMatrix>,
    /// Keys of all tokens, where a memory of n-grams is of these.
    token_keys: Option<Vec<u32>>,
    tied: bool,
    adapters: Adapters,
    /// Layers whose input steps capture, in ascending order.
    captures: Vec<usize>,
    /// Reads the weights that are not in memory, where some are not.
    streamer: Option<Streamer>,
}

/// Result of [`Model::follow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowOutcome {
    Step,
    /// The leader had no step, or persisted or restored pages.
    Idle,
}

impl Model {
    /// Packs all weights of `source` for `kernels`; `progress(done, of)` is called after each
    /// layer. Blocks for one pass over the file on all threads.
    ///
    /// # Errors
    /// Names the field or tensor that is missing, or has another shape or type.
    pub fn load(
        source: &ModelSource,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let config = Config::read(source)?;
        let split = Split::whole(&config);
        Self::load_config(source, config, &split, Rank(0), options, kernels, progress)
    }

    /// Loads only the part of `rank` in `split`, and reads only that part of the file. The shard
    /// must be [`link`](Self::link)ed with the other ranks before it computes.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Panics
    /// If there is no such rank, or the split is of another model.
    pub fn load_shard(
        source: &ModelSource,
        split: &Split,
        rank: Rank,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let config = Config::read(source)?;
        Self::load_config(source, config, split, rank, options, kernels, progress)
    }

    /// As [`load_shard`](Self::load_shard), with the caller's configuration instead of the
    /// source's. For a model whose layers differ in ways that no family's files describe.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`Error::Layer`] for layers that cannot be computed.
    ///
    /// # Panics
    /// As [`load_shard`](Self::load_shard).
    pub fn load_config(
        source: &ModelSource,
        config: Config,
        split: &Split,
        rank: Rank,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let part = (split, rank);
        Self::load_part(source, config, part, (options, None), kernels, progress)
    }

    /// As [`load_shard`](Self::load_shard), with the weights of `packed` where they are there, and
    /// written to it where not.
    ///
    /// # Errors
    /// As [`load`](Self::load). Those of `packed` are in [`PackedFile::take_fault`].
    ///
    /// # Panics
    /// As [`load_shard`](Self::load_shard).
    pub fn load_packed(
        source: &ModelSource,
        part: (&Split, Rank),
        (options, packed): (LoadOptions, &PackedFile),
        kernels: Arc<Kernels>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        loop {
            let (config, options) = (Config::read(source)?, (options, Some(packed)));
            let kernels = Arc::clone(&kernels);
            let model = Self::load_part(source, config, part, options, kernels, &mut progress)?;
            if packed.finish() {
                return Ok(model);
            }
        }
    }

    /// As [`load_packed`](Self::load_packed), within `limit`. Layers and experts are read from
    /// `packed` while steps compute, and stay in memory as far as the limit allows; the bits are
    /// the same. Memory for steps must be [reserved](crate::LoadedModel::reserve) before a step.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`Error::Packed`] where `packed` cannot be written or read,
    /// [`Error::StreamMemory`] if units do not fit, [`Error::Streaming`].
    ///
    /// # Panics
    /// As [`load_shard`](Self::load_shard).
    pub fn load_streamed(
        source: &ModelSource,
        part: (&Split, Rank),
        (options, packed): (LoadOptions, PackedFile),
        limit: MemoryLimit,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        memory::use_huge_pages(false);
        let (config, packed) = (Config::read(source)?, packed.streamed());
        let options = (options, Some(&packed));
        let loaded = Self::load_part(source, config, part, options, kernels, progress);
        memory::use_huge_pages(true);
        let mut model = loaded?;
        let _ = packed.finish(); // what failed is its fault
        if let Some(fault) = packed.take_fault() {
            return Err(fault.into());
        }
        let streamer = Streamer::new(packed.take_streamed(), limit)?;
        if matches!(limit, MemoryLimit::Units(_)) {
            streamer.fit(None, Bytes(0))?;
        }
        model.streamer = Some(streamer);
        Ok(model)
    }

    /// Counts of streamed weights so far; `None` if all weights are in memory.
    pub fn stream_counts(&self) -> Option<StreamCounts> {
        self.streamer.as_ref().map(Streamer::counts)
    }

    /// The experts of the layer behind `index` and the norm before them, if this rank has them and
    /// the residual alone decides which are chosen.
    pub(crate) fn next_experts(&self, index: usize) -> Option<(&Experts, &[f32])> {
        let layer = self.layers.get(index + 1 - self.shard.layers.start)?;
        let experts = layer.feed_forward.experts()?;
        let is_plain = self.config.streams.is_none() && experts.router_norm.is_none();
        let norm = layer.ffn_norm.as_deref().filter(|_| is_plain)?;
        Some((experts, norm))
    }

    pub(crate) const fn streamer(&self) -> Option<&Streamer> {
        self.streamer.as_ref()
    }

    fn load_part(
        source: &ModelSource,
        mut config: Config,
        (split, rank): (&Split, Rank),
        (options, packed): (LoadOptions, Option<&PackedFile>),
        kernels: Arc<Kernels>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        if options.class.is_mlx() {
            let (class, engine) = (options.class, "cpu");
            return Err(Error::Class { class, engine });
        }
        weights::read_rope_factors(source, &mut config)?;
        config.check_layers()?;
        let shard = split.shard(&config, rank);
        let loader = ShardLoader {
            names: WeightReader {
                source,
                config: &config,
            },
            config: &config,
            shard: &shard,
            class: options.class,
            pool: kernels.pool(),
            few_experts: false,
            packed,
        };
        let per_layer = loader.per_layer_inputs()?;
        let embeds = shard.embeds() || per_layer.is_some();
        let embedding = embeds.then(|| loader.embedding()).transpose()?;
        let n = shard.layers.len();
        let mut layers = Vec::new(); // grows with the contents, not the claimed count
        for i in shard.layers.clone() {
            layers.push(loader.layer(i)?);
            if let Some(fault) = packed.and_then(PackedFile::streaming_fault) {
                return Err(fault.into());
            }
            progress(layers.len(), n + 1);
        }
        let tied = loader.names.is_tied()?;
        let head = || Ok::<_, Error>((loader.output_norm()?, loader.output(tied)?));
        let head = shard.has_head().then(head).transpose()?;
        let head_streams = head.as_ref().map(|_| loader.head_streams());
        let head_streams = head_streams.transpose()?.flatten();
        let first_streams = loader.first_streams()?;
        progress(n + 1, n + 1);
        Ok(Self {
            leader: split.leader(),
            links: None,
            class: options.class,
            kv_type: KvType::of(options.class),
            kinds: Kinds::new(&config),
            uses: LayerUses::of(&config, shard.layers.clone()),
            embedding,
            per_layer,
            kernels,
            first_streams,
            token_keys: None,
            layers,
            head_streams,
            head,
            tied,
            adapters: Adapters::default(),
            captures: Vec::new(),
            streamer: None,
            config,
            shard,
        })
    }

    /// Replaces the loaded adapters with `adapters` for the same model. Each sequence of a batch
    /// selects one by number. `source` is the model's source. The packed weights stay unchanged.
    /// Call it before memory for steps is reserved.
    ///
    /// # Errors
    /// [`Error::Adapter`] for one that does not fit the model, [`Error::Adapters`] for too many.
    pub fn with_adapters(
        mut self,
        source: &ModelSource,
        adapters: &[Adapter],
    ) -> Result<Self, Error> {
        self.adapters = Adapters::new(source, &self.config, &self.shard, adapters)?;
        Ok(self)
    }

    /// Captures the input of these layers in each step, in ascending order. As many as there are
    /// layers stands for the residual stream after the output norm. All ranks of a split
    /// model capture the same layers. Each capture adds as many bytes to the residual stream
    /// between stages as the stream itself has. Call it before memory for steps is reserved.
    #[must_use]
    pub fn with_captures(mut self, layers: &[usize]) -> Self {
        self.captures = self.config.captures(layers);
        self
    }

    /// The layers of [`with_captures`](Self::with_captures).
    pub fn captures(&self) -> &[usize] {
        &self.captures
    }

    /// Loaded adapters, in the order of their numbers.
    pub fn adapter_ids(&self) -> &[AdapterId] {
        self.adapters.ids()
    }

    pub(crate) const fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    /// Links this shard with those of the other ranks.
    ///
    /// # Panics
    /// If the groups are not those of its rank and stage.
    #[must_use]
    pub fn link(mut self, links: Links) -> Self {
        links.check(&self.shard);
        self.links = Some(Arc::new(links));
        self
    }

    /// Drops the groups, so that it can be linked with others.
    #[must_use]
    pub fn unlink(mut self) -> Self {
        self.links = None;
        self
    }

    pub const fn links(&self) -> Option<&Arc<Links>> {
        self.links.as_ref()
    }

    pub const fn shard(&self) -> &Shard {
        &self.shard
    }

    pub const fn config(&self) -> &Config {
        &self.config
    }

    pub const fn class(&self) -> KernelClass {
        self.class
    }

    /// Stores keys and values in another type than the class does. Bits then differ from results
    /// with other types, as between classes.
    #[must_use]
    pub const fn with_kv(mut self, kv_type: KvType) -> Self {
        self.kv_type = kv_type;
        self
    }

    /// The kernel class, and the KV type if it is not the class's.
    pub fn numbers(&self) -> String {
        if self.kv_type == KvType::of(self.class) {
            self.class.to_string()
        } else {
            format!("{}, kv {}", self.class, self.kv_type.name())
        }
    }

    /// Rounding of activations for quantised weights.
    pub(crate) const fn precision(&self) -> Precision {
        Precision::of(self.class)
    }

    /// The kernels that the weights are packed for.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Bytes of this rank's packed weights and adapters.
    pub fn weight_bytes(&self) -> Bytes {
        let layers: u64 = self.layers.iter().map(|l| l.bytes().0).sum();
        let head = self.head.as_ref();
        let inputs = self.per_layer.as_ref();
        let layers = layers + inputs.map_or(0, |inputs| inputs.projection.bytes().0);
        let layers = layers + self.adapters.bytes().0;
        let mix = self.head_streams.as_ref().map_or(0, HeadStreams::bytes);
        let first = self.first_streams.iter().map(|matrix| matrix.bytes().0);
        let head = head.map_or(0, |(_, output)| output.matrix.bytes().0);
        Bytes(layers + mix + first.sum::<u64>() + head)
    }

    /// Number of weights of the whole model, without norms.
    pub fn parameters(&self) -> u64 {
        self.config.parameters(self.tied)
    }

    /// # Panics
    /// Outside the first stage, unless the model has per-layer embeddings.
    pub(crate) const fn embedding(&self) -> &StoredTensor {
        self.embedding.as_ref().expect("the first stage embeds")
    }

    /// Per-layer embeddings, if the model has them.
    pub(crate) const fn per_layer(&self) -> Option<&PerLayerInputs> {
        self.per_layer.as_ref()
    }

    /// The residual streams before the output head, in the last stage.
    pub(crate) const fn head_streams(&self) -> Option<&HeadStreams> {
        self.head_streams.as_ref()
    }

    /// Matrices from the embedding to each stream but the first, where these differ.
    pub(crate) fn first_streams(&self) -> &[PackedMatrix] {
        &self.first_streams
    }

    /// Norm and output head, in the last stage.
    pub(crate) fn head(&self) -> Option<(&[f32], &Linear)> {
        self.head.as_ref().map(|(norm, output)| (&norm[..], output))
    }

    /// The counters of layer `index` of the model.
    pub(crate) fn uses(&self, index: usize) -> &LayerUses {
        &self.uses[index - self.shard.layers.start]
    }

    /// How often each expert was routed to since loading; empty without experts. Every rank of a
    /// stage has the same counts.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        let layers = self.shard.layers.clone().zip(&self.uses);
        layers
            .filter_map(|(layer, uses)| uses.counts(layer))
            .collect()
    }

    pub(crate) fn layers(&self) -> &[LayerShard] {
        &self.layers
    }

    pub const fn kinds(&self) -> &Kinds {
        &self.kinds
    }

    /// A cache of `positions` positions in total, over any number of sequences, for steps of up to
    /// `size`. Each sequence takes whole pages of [`PAGE`]. Kinds of layers that release pages have
    /// fewer.
    ///
    /// # Errors
    /// [`Error::Cache`] if the memory cannot be reserved.
    pub fn new_cache(&self, size: BatchSize, positions: usize) -> Result<KvCache, Error> {
        self.cache_of(&self.kinds.pages(size, positions))
    }

    /// As [`new_cache`](Self::new_cache), with equally many pages for every kind of layers, so that
    /// a sequence can use the same page numbers in all.
    ///
    /// # Errors
    /// [`Error::Cache`] if the memory cannot be reserved.
    pub fn whole_cache(&self, positions: usize) -> Result<KvCache, Error> {
        self.cache_of(&vec![positions.div_ceil(PAGE); self.kinds.len()])
    }

    fn cache_of(&self, pages: &[usize]) -> Result<KvCache, Error> {
        let layers = self.shard.layers.clone();
        let layers = layers.map(|layer| (self.kinds.of(layer), self.store(layer)));
        let entries = self.shard.layers.clone().map(|layer| {
            let heads = self.shard.layer(layer).kv_heads.len();
            (0, config::entries(&self.config.layers[layer], heads))
        });
        let ngrams = self.shard.layers.clone();
        let ngrams = ngrams.map(|layer| (self.kinds.of(layer), self.config.ngram_store(layer)));
        let layers: Vec<_> = layers.chain(entries).chain(ngrams).collect();
        KvCache::new(&layers, pages).map_err(Error::Cache)
    }

    /// Cache of a layer of this rank.
    pub(crate) fn store(&self, layer: usize) -> LayerStore {
        let cut = self.shard.layer(layer);
        let heads = (cut.heads.len(), cut.kv_heads.len());
        config::store(&self.config.layers[layer], heads, self.kv_type)
    }

    /// Runs one step: writes keys and values of all rows to `cache` and leaves the requested logits
    /// in `ws` ([`Workspace::logits_mut`]). Returns the number of rows of logits.
    ///
    /// The leader of a split model calls it; the other ranks call [`follow`](Self::follow).
    ///
    /// Allocates a few words per layer for the batch's description and nothing per row.
    ///
    /// # Errors
    /// [`Error::Comm`] if another rank fails; the model is unusable afterwards. A single rank never
    /// fails.
    ///
    /// # Panics
    /// If the batch exceeds the workspace, a token exceeds the vocabulary, a sequence has fewer
    /// pages than positions, or the rank is not the leader.
    pub fn forward(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &mut KvCache,
    ) -> Result<usize, Error> {
        assert!(self.shard.leads(), "{} does not lead", self.shard.rank);
        if let Some(links) = &self.links {
            let words = ws.words_mut();
            StepPlan::write(batch, words);
            links.announce(words)?;
        }
        self.step(batch, ws, cache)
    }

    /// As [`forward`](Self::forward) of a model that is not split, with a call of `behind` after
    /// each layer.
    ///
    /// # Errors
    /// None: the type is that of all steps.
    ///
    /// # Panics
    /// As there; if the model is split.
    pub fn forward_observed(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &mut KvCache,
        behind: &mut dyn FnMut(),
    ) -> Result<usize, Error> {
        assert!(self.links.is_none(), "a split model is observed");
        let cache = Mutex::new(&mut *cache);
        self.whole(batch, ws, &cache, (None, behind))
    }

    /// Sends the other ranks the plan of a step for [`forward_announced`](Self::forward_announced),
    /// after `announced` earlier ones.
    pub(crate) fn announce(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        announced: usize,
    ) -> Result<(), Error> {
        let Some(links) = &self.links else {
            return Ok(());
        };
        let words = ws.words_mut();
        StepPlan::write(batch, words);
        links.announce_step(words, announced as u64 + 1)
    }

    /// As [`forward`](Self::forward), for the oldest announced step.
    pub(crate) fn forward_announced(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &mut KvCache,
    ) -> Result<usize, Error> {
        assert!(self.shard.leads(), "{} does not lead", self.shard.rank);
        if let Some(links) = &self.links {
            links.trace.next_step();
        }
        self.step(batch, ws, cache)
    }

    /// Keepalive: sends the other ranks that the leader has no step. The caller repeats it more
    /// often than [`Links::patience`].
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank is gone.
    pub fn idle(&self) -> Result<(), Error> {
        match &self.links {
            Some(links) => links.announce_idle(),
            None => Ok(()),
        }
    }

    /// Waits for the leader's next step and computes this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Comm`] if another rank fails or the leader is silent for [`Links::patience`];
    /// [`Error::Plan`] for a step that does not fit `ws` and `cache`. The model is unusable
    /// afterwards.
    ///
    /// # Panics
    /// If it is not linked.
    pub fn follow(&self, ws: &mut Workspace, cache: &mut KvCache) -> Result<FollowOutcome, Error> {
        self.follow_with(ws, cache, &mut PersistentCache::default())
    }

    /// As [`follow`](Self::follow), with this rank's store of persisted pages.
    pub(crate) fn follow_with(
        &self,
        ws: &mut Workspace,
        cache: &mut KvCache,
        kept: &mut PersistentCache,
    ) -> Result<FollowOutcome, Error> {
        let links = self.links.as_ref().expect("a follower is linked");
        let mut words = std::mem::take(ws.words_mut());
        let followed = self.follow_plan(links, &mut words, (&mut *ws, cache), kept);
        *ws.words_mut() = words;
        followed
    }

    fn follow_plan(
        &self,
        links: &Links,
        words: &mut Vec<u32>,
        (ws, cache): (&mut Workspace, &mut KvCache),
        kept: &mut PersistentCache,
    ) -> Result<FollowOutcome, Error> {
        links.next_plan(self.leader, words)?;
        if kept.handle_message((links, self.leader), words, cache)? {
            return Ok(FollowOutcome::Idle);
        }
        let windows = self.kinds.windows(cache.pool_pages());
        let pages = (cache.pages(), &*windows);
        let numbers = (self.config.vocab, self.adapters.ids().len());
        let limits = PlanLimits::new(ws.size(), pages, numbers);
        let Some(plan) = StepPlan::read(words, &limits)? else {
            return Ok(FollowOutcome::Idle);
        };
        let windows: Vec<WindowPages<'_>> = plan.windows(words).collect();
        let sequences: Vec<BatchSequence<'_>> = plan.batch(words, &windows).collect();
        let batch = Batch {
            sequences: &sequences,
        };
        self.step(&batch, ws, cache).map(|_| FollowOutcome::Step)
    }

    fn step(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &mut KvCache,
    ) -> Result<usize, Error> {
        let cache = Mutex::new(&mut *cache);
        let progress = self.links.as_ref().map(|links| &links.progress);
        let _step = progress.map(|it| it.step(batch.rows(), self.layers.len()));
        match ws.second.take() {
            // Halves are in different layers, so that a streamed model has none.
            Some(mut second) if batch.rows() >= HALVES_FROM && self.streamer.is_none() => {
                let rows = self.halves(batch, [ws, &mut second], &cache);
                ws.second = Some(second);
                rows
            }
            second => {
                ws.second = second;
                self.whole(batch, ws, &cache, (None, &mut || {}))
            }
        }
    }

    /// Runs all layers for a step, or for one half of it with its `turn`. Calls `behind` after each
    /// layer.
    fn whole<'m>(
        &'m self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &Mutex<&'m mut KvCache>,
        (turn, behind): (Option<HalfTurn<'_>>, &mut dyn FnMut()),
    ) -> Result<usize, Error> {
        turn.iter().try_for_each(HalfTurn::begin)?;
        let _half = self.links.as_ref().map(|links| links.progress.half());
        let tracer = self.links.as_ref().map(|links| &links.trace);
        let began = tracer.filter(|_| turn.is_some()).and_then(Tracer::begin);
        let mut step = ForwardStep::new(self, batch, ws, cache, turn)?;
        for (index, layer) in self.shard.layers.clone().zip(&self.layers) {
            step.enter(index);
            step.capture();
            if let Some(streamer) = &self.streamer {
                streamer.enter(index)?;
            }
            if let Some(links) = &self.links {
                links.progress.enter(index);
            }
            self.config.family.layer(&mut step, layer, index)?;
            if let Some(streamer) = &self.streamer {
                streamer.leave(StreamUnit::Layer(index));
            }
            behind();
        }
        let finished = step.finish();
        if let Some(tracer) = tracer {
            tracer.end(began, Kind::Half, batch.rows());
        }
        finished
    }

    /// Runs a step as two halves: one computes while the sums of the other are exchanged. A half
    /// waits for the other for twice the peer timeout, so that the peer's error, which names the
    /// rank, comes first.
    fn halves<'m>(
        &'m self,
        batch: &Batch<'_>,
        [ws, second_ws]: [&mut Workspace; 2],
        cache: &Mutex<&'m mut KvCache>,
    ) -> Result<usize, Error> {
        let limit = self
            .links
            .as_ref()
            .map_or(Duration::MAX, |links| links.patience.saturating_mul(2));
        let (halves, turns) = (halves::cut(batch), HalfSchedule::new(limit));
        let [first, second] = halves.each_ref().map(|sequences| Batch { sequences });
        let [turn, second_turn] = turns.both();
        let (first, second) = thread::scope(|scope| {
            let run = || self.whole(&second, second_ws, cache, (Some(second_turn), &mut || {}));
            let thread = thread::Builder::new().name(SECOND_HALF.into());
            let thread = thread.spawn_scoped(scope, run).map_err(Error::Thread)?;
            let first = self.whole(&first, ws, cache, (Some(turn), &mut || {}));
            let second = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok::<_, Error>((first?, second?))
        })?;
        ws.take_logits(first, second_ws, second);
        ws.take_captured(second_ws);
        Ok(first + second)
    }
}
