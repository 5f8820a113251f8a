//! A service whose requests all use one adapter of its model.

use std::sync::Arc;

use crate::{RequestFailure, Service, ServiceStatus, Sink, Submission, Ticket};

/// Wraps another service and sets the adapter of each request. Both share one engine, its batches
/// and its memory.
#[derive(Clone, Debug)]
pub struct AdaptedService {
    base: Arc<dyn Service>,
    adapter: String,
}

impl AdaptedService {
    /// Wraps `base` with the adapter of this name.
    pub fn new(base: Arc<dyn Service>, adapter: impl Into<String>) -> Self {
        Self {
            base,
            adapter: adapter.into(),
        }
    }
}

impl Service for AdaptedService {
    fn accept(&self, mut submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        submission.request.adapter = Some(self.adapter.clone());
        self.base.accept(submission, sink)
    }

    fn cancel(&self, ticket: Ticket) {
        self.base.cancel(ticket);
    }

    fn status(&self) -> ServiceStatus {
        self.base.status()
    }

    fn cut(&self) -> String {
        self.base.cut()
    }

    fn numbers(&self) -> Option<String> {
        self.base.numbers()
    }
}
