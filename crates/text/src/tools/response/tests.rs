//! Response templates, and responses parsed by them.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::tools::Event;

/// Contents of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
struct RegionResponse {
    text: String,
    reasoning: String,
    calls: Vec<(String, Json)>,
    failed: usize,
}

fn tools() -> Vec<Json> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
    }});
    let function = json!({"name": "look", "parameters": parameters});
    vec![json!({"type": "function", "function": function})]
}

fn read(template: &Json, prompt: &str, pieces: &[&str], tools: &[Json]) -> RegionResponse {
    let template = Arc::new(ResponseTemplate::read(template).unwrap());
    let mut reader = template.reader_after(prompt, tools, ReaderOptions::default());
    let mut events: Vec<Event> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    events.extend(reader.finish());
    let mut answer = RegionResponse {
        failed: reader.failed_calls(),
        ..RegionResponse::default()
    };
    for event in events {
        match event {
            Event::Text(text) => answer.text.push_str(&text),
            Event::Reasoning(text) => answer.reasoning.push_str(&text),
            Event::CallStart { name, .. } => answer.calls.push((name, Json::Null)),
            Event::Arguments { piece, .. } => {
                let call = answer.calls.last_mut().unwrap();
                call.1 = serde_json::from_str(&piece).unwrap();
            }
            Event::CallEnd { .. } => {}
            Event::CallFailed { .. } => panic!("a call was told before it was complete"),
        }
    }
    answer
}

/// With patterns around JSON.
fn hermes() -> Json {
    json!({
        "start_anchor": "<|start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": "\\s*<tool_call>", "close": "</tool_call>", "content": "json", "repeats": true,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": "\\s*<\\|end\\|>"},
        },
    })
}

/// With names in delimiters, parameters in tags, and regions that begin with an answer.
fn tags() -> Json {
    json!({
        "start_anchor_pattern": "<bot\\d>",
        "fields": {
            "reasoning_content": {"open": ["<t>", "<thought>"], "close": ["</t>", "</thought>"]},
            "tool_calls": {
                "open_pattern": "<f=(?P<name>\\w+)>", "close_pattern": "</f>\\s*", "content": "xml-inline",
                "content_args": {"tag_pattern": "<p=(?P<key>\\w+)>(?P<value>.*?)</p>"},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    })
}

/// A list of calls behind a marker, to the end of the answer.
fn list() -> Json {
    json!({
        "start_anchor": ["[/INST]"],
        "fields": {
            "tool_calls": {
                "open": "[CALLS]", "content": "json", "transform_each": true,
                "transform": {"id": "{id}", "function": {"name": "{name}", "arguments": "{args}"}},
            },
            "content": {"content": "text", "content_args": {"strip": false}},
        },
    })
}

/// A template, the end of a prompt, an answer, its text, reasoning, calls and failures.
type Case = (
    Json,
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    Vec<(&'static str, Json)>,
    usize,
);

#[expect(clippy::too_many_lines, reason = "a table of answers")]
fn cases() -> Vec<Case> {
    let none = Vec::new;
    let look = |arguments: Json| ("look", arguments);
    vec![
        (
            hermes(),
            "",
            "\n Hello. \n<|end|>\n",
            "Hello.",
            "",
            none(),
            0,
        ),
        (
            hermes(),
            "<|start|>user\nx<|start|>assistant\n<think>\n",
            "hm <tool_call>{}</think>\n\nHi",
            "Hi",
            "hm <tool_call>{}",
            none(),
            0,
        ),
        (
            hermes(),
            "<|start|>assistant\n",
            "<think>a</think>I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"K\\n\"}}\n\
             </tool_call>\n<tool_call>{\"name\":\"look\",\"arguments\":{\"days\":\"3\"}}</tool_call>",
            "I look.",
            "a",
            vec![look(json!({"city": "K\n"})), look(json!({"days": 3}))],
            0,
        ),
        (
            hermes(),
            "",
            "a <tool_call>{\"name\": </tool_call> b",
            "a <tool_call>{\"name\": </tool_call> b",
            "",
            none(),
            1,
        ),
        (
            hermes(),
            "",
            "<tool_call>{\"name\": \"look\", \"arguments\": {}}",
            "<tool_call>{\"name\": \"look\", \"arguments\": {}}",
            "",
            none(),
            1,
        ),
        (
            tags(),
            "<bot1><bot2><t",
            ">x</t><f=look><p=city>1</p><p=days>2</p></f> <f=other></f>ok",
            "ok",
            "x",
            vec![look(json!({"city": "1", "days": 2})), ("other", json!({}))],
            0,
        ),
        (
            tags(),
            "<t>",
            "y</t><thought>z</thought>",
            "y</t>",
            "z",
            none(),
            0,
        ),
        (
            list(),
            "[/INST]",
            " So [CALLS] [{\"name\": \"look\", \"id\": \"a1\", \"args\": {\"days\": 1}}]",
            " So",
            "",
            vec![look(json!({"days": 1}))],
            0,
        ),
        (
            list(),
            "[/INST]",
            "[CALLS][{\"name\": \"look\", \"args\": {}}]",
            "[CALLS][{\"name\": \"look\", \"args\": {}}]",
            "",
            none(),
            1,
        ),
    ]
}

#[test]
fn answers_by_templates() {
    for (template, prompt, answer, text, reasoning, calls, failed) in cases() {
        let calls = calls.into_iter().map(|(name, it)| (name.to_owned(), it));
        let expected = RegionResponse {
            text: text.to_owned(),
            reasoning: reasoning.to_owned(),
            calls: calls.collect(),
            failed,
        };
        assert_eq!(
            read(&template, prompt, &[answer], &tools()),
            expected,
            "{answer:?}"
        );
    }
}

#[test]
fn without_tools_calls_are_text() {
    let answer = "<tool_call>{\"name\": \"look\"}</tool_call>";
    let got = read(&hermes(), "", &[answer], &[]);
    assert_eq!((got.text.as_str(), got.failed), (answer, 0));
}

#[test]
fn templates_that_cannot_be_used_are_refused() {
    let with = |path: &str, value: Json| {
        let mut template = hermes();
        *template.pointer_mut(path).unwrap() = value;
        template
    };
    let calls = |key: &str, value: Json| {
        let mut template = hermes();
        template["fields"]["tool_calls"][key] = value;
        template
    };
    let mut other = hermes();
    other["version"] = json!(2);
    let mut unknown = hermes();
    unknown["ends"] = json!("x");
    for (template, expected) in [
        (
            json!([]),
            "response_template: the whole is [], expected an object",
        ),
        (other, "response_template has version 2, expected 1"),
        (unknown, "response_template: key \"ends\" is not known"),
        (
            with("/fields", json!({})),
            "response_template has 0 fields, expected 1 to 32",
        ),
        (
            with("/start_anchor", Json::Null),
            "response_template has no start_anchor",
        ),
        (
            with("/start_anchor", json!([])),
            "response_template: start_anchor is [], expected a text that is not empty, a list of such, \
             or a pattern instead",
        ),
        (
            calls("clos", json!("x")),
            "field \"tool_calls\": key \"clos\" is not known",
        ),
        (
            calls("open", json!("x")),
            "field \"tool_calls\": open_pattern is \"\\\\s*<tool_call>\", expected a text that is not \
             empty, a list of such, or a pattern instead",
        ),
        (
            calls("content", json!("yaml")),
            "field \"tool_calls\": content is \"yaml\", expected text, int, float, bool, json, \
             xml-inline or kv-lines",
        ),
        (
            calls("open_pattern", Json::Null),
            "fields \"tool_calls\" and \"content\" both have no open, expected one at most",
        ),
        (
            with("/fields/content", json!({"open": "x", "close": ["a", ""]})),
            "field \"content\": close is [\"a\",\"\"], expected a text that is not empty, a list of such, \
             or a pattern instead",
        ),
    ] {
        let error = ResponseTemplate::read(&template).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    for pattern in ["(", "a(?=b)", "a{1000}{1000}"] {
        let template = calls("open_pattern", json!(pattern));
        let error = ResponseTemplate::read(&template).unwrap_err();
        assert!(matches!(error, ResponseError::Pattern { .. }), "{error}");
    }
    let large = with("/defaults", json!({"x": "y".repeat(MAX_BYTES)}));
    let error = ResponseTemplate::read(&large).unwrap_err();
    assert!(matches!(error, ResponseError::TooLarge { .. }), "{error}");
}

#[test]
fn names_of_control_tokens_are_found_in_patterns() {
    let template = ResponseTemplate::read(&hermes()).unwrap();
    assert!(template.has_calls() && template.reasons());
    for (name, expected) in [
        ("<|end|>", true),
        ("<tool_call>", true),
        ("<pad>", false),
        ("", false),
    ] {
        assert_eq!(template.mentions(name), expected, "{name}");
    }
}

fn cases_of_a_run() -> u32 {
    if paceline_base::testing::long() {
        100_000
    } else {
        1000
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases_of_a_run()))]

    /// Pieces of markup in any order never panic and do not depend on the cuts.
    #[test]
    fn the_same_whatever_the_pieces(
        template in prop::sample::select(vec![hermes(), tags(), list()]),
        prompt in prop::sample::select(vec!["", "<|start|>assistant\n<think>", "<bot1>", "[/INST] "]),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "{\"name\": \"look\", \"arguments\": {", "}}", "<|end|>",
            "<|en", "<t>", "</thought>", "<f=look>", "<f=", "<p=days>", "2", "</p>", "</f>", "\n", " ", "a", "é", "\"",
            "[CALLS]", "[{\"name\": \"look\", \"id\": \"\", \"args\": {}}]", "[", "<",
        ]), 0..14),
        cut in 0..200usize,
    ) {
        let text = parts.concat();
        let mut places = (0..=cut.min(text.len())).rev();
        let cut = places.find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let whole = read(&template, prompt, &[&text], &tools());
        let (front, back) = text.split_at(cut);
        prop_assert_eq!(&read(&template, prompt, &[front, back], &tools()), &whole);
        let one_by_one: Vec<String> = text.chars().map(String::from).collect();
        let one_by_one: Vec<&str> = one_by_one.iter().map(String::as_str).collect();
        prop_assert_eq!(&read(&template, prompt, &one_by_one, &tools()), &whole);
    }
}
