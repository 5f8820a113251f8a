//! Maps the instance's tickets of open requests to those of the leader's engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use paceline_base::lock;
use paceline_engine::{Reply, RequestFailure, Sink, StepClock, Ticket};

use super::ControlChannel;
use crate::Error;
use crate::messages::FromWorker;

/// Open requests: the instance's ticket for each, and the engine's once it is known. A request may
/// end before the engine has returned its ticket.
#[derive(Clone, Debug)]
pub(super) struct Tickets {
    open: Arc<Mutex<HashMap<Ticket, Option<Ticket>>>>,
    clock: StepClock,
}

impl Tickets {
    /// For an engine with the step clock `clock`.
    pub(super) fn new(clock: StepClock) -> Self {
        Self {
            open: Arc::default(),
            clock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Option<Ticket>>> {
        lock(&self.open)
    }

    /// Submits a request to the engine; reports a refusal to the instance.
    pub(super) fn start(
        &self,
        channel: &ControlChannel,
        ticket: Ticket,
        submit: impl FnOnce(Sink) -> Result<Ticket, RequestFailure>,
    ) -> Result<(), Error> {
        match submit(self.open(channel, ticket)) {
            Ok(own) => self.took(ticket, own),
            Err(failure) => {
                self.close(ticket);
                let reply = Reply::Failed(failure);
                channel.send(&FromWorker::Reply {
                    ticket,
                    at_us: None,
                    reply,
                })?;
            }
        }
        Ok(())
    }

    /// Registers a request; returns a sink that sends its replies to the instance.
    fn open(&self, channel: &ControlChannel, ticket: Ticket) -> Sink {
        self.lock().insert(ticket, None);
        let (channel, tickets) = (Arc::clone(channel), self.clone());
        Box::new(move |reply| {
            if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
                tickets.close(ticket);
            }
            let at_us = Some(tickets.clock.last_us());
            // If the instance is lost, the reader of the channel ends this process.
            let _ = channel.send(&FromWorker::Reply {
                ticket,
                at_us,
                reply,
            });
        })
    }

    /// Stores the engine's ticket of a request, if it is still open.
    fn took(&self, ticket: Ticket, own: Ticket) {
        if let Some(entry) = self.lock().get_mut(&ticket) {
            *entry = Some(own);
        }
    }

    /// Removes a request; returns the engine's ticket.
    pub(super) fn close(&self, ticket: Ticket) -> Option<Ticket> {
        self.lock().remove(&ticket).flatten()
    }
}
