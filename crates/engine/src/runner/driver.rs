//! The callers' half of a runner: the inbox under one lock, and the thread's handle.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use paceline_base::lock;

use super::core::{Core, EngineLoad, RequestLimits};
use super::worker::EngineWorker;
use super::{Now, StepClock};
use crate::{RequestFailure, ServiceStatus, Sink, Snapshot, State, Submission, Ticket};

/// A sequence to start in the engine.
pub(super) enum QueuedSequence {
    Request(Submission),
    Restore(Ticket, Box<Snapshot>),
}

impl QueuedSequence {
    pub(super) const fn ticket(&self) -> Ticket {
        match self {
            Self::Request(submission) => submission.ticket,
            Self::Restore(ticket, _) => *ticket,
        }
    }
}

/// Reply channel of a caller that takes all sequences out of the engine.
pub(super) type SnapshotSender = mpsc::SyncSender<Vec<(Ticket, Snapshot)>>;

/// A function to run with the engine. Its caller blocks, so there is at most one per thread.
pub(super) type EngineQuery<C> = Box<dyn FnOnce(&C) + Send>;

/// State shared by callers and the engine's thread, under one lock that is held briefly.
pub(super) struct RunnerInbox<C> {
    pub(super) state: State,
    /// The runner is being dropped.
    pub(super) stop: bool,
    pub(super) submissions: VecDeque<(QueuedSequence, Sink)>,
    /// Requests to cancel, each at most once.
    pub(super) cancels: Vec<Ticket>,
    pub(super) questions: Vec<EngineQuery<C>>,
    pub(super) takers: Vec<SnapshotSender>,
    /// Requests that are neither finished nor cancelled.
    pub(super) open: BTreeSet<Ticket>,
    /// Load of the engine, including what it has taken out of the inbox.
    pub(super) load: EngineLoad,
}

/// The inbox, and the condition that wakes the engine's thread.
pub(super) struct SharedInbox<C> {
    inbox: Mutex<RunnerInbox<C>>,
    pub(super) wake: Condvar,
    pub(super) clock: StepClock,
    limits: RequestLimits,
}

impl<C> SharedInbox<C> {
    fn new(limits: RequestLimits) -> Self {
        let inbox = RunnerInbox {
            state: State::Ready,
            stop: false,
            submissions: VecDeque::new(),
            cancels: Vec::new(),
            questions: Vec::new(),
            takers: Vec::new(),
            open: BTreeSet::new(),
            load: EngineLoad::default(),
        };
        Self {
            inbox: Mutex::new(inbox),
            wake: Condvar::new(),
            clock: StepClock::default(),
            limits,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RunnerInbox<C>> {
        // No code that can panic leaves the inbox inconsistent.
        lock(&self.inbox)
    }
}

impl<C> RunnerInbox<C> {
    /// # Errors
    /// [`RequestFailure::Unavailable`] with the reason.
    fn check_ready(&self) -> Result<(), RequestFailure> {
        match &self.state {
            State::Failed(reason) => Err(unavailable(reason)),
            State::Ready | State::Loading | State::Recovering(_) => Ok(()),
        }
    }
}

fn unavailable(reason: &str) -> RequestFailure {
    RequestFailure::Unavailable {
        reason: reason.to_owned(),
    }
}

/// A [`Core`] on its thread.
pub(super) struct Driver<C: Core> {
    shared: Arc<SharedInbox<C>>,
    thread: Option<JoinHandle<()>>,
}

impl<C: Core> Driver<C> {
    pub(super) fn start(core: C, now: Now, idle_interval: Duration) -> Self {
        let shared = Arc::new(SharedInbox::new(core.limits()));
        let worker = EngineWorker::new(core, Arc::clone(&shared), now, idle_interval);
        let builder = thread::Builder::new().name("engine".to_owned());
        let thread = builder.spawn(move || worker.run());
        if let Err(error) = &thread {
            let reason = format!("cannot start the engine's thread: {error}");
            shared.lock().state = State::Failed(reason);
        }
        let thread = thread.ok();
        Self { shared, thread }
    }

    /// A request that continues an answer passes the bound of waiting requests: the engine has a
    /// separate one.
    pub(super) fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        let limits = self.shared.limits;
        let is_new = submission.tokens.is_empty();
        if is_new {
            let request = &submission.request;
            request.check(limits.vocab, limits.context)?;
        }
        let inbox = self.shared.lock();
        inbox.check_ready()?;
        let waiting = inbox.load.waiting + inbox.submissions.len();
        if is_new && waiting >= limits.max_waiting {
            return Err(RequestFailure::Busy { waiting });
        }
        self.enqueue(inbox, QueuedSequence::Request(submission), sink);
        Ok(())
    }

    /// As a request that continues an answer.
    pub(super) fn resume(&self, snapshot: Snapshot, sink: Sink) -> Result<Ticket, RequestFailure> {
        let inbox = self.shared.lock();
        inbox.check_ready()?;
        let ticket = Ticket::draw();
        let restored = QueuedSequence::Restore(ticket, Box::new(snapshot));
        self.enqueue(inbox, restored, sink);
        Ok(ticket)
    }

    fn enqueue(
        &self,
        mut inbox: MutexGuard<'_, RunnerInbox<C>>,
        sequence: QueuedSequence,
        sink: Sink,
    ) {
        inbox.open.insert(sequence.ticket());
        inbox.submissions.push_back((sequence, sink));
        drop(inbox);
        self.shared.wake.notify_one();
    }

    pub(super) fn take_all(&self) -> Result<Vec<(Ticket, Snapshot)>, RequestFailure> {
        if self.is_own_thread() {
            return Err(unavailable("asked from the engine's own thread"));
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let mut inbox = self.shared.lock();
        inbox.check_ready()?;
        inbox.takers.push(sender);
        drop(inbox);
        self.shared.wake.notify_one();
        receiver.recv().map_err(|_| {
            let gone = self.shared.lock().check_ready().err();
            gone.unwrap_or_else(|| unavailable("the engine ended"))
        })
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut inbox = self.shared.lock();
        if !inbox.open.remove(&ticket) {
            return;
        }
        let mut waiting = inbox.submissions.iter();
        let at = waiting.position(|(sequence, _)| sequence.ticket() == ticket);
        let submission = at.and_then(|at| inbox.submissions.remove(at));
        if submission.is_none() {
            inbox.cancels.push(ticket);
        }
        drop(inbox);
        // The sink last: its drop may run any code.
        drop(submission);
        self.shared.wake.notify_one();
    }

    pub(super) fn status(&self) -> ServiceStatus {
        let inbox = self.shared.lock();
        let load = inbox.load;
        ServiceStatus {
            state: inbox.state.clone(),
            running: load.running,
            waiting: load.resuming + load.waiting + inbox.submissions.len(),
        }
    }

    pub(super) fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&C) -> T + Send + 'static,
    ) -> Result<T, RequestFailure> {
        if self.is_own_thread() {
            return Err(unavailable("asked from the engine's own thread"));
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let question: EngineQuery<C> = Box::new(move |core| {
            // The caller waits for this.
            let _ = sender.send(look(core));
        });
        let mut inbox = self.shared.lock();
        inbox.check_ready()?;
        inbox.questions.push(question);
        drop(inbox);
        self.shared.wake.notify_one();
        receiver.recv().map_err(|_| {
            let gone = self.shared.lock().check_ready().err();
            gone.unwrap_or_else(|| unavailable("what was to look at the engine panicked"))
        })
    }

    pub(super) fn clock(&self) -> &StepClock {
        &self.shared.clock
    }

    fn is_own_thread(&self) -> bool {
        let current = thread::current().id();
        self.thread
            .as_ref()
            .is_some_and(|t| t.thread().id() == current)
    }
}

impl<C: Core> Drop for Driver<C> {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        // A sink may hold the last reference: the thread then ends by itself.
        if self.is_own_thread() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            // Its panics were converted to failures.
            let _ = thread.join();
        }
    }
}
