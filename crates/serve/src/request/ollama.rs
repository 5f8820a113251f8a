//! `POST /api/chat` and `/api/generate`.

use paceline_text::chat::call_arguments;
use serde_json::{Map, Value, json};

use super::fields::ollama as table;
use super::infill::InfillGap;
use super::{ApiDialect, ParsedRequest, RequestParser, StreamOptions, array, object, stop};
use crate::conversation::{
    AnswerFormat, Conversation, ConversationTurn, Thinking, TurnRole, TurnToolCall,
};
use crate::field::{FieldValues, wrong_type};
use crate::rejection::Rejection;
use crate::render::ollama::{Kind, rfc3339};
use paceline_engine::GenerationRequest;

/// Maximum calls of a message.
const MAX_CALLS: usize = 128;

impl RequestParser<'_> {
    /// Parses `/api/chat`; without messages it only checks that the model is loaded.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn ollama_chat(&self, body: Map<String, Value>) -> Result<ParsedRequest, Rejection> {
        let mut fields = self.fields(body, table::CHAT, "")?;
        let model = self.check_model(&fields)?;
        let messages = fields.take("messages").unwrap_or_else(|| json!([]));
        let messages = array(messages, "messages", self.limits.messages, "messages")?;
        if messages.is_empty() {
            let message = json!({"role": "assistant", "content": ""});
            return Ok(self.loaded(&model, "message", message));
        }
        let turn = |(i, message)| self.ollama_message(i, message);
        let turns = messages.into_iter().enumerate().map(turn);
        let mut conversation =
            self.ollama_conversation(&mut fields, turns.collect::<Result<_, _>>()?)?;
        if let Some(list) = fields.take("tools") {
            conversation.tools = self.ollama_tools(list)?;
        }
        let like = self.options(&mut fields)?;
        let kind = Kind::Chat;
        let how = (ApiDialect::Ollama { kind, model }, stream(&fields));
        let ask = self.converse(&conversation, 1, &like, "messages", how)?;
        Ok(ParsedRequest::Generation(Box::new(ask)))
    }

    /// Parses `/api/generate`; without a prompt it only checks that the model is loaded.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn ollama_generate(
        &self,
        body: Map<String, Value>,
    ) -> Result<ParsedRequest, Rejection> {
        let mut fields = self.fields(body, table::GENERATE, "")?;
        let model = self.check_model(&fields)?;
        let prompt = fields.text("prompt").unwrap_or_default().to_owned();
        if prompt.is_empty() {
            return Ok(self.loaded(&model, "response", "".into()));
        }
        let like = self.options(&mut fields)?;
        let kind = Kind::Generate;
        let how = (ApiDialect::Ollama { kind, model }, stream(&fields));
        let suffix = fields.text("suffix").unwrap_or_default().to_owned();
        let ask = if !suffix.is_empty() {
            let hole = InfillGap {
                before: &prompt,
                after: &suffix,
                ..InfillGap::default()
            };
            let like = self.held(&mut fields, like)?;
            self.plain(vec![self.hole(&hole, "suffix")?], 1, &like, how)
        } else if fields.is_true("raw") || self.model.template.is_none() {
            let like = self.held(&mut fields, like)?;
            self.plain(vec![self.raw(&prompt, || "prompt".into())?], 1, &like, how)
        } else {
            let system = fields.text("system").filter(|text| !text.is_empty());
            let system = system.map(|text| ConversationTurn::new(TurnRole::System, text));
            let turns = system
                .into_iter()
                .chain([ConversationTurn::new(TurnRole::User, prompt)]);
            let turns = turns.collect();
            let conversation = self.ollama_conversation(&mut fields, turns)?;
            self.converse(&conversation, 1, &like, "prompt", how)?
        };
        Ok(ParsedRequest::Generation(Box::new(ask)))
    }

    /// Constrains `like` to `format` from the first token on.
    fn held(
        &self,
        fields: &mut FieldValues,
        like: GenerationRequest,
    ) -> Result<GenerationRequest, Rejection> {
        let format = format(fields.take("format"))?;
        let constraint = self.calling.whole(&format, "format")?;
        Ok(GenerationRequest { constraint, ..like })
    }

    /// The response to an empty request: the model is loaded.
    fn loaded(&self, model: &str, name: &str, value: Value) -> ParsedRequest {
        let mut line = json!({"model": model, "created_at": rfc3339(self.unix_s)});
        line[name] = value;
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        ParsedRequest::Immediate(line)
    }

    fn ollama_conversation(
        &self,
        fields: &mut FieldValues,
        turns: Vec<ConversationTurn>,
    ) -> Result<Conversation, Rejection> {
        Ok(Conversation {
            turns,
            is_parallel: true,
            format: format(fields.take("format"))?,
            format_at: "format",
            thinking: think(fields.take("think"))?,
            ..Conversation::default()
        })
    }

    fn ollama_message(&self, i: usize, value: Value) -> Result<ConversationTurn, Rejection> {
        let place = format!("messages[{i}]");
        let map = object(value, || place.clone())?;
        let mut fields = self.kept_fields(map, table::MESSAGE, &format!("{place}."))?;
        let role = match fields.text("role").unwrap_or_default() {
            "system" | "developer" => TurnRole::System,
            "user" => TurnRole::User,
            "assistant" => TurnRole::Assistant,
            "tool" => TurnRole::Tool,
            other => {
                return Err(Rejection::Range {
                    param: format!("{place}.role"),
                    got: format!("{other:?}"),
                    expected: "system, user, assistant or tool".into(),
                });
            }
        };
        let mut turn = ConversationTurn::new(role, fields.text("content").unwrap_or_default());
        turn.reasoning = fields.text("thinking").map(str::to_owned);
        turn.name = fields.text("tool_name").map(str::to_owned);
        turn.answers = fields.text("tool_call_id").map(str::to_owned);
        if let Some(calls) = fields.take("tool_calls") {
            let param = format!("{place}.tool_calls");
            let calls = array(calls, &param, MAX_CALLS, "calls")?.into_iter();
            let call = |(i, call)| self.ollama_call(call, &format!("{param}[{i}]"));
            turn.calls = calls.enumerate().map(call).collect::<Result<_, _>>()?;
        }
        Ok(turn)
    }

    fn ollama_call(&self, value: Value, place: &str) -> Result<TurnToolCall, Rejection> {
        let map = object(value, || place.to_owned())?;
        let mut fields = self.kept_fields(map, table::CALL, &format!("{place}."))?;
        let function = object(fields.take("function").unwrap_or_default(), || place.into())?;
        let mut function = self.kept_fields(
            function,
            table::CALL_FUNCTION,
            &format!("{place}.function."),
        )?;
        let given = function.take("arguments").unwrap_or_default();
        Ok(TurnToolCall {
            id: fields.text("id").unwrap_or_default().to_owned(),
            name: function.text("name").unwrap_or_default().to_owned(),
            arguments: given.as_str().map_or_else(|| given.clone(), call_arguments),
        })
    }

    fn ollama_tools(&self, list: Value) -> Result<Vec<crate::conversation::Tool>, Rejection> {
        let list = array(list, "tools", super::bounds::MAX_TOOLS, "tools")?.into_iter();
        let tool = |(i, tool)| {
            let place = format!("tools[{i}]");
            let mut map = object(tool, || place.clone())?;
            let function = map.swap_remove("function").unwrap_or_default();
            let place = format!("{place}.function");
            self.function(object(function, || place.clone())?, &place)
        };
        list.enumerate().map(tool).collect()
    }

    /// Parses sampling options and the token limit.
    fn options(&self, fields: &mut FieldValues) -> Result<GenerationRequest, Rejection> {
        let map = match fields.take("options") {
            Some(options) => object(options, || "options".into())?,
            None => Map::new(),
        };
        let mut options = self.fields(map, table::OPTION, "options.")?;
        let max_tokens = options.count("num_predict").unwrap_or(usize::MAX);
        let stop = stop(options.take("stop"), "options.stop")?;
        self.request(&mut options, max_tokens, None, stop)
    }
}

/// Ollama streams by default.
fn stream(fields: &FieldValues) -> Option<StreamOptions> {
    let is_whole = fields.get("stream") == Some(&Value::Bool(false));
    let has_usage = true;
    (!is_whole).then_some(StreamOptions { has_usage })
}

fn format(value: Option<Value>) -> Result<AnswerFormat, Rejection> {
    match value {
        None => Ok(AnswerFormat::Text),
        Some(Value::String(text)) if text.is_empty() => Ok(AnswerFormat::Text),
        Some(Value::String(text)) if text == "json" => Ok(AnswerFormat::JsonObject),
        Some(schema @ Value::Object(_)) => Ok(AnswerFormat::JsonSchema(schema)),
        Some(other) => {
            let expected = "\"json\" or a JSON Schema";
            Err(wrong_type("format".into(), &other, expected))
        }
    }
}

fn think(value: Option<Value>) -> Result<Thinking, Rejection> {
    match value {
        None => Ok(Thinking::default()),
        Some(Value::Bool(is_on)) => Ok(Thinking {
            is_on: Some(is_on),
            effort: None,
        }),
        Some(Value::String(effort)) => Ok(super::chat::thinking(Some(&effort))),
        Some(other) => {
            let expected = "true, false or an effort";
            Err(wrong_type("think".into(), &other, expected))
        }
    }
}
