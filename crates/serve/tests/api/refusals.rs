//! Every field's edges, by table: the name, code and text of what is refused.

use crate::fields::merge;
use crate::rig::{CHAT, COMPLETE, Rig, refusal};

/// The rows of `refusals.tsv` for the endpoints `kinds`.
fn refuses(path: &str, kinds: [&str; 2]) {
    let rig = Rig::new();
    let table = include_str!("refusals.tsv").lines();
    let mut checked = 0;
    for row in table.filter(|row| !row.starts_with('#')) {
        let columns: Vec<&str> = row.split('\t').collect();
        let [kind, fields, code, param, text] = columns[..] else {
            panic!("{row:?}");
        };
        if !kinds.contains(&kind) {
            continue;
        }
        let body = merge(path, fields);
        let (status, got, at, message) = refusal(rig.post(path, &body));
        assert_eq!((status, got.as_str()), (400, code), "{fields}: {message}");
        assert_eq!(at.as_deref(), Some(param), "{fields}: {message}");
        assert!(message.contains(text), "{fields}: {message}");
        checked += 1;
    }
    assert!(checked > 60, "{checked} rows");
    assert_eq!(rig.service.requests(), []);
}

#[test]
fn wrong_fields_of_chats_are_refused_by_name() {
    refuses(CHAT, ["both", "chat"]);
}

#[test]
fn wrong_fields_of_completions_are_refused_by_name() {
    refuses(COMPLETE, ["both", "completion"]);
}

#[test]
fn counts_have_bounds() {
    let rig = Rig::new();
    let list = |item: &str, n: usize| vec![item; n].join(",");
    let biases: Vec<String> = (0..1025).map(|i| format!("\"{i}\":0")).collect();
    let notes: Vec<String> = (0..17).map(|i| format!("\"{i}\":\"\"")).collect();
    let message = r#"{"role":"user","content":"a"}"#;
    let part = r#"{"type":"text","text":"a"}"#;
    let (long_note, parts) = ("x".repeat(513), list(part, 257));
    for (path, fields, param) in [
        (
            CHAT,
            format!(r#""logit_bias":{{{}}}"#, biases.join(",")),
            "logit_bias",
        ),
        (
            CHAT,
            format!(r#""metadata":{{{}}}"#, notes.join(",")),
            "metadata",
        ),
        (
            CHAT,
            format!(r#""metadata":{{"a":"{long_note}"}}"#),
            "metadata.a",
        ),
        (CHAT, format!(r#""user":"{long_note}""#), "user"),
        (CHAT, format!(r#""stop":"{}""#, "x".repeat(1025)), "stop"),
        (CHAT, format!(r#""stop":[{}]"#, list("\"a\"", 65)), "stop"),
        (
            CHAT,
            format!(r#""messages":[{}]"#, list(message, 2049)),
            "messages",
        ),
        (
            CHAT,
            format!(r#""messages":[{{"role":"user","content":[{parts}]}}]"#),
            "messages[0].content",
        ),
        (
            COMPLETE,
            format!(r#""prompt":[{}]"#, list("\"a\"", 65)),
            "prompt",
        ),
    ] {
        let (status, code, at, message) = refusal(rig.post(path, &merge(path, &fields)));
        assert_eq!(
            (status, code.as_str()),
            (400, "invalid_value"),
            "{param}: {message}"
        );
        assert_eq!(at.as_deref(), Some(param), "{message}");
    }
}
