//! Requests of Claude Code, Codex and OpenCode, replayed.
//!
//! `agents.json` is recorded by `scripts/golden/agent_requests.py`, which names the versions: all
//! that gives a request its form, with lengths instead of the agents' prompts and descriptions.

use paceline_engine::Finish;
use serde_json::Value;

use crate::rig::Rig;
use crate::scripted::Script;
use crate::tiny;

/// Filler for a text of `characters`. It has half as many, since each is a token of this
/// model and Claude Code's prompt has to fit its context.
fn filler(characters: u64) -> String {
    let length = (characters as usize / 2).max(1);
    "word after "
        .chars()
        .cycle()
        .take(length)
        .collect::<String>()
        + "."
}

/// `value` with filler for the texts that were left out.
fn filled(value: &Value) -> Value {
    match value {
        Value::Object(map) => match map.get("$text").and_then(Value::as_u64) {
            Some(characters) => filler(characters).into(),
            None => {
                let filled = map.iter().map(|(key, it)| (key.clone(), filled(it)));
                Value::Object(filled.collect())
            }
        },
        Value::Array(items) => items.iter().map(filled).collect(),
        other => other.clone(),
    }
}

/// Tokens that two prompts begin with.
fn common(one: &[u32], other: &[u32]) -> usize {
    let same = |(a, b): &(&u32, &u32)| a == b;
    one.iter().zip(other).take_while(same).count()
}

/// Sends the requests of a case in turn; the prompts of those with tools.
fn replay(case: &Value) -> Vec<Vec<u32>> {
    let rig = Rig::of(tiny::tool_model());
    let said = Script::Say(vec![(97, "ok")], Finish::EndOfText);
    rig.service.script(said);
    let mut prompts = Vec::new();
    for request in case["requests"].as_array().unwrap() {
        let body = filled(&request["body"]);
        let response = rig.post(request["path"].as_str().unwrap(), &body.to_string());
        let (status, text) = (response.status, response.text());
        assert_eq!(status, 200, "{} {}: {text}", case["agent"], case["case"]);
        if body["tools"].is_array() {
            prompts.push(rig.service.last().prompt);
        }
    }
    prompts
}

#[test]
fn recorded_requests_of_agents_are_answered_and_keep_their_prefix() {
    let recorded: Value = serde_json::from_str(include_str!("agents.json")).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 10, "five agents, a chat and a tool each");
    for case in cases {
        let prompts = replay(case);
        if case["case"] == "chat" {
            assert_eq!(prompts.len(), 1, "{}", case["agent"]);
            continue;
        }
        let [first, second] = prompts.as_slice() else {
            panic!("{}: {} requests with tools", case["agent"], prompts.len());
        };
        // Whole pages of 64 tokens are found again.
        let found = common(first, second) / 64 * 64;
        assert!(
            found * 100 >= first.len() * 99,
            "{}: {found} of {} tokens",
            case["agent"],
            first.len()
        );
    }
}
