//! Messages of a chat request, as the chat template takes them.
//!
//! | role | content | besides |
//! |---|---|---|
//! | system, developer (read as system), user | text or parts | name |
//! | assistant | text, parts, or none with tool_calls | name, tool_calls |
//! | tool | text or parts | tool_call_id, name |
//!
//! Parts are joined by line ends, as llama.cpp and vLLM do. A template that cannot take a role or
//! an order refuses by itself.

use paceline_formats::chat::Message;
use serde_json::{Map, Value};

use super::fields::{FUNCTION, MESSAGE, PART, TOOL_CALL};
use super::object;
use crate::field::{Fields, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;

/// Most parts of a message: longer than any known use.
pub(crate) const MAX_PARTS: usize = 256;

/// Most calls of a message: OpenAI's bound for the tools themselves.
pub(crate) const MAX_TOOL_CALLS: usize = 128;

/// Roles that a request may name.
pub(crate) const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Reads `messages`, 1 to `most` of them.
pub(super) fn read(value: Value, most: usize) -> Result<Vec<Message>, Rejection> {
    let Value::Array(items) = value else {
        return Err(wrong_type("messages".into(), &value, "an array"));
    };
    if !(1..=most).contains(&items.len()) {
        return Err(Rejection::Length {
            param: "messages".into(),
            got: items.len(),
            unit: "messages",
            expected: format!("1 to {most}"),
        });
    }
    items.into_iter().enumerate().map(message).collect()
}

fn message((i, value): (usize, Value)) -> Result<Message, Rejection> {
    let place = format!("messages[{i}]");
    let map = object(value, || place.clone())?;
    let mut fields = Fields::new(map, MESSAGE, &format!("{place}."))?;
    let role = role(&fields, &place)?;
    for (field, owner) in [("tool_calls", "assistant"), ("tool_call_id", "tool")] {
        if fields.has(field) && role != owner {
            return Err(Rejection::Unsupported {
                param: format!("{place}.{field}"),
                got: format!("given by the role {role}"),
                why: "tool_calls are of the role assistant, tool_call_id is of the role tool",
            });
        }
    }
    let mut extra = Map::new();
    if let Some(calls) = fields.take("tool_calls") {
        let calls = tool_calls(calls, &place)?;
        extra.insert("tool_calls".into(), calls.into());
    }
    let may_be_silent = extra.contains_key("tool_calls");
    let content = content(fields.take("content"), &place, may_be_silent)?;
    for name in ["name", "tool_call_id"] {
        extra.extend(fields.take(name).map(|value| (name.to_owned(), value)));
    }
    Ok(Message {
        role: role.to_owned(),
        content,
        extra,
    })
}

/// The role as templates know it.
fn role(fields: &Fields, place: &str) -> Result<&'static str, Rejection> {
    let role = fields.text("role").unwrap_or_default();
    match ROLES.into_iter().find(|known| *known == role) {
        // What OpenAI calls the system role of its newer models.
        Some("developer") => Ok("system"),
        Some(role) => Ok(role),
        None => Err(Rejection::Range {
            param: format!("{place}.role"),
            got: format!("{role:?}"),
            expected: format!("one of {}", ROLES.join(", ")),
        }),
    }
}

fn content(value: Option<Value>, place: &str, may_be_silent: bool) -> Result<String, Rejection> {
    let param = || format!("{place}.content");
    match value {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(items)) => parts(items, param()),
        Some(other) => Err(wrong_type(param(), &other, "a string or an array of parts")),
        None if may_be_silent => Ok(String::new()),
        None => {
            let (param, expected) = (param(), "a string or an array of parts".to_owned());
            Err(Rejection::Missing { param, expected })
        }
    }
}

fn parts(items: Vec<Value>, param: String) -> Result<String, Rejection> {
    if items.len() > MAX_PARTS {
        return Err(Rejection::Length {
            param,
            got: items.len(),
            unit: "parts",
            expected: format!("at most {MAX_PARTS}"),
        });
    }
    let part = |(i, item): (usize, Value)| {
        let place = format!("{param}[{i}]");
        let map = object(item, || place.clone())?;
        // Before the fields: those of other types of part are not known here.
        let kind = map.get("type").unwrap_or(&Value::Null);
        if kind.is_string() && kind != "text" {
            return Err(Rejection::Unsupported {
                param: format!("{place}.type"),
                got: show(kind),
                why: "messages are text",
            });
        }
        let fields = Fields::new(map, PART, &format!("{place}."))?;
        Ok(fields.text("text").unwrap_or_default().to_owned())
    };
    let texts: Result<Vec<String>, Rejection> = items.into_iter().enumerate().map(part).collect();
    Ok(texts?.join("\n"))
}

fn tool_calls(value: Value, place: &str) -> Result<Vec<Value>, Rejection> {
    let param = format!("{place}.tool_calls");
    let Value::Array(calls) = value else {
        return Err(wrong_type(param, &value, "an array"));
    };
    if calls.len() > MAX_TOOL_CALLS {
        return Err(Rejection::Length {
            param,
            got: calls.len(),
            unit: "calls",
            expected: format!("at most {MAX_TOOL_CALLS}"),
        });
    }
    let call = |(i, call)| tool_call(call, &format!("{param}[{i}]"));
    calls.into_iter().enumerate().map(call).collect()
}

/// A call with its arguments parsed: templates print them by `tojson`, as `transformers` expects.
fn tool_call(value: Value, place: &str) -> Result<Value, Rejection> {
    let mut fields = Fields::new(
        object(value, || place.into())?,
        TOOL_CALL,
        &format!("{place}."),
    )?;
    let place = format!("{place}.function");
    let function = fields.take("function").unwrap_or_default();
    let function = object(function, || place.clone())?;
    let mut function = Fields::new(function, FUNCTION, &format!("{place}."))?;
    let text = function.text("arguments").unwrap_or_default();
    let arguments: Value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
    Ok(serde_json::json!({
        "id": fields.take("id"),
        "type": "function",
        "function": {"name": function.take("name"), "arguments": arguments},
    }))
}
