//! Names of open requests inside a leader's engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use paceline_base::lock;
use paceline_engine::{Failure, Reply, Sink, StepClock, Ticket};

use super::Channel;
use crate::Error;
use crate::messages::FromWorker;

/// Open requests: the instance's name for each, and the engine's once it has one. A request may be
/// over before the engine has said what it calls it.
#[derive(Clone, Debug)]
pub(super) struct Tickets {
    open: Arc<Mutex<HashMap<Ticket, Option<Ticket>>>>,
    clock: StepClock,
}

impl Tickets {
    /// For an engine whose steps end by `clock`.
    pub(super) fn new(clock: StepClock) -> Self {
        Self {
            open: Arc::default(),
            clock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Option<Ticket>>> {
        lock(&self.open)
    }

    /// Hands a request to the engine; the engine's objections are told to the instance.
    pub(super) fn start(
        &self,
        channel: &Channel,
        ticket: Ticket,
        submit: impl FnOnce(Sink) -> Result<Ticket, Failure>,
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

    /// Starts a request: a sink that sends its replies to the instance.
    fn open(&self, channel: &Channel, ticket: Ticket) -> Sink {
        self.lock().insert(ticket, None);
        let (channel, tickets) = (Arc::clone(channel), self.clone());
        Box::new(move |reply| {
            if matches!(reply, Reply::Finished { .. } | Reply::Failed(_)) {
                tickets.close(ticket);
            }
            let at_us = Some(tickets.clock.last_us());
            // An instance that is gone ends this process by the reader of the channel.
            let _ = channel.send(&FromWorker::Reply {
                ticket,
                at_us,
                reply,
            });
        })
    }

    /// Notes what the engine calls a request, if it is still open.
    fn took(&self, ticket: Ticket, own: Ticket) {
        if let Some(entry) = self.lock().get_mut(&ticket) {
            *entry = Some(own);
        }
    }

    /// Forgets a request; says what the engine calls it.
    pub(super) fn close(&self, ticket: Ticket) -> Option<Ticket> {
        self.lock().remove(&ticket).flatten()
    }
}
