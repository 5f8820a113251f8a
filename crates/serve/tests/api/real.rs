//! With an engine behind: what the parameters do, and that answers can be had again.

use std::sync::Arc;

use serde_json::Value;

use crate::rig::{COMPLETE, Rig, chunks, refusal};
use crate::tiny;

fn rig() -> Rig {
    let (runner, model) = tiny::runner(8);
    Rig::over(Arc::new(runner), model)
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().unwrap()
}

#[test]
fn equal_seeds_give_equal_answers_and_choices_have_seeds_in_a_row() {
    let rig = rig();
    let fields = |seed: u64, n: u64| {
        format!(r#""seed":{seed},"n":{n},"max_tokens":12,"logit_bias":{{"257":-100}}"#)
    };
    let three = rig.complete(&fields(5, 3)).json();
    let choices = three["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_ne!(text(&choices[0]), text(&choices[1]));
    for (i, choice) in choices.iter().enumerate() {
        let alone = rig.complete(&fields(5 + i as u64, 1)).json();
        assert_eq!(text(&alone["choices"][0]), text(choice));
        assert_eq!(choice["index"], i);
    }
    assert_eq!(three["usage"]["completion_tokens"], 36);
}

#[test]
fn streams_say_what_whole_answers_say() {
    let rig = rig();
    let fields = r#""seed":3,"n":2,"max_tokens":20,"logprobs":2,"logit_bias":{"257":-100}"#;
    let whole = rig.complete(fields).json();
    let chunks = chunks(rig.complete(&format!(r#"{fields},"stream":true"#)));
    for index in 0..2 {
        let of = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let of: Vec<&Value> = of.filter(|choice| choice["index"] == index).collect();
        let whole = &whole["choices"][index];
        let said: String = of.iter().map(|choice| text(choice)).collect();
        assert_eq!(said, text(whole));
        for part in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let joined: Vec<&Value> = of
                .iter()
                .flat_map(|choice| choice["logprobs"][part].as_array().unwrap())
                .collect();
            let expected = whole["logprobs"][part].as_array().unwrap();
            assert_eq!(joined, expected.iter().collect::<Vec<_>>(), "{part}");
            assert_eq!(expected.len(), 20);
        }
    }
}

#[test]
fn parameters_change_the_answer() {
    let rig = rig();
    let greedy = rig.complete(r#""temperature":0,"max_tokens":8"#).json();
    let again = rig
        .complete(r#""temperature":0,"max_tokens":8,"seed":9"#)
        .json();
    let greedy = text(&greedy["choices"][0]).to_owned();
    assert_eq!(text(&again["choices"][0]), greedy);
    let narrow = rig.complete(r#""top_k":1,"max_tokens":8"#).json();
    assert_eq!(text(&narrow["choices"][0]), greedy);
    let nucleus = rig.complete(r#""top_p":0,"max_tokens":8"#).json();
    assert_eq!(text(&nucleus["choices"][0]), greedy);
    // 97 is the token "a".
    let biased = rig
        .complete(r#""logit_bias":{"97":100},"max_tokens":5"#)
        .json();
    assert_eq!(text(&biased["choices"][0]), "aaaaa");
    let stopped = rig
        .complete(r#""logit_bias":{"97":100},"stop":"aaa","max_tokens":9"#)
        .json();
    assert_eq!(text(&stopped["choices"][0]), "");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // 257 ends an answer.
    let ended = rig
        .chat(r#""logit_bias":{"257":100},"logprobs":true"#)
        .json();
    let choice = &ended["choices"][0];
    assert_eq!(choice["message"]["content"], "");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["logprobs"]["content"], serde_json::json!([]));
    // Three tokens, then the one that ends it.
    let late = rig
        .complete(r#""logit_bias":{"257":100},"min_tokens":3,"max_tokens":9"#)
        .json();
    assert_eq!(late["usage"]["completion_tokens"], 4, "{late}");
    assert_eq!(late["choices"][0]["finish_reason"], "stop");
    let nothing = rig.complete(r#""max_tokens":0"#).json();
    assert_eq!(nothing["choices"][0]["finish_reason"], "length");
    assert_eq!(nothing["usage"]["completion_tokens"], 0);
    // The context of 256 ends it.
    let all = rig
        .complete(r#""logit_bias":{"97":100},"max_tokens":100000"#)
        .json();
    assert_eq!(all["usage"]["total_tokens"], 256);
    assert_eq!(all["choices"][0]["finish_reason"], "length");
}

/// As evaluation harnesses ask: prompts of ids, an echo with log-probabilities, one token or none.
#[test]
fn an_echo_with_logprobs_scores_the_prompt() {
    let rig = rig();
    let body = |more: &str| {
        format!(
            r#"{{"model":"tiny","prompt":[[97,98,99,257,228,184,173],[100]],"echo":true,"logprobs":2,
                "temperature":0{more}}}"#
        )
    };
    let read = rig.post(COMPLETE, &body(r#","max_tokens":0"#)).json();
    let scores = &read["choices"][0]["logprobs"];
    assert_eq!(text(&read["choices"][0]), "abc中");
    assert_eq!(read["choices"][0]["finish_reason"], "length");
    let names = [
        "a",
        "b",
        "c",
        "<|im_end|>",
        r"bytes:\xe4",
        r"bytes:\xb8",
        r"bytes:\xad",
    ];
    assert_eq!(scores["tokens"], serde_json::json!(names));
    assert_eq!(
        scores["text_offset"],
        serde_json::json!([0, 1, 2, 3, 3, 3, 3])
    );
    for part in ["token_logprobs", "top_logprobs"] {
        assert!(
            scores[part][0].is_null(),
            "nothing is before the first token"
        );
        assert_eq!(scores[part].as_array().unwrap().len(), 7);
    }
    let one = &read["choices"][1]["logprobs"];
    assert_eq!(one["token_logprobs"], serde_json::json!([null]));
    // The same numbers as when a bias makes the model say the token.
    let said = r#""prompt":[97],"logit_bias":{"98":100},"max_tokens":1,"logprobs":2"#;
    let said = rig
        .post(COMPLETE, &format!(r#"{{"model":"tiny",{said}}}"#))
        .json();
    let said = &said["choices"][0]["logprobs"];
    assert_eq!(scores["token_logprobs"][1], said["token_logprobs"][0]);
    assert_eq!(scores["top_logprobs"][1], said["top_logprobs"][0]);
    // Further tokens come behind, and streams say the same.
    let fields = r#","max_tokens":5,"logit_bias":{"257":-100}"#;
    let whole = rig.post(COMPLETE, &body(fields)).json();
    let chunks = chunks(rig.post(COMPLETE, &body(&format!(r#"{fields},"stream":true"#))));
    for (index, prompt) in [(0, 7), (1, 1)] {
        let whole = &whole["choices"][index];
        let of = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let of: Vec<&Value> = of.filter(|choice| choice["index"] == index).collect();
        let streamed: String = of.iter().map(|choice| text(choice)).collect();
        assert_eq!(streamed, text(whole));
        for part in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let joined: Vec<&Value> = of
                .iter()
                .flat_map(|choice| choice["logprobs"][part].as_array().unwrap())
                .collect();
            let expected = whole["logprobs"][part].as_array().unwrap();
            assert_eq!(joined, expected.iter().collect::<Vec<_>>(), "{part}");
            assert_eq!(expected.len(), prompt + 5);
            assert_eq!(
                expected[..prompt],
                read["choices"][index]["logprobs"][part].as_array().unwrap()[..]
            );
        }
    }
}

#[test]
fn a_full_queue_is_told() {
    let (runner, model) = tiny::runner(1);
    let rig = Rig::over(Arc::new(runner), model);
    // Sixteen choices at once, four run and one waits.
    let response = rig.complete(r#""n":16,"max_tokens":200"#);
    let (status, code, ..) = refusal(response);
    assert_eq!((status, code.as_str()), (429, "server_busy"));
    // The place is free as soon as the engine has seen that the others were given up.
    let start = std::time::Instant::now();
    while rig.complete(r#""max_tokens":4"#).status != 200 {
        assert!(start.elapsed() < crate::client::PATIENCE);
    }
}

/// Ten tools with schemas as OpenCode writes them.
fn opencode_tools() -> Value {
    let tool = |i: usize| {
        serde_json::json!({"type": "function", "function": {
            "name": format!("tool{i}"),
            "description": "Does what it says. ".repeat(30),
            "parameters": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "The file."},
                    "limit": {"type": "integer", "exclusiveMinimum": 0,
                              "maximum": 9007199254740991u64},
                },
                "required": ["path"],
                "additionalProperties": false,
            },
        }})
    };
    (0..10).map(tool).collect()
}

/// The shape of OpenCode 1.18's requests, as `clients-2026.md` has it.
#[test]
fn the_second_turn_of_opencode_finds_its_first_in_the_cache() {
    let (runner, model) = tiny::tool_runner();
    let rig = Rig::over(Arc::new(runner), model);
    let mut body = serde_json::json!({
        "model": "tiny", "max_tokens": 4, "temperature": 0, "tool_choice": "auto",
        "tools": opencode_tools(), "logit_bias": {"257": -100},
        "messages": [
            {"role": "system", "content": "You are OpenCode. ".repeat(100)},
            {"role": "user", "content": "Say hello"},
        ],
    });
    let ask = |body: &Value| {
        let response = rig.post(crate::rig::CHAT, &body.to_string());
        assert_eq!((response.status, response.header("warning")), (200, None));
        response.json()
    };
    let first = ask(&body);
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(
        prompt > 6400,
        "99 % are whole pages of 64 tokens from there on: {prompt}"
    );
    let turns = body["messages"].as_array_mut().unwrap();
    let call = serde_json::json!({"id": "c1", "type": "function",
        "function": {"name": "tool1", "arguments": "{\"path\":\"a\"}"}});
    turns.extend([
        serde_json::json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        serde_json::json!({"role": "tool", "tool_call_id": "c1", "content": "42"}),
    ]);
    let second = ask(&body);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached * 100 >= prompt * 99, "{cached} of {prompt}");
}
