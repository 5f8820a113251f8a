//! A loaded model.

mod sample;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use paceline_base::{Bytes, KernelClass, Rank};
use paceline_tensor::{Kernels, KvCache, KvType, LayerStore, PAGE, Precision};

use crate::adapter::{Adapter, AdapterId, Adapters};
use crate::config;
use crate::kept::Kept;
use crate::links::Links;
use crate::plan::Plan;
use crate::split::{Shard, Split};
use crate::step::halves::{self, HALVES_FROM, Turn, Turns};
use crate::step::{Batch, BatchSequence, BatchSize, Limits, Step, Workspace};
use crate::trace::{Kind, SECOND_HALF, Tracer};
use crate::uses::{ExpertUses, LayerUses};
use crate::weights::{self, AsStored, Layer, Linear, Loader, Names, PerLayerInputs};
use crate::{Config, Error, Kinds, Source, WindowPages};

pub use sample::Sample;

/// How a model is loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// The definition of the numbers.
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
    /// In the first stage, and in all where layers have embeddings of their own.
    embedding: Option<AsStored>,
    /// Where layers have embeddings of their own.
    per_layer: Option<PerLayerInputs>,
    layers: Vec<Layer>,
    uses: Vec<LayerUses>,
    /// Norm and output head, in the last stage.
    head: Option<(Vec<f32>, Linear)>,
    tied: bool,
    adapters: Adapters,
}

/// Result of [`Model::follow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// Computed a step.
    Step,
    /// Heard from the leader that there is nothing to compute, or kept and recalled pages.
    Idle,
}

impl Model {
    /// Packs all weights of `source` for `kernels`; `progress(done, of)` is called after each
    /// layer. Blocks for one pass over the file on all threads.
    ///
    /// # Errors
    /// Names the field or tensor that is missing, of another shape or type. Nothing is kept.
    pub fn load(
        source: &Source,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let config = Config::read(source)?;
        let split = Split::whole(&config);
        Self::load_config(source, config, &split, Rank(0), options, kernels, progress)
    }

    /// As [`load`](Self::load), what `rank` holds in `split` only; to be [`link`](Self::link)ed
    /// with the other ranks before it can compute. Reads only this rank's parts of the file.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    ///
    /// # Panics
    /// If there is no such rank, or the split is of another model.
    pub fn load_shard(
        source: &Source,
        split: &Split,
        rank: Rank,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let config = Config::read(source)?;
        Self::load_config(source, config, split, rank, options, kernels, progress)
    }

    /// As [`load_shard`](Self::load_shard), by a configuration of the caller's instead of the
    /// source's own. It is for a model whose layers differ in ways that no family's files say.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`Error::Layer`] for layers that cannot be computed.
    ///
    /// # Panics
    /// As [`load_shard`](Self::load_shard).
    pub fn load_config(
        source: &Source,
        mut config: Config,
        split: &Split,
        rank: Rank,
        options: LoadOptions,
        kernels: Arc<Kernels>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, Error> {
        if options.class.is_mlx() {
            let (class, engine) = (options.class, "cpu");
            return Err(Error::Class { class, engine });
        }
        if let Some(factors) = weights::rope_factors(source, &config)? {
            config.ropes[0] = config.ropes[0].clone().with_factors(&factors);
        }
        config.check_layers()?;
        let shard = split.shard(&config, rank);
        let loader = Loader {
            names: Names {
                source,
                config: &config,
            },
            config: &config,
            shard: &shard,
            class: options.class,
            pool: kernels.pool(),
            few_experts: false,
        };
        let per_layer = loader.per_layer_inputs()?;
        let embeds = shard.embeds() || per_layer.is_some();
        let embedding = embeds.then(|| loader.embedding()).transpose()?;
        let n = shard.layers.len();
        let mut layers = Vec::new(); // which grows with what the file has, not with what it says
        for i in shard.layers.clone() {
            layers.push(loader.layer(i)?);
            progress(layers.len(), n + 1);
        }
        let tied = loader.names.is_tied()?;
        let head = || Ok::<_, Error>((loader.output_norm()?, loader.output(tied)?));
        let head = shard.has_head().then(head).transpose()?;
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
            layers,
            head,
            tied,
            adapters: Adapters::default(),
            config,
            shard,
        })
    }

    /// Has `adapters` of the same model beside its weights, in the place of others: rows of a batch
    /// choose one by its number. `source` is what it was loaded from. The packed weights stay as
    /// they are. Before memory for steps is reserved.
    ///
    /// # Errors
    /// [`Error::Adapter`] for one that does not fit the model, [`Error::Adapters`] for too many.
    pub fn with_adapters(mut self, source: &Source, adapters: &[Adapter]) -> Result<Self, Error> {
        self.adapters = Adapters::new(source, &self.config, &self.shard, adapters)?;
        Ok(self)
    }

    /// Which adapters it has beside its weights, in the order of their numbers.
    pub fn adapter_ids(&self) -> &[AdapterId] {
        self.adapters.ids()
    }

    /// Its part of adapters.
    pub(crate) const fn adapters(&self) -> &Adapters {
        &self.adapters
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

    /// Leaves the groups that it was linked with; to be linked with others.
    #[must_use]
    pub fn unlink(mut self) -> Self {
        self.links = None;
        self
    }

    /// The groups it was linked with.
    pub const fn links(&self) -> Option<&Arc<Links>> {
        self.links.as_ref()
    }

    /// The layers and parts that it holds.
    pub const fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The shape.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The definition of the numbers.
    pub const fn class(&self) -> KernelClass {
        self.class
    }

    /// Keeps keys and values in another type than the class does. Results with another type carry
    /// no promise of equal bits, as those of another class.
    #[must_use]
    pub const fn with_kv(mut self, kv_type: KvType) -> Self {
        self.kv_type = kv_type;
        self
    }

    /// Class of the numbers, and the type of keys and values where it is not that of the class.
    pub fn numbers(&self) -> String {
        if self.kv_type == KvType::of(self.class) {
            self.class.to_string()
        } else {
            format!("{}, kv {}", self.class, self.kv_type.name())
        }
    }

    /// How finely activations are rounded for quantised weights.
    pub(crate) const fn precision(&self) -> Precision {
        Precision::of(self.class)
    }

    /// The kernels it was packed for.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Bytes of packed weights that this rank holds, and of adapters beside them.
    pub fn weight_bytes(&self) -> Bytes {
        let layers: u64 = self.layers.iter().map(|l| l.bytes().0).sum();
        let head = self.head.as_ref();
        let inputs = self.per_layer.as_ref();
        let layers = layers + inputs.map_or(0, |inputs| inputs.projection.bytes().0);
        let layers = layers + self.adapters.bytes().0;
        Bytes(layers + head.map_or(0, |(_, output)| output.matrix.bytes().0))
    }

    /// Number of weights of the whole model, norms left out.
    pub fn parameters(&self) -> u64 {
        self.config.parameters(self.tied)
    }

    /// # Panics
    /// But in the first stage, or where layers have embeddings of their own.
    pub(crate) const fn embedding(&self) -> &AsStored {
        self.embedding.as_ref().expect("the first stage embeds")
    }

    /// The embeddings of layers, where they have some.
    pub(crate) const fn per_layer(&self) -> Option<&PerLayerInputs> {
        self.per_layer.as_ref()
    }

    /// Norm and output head, in the last stage.
    pub(crate) fn head(&self) -> Option<(&[f32], &Linear)> {
        self.head.as_ref().map(|(norm, output)| (&norm[..], output))
    }

    /// The counters of layer `index` of the model.
    pub(crate) fn uses(&self, index: usize) -> &LayerUses {
        &self.uses[index - self.shard.layers.start]
    }

    /// How often the experts of its layers were chosen since it was loaded: none without experts.
    /// Every rank of a stage counts the same.
    pub fn expert_uses(&self) -> Vec<ExpertUses> {
        let layers = self.shard.layers.clone().zip(&self.uses);
        layers
            .filter_map(|(layer, uses)| uses.told(layer))
            .collect()
    }

    pub(crate) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The kinds of its layers.
    pub const fn kinds(&self) -> &Kinds {
        &self.kinds
    }

    /// A cache for `positions` positions in all, over any number of sequences (each takes whole
    /// pages of [`PAGE`]), in steps of up to `size`. Kinds of layers that let pages go have fewer.
    ///
    /// # Errors
    /// [`Error::Cache`] when the memory cannot be reserved.
    pub fn new_cache(&self, size: BatchSize, positions: usize) -> Result<KvCache, Error> {
        self.cache_of(&self.kinds.pages(size, positions))
    }

    /// As [`new_cache`](Self::new_cache), with as many pages for every kind of layer, so that a
    /// sequence's pages may have the same numbers in all.
    ///
    /// # Errors
    /// [`Error::Cache`] when the memory cannot be reserved.
    pub fn whole_cache(&self, positions: usize) -> Result<KvCache, Error> {
        self.cache_of(&vec![positions.div_ceil(PAGE); self.kinds.len()])
    }

    fn cache_of(&self, pages: &[usize]) -> Result<KvCache, Error> {
        let layers = self.shard.layers.clone();
        let layers = layers.map(|layer| (self.kinds.of(layer), self.store(layer)));
        KvCache::new(&layers.collect::<Vec<_>>(), pages).map_err(Error::Cache)
    }

    /// Cache of a layer of this rank.
    fn store(&self, layer: usize) -> LayerStore {
        let cut = self.shard.layer(layer);
        let heads = (cut.heads.len(), cut.kv_heads.len());
        config::store(&self.config.layers[layer], heads, self.kv_type)
    }

    /// Runs one step: writes keys and values of all rows to `cache` and leaves the wanted logits
    /// in `ws` ([`Workspace::logits_mut`]). Returns the number of rows of logits.
    ///
    /// Of a split model, the leader calls it; the other ranks [`follow`](Self::follow).
    ///
    /// Allocates a few words per layer for the batch's description and nothing per row.
    ///
    /// # Errors
    /// [`Error::Comm`] when another rank fails; the model cannot go on then. One rank alone never
    /// fails.
    ///
    /// # Panics
    /// If the batch exceeds the workspace or a token the vocabulary, or a sequence has fewer
    /// pages than positions: the caller's duty. On a rank that does not lead.
    pub fn forward(
        &self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &mut KvCache,
    ) -> Result<usize, Error> {
        assert!(self.shard.leads(), "{} does not lead", self.shard.rank);
        if let Some(links) = &self.links {
            let words = ws.words_mut();
            Plan::write(batch, words);
            links.announce(words)?;
        }
        self.step(batch, ws, cache)
    }

    /// As [`forward`](Self::forward) of a model that is not split; `behind` is called behind each
    /// layer.
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

    /// Tells the other ranks of a step that [`forward_announced`](Self::forward_announced)
    /// computes, behind so many that were `announced` before.
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
        Plan::write(batch, words);
        links.announce_step(words, announced as u64 + 1)
    }

    /// As [`forward`](Self::forward), of the step that was announced first.
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

    /// Tells the other ranks that the leader is alive and has nothing to do. To be called more
    /// often than [`Links::patience`].
    ///
    /// # Errors
    /// [`Error::Comm`] when a rank is gone.
    pub fn idle(&self) -> Result<(), Error> {
        match &self.links {
            Some(links) => links.announce_idle(),
            None => Ok(()),
        }
    }

    /// Waits for the leader's next step and computes this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Comm`] when another rank fails or the leader is silent for [`Links::patience`];
    /// [`Error::Plan`] for a step that does not fit `ws` and `cache`. The model cannot go on then.
    ///
    /// # Panics
    /// If it is not linked.
    pub fn follow(&self, ws: &mut Workspace, cache: &mut KvCache) -> Result<Followed, Error> {
        self.follow_with(ws, cache, &mut Kept::default())
    }

    /// As [`follow`](Self::follow), with the pages that this rank has `kept`.
    pub(crate) fn follow_with(
        &self,
        ws: &mut Workspace,
        cache: &mut KvCache,
        kept: &mut Kept,
    ) -> Result<Followed, Error> {
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
        kept: &mut Kept,
    ) -> Result<Followed, Error> {
        links.next_plan(self.leader, words)?;
        if kept.obey((links, self.leader), words, cache)? {
            return Ok(Followed::Idle);
        }
        let windows = self.kinds.windows(cache.pool_pages());
        let pages = (cache.pages(), &*windows);
        let numbers = (self.config.vocab, self.adapters.ids().len());
        let limits = Limits::new(ws.size(), pages, numbers);
        let Some(plan) = Plan::read(words, &limits)? else {
            return Ok(Followed::Idle);
        };
        let windows: Vec<WindowPages<'_>> = plan.windows(words).collect();
        let sequences: Vec<BatchSequence<'_>> = plan.batch(words, &windows).collect();
        let batch = Batch {
            sequences: &sequences,
        };
        self.step(&batch, ws, cache).map(|_| Followed::Step)
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
            Some(mut second) if batch.rows() >= HALVES_FROM => {
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

    /// A pass through all layers, of a step or of the half whose turn is `turn`; `behind` is called
    /// behind each layer.
    fn whole<'m>(
        &'m self,
        batch: &Batch<'_>,
        ws: &mut Workspace,
        cache: &Mutex<&'m mut KvCache>,
        (turn, behind): (Option<Turn<'_>>, &mut dyn FnMut()),
    ) -> Result<usize, Error> {
        turn.iter().try_for_each(Turn::begin)?;
        let _half = self.links.as_ref().map(|links| links.progress.half());
        let tracer = self.links.as_ref().map(|links| &links.trace);
        let began = tracer.filter(|_| turn.is_some()).and_then(Tracer::begin);
        let mut step = Step::new(self, batch, ws, cache, turn)?;
        for (index, layer) in self.shard.layers.clone().zip(&self.layers) {
            step.enter(index);
            if let Some(links) = &self.links {
                links.progress.enter(index);
            }
            self.config.family.layer(&mut step, layer, index)?;
            behind();
        }
        let finished = step.finish();
        if let Some(tracer) = tracer {
            tracer.end(began, Kind::Half, batch.rows());
        }
        finished
    }

    /// A step as two, one computed while the sums of the other are exchanged. A half waits for the
    /// other twice as long as that waits for another rank: it is to tell which, and to compute.
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
        let (halves, turns) = (halves::cut(batch), Turns::new(limit));
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
        Ok(first + second)
    }
}
