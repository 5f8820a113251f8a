//! Turns and tools of training rows in OpenAI's form, as servers log them and as mlx-lm and TRL
//! take them.
//!
//! | in the row | for the template |
//! |---|---|
//! | `content` null, absent, or parts of type `text` | a text |
//! | `tool_calls` with `function.arguments` as text | name, and arguments as JSON |
//! | `reasoning_content`, `reasoning` or `thinking` | the template's own name for it |
//! | role `developer` | `system` |
//!
//! They give the prompt that the HTTP API gives for the same conversation.

use paceline_text::chat::{ChatMessage, call_arguments, function_tool};
use serde_json::{Map, Value, json};

/// Names of an assistant's reasoning.
const REASONING: [&str; 3] = ["reasoning", "reasoning_content", "thinking"];

/// A message.
///
/// # Errors
/// The field that is of another form.
pub(crate) fn message(mut turn: Map<String, Value>) -> Result<ChatMessage, String> {
    turn.retain(|_, value| !value.is_null());
    if let Some(content) = turn.get_mut("content") {
        *content = joined(content)?.into();
    }
    if turn.get("role").is_some_and(|role| role == "developer") {
        turn.insert("role".into(), "system".into());
    }
    let reasoning = REASONING.map(|name| turn.remove(name));
    let reasoning = reasoning.into_iter().flatten().find(|text| *text != "");
    turn.extend(reasoning.map(|text| ("reasoning".to_owned(), text)));
    if let Some(Value::Array(calls)) = turn.get_mut("tool_calls") {
        calls.iter_mut().for_each(flatten);
    }
    serde_json::from_value(turn.into()).map_err(|error| error.to_string())
}

/// The text of a content, or its joined parts.
fn joined(content: &Value) -> Result<String, String> {
    let Value::Array(parts) = content else {
        let text = content.as_str().map(str::to_owned);
        return text.ok_or_else(|| "content is no text and no array of parts".to_owned());
    };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => Err(format!("a part of type {kind:?}, expected text")),
    };
    let texts: Result<Vec<String>, String> = parts.iter().map(text).collect();
    Ok(texts?.join("\n"))
}

/// Replaces a call of a function by its name and arguments.
fn flatten(call: &mut Value) {
    if !call["function"].is_object() {
        return;
    }
    let function = call["function"].take();
    let arguments = match &function["arguments"] {
        Value::String(text) => call_arguments(text),
        Value::Null => json!({}),
        given => given.clone(),
    };
    let id = call["id"].as_str().unwrap_or_default();
    *call = json!({"id": id, "name": function["name"], "arguments": arguments});
}

/// A tool for the template; one that is no function stays as it is.
pub(crate) fn tool(tool: &Value) -> Value {
    let function = &tool["function"];
    let Some(name) = function["name"].as_str() else {
        return tool.clone();
    };
    let parameters = function.get("parameters").filter(|given| !given.is_null());
    function_tool(name, function["description"].as_str(), parameters.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(turn: Value) -> Result<ChatMessage, String> {
        message(turn.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn turns_of_openai_are_those_of_templates() {
        let call = |arguments: Value| {
            of(
                json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                ]}),
            )
        };
        for (given, expected) in [
            (json!(r#"{"city": "Oslo"}"#), json!({"city": "Oslo"})),
            (json!({"city": "Oslo"}), json!({"city": "Oslo"})),
            (json!(""), json!({})),
            (json!(null), json!({})),
        ] {
            let turn = call(given).unwrap();
            assert_eq!(turn.tool_calls[0].arguments, expected);
            let call = &turn.tool_calls[0];
            assert_eq!((call.id.as_str(), call.name.as_str()), ("c1", "f"));
            assert!(turn.content.is_empty() && turn.extra.is_empty(), "{turn:?}");
        }
        let own = json!({"role": "assistant", "tool_calls": [
            {"id": "c1", "name": "f", "arguments": {}}]});
        assert_eq!(of(own).unwrap().tool_calls[0].name, "f");
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let turn = of(json!({"role": "developer", "content": parts})).unwrap();
        assert_eq!(turn, ChatMessage::new("system", "a\nb"));
        for name in REASONING {
            let turn = of(json!({"role": "assistant", "content": "a", name: "r"})).unwrap();
            assert_eq!(turn.reasoning.as_deref(), Some("r"));
        }
        let image = json!([{"type": "image_url", "image_url": {}}]);
        let error = of(json!({"role": "user", "content": image})).unwrap_err();
        assert!(error.contains("image_url"), "{error}");
    }

    #[test]
    fn tools_are_those_of_templates() {
        let bare = json!({"type": "function", "function": {"name": "now"}, "strict": true});
        assert_eq!(tool(&bare), function_tool("now", None, None));
        assert_eq!(tool(&json!({"name": "x"})), json!({"name": "x"}));
    }
}
