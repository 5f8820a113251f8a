//! Parses `POST /v1/chat/completions`.

use serde_json::{Map, Value};

use super::fields::CHAT;
use super::{ApiDialect, ModelRequest, RequestParser, check_metadata, stop, stream};
use crate::conversation::{Conversation, OWN_VARIABLES, Thinking};
use crate::field::FieldValues;
use crate::rejection::Rejection;
use crate::render::openai::Kind;

impl RequestParser<'_> {
    /// Parses a chat request.
    ///
    /// Cost: rendering and encoding the conversation.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn chat(&self, body: Map<String, Value>) -> Result<ModelRequest, Rejection> {
        let mut fields = self.fields(body, CHAT, "")?;
        self.check_model(&fields)?;
        check_metadata(fields.get("metadata"))?;
        let n = self.choices(&fields)?;
        let stream = stream(&mut fields, self.notes)?;
        let (max_tokens, logprobs) = (max_tokens(&fields)?, logprobs(&fields)?);
        let stop = stop(fields.take("stop"), "stop")?;
        let like = self.request(&mut fields, max_tokens, logprobs, stop)?;
        let conversation = self.conversation(&mut fields)?;
        let teller = ApiDialect::OpenAi(Kind::Chat);
        self.converse(&conversation, n, &like, "messages", (teller, stream))
    }

    /// Parses `messages`, `tools` and related fields as a conversation.
    pub(super) fn conversation(&self, fields: &mut FieldValues) -> Result<Conversation, Rejection> {
        let messages = fields.take("messages").unwrap_or_default();
        let format = self.format(fields.take("response_format"), "response_format")?;
        let (format, format_at) = self.guided(fields, (format, "response_format"))?;
        let mut conversation = Conversation {
            turns: self.messages(messages)?,
            format,
            format_at,
            thinking: thinking(fields.text("reasoning_effort")),
            variables: variables(fields.take("chat_template_kwargs"))?,
            ..Conversation::default()
        };
        self.read_tools(fields, &mut conversation)?;
        Ok(conversation)
    }
}

/// Thinking options of an effort; `none` disables thinking.
pub(super) fn thinking(effort: Option<&str>) -> Thinking {
    Thinking {
        is_on: effort.map(|effort| effort != "none"),
        effort: effort.filter(|effort| *effort != "none").map(str::to_owned),
    }
}

/// Parses `chat_template_kwargs`, which may not replace rendered variables.
fn variables(value: Option<Value>) -> Result<Map<String, Value>, Rejection> {
    let Some(Value::Object(map)) = value else {
        return Ok(Map::new());
    };
    let own = map
        .keys()
        .find(|name| OWN_VARIABLES.contains(&name.as_str()));
    match own {
        Some(name) => Err(super::unsupported(
            format!("chat_template_kwargs.{name}"),
            "given",
            "the request itself says it",
        )),
        None => Ok(map),
    }
}

fn max_tokens(fields: &FieldValues) -> Result<usize, Rejection> {
    let (new, old) = (
        fields.count("max_completion_tokens"),
        fields.count("max_tokens"),
    );
    if fields.has("max_completion_tokens") && fields.has("max_tokens") {
        let (param, condition) = ("max_tokens", "together with max_completion_tokens");
        return Err(Rejection::Conflict { param, condition });
    }
    Ok(new.or(old).unwrap_or(usize::MAX))
}

fn logprobs(fields: &FieldValues) -> Result<Option<usize>, Rejection> {
    let top = fields.count("top_logprobs");
    if fields.is_true("logprobs") {
        return Ok(Some(top.unwrap_or(0)));
    }
    if top.is_some() {
        let (param, condition) = ("top_logprobs", "without logprobs: true");
        return Err(Rejection::Conflict { param, condition });
    }
    Ok(None)
}
