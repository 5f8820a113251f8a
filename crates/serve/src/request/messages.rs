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

use paceline_text::chat::{ChatMessage, ToolCall, call_arguments};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::bounds::{MAX_PARTS, MAX_TEXT, MAX_TOOL_CALLS};
use super::{CacheControl, RequestParser};
use crate::rejection::Rejection;

/// A message of a chat.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "role", rename_all = "lowercase")]
pub(super) enum OpenAiMessage {
    System(PlainMessage),
    Developer(PlainMessage),
    User(PlainMessage),
    Assistant(Box<AssistantMessage>),
    Tool(ToolMessage),
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct PlainMessage {
    /// A text, or parts of type text.
    content: Content,
    #[serde(flatten)]
    shared: MessageFields,
    #[serde(flatten)]
    _no_calls: NoToolCalls,
    #[serde(flatten)]
    _no_result: NoToolCallId,
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct AssistantMessage {
    /// A text, or parts of type text. Clients send messages without text back unchanged.
    content: Option<Content>,
    /// Given to the template.
    #[schemars(length(max = MAX_TOOL_CALLS))]
    tool_calls: Option<Vec<ChatToolCall>>,
    #[serde(flatten)]
    shared: MessageFields,
    #[serde(flatten)]
    _no_result: NoToolCallId,
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ToolMessage {
    /// A text, or parts of type text.
    content: Content,
    /// Given to the template.
    #[schemars(length(max = 256))]
    tool_call_id: Option<String>,
    #[serde(flatten)]
    shared: MessageFields,
    #[serde(flatten)]
    _no_calls: NoToolCalls,
}

/// Fields of messages of any role.
#[derive(Debug, Deserialize, JsonSchema)]
struct MessageFields {
    /// Given to the chat template.
    #[schemars(length(max = 256))]
    name: Option<String>,
    /// Thinking of the role assistant; given to templates that keep it.
    #[schemars(length(max = MAX_TEXT))]
    reasoning_content: Option<String>,
    /// Another name of reasoning_content, which goes first. Not OpenAI's.
    #[schemars(length(max = MAX_TEXT))]
    reasoning: Option<String>,
    /// Text of the role assistant in place of content.
    #[schemars(length(max = MAX_TEXT))]
    refusal: Option<String>,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

no_effect!(NoEffect { cache_control, annotations } only {
    audio = [] "messages are text",
    function_call = [] "use tool_calls"
});

no_effect!(NoToolCalls {} only {
    tool_calls = [] "tool_calls are of the role assistant"
});

no_effect!(NoToolCallId {} only {
    tool_call_id = [] "tool_call_id is of the role tool"
});

/// Content of a message.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(#[schemars(length(max = MAX_PARTS))] Vec<Part>),
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Part {
    /// Always text.
    #[schemars(extend("enum" = ["text"], "x-why" = "messages are text"))]
    #[serde(rename = "type")]
    _type: String,
    /// Text of the part.
    #[schemars(length(max = MAX_TEXT))]
    text: String,
    #[serde(flatten)]
    _cache_control: CacheControl,
}

/// An entry of `tool_calls`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
enum ChatToolCall {
    Custom {
        /// Name of the call, which its result repeats.
        #[schemars(length(max = 256))]
        id: String,
        /// Name and input of the call.
        custom: CustomCall,
    },
    #[serde(untagged)]
    Function {
        /// Name of the call, which its result repeats.
        #[schemars(length(max = 256))]
        id: String,
        /// Always function.
        #[schemars(extend("enum" = ["function", null], "x-why" = "functions are the only tools"))]
        #[serde(rename = "type")]
        _type: Option<String>,
        /// Name and arguments of the call.
        function: FunctionCall,
        /// Number of the call in streams; no effect.
        #[schemars(range(min = 0, max = 1024))]
        #[serde(rename = "index")]
        _index: Option<i64>,
    },
}

#[derive(Debug, Deserialize, JsonSchema)]
struct CustomCall {
    /// Name of the tool.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// Text for the tool.
    input: Value,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct FunctionCall {
    /// Name of the function.
    #[schemars(length(min = 1, max = 256))]
    name: String,
    /// JSON in a string.
    #[schemars(length(max = MAX_TEXT))]
    arguments: String,
}

impl RequestParser<'_> {
    /// `messages`, one or more, as turns.
    pub(super) fn messages(
        &self,
        messages: Vec<OpenAiMessage>,
    ) -> Result<Vec<ChatMessage>, Rejection> {
        self.check_messages("messages", messages.len(), 1)?;
        Ok(messages.into_iter().map(OpenAiMessage::message).collect())
    }
}

impl OpenAiMessage {
    fn message(self) -> ChatMessage {
        let (role, content, shared) = match self {
            // OpenAI's name of the system role for newer models.
            Self::System(PlainMessage {
                content, shared, ..
            })
            | Self::Developer(PlainMessage {
                content, shared, ..
            }) => ("system", content, shared),
            Self::User(PlainMessage {
                content, shared, ..
            }) => ("user", content, shared),
            Self::Tool(message) => {
                let turn = ChatMessage::new("tool", message.content.text());
                return ChatMessage {
                    name: message.shared.name,
                    tool_call_id: message.tool_call_id,
                    ..turn
                };
            }
            Self::Assistant(message) => return message.message(),
        };
        ChatMessage {
            name: shared.name,
            ..ChatMessage::new(role, content.text())
        }
    }
}

impl AssistantMessage {
    fn message(self) -> ChatMessage {
        let MessageFields {
            name,
            reasoning_content,
            reasoning,
            refusal,
            ..
        } = self.shared;
        let text = self.content.map(Content::text).or(refusal);
        let calls = self.tool_calls.into_iter().flatten();
        ChatMessage {
            name,
            reasoning: reasoning_content
                .or(reasoning)
                .filter(|text| !text.is_empty()),
            tool_calls: calls.map(ChatToolCall::call).collect(),
            ..ChatMessage::new("assistant", text.unwrap_or_default())
        }
    }
}

impl Content {
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts: Vec<String> = parts.into_iter().map(|part| part.text).collect();
                texts.join("\n")
            }
        }
    }
}

impl ChatToolCall {
    /// A call with parsed arguments: templates print them with `tojson`. The argument of a custom
    /// tool is its text.
    fn call(self) -> ToolCall {
        match self {
            Self::Custom { id, custom } => ToolCall {
                id,
                name: custom.name,
                arguments: json!({"input": custom.input}),
            },
            Self::Function { id, function, .. } => ToolCall {
                id,
                name: function.name,
                arguments: call_arguments(&function.arguments),
            },
        }
    }
}
