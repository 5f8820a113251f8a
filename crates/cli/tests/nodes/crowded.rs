//! Four clients, and another one that takes connections and sends prompts of megabytes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::testing::long;
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use serde_json::{Value, json};

use super::hostile::{memory_bytes, peak_bytes};
use super::server::{NodeServer, chat};
use super::tiny::FAMILIES;
use super::{TestHome, alone, http, until};

const CHAT: &str = "/v1/chat/completions";

/// Clients that ask as usual.
const CLIENTS: usize = 4;

/// How long they ask undisturbed: what the attack costs once, some hundred milliseconds of two
/// cores, is less than that.
const UNDISTURBED: Duration = Duration::from_secs(5);

/// Time until each client has this many answers.
fn time_of(port: u16, body: &Value, answers: usize) -> Duration {
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                for _ in 0..answers {
                    let answer = http::ask(port, CHAT, Some(body));
                    assert_eq!(answer.status, 200, "{answer:?}");
                }
            });
        }
    });
    start.elapsed()
}

/// Has this thread wait for all others of the machine, as an attacker elsewhere takes no cores.
fn step_back() {
    setpriority_process(None, 19).unwrap();
}

/// Connections that have said `text`. Those that the server ends stay among them.
fn connections(port: u16, text: &str, count: usize) -> Vec<TcpStream> {
    let connect = |_| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = stream.write_all(text.as_bytes()); // it may be closed already
        stream
    };
    (0..count).map(connect).collect()
}

/// Sends a request and reads the response, if any.
fn shout(port: u16, body: &str) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let sent = stream.write_all(head.as_bytes());
    let _ = sent.and_then(|()| stream.write_all(body.as_bytes()));
    let _ = stream.read_to_end(&mut Vec::new());
}

/// 512 idle connections, 700 halves of a head and six prompts of 8 MB. Requests of the others take
/// at most twice as long as without. The server's memory is as before ten seconds later.
#[test]
fn connections_and_long_prompts_of_one_slow_nobody_down() {
    let test = "connections_and_long_prompts_of_one_slow_nobody_down";
    if !long() {
        return eprintln!("SKIPPED {test} (its time): PACELINE_TEST_LONG is not set");
    }
    let _alone = alone();
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let world = TestHome::new();
    let model = world.write_model(FAMILIES[0]);
    let server = NodeServer::start(&world, &model, &[]);
    let (port, id) = (server.port, server.running.id());
    let body = chat(&model, "hi", &json!({"max_tokens": 32}));
    let prompt = "All work and no play. ".repeat(380_000);
    let long_body = chat(&model, &prompt, &json!({})).to_string();

    let tried = time_of(port, &body, 20);
    let answers = (20.0 * UNDISTURBED.as_secs_f64() / tried.as_secs_f64()).ceil() as usize;
    let undisturbed = time_of(port, &body, answers);
    let before = memory_bytes(id);
    let (over, end) = channel::<()>();
    let (begin, begun) = channel();
    let disturbed = thread::scope(|scope| {
        scope.spawn(move || {
            step_back();
            let idle = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
            let _held = [
                connections(port, idle, 512),
                connections(port, "GET / HTTP/1.1\r\nX: ", 700),
            ];
            begin.send(()).unwrap();
            let _ = end.recv(); // until `over` is dropped
        });
        begun.recv().unwrap();
        for _ in 0..6 {
            scope.spawn(|| {
                step_back();
                shout(port, &long_body);
            });
        }
        let disturbed = time_of(port, &body, answers);
        drop(over);
        disturbed
    });
    let peak = peak_bytes(id);
    let waited = until("memory is given back", || {
        memory_bytes(id) <= before + 30_000_000
    });
    eprintln!(
        "{CLIENTS} clients with {answers} answers each: undisturbed {undisturbed:.2?}, disturbed \
         {disturbed:.2?}; memory {before} bytes, at most {peak}, given back after {waited:.1?}"
    );
    assert!(peak <= before + 150_000_000, "{before} bytes, then {peak}");
    assert!(waited <= Duration::from_secs(10), "{waited:?}");
    assert!(
        disturbed <= 2 * undisturbed,
        "{undisturbed:?}, then {disturbed:?}"
    );
    server.stop(1);
}
