//! Schemas of the values that have readers of their own, beside which their bounds stand.

use serde_json::{Value, json};

use super::fields::{FUNCTION, JSON_SCHEMA, PART, STREAM_OPTION, TOOL, TOOL_CALL, TOOL_FUNCTION};
use super::{MAX_STOP_CHARS, MAX_STOPS, messages, tools as reader};
use crate::field::object_schema;

/// Most entries of `logit_bias`: the engine's bound.
const MAX_BIASES: usize = paceline_engine::MAX_LOGIT_BIAS;

/// A reference to a schema of the document.
pub(crate) fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

pub(super) fn logit_bias() -> Value {
    json!({
        "type": "object",
        "propertyNames": reference("TokenId"),
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    })
}

pub(super) fn stop() -> Value {
    let text = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS});
    json!({"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]})
}

pub(super) fn choices() -> Value {
    reference("Choices")
}

pub(super) fn stream_options() -> Value {
    object_schema(STREAM_OPTION)
}

pub(super) fn messages() -> Value {
    reference("Messages")
}

pub(super) fn prompt() -> Value {
    reference("Prompt")
}

pub(super) fn content() -> Value {
    let parts = json!({"type": "array", "items": part(), "maxItems": messages::MAX_PARTS});
    json!({"anyOf": [{"type": "string"}, parts]})
}

fn part() -> Value {
    let mut part = object_schema(PART);
    part["properties"]["type"] = json!({"const": "text"});
    part
}

pub(super) fn metadata() -> Value {
    json!({
        "type": "object",
        "maxProperties": super::MAX_NOTES,
        "propertyNames": {"type": "string", "maxLength": super::MAX_NOTE_NAME},
        "additionalProperties": {"type": "string", "maxLength": super::MAX_NOTE},
    })
}

pub(super) fn tool_calls() -> Value {
    let items = object_schema(TOOL_CALL);
    json!({"type": "array", "items": items, "maxItems": messages::MAX_TOOL_CALLS})
}

pub(super) fn function() -> Value {
    object_schema(FUNCTION)
}

pub(super) fn tools() -> Value {
    json!({"type": "array", "items": object_schema(TOOL), "maxItems": reader::MAX_TOOLS})
}

pub(super) fn tool_function() -> Value {
    object_schema(TOOL_FUNCTION)
}

pub(super) fn tool_choice() -> Value {
    let name = json!({"type": "object", "properties": {"name": {"type": "string"}},
        "required": ["name"], "additionalProperties": false});
    let tool = json!({"type": "object", "properties": {"type": {"const": "function"},
        "function": name}, "required": ["type", "function"], "additionalProperties": false});
    let list = json!({"type": "object", "properties": {"mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": tool}}, "required": ["mode", "tools"]});
    let allowed = json!({"type": "object", "properties": {"type": {"const": "allowed_tools"},
        "allowed_tools": list}, "required": ["type", "allowed_tools"]});
    json!({"anyOf": [{"enum": ["auto", "none", "required"]}, tool, allowed]})
}

pub(super) fn response_format() -> Value {
    let plain = json!({"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"], "additionalProperties": false});
    let schema = json!({"type": "object", "properties": {"type": {"const": "json_schema"},
        "json_schema": object_schema(JSON_SCHEMA)}, "required": ["type", "json_schema"],
        "additionalProperties": false});
    json!({"anyOf": [plain, schema]})
}

pub(super) fn texts() -> Value {
    json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1})
}

pub(super) fn input() -> Value {
    let text = json!({"type": "string"});
    let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
    let most = super::embeddings::MAX_INPUTS;
    let list =
        |items: &Value| json!({"type": "array", "items": items, "minItems": 1, "maxItems": most});
    json!({"anyOf": [text, list(&text), ids, list(&ids)]})
}

pub(super) fn any() -> Value {
    json!({})
}

pub(super) fn array() -> Value {
    json!({"type": "array"})
}
