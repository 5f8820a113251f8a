//! Two whole copies of a model on two machines: which of them answers, and what is left when one is
//! killed.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::shared::{MODEL, up};
use super::{TestMachine, until};
use crate::nodes::http;

/// Tokens of an answer during which a machine dies: some seconds of this model.
const LONG: u32 = 1500;

/// The replica on the machine of this name, as `host` tells.
fn on(host: &TestMachine, name: &str) -> Value {
    let mut all = host.ps().into_iter();
    all.find(|it| it["nodes"] == json!([name])).unwrap()
}

/// Requests that `host` has given to the replica on each machine.
fn asked(host: &TestMachine) -> BTreeMap<String, u64> {
    let name = |it: &Value| it["nodes"][0].as_str().unwrap().to_owned();
    let all = host.ps().into_iter();
    all.map(|it| (name(&it), it["asked"].as_u64().unwrap()))
        .collect()
}

/// A prompt of some blocks that begins with `word`.
fn prompt(word: &str, end: &str) -> String {
    format!("{word} {}{end}", "one two three four ".repeat(60))
}

fn body(prompt: &str, tokens: u32) -> Value {
    json!({
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "seed": 5,
        "ignore_eos": true,
    })
}

/// The answer's text.
fn answer(port: u16, prompt: &str, tokens: u32) -> String {
    let answer = http::ask(port, "/v1/completions", Some(&body(prompt, tokens)));
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let text = &answer.body["choices"][0]["text"];
    text.as_str().unwrap().to_owned()
}

/// The machine whose replica answers a prompt.
fn home(host: &TestMachine, port: u16, prompt: &str) -> String {
    let before = asked(host);
    answer(port, prompt, 2);
    let after = asked(host).into_iter();
    let mut more = after.filter(|(name, n)| *n > before[name]);
    more.next().unwrap().0
}

/// The streamed text; `after` is called at the tenth piece.
fn streamed(port: u16, prompt: &str, tokens: u32, after: impl FnOnce()) -> String {
    let mut body = body(prompt, tokens);
    body["stream"] = true.into();
    let mut events = http::stream(port, "/v1/completions", &body);
    let (mut text, mut n, mut after) = (String::new(), 0, Some(after));
    while let Some(event) = events.event() {
        assert_eq!(event.get("error"), None, "{event}");
        if event == "[DONE]" {
            return text;
        }
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        n += 1;
        if n == 10
            && let Some(after) = after.take()
        {
            after();
        }
    }
    panic!("the stream ended without its end: {text}");
}

#[test]
fn replicas_keep_prefixes_and_outlive_each_other() {
    let one = up("one", None);
    let mut two = up("two", Some(&one));
    let ask = ["load", MODEL, "--replicas", "2", "--threads", "1"];
    let preview = one.told(&[&ask[..], &["--preview", "--json"]].concat());
    let preview: Value = serde_json::from_str(&preview).unwrap();
    let mut placements = preview["placements"].as_array().unwrap().iter();
    let apart = placements.find(|it| it["replicas"] == json!([["one"], ["two"]]));
    assert_eq!(apart.unwrap()["nodes"], json!(["one", "two"]), "{preview}");
    let refused = one.run(&["load", MODEL, "--replicas", "2", "--nodes", "3"]);
    assert!(
        super::said(&refused).contains("3 nodes are wanted and 2 live"),
        "{}",
        super::said(&refused)
    );
    assert!(one.ps().is_empty(), "nothing is loaded yet");
    let loaded = one.told(&ask);
    for line in ["replica 1/2 answers, on ", "replica 2/2 answers, on "] {
        assert!(loaded.contains(line), "{loaded}");
    }
    let table = one.told(&["ps"]);
    assert!(table.contains("llama.gguf replica 2/2"), "{table}");
    let numbers = ["one", "two"].map(|name| on(&one, name)["replica"]["number"].as_u64());
    assert!(numbers.contains(&Some(1)) && numbers.contains(&Some(2)));

    let port = one.port();
    let path = "/v1/completions";
    // The one that was ready later is asked until it has answered as often.
    until("both answer", || {
        http::ask(port, path, Some(&body("go", 1)));
        let asked = asked(&one);
        let level = asked["one"].abs_diff(asked["two"]) < 2;
        level && asked.values().all(|n| *n > 0)
    });
    let words = ["red", "blue", "green", "black", "white", "brown", "grey"];
    let mut words = words.into_iter();
    let word = words.find(|word| home(&one, port, &prompt(word, "a")) == "two");
    let word = word.expect("requests without a known prefix are shared out");
    for end in ["b", "c"] {
        assert_eq!(home(&one, port, &prompt(word, end)), "two", "{word} {end}");
    }

    let long = prompt(word, "d");
    let expected = answer(port, &long, LONG);
    let given = asked(&one)["one"];
    assert_eq!(streamed(port, &long, LONG, || two.kill()), expected);
    assert_eq!(asked(&one)["one"], given + 1, "it went on at one");
    let short = answer(port, &long, 5);
    assert!(expected.starts_with(&short), "new requests are answered");
    only_one_is_left(&one, port, &long);
}

/// The dead replica is reported as dead and unloaded; then the other.
fn only_one_is_left(one: &TestMachine, port: u16, prompt: &str) {
    until("its owner is dead", || {
        on(one, "two")["state"] == "recovering"
    });
    let number = on(one, "two")["replica"]["number"].to_string();
    one.told(&["unload", MODEL, "--replica", &number]);
    until("it is gone", || one.ps().len() == 1);
    assert_eq!(on(one, "one")["state"], "ready");
    answer(port, prompt, 5);
    let refused = one.run(&["unload", MODEL, "--replica", "7"]);
    let said = super::said(&refused);
    assert!(said.contains("no replica 7"), "{said}");
    one.told(&["unload", MODEL]);
    until("all are gone", || one.ps().is_empty());
}
