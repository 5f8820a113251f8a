//! A machine reads prompts, another decodes: the same answers, also when the first is lost.

use serde_json::{Value, json};

use super::shared::{MODEL, up};
use super::{TestMachine, said, until};
use crate::nodes::http;

/// The text, and the tokens of the prompt that the machine that decodes did not compute, of how
/// many.
fn answer(port: u16, word: &str) -> (String, u64, u64) {
    let prompt = format!("{word} {}", "one two three four ".repeat(40));
    let body = json!({
        "model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 5,
    });
    let answer = http::ask(port, "/v1/completions", Some(&body));
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let usage = &answer.body["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    (
        answer.body["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned(),
        cached.as_u64().unwrap_or_default(),
        usage["prompt_tokens"].as_u64().unwrap(),
    )
}

fn ps(host: &TestMachine) -> Vec<Value> {
    let all: Value = serde_json::from_str(&host.told(&["ps", "--json"])).unwrap();
    all.as_array().unwrap().clone()
}

#[test]
fn a_machine_reads_prompts_for_another() {
    let one = up("one", None);
    let mut two = up("two", Some(&one));
    let load = ["load", MODEL, "--nodes", "one", "--threads", "1"];
    let refused = one.run(&[&load[..], &["--prefill-nodes", "one"]].concat());
    let why = said(&refused);
    assert!(
        why.contains("one is to decode and to read prompts"),
        "{why}"
    );
    one.told(&[&load[..], &["--prefill-nodes", "two"]].concat());
    assert_eq!(ps(&one)[0]["nodes"], json!(["one"]));
    assert_eq!(ps(&one)[0]["prompts"], json!(["two"]));

    let api = one.nodes()[0]["api"][0].as_str().unwrap().to_owned();
    let port: u16 = api.rsplit_once(':').unwrap().1.parse().unwrap();
    let (red, cached, tokens) = answer(port, "red");
    assert_eq!(cached, (tokens - 1) / 64 * 64, "of {tokens}");
    two.kill();
    let (blue, cached, _) = answer(port, "blue");
    assert_eq!(cached, 0, "computed by the machine that decodes");

    one.told(&["unload", MODEL]);
    until("it is gone", || ps(&one).is_empty());
    one.told(&load);
    assert_eq!(answer(port, "red").0, red);
    assert_eq!(answer(port, "blue").0, blue);
}
