//! Answers that move between runners are those of an engine alone.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use paceline_tensor::PAGE;

use super::Handover;
use crate::engine::tests::requests::mixed;
use crate::engine::tests::tiny::Tiny;
use crate::{EngineConfig, Event, Failure, Reply, Request, Runner, Service, Sink, State};

const CONTEXT: usize = 3 * PAGE;

/// Long enough for any machine; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

fn runner(tiny: &Tiny) -> Runner {
    Runner::start(tiny.engine(EngineConfig {
        model: "tiny".to_owned(),
        context: CONTEXT,
        cache_positions: CONTEXT + PAGE,
        max_running: 3,
        max_waiting: 100,
        max_rows: 19,
    }))
}

/// The tokens that a request gets when it is alone.
fn alone(tiny: &Tiny, request: &Request) -> Vec<u32> {
    let mut engine = tiny.engine(EngineConfig::single("tiny", CONTEXT));
    engine.submit(request.clone()).unwrap();
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        let events = engine.step().unwrap().into_iter();
        tokens.extend(events.filter_map(|event| match event {
            Event::Token { token, .. } => Some(token),
            _ => None,
        }));
    }
    tokens
}

fn sink() -> (Sink, Receiver<Reply>) {
    let (sender, replies) = channel();
    (Box::new(move |reply| drop(sender.send(reply))), replies)
}

/// The tokens of all replies until the sink is dropped, and whether the last reply is the end.
fn tokens(replies: &Receiver<Reply>) -> (Vec<u32>, bool) {
    let (mut tokens, mut finished) = (Vec::new(), false);
    while let Ok(reply) = replies.recv_timeout(PATIENCE) {
        match reply {
            Reply::Token { token, .. } => tokens.push(token),
            Reply::Finished { .. } => finished = true,
            Reply::PromptRead { .. } => {}
            Reply::Failed(failure) => panic!("{failure}"),
        }
    }
    (tokens, finished)
}

#[test]
fn callers_hear_the_same_however_often_the_service_changes() {
    let tiny = Tiny::new(1);
    let requests = mixed(&tiny);
    let expected: Vec<_> = requests.iter().map(|r| (alone(&tiny, r), true)).collect();
    let handover = Handover::new(runner(&tiny));
    thread::scope(|scope| {
        for caller in 0..3 {
            let (handover, requests, expected) = (&handover, &requests, &expected);
            scope.spawn(move || {
                for i in (0..requests.len()).map(|i| (i + 3 * caller) % requests.len()) {
                    let (sink, replies) = sink();
                    handover.submit(requests[i].clone(), sink).unwrap();
                    assert_eq!(tokens(&replies), expected[i], "request {i}");
                }
            });
        }
        for _ in 0..20 {
            handover.change(|| Ok(runner(&tiny))).unwrap();
        }
    });
    let status = handover.status();
    assert_eq!((status.running, status.waiting), (0, 0));
}

#[test]
fn what_comes_during_a_change_waits_for_its_end() {
    let tiny = Tiny::new(1);
    let requests = mixed(&tiny);
    let handover = Handover::new(runner(&tiny));
    let (kept, heard) = sink();
    let (forgotten, nothing) = sink();
    let change = handover.change(|| {
        assert!(handover.current().is_none());
        handover.submit(requests[2].clone(), kept).unwrap();
        let ticket = handover.submit(requests[2].clone(), forgotten).unwrap();
        assert_eq!(handover.status().waiting, 2);
        assert_eq!(handover.status().state, State::Ready);
        handover.cancel(ticket);
        let again = handover.change(|| panic!("not while another change is under way"));
        assert!(matches!(again, Err(Failure::Unavailable { .. })));
        Ok(runner(&tiny))
    });
    assert_eq!(change, Ok(()));
    assert_eq!(tokens(&heard), (alone(&tiny, &requests[2]), true));
    assert_eq!(tokens(&nothing), (Vec::new(), false));
}

#[test]
fn a_change_that_fails_ends_all_requests() {
    let tiny = Tiny::new(1);
    let request = &mixed(&tiny)[0];
    let handover = Handover::new(runner(&tiny));
    let (waits, heard) = sink();
    let failed = handover.change(|| {
        handover.submit(request.clone(), waits).unwrap();
        Err("no room".to_owned())
    });
    let reason = "the model cannot answer now: no room";
    assert_eq!(failed.unwrap_err().to_string(), reason);
    let lost = Failure::Lost {
        reason: reason.to_owned(),
    };
    assert_eq!(heard.recv_timeout(PATIENCE), Ok(Reply::Failed(lost)));
    assert_eq!(handover.status().state, State::Failed(reason.to_owned()));
    let refused = handover.submit(request.clone(), sink().0);
    assert!(matches!(refused, Err(Failure::Unavailable { .. })));
    assert!(handover.change(|| Ok(runner(&tiny))).is_err());
}
