//! Interface of a model for an engine, whatever computes it: the CPU's kernels or MLX.
//!
//! ```text
//! dyn Weights  --reserve(sizes)-->  dyn Compute  --forward(batch)-->  rows of logits
//! loaded once, shared               weights, cache, working memory: owned by one engine
//! ```

use std::fmt;
use std::sync::Arc;

use paceline_base::{Bytes, KernelClass};
use paceline_tensor::{Kernels, KvCache};

use crate::kept::Kept;
use crate::links::STEPS_MAX;
use crate::step::{Batch, BatchSize, Workspace};
use crate::{
    AdapterId, Config, Error, ExpertUses, Followed, KeptPage, Links, Model, PageStore, Shard,
    WindowPool,
};

/// Activations that a rank on MLX has sent to others and received, by how they got out of arrays
/// and into them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Read and written in the arrays' own memory.
    pub in_place: Bytes,
    /// Made f32, or of f32, because another engine may be at the other end.
    pub converted: Bytes,
    /// Copied for the exchange alone.
    pub staged: Bytes,
}

/// A loaded model, or one rank's shard of it.
pub trait Weights: fmt::Debug + Send + Sync {
    /// The shape.
    fn config(&self) -> &Config;

    /// The layers and parts that it holds.
    fn shard(&self) -> &Shard;

    /// The definition of the numbers.
    fn class(&self) -> KernelClass;

    /// The class, and what else decides the numbers where it is not that of the class: results
    /// and snapshots of others differ.
    fn numbers(&self) -> String {
        self.class().to_string()
    }

    /// Bytes of weights that this rank holds, as they lie in memory.
    fn weight_bytes(&self) -> Bytes;

    /// The CPU's kernels, with which tokens are chosen, whatever computes logits.
    fn kernels(&self) -> &Kernels;

    /// The hardware that computes: an instruction set, or a device.
    fn device(&self) -> String;

    /// The groups it was linked with.
    fn links(&self) -> Option<&Arc<Links>>;

    /// The same weights outside of any group; this leaves the group. `None` if something else still
    /// holds them, or this engine has to load them again.
    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn Weights>> {
        None
    }

    /// Unlinked weights, linked with the groups of another epoch; as [`unlinked`](Self::unlinked).
    ///
    /// # Panics
    /// If the groups are not those of its rank and stage.
    fn linked(self: Arc<Self>, links: Links) -> Option<Arc<dyn Weights>> {
        drop(links);
        None
    }

    /// Activations exchanged with other ranks in MLX's arrays.
    fn exchanged(&self) -> Exchanged {
        Exchanged::default()
    }

    /// Adapters beside its weights, in the order of their numbers.
    fn adapters(&self) -> &[AdapterId] {
        &[]
    }

    /// How often the experts of its layers were chosen since it was loaded; none where there are
    /// none, or none are counted.
    fn expert_uses(&self) -> Vec<ExpertUses> {
        Vec::new()
    }

    /// Reserves a cache of `positions` positions and memory for steps of up to `size`.
    ///
    /// # Errors
    /// When the memory cannot be had.
    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error>;
}

/// A model with the memory to compute steps.
///
/// Pages of the cache are numbered from 0, in each kind of layers, and hold
/// [`PAGE`](paceline_tensor::PAGE) positions each. The contents of a page are found again by its
/// number. Full pages may be shared, moved between sequences and overwritten, as the caller says
/// with each batch.
pub trait Compute: fmt::Debug + Send {
    /// Pages of the cache for layers that look at all positions.
    fn pages(&self) -> usize;

    /// Pages for the kinds of layers that let pages go, in the order of
    /// [`BatchSequence::windows`](crate::BatchSequence::windows).
    fn windows(&self) -> &[WindowPool];

    /// Runs one step: writes keys and values of all rows to the cache and keeps the wanted logits
    /// for [`logits_mut`](Self::logits_mut). Returns the number of rows of logits. Of a split
    /// model, the leader calls it; the other ranks [`follow`](Self::follow).
    ///
    /// # Errors
    /// When another rank fails, or what computes; the model cannot go on then.
    ///
    /// # Panics
    /// If the batch exceeds the reserved sizes or a token the vocabulary, or a sequence has fewer
    /// pages than positions: the caller's duty. On a rank that does not lead.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error>;

    /// How many steps may be under way at once: of a pipeline, one for each stage, as far as their
    /// messages have room.
    fn depth(&self) -> usize {
        1
    }

    /// How many steps may be announced and not computed, as far as messages have room: at least the
    /// [`depth`](Self::depth). More keep slow links busy: a step on a link is in no stage.
    fn steps_max(&self) -> usize {
        self.depth()
    }

    /// Tells the other ranks what a later [`forward`](Self::forward) computes, so that stages
    /// before the leader's begin with it. Of several announced steps the first is computed first.
    /// Only where the [`depth`](Self::depth) is more than 1.
    ///
    /// # Errors
    /// [`Error::Comm`] when a rank is gone.
    fn announce(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        let _ = batch;
        Ok(())
    }

    /// Row `i` of the logits that the last step gave, `(vocabulary,)`, in the order of the batch.
    fn logits_mut(&mut self, i: usize) -> &mut [f32];

    /// Tells the other ranks that the leader is alive and has nothing to do. To be called more
    /// often than [`Links::patience`].
    ///
    /// # Errors
    /// [`Error::Comm`] when a rank is gone.
    fn idle(&mut self) -> Result<(), Error>;

    /// Waits for the leader's next step and computes this rank's part of it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Plan`] for a step that does not fit.
    ///
    /// # Panics
    /// If the model is not linked.
    fn follow(&mut self) -> Result<Followed, Error>;

    /// Keeps pages in `store` from now on, as [`keep`](Self::keep) says. An engine that computes
    /// with arrays of its own has no pages to keep and drops it.
    fn attach(&mut self, store: Box<dyn PageStore>) {
        drop(store);
    }

    /// Where pages are kept, if anywhere.
    fn store(&self) -> Option<&dyn PageStore> {
        None
    }

    /// Puts `pages`, at most [`KEPT_MAX`](crate::KEPT_MAX), into the stores of all ranks, each its
    /// part. The leader calls it. Nobody hears of a store that has no room.
    ///
    /// # Errors
    /// [`Error::Comm`] when a rank is gone.
    fn keep(&mut self, pages: &[KeptPage]) -> Result<(), Error> {
        let _ = pages;
        Ok(())
    }

    /// Brings `pages`, at most [`KEPT_MAX`](crate::KEPT_MAX), back into the cache of all ranks. How
    /// many of them, from the first, every rank has; what is in the others is unknown, and they
    /// are forgotten. The leader calls it.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    fn recall(&mut self, pages: &[KeptPage]) -> Result<usize, Error> {
        let _ = pages;
        Ok(0)
    }
}

impl Weights for Model {
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

    fn expert_uses(&self) -> Vec<ExpertUses> {
        self.expert_uses()
    }

    fn unlinked(self: Arc<Self>) -> Option<Arc<dyn Weights>> {
        Some(Arc::new(Arc::into_inner(self)?.unlink()))
    }

    fn linked(self: Arc<Self>, links: Links) -> Option<Arc<dyn Weights>> {
        Some(Arc::new(Arc::into_inner(self)?.link(links)))
    }

    fn reserve(
        self: Arc<Self>,
        size: BatchSize,
        positions: usize,
    ) -> Result<Box<dyn Compute>, Error> {
        self.config().check_context(size.context)?;
        let cache = self.new_cache(size, positions)?;
        Ok(Box::new(OnCpu {
            windows: self.kinds().windows(cache.pool_pages()),
            cache,
            workspace: Workspace::new(&self, size),
            kept: Kept::default(),
            announced: 0,
            model: self,
        }))
    }
}

/// A model on the CPU's kernels.
#[derive(Debug)]
struct OnCpu {
    model: Arc<Model>,
    cache: KvCache,
    windows: Vec<WindowPool>,
    workspace: Workspace,
    kept: Kept,
    /// Steps that were announced and not computed.
    announced: usize,
}

impl Compute for OnCpu {
    fn pages(&self) -> usize {
        self.cache.pages()
    }

    fn windows(&self) -> &[WindowPool] {
        &self.windows
    }

    fn depth(&self) -> usize {
        let stages = self.model.shard().stages.min(STEPS_MAX);
        self.model.links().map_or(1, |_| stages)
    }

    fn steps_max(&self) -> usize {
        match self.depth() {
            1 => 1,
            _ => STEPS_MAX,
        }
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

    fn idle(&mut self) -> Result<(), Error> {
        self.model.idle()
    }

    fn follow(&mut self) -> Result<Followed, Error> {
        let (workspace, kept) = (&mut self.workspace, &mut self.kept);
        self.model.follow_with(workspace, &mut self.cache, kept)
    }

    fn attach(&mut self, store: Box<dyn PageStore>) {
        self.kept = Kept::in_store(store);
    }

    fn store(&self) -> Option<&dyn PageStore> {
        self.kept.store()
    }

    fn keep(&mut self, pages: &[KeptPage]) -> Result<(), Error> {
        self.kept.keep(&self.model, &self.cache, pages)
    }

    fn recall(&mut self, pages: &[KeptPage]) -> Result<usize, Error> {
        self.kept.recall(&self.model, &mut self.cache, pages)
    }
}
