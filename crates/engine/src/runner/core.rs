//! The engine interface of a runner. Tests implement it with an engine that fails on command.

use std::time::Duration;

use crate::{Engine, Error, Event, GenerationRequest, ResumeOutcome, SequenceId, Snapshot};

/// An engine. Between calls it is idle or has a step to run.
pub(super) trait Core: Send + 'static {
    /// Constant.
    fn limits(&self) -> RequestLimits;
    fn submit(&mut self, request: GenerationRequest) -> Result<SequenceId, Error>;
    /// No effect if the sequence has ended.
    fn cancel(&mut self, id: SequenceId);
    fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error>;
    fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error>;
    fn resume(
        &mut self,
        request: GenerationRequest,
        tokens: &[u32],
    ) -> Result<ResumeOutcome, Error>;
    /// Runs the part of a step that changes [`load`](Self::load).
    fn admit(&mut self);
    fn step(&mut self) -> Result<Vec<Event>, Error>;
    /// Reports the duration of the last step.
    fn record_duration(&mut self, duration: Duration);
    fn idle(&mut self) -> Result<(), Error>;
    fn is_idle(&self) -> bool;
    fn load(&self) -> EngineLoad;
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLimits {
    /// Vocabulary size.
    pub(super) vocab: usize,
    /// Maximum positions of a sequence.
    pub(super) context: usize,
    /// Maximum queued requests.
    pub(super) max_waiting: usize,
}

/// Sequences in an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EngineLoad {
    pub(super) running: usize,
    pub(super) resuming: usize,
    pub(super) waiting: usize,
}

impl Core for Engine {
    fn limits(&self) -> RequestLimits {
        RequestLimits {
            vocab: self.model().config().vocab,
            context: self.config().context,
            max_waiting: self.config().max_waiting,
        }
    }

    fn submit(&mut self, request: GenerationRequest) -> Result<SequenceId, Error> {
        self.submit(request)
    }

    fn cancel(&mut self, id: SequenceId) {
        // An error means that it has ended.
        let _ = self.cancel(id);
    }

    fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error> {
        self.take_snapshot(id)
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<SequenceId, Error> {
        self.restore(snapshot)
    }

    fn resume(
        &mut self,
        request: GenerationRequest,
        tokens: &[u32],
    ) -> Result<ResumeOutcome, Error> {
        self.resume(request, tokens)
    }

    fn admit(&mut self) {
        self.admit();
    }

    fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.step()
    }

    fn record_duration(&mut self, duration: Duration) {
        self.record_duration(duration);
    }

    fn idle(&mut self) -> Result<(), Error> {
        self.idle()
    }

    fn is_idle(&self) -> bool {
        self.is_idle()
    }

    fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.n_running(),
            resuming: self.n_resuming(),
            waiting: self.n_waiting(),
        }
    }
}
