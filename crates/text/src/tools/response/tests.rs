//! Response templates, and responses parsed by them.

use serde_json::json;

use super::*;
use crate::tools::tests::{Case, ParsedCalls, case, outcome};

fn tools() -> Vec<Json> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
    }});
    let function = json!({"name": "look", "parameters": parameters});
    vec![json!({"type": "function", "function": function})]
}

fn read(template: &Json, prompt: &str, answer: &str, tools: &[Json]) -> ParsedCalls {
    let template = Arc::new(ResponseTemplate::read(template).unwrap());
    let reader = template.reader_after(prompt, tools, ReaderOptions::default());
    let ids = Vec::new();
    ParsedCalls {
        ids,
        ..outcome(reader, &[answer])
    }
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

pub(in crate::tools) fn cases() -> Vec<Case<Json>> {
    let look = |arguments: Json| ("look", arguments);
    vec![
        case(hermes(), "", "\n Hello. \n<|end|>\n").text("Hello."),
        case(
            hermes(),
            "<|start|>user\nx<|start|>assistant\n<think>\n",
            "hm <tool_call>{}</think>\n\nHi",
        )
        .text("Hi")
        .thought("hm <tool_call>{}"),
        case(
            hermes(),
            "<|start|>assistant\n",
            "<think>a</think>I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": \
             {\"city\": \"K\\n\"}}\n</tool_call>\n<tool_call>{\"name\":\"look\",\"arguments\":{\"\
             days\":\"3\"}}</tool_call>",
        )
        .text("I look.")
        .thought("a")
        .calls(vec![look(json!({"city": "K\n"})), look(json!({"days": 3}))]),
        case(hermes(), "", "a <tool_call>{\"name\": </tool_call> b").fails(),
        case(
            hermes(),
            "",
            "<tool_call>{\"name\": \"look\", \"arguments\": {}}",
        )
        .fails(),
        case(
            tags(),
            "<bot1><bot2><t",
            ">x</t><f=look><p=city>1</p><p=days>2</p></f> <f=other></f>ok",
        )
        .text("ok")
        .thought("x")
        .calls(vec![
            look(json!({"city": "1", "days": 2})),
            ("other", json!({})),
        ]),
        case(tags(), "<t>", "y</t><thought>z</thought>")
            .text("y</t>")
            .thought("z"),
        case(
            list(),
            "[/INST]",
            " So [CALLS] [{\"name\": \"look\", \"id\": \"a1\", \"args\": {\"days\": 1}}]",
        )
        .text(" So")
        .calls(vec![look(json!({"days": 1}))]),
        case(
            list(),
            "[/INST]",
            "[CALLS][{\"name\": \"look\", \"args\": {}}]",
        )
        .fails(),
    ]
}

/// A call is reported once it is complete.
#[test]
fn answers_by_templates() {
    for case in cases() {
        let read = read(&case.template, case.prompt, case.answer, &tools());
        assert_eq!(read, case.read, "{:?}", case.answer);
    }
}

#[test]
fn without_tools_calls_are_text() {
    let answer = "<tool_call>{\"name\": \"look\"}</tool_call>";
    let got = read(&hermes(), "", answer, &[]);
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
