//! The part of an engine that a runner needs, so that tests can put in one that fails on command.

use std::time::Duration;

use crate::{Engine, Error, Event, Request, Resumed, SequenceId, Snapshot};

/// An engine. Between calls it is idle or has something to step.
pub(super) trait Core: Send + 'static {
    /// Fixed for its life.
    fn limits(&self) -> Limits;
    fn submit(&mut self, request: Request) -> Result<SequenceId, Error>;
    /// Nothing happens when the sequence is over.
    fn cancel(&mut self, id: SequenceId);
    fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error>;
    fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error>;
    fn resume(&mut self, request: Request, tokens: &[u32]) -> Result<Resumed, Error>;
    /// Does of a step what [`load`](Self::load) shows.
    fn admit(&mut self);
    fn step(&mut self) -> Result<Vec<Event>, Error>;
    /// How long the last step took.
    fn took(&mut self, duration: Duration);
    fn idle(&mut self) -> Result<(), Error>;
    fn is_idle(&self) -> bool;
    fn load(&self) -> Load;
}

/// The limits that a request is checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Tokens of the model.
    pub(super) vocab: usize,
    /// Positions of a sequence.
    pub(super) context: usize,
    /// Requests that wait.
    pub(super) max_waiting: usize,
}

/// Sequences in an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) running: usize,
    pub(super) resuming: usize,
    pub(super) waiting: usize,
}

impl Core for Engine {
    fn limits(&self) -> Limits {
        Limits {
            vocab: self.model().config().vocab,
            context: self.config().context,
            max_waiting: self.config().max_waiting,
        }
    }

    fn submit(&mut self, request: Request) -> Result<SequenceId, Error> {
        self.submit(request)
    }

    fn cancel(&mut self, id: SequenceId) {
        // An error says that it is over.
        let _ = self.cancel(id);
    }

    fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error> {
        self.take_snapshot(id)
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error> {
        self.restore(snapshot)
    }

    fn resume(&mut self, request: Request, tokens: &[u32]) -> Result<Resumed, Error> {
        self.resume(request, tokens)
    }

    fn admit(&mut self) {
        self.admit();
    }

    fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.step()
    }

    fn took(&mut self, duration: Duration) {
        self.took(duration);
    }

    fn idle(&mut self) -> Result<(), Error> {
        self.idle()
    }

    fn is_idle(&self) -> bool {
        self.is_idle()
    }

    fn load(&self) -> Load {
        Load {
            running: self.n_running(),
            resuming: self.n_resuming(),
            waiting: self.n_waiting(),
        }
    }
}
