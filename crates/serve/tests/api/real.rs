//! With an engine behind: scores of an echoed prompt. What parameters do is tested in the engine,
//! and from clients in `scripts/sdk/openai_python.py`.

use std::sync::Arc;

use serde_json::Value;

use crate::rig::{COMPLETE, Rig, chunks};
use crate::tiny;

fn rig() -> Rig {
    let (runner, model) = tiny::runner();
    Rig::over(Arc::new(runner), model)
}

fn text(choice: &Value) -> &str {
    choice["text"].as_str().unwrap()
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
