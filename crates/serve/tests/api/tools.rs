//! Tools and formats of answers in every dialect: what reaches the engine, and the form of what a
//! model writes.

use std::sync::Arc;

use paceline_engine::Finish;
use paceline_serve::ServedModel;
use paceline_text::chat::ChatTemplate;
use paceline_text::grammar::{Grammar, Start};
use paceline_text::tools::ResponseTemplate;
use serde_json::{Value, json};

use crate::rig::{CHAT, Rig, chunks, prompt_text, refusal};
use crate::scripted::Script;
use crate::tiny;

const TOOL: &str = r#"{"type":"function","function":{"name":"look","description":"Looks.",
    "parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer"}},
    "required":["city"]}}}"#;

/// A thought, a word and a call.
const ANSWER: [&str; 7] = [
    "<think>Is <tool_call> it?",
    "</think>\n\nI look.\n<tool_",
    "call>\n{\"name\": \"look\", \"argu",
    "ments\": {\"city\": \"Kö",
    "ln\", \"days\"",
    ": 3}}\n</tool",
    "_call>",
];

/// A server of a model that thinks and calls, which says `response_stream`.
fn rig(answer: &[&'static str], finish: Finish) -> Rig {
    let rig = Rig::of(tiny::tool_model());
    say(&rig, answer, finish);
    rig
}

fn say(rig: &Rig, answer: &[&'static str], finish: Finish) {
    let tokens = answer.iter().map(|text| (97, *text)).collect();
    rig.service.script(Script::Say(tokens, finish));
}

fn with_tool(fields: &str) -> String {
    format!(
        r#"{{"model":"tiny","messages":[{{"role":"user","content":"hi"}}],"tools":[{TOOL}]{fields}}}"#
    )
}

fn arguments() -> Value {
    json!({"city": "Köln", "days": 3})
}

#[test]
fn a_chat_tells_thought_words_and_calls_apart() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let got = rig.post(CHAT, &with_tool("")).json();
    let choice = &got["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["reasoning_content"], "Is <tool_call> it?");
    assert_eq!(message["content"], "I look.");
    let call = &message["tool_calls"][0];
    assert_eq!(
        (&call["type"], &call["function"]["name"]),
        (&json!("function"), &json!("look"))
    );
    let text = call["function"]["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), arguments());
    assert!(
        prompt_text(&rig).contains("\"name\": \"look\""),
        "{}",
        prompt_text(&rig)
    );
    let metrics = rig.get("/metrics").text();
    assert!(
        metrics.contains("paceline_tool_calls_total{outcome=\"read\"} 1"),
        "{metrics}"
    );
}

/// The chat template of this model has no marker of a known form.
#[test]
fn a_models_own_description_of_its_answers_comes_first() {
    let described = json!({
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "(thinks", "close": ")"},
            "tool_calls": {
                "open_pattern": "\\s*@(?P<name>\\w+) ", "close": ";", "content": "json", "repeats": true,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    });
    let plain = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}\
                 {{ '<|im_start|>assistant\\n(thinks' }}";
    let template = ChatTemplate::new(plain).unwrap();
    let described = ResponseTemplate::read(&described).unwrap();
    let model = ServedModel {
        template: Some(Arc::new(template.with_response(Some(described)))),
        ..tiny::tool_model()
    };
    let rig = Rig::of(model);
    let answer = [
        " a @look ",
        ") I look.\n@lo",
        "ok {\"city\": \"Köln\",",
        " \"days\": \"3\"};",
    ];
    say(&rig, &answer, Finish::EndOfText);
    let got = rig.post(CHAT, &with_tool("")).json();
    let message = &got["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "a @look");
    assert_eq!(message["content"], "I look.");
    let call = &message["tool_calls"][0]["function"];
    assert_eq!(call["name"], "look");
    let text = call["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), arguments());
    let all = chunks(rig.post(CHAT, &with_tool(r#","stream":true"#)));
    let calls = all
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0]);
    let calls: Vec<&Value> = calls.filter(|call| !call.is_null()).collect();
    assert_eq!(calls[0]["function"]["name"], "look");
    let pieces = calls
        .iter()
        .map(|call| call["function"]["arguments"].as_str().unwrap());
    let text = pieces.collect::<String>();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), arguments());
}

#[test]
fn a_streamed_call_has_its_name_first_and_pieces_that_are_json() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let all = chunks(rig.post(CHAT, &with_tool(r#","stream":true"#)));
    let deltas: Vec<&Value> = all
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"])
        .collect();
    let joined = |name: &str| -> String {
        deltas
            .iter()
            .filter_map(|delta| delta[name].as_str())
            .collect()
    };
    assert_eq!(joined("reasoning_content"), "Is <tool_call> it?");
    assert_eq!(joined("content").trim_end(), "I look.");
    let calls: Vec<&Value> = deltas
        .iter()
        .map(|delta| &delta["tool_calls"][0])
        .filter(|call| !call.is_null())
        .collect();
    assert_eq!(calls[0]["function"]["name"], "look");
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    assert!(
        calls.len() > 3,
        "arguments come as they are written: {calls:?}"
    );
    assert!(
        calls[1..]
            .iter()
            .all(|call| call["id"].is_null() && call["index"] == 0)
    );
    let text: String = calls
        .iter()
        .map(|call| call["function"]["arguments"].as_str().unwrap())
        .collect();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), arguments());
    assert_eq!(
        all.last().unwrap()["choices"][0]["finish_reason"],
        "tool_calls"
    );
}

#[test]
fn a_call_that_cannot_be_read_is_text() {
    let broken = ["<tool_call>\n{\"name\": \"look\", \"arguments\": {city}}\n</tool_call>"];
    let rig = rig(&broken, Finish::EndOfText);
    let choice = rig.post(CHAT, &with_tool("")).json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["message"]["tool_calls"], Value::Null);
    assert!(
        choice["message"]["content"]
            .as_str()
            .unwrap()
            .contains("{city}")
    );
    let metrics = rig.get("/metrics").text();
    assert!(
        metrics.contains("paceline_tool_calls_total{outcome=\"unreadable\"} 1"),
        "{metrics}"
    );
}

#[test]
fn choices_of_tools_reach_the_engine() {
    let rig = rig(&["ok"], Finish::EndOfText);
    let constraint = |fields: &str| {
        rig.post(CHAT, &with_tool(fields)).ok(fields);
        rig.service.last().constraint
    };
    let auto = constraint("").unwrap();
    assert!(matches!(auto.start, Start::Lazily { .. }), "{auto:?}");
    for fields in [
        r#","tool_choice":"required""#,
        r#","tool_choice":{"type":"function","function":{"name":"look"}}"#,
        r#","tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"required",
            "tools":[{"type":"function","function":{"name":"look"}}]}}"#,
    ] {
        let required = constraint(fields).unwrap();
        assert_eq!(required.start, Start::Now, "{fields}");
    }
    assert_eq!(constraint(r#","tool_choice":"none""#), None);
    assert!(!prompt_text(&rig).contains("look"));
}

#[test]
fn one_call_where_one_is_allowed() {
    let call =
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"a\"}}\n</tool_call>\n";
    let rig = rig(&[call, call], Finish::EndOfText);
    for (fields, n) in [("", 2), (r#","parallel_tool_calls":false"#, 1)] {
        let got = rig.post(CHAT, &with_tool(fields)).json();
        let calls = got["choices"][0]["message"]["tool_calls"]
            .as_array()
            .unwrap()
            .len();
        assert_eq!(calls, n, "{fields}");
    }
}

#[test]
fn schemas_that_cannot_be_kept_are_refused_or_told() {
    let rig = rig(&["ok"], Finish::EndOfText);
    let tool = |strict: bool| {
        with_tool("").replace(
            r#""required":["city"]}"#,
            &format!(r#""required":["city"],"not":{{}}}},"strict":{strict}"#),
        )
    };
    let (status, code, param, message) = refusal(rig.post(CHAT, &tool(true)));
    assert_eq!(
        (status, code.as_str(), param.as_deref()),
        (400, "unsupported_schema", Some("tools"))
    );
    assert!(
        message.contains("\"look\"") && message.contains("\"not\""),
        "{message}"
    );
    let relaxed = rig.post(CHAT, &tool(false));
    assert_eq!(relaxed.status, 200);
    let warning = relaxed.header("warning").unwrap();
    assert!(
        warning.contains("look") && warning.contains("not"),
        "{warning}"
    );
    let annotated = with_tool("").replace(
        r#""required":["city"]}"#,
        r#""required":["city"],"$comment":"c","x-y":1,"title":"t"},"strict":true"#,
    );
    let response = rig.post(CHAT, &annotated);
    assert_eq!((response.status, response.header("warning")), (200, None));
}

#[test]
fn formats_of_answers_reach_the_engine_from_every_dialect() {
    let rig = Rig::new();
    let schema = r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}"#;
    let chat = r#""model":"tiny","messages":[{"role":"user","content":"hi"}]"#;
    let wrapped = format!(r#"{{"type":"json_schema","name":"n","schema":{schema}}}"#);
    for (path, body) in [
        (
            CHAT,
            format!(
                r#"{{{chat},"response_format":{{"type":"json_schema","json_schema":{{"name":"n","schema":{schema}}}}}}}"#
            ),
        ),
        (CHAT, format!(r#"{{{chat},"guided_json":{schema}}}"#)),
        (
            "/v1/completions",
            format!(r#"{{"model":"tiny","prompt":"hi","guided_json":{schema}}}"#),
        ),
        (
            "/v1/responses",
            format!(r#"{{"model":"tiny","input":"hi","text":{{"format":{wrapped}}}}}"#),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{{chat},"max_tokens":9,"output_config":{{"format":{{"type":"json_schema","schema":{schema}}}}}}}"#
            ),
        ),
        (
            "/api/chat",
            format!(r#"{{{chat},"stream":false,"format":{schema}}}"#),
        ),
        (
            "/api/generate",
            format!(r#"{{"model":"tiny","prompt":"hi","stream":false,"format":{schema}}}"#),
        ),
        (
            "/api/generate",
            format!(
                r#"{{"model":"tiny","prompt":"hi","raw":true,"stream":false,"format":{schema}}}"#
            ),
        ),
    ] {
        rig.post(path, &body).ok(&body);
        let constraint = rig.service.last().constraint.unwrap();
        let Grammar::JsonSchema(text) = &constraint.grammar else {
            panic!("{path}: {constraint:?}");
        };
        let got: Value = serde_json::from_str(text).unwrap();
        assert_eq!(
            got,
            serde_json::from_str::<Value>(schema).unwrap(),
            "{path}"
        );
        assert_eq!(constraint.start, Start::Now);
    }
}

#[test]
fn grammars_of_requests_reach_the_engine() {
    let rig = Rig::new();
    for (field, expected) in [
        (r#""guided_regex":"[ab]+""#, Grammar::Regex("[ab]+".into())),
        (
            r#""guided_choice":["a","b"]"#,
            Grammar::Choice(vec!["a".into(), "b".into()]),
        ),
        (
            r#""guided_grammar":"start: \"a\"""#,
            Grammar::Lark("start: \"a\"".into()),
        ),
        (
            r#""grammar":"start: \"a\"""#,
            Grammar::Lark("start: \"a\"".into()),
        ),
    ] {
        rig.chat(field).ok(field);
        assert_eq!(rig.service.last().constraint.unwrap().grammar, expected);
        rig.complete(field).ok(field);
        assert_eq!(rig.service.last().constraint.unwrap().grammar, expected);
    }
    for (fields, param) in [
        (r#""guided_regex":"(""#, "guided_regex"),
        (r#""guided_choice":[]"#, "guided_choice"),
        (
            r#""guided_choice":["a"],"guided_regex":"b""#,
            "guided_choice",
        ),
        (
            r#""guided_regex":"a","response_format":{"type":"json_object"}"#,
            "guided_regex",
        ),
        (r#""grammar":"nothing""#, "grammar"),
    ] {
        let (status, _, got, message) = refusal(rig.chat(fields));
        assert_eq!((status, got.as_deref()), (400, Some(param)), "{message}");
    }
}

/// The values of named or plain events.
fn events(response: crate::client::TestResponse) -> Vec<Value> {
    assert_eq!(response.status, 200);
    let text = response.text();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|json| serde_json::from_str(json).unwrap())
        .collect()
}

#[test]
fn claude_code_gets_thinking_words_and_tool_use() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let body = |stream: bool| {
        format!(
            r#"{{"model":"tiny","max_tokens":99,"stream":{stream},"tools":[{{"name":"look",
            "input_schema":{{"type":"object","properties":{{"city":{{"type":"string"}}}}}}}}],
            "messages":[{{"role":"user","content":"hi"}},
            {{"role":"assistant","content":[{{"type":"tool_use","id":"t1","name":"look","input":{{"city":"B"}}}}]}},
            {{"role":"user","content":[{{"type":"tool_result","tool_use_id":"t1","content":"42"}}]}}]}}"#
        )
    };
    let whole = rig.post("/v1/messages?beta=true", &body(false)).json();
    assert_eq!(whole["stop_reason"], "tool_use");
    let kinds: Vec<&str> = whole["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|block| block["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(whole["content"][2]["input"], arguments());
    let prompt = prompt_text(&rig);
    assert!(
        prompt.contains("{\"city\": \"B\"}") && prompt.contains("tool\n42"),
        "{prompt}"
    );
    let all = events(rig.post("/v1/messages?beta=true", &body(true)));
    let start = all
        .iter()
        .find(|event| event["content_block"]["type"] == "tool_use")
        .unwrap();
    assert_eq!(start["content_block"]["name"], "look");
    let json: String = all
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str())
        .collect();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), arguments());
    let thought: String = all
        .iter()
        .filter_map(|event| event["delta"]["thinking"].as_str())
        .collect();
    assert_eq!(thought, "Is <tool_call> it?");
    let last = &all[all.len() - 2];
    assert_eq!(last["delta"]["stop_reason"], "tool_use");
}

#[test]
fn codex_gets_reasoning_messages_and_function_calls() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let body = r#"{"model":"tiny","stream":true,"store":false,"tool_choice":"auto","tools":[
        {"type":"namespace","name":"crew","description":"d","tools":[{"type":"function","name":"look",
         "strict":false,"parameters":{"type":"object","properties":{"city":{"type":"string"}}}}]},
        {"type":"web_search","external_web_access":false}],
        "input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}]}"#;
    let all = events(rig.post("/v1/responses", body));
    let done: Vec<&Value> = all
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| &event["item"])
        .collect();
    let kinds: Vec<&str> = done
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(
        (&done[2]["name"], &done[2]["namespace"]),
        (&json!("look"), &json!("crew"))
    );
    let text = done[2]["arguments"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), arguments());
    let deltas: String = all
        .iter()
        .filter(|event| event["type"] == "response.function_call_arguments.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(deltas, text);
    assert_eq!(all.last().unwrap()["type"], "response.completed");
}

#[test]
fn ollamas_clients_get_arguments_as_objects() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let whole = rig
        .post("/api/chat", &with_tool(r#","stream":false"#))
        .json();
    let message = &whole["message"];
    assert_eq!(
        (&message["thinking"], &message["content"]),
        (&json!("Is <tool_call> it?"), &json!("I look."))
    );
    assert_eq!(
        message["tool_calls"][0]["function"]["arguments"],
        arguments()
    );
    let text = rig.post("/api/chat", &with_tool("")).text();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let call = lines
        .iter()
        .find(|line| !line["message"]["tool_calls"].is_null())
        .unwrap();
    assert_eq!(
        call["message"]["tool_calls"][0]["function"]["arguments"],
        arguments()
    );
    let shown = rig.post("/api/show", r#"{"model":"tiny"}"#).json();
    assert_eq!(
        shown["capabilities"],
        json!(["completion", "tools", "thinking"])
    );
}

/// The model's own answer, sent back with a result, begins where the first turn ended.
#[test]
fn a_second_turn_begins_with_the_first() {
    let rig = rig(&ANSWER, Finish::EndOfText);
    let message = rig.post(CHAT, &with_tool("")).json()["choices"][0]["message"].clone();
    let first = rig.service.last().prompt;
    let mut body: Value = serde_json::from_str(&with_tool("")).unwrap();
    let result =
        json!({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"});
    let turns = body["messages"].as_array_mut().unwrap();
    turns.extend([message, result]);
    rig.post(CHAT, &body.to_string()).ok("second turn");
    let second = rig.service.last().prompt;
    assert!(
        second.starts_with(&first),
        "the second prompt begins otherwise"
    );
    let text = prompt_text(&rig);
    assert!(
        text.contains("\"city\": \"Köln\"") && text.contains("tool\n42"),
        "{text}"
    );
}

#[test]
fn an_answer_may_be_a_call_or_of_a_schema() {
    let rig = rig(&["{\"a\": 1}"], Finish::EndOfText);
    let fields = r#","response_format":{"type":"json_schema","json_schema":{"name":"n",
        "schema":{"type":"object","properties":{"a":{"type":"integer"}}}}}"#;
    let got = rig.post(CHAT, &with_tool(fields)).json();
    assert_eq!(got["choices"][0]["message"]["content"], "{\"a\": 1}");
    let constraint = rig.service.last().constraint.unwrap();
    assert_eq!(constraint.start, Start::Now);
    assert!(matches!(&constraint.grammar, Grammar::Lark(text) if text.contains("| answer")));
}

#[test]
fn models_whose_calls_no_grammar_holds_say_so() {
    let model = || -> ServedModel { tiny::model_with("{{ tools }}{{ messages }}<|tool_call>") };
    let rig = Rig::of(model());
    rig.post(CHAT, &with_tool("")).ok("auto");
    let (status, _, param, message) = refusal(
        rig.post(
            CHAT,
            &with_tool(r#","tool_choice":"required""#)
                .replace("\"parameters\"", "\"strict\":true,\"parameters\""),
        ),
    );
    assert_eq!(
        (status, param.as_deref()),
        (400, Some("tool_choice")),
        "{message}"
    );
}
