//! A machine reads prompts in another class, another decodes: near answers, also when the first is
//! lost. In one class, over processes: `crate::nodes::apart`.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::shared::{MODEL, up};
use super::{TestMachine, said, until};
use crate::nodes::apart::assert_near;
use crate::nodes::http;
use crate::nodes::processes::{children, signal};

/// A greedy request with log-probabilities.
fn greedy(word: &str, tokens: u32) -> Value {
    let prompt = format!("{word} {}", "one two three four ".repeat(40));
    json!({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
           "logprobs": 1, "ignore_eos": true})
}

/// The choice, the tokens of the prompt that were read elsewhere, and the fingerprint.
fn choice(port: u16, request: &Value) -> (Value, u64, String) {
    let answer = http::ask(port, "/v1/completions", Some(request));
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let cached = &answer.body["usage"]["prompt_tokens_details"]["cached_tokens"];
    let name = answer.body["system_fingerprint"].as_str().unwrap();
    let choice = answer.body["choices"][0].clone();
    (choice, cached.as_u64().unwrap_or_default(), name.to_owned())
}

fn worker(host: &TestMachine) -> u32 {
    let node = host.node.as_ref().unwrap().id();
    until("it has one worker", || children(node).len() == 1);
    children(node)[0]
}

/// Machine one reads for machine two, which owns the instance. Answers name both classes, and the
/// loss of a worker of either loses none.
#[test]
fn a_machine_of_another_class_reads_prompts() {
    let one = up("one", None);
    let two = up("two", Some(&one));
    let load = ["load", MODEL, "--nodes", "two", "--threads", "1"];
    let load = [&load[..], &["--drafts", "0", "--class", "cpu-f32"]].concat();
    one.told(&load);
    let port = one.port();
    let asked = ["red", "blue"].map(|word| greedy(word, 24));
    let expected = asked.each_ref().map(|request| choice(port, request).0);
    one.told(&["unload", MODEL]);
    until("it is gone", || two.ps().is_empty());

    let apart = ["--prefill-nodes", "one", "--prefill-class", "cpu"];
    let load = [&load[..], &apart].concat();
    let why = said(&one.run(&[&load[..], &["--strict"]].concat()));
    assert!(why.contains("answers would only be near"), "{why}");
    let why = said(&one.run(&[&load[..], &["--prefill-nodes", "two"]].concat()));
    assert!(
        why.contains("two is to decode and to read prompts"),
        "{why}"
    );
    one.told(&load);
    let it = &one.ps()[0];
    assert_eq!(it["numbers"], "cpu>cpu-f32");
    assert_eq!(
        (&it["nodes"], &it["prompts"]),
        (&json!(["two"]), &json!(["one"]))
    );
    let models = http::ask(port, "/v1/models", None).body;
    assert_eq!(models["data"][0]["numbers"], "cpu>cpu-f32");
    for _ in 0..2 {
        let (near, cached, name) = choice(port, &asked[0]);
        assert!(cached > 0 && name.starts_with("cpu>cpu-f32-"), "{name}");
        assert_near(&near, &expected[0], 2e-2); // class cpu rounds activations to 15 bits
    }

    let reader = worker(&one);
    signal(reader, Signal::STOP);
    let (got, cached, name) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| choice(port, &asked[1]));
        signal(reader, Signal::KILL);
        asked.join().unwrap()
    });
    assert_eq!((got, cached), (expected[1].clone(), 0), "{name}");
    assert!(name.starts_with("cpu-f32-"), "{name}");

    let mut tries = 0;
    until("one reads again", || {
        tries += 1;
        let fresh = greedy(&format!("try {tries}"), 1);
        choice(port, &fresh).2.starts_with("cpu>")
    });
    let mut long = greedy("green", 200);
    long["stream"] = json!(true);
    let mut stream = http::stream(port, "/v1/completions", &long);
    let mut events = Vec::new();
    while let Some(event) = stream.event() {
        events.push(event);
        if events.len() == 20 {
            signal(worker(&two), Signal::KILL);
        }
    }
    assert_eq!(events.last(), Some(&json!("[DONE]")));
    let name = events[events.len() - 2]["system_fingerprint"].to_string();
    assert!(
        name.contains("cpu>") && name.contains("+continued"),
        "{name}"
    );
}
