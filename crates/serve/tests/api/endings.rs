//! How answers end otherwise than by their last token: clients that leave, failures, deadlines,
//! slow readers, and the server's own end.

use std::io::Read;
use std::time::{Duration, Instant};

use paceline_base::testing::Stopwatch;
use paceline_engine::{RequestFailure, State};

use crate::client::{PATIENCE, connect, receive};
use crate::rig::{Rig, refusal};
use crate::scripted::Script;

fn lost() -> RequestFailure {
    let reason = "rank 2 was killed by signal 9".to_owned();
    RequestFailure::Lost { reason }
}

/// Within an answer, and before its first reply.
#[test]
fn a_client_that_leaves_stops_its_answer() {
    for (fields, n) in [
        (r#""stream":true"#, 1),
        ("", 1),
        (r#""n":3,"stream":true"#, 3),
        (r#""n":3"#, 3),
    ] {
        for script in [Script::Endless, Script::Silence] {
            let rig = Rig::new();
            let is_read = matches!(script, Script::Endless);
            rig.service.script(script);
            let mut stream = rig.begin("", fields);
            rig.service
                .wait("the request", |requests, _, _| requests == n);
            if is_read && fields.contains("stream") {
                stream.read_exact(&mut [0; 200]).unwrap();
            }
            drop(stream);
            rig.service.wait("cancelling", |_, cancelled, replying| {
                (cancelled, replying) == (n, 0)
            });
        }
    }
}

#[test]
fn an_answer_that_is_over_is_not_cancelled() {
    let rig = Rig::new();
    assert_eq!(rig.chat(r#""stream":true"#).all_events().len(), 7);
    rig.chat(r#""n":4"#).ok("n");
    assert_eq!(rig.service.cancelled(), 0);
}

#[test]
fn failures_have_their_status() {
    let unavailable = RequestFailure::Unavailable {
        reason: "rank 1 is gone".into(),
    };
    let invalid = RequestFailure::Invalid {
        reason: "token 5 is out".into(),
    };
    let too_long = RequestFailure::PromptTooLong {
        tokens: 9,
        context: 8,
    };
    for (failure, status, code, text) in [
        (
            RequestFailure::Busy { waiting: 3 },
            429,
            "server_busy",
            "3 requests",
        ),
        (lost(), 500, "answer_lost", "rank 2"),
        (unavailable, 503, "model_unavailable", "rank 1"),
        (invalid, 400, "invalid_value", "token 5"),
        (too_long, 400, "context_length_exceeded", "9 tokens"),
    ] {
        let rig = Rig::new();
        for script in [
            Script::Refuse(failure.clone()),
            Script::Fail(0, failure.clone()),
        ] {
            for fields in ["", r#""stream":true"#] {
                // A failure that comes after the prompt was read is an event of the stream.
                let is_event = matches!(script, Script::Fail(..)) && !fields.is_empty();
                rig.service.script(script.clone());
                let response = rig.chat(fields);
                if is_event {
                    let events = response.all_events();
                    let last = events.last().unwrap();
                    assert!(last.contains(code) && last.contains(text), "{events:?}");
                    continue;
                }
                if [429, 503].contains(&status) {
                    assert!(
                        response
                            .header("retry-after")
                            .unwrap()
                            .parse::<u32>()
                            .is_ok()
                    );
                }
                let (got, got_code, _, message) = refusal(response);
                assert_eq!((got, got_code.as_str()), (status, code), "{message}");
                assert!(message.contains(text), "{message}");
            }
        }
    }
}

#[test]
fn a_failure_under_way_is_an_error_event_and_no_end() {
    let rig = Rig::new();
    rig.service.script(Script::Fail(3, lost()));
    let events = rig.chat(r#""stream":true"#).all_events();
    let last: serde_json::Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "answer_lost");
    assert_eq!(last["error"]["type"], "server_error");
    assert!(
        last["error"]["message"]
            .as_str()
            .unwrap()
            .contains("rank 2")
    );
    assert_eq!(events.len(), 5);
    assert!(!events.contains(&"[DONE]".to_owned()));
}

#[test]
fn one_choice_that_fails_ends_the_others() {
    let rig = Rig::new();
    rig.service.script(Script::Fail(1, lost()));
    let (status, ..) = refusal(rig.chat(r#""n":3"#));
    assert_eq!(status, 500);
    rig.service
        .wait("cancelling", |_, cancelled, _| cancelled == 2);
}

#[test]
fn a_service_that_vanishes_is_a_failure() {
    let rig = Rig::new();
    rig.service.script(Script::Vanish);
    let (status, code, ..) = refusal(rig.chat(""));
    assert_eq!((status, code.as_str()), (500, "answer_lost"));
}

#[test]
fn deadlines_end_answers() {
    let rig = Rig::with(|config| {
        config.times.request = Duration::from_millis(300);
        config.times.first_reply = Duration::from_millis(50);
    });
    rig.service.script(Script::Silence);
    let (status, code, ..) = refusal(rig.chat(""));
    assert_eq!((status, code.as_str()), (504, "deadline_exceeded"));
    rig.service.script(Script::Endless);
    let events = rig.chat(r#""stream":true"#).all_events();
    assert!(events.last().unwrap().contains("deadline_exceeded"));
    rig.service.wait("cancelling", |_, cancelled, replying| {
        (cancelled, replying) == (2, 0)
    });
}

#[test]
fn a_silent_stream_is_kept_alive_by_comments() {
    let rig = Rig::with(|config| {
        config.times.first_reply = Duration::from_millis(20);
        config.times.keep_alive = Duration::from_millis(20);
    });
    rig.service.script(Script::Silence);
    let mut response = rig.chat(r#""stream":true"#);
    assert_eq!(response.status, 200);
    assert_eq!(response.events().unwrap().len(), 1, "the role");
    for _ in 0..3 {
        assert_eq!(response.events(), Some(vec![]), "a comment");
    }
}

#[test]
fn a_slow_reader_is_cut_off_and_told() {
    let rig = Rig::with(|config| config.limits.unread_replies = 100);
    rig.service.script(Script::Endless);
    let stream = rig.begin("", r#""stream":true"#);
    // Nothing is read: the sockets fill, then the channel, and the answer is stopped.
    rig.service.wait("cancelling", |_, cancelled, replying| {
        (cancelled, replying) == (1, 0)
    });
    let events = receive(stream).all_events();
    assert!(
        events.last().unwrap().contains("slow_reader"),
        "{:?}",
        events.last()
    );
    assert!(!events.contains(&"[DONE]".to_owned()));
}

#[test]
fn a_reader_that_takes_nothing_is_closed() {
    let rig = Rig::with(|config| {
        config.limits.unread_replies = 100;
        config.times.stalled_write = Duration::from_millis(200);
    });
    rig.service.script(Script::Endless);
    let _stream = rig.begin("", r#""stream":true"#);
    rig.service
        .wait("cancelling", |_, cancelled, _| cancelled == 1);
    let metrics = || rig.get("/metrics").text();
    let start = Instant::now();
    while !metrics().contains("paceline_requests_in_flight 0") {
        assert!(start.elapsed() < PATIENCE);
    }
}

#[test]
fn a_model_that_is_not_ready_is_unavailable() {
    let rig = Rig::new();
    for (state, status, code, text) in [
        (State::Loading, "loading", "model_loading", "being loaded"),
        (
            State::Failed("rank 1 died".into()),
            "failed",
            "model_unavailable",
            "rank 1 died",
        ),
    ] {
        rig.service.state(state);
        let response = rig.chat("");
        assert!(response.header("retry-after").is_some());
        let (got, got_code, _, message) = refusal(response);
        assert_eq!((got, got_code.as_str()), (503, code));
        assert!(message.contains(text), "{message}");
        let health = rig.get("/health");
        assert_eq!(health.status, 503);
        let health = health.json();
        assert_eq!(health["status"], status);
        if status == "failed" {
            assert_eq!(health["reason"], "rank 1 died");
        }
    }
    rig.service.state(State::Ready);
    assert_eq!(rig.get("/health").status, 200);
}

#[test]
fn shutting_down_ends_streams_after_the_grace_time() {
    let rig = Rig::with(|config| {
        config.times.grace = Duration::from_millis(300);
        config.times.headers = 4 * PATIENCE;
    });
    rig.service.script(Script::Endless);
    let mut response = rig.chat(r#""stream":true"#);
    response.events().unwrap();
    let whole = rig.begin("", "");
    // An idle connection must not keep the server.
    let idle = connect(rig.addr);
    rig.service
        .wait("both requests", |requests, _, _| requests == 2);
    let (service, start) = (rig.service.clone(), Instant::now());
    rig.handle.shutdown();
    rig.handle.shutdown();
    let events = response.all_events();
    assert!(
        events.last().unwrap().contains("shutting_down"),
        "{:?}",
        events.last()
    );
    let (status, code, ..) = refusal(receive(whole));
    assert_eq!((status, code.as_str()), (503, "shutting_down"));
    rig.join();
    assert!(start.elapsed() < Duration::from_secs(5));
    service.wait("cancelling", |_, cancelled, replying| {
        (cancelled, replying) == (2, 0)
    });
    drop(idle);
}

#[test]
fn shutting_down_does_not_wait_for_who_takes_nothing() {
    let rig = Rig::with(|config| {
        config.times.grace = Duration::from_millis(100);
        config.times.stalled_write = 4 * PATIENCE;
    });
    rig.service.script(Script::Endless);
    let _stream = rig.begin("", r#""stream":true"#);
    rig.service
        .wait("the request", |requests, _, _| requests == 1);
    let start = Stopwatch::start();
    rig.handle.shutdown();
    rig.join();
    assert!(start.elapsed() < Duration::from_secs(5));
}
