//! Schemas of the values that have readers of their own, beside which their bounds stand.

use serde_json::{Value, json};

use super::fields::{FUNCTION, PART, STREAM_OPTION, TOOL_CALL};
use super::{MAX_STOP_CHARS, MAX_STOPS, messages};
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
