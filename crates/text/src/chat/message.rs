//! Turns of a conversation, and the form in which templates look at them.
//!
//! Templates are written for the dictionaries of `transformers`: `content`, `tool_calls` with
//! `function.name` and `function.arguments`, a name of their own for reasoning. Templates accept
//! different forms: arguments as an object or as text, content that may be null or not.
//! [`MessageFormat`] is the form that a template wants, found by rendering two small conversations.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

/// A turn of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The speaker, one of [`ROLES`](super::ROLES).
    pub role: String,
    /// Text of the turn; empty when it only calls tools.
    #[serde(default)]
    pub content: String,
    /// Reasoning of an assistant before its text, for templates that keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Tools that an assistant called, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call that a turn of the role `tool` is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker, or the tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Other fields that the template may look at.
    #[serde(flatten)]
    pub extra: Map<String, Json>,
}

impl ChatMessage {
    /// A turn without extras.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            ..Self::default()
        }
    }

    /// The answer of a tool to the call `tool_call_id`.
    pub fn tool_result(tool_call_id: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            tool_call_id: Some(tool_call_id.into()),
            ..Self::new("tool", content)
        }
    }
}

/// A tool that an assistant called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Names the call; a result refers to it.
    pub id: String,
    pub name: String,
    /// An object, or the original text if it is not JSON.
    pub arguments: Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageFormat {
    /// Arguments of calls as JSON text instead of an object.
    has_text_arguments: bool,
    /// Empty content of a turn that calls tools as null instead of an empty text.
    has_null_content: bool,
    /// Content as a list of parts instead of a text.
    has_parts: bool,
    /// Names under which the template looks for reasoning.
    reasoning: [Option<&'static str>; 3],
}

/// Keys of messages that hold reasoning, by model family.
const REASONING_KEYS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl MessageFormat {
    /// The form that `transformers` documents.
    fn documented(source: &str) -> Self {
        let key = |name: &'static str| source.contains(name).then_some(name);
        Self {
            has_text_arguments: false,
            has_null_content: false,
            has_parts: false,
            reasoning: REASONING_KEYS.map(key),
        }
    }

    /// The form that the template `source` accepts; `render` renders messages, and gives `None`
    /// when the template fails or refuses them.
    pub(super) fn of(source: &str, render: impl Fn(&[Json]) -> Option<String>) -> Self {
        let documented = Self::documented(source);
        let user = || ChatMessage::new("user", "PROBE");
        let says = |shape: Self| render(&[shape.dress(&user())]);
        let with_parts = Self {
            has_parts: true,
            ..documented
        };
        let has_probe = |text: Option<String>| text.is_some_and(|text| text.contains("PROBE"));
        let base = if !has_probe(says(documented)) && has_probe(says(with_parts)) {
            with_parts
        } else {
            documented
        };
        if !source.contains("tool_calls") {
            return base;
        }
        let rates = |shape: &Self| render(&[shape.dress(&user()), shape.dress(&probe_call())]);
        let forms = [(false, false), (false, true), (true, false), (true, true)];
        let shapes = forms.map(|(has_text_arguments, has_null_content)| Self {
            has_text_arguments,
            has_null_content,
            ..base
        });
        let rated = shapes.iter().map(|shape| rating(rates(shape)));
        let best = rated.enumerate().max_by_key(|(i, rating)| (*rating, 4 - i));
        let best = best.map_or(base, |(i, _)| shapes[i]);
        best.with_null_content(render)
    }

    /// The same with null as the content of turns that only call tools, if the template writes
    /// less with it. With an empty text some templates write an empty answer too.
    fn with_null_content(self, render: impl Fn(&[Json]) -> Option<String>) -> Self {
        let conversation = [
            ChatMessage::new("user", "PROBE"),
            probe_call(),
            ChatMessage::tool_result("abcdef123", "PROBE"),
        ];
        let says = |shape: Self| render(&conversation.each_ref().map(|turn| shape.dress(turn)));
        let with_null = Self {
            has_null_content: true,
            ..self
        };
        match (says(self), says(with_null)) {
            (Some(text), Some(null)) if null.len() < text.len() && words(&null) <= words(&text) => {
                with_null
            }
            _ => self,
        }
    }

    /// A message as the dictionary that a template sees.
    pub(super) fn dress(&self, message: &ChatMessage) -> Json {
        let mut out = Map::new();
        out.insert("role".into(), message.role.as_str().into());
        out.insert("content".into(), self.content(message));
        if let Some(reasoning) = &message.reasoning {
            let keys = self.reasoning.iter().flatten();
            out.extend(keys.map(|key| ((*key).to_owned(), reasoning.as_str().into())));
        }
        if !message.tool_calls.is_empty() {
            let calls = message.tool_calls.iter().map(|call| self.call(call));
            out.insert("tool_calls".into(), calls.collect());
        }
        for (key, value) in [
            ("tool_call_id", &message.tool_call_id),
            ("name", &message.name),
        ] {
            out.extend(value.as_deref().map(|text| (key.to_owned(), text.into())));
        }
        out.extend(message.extra.clone());
        out.into()
    }

    fn content(&self, message: &ChatMessage) -> Json {
        if message.content.is_empty() && !message.tool_calls.is_empty() && self.has_null_content {
            return Json::Null;
        }
        if self.has_parts {
            return json!([{"type": "text", "text": message.content}]);
        }
        message.content.as_str().into()
    }

    fn call(&self, call: &ToolCall) -> Json {
        let arguments = match &call.arguments {
            Json::String(text) => Json::from(text.as_str()),
            object if self.has_text_arguments => object.to_string().into(),
            object => object.clone(),
        };
        json!({
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        })
    }
}

/// A call whose rendering shows how a template treats arguments. The id is of the only form that
/// every family takes (Mistral wants nine letters or digits).
fn probe_call() -> ChatMessage {
    ChatMessage {
        tool_calls: vec![ToolCall {
            id: "abcdef123".into(),
            name: "PROBE_TOOL".into(),
            arguments: json!({"PROBE_KEY": "PROBE_VALUE"}),
        }],
        ..ChatMessage::new("assistant", "")
    }
}

/// Quality of a rendering of the call; smaller is better. First, its key is neither lost nor
/// escaped. Then, missing content is not written as a word. A template may contain that word too.
fn rating(rendered: Option<String>) -> (u8, Reverse<usize>) {
    let Some(text) = rendered else {
        return (0, Reverse(0));
    };
    let has_call = text.contains("PROBE_TOOL") && text.contains("PROBE_KEY");
    let is_escaped = text.contains("\\\"PROBE_KEY") || text.contains("'PROBE_KEY'");
    let quality = 1 + 2 * u8::from(has_call) + u8::from(!is_escaped);
    (quality, Reverse(words(&text)))
}

/// Words that templates write for null.
fn words(text: &str) -> usize {
    const WORDS: [&str; 3] = ["None", "none>", "null"];
    WORDS.iter().map(|word| text.matches(word).count()).sum()
}
