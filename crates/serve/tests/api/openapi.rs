//! The OpenAPI document against live answers, by a validator of what it uses of JSON Schema.

use serde_json::{Value, json};

use crate::rig::{CHAT, COMPLETE, Rig, chat_body, chunks, completion_body};

/// Checks `value` against its schema; the error says what is wrong.
fn validate(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let fail = |what: &str| Err(format!("{what}: {value} against {schema}"));
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = document
            .pointer(&reference[1..])
            .expect("the reference leads somewhere");
        return validate(document, schema, value);
    }
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        let is_right = match (keyword.as_str(), value) {
            ("type", _) => match rule {
                Value::Array(kinds) => kinds.iter().any(|kind| is_a(kind, value)),
                kind => is_a(kind, value),
            },
            ("enum", _) => rule.as_array().unwrap().contains(value),
            ("const", _) => rule == value,
            ("anyOf" | "oneOf", _) => {
                let mut schemas = rule.as_array().unwrap().iter();
                schemas.any(|schema| validate(document, schema, value).is_ok())
            }
            ("minimum", Value::Number(n)) => n.as_f64() >= rule.as_f64(),
            ("maximum", Value::Number(n)) => n.as_f64() <= rule.as_f64(),
            ("items", Value::Array(items)) => {
                items
                    .iter()
                    .try_for_each(|item| validate(document, rule, item))?;
                true
            }
            ("required", Value::Object(map)) => {
                let mut names = rule.as_array().unwrap().iter();
                names.all(|name| map.contains_key(name.as_str().unwrap()))
            }
            ("properties", Value::Object(map)) => {
                for (name, schema) in rule.as_object().unwrap() {
                    map.get(name)
                        .map_or(Ok(()), |value| validate(document, schema, value))?;
                }
                true
            }
            ("additionalProperties", Value::Object(map)) => {
                let is_known = |name: &String| schema["properties"].get(name).is_some();
                let others = map.iter().filter(|(name, _)| !is_known(name));
                let check = |value| match rule {
                    Value::Bool(_) => fail("a property too many"),
                    schema => validate(document, schema, value),
                };
                others
                    .map(|(_, value)| check(value))
                    .find(Result::is_err)
                    .unwrap_or(Ok(()))?;
                true
            }
            _ => true,
        };
        if !is_right {
            return fail(keyword);
        }
    }
    Ok(())
}

fn is_a(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("unknown type {other}"),
    }
}

fn named<'a>(document: &'a Value, name: &str) -> &'a Value {
    let schema = &document["components"]["schemas"][name];
    assert!(schema.is_object(), "{name}");
    schema
}

#[test]
fn live_answers_are_what_the_document_says() {
    let rig = Rig::new();
    let document = rig.get("/openapi.json").json();
    let check = |name: &str, value: &Value| {
        validate(&document, named(&document, name), value)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    };
    for fields in ["", r#""n":2"#, r#""logprobs":true,"top_logprobs":3"#] {
        check("ChatCompletion", &rig.chat(fields).json());
    }
    for fields in ["", r#""n":2"#, r#""logprobs":3"#] {
        check("Completion", &rig.complete(fields).json());
    }
    let stream = r#""stream":true,"stream_options":{"include_usage":true}"#;
    for fields in [r#""stream":true"#.to_owned(), format!(r#"{stream},"n":2"#)] {
        for chunk in chunks(rig.chat(&fields)) {
            check("ChatCompletionChunk", &chunk);
        }
        for chunk in chunks(rig.complete(&fields)) {
            check("CompletionChunk", &chunk);
        }
    }
    for chunk in chunks(rig.chat(r#""logprobs":true,"top_logprobs":1,"stream":true"#)) {
        check("ChatCompletionChunk", &chunk);
    }
    check("Models", &rig.get("/v1/models").json());
    check("Model", &rig.get("/v1/models/tiny").json());
    check("Health", &rig.get("/health").json());
    for response in [
        rig.chat(r#""x":1"#),
        rig.get("/nothing"),
        rig.post(CHAT, "{"),
    ] {
        check("Error", &response.json());
    }
}

#[test]
fn the_document_accepts_what_the_server_accepts() {
    let rig = Rig::new();
    let document = rig.get("/openapi.json").json();
    let fields = r#""temperature":0,"top_p":1,"top_k":-1,"min_p":0.5,"seed":-1,"n":2,"stop":["a"],
        "logit_bias":{"5":1},"stream":false,"user":null"#;
    let chat: Value = serde_json::from_str(&chat_body(fields)).unwrap();
    validate(&document, named(&document, "ChatRequest"), &chat).unwrap();
    let completion: Value = serde_json::from_str(&completion_body(fields)).unwrap();
    validate(
        &document,
        named(&document, "CompletionRequest"),
        &completion,
    )
    .unwrap();
    for (field, bad) in [
        ("temperature", json!(2.1)),
        ("n", json!(17)),
        ("foo", json!(1)),
        ("stop", json!(7)),
        ("model", json!("gpt-4")),
        ("tools", json!([1])),
        ("tool_choice", json!("perhaps")),
        ("messages", json!([{"role": "owner", "content": ""}])),
    ] {
        let mut body = chat.clone();
        body[field] = bad;
        let got = validate(&document, named(&document, "ChatRequest"), &body);
        assert!(got.is_err(), "{body}");
        assert!([400, 404].contains(&rig.post(CHAT, &body.to_string()).status));
    }
}

/// A request that is right at `path`.
fn body_of(path: &str) -> &'static str {
    match path {
        "/v1/responses" => r#"{"model":"tiny","input":"hi"}"#,
        "/v1/messages" => {
            r#"{"model":"tiny","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}"#
        }
        "/api/generate" => r#"{"model":"tiny","prompt":"hi"}"#,
        "/api/show" | "/api/pull" => r#"{"model":"tiny"}"#,
        "/tokenize" => r#"{"content":"hi"}"#,
        "/detokenize" => r#"{"tokens":[104]}"#,
        "/infill" => r#"{"input_prefix":"a"}"#,
        _ => r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}]}"#,
    }
}

#[test]
fn every_reference_and_path_is_there() {
    let rig = Rig::new();
    let document = rig.get("/openapi.json").json();
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let pointer = reference.split('"').next().unwrap();
        assert!(document.pointer(pointer).is_some(), "{pointer}");
    }
    let stored = rig.post("/v1/responses", body_of("/v1/responses")).json();
    for (path, operations) in document["paths"].as_object().unwrap() {
        let id = match path.as_str() {
            "/v1/responses/{id}" => stored["id"].as_str().unwrap(),
            _ => "tiny",
        };
        let path = path.replace("{id}", id);
        for method in operations.as_object().unwrap().keys() {
            let json_type = "Content-Type: application/json\r\n";
            let response = match method.as_str() {
                "get" => rig.get(&path),
                "delete" => rig.send("DELETE", &path, json_type, r#"{"model":"tiny"}"#),
                _ if path == COMPLETE => rig.complete(""),
                _ if path == CHAT => rig.chat(""),
                _ => rig.post(&path, body_of(&path)),
            };
            if path == "/infill" {
                // The tiny model has no tokens for it.
                assert_eq!(response.status, 400);
                continue;
            }
            if path == "/api/delete" {
                // Not without --allow-delete.
                assert_eq!(response.status, 501);
                continue;
            }
            assert_eq!(response.status, 200, "{method} {path}");
            let kind = response.header("content-type").unwrap().to_owned();
            let documented = &operations[method]["responses"]["200"]["content"];
            assert!(documented.get(&kind).is_some(), "{kind} of {path}");
        }
    }
    assert!(!text.contains("securitySchemes") && !text.contains("\"401\""));
}
