//! Ranks of a split model other than the leader.

use std::sync::Arc;

use paceline_model::trace::Tracer;
use paceline_model::{Compute, FollowOutcome, LoadedModel, PageStore};

use crate::engine::tracer;
use crate::{EngineConfig, Error};

/// A rank that computes its part of the steps that the leader's [`Engine`](crate::Engine) plans.
///
/// It knows no sequences: each plan lists the pages to read and write, and all ranks number pages
/// alike.
#[derive(Debug)]
pub struct Follower {
    compute: Box<dyn Compute>,
    tracer: Tracer,
}

impl Follower {
    /// Reserves memory for the steps of an engine with the same `config`.
    ///
    /// # Errors
    /// As [`Engine::new`](crate::Engine::new).
    pub fn new(model: Arc<dyn LoadedModel>, config: &EngineConfig) -> Result<Self, Error> {
        config.check()?;
        let tracer = tracer(&*model);
        let compute = model.reserve(config.batch_size(), config.cache_positions)?;
        Ok(Self { compute, tracer })
    }

    /// Persists this rank's part of pages in `store`, as the leader requests.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn PageStore>) -> Self {
        self.compute.attach(store);
        self
    }

    /// Waits for a plan and computes it; the plan may be a keepalive.
    ///
    /// # Errors
    /// [`Error::Model`] if another rank fails or the leader's plan does not fit. This rank is
    /// unusable afterwards.
    pub fn step(&mut self) -> Result<FollowOutcome, Error> {
        let followed = self.compute.follow()?;
        if matches!(followed, FollowOutcome::Step) {
            self.tracer.end_step();
        }
        Ok(followed)
    }
}
