//! Chat templates of real models against Jinja as `transformers` runs it: plain turns, tools with
//! results, reasoning kept and dropped. Recorded by `scripts/golden/chat_templates.py`;
//! `golden/text/README.md` names each template's licence.

#![allow(clippy::unwrap_used, reason = "tests, and functions of tests")]

use std::collections::BTreeMap;

use crate::support::{chat_templates, golden, tiny_tokenizer};
use paceline_text::chat::{ChatMessage, ChatOptions, ChatTemplate, Error, TemplateError};
use paceline_text::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
    templates: Vec<Recorded>,
}

/// A conversation and the template's variables.
#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<ChatMessage>,
    #[serde(default)]
    tools: Vec<Json>,
    #[serde(default)]
    variables: Map<String, Json>,
    /// Whether the prompt ends without the beginning of an answer.
    #[serde(default)]
    is_ended: bool,
}

/// The conversations, rendered by a template.
#[derive(Deserialize)]
struct Recorded {
    name: String,
    sha256: String,
    /// By case: the text, `{"sha256"}` of a text, or `{"error"}` of a refusal.
    rendered: BTreeMap<String, Json>,
}

/// The time of the recording: 2026-07-26 09:08:07 UTC.
const NOW: i64 = 1_785_056_887;

/// Renderings in the file: 32 templates by 12 cases, less those that end in an error of Python.
const COMPARED: usize = 373;

fn sha256(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

fn outcome(template: &ChatTemplate, tokenizer: &Tokenizer, case: &Case) -> Json {
    let options = ChatOptions {
        add_generation_prompt: !case.is_ended,
        now_unix_s: Some(NOW),
        tools: case.tools.clone(),
        variables: case.variables.clone(),
        ..ChatOptions::default()
    };
    match template.render(tokenizer, &case.messages, &options) {
        Ok(text) => text.into(),
        Err(Error::Template(TemplateError::Raised { message })) => json!({"error": message}),
        Err(error) => json!({"failed": error.to_string()}),
    }
}

/// The first difference of two texts, with some text before; both outcomes when they are no texts.
fn difference(got: &Json, expected: &Json) -> String {
    let (Some(got), Some(expected)) = (got.as_str(), expected.as_str()) else {
        return format!("got {got}, expected {expected}");
    };
    let same = |(a, b): &(char, char)| a == b;
    let at = got.chars().zip(expected.chars()).take_while(same).count();
    let part =
        |text: &str| -> String { text.chars().skip(at.saturating_sub(60)).take(140).collect() };
    format!("got {:?}, expected {:?}", part(got), part(expected))
}

#[test]
fn templates_of_families_equal_transformers() {
    let Some(folder) = chat_templates("templates_of_families_equal_transformers") else {
        return;
    };
    let golden: Golden = golden("templates.json");
    let tokenizer = tiny_tokenizer(&["<s>", "</s>"]);
    let mut different = Vec::new();
    let mut compared = 0;
    for recorded in &golden.templates {
        let path = folder.join(format!("{}.jinja", recorded.name));
        let source = std::fs::read_to_string(path).unwrap();
        assert_eq!(sha256(&source), recorded.sha256, "{}", recorded.name);
        let template = ChatTemplate::new(&source).unwrap();
        for case in &golden.cases {
            let Some(expected) = recorded.rendered.get(&case.name) else {
                continue;
            };
            compared += 1;
            let mut got = outcome(&template, &tokenizer, case);
            if let (Some(text), Some(_)) = (got.as_str(), expected.get("sha256")) {
                got = json!({"sha256": sha256(text)});
            }
            if got != *expected {
                let how = difference(&got, expected);
                different.push(format!("{}, {}: {how}", recorded.name, case.name));
            }
        }
    }
    assert_eq!(different, [""; 0], "{}", different.join("\n"));
    assert_eq!(compared, COMPARED);
}
