//! How connections are treated: refusals that are seen, places that idle clients do not take, and
//! clients that stop sending.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use paceline_auth::keys::KeyRole;
use paceline_engine::{Finish, State};

use crate::client::{connect, raw, receive};
use crate::rig::{CHAT, Rig, TestKeys, chat_body, chat_bytes, refusal};
use crate::scripted::Script;

const JSON: &str = "Content-Type: application/json\r\n";

fn post(headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON}{headers}\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

#[test]
fn a_client_that_sends_all_before_it_looks_sees_the_refusal() {
    let mut keys = TestKeys::new();
    let (_, key, _) = keys.make("a", KeyRole::User);
    let rig = keys.rig(|config| config.limits.body_bytes = 1 << 20);
    let body = "x".repeat(24 << 20);
    for (header, status) in [
        (key, 413),
        // Refused before its body: read on until the client has seen it.
        (String::new(), 401),
    ] {
        let mut stream = connect(rig.addr);
        stream.write_all(post(&header, &body).as_bytes()).unwrap();
        assert_eq!(receive(stream).status, status);
    }
}

#[test]
fn bodies_are_read_uncompressed() {
    let rig = Rig::new();
    let got = refusal(receive(rig.begin("Content-Encoding: gzip\r\n", "")));
    assert_eq!(
        (got.0, got.1.as_str()),
        (415, "unsupported_content_encoding")
    );
    receive(rig.begin("Content-Encoding: identity\r\n", "")).ok("identity");
}

#[test]
fn what_is_no_http_is_told_why() {
    let rig = Rig::new();
    let get = |target: &str, more: &str| {
        format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")
    };
    let long = |n: usize| format!("/{}", "x".repeat(n));
    let many = "A: b\r\n".repeat(20_000);
    for (request, status, code) in [
        (get(&long(40_000), ""), 414, "uri_too_long"),
        (get("/", &many), 431, "headers_too_large"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), 400, "invalid_http"),
    ] {
        let (got, got_code, ..) = refusal(raw(rig.addr, request.as_bytes()));
        assert_eq!((got, got_code.as_str()), (status, code));
    }
    // Longer than a head may be at all: one of the two, with words.
    let (status, ..) = refusal(raw(rig.addr, get(&long(100_000), "").as_bytes()));
    assert!([414, 431].contains(&status), "{status}");
}

#[test]
fn a_client_that_has_sent_all_gets_its_answer() {
    let rig = Rig::new();
    rig.service
        .script(Script::Late(Duration::from_millis(600), "late"));
    let mut stream = rig.begin("", "");
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    // Told that it is heard, then answered.
    let rest = answer
        .strip_prefix("HTTP/1.1 100 Continue\r\n\r\n")
        .expect(&answer);
    assert!(
        rest.starts_with("HTTP/1.1 200") && rest.contains("late"),
        "{answer}"
    );
    // HTTP/1.0 has no interim answers: its clients would take one for the last (RFC 9110, 15.2).
    let old = chat_bytes("", "").replace("HTTP/1.1", "HTTP/1.0");
    let mut stream = connect(rig.addr);
    stream.write_all(old.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.0 200") && answer.contains("late"),
        "{answer}"
    );
}

#[test]
fn connections_are_kept_between_requests() {
    let rig = Rig::with(|config| {
        config.times.headers = Duration::from_millis(200);
        config.times.idle = Duration::from_secs(30);
    });
    let mut stream = connect(rig.addr);
    let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(ask).unwrap();
    receive(stream.try_clone().unwrap()).ok("first");
    // Longer than headers may take.
    std::thread::park_timeout(Duration::from_millis(500));
    stream.write_all(ask).unwrap();
    receive(stream.try_clone().unwrap()).ok("second");
}

#[test]
fn idle_connections_and_half_heads_keep_nobody_out() {
    let rig = Rig::with(|config| {
        config.limits.connections = 16;
        config.times.headers = Duration::from_secs(60);
        config.times.idle = Duration::from_secs(60);
    });
    let idle: Vec<_> = (0..16)
        .map(|i| {
            let mut stream = connect(rig.addr);
            if i % 2 == 0 {
                let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(ask).unwrap();
                receive(stream.try_clone().unwrap()).ok("health");
            } else {
                stream.write_all(b"GET / HTTP/1.1\r\nX: ").unwrap();
            }
            stream
        })
        .collect();
    let start = Instant::now();
    for _ in 0..4 {
        rig.chat("").ok("beside idle ones");
    }
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "{:?}",
        start.elapsed()
    );
    drop(idle);
}

#[test]
fn connections_without_a_key_have_few_requests() {
    let rig = TestKeys::new().rig(|_| {});
    let mut stream = connect(rig.addr);
    let mut answered = 0;
    while answered < 100 {
        let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
        if stream.write_all(ask).is_err() {
            break;
        }
        let response = receive(stream.try_clone().unwrap());
        answered += 1;
        let is_last = response.header("connection") == Some("close");
        response.ok("health");
        if is_last {
            break;
        }
    }
    assert_eq!(answered, 8);
}

#[test]
fn one_key_leaves_places_to_another() {
    let mut keys = TestKeys::new();
    let (_, greedy, _) = keys.make("greedy", KeyRole::User);
    let (_, modest, _) = keys.make("modest", KeyRole::User);
    let rig = keys.rig(|config| {
        config.limits.requests = 4;
        config.limits.requests_of_one = 2;
    });
    rig.service.script(Script::Silence);
    let held = [(); 2].map(|()| rig.begin(&greedy, ""));
    rig.service.wait("both", |requests, _, _| requests == 2);
    rig.service
        .script(Script::Say(vec![(97, "a")], Finish::EndOfText));
    let ask = |key: &str| receive(rig.begin(key, ""));
    let refused = ask(&greedy);
    assert_eq!(refused.header("retry-after"), Some("1"));
    let (status, code, ..) = refusal(refused);
    assert_eq!((status, code.as_str()), (429, "client_busy"));
    ask(&modest).ok("another key");
    // The engine knows the clients, between which it shares its slots.
    let clients: Vec<u64> = rig
        .service
        .requests()
        .iter()
        .map(|r| r.order.client)
        .collect();
    assert_eq!(clients.len(), 3);
    assert!(
        clients[0] == clients[1] && clients[1] != clients[2],
        "{clients:?}"
    );
    assert!(!clients.contains(&0), "{clients:?}");
    drop(held);
}

/// Why a model fails or recovers may name files of the machine: not for a client without a key.
#[test]
fn strangers_do_not_hear_why_a_model_failed() {
    let mut keys = TestKeys::new();
    let (_, header, _) = keys.make("a", KeyRole::User);
    let rig = keys.rig(|_| {});
    let reason = || "/home/me/model.gguf: cannot read".to_owned();
    for state in [State::Failed(reason()), State::Recovering(reason())] {
        rig.service.state(state);
        let told = |headers: &str| rig.send("GET", "/health", headers, "").text();
        let (stranger, holder) = (told(""), told(&header));
        assert!(!stranger.contains("/home/me"), "{stranger}");
        assert!(stranger.contains("an API key is needed"), "{stranger}");
        assert!(holder.contains("/home/me/model.gguf"), "{holder}");
    }
}

#[test]
fn a_revoked_keys_stream_ends() {
    let mut keys = TestKeys::new();
    let (_, header, id) = keys.make("a", KeyRole::User);
    let rig = keys.rig(|_| {});
    rig.service.script(Script::Silence);
    let stream = rig.begin(&header, r#""stream":true"#);
    rig.service
        .wait("the request", |requests, _, _| requests == 1);
    keys.keys.revoke(&id).unwrap();
    let start = Instant::now();
    rig.service
        .wait("the end", |_, cancelled, _| cancelled == 1);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    let response = receive(stream);
    let text = response.text();
    assert!(text.contains("revoked"), "{text}");
}

#[test]
fn texts_far_over_the_context_are_refused_by_their_bytes() {
    let rig = Rig::new();
    // A token per byte at least, in a context of 256.
    let long = "x".repeat(6 << 20);
    let body = chat_body("").replace("hi", &long);
    let start = Instant::now();
    let (status, code, ..) = refusal(rig.post(CHAT, &body));
    assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
    assert!(start.elapsed() < Duration::from_secs(20));
}
