//! Bounds on connections, requests and bodies, and bytes that are no HTTP.

use std::io::{Read, Write};
use std::time::Duration;

use crate::client::{connect, raw, receive};
use crate::rig::{CHAT, COMPLETE, Rig, chat_body, refusal};
use crate::scripted::Script;

fn head(length: &str) -> String {
    format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    )
}

#[test]
fn long_bodies_are_refused_before_they_are_read() {
    let rig = Rig::with(|config| config.limits.body_bytes = 1000);
    let declared = raw(rig.addr, head("Content-Length: 99999999999").as_bytes());
    let (status, code, _, message) = refusal(declared);
    assert_eq!(
        (status, code.as_str()),
        (413, "body_too_large"),
        "{message}"
    );
    assert!(message.contains("1000 bytes"), "{message}");
    let chunk = format!("200\r\n{}\r\n", "x".repeat(512));
    let chunked = head("Transfer-Encoding: chunked") + &chunk.repeat(3) + "0\r\n\r\n";
    assert_eq!(refusal(raw(rig.addr, chunked.as_bytes())).0, 413);
    // A space more than allowed, and exactly as much.
    let body = chat_body("");
    let pad = |n: usize| format!("{body}{}", " ".repeat(n - body.len()));
    assert_eq!(rig.post(CHAT, &pad(1001)).status, 413);
    rig.post(CHAT, &pad(1000)).ok("1000 bytes");
}

#[test]
fn bodies_that_do_not_come_are_given_up() {
    let rig = Rig::with(|config| config.times.body = Duration::from_millis(100));
    let mut stream = connect(rig.addr);
    stream
        .write_all((head("Content-Length: 100") + "{").as_bytes())
        .unwrap();
    let (status, code, ..) = refusal(receive(stream));
    assert_eq!((status, code.as_str()), (408, "body_timeout"));
}

#[test]
fn headers_that_do_not_come_are_given_up() {
    let rig = Rig::with(|config| config.times.headers = Duration::from_millis(100));
    for start in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: localhost\r\nX: "] {
        let mut stream = connect(rig.addr);
        stream.write_all(start.as_bytes()).unwrap();
        let mut rest = Vec::new();
        // The end of the connection, with or without a word.
        stream.read_to_end(&mut rest).unwrap();
        let rest = String::from_utf8(rest).unwrap();
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 4"), "{rest}");
    }
}

#[test]
fn what_a_page_sends_is_json_by_declaration() {
    let rig = Rig::new();
    let origin = format!("Origin: http://localhost:{}\r\n", rig.addr.port());
    let body = chat_body("");
    for (kind, status) in [
        ("", 200),
        ("Content-Type: application/x-www-form-urlencoded\r\n", 200),
        ("Content-Type:\r\n", 200),
        ("ORIGIN", 415),
        ("ORIGINContent-Type: text/plain\r\n", 415),
        (
            "ORIGINContent-Type: application/x-www-form-urlencoded\r\n",
            415,
        ),
        (
            "ORIGINContent-Type: multipart/form-data; boundary=application/json\r\n",
            415,
        ),
        ("ORIGINContent-Type: text/plain; application/json\r\n", 415),
        ("ORIGINContent-Type: application/json5\r\n", 415),
        ("ORIGINContent-Type: application/json\r\n", 200),
        ("Content-Type: Application/JSON ; charset=utf-8\r\n", 200),
    ] {
        let headers = kind.replace("ORIGIN", &origin);
        let response = rig.send("POST", CHAT, &headers, &body);
        assert_eq!(response.status, status, "{kind}");
    }
}

#[test]
fn garbage_is_answered_or_closed_and_harms_nobody() {
    let rig = Rig::new();
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"\0\0\0\0\0\0\0\0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \xff\x00\r\n\r\n",
    ] {
        let mut stream = connect(rig.addr);
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        // A connection with unread bytes may be reset.
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
            "{bytes:?}: {answer}"
        );
    }
    assert_eq!(rig.get("/health").status, 200);
}

#[test]
fn requests_over_the_bound_are_told_to_come_later() {
    let rig = Rig::with(|config| config.limits.requests = 2);
    rig.service.script(Script::Silence);
    let held = [(); 2].map(|()| rig.begin("", ""));
    rig.service
        .wait("both requests", |requests, _, _| requests == 2);
    for path in [CHAT, COMPLETE] {
        let response = rig.post(path, "{}");
        assert_eq!(response.header("retry-after"), Some("1"));
        let (status, code, _, message) = refusal(response);
        assert_eq!((status, code.as_str()), (429, "server_busy"));
        assert!(message.starts_with("2 requests"), "{message}");
    }
    assert_eq!(rig.get("/health").status, 200);
    // No other node could have these, so none is asked.
    for id in ["resp_0", "x"] {
        let (status, code, ..) = refusal(rig.get(&format!("/v1/responses/{id}")));
        assert_eq!((status, code.as_str()), (404, "response_not_found"), "{id}");
    }
    assert!(
        rig.get("/metrics")
            .text()
            .contains("paceline_requests_in_flight 2")
    );
    drop(held);
    rig.service
        .wait("cancelling", |_, cancelled, _| cancelled == 2);
}

#[test]
fn a_thousand_requests_in_parallel_are_all_answered() {
    let rig = Rig::with(|config| config.limits.connections = 64);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let ask = || {
            (0..25)
                .map(|_| rig.chat(r#""stream":true"#).status)
                .collect::<Vec<u16>>()
        };
        let threads: Vec<_> = (0..40).map(|_| scope.spawn(ask)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(statuses.len(), 1000);
    // Connections over the bound on requests are refused; none is lost.
    assert!(statuses.iter().all(|status| [200, 429].contains(status)));
    assert!(statuses.iter().filter(|status| **status == 200).count() > 500);
}

#[test]
fn paths_and_methods_that_are_not_there() {
    let rig = Rig::new();
    for (method, path, status, code, allow) in [
        ("GET", "/nothing", 404, "unknown_url", None),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found", None),
        ("GET", "/v1/models/%ff", 404, "model_not_found", None),
        ("GET", "/v1/models/", 404, "unknown_url", None),
        ("GET", CHAT, 405, "method_not_allowed", Some("POST")),
        ("DELETE", COMPLETE, 405, "method_not_allowed", Some("POST")),
        (
            "POST",
            "/v1/models",
            405,
            "method_not_allowed",
            Some("GET, HEAD"),
        ),
        (
            "DELETE",
            "/v1/models/tiny",
            405,
            "method_not_allowed",
            Some("GET, HEAD"),
        ),
        (
            "OPTIONS",
            "/health",
            405,
            "method_not_allowed",
            Some("GET, HEAD"),
        ),
        ("TRACE", "/", 405, "method_not_allowed", Some("GET, HEAD")),
    ] {
        let response = rig.send(method, path, "", "");
        assert_eq!(response.header("allow"), allow, "{method} {path}");
        let (got, got_code, ..) = refusal(response);
        assert_eq!((got, got_code.as_str()), (status, code), "{method} {path}");
    }
    assert_eq!(rig.send("HEAD", "/health", "", "").status, 200);
    let unknown = rig.post(CHAT, r#"{"model":"gpt-4","messages":[]}"#);
    let (status, code, param, _) = refusal(unknown);
    assert_eq!(
        (status, code.as_str(), param.as_deref()),
        (404, "model_not_found", Some("model"))
    );
    rig.post(CHAT, &chat_body("").replace("tiny", "org/tiny"))
        .ok("alias");
}
