//! A model on MLX with a cache, as the caller's thread sees it: each call is a job of the thread
//! `mlx`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use paceline_model::backend::{PersistentCache, StepPlan, depth, steps_max};
use paceline_model::{
    Batch, Compute, Error, FollowOutcome, LayerShape, PageStore, PersistedPage, WindowPool,
};

use super::MlxModel;
use super::device::Device;
use super::pages::DevicePages;
use super::rank_bytes::compressed_of;
use super::step::RankStep;

/// A model on MLX with a cache.
#[derive(Debug)]
pub(super) struct OnMlx {
    pub(super) model: Arc<MlxModel>,
    pub(super) id: u64,
    pub(super) pages: usize,
    pub(super) windows: Vec<WindowPool>,
    /// The plan of the step.
    pub(super) words: Vec<u32>,
    /// Results of the last step; at the leader.
    pub(super) done: RankStep,
    /// Announced steps that are not computed yet.
    pub(super) announced: u64,
    pub(super) kept: PersistentCache,
}

impl OnMlx {
    /// Has the plan in `words` computed.
    fn step(&mut self) -> Result<Option<usize>, Error> {
        let (model, id) = (Arc::clone(&self.model), self.id);
        let words = std::mem::take(&mut self.words);
        let mut out = std::mem::take(&mut self.done);
        let step = move |device: &mut Device| {
            let done = device.step(&model, id, &words, &mut out);
            (done, words, out)
        };
        let (done, words, out) = self.model.host.call(step, || ())?;
        if self.model.shares_steps() {
            let model = Arc::clone(&self.model);
            self.model
                .host
                .post(move |device| device.step_ahead(&model, id))?;
        }
        let interrupted = matches!(&done, Err(error) if error.is_interrupted());
        self.model.interrupted.store(interrupted, Ordering::Relaxed);
        (self.words, self.done) = (words, out);
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
        let model = &self.model;
        (model.links.is_none() || model.shares_steps()) && !model.is_exact()
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
        &mut self.done.logits[i * vocab..(i + 1) * vocab]
    }

    fn captured(&self) -> &[f32] {
        &self.done.captured
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
        let is_plain = self.model.bits.is_none();
        let has_own = |layer: &LayerShape| layer.is_recurrent() || compressed_of(layer).is_some();
        if is_plain && !self.model.config.layers.iter().any(has_own) {
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
