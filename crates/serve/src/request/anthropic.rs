//! `POST /v1/messages` and `/v1/messages/count_tokens`: blocks to turns.
//!
//! System messages stay in place, so that the prompt keeps its prefix from turn to turn. For the
//! same reason the header that Claude Code puts before its system prompt is removed: it changes
//! between requests.

use serde_json::{Map, Value, json};

use super::fields::anthropic as table;
use super::{
    ApiDialect, ModelRequest, RequestParser, StreamOptions, array, object, stop, tools, unsupported,
};
use crate::conversation::{
    AnswerFormat, Conversation, ConversationTurn, Thinking, Tool, ToolChoice, TurnRole,
    TurnToolCall,
};
use crate::field::{FieldValues, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;

/// A line of Claude Code about itself, removed from the prompt.
const VOLATILE: &str = "x-anthropic-billing-header:";

/// Maximum blocks of a message, and tools of a request.
const MAX_BLOCKS: usize = 1024;
const MAX_TOOLS: usize = 512;

/// Contents of a message's blocks.
#[derive(Default)]
struct Blocks {
    texts: Vec<String>,
    thoughts: Vec<String>,
    calls: Vec<TurnToolCall>,
    /// Tool results with the ids of their calls.
    results: Vec<(String, String)>,
    /// Names of deferred tools in the results.
    named: Vec<String>,
}

impl RequestParser<'_> {
    /// Parses a message request.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn anthropic(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut fields = self.fields(body, table::MESSAGE_REQUEST, "")?;
        self.check_model(&fields)?;
        let max_tokens = fields.count("max_tokens").unwrap_or(usize::MAX);
        let stop = stop(fields.take("stop_sequences"), "stop_sequences")?;
        let like = self.request(&mut fields, max_tokens, None, stop)?;
        let has_usage = true;
        let stream = fields
            .is_true("stream")
            .then_some(StreamOptions { has_usage });
        let display = fields.get("thinking").map(|thinking| &thinking["display"]);
        let shows_thinking = display.is_none_or(|display| *display != "omitted");
        let conversation = self.anthropic_conversation(&mut fields)?;
        let teller = ApiDialect::Anthropic { shows_thinking };
        self.converse(&conversation, 1, &like, "messages", (teller, stream))
    }

    /// Parses a request to count tokens.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404; prompts over the context are counted too.
    pub(crate) fn count_tokens(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let mut fields = self.fields(body, table::COUNT_REQUEST, "")?;
        self.check_model(&fields)?;
        let conversation = self.anthropic_conversation(&mut fields)?;
        let tokens = match self.prompt(&conversation, "messages") {
            Ok(prompt) => prompt.len(),
            Err(Rejection::ContextLength { tokens, .. }) => tokens,
            Err(other) => return Err(other),
        };
        Ok(json!({"input_tokens": tokens}))
    }

    fn anthropic_conversation(&self, fields: &mut FieldValues) -> Result<Conversation, Rejection> {
        let mut conversation = Conversation {
            is_parallel: true,
            ..Conversation::default()
        };
        if let Some(system) = fields.take("system") {
            let text = self.system(system)?;
            let turn = (!text.is_empty()).then(|| ConversationTurn::new(TurnRole::System, text));
            conversation.turns.extend(turn);
        }
        let mut named = Vec::new();
        let messages = fields.take("messages").unwrap_or_default();
        let messages = array(messages, "messages", self.limits.messages, "messages")?;
        for (i, message) in messages.into_iter().enumerate() {
            self.anthropic_message(i, message, &mut conversation.turns, &mut named)?;
        }
        if let Some(list) = fields.take("tools") {
            self.anthropic_tools(list, &named, &mut conversation)?;
        }
        if let Some(choice) = fields.take("tool_choice") {
            self.anthropic_choice(choice, &mut conversation)?;
        }
        conversation.thinking = self.anthropic_thinking(fields.take("thinking"))?;
        if let Some(output) = fields.take("output_config") {
            self.output(output, &mut conversation)?;
        }
        Ok(conversation)
    }

    /// Parses `system`: a text, or blocks of text.
    fn system(&self, value: Value) -> Result<String, Rejection> {
        let texts = match value {
            Value::String(text) => vec![text],
            other => self.texts(other, "system")?,
        };
        let is_kept = |text: &String| !text.trim_start().starts_with(VOLATILE);
        Ok(texts
            .into_iter()
            .filter(is_kept)
            .collect::<Vec<_>>()
            .join("\n"))
    }

    /// Parses blocks of text.
    fn texts(&self, value: Value, param: &str) -> Result<Vec<String>, Rejection> {
        let mut blocks = Blocks::default();
        self.blocks(value, param, &["text", "tool_reference"], &mut blocks)?;
        Ok(blocks.texts)
    }

    fn anthropic_message(
        &self,
        i: usize,
        value: Value,
        turns: &mut Vec<ConversationTurn>,
        named: &mut Vec<String>,
    ) -> Result<(), Rejection> {
        let place = format!("messages[{i}]");
        let map = object(value, || place.clone())?;
        let mut fields = self.kept_fields(map, table::MESSAGE, &format!("{place}."))?;
        let content = fields.take("content").unwrap_or_default();
        let param = format!("{place}.content");
        let role = match fields.text("role").unwrap_or_default() {
            "user" => TurnRole::User,
            "assistant" => TurnRole::Assistant,
            "system" => TurnRole::System,
            other => {
                return Err(Rejection::Range {
                    param: format!("{place}.role"),
                    got: format!("{other:?}"),
                    expected: "user, assistant or system".into(),
                });
            }
        };
        let kinds: &[&str] = match role {
            TurnRole::Assistant => &["text", "thinking", "redacted_thinking", "tool_use"],
            TurnRole::System => &["text", "tool_reference"],
            _ => &["text", "tool_result", "tool_reference"],
        };
        let mut blocks = Blocks::default();
        match content {
            Value::String(text) => blocks.texts.push(text),
            other => self.blocks(other, &param, kinds, &mut blocks)?,
        }
        named.append(&mut blocks.named);
        blocks.into_turns(role, turns);
        Ok(())
    }

    fn blocks(
        &self,
        value: Value,
        param: &str,
        kinds: &[&str],
        blocks: &mut Blocks,
    ) -> Result<(), Rejection> {
        if !value.is_array() {
            let expected = "a string or an array of blocks";
            return Err(wrong_type(param.to_owned(), &value, expected));
        }
        let items = array(value, param, MAX_BLOCKS, "blocks")?;
        for (i, item) in items.into_iter().enumerate() {
            let place = format!("{param}[{i}]");
            let map = object(item, || place.clone())?;
            let kind = map.get("type").cloned().unwrap_or_default();
            let known = kinds.iter().find(|known| kind == **known);
            let Some(known) = known else {
                let (place, got) = (format!("{place}.type"), show(&kind));
                return Err(unsupported(
                    place,
                    got,
                    "messages are text, calls and results",
                ));
            };
            self.block(known, map, &place, blocks)?;
        }
        Ok(())
    }

    fn block(
        &self,
        kind: &str,
        map: Map<String, Value>,
        place: &str,
        blocks: &mut Blocks,
    ) -> Result<(), Rejection> {
        let dotted = format!("{place}.");
        let owned = |fields: &FieldValues, name| fields.text(name).unwrap_or_default().to_owned();
        match kind {
            "text" => {
                let fields = self.kept_fields(map, table::TEXT_BLOCK, &dotted)?;
                blocks.texts.push(owned(&fields, "text"));
            }
            "thinking" => {
                let fields = self.kept_fields(map, table::THINKING_BLOCK, &dotted)?;
                blocks.thoughts.push(owned(&fields, "thinking"));
            }
            "redacted_thinking" => drop(self.kept_fields(map, table::REDACTED_BLOCK, &dotted)?),
            "tool_use" => {
                let mut fields = self.kept_fields(map, table::USE_BLOCK, &dotted)?;
                let arguments = fields.take("input").unwrap_or_default();
                let (id, name) = (owned(&fields, "id"), owned(&fields, "name"));
                blocks.calls.push(TurnToolCall {
                    id,
                    name,
                    arguments,
                });
            }
            "tool_result" => {
                let fields = self.kept_fields(map, table::RESULT_BLOCK, &dotted)?;
                self.result(fields, place, blocks)?;
            }
            _ => {
                let name = map.get("tool_name").and_then(Value::as_str);
                blocks.named.extend(name.map(str::to_owned));
            }
        }
        Ok(())
    }

    fn result(
        &self,
        mut fields: FieldValues,
        place: &str,
        blocks: &mut Blocks,
    ) -> Result<(), Rejection> {
        let mut inner = Blocks::default();
        match fields.take("content") {
            None => {}
            Some(Value::String(text)) => inner.texts.push(text),
            Some(other) => {
                let kinds = ["text", "tool_reference"];
                self.blocks(other, &format!("{place}.content"), &kinds, &mut inner)?;
            }
        }
        blocks.named.append(&mut inner.named);
        let id = fields.text("tool_use_id").unwrap_or_default().to_owned();
        blocks.results.push((id, inner.texts.join("\n")));
        Ok(())
    }

    fn anthropic_tools(
        &self,
        list: Value,
        named: &[String],
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        let list = array(list, "tools", MAX_TOOLS, "tools")?;
        for (i, tool) in list.into_iter().enumerate() {
            let place = format!("tools[{i}]");
            let map = object(tool, || place.clone())?;
            let kind = map.get("type").and_then(Value::as_str).unwrap_or("custom");
            if kind != "custom" {
                self.notes
                    .warn(format!("{place} of type {kind} is hosted and was left out"));
                continue;
            }
            let mut fields = self.fields(map, table::TOOL, &format!("{place}."))?;
            let name = fields.text("name").unwrap_or_default().to_owned();
            if fields.is_true("defer_loading") && !named.contains(&name) {
                continue;
            }
            conversation.tools.push(Tool {
                name,
                description: fields.text("description").map(str::to_owned),
                is_strict: fields.is_true("strict"),
                parameters: fields
                    .take("input_schema")
                    .unwrap_or_else(tools::no_parameters),
            });
        }
        Ok(())
    }

    fn anthropic_choice(
        &self,
        value: Value,
        conversation: &mut Conversation,
    ) -> Result<(), Rejection> {
        let map = object(value, || "tool_choice".into())?;
        let fields = self.fields(map, table::CHOICE, "tool_choice.")?;
        let name = fields.text("name").unwrap_or_default().to_owned();
        conversation.is_parallel = !fields.is_true("disable_parallel_tool_use");
        conversation.choice = match fields.text("type").unwrap_or_default() {
            "auto" => ToolChoice::Auto,
            "any" => ToolChoice::Required,
            "none" => ToolChoice::None,
            "tool" => ToolChoice::Named(name),
            other => {
                return Err(Rejection::Range {
                    param: "tool_choice.type".into(),
                    got: format!("{other:?}"),
                    expected: "auto, any, tool or none".into(),
                });
            }
        };
        tools::check_choice(conversation)
    }

    fn anthropic_thinking(&self, value: Option<Value>) -> Result<Thinking, Rejection> {
        let Some(value) = value else {
            return Ok(Thinking::default());
        };
        let map = object(value, || "thinking".into())?;
        let fields = self.fields(map, table::THINKING_FIELD, "thinking.")?;
        let is_on = match fields.text("type").unwrap_or_default() {
            "enabled" => Some(true),
            "disabled" => Some(false),
            "adaptive" => None,
            other => {
                return Err(Rejection::Range {
                    param: "thinking.type".into(),
                    got: format!("{other:?}"),
                    expected: "enabled, adaptive or disabled".into(),
                });
            }
        };
        let effort = None;
        Ok(Thinking { is_on, effort })
    }

    fn output(&self, value: Value, conversation: &mut Conversation) -> Result<(), Rejection> {
        let map = object(value, || "output_config".into())?;
        let mut fields = self.fields(map, table::OUTPUT, "output_config.")?;
        conversation.thinking.effort = fields.text("effort").map(str::to_owned);
        let Some(format) = fields.take("format") else {
            return Ok(());
        };
        conversation.format_at = "output_config.format";
        conversation.format = match (format["type"].as_str(), format.get("schema")) {
            (Some("json_schema"), Some(schema)) => AnswerFormat::JsonSchema(schema.clone()),
            _ => {
                let why = "its type is json_schema and it has a schema";
                return Err(unsupported("output_config.format", show(&format), why));
            }
        };
        Ok(())
    }
}

impl Blocks {
    /// One turn per result, then the text.
    fn into_turns(self, role: TurnRole, turns: &mut Vec<ConversationTurn>) {
        let has_results = !self.results.is_empty();
        let results = self.results.into_iter();
        turns.extend(results.map(|(id, text)| ConversationTurn::result(id, text)));
        if has_results && self.texts.is_empty() {
            return;
        }
        let mut turn = ConversationTurn::new(role, self.texts.join("\n"));
        let thoughts = self.thoughts.join("\n");
        turn.reasoning = (!thoughts.is_empty()).then_some(thoughts);
        turn.calls = self.calls;
        turns.push(turn);
    }
}
