//! `run` where a node runs: which of them computes, and what is loaded for a command alone.
//! Placements over HTTP, and the keys that may request them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;

use super::{TestMachine, until};
use crate::nodes::tiny::FAMILIES;

pub(super) const MODEL: &str = "llama.gguf";

/// A node named `name` with the tiny model in its home, which is in `first`'s cluster.
pub(super) fn up(name: &str, first: Option<&TestMachine>) -> TestMachine {
    up_with(name, first, &[])
}

/// As [`up`], with more options.
pub(super) fn up_with(name: &str, first: Option<&TestMachine>, more: &[&str]) -> TestMachine {
    let mut machine = TestMachine::new(name, None);
    FAMILIES[0].write(&machine.home.path().join(MODEL));
    let Some(first) = first else {
        machine.up(&[&["--control-port", "0"], more].concat());
        return machine;
    };
    let token = first.told(&["key", "cluster", "show"]);
    let file = machine.home.path().join("token");
    std::fs::write(&file, &token).unwrap();
    machine.told(&["join", "--token-file", file.to_str().unwrap()]);
    let peer = format!("127.0.0.1:{}", first.nodes()[0]["port"]);
    machine.up(&[&["--control-port", "0", "--peer", peer.as_str()], more].concat());
    until("they meet", || first.sees("alive").len() == 2);
    machine
}

/// An answer of 24 tokens, and its messages.
fn answer(machine: &TestMachine, more: &[&str]) -> (Value, String) {
    machine.answer(MODEL, more)
}

#[test]
fn run_asks_the_node_that_has_the_model_and_borrows_machines() {
    let one = up("one", None);
    let (here, line) = answer(&one, &[]);
    assert!(
        line.contains("computing here: no instance of llama.gguf is loaded"),
        "{line}"
    );
    let (local, line) = answer(&one, &["--local"]);
    assert!(!line.contains("here"), "{line}");
    assert_eq!(local["tokens"], here["tokens"]);

    one.told(&["load", MODEL, "--threads", "1"]);
    let (asked, line) = answer(&one, &[]);
    assert!(line.contains("asking the instance on one"), "{line}");
    assert_eq!(asked["tokens"], here["tokens"], "the same bits");
    assert_eq!(asked["text"], here["text"]);
    let (_, line) = answer(&one, &["--threads", "1"]);
    assert!(
        line.contains("computing here: --threads is about this process"),
        "{line}"
    );
    let (_, line) = answer(&one, &["--nodes", "2"]);
    assert!(
        line.contains("computing here on 2 local nodes: the cluster has 1"),
        "{line}"
    );
    one.told(&["unload", MODEL]);

    let two = up("two", Some(&one));
    let (borrowed, line) = answer(&two, &["--nodes", "2"]);
    assert!(
        line.contains("loaded over two, one for this command"),
        "{line}"
    );
    assert_eq!(borrowed["tokens"], here["tokens"]);
    assert_eq!(borrowed["nodes"], 2);
    until("it is given back", || one.told(&["ps", "--json"]) == "[]");
    // The machines are free again after a killed command too.
    let mut long = two.command(&["run", MODEL, "once", "--nodes", "2", "--json"]);
    let mut child = long.spawn().unwrap();
    until("it is loaded", || one.told(&["ps", "--json"]) != "[]");
    child.kill().unwrap();
    child.wait().unwrap();
    until("it is given back too", || {
        one.told(&["ps", "--json"]) == "[]"
    });
}

/// Status and JSON of an answer.
fn post(address: &str, key: Option<&str>, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = body.to_string();
    let key = key.map_or_else(String::new, |key| {
        format!("Authorization: Bearer {key}\r\n")
    });
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer[9..12].parse().unwrap();
    let body = answer.split_once("\r\n\r\n").map_or("", |it| it.1);
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

/// An admin's key previews placements and then loads one of them. A user's key, which may ask
/// models, may do neither.
#[test]
fn placements_are_previewed_and_one_is_loaded_over_http() {
    let mut one = TestMachine::new("one", None);
    FAMILIES[0].write(&one.home.path().join(MODEL));
    let user = one.told(&["key", "api", "new", "laptop"]);
    let admin = one.told(&["key", "api", "new", "owner", "--admin"]);
    assert!(one.told(&["key", "api", "list"]).contains("owner  (admin)"));
    one.up(&["--control-port", "0"]);
    let two = up("two", Some(&one));
    let api = one.api();

    let ask = serde_json::json!({ "model": MODEL, "threads": 1 });
    let preview = "/v1/paceline/preview";
    assert_eq!(post(&api, None, preview, &ask).0, 401);
    let (status, refused) = post(&api, Some(&user), preview, &ask);
    assert_eq!(
        (status, &refused["error"]["code"]),
        (403, &"admin_key_needed".into())
    );
    let (status, wrong) = post(
        &api,
        Some(&admin),
        preview,
        &serde_json::json!({ "modell": 1 }),
    );
    assert!(
        status == 400 && wrong.to_string().contains("modell"),
        "{wrong}"
    );

    let (status, told) = post(&api, Some(&admin), preview, &ask);
    assert_eq!(status, 200, "{told}");
    let placements = told["placements"].as_array().unwrap();
    let counts = placements
        .iter()
        .map(|it| it["nodes"].as_array().unwrap().len());
    let counts: std::collections::BTreeSet<usize> = counts.collect();
    assert_eq!(counts, [1, 2].into(), "{told}");
    for it in placements {
        assert!(it["decode_tok_s"].as_f64().unwrap() > 0.0, "{it}");
        assert_eq!(it["fits"], true, "{it}");
        assert_eq!(
            it["bytes"].as_array().unwrap().len(),
            it["nodes"].as_array().unwrap().len()
        );
    }
    let apart = placements
        .iter()
        .find(|it| it["nodes"] == Value::from(vec!["one", "two"]));
    let apart = apart.unwrap();
    assert!(
        apart["paths"][0]
            .as_str()
            .unwrap()
            .starts_with("one to two: "),
        "{apart}"
    );
    assert_eq!(one.told(&["ps", "--json"]), "[]", "nothing was loaded");
    commit_is_what_was_previewed(&one, &two, &api, (&user, &admin), apart);
}

/// Loads the placement `apart` by HTTP: the user's key may not, the admin's may.
fn commit_is_what_was_previewed(
    one: &TestMachine,
    two: &TestMachine,
    api: &str,
    (user, admin): (&str, &str),
    apart: &Value,
) {
    let commit = serde_json::json!({
        "model": MODEL, "nodes": apart["nodes"], "split": apart["split"], "threads": 1,
    });
    let load = "/v1/paceline/load";
    assert_eq!(post(api, Some(user), load, &commit).0, 403);
    assert_eq!(post(api, Some(admin), load, &commit).0, 200);
    until("it is ready", || {
        let all = two.ps();
        all[0]["state"] == "ready" && all[0]["split"] == apart["split"]
    });
    let table = one.told(&["load", MODEL, "--preview"]);
    assert!(
        table.starts_with("NODES") && table.contains("one, two"),
        "{table}"
    );
}
