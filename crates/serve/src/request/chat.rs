//! `POST /v1/chat/completions`: fields and messages to requests.

use paceline_formats::chat::ChatOptions;
use serde_json::{Map, Value};

use super::fields::CHAT;
use super::{Ask, Dialect, Reader, check_metadata, messages, stream};
use crate::field::Fields;
use crate::rejection::Rejection;

impl Reader<'_> {
    /// Reads a chat request.
    ///
    /// Cost: rendering and encoding the conversation.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn chat(&self, body: Map<String, Value>) -> Result<Ask, Rejection> {
        let mut fields = Fields::new(body, CHAT, "")?;
        self.check_model(&fields)?;
        check_metadata(fields.take("metadata"))?;
        let n = self.choices(&fields)?;
        let stream = stream(&mut fields)?;
        let (max_tokens, logprobs) = (max_tokens(&fields)?, logprobs(&fields)?);
        let like = self.request(&mut fields, max_tokens, logprobs)?;
        let messages = fields.take("messages").unwrap_or_default();
        let prompt = self.conversation(messages)?;
        self.check_prompt(&prompt, || "messages".into(), "messages")?;
        Ok(Ask {
            dialect: Dialect::Chat,
            n,
            prompt_tokens: prompt.len(),
            requests: self.fan_out(vec![prompt], n, &like),
            stream,
        })
    }

    fn conversation(&self, messages: Value) -> Result<Vec<u32>, Rejection> {
        let messages = messages::read(messages, self.limits.messages)?;
        let Some(template) = &self.model.template else {
            let model = self.model.id.clone();
            return Err(Rejection::NoTemplate { model });
        };
        let options = ChatOptions {
            add_generation_prompt: true,
            now_unix_s: i64::try_from(self.unix_s).ok(),
            ..ChatOptions::default()
        };
        Ok(template.encode_chat(&self.model.tokenizer, &messages, &options)?)
    }
}

fn max_tokens(fields: &Fields) -> Result<usize, Rejection> {
    let (new, old) = (
        fields.count("max_completion_tokens"),
        fields.count("max_tokens"),
    );
    if new.is_some() && old.is_some() {
        let (param, condition) = ("max_tokens", "together with max_completion_tokens");
        return Err(Rejection::Conflict { param, condition });
    }
    Ok(new.or(old).unwrap_or(usize::MAX))
}

fn logprobs(fields: &Fields) -> Result<Option<usize>, Rejection> {
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
