//! Messages of a chat request, as turns.
//!
//! | role | content | besides |
//! |---|---|---|
//! | system, developer (read as system), user | text or parts | name |
//! | assistant | text, parts, or none | name, tool_calls, reasoning_content, reasoning, refusal |
//! | tool | text or parts | tool_call_id, name |
//!
//! Parts are joined by line ends, as in llama.cpp and vLLM. Templates reject roles and orders that
//! they do not support.

use paceline_text::chat::call_arguments;
use serde_json::{Map, Value, json};

use super::bounds::{MAX_PARTS, MAX_TOOL_CALLS};
use super::fields::{FUNCTION, MESSAGE, PART, TOOL_CALL};
use super::{RequestParser, array, object, unsupported};
use crate::conversation::{ConversationTurn, TurnRole, TurnToolCall};
use crate::field::{FieldValues, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;

/// Accepted roles.
pub(crate) const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

impl RequestParser<'_> {
    /// Parses `messages`, one or more.
    pub(super) fn messages(&self, value: Value) -> Result<Vec<ConversationTurn>, Rejection> {
        let most = self.limits.messages;
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
        let message = |(i, value)| self.message(i, value);
        items.into_iter().enumerate().map(message).collect()
    }

    fn message(&self, i: usize, value: Value) -> Result<ConversationTurn, Rejection> {
        let place = format!("messages[{i}]");
        let map = object(value, || place.clone())?;
        let mut fields = self.kept_fields(map, MESSAGE, &format!("{place}."))?;
        let role = role(&fields, &place)?;
        for (field, owner) in [
            ("tool_calls", TurnRole::Assistant),
            ("tool_call_id", TurnRole::Tool),
        ] {
            if fields.has(field) && role != owner {
                let why = "tool_calls are of the role assistant, tool_call_id is of the role tool";
                let got = format!("given by the role {}", role_text(&fields));
                return Err(unsupported(format!("{place}.{field}"), got, why));
            }
        }
        let may_be_silent = role == TurnRole::Assistant;
        let content = fields.take("content");
        let content = content.or_else(|| fields.take("refusal").filter(|_| may_be_silent));
        let text = self.content(content, &place, may_be_silent)?;
        let calls = fields.take("tool_calls");
        let calls = calls.map_or(Ok(Vec::new()), |calls| self.tool_calls(calls, &place))?;
        let owned = |name: &str| fields.text(name).map(str::to_owned);
        // Other roles do not reason; the field is ignored for clients that always send it.
        let reasons = |text: &String| may_be_silent && !text.is_empty();
        Ok(ConversationTurn {
            role,
            text,
            name: owned("name"),
            reasoning: owned("reasoning_content")
                .or_else(|| owned("reasoning"))
                .filter(reasons),
            calls,
            answers: owned("tool_call_id"),
        })
    }

    fn content(
        &self,
        value: Option<Value>,
        place: &str,
        may_be_silent: bool,
    ) -> Result<String, Rejection> {
        let param = || format!("{place}.content");
        match value {
            Some(Value::String(text)) => Ok(text),
            Some(Value::Array(items)) => self.parts(items, &param()),
            Some(other) => Err(wrong_type(param(), &other, "a string or an array of parts")),
            None if may_be_silent => Ok(String::new()),
            None => {
                let (param, expected) = (param(), "a string or an array of parts".to_owned());
                Err(Rejection::Missing { param, expected })
            }
        }
    }

    fn parts(&self, items: Vec<Value>, param: &str) -> Result<String, Rejection> {
        let items = array(items.into(), param, MAX_PARTS, "parts")?;
        let part = |(i, item): (usize, Value)| {
            let place = format!("{param}[{i}]");
            let map = object(item, || place.clone())?;
            // Checked before the fields: those of other part types are unknown here.
            let kind = map.get("type").unwrap_or(&Value::Null);
            if kind.is_string() && kind != "text" {
                let why = "messages are text";
                return Err(unsupported(format!("{place}.type"), show(kind), why));
            }
            let fields = self.kept_fields(map, PART, &format!("{place}."))?;
            Ok(fields.text("text").unwrap_or_default().to_owned())
        };
        let texts: Result<Vec<String>, Rejection> =
            items.into_iter().enumerate().map(part).collect();
        Ok(texts?.join("\n"))
    }

    fn tool_calls(&self, value: Value, place: &str) -> Result<Vec<TurnToolCall>, Rejection> {
        let param = format!("{place}.tool_calls");
        let calls = array(value, &param, MAX_TOOL_CALLS, "calls")?;
        let call = |(i, call)| self.tool_call(call, &format!("{param}[{i}]"));
        calls.into_iter().enumerate().map(call).collect()
    }

    /// A call with parsed arguments: templates print them with `tojson`.
    fn tool_call(&self, value: Value, place: &str) -> Result<TurnToolCall, Rejection> {
        let mut map = object(value, || place.into())?;
        if let Some(custom) = map.swap_remove("custom") {
            map.insert("function".into(), custom_call(custom));
            map.insert("type".into(), "function".into());
        }
        let mut fields = self.kept_fields(map, TOOL_CALL, &format!("{place}."))?;
        let place = format!("{place}.function");
        let function = fields.take("function").unwrap_or_default();
        let function: Map<String, Value> = object(function, || place.clone())?;
        let function = self.kept_fields(function, FUNCTION, &format!("{place}."))?;
        Ok(TurnToolCall {
            id: fields.text("id").unwrap_or_default().to_owned(),
            name: function.text("name").unwrap_or_default().to_owned(),
            arguments: call_arguments(function.text("arguments").unwrap_or_default()),
        })
    }
}

/// A custom tool's call as that of a function, whose argument is the text.
fn custom_call(custom: Value) -> Value {
    let arguments = json!({"input": custom["input"]}).to_string();
    json!({"name": custom["name"], "arguments": arguments})
}

fn role_text(fields: &FieldValues) -> &str {
    fields.text("role").unwrap_or_default()
}

/// The role's name in templates.
fn role(fields: &FieldValues, place: &str) -> Result<TurnRole, Rejection> {
    match role_text(fields) {
        // OpenAI's name of the system role for newer models.
        "system" | "developer" => Ok(TurnRole::System),
        "user" => Ok(TurnRole::User),
        "assistant" => Ok(TurnRole::Assistant),
        "tool" => Ok(TurnRole::Tool),
        other => Err(Rejection::Range {
            param: format!("{place}.role"),
            got: format!("{other:?}"),
            expected: format!("one of {}", ROLES.join(", ")),
        }),
    }
}
