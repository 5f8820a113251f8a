//! A runner with a real engine gives the answers of the engine alone.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use paceline_tensor::PAGE;
use proptest::prelude::*;

use super::super::Runner;
use super::{PATIENCE, Replies, sink};
use crate::engine::tests::requests::mixed;
use crate::engine::tests::tiny::TinyModel;
use crate::{EngineConfig, GenerationRequest, Reply, RequestFailure, Service, Sink, State};

const CONTEXT: usize = 3 * PAGE;

fn sizes() -> EngineConfig {
    EngineConfig {
        // Too little for all: some are preempted.
        cache_positions: CONTEXT + PAGE,
        max_running: 4,
        max_waiting: 100,
        max_rows: 19,
        ..EngineConfig::single("tiny", CONTEXT)
    }
}

/// The engine's replies to a single request.
fn alone(tiny: &TinyModel, request: &GenerationRequest) -> Vec<Reply> {
    let mut engine = tiny.engine(EngineConfig::single("tiny", CONTEXT));
    engine.submit(request.clone()).unwrap();
    let mut replies = Vec::new();
    while !engine.is_idle() {
        let events = engine.step().unwrap().into_iter();
        replies.extend(events.map(|event| event.reply));
    }
    alike(replies)
}

/// Removes what depends on earlier requests: the reused prompt tokens.
fn alike(replies: Vec<Reply>) -> Vec<Reply> {
    let alike = |reply| match reply {
        Reply::PromptRead { logprobs, .. } => Reply::PromptRead {
            reused: 0,
            logprobs,
            read_by: None,
        },
        other => other,
    };
    replies.into_iter().map(alike).collect()
}

#[test]
fn an_engine_for_one_is_busy_as_it_says() {
    let tiny = TinyModel::new(1);
    let engine = tiny.engine(EngineConfig::single("tiny", CONTEXT));
    let runner = Runner::start(engine, Instant::now);
    let request = &mixed(&tiny)[5];
    // At most one runs and one waits; the time of the start depends on the thread.
    let mut taken = Vec::new();
    let failure = loop {
        let (sink, replies) = sink();
        match runner.submit(request.clone(), sink) {
            Ok(_) => taken.push(replies),
            Err(failure) => break failure,
        }
    };
    assert_eq!(failure, RequestFailure::Busy { waiting: 1 });
    let expected = alone(&tiny, request);
    for replies in taken {
        assert_eq!(alike(replies.rest()), expected);
    }
}

/// Submits a request, or cancels an own one.
#[derive(Clone, Copy, Debug)]
enum CallerAction {
    Submit(usize),
    Cancel(usize),
    /// Waits for a reply of one request.
    Listen(usize),
}

fn calls() -> impl Strategy<Value = Vec<CallerAction>> {
    let call = prop_oneof![
        3 => (0..100usize).prop_map(CallerAction::Submit),
        1 => (0..100usize).prop_map(CallerAction::Cancel),
        3 => (0..100usize).prop_map(CallerAction::Listen),
    ];
    prop::collection::vec(call, 1..20)
}

struct Caller<'a> {
    runner: &'a Runner,
    requests: &'a [GenerationRequest],
    expected: &'a [Vec<Reply>],
    open: Vec<(crate::Ticket, usize, Replies, Vec<Reply>)>,
}

impl Caller<'_> {
    fn call(&mut self, call: CallerAction) {
        let n = self.open.len();
        match call {
            CallerAction::Submit(i) => {
                let (i, (sink, replies)) = (i % self.requests.len(), sink());
                let request = self.requests[i].clone();
                let ticket = self.runner.submit(request, sink).unwrap();
                self.open.push((ticket, i, replies, Vec::new()));
            }
            CallerAction::Cancel(i) if n > 0 => {
                let (ticket, request, replies, mut got) = self.open.remove(i % n);
                self.runner.cancel(ticket);
                got.extend(replies.rest());
                assert!(self.expected[request].starts_with(&alike(got)));
            }
            CallerAction::Listen(i) if n > 0 => {
                let (_, _, replies, got) = &mut self.open[i % n];
                got.extend(replies.0.recv_timeout(PATIENCE));
            }
            CallerAction::Cancel(_) | CallerAction::Listen(_) => {}
        }
    }

    fn end(self) {
        for (_, request, replies, mut got) in self.open {
            got.extend(replies.rest());
            assert_eq!(alike(got), self.expected[request]);
        }
    }
}

#[test]
fn random_callers_get_what_they_asked_for() {
    let tiny = TinyModel::new(1);
    let requests = mixed(&tiny);
    let expected: Vec<Vec<Reply>> = requests.iter().map(|r| alone(&tiny, r)).collect();
    let config = ProptestConfig::with_cases(60);
    proptest!(config, |(callers in prop::collection::vec(calls(), 1..4))| {
        let runner = Runner::start(tiny.engine(sizes()), Instant::now);
        thread::scope(|scope| {
            for calls in callers {
                let mut caller = Caller {
                    runner: &runner,
                    requests: &requests,
                    expected: &expected,
                    open: Vec::new(),
                };
                scope.spawn(move || {
                    calls.into_iter().for_each(|call| caller.call(call));
                    caller.end();
                });
            }
        });
        prop_assert_eq!(runner.inspect(crate::Engine::is_idle), Ok(true));
        let status = runner.status();
        prop_assert_eq!((status.state, status.running, status.waiting), (State::Ready, 0, 0));
    });
}

#[test]
fn replies_and_failures_survive_json() {
    let tiny = TinyModel::new(1);
    let mut all: Vec<Reply> = mixed(&tiny).iter().flat_map(|r| alone(&tiny, r)).collect();
    let reason = "rank 1: gone".to_owned();
    all.push(Reply::Failed(RequestFailure::Lost { reason }));
    all.push(Reply::Failed(RequestFailure::Busy { waiting: 3 }));
    let kinds: HashSet<_> = all.iter().map(std::mem::discriminant).collect();
    assert_eq!(kinds.len(), 4);
    for reply in all {
        let text = serde_json::to_string(&reply).unwrap();
        assert_eq!(serde_json::from_str::<Reply>(&text).unwrap(), reply);
    }
}

/// Takes all requests out of a runner after `n` replies, and continues them in another. Returns the
/// replies of each request, by index in `requests`.
fn moved(tiny: &TinyModel, requests: &[GenerationRequest], n: usize) -> Vec<Vec<Reply>> {
    let (sender, replies) = mpsc::channel();
    let sink = |i: usize| -> Sink {
        let sender = sender.clone();
        Box::new(move |reply| drop(sender.send((i, reply))))
    };
    let [here, there] = [(); 2].map(|()| Runner::start(tiny.engine(sizes()), Instant::now));
    let mut tickets = HashMap::new();
    for (i, request) in requests.iter().enumerate() {
        let ticket = here.submit(request.clone(), sink(i)).unwrap();
        tickets.insert(ticket, i);
    }
    let mut heard = vec![Vec::new(); requests.len()];
    for _ in 0..n {
        let (i, reply) = replies.recv_timeout(PATIENCE).unwrap();
        heard[i].push(reply);
    }
    for (ticket, snapshot) in here.take_all().unwrap() {
        let text = serde_json::to_string(&snapshot).unwrap();
        let snapshot = serde_json::from_str(&text).unwrap();
        there.resume(snapshot, sink(tickets[&ticket])).unwrap();
    }
    assert_eq!(here.inspect(crate::Engine::is_idle), Ok(true));
    drop(sender);
    replies.iter().for_each(|(i, reply)| heard[i].push(reply));
    heard
}

#[test]
fn requests_that_are_moved_lose_and_repeat_nothing() {
    let tiny = TinyModel::new(1);
    let requests = mixed(&tiny);
    let expected: Vec<Vec<Reply>> = requests.iter().map(|r| alone(&tiny, r)).collect();
    let replies = expected.iter().map(Vec::len).sum::<usize>();
    for n in (0..replies).step_by(replies / 8) {
        let heard = moved(&tiny, &requests, n);
        let heard: Vec<_> = heard.into_iter().map(alike).collect();
        assert_eq!(heard, expected, "moved after {n} replies");
    }
}

#[test]
fn nothing_is_taken_from_a_sink_s_own_thread_or_a_runner_that_is_empty() {
    let tiny = TinyModel::new(1);
    let runner = Arc::new(Runner::start(tiny.engine(sizes()), Instant::now));
    assert_eq!(runner.take_all().unwrap().len(), 0);
    let (sender, refused) = mpsc::channel();
    let own = Arc::clone(&runner);
    let sink = Box::new(move |_| {
        let _ = sender.send(own.take_all().is_err()); // only the first is received
    });
    runner.submit(mixed(&tiny)[0].clone(), sink).unwrap();
    assert_eq!(refused.recv_timeout(PATIENCE), Ok(true));
}
