//! Schemas of values with parsers of their own.

use serde_json::{Value, json};

use super::bounds;
use super::fields::responses as table;
use super::fields::{FUNCTION, JSON_SCHEMA, PART, STREAM_OPTION, TOOL, TOOL_CALL, TOOL_FUNCTION};
use crate::field::{Field, object_schema, open_schema};

/// Maximum entries of `logit_bias`: the engine's limit.
const MAX_BIASES: usize = paceline_engine::MAX_LOGIT_BIAS;

/// A reference to a schema in the document.
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
    let text = json!({"type": "string", "minLength": 1, "maxLength": bounds::MAX_STOP_CHARS});
    json!({"anyOf": [text, {"type": "array", "items": text, "maxItems": bounds::MAX_STOPS}]})
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
    let parts = json!({"type": "array", "items": part(), "maxItems": bounds::MAX_PARTS});
    json!({"anyOf": [{"type": "string"}, parts]})
}

fn part() -> Value {
    let mut part = open_schema(PART);
    part["properties"]["type"] = json!({"const": "text"});
    part
}

pub(super) fn metadata() -> Value {
    json!({
        "type": "object",
        "maxProperties": bounds::MAX_NOTES,
        "propertyNames": {"type": "string", "maxLength": bounds::MAX_NOTE_NAME},
        "additionalProperties": {"type": "string", "maxLength": bounds::MAX_NOTE},
    })
}

pub(super) fn tool_calls() -> Value {
    let items = open_schema(TOOL_CALL);
    json!({"type": "array", "items": items, "maxItems": bounds::MAX_TOOL_CALLS})
}

pub(super) fn function() -> Value {
    open_schema(FUNCTION)
}

pub(super) fn tools() -> Value {
    json!({"type": "array", "items": object_schema(TOOL), "maxItems": bounds::MAX_TOOLS})
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

/// Formats without a schema.
fn plain_format() -> Value {
    json!({"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"], "additionalProperties": false})
}

pub(super) fn response_format() -> Value {
    let plain = plain_format();
    let schema = json!({"type": "object", "properties": {"type": {"const": "json_schema"},
        "json_schema": object_schema(JSON_SCHEMA)}, "required": ["type", "json_schema"],
        "additionalProperties": false});
    json!({"anyOf": [plain, schema]})
}

/// The schema of an object of these fields whose `type` is `kind`.
fn typed(table: &[Field], kind: &str) -> Value {
    typed_in(object_schema(table), kind)
}

fn typed_in(mut schema: Value, kind: &str) -> Value {
    schema["properties"]["type"] = json!({"const": kind});
    if let Some(required) = schema["required"].as_array_mut() {
        required.retain(|name| name != "type");
        required.push("type".into());
    }
    schema
}

/// A text, or parts of text, of the Responses API.
fn response_text() -> Value {
    let mut part = open_schema(table::PART);
    part["properties"]["type"] = json!({"enum": bounds::ITEM_PART_KINDS});
    let parts = json!({"type": "array", "items": part, "maxItems": bounds::MAX_ITEM_PARTS});
    json!({"anyOf": [{"type": "string"}, parts]})
}

pub(super) fn response_input() -> Value {
    let said = |mut item: Value, field: &str| {
        item["properties"][field] = response_text();
        item
    };
    let mut message = said(open_schema(table::MESSAGE), "content");
    message["properties"]["type"] = json!({"const": "message"});
    message["properties"]["role"] = json!({"enum": ["user", "assistant", "system", "developer"]});
    let call = typed_in(open_schema(table::CALL), "function_call");
    let custom = typed_in(open_schema(table::CUSTOM_CALL), "custom_tool_call");
    let mut output = said(typed_in(open_schema(table::OUTPUT), ""), "output");
    output["properties"]["type"] =
        json!({"enum": ["function_call_output", "custom_tool_call_output"]});
    let reasoning = said(
        typed_in(open_schema(table::REASONING), "reasoning"),
        "content",
    );
    let reasoning = said(reasoning, "summary");
    let item = json!({"anyOf": [message, call, custom, output, reasoning]});
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": item, "minItems": 1}]})
}

pub(super) fn response_tools() -> Value {
    let most = bounds::MAX_ITEM_TOOLS;
    let list = |items: &Value| json!({"type": "array", "items": items, "maxItems": most});
    let function = typed(table::FUNCTION, "function");
    let mut space = typed(table::NAMESPACE, "namespace");
    space["properties"]["tools"] = list(&function);
    // Hosted by a provider; dropped with a warning.
    let hosted = json!({"type": "object", "required": ["type"], "properties":
        {"type": {"type": "string", "not": {"enum": ["function", "namespace", "mcp"]}}}});
    list(&json!({"anyOf": [function, space, hosted]}))
}

pub(super) fn response_tool_choice() -> Value {
    let tool = json!({"type": "object", "properties": {"type": {"const": "function"},
        "name": {"type": "string"}}, "required": ["type", "name"], "additionalProperties": false});
    let allowed = json!({"type": "object", "properties": {"type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": tool}},
        "required": ["type", "mode", "tools"], "additionalProperties": false});
    json!({"anyOf": [{"enum": ["auto", "none", "required"]}, tool, allowed]})
}

/// `text.format`: the schema's fields are flattened into the format object.
pub(super) fn response_format_beside() -> Value {
    json!({"anyOf": [plain_format(), typed(JSON_SCHEMA, "json_schema")]})
}

pub(super) fn files() -> Value {
    let text = json!({"type": "string"});
    let file = json!({"type": "object", "properties": {"filename": text, "text": text}});
    json!({"type": "array", "items": file, "maxItems": bounds::MAX_EXTRA})
}

pub(super) fn texts() -> Value {
    json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1})
}

pub(super) fn input() -> Value {
    let text = json!({"type": "string"});
    let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
    let most = bounds::MAX_INPUTS;
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
