//! Schemas of responses.

use serde_json::{Map, Value, json};

use super::reference;

pub(super) fn schemas() -> Map<String, Value> {
    let all = [
        ("Error", error()),
        ("Health", health()),
        ("Model", model()),
        ("Models", models()),
        ("Usage", usage()),
        (
            "ChatCompletion",
            answer("chat.completion", chat_choice(), true),
        ),
        (
            "ChatCompletionChunk",
            answer("chat.completion.chunk", chunk_choice(), false),
        ),
        (
            "Completion",
            answer("text_completion", completion_choice(), true),
        ),
        (
            "CompletionChunk",
            answer("text_completion", completion_choice(), false),
        ),
        ("ChatLogprobs", chat_logprobs()),
        ("CompletionLogprobs", completion_logprobs()),
    ];
    all.into_iter()
        .map(|(name, schema)| (name.to_owned(), schema))
        .collect()
}

/// Schema of an object with exactly these properties, all required.
fn object(properties: Value) -> Value {
    let required: Vec<&String> = properties
        .as_object()
        .map_or(vec![], |map| map.keys().collect());
    json!({
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": false,
    })
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn or_null(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn logprob() -> Value {
    json!({"type": "number", "minimum": -9999, "maximum": 0})
}

fn error() -> Value {
    let text_or_null = json!({"type": ["string", "null"]});
    let inner = object(json!({
        "message": text(),
        "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        "param": text_or_null,
        "code": text_or_null,
    }));
    object(json!({"error": inner}))
}

fn health() -> Value {
    object(json!({
        "status": {"enum": ["ready", "loading", "recovering", "failed", "stopping"]},
        "reason": {"type": ["string", "null"]},
        "model": text(),
        "running": count(),
        "waiting": count(),
    }))
}

fn model() -> Value {
    let mut model = object(json!({
        "id": text(),
        "object": {"const": "model"},
        "created": count(),
        "owned_by": text(),
    }));
    model["properties"]["numbers"] = text(); // of near kernel classes only
    model
}

fn models() -> Value {
    object(json!({"object": {"const": "list"}, "data": list(reference("Model"))}))
}

fn usage() -> Value {
    let mut of_answer = object(json!({"reasoning_tokens": count()}));
    for name in ["accepted_prediction_tokens", "rejected_prediction_tokens"] {
        of_answer["properties"][name] = count();
    }
    object(json!({
        "prompt_tokens": count(),
        "completion_tokens": count(),
        "total_tokens": count(),
        "prompt_tokens_details": object(json!({"cached_tokens": count()})),
        "completion_tokens_details": of_answer,
    }))
}

fn answer(kind: &str, choice: Value, is_whole: bool) -> Value {
    let mut answer = object(json!({
        "id": text(),
        "object": {"const": kind},
        "created": count(),
        "model": text(),
        "system_fingerprint": text(),
        "choices": list(choice),
    }));
    // Chunks have it only on request, and null in all but the last.
    let usage = reference("Usage");
    answer["properties"]["usage"] = if is_whole { usage } else { or_null(usage) };
    if let (Some(required), true) = (answer["required"].as_array_mut(), is_whole) {
        required.push("usage".into());
    }
    answer
}

fn chat_choice() -> Value {
    let mut message = object(json!({
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
    }));
    message["properties"]["reasoning_content"] = text();
    message["properties"]["tool_calls"] = list(call());
    object(json!({
        "index": count(),
        "message": message,
        "logprobs": or_null(reference("ChatLogprobs")),
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    }))
}

fn call() -> Value {
    let function = object(json!({"name": text(), "arguments": text()}));
    object(json!({"id": text(), "type": {"const": "function"}, "function": function}))
}

fn chunk_choice() -> Value {
    let delta = json!({
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": text(),
            "refusal": {"type": "null"},
            "reasoning_content": text(),
            "tool_calls": list(json!({"type": "object"})),
        },
        "additionalProperties": false,
    });
    object(json!({
        "index": count(),
        "delta": delta,
        "logprobs": or_null(reference("ChatLogprobs")),
        "finish_reason": {"enum": ["stop", "length", "tool_calls", null]},
    }))
}

fn completion_choice() -> Value {
    object(json!({
        "text": text(),
        "index": count(),
        "logprobs": or_null(reference("CompletionLogprobs")),
        "finish_reason": {"enum": ["stop", "length", null]},
    }))
}

fn chat_logprobs() -> Value {
    let bytes = list(json!({"type": "integer", "minimum": 0, "maximum": 255}));
    let one = json!({"token": text(), "bytes": bytes, "logprob": logprob()});
    let mut entry = one.clone();
    entry["top_logprobs"] = list(object(one));
    object(json!({"content": list(object(entry)), "refusal": {"type": "null"}}))
}

fn completion_logprobs() -> Value {
    let top = json!({"type": "object", "additionalProperties": logprob()});
    object(json!({
        "tokens": list(text()),
        "token_logprobs": list(or_null(logprob())),
        "top_logprobs": list(or_null(top)),
        "text_offset": list(count()),
    }))
}
