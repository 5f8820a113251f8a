//! Backend interface between a model and an engine, implemented by the CPU kernels and by MLX.
//!
//! [`Weights`] is a loaded model, which several engines may share. [`Compute`] adds one engine's KV
//! cache and buffers. The engine calls both on one thread; neither knows requests or text.
//!
//! ```text
//! dyn Weights  --reserve(sizes)-->  dyn Compute  --forward(batch)-->  rows of logits
//! loaded once, shared               weights, cache, working memory: owned by one engine
//! ```

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Kernels, KvCache};

use crate::links::STEPS_MAX;
use crate::page_store::PersistentCache;
use crate::step::{Batch, BatchSize, Workspace};
use crate::streaming::{ProcessMemory, Streamer};
use crate::{
    AdapterId, Config, Error, ExpertUses, FollowOutcome, Links, Model, PageStore, PersistedPage,
    Shard, WindowPool,
};

/// Bytes of activations that an MLX rank exchanged with other ranks, by how they were copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangeBytes {
    /// Read and written in place, in the memory of MLX arrays.
    pub in_place: Bytes,
    /// Converted to or from f32, because the other rank may use another backend.
    pub converted: Bytes,
    /// Copied through a staging buffer.
    pub staged: Bytes,
}

/// A loaded model, or one rank's shard of it.
pub trait LoadedModel: fmt::Debug + Send + Sync {
    fn config(&self) -> &Config;

    /// Layers and parts of this rank.
    fn shard(&self) -> &Shard;

    /// Kernel class: it defines the bits of results.
    fn class(&self) -> KernelClass;

    /// The kernel class, and any other property that changes bits. Results and snapshots are
    /// comparable only under equal strings.
    fn numbers(&self) -> String {
        self.class().to_string()
    }

    /// Bytes of this rank's weights in memory.
    fn weight_bytes(&self) -> Bytes;

    /// CPU kernels. Sampling runs on them for every backend.
    fn kernels(&self) -> &Kernels;

    /// Name of the hardware: an instruction set, or a device.
    fn device(&self) -> String;

    /// Groups this model is linked with.
    fn links(&self) -> Option<&Arc<Links>>;

    /// The same weights without their groups. `None` if another reference exists, or if this
    /// backend has to load them again.
    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn LoadedModel>> {
        None
    }

    /// Links the weights with the groups of a new epoch. `None` as in [`unlinked`](Self::unlinked).
    ///
    /// # Panics
    /// If the groups are not those of its rank and stage.
    fn linked(self: Arc<Self>, links: Links) -> Option<Arc<dyn LoadedModel>> {
        drop(links);
        None
    }

    /// Activation bytes exchanged with other ranks through MLX arrays.
    fn exchanged(&self) -> ExchangeBytes {
        ExchangeBytes::default()
    }

    /// Whether the device interrupted this rank's last step because it took too long, so that a
    /// smaller step may succeed.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Loaded adapters, in the order of their numbers.
    fn adapters(&self) -> &[AdapterId] {
        &[]
    }

    /// Layers whose input steps capture, in ascending order; see [`Compute::captured`]. Empty for
    /// backends that capture nothing.
    fn captures(&self) -> &[usize] {
        &[]
    }

    /// How often each expert was routed to since loading. Empty without experts, and for backends
    /// that do not count.
    fn expert_uses(&self) -> Vec<ExpertUses> {
        Vec::new()
    }

    /// Reserves a KV cache of `positions` positions and buffers for steps of up to `size`.
    ///
    /// # Errors
    /// If the allocation fails.
    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error>;
}

/// A model with the KV cache and buffers to compute steps.
///
/// Each kind of layers numbers its cache pages from 0. A page holds [`PAGE`](paceline_tensor::PAGE)
/// positions. The caller maps pages to sequences with each batch: it may share full pages, move
/// them between sequences, and overwrite them.
pub trait Compute: fmt::Debug + Send {
    /// Cache pages for layers that attend to all positions.
    fn pages(&self) -> usize;

    /// Pages of each kind of layers that releases pages, in the order of
    /// [`BatchSequence::windows`](crate::BatchSequence::windows).
    fn windows(&self) -> &[WindowPool];

    /// Runs one step: writes keys and values of all rows to the cache and keeps the requested
    /// logits for [`logits_mut`](Self::logits_mut). Returns the number of rows of logits. The
    /// leader of a split model calls it; the other ranks call [`follow`](Self::follow).
    ///
    /// # Errors
    /// If another rank or the backend fails. The model is unusable afterwards.
    ///
    /// # Panics
    /// If the batch exceeds the reserved sizes, or a token exceeds the vocabulary. If a sequence
    /// has fewer pages than positions, or the rank is not the leader.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error>;

    /// Whether steps draw tokens ([`Logits::Drawn`](crate::Logits::Drawn)).
    fn draws_tokens(&self) -> bool {
        false
    }

    /// Maximum steps that compute at once: one per stage of a pipeline, bounded by message
    /// capacity.
    fn depth(&self) -> usize {
        1
    }

    /// Maximum announced steps that are not computed yet, bounded by message capacity; at least
    /// [`depth`](Self::depth). More than `depth` keep slow links busy, since a step on a link
    /// occupies no stage.
    fn steps_max(&self) -> usize {
        self.depth()
    }

    /// Sends the other ranks the plan of a later [`forward`](Self::forward), so that earlier stages
    /// start it. Announced steps are computed in order. Only valid where [`depth`](Self::depth)
    /// exceeds 1.
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank is gone.
    fn announce(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        let _ = batch;
        Ok(())
    }

    /// Row `i` of the logits that the last step gave, `(vocabulary,)`, in the order of the batch.
    fn logits_mut(&mut self, i: usize) -> &mut [f32];

    /// The residual stream before each [captured](LoadedModel::captures) layer in all rows of the
    /// last step, `(rows, captures, C)`, at the leader.
    fn captured(&self) -> &[f32] {
        &[]
    }

    /// Keepalive: sends the other ranks that the leader has no step. The caller repeats it more
    /// often than [`Links::patience`].
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank is gone.
    fn idle(&mut self) -> Result<(), Error>;

    /// Waits for the leader's next step and computes this rank's part of it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Plan`] for a step that does not fit.
    ///
    /// # Panics
    /// If the model is not linked.
    fn follow(&mut self) -> Result<FollowOutcome, Error>;

    /// Persists KV pages in `store` from now on, see [`persist_pages`](Self::persist_pages). MLX
    /// drops it for layers with states, whose pages it has in another layout.
    fn attach(&mut self, store: Box<dyn PageStore>) {
        drop(store);
    }

    /// Store of persisted KV pages, if any.
    fn store(&self) -> Option<&dyn PageStore> {
        None
    }

    /// Persists `pages`, at most [`KEPT_MAX`](crate::KEPT_MAX), in the stores of all ranks, each
    /// its part. The leader calls it. A full store drops pages without a report.
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank is gone.
    fn persist_pages(&mut self, pages: &[PersistedPage]) -> Result<(), Error> {
        let _ = pages;
        Ok(())
    }

    /// Restores `pages`, at most [`KEPT_MAX`](crate::KEPT_MAX), into the caches of all ranks.
    /// Returns how many of them, from the first, every rank has restored. The contents of the other
    /// pages are undefined, and the stores drop them. The leader calls it.
    ///
    /// # Errors
    /// As [`persist_pages`](Self::persist_pages).
    fn restore_pages(&mut self, pages: &[PersistedPage]) -> Result<usize, Error> {
        let _ = pages;
        Ok(0)
    }
}

/// [`Compute::depth`] of a rank with links.
pub fn depth(shard: &Shard) -> usize {
    shard.stages.min(STEPS_MAX)
}

/// [`Compute::steps_max`] of a rank of this depth.
pub const fn steps_max(depth: usize) -> usize {
    match depth {
        1 => 1,
        _ => STEPS_MAX,
    }
}

impl LoadedModel for Model {
    fn config(&self) -> &Config {
        self.config()
    }

    fn shard(&self) -> &Shard {
        self.shard()
    }

    fn class(&self) -> KernelClass {
        self.class()
    }

    fn numbers(&self) -> String {
        self.numbers()
    }

    fn weight_bytes(&self) -> Bytes {
        self.weight_bytes()
    }

    fn kernels(&self) -> &Kernels {
        self.kernels()
    }

    fn device(&self) -> String {
        self.kernels().instruction_set().name().to_owned()
    }

    fn links(&self) -> Option<&Arc<Links>> {
        self.links()
    }

    fn adapters(&self) -> &[AdapterId] {
        self.adapter_ids()
    }

    fn captures(&self) -> &[usize] {
        self.captures()
    }

    fn expert_uses(&self) -> Vec<ExpertUses> {
        self.expert_uses()
    }

    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn LoadedModel>> {
        // After a failed read, another load writes the packed file again.
        if self.streamer().is_some_and(Streamer::is_failed) {
            return None;
        }
        Some(Arc::new(Arc::into_inner(self)?.unlink()))
    }

    fn linked(self: Arc<Self>, links: Links) -> Option<Arc<dyn LoadedModel>> {
        Some(Arc::new(Arc::into_inner(self)?.link(links)))
    }

    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error> {
        self.config().check_context(size.context)?;
        self.check_token_keys()?;
        let streamer = self.streamer();
        let before = streamer.and_then(|_| ProcessMemory::now());
        let cache = self.new_cache(size, positions)?;
        let workspace = Workspace::new(&self, size);
        streamer.map_or(Ok(()), |streamer| streamer.fit(before, cache.bytes()))?;
        Ok(Box::new(CpuCompute {
            windows: self.kinds().windows(cache.pool_pages()),
            cache,
            workspace,
            kept: PersistentCache::default(),
            announced: 0,
            model: self,
        }))
    }
}

/// The CPU backend.
#[derive(Debug)]
struct CpuCompute {
    model: Arc<Model>,
    cache: KvCache,
    windows: Vec<WindowPool>,
    workspace: Workspace,
    kept: PersistentCache,
    /// Announced steps that are not computed yet.
    announced: usize,
}

impl Compute for CpuCompute {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn windows(&self) -> &[WindowPool] {
        &self.windows
    }

    fn depth(&self) -> usize {
        let model = &self.model;
        model.links().map_or(1, |_| depth(model.shard()))
    }

    fn steps_max(&self) -> usize {
        steps_max(self.depth())
    }

    fn announce(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        let workspace = &mut self.workspace;
        self.model.announce(batch, workspace, self.announced)?;
        self.announced += 1;
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error> {
        let (workspace, cache) = (&mut self.workspace, &mut self.cache);
        if self.announced == 0 {
            return self.model.forward(batch, workspace, cache);
        }
        self.announced -= 1;
        self.model.forward_announced(batch, workspace, cache)
    }

    fn logits_mut(&mut self, i: usize) -> &mut [f32] {
        let vocab = self.model.config().vocab;
        self.workspace.logits_mut(i, vocab)
    }

    fn captured(&self) -> &[f32] {
        self.workspace.captured()
    }

    fn idle(&mut self) -> Result<(), Error> {
        self.model.idle()
    }

    fn follow(&mut self) -> Result<FollowOutcome, Error> {
        let (workspace, kept) = (&mut self.workspace, &mut self.kept);
        self.model.follow_with(workspace, &mut self.cache, kept)
    }

    fn attach(&mut self, store: Box<dyn PageStore>) {
        self.kept = PersistentCache::in_store(store);
    }

    fn store(&self) -> Option<&dyn PageStore> {
        self.kept.store()
    }

    fn persist_pages(&mut self, pages: &[PersistedPage]) -> Result<(), Error> {
        let links = self.model.links().map(Arc::as_ref);
        self.kept.keep(links, &self.cache, pages)
    }

    fn restore_pages(&mut self, pages: &[PersistedPage]) -> Result<usize, Error> {
        let links = self.model.links().map(Arc::as_ref);
        self.kept.recall(links, &mut self.cache, pages)
    }
}
