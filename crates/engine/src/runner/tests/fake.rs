//! Guarantees of a runner, tested with an engine that waits for the test at every step.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::core::{Core, EngineLoad, RequestLimits};
use super::super::driver::Driver;
use super::{PATIENCE, Replies, finished, request, sink, token};
use crate::{
    Error, Event, GenerationRequest, Reply, RequestFailure, ResumeOutcome, SequenceId,
    ServiceStatus, Sink, Snapshot, State, Submission, Ticket,
};

/// A command to the engine for a step.
#[derive(Debug)]
enum FakeCommand {
    /// A token for every sequence.
    Tokens,
    /// The end of every sequence.
    Finish,
    Fail,
    Panic,
}

/// An action of the engine.
#[derive(Debug, PartialEq)]
enum FakeEvent {
    /// Began a step with the sequences of these prompts.
    Step(Vec<u32>),
    Idle,
    Dropped,
}

/// Sequences are ids with prompts; each step waits for an [`FakeCommand`].
struct Fake {
    acts: Receiver<FakeCommand>,
    did: Sender<FakeEvent>,
    sequences: Vec<(SequenceId, u32)>,
    last_id: u64,
    idle_fails: bool,
}

impl Core for Fake {
    fn limits(&self) -> RequestLimits {
        RequestLimits {
            vocab: 100,
            context: 10,
            max_waiting: 3,
        }
    }

    fn submit(&mut self, request: GenerationRequest) -> Result<SequenceId, Error> {
        // A refusal by the engine itself.
        if request.prompt[0] == 99 {
            return Err(Error::NoSequence(SequenceId(99)));
        }
        self.last_id += 1;
        let id = SequenceId(self.last_id);
        self.sequences.push((id, request.prompt[0]));
        Ok(id)
    }

    fn cancel(&mut self, id: SequenceId) {
        self.sequences.retain(|(other, _)| *other != id);
    }

    fn take_snapshot(&mut self, id: SequenceId) -> Result<Snapshot, Error> {
        self.cancel(id);
        Err(Error::NoSequence(id))
    }

    fn restore(&mut self, _: Snapshot) -> Result<SequenceId, Error> {
        Err(Error::NoSequence(SequenceId(7)))
    }

    fn resume(&mut self, request: GenerationRequest, _: &[u32]) -> Result<ResumeOutcome, Error> {
        self.submit(request).map(ResumeOutcome::Running)
    }

    fn admit(&mut self) {}

    fn step(&mut self) -> Result<Vec<Event>, Error> {
        let prompts = self.sequences.iter().map(|(_, prompt)| *prompt).collect();
        let _ = self.did.send(FakeEvent::Step(prompts));
        let act = self.acts.recv_timeout(PATIENCE).expect("an act");
        let ids = self.sequences.iter().map(|(id, _)| *id);
        match act {
            FakeCommand::Tokens => {
                let reply = token(7);
                Ok(ids
                    .map(|id| Event {
                        id,
                        reply: reply.clone(),
                    })
                    .collect())
            }
            FakeCommand::Finish => {
                let reply = finished();
                let end = |id| Event {
                    id,
                    reply: reply.clone(),
                };
                let events = ids.map(end).collect();
                self.sequences.clear();
                Ok(events)
            }
            FakeCommand::Fail => Err(Error::NoSequence(SequenceId(5))),
            FakeCommand::Panic => panic!("on command"),
        }
    }

    fn record_duration(&mut self, _: Duration) {}

    fn idle(&mut self) -> Result<(), Error> {
        let _ = self.did.send(FakeEvent::Idle);
        match self.idle_fails {
            true => Err(Error::NoSequence(SequenceId(6))),
            false => Ok(()),
        }
    }

    fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.sequences.len(),
            ..EngineLoad::default()
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.did.send(FakeEvent::Dropped);
    }
}

fn submit(
    driver: &Driver<Fake>,
    request: GenerationRequest,
    sink: Sink,
) -> Result<Ticket, RequestFailure> {
    let submission = Submission::new(request, Vec::new());
    let ticket = submission.ticket;
    driver.accept(submission, sink).map(|()| ticket)
}

/// A driver with a fake engine, and the test's ends of its channels.
struct FakeDriver {
    driver: Arc<Driver<Fake>>,
    acts: Sender<FakeCommand>,
    did: Receiver<FakeEvent>,
}

/// Interval that disables the idle hook in practice.
const NEVER: Duration = Duration::from_secs(3600);

impl FakeDriver {
    fn new() -> Self {
        Self::with_idle(NEVER, false)
    }

    fn with_idle(interval: Duration, idle_fails: bool) -> Self {
        let (acts, acts_of_fake) = channel();
        let (did_of_fake, did) = channel();
        let fake = Fake {
            acts: acts_of_fake,
            did: did_of_fake,
            sequences: Vec::new(),
            last_id: 0,
            idle_fails,
        };
        let driver = Arc::new(Driver::start(fake, Instant::now, interval));
        Self { driver, acts, did }
    }

    fn act(&self, act: FakeCommand) {
        self.acts.send(act).unwrap();
    }

    /// The engine's next action other than idling.
    fn did(&self) -> FakeEvent {
        loop {
            match self.did.recv_timeout(PATIENCE).expect("something done") {
                FakeEvent::Idle => {}
                other => return other,
            }
        }
    }

    /// Gives tokens up to this step.
    fn until(&self, step: FakeEvent) {
        while self.did() != step {
            self.act(FakeCommand::Tokens);
        }
    }

    fn try_submit(&self, prompt: u32) -> (Result<Ticket, RequestFailure>, Replies) {
        let (sink, replies) = sink();
        let submitted = submit(&self.driver, request(vec![prompt], 5), sink);
        (submitted, replies)
    }

    fn submit(&self, prompt: u32) -> (Ticket, Replies) {
        let (result, replies) = self.try_submit(prompt);
        (result.unwrap(), replies)
    }

    fn state(&self) -> State {
        self.driver.status().state
    }

    /// Waits until the engine's thread has failed.
    fn wait_for_end(&self) {
        assert_eq!(self.did(), FakeEvent::Dropped);
    }
}

fn lost(reason: &str) -> Reply {
    let reason = reason.to_owned();
    Reply::Failed(RequestFailure::Lost { reason })
}

const fn status(running: usize, waiting: usize) -> ServiceStatus {
    ServiceStatus {
        state: State::Ready,
        running,
        waiting,
    }
}

#[test]
fn everything_that_came_in_during_a_step_is_in_the_next() {
    let stage = FakeDriver::new();
    let (_, first) = stage.submit(1);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1]));
    let others: Vec<_> = (2..5).map(|prompt| stage.submit(prompt)).collect();
    stage.driver.cancel(others[1].0);
    assert_eq!(stage.driver.status(), status(1, 2));
    stage.act(FakeCommand::Tokens);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1, 2, 4]));
    assert_eq!(stage.driver.status(), status(3, 0));
    stage.act(FakeCommand::Finish);
    assert_eq!(first.rest(), [token(7), finished()]);
    assert_eq!(others[0].1.rest(), [finished()]);
    assert_eq!(others[1].1.rest(), [], "cancelled");
    assert_eq!(others[2].1.rest(), [finished()]);
    assert_eq!(stage.driver.status(), status(0, 0));
}

#[test]
fn refusals_are_typed_and_come_at_once() {
    let stage = FakeDriver::new();
    let refused = |wanted: GenerationRequest| {
        let (sink, replies) = sink();
        let failure = submit(&stage.driver, wanted, sink).unwrap_err();
        assert_eq!(replies.rest(), [], "the sink is dropped");
        failure
    };
    let invalid = |reason: &str| RequestFailure::Invalid {
        reason: reason.to_owned(),
    };
    assert_eq!(refused(request(vec![], 1)), invalid("the prompt is empty"));
    let (tokens, context) = (10, 10);
    let long = RequestFailure::PromptTooLong { tokens, context };
    assert_eq!(refused(request(vec![1; 10], 1)), long);
    let mut odd = request(vec![1], 1);
    odd.stop = vec!["a".to_owned(), String::new()];
    assert_eq!(refused(odd.clone()), invalid("stop string 1 is empty"));
    odd.sampling.top_p = 0.0;
    let expected = "top_p is 0, expected above 0 and at most 1";
    assert_eq!(refused(odd), invalid(expected));
    // A refusal that only the engine detects.
    let (ticket, late) = stage.submit(99);
    let failed = Reply::Failed(invalid("sequence 99 is not in this engine"));
    assert_eq!(late.rest(), [failed]);
    stage.driver.cancel(ticket);
    assert_eq!(stage.state(), State::Ready);
}

#[test]
fn a_full_queue_says_so_and_has_room_again() {
    let stage = FakeDriver::new();
    let (_, _first) = stage.submit(1);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1]));
    let waiting: Vec<_> = (2..5).map(|prompt| stage.submit(prompt)).collect();
    let busy = |result: Result<Ticket, RequestFailure>| {
        assert_eq!(result.unwrap_err(), RequestFailure::Busy { waiting: 3 });
    };
    busy(stage.try_submit(9).0);
    stage.driver.cancel(waiting[0].0);
    stage.submit(5);
    busy(stage.try_submit(9).0);
    stage.act(FakeCommand::Tokens);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1, 3, 4, 5]));
    stage.act(FakeCommand::Finish);
}

#[test]
fn cancelled_requests_are_forgotten_wherever_they_are() {
    let stage = FakeDriver::new();
    let (running, replies) = stage.submit(1);
    let (_, other) = stage.submit(2);
    // Both are in a step, the second possibly in the next one.
    stage.until(FakeEvent::Step(vec![1, 2]));
    stage.driver.cancel(running);
    stage.driver.cancel(running);
    stage.act(FakeCommand::Tokens);
    assert_eq!(stage.did(), FakeEvent::Step(vec![2]));
    assert!(replies.rest().iter().all(|reply| *reply == token(7)));
    stage.act(FakeCommand::Finish);
    assert_eq!(other.rest().last(), Some(&finished()));
    // Finished, never existing, and on an idle engine: no effect.
    stage.driver.cancel(running);
    stage.driver.cancel(Ticket(77));
    let (alone, replies) = stage.submit(3);
    assert_eq!(stage.did(), FakeEvent::Step(vec![3]));
    stage.driver.cancel(alone);
    stage.act(FakeCommand::Tokens);
    replies.rest();
    assert_eq!(stage.driver.inspect(|fake| fake.sequences.len()), Ok(0));
    assert_eq!(stage.driver.status(), status(0, 0));
}

/// The engine ends by `act` while one request is in it and another is in the inbox.
fn ends(act: FakeCommand, reason: &str) {
    let stage = FakeDriver::new();
    let (_, first) = stage.submit(1);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1]));
    let (_, second) = stage.submit(2);
    let (gone, third) = stage.submit(3);
    stage.driver.cancel(gone);
    let asker = std::thread::spawn({
        let driver = Arc::clone(&stage.driver);
        move || driver.inspect(|fake| fake.sequences.len())
    });
    stage.act(act);
    assert_eq!(first.rest(), [lost(reason)]);
    assert_eq!(second.rest(), [lost(reason)]);
    assert_eq!(third.rest(), []);
    stage.wait_for_end();
    assert_eq!(stage.state(), State::Failed(reason.to_owned()));
    let unavailable = RequestFailure::Unavailable {
        reason: reason.to_owned(),
    };
    assert_eq!(stage.try_submit(4).0.unwrap_err(), unavailable);
    assert_eq!(asker.join().unwrap(), Err(unavailable.clone()));
    assert_eq!(stage.driver.inspect(|_| ()), Err(unavailable));
    stage.driver.cancel(gone);
}

#[test]
fn an_engine_that_fails_takes_its_requests_along() {
    ends(FakeCommand::Fail, "sequence 5 is not in this engine");
}

#[test]
fn an_engine_that_panics_takes_its_requests_along() {
    ends(FakeCommand::Panic, "the engine panicked: on command");
}

#[test]
fn dropping_the_runner_ends_requests_and_the_thread() {
    let stage = FakeDriver::new();
    let (_, running) = stage.submit(1);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1]));
    let (_, waiting) = stage.submit(2);
    let FakeDriver { driver, acts, did } = stage;
    let dropper = std::thread::spawn(move || drop(driver));
    while !dropper.is_finished() {
        // Until the thread sees the drop, there are more steps.
        let _ = acts.send(FakeCommand::Tokens);
        std::thread::yield_now();
    }
    dropper.join().unwrap();
    // The thread ends before the drop returns: no further events.
    let mut done: Vec<FakeEvent> = did.try_iter().collect();
    assert_eq!(done.pop(), Some(FakeEvent::Dropped));
    let expected = lost("the engine was shut down");
    let told = running.rest();
    assert_eq!(told.last(), Some(&expected), "{told:?}");
    assert_eq!(waiting.rest().last(), Some(&expected));
}

#[test]
fn a_sink_that_panics_harms_only_its_own_request() {
    let stage = FakeDriver::new();
    let bad: Sink = Box::new(|_| panic!("in a sink"));
    submit(&stage.driver, request(vec![1], 5), bad).unwrap();
    let (_, good) = stage.submit(2);
    stage.until(FakeEvent::Step(vec![2]));
    assert_eq!(stage.driver.status(), status(1, 0));
    stage.act(FakeCommand::Finish);
    assert_eq!(good.rest().last(), Some(&finished()));
    assert_eq!(stage.state(), State::Ready);
}

#[test]
fn sinks_may_call_the_runner_and_drop_it() {
    let stage = FakeDriver::new();
    let driver = Arc::new(Mutex::new(Some(Arc::clone(&stage.driver))));
    let (told, heard) = channel();
    let (inner, inner_replies) = sink();
    let mut inner = Some(inner);
    let calls: Sink = Box::new(move |_| {
        let mut driver = driver.lock().unwrap();
        let Some(held) = driver.as_ref() else {
            return;
        };
        held.status();
        let again = submit(held, request(vec![2], 5), inner.take().unwrap());
        let asked = held.inspect(|_| ());
        told.send((again, asked)).unwrap();
        // The last reference: the thread must not join itself.
        *driver = None;
    });
    let FakeDriver { driver, acts, did } = stage;
    submit(&driver, request(vec![1], 5), calls).unwrap();
    drop(driver);
    acts.send(FakeCommand::Tokens).unwrap();
    let (again, asked) = heard.recv_timeout(PATIENCE).unwrap();
    assert!(again.is_ok(), "{again:?}");
    let reason = "asked from the engine's own thread".to_owned();
    assert_eq!(asked, Err(RequestFailure::Unavailable { reason }));
    assert_eq!(inner_replies.rest(), [lost("the engine was shut down")]);
    let is_dropped = |did| did == FakeEvent::Dropped;
    assert!(did.iter().any(is_dropped), "the thread ended");
}

#[test]
fn an_idle_engine_gets_its_moments() {
    let stage = FakeDriver::with_idle(Duration::from_millis(1), false);
    for _ in 0..5 {
        assert_eq!(stage.did.recv_timeout(PATIENCE), Ok(FakeEvent::Idle));
    }
    let (_, replies) = stage.submit(1);
    assert_eq!(stage.did(), FakeEvent::Step(vec![1]));
    assert!(stage.did.try_recv().is_err(), "it is in a step");
    stage.act(FakeCommand::Finish);
    assert_eq!(replies.rest(), [finished()]);
    assert_eq!(stage.did.recv_timeout(PATIENCE), Ok(FakeEvent::Idle));
}

#[test]
fn an_idle_engine_can_fail() {
    let stage = FakeDriver::with_idle(Duration::from_millis(1), true);
    stage.wait_for_end();
    let reason = "sequence 6 is not in this engine".to_owned();
    assert_eq!(stage.state(), State::Failed(reason));
}

#[test]
fn what_looks_at_the_engine_may_panic() {
    let stage = FakeDriver::new();
    assert_eq!(stage.driver.inspect(|fake| fake.last_id), Ok(0));
    let reason = "what was to look at the engine panicked".to_owned();
    let unavailable = RequestFailure::Unavailable { reason };
    let panics = |_: &Fake| -> () { panic!("in a question") };
    assert_eq!(stage.driver.inspect(panics), Err(unavailable));
    assert_eq!(stage.driver.inspect(|fake| fake.last_id), Ok(0));
}
