//! `POST /v1/responses`: items to turns.
//!
//! Consecutive items of the assistant (reasoning, messages, calls) form one turn, as templates
//! expect. Tools in namespaces keep their own names, and hosted tools are dropped with a warning:
//! Codex always sends both.

use std::collections::BTreeMap;

use paceline_text::chat::call_arguments;
use serde_json::{Map, Value, json};

use super::bounds::{ITEM_PART_KINDS, MAX_ITEM_PARTS, MAX_ITEM_TOOLS};
use super::chat::thinking;
use super::fields::responses as table;
use super::{
    ApiDialect, ModelRequest, RequestParser, StreamOptions, array, check_metadata, object, tools,
    unsupported,
};
use crate::conversation::{Conversation, ConversationTurn, TurnRole, TurnToolCall};
use crate::field::{FieldValues, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;
use crate::render::responses::ResponsesEcho;

/// Items of tools that a provider runs.
const HOSTED_ITEMS: [&str; 7] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "tool_search_call",
];

impl RequestParser<'_> {
    /// Parses a response request.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn response(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut fields = self.fields(body, table::RESPONSE, "")?;
        self.check_model(&fields)?;
        check_metadata(fields.get("metadata"))?;
        let max_tokens = fields.count("max_output_tokens").unwrap_or(usize::MAX);
        let has_usage = true;
        let stream = fields
            .is_true("stream")
            .then_some(StreamOptions { has_usage });
        let echo = echo(&fields);
        let like = self.request(&mut fields, max_tokens, None, Vec::new())?;
        let is_stored = fields.get("store") != Some(&Value::Bool(false));
        let mut conversation = Conversation {
            turns: self.earlier(fields.text("previous_response_id"))?,
            is_parallel: fields.get("parallel_tool_calls") != Some(&Value::Bool(false)),
            ..Conversation::default()
        };
        self.input(
            fields.take("input").unwrap_or_default(),
            &mut conversation.turns,
        )?;
        let keep = is_stored.then(|| conversation.turns.clone());
        // Not stored: a later response has its own instructions.
        let instructions = fields.text("instructions").filter(|text| !text.is_empty());
        let instructions = instructions.map(|text| ConversationTurn::new(TurnRole::System, text));
        conversation.turns.splice(..0, instructions);
        let spaces = self.response_tools(fields.take("tools"), &mut conversation)?;
        if let Some(choice) = fields.take("tool_choice") {
            self.read_choice(choice, &mut conversation)?;
        }
        self.response_text(&mut fields, &mut conversation)?;
        let teller = ApiDialect::Responses(Box::new(ResponsesEcho { echo, spaces, keep }));
        self.converse(&conversation, 1, &like, "input", (teller, stream))
    }

    /// The turns of a previous response.
    fn earlier(&self, id: Option<&str>) -> Result<Vec<ConversationTurn>, Rejection> {
        let Some(id) = id else { return Ok(Vec::new()) };
        let stored = self.store.get(id, self.client);
        let stored = stored.ok_or_else(|| Rejection::NoResponse { id: id.to_owned() })?;
        Ok(stored.turns.clone())
    }

    /// Parses `reasoning` and `text`.
    fn response_text(
        &self,
        fields: &mut FieldValues,
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        if let Some(Value::Object(map)) = fields.take("reasoning") {
            let reasoning = self.fields(map, table::REASONING_FIELD, "reasoning.")?;
            conversation.thinking = thinking(reasoning.text("effort"));
        }
        if let Some(Value::Object(map)) = fields.take("text") {
            let mut text = self.fields(map, table::TEXT_FIELD, "text.")?;
            conversation.format_at = "text.format";
            conversation.format = self.format(text.take("format"), "text.format")?;
        }
        Ok(())
    }

    fn input(&self, value: Value, turns: &mut Vec<ConversationTurn>) -> Result<(), Rejection> {
        let items = match value {
            Value::String(text) => {
                turns.push(ConversationTurn::new(TurnRole::User, text));
                return Ok(());
            }
            Value::Array(items) => items,
            other => {
                let expected = "a string or an array of items";
                return Err(wrong_type("input".into(), &other, expected));
            }
        };
        let items = array(items.into(), "input", self.limits.messages, "items")?;
        for (i, item) in items.into_iter().enumerate() {
            let place = format!("input[{i}]");
            let map = object(item, || place.clone())?;
            self.item(map, &place, turns)?;
        }
        if turns.is_empty() {
            let (got, unit, expected) = (0, "items", "1 or more".to_owned());
            let param = "input".to_owned();
            return Err(Rejection::Length {
                param,
                got,
                unit,
                expected,
            });
        }
        Ok(())
    }

    fn item(
        &self,
        map: Map<String, Value>,
        place: &str,
        turns: &mut Vec<ConversationTurn>,
    ) -> Result<(), Rejection> {
        let dotted = format!("{place}.");
        let kind = map.get("type").cloned().unwrap_or_else(|| "message".into());
        let name = kind.as_str().unwrap_or_default();
        match name {
            "message" => self.item_message(map, place, turns),
            "function_call" => {
                let fields = self.kept_fields(map, table::CALL, &dotted)?;
                let owned = |name| fields.text(name).unwrap_or_default().to_owned();
                assistant(turns).calls.push(TurnToolCall {
                    id: owned("call_id"),
                    name: owned("name"),
                    arguments: call_arguments(fields.text("arguments").unwrap_or_default()),
                });
                Ok(())
            }
            "custom_tool_call" => {
                let fields = self.kept_fields(map, table::CUSTOM_CALL, &dotted)?;
                let owned = |name| fields.text(name).unwrap_or_default().to_owned();
                assistant(turns).calls.push(TurnToolCall {
                    id: owned("call_id"),
                    name: owned("name"),
                    arguments: json!({"input": owned("input")}),
                });
                Ok(())
            }
            "local_shell_call" | "shell_call" | "apply_patch_call" => {
                let mut fields = self.kept_fields(map, table::ACTION_CALL, &dotted)?;
                let action = fields.take("action").or(fields.take("operation"));
                assistant(turns).calls.push(TurnToolCall {
                    id: fields.text("call_id").unwrap_or_default().to_owned(),
                    name: name.trim_end_matches("_call").to_owned(),
                    arguments: action.unwrap_or_else(|| json!({})),
                });
                Ok(())
            }
            "function_call_output"
            | "custom_tool_call_output"
            | "local_shell_call_output"
            | "shell_call_output"
            | "apply_patch_call_output" => {
                let mut fields = self.kept_fields(map, table::OUTPUT, &dotted)?;
                let output = fields.take("output").unwrap_or_default();
                let text = self.output_text(output, name, &format!("{place}.output"))?;
                let id = fields.text("call_id").unwrap_or_default();
                turns.push(ConversationTurn::result(id, text));
                Ok(())
            }
            "reasoning" => {
                let mut fields = self.kept_fields(map, table::REASONING, &dotted)?;
                let content = fields.take("content").filter(|list| *list != json!([]));
                let said = content
                    .or(fields.take("summary"))
                    .unwrap_or_else(|| json!([]));
                let text = self.item_text(said, &format!("{place}.content"))?;
                if !text.is_empty() {
                    assistant(turns).reasoning = Some(text);
                }
                Ok(())
            }
            // The provider ran the tool, and its result is in the answer that follows.
            hosted if HOSTED_ITEMS.contains(&hosted) => {
                self.notes.warn(format!(
                    "{place} of type {hosted} is hosted and was left out"
                ));
                Ok(())
            }
            _ => {
                let why = "items are messages, calls and their outputs, and reasoning";
                Err(unsupported(format!("{place}.type"), show(&kind), why))
            }
        }
    }

    fn item_message(
        &self,
        map: Map<String, Value>,
        place: &str,
        turns: &mut Vec<ConversationTurn>,
    ) -> Result<(), Rejection> {
        let mut fields = self.kept_fields(map, table::MESSAGE, &format!("{place}."))?;
        let content = fields.take("content").unwrap_or_default();
        let text = self.item_text(content, &format!("{place}.content"))?;
        match fields.text("role").unwrap_or_default() {
            "user" => turns.push(ConversationTurn::new(TurnRole::User, text)),
            "system" | "developer" => turns.push(ConversationTurn::new(TurnRole::System, text)),
            "assistant" => {
                let turn = assistant(turns);
                if !turn.text.is_empty() {
                    turn.text.push('\n');
                }
                turn.text.push_str(&text);
            }
            other => {
                return Err(Rejection::Range {
                    param: format!("{place}.role"),
                    got: format!("{other:?}"),
                    expected: "user, assistant, system or developer".into(),
                });
            }
        }
        Ok(())
    }

    /// The text of a call's output. Parts of a shell's output, which have texts under names of
    /// their own, are kept as JSON.
    fn output_text(&self, output: Value, kind: &str, param: &str) -> Result<String, Rejection> {
        match output {
            Value::Array(_) if kind == "shell_call_output" => Ok(output.to_string()),
            output => self.item_text(output, param),
        }
    }

    /// A text, or the joined parts.
    fn item_text(&self, value: Value, param: &str) -> Result<String, Rejection> {
        let parts = match value {
            Value::String(text) => return Ok(text),
            Value::Array(_) => array(value, param, MAX_ITEM_PARTS, "parts")?,
            other => {
                let expected = "a string or an array of parts";
                return Err(wrong_type(param.to_owned(), &other, expected));
            }
        };
        let part = |(i, part): (usize, Value)| {
            let place = format!("{param}[{i}]");
            let map = object(part, || place.clone())?;
            let kind = map.get("type").cloned().unwrap_or_default();
            if kind.is_string() && !ITEM_PART_KINDS.contains(&kind.as_str().unwrap_or_default()) {
                let why = "messages are text";
                return Err(unsupported(format!("{place}.type"), show(&kind), why));
            }
            let fields = self.kept_fields(map, table::PART, &format!("{place}."))?;
            let text = fields.text("text").or(fields.text("refusal"));
            Ok(text.unwrap_or_default().to_owned())
        };
        let texts: Result<Vec<String>, Rejection> =
            parts.into_iter().enumerate().map(part).collect();
        Ok(texts?.join("\n"))
    }

    /// Parses the tools; returns the namespaces by tool name.
    fn response_tools(
        &self,
        list: Option<Value>,
        conversation: &mut Conversation,
    ) -> Result<BTreeMap<String, String>, Rejection> {
        let mut spaces = BTreeMap::new();
        let list = list.unwrap_or_else(|| json!([]));
        let list = array(list, "tools", MAX_ITEM_TOOLS, "tools")?;
        for (i, tool) in list.into_iter().enumerate() {
            let place = format!("tools[{i}]");
            let map = object(tool, || place.clone())?;
            let kind = map.get("type").and_then(Value::as_str).unwrap_or_default();
            match kind {
                "function" => self.response_function(map, &place, conversation)?,
                "namespace" => {
                    let mut fields = self.fields(map, table::NAMESPACE, &format!("{place}."))?;
                    let space = fields.text("name").unwrap_or_default().to_owned();
                    let inner = fields.take("tools").unwrap_or_default();
                    let place = format!("{place}.tools");
                    let inner = array(inner, &place, MAX_ITEM_TOOLS, "tools")?.into_iter();
                    for (i, tool) in inner.enumerate() {
                        let place = format!("{place}[{i}]");
                        let map = object(tool, || place.clone())?;
                        self.response_function(map, &place, conversation)?;
                        let name = conversation.tools.last().map(|tool| tool.name.clone());
                        spaces.extend(name.map(|name| (name, space.clone())));
                    }
                }
                // It may be what the answer is about, and would reach other machines.
                "mcp" => {
                    let why = "this server calls no MCP servers";
                    return Err(unsupported(format!("{place}.type"), "\"mcp\"", why));
                }
                kind => {
                    let text = format!("{place} of type {kind} is hosted and was left out");
                    self.notes.warn(text);
                }
            }
        }
        Ok(spaces)
    }

    fn response_function(
        &self,
        map: Map<String, Value>,
        place: &str,
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        let mut fields = self.fields(map, table::FUNCTION, &format!("{place}."))?;
        let name = fields.text("name").unwrap_or_default().to_owned();
        if conversation.tools.iter().any(|tool| tool.name == name) {
            let why = "another tool has this name";
            return Err(unsupported(
                format!("{place}.name"),
                format!("{name:?}"),
                why,
            ));
        }
        conversation.tools.push(crate::conversation::Tool {
            name,
            description: fields.text("description").map(str::to_owned),
            is_strict: fields.is_true("strict"),
            parameters: fields
                .take("parameters")
                .unwrap_or_else(tools::no_parameters),
        });
        Ok(())
    }
}

/// The assistant turn of an item; starts one if needed.
fn assistant(turns: &mut Vec<ConversationTurn>) -> &mut ConversationTurn {
    let is_open = turns
        .last()
        .is_some_and(|turn| turn.role == TurnRole::Assistant);
    if !is_open {
        turns.push(ConversationTurn::new(TurnRole::Assistant, ""));
    }
    turns.last_mut().expect("a turn was just added")
}

/// The request fields that the response repeats.
fn echo(fields: &FieldValues) -> Map<String, Value> {
    let get = |name: &str| fields.get(name).cloned();
    let is_stored = get("store").unwrap_or(true.into());
    let mut echo = Map::new();
    for (name, value) in [
        ("instructions", get("instructions").unwrap_or_default()),
        (
            "max_output_tokens",
            get("max_output_tokens").unwrap_or_default(),
        ),
        ("metadata", get("metadata").unwrap_or_else(|| json!({}))),
        (
            "parallel_tool_calls",
            get("parallel_tool_calls").unwrap_or(true.into()),
        ),
        (
            "previous_response_id",
            get("previous_response_id").unwrap_or_default(),
        ),
        ("reasoning", get("reasoning").unwrap_or_default()),
        ("store", is_stored),
        ("temperature", get("temperature").unwrap_or_default()),
        (
            "text",
            get("text").unwrap_or_else(|| json!({"format": {"type": "text"}})),
        ),
        ("tool_choice", get("tool_choice").unwrap_or("auto".into())),
        ("tools", get("tools").unwrap_or_else(|| json!([]))),
        ("top_p", get("top_p").unwrap_or_default()),
        ("truncation", "disabled".into()),
    ] {
        echo.insert(name.into(), value);
    }
    echo
}
