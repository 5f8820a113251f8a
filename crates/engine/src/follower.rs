//! The other ranks of a split model.

use std::sync::Arc;

use paceline_model::trace::Tracer;
use paceline_model::{Compute, Followed, PageStore, Weights};

use crate::engine::tracer;
use crate::{EngineConfig, Error};

/// A rank that computes its part of the steps that the leader's [`Engine`](crate::Engine) plans.
///
/// It knows no sequences: which pages a step reads and writes comes with the step, and all ranks
/// number them alike.
#[derive(Debug)]
pub struct Follower {
    compute: Box<dyn Compute>,
    tracer: Tracer,
}

impl Follower {
    /// Reserves memory for the steps of an engine of the same `config`.
    ///
    /// # Errors
    /// As [`Engine::new`](crate::Engine::new).
    pub fn new(model: Arc<dyn Weights>, config: &EngineConfig) -> Result<Self, Error> {
        config.check()?;
        let tracer = tracer(&*model);
        let compute = model.reserve(config.batch_size(), config.cache_positions)?;
        Ok(Self { compute, tracer })
    }

    /// Keeps this rank's part of pages in `store`, as the leader asks for it.
    #[must_use]
    pub fn with_store(mut self, store: Box<dyn PageStore>) -> Self {
        self.compute.attach(store);
        self
    }

    /// Waits for a step and computes it, or hears that there is none.
    ///
    /// # Errors
    /// [`Error::Model`] when another rank fails or the leader asks for a step that does not fit.
    /// This rank cannot go on then.
    pub fn step(&mut self) -> Result<Followed, Error> {
        let followed = self.compute.follow()?;
        if matches!(followed, Followed::Step) {
            self.tracer.end_step();
        }
        Ok(followed)
    }
}
