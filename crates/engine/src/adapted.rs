//! A service whose requests all use one adapter of its model.

use std::sync::Arc;

use crate::{Failure, Request, Service, Sink, Status, Ticket};

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
    fn submit_after(
        &self,
        request: Request,
        tokens: Vec<u32>,
        sink: Sink,
    ) -> Result<Ticket, Failure> {
        let adapter = Some(self.adapter.clone());
        let request = Request { adapter, ..request };
        self.base.submit_after(request, tokens, sink)
    }

    fn cancel(&self, ticket: Ticket) {
        self.base.cancel(ticket);
    }

    fn status(&self) -> Status {
        self.base.status()
    }

    fn cut(&self) -> String {
        self.base.cut()
    }
}
