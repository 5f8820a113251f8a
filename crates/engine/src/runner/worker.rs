//! The engine's half of a runner: a loop of inbox, step and replies.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Now;
use super::core::{Core, EngineLoad};
use super::driver::{EngineQuery, QueuedSequence, SharedInbox, SnapshotSender};
use crate::{
    DraftCounts, Error, Event, Reply, RequestFailure, ResumeOutcome, SequenceId, Sink, Snapshot,
    State, Ticket,
};

/// Contents of the inbox since the last step.
struct InboxBatch<C> {
    submissions: Vec<(QueuedSequence, Sink)>,
    cancels: Vec<Ticket>,
    questions: Vec<EngineQuery<C>>,
    takers: Vec<SnapshotSender>,
}

/// A request in the engine.
struct OpenRequest {
    ticket: Ticket,
    sink: Sink,
}

/// Owns the engine and the sinks of its requests.
pub(super) struct EngineWorker<C: Core> {
    core: C,
    shared: Arc<SharedInbox<C>>,
    now: Now,
    idle_interval: Duration,
    begun: Instant,
    open: BTreeMap<SequenceId, OpenRequest>,
}

impl<C: Core> EngineWorker<C> {
    pub(super) fn new(
        core: C,
        shared: Arc<SharedInbox<C>>,
        now: Now,
        idle_interval: Duration,
    ) -> Self {
        Self {
            core,
            shared,
            now,
            idle_interval,
            begun: now(),
            open: BTreeMap::new(),
        }
    }

    /// Runs until the runner is dropped or the engine fails; then every request has ended.
    pub(super) fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let reason = match outcome {
            Ok(Ok(())) => "the engine was shut down".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("the engine panicked: {}", message(&*panic)),
        };
        self.fail(&reason);
        // After a panic the engine's state may be invalid, and its drop may panic as well.
        let _ = catch_unwind(AssertUnwindSafe(move || drop(self)));
    }

    fn serve(&mut self) -> Result<(), Error> {
        while let Some(mail) = self.receive() {
            self.handle_mail(mail);
            // A step with prompts takes long: its requests count as running, not waiting,
            // meanwhile.
            self.core.admit();
            self.publish(&[]);
            if self.core.is_idle() {
                self.core.idle()?;
                continue;
            }
            let began = (self.now)();
            let events = self.core.step()?;
            let ended = (self.now)();
            self.core.record_duration(ended.duration_since(began));
            self.shared.clock.set(ended.duration_since(self.begun));
            // Before the replies: a caller that receives the end finds the slot free.
            self.publish(&events);
            events
                .into_iter()
                .for_each(|event| self.deliver_event(event));
        }
        Ok(())
    }

    /// Takes the inbox. Without work it waits for contents or the idle interval. `None` at the end.
    fn receive(&self) -> Option<InboxBatch<C>> {
        let mut inbox = self.shared.lock();
        let has_mail = !inbox.submissions.is_empty()
            || !inbox.cancels.is_empty()
            || !inbox.questions.is_empty()
            || !inbox.takers.is_empty();
        if self.core.is_idle() && !has_mail && !inbox.stop {
            let woken = self.shared.wake.wait_timeout(inbox, self.idle_interval);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        if inbox.stop {
            return None;
        }
        inbox.load.waiting += inbox.submissions.len();
        Some(InboxBatch {
            submissions: inbox.submissions.drain(..).collect(),
            cancels: inbox.cancels.drain(..).collect(),
            questions: inbox.questions.drain(..).collect(),
            takers: inbox.takers.drain(..).collect(),
        })
    }

    fn handle_mail(&mut self, mail: InboxBatch<C>) {
        for (sequence, sink) in mail.submissions {
            self.submit(sequence, sink);
        }
        for ticket in mail.cancels {
            let of_it =
                |(id, open): (&SequenceId, &OpenRequest)| (open.ticket == ticket).then_some(*id);
            if let Some(id) = self.open.iter().find_map(of_it) {
                self.forget(id);
            }
        }
        for question in mail.questions {
            // A panic is reported to the caller only.
            let _ = catch_unwind(AssertUnwindSafe(|| question(&self.core)));
        }
        for taker in mail.takers {
            // The caller waits for this.
            let _ = taker.send(self.take_all());
        }
    }

    /// Removes every sequence from the engine, in order of ids, and drops the sinks.
    fn take_all(&mut self) -> Vec<(Ticket, Snapshot)> {
        let mut taken = Vec::with_capacity(self.open.len());
        for (id, open) in std::mem::take(&mut self.open) {
            self.shared.lock().open.remove(&open.ticket);
            if let Ok(snapshot) = self.core.take_snapshot(id) {
                taken.push((open.ticket, snapshot));
            }
            discard(open.sink);
        }
        taken
    }

    fn submit(&mut self, sequence: QueuedSequence, mut sink: Sink) {
        let ticket = sequence.ticket();
        let taken = match sequence {
            QueuedSequence::Request(it) if it.tokens.is_empty() => {
                self.core.submit(*it.request).map(ResumeOutcome::Running)
            }
            QueuedSequence::Request(it) => self.core.resume(*it.request, &it.tokens),
            QueuedSequence::Restore(_, snapshot) => {
                self.core.restore(*snapshot).map(ResumeOutcome::Running)
            }
        };
        let last = match taken {
            Ok(ResumeOutcome::Running(id)) => {
                return drop(self.open.insert(id, OpenRequest { ticket, sink }));
            }
            Ok(ResumeOutcome::Finished { text, reason }) => Reply::Finished {
                text,
                reason,
                drafts: DraftCounts::default(),
            },
            Err(error) => Reply::Failed(error.into()),
        };
        self.shared.lock().open.remove(&ticket);
        call_sink(&mut sink, last);
        discard(sink);
    }

    /// Removes a sequence and its sink.
    fn forget(&mut self, id: SequenceId) {
        self.core.cancel(id);
        if let Some(open) = self.open.remove(&id) {
            discard(open.sink);
        }
    }

    /// Publishes the engine's load after a step with `events`.
    fn publish(&self, events: &[Event]) {
        let mut inbox = self.shared.lock();
        inbox.load = self.core.load();
        for event in events {
            if event.is_last()
                && let Some(open) = self.open.get(&event.id)
            {
                inbox.open.remove(&open.ticket);
            }
        }
    }

    fn deliver_event(&mut self, event: Event) {
        let (id, is_last) = (event.id, event.is_last());
        let Some(open) = self.open.get_mut(&id) else {
            return;
        };
        if call_sink(&mut open.sink, event.reply) && !is_last {
            return;
        }
        // Finished, or the sink failed.
        self.shared.lock().open.remove(&open.ticket);
        self.forget(id);
        self.publish(&[]);
    }

    /// Refuses further requests and ends all open ones.
    fn fail(&mut self, reason: &str) {
        let mut inbox = self.shared.lock();
        inbox.state = State::Failed(reason.to_owned());
        inbox.load = EngineLoad::default();
        inbox.cancels.clear();
        let still_open = std::mem::take(&mut inbox.open);
        let questions = std::mem::take(&mut inbox.questions);
        let takers = std::mem::take(&mut inbox.takers);
        let submissions = std::mem::take(&mut inbox.submissions);
        drop(inbox);
        let taken = std::mem::take(&mut self.open).into_values();
        let waiting = submissions.into_iter();
        let waiting = waiting.map(|(sequence, sink)| (sequence.ticket(), sink));
        for (ticket, mut sink) in taken.map(|open| (open.ticket, open.sink)).chain(waiting) {
            let reason = reason.to_owned();
            if still_open.contains(&ticket) {
                call_sink(&mut sink, Reply::Failed(RequestFailure::Lost { reason }));
            }
            discard(sink);
        }
        drop((questions, takers));
    }
}

/// Calls a sink; `false` if it panicked, which only affects its own request.
fn call_sink(sink: &mut Sink, reply: Reply) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink(reply))).is_ok()
}

fn discard(sink: Sink) {
    let _ = catch_unwind(AssertUnwindSafe(move || drop(sink)));
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message")
}
