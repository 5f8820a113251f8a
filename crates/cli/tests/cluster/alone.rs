//! A single machine: without a network, at rest, and what is refused.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use super::{TestMachine, said, until};
use crate::nodes::embeddings::{check_as, encoder};
use crate::nodes::http;

#[test]
fn a_node_runs_alone_and_once() {
    let mut machine = TestMachine::new("solo", None);
    let output = machine.run(&["nodes"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("hint: start it"),
        "{}",
        said(&output)
    );
    let token = machine.told(&["key", "cluster", "show"]);
    machine.up(&["--control-port", "0"]);
    assert_eq!(machine.sees("alive"), ["solo"]);
    assert_eq!(
        machine.told(&["key", "cluster", "show"]),
        token,
        "at rest and up"
    );
    let second = machine.run(&["up", "--port", "0", "--control-port", "0"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(
        said(&second).contains("a node already runs"),
        "{}",
        said(&second)
    );
    let output = machine.run(&["nodes", "rm", "solo"]);
    assert!(
        said(&output).contains("solo is this node"),
        "{}",
        said(&output)
    );
    let output = machine.run(&["join", "12345"]);
    assert!(said(&output).contains("six digits"), "{}", said(&output));
    machine.kill();
    let output = machine.run(&["nodes", "--json"]);
    assert!(said(&output).contains("does not run"), "{}", said(&output));
}

/// An encoder has no workers: the node itself makes its vectors.
#[test]
fn an_encoder_is_loaded_and_unloaded() {
    let mut machine = TestMachine::new("solo", None);
    machine.up(&["--control-port", "0"]);
    let port = machine.port();
    let folder = encoder("qwen3-last");
    machine.told(&["load", &folder, "--threads", "1"]);
    until("a door is open", || {
        let list = http::ask(port, "/v1/models", None).body;
        list["data"][0]["id"] == folder.as_str()
    });
    check_as(port, &folder, "qwen3-last");
    machine.told(&["unload", &folder]);
    until("the door is closed", || {
        let list = http::ask(port, "/v1/models", None).body;
        list["data"].as_array().unwrap().is_empty()
    });
}

/// The API of a node without a model tells how it is, and why it answers nothing.
#[test]
fn a_node_without_a_model_has_an_api() {
    let mut machine = TestMachine::new("solo", None);
    machine.up(&["--control-port", "0"]);
    let address = machine.api();
    let ask = |method: &str, path: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        let head = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0";
        write!(stream, "{method} {path} {head}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    for (method, path, status, part) in [
        ("GET", "/health", "200", "\"status\":\"idle\""),
        ("GET", "/nodes", "200", "\"name\":\"solo\""),
        ("GET", "/v1/models", "200", "\"data\":[]"),
        ("POST", "/v1/chat/completions", "503", "no_model_loaded"),
        ("POST", "/v1/messages", "503", "no model loaded"),
    ] {
        let answer = ask(method, path);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{path}: {answer}"
        );
        assert!(answer.contains(part), "{path}: {answer}");
    }
}

#[test]
fn machines_join_by_token_at_rest_and_up() {
    let mut one = TestMachine::new("one", None);
    let mut two = TestMachine::new("two", None);
    let token = one.told(&["key", "cluster", "show"]);
    let file = two.home.path().join("token");
    std::fs::write(&file, &token).unwrap();
    let join = ["join", "--token-file", file.to_str().unwrap()];
    two.told(&join);
    assert_eq!(two.told(&["key", "cluster", "show"]), token);
    one.up(&["--control-port", "0"]);
    two.up(&["--control-port", "0"]);
    let (first, second) = (one.nodes(), two.nodes());
    assert_ne!(first[0]["id"], second[0]["id"], "two identities");
    // Beacons of one machine need another interface than loopback; a peer needs its port.
    two.kill();
    let peer = format!("127.0.0.1:{}", first[0]["port"]);
    two.up(&["--control-port", "0", "--peer", &peer]);
    until("they meet", || one.sees("alive") == ["one", "two"]);
    let output = two.run(&join);
    assert!(said(&output).contains("already"), "{}", said(&output));
    two.told(&["leave"]);
    until("it is gone", || one.nodes().len() == 1);
    assert_ne!(two.told(&["key", "cluster", "show"]), token);
    two.told(&join);
    until("they meet again", || one.sees("alive") == ["one", "two"]);
}
