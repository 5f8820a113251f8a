//! Calls and tools as OpenAI's API has them, in the form that templates see. A server and a trainer
//! give one prompt for one conversation.

use serde_json::{Map, Value as Json, json};

use super::ChatMessage;
use crate::replace_lone_surrogates;

/// Arguments of a call: JSON, no text for none, or the text itself where it is no JSON.
pub fn call_arguments(text: &str) -> Json {
    match text.trim() {
        "" => json!({}),
        json => {
            let json = replace_lone_surrogates(json.as_bytes());
            serde_json::from_slice(&json).unwrap_or_else(|_| text.into())
        }
    }
}

/// A function that the model may call, as `transformers` passes it to templates.
pub fn function_tool(name: &str, description: Option<&str>, parameters: Option<Json>) -> Json {
    let no_parameters = || json!({"type": "object", "properties": {}});
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    function.insert("description".into(), description.unwrap_or_default().into());
    function.insert(
        "parameters".into(),
        parameters.unwrap_or_else(no_parameters),
    );
    json!({"type": "function", "function": function})
}

/// Gives results without a name that of the tool whose call they answer. Some templates print it.
pub fn name_results(messages: &mut [ChatMessage]) {
    let calls = messages.iter().flat_map(|message| &message.tool_calls);
    let names: Vec<(String, String)> = calls
        .map(|call| (call.id.clone(), call.name.clone()))
        .collect();
    let unnamed = |message: &&mut ChatMessage| message.role == "tool" && message.name.is_none();
    for message in messages.iter_mut().filter(unnamed) {
        let id = message.tool_call_id.as_deref().unwrap_or_default();
        let named = names.iter().rev().find(|(known, _)| known == id);
        message.name = named.map(|(_, name)| name.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::ToolCall;

    #[test]
    fn results_get_the_names_of_their_calls() {
        let mut messages = [
            ChatMessage {
                tool_calls: vec![ToolCall {
                    id: "c1".into(),
                    name: "add".into(),
                    arguments: json!({"a": 1}),
                }],
                ..ChatMessage::new("assistant", "")
            },
            ChatMessage::tool_result("c1", "3"),
            ChatMessage::tool_result("c2", "4"),
        ];
        name_results(&mut messages);
        assert_eq!(messages[1].name.as_deref(), Some("add"));
        assert_eq!(messages[2].name, None);
    }

    #[test]
    fn arguments_are_parsed_where_they_are_json() {
        for (text, expected) in [
            ("", json!({})),
            (r#"{"a":[1]}"#, json!({"a": [1]})),
            (r#"{"a":"\ud83d"}"#, json!({"a": "\u{fffd}"})),
            ("{broken", json!("{broken")),
        ] {
            assert_eq!(call_arguments(text), expected);
        }
    }
}
