//! llama-server's endpoints without computation: `/tokenize`, `/detokenize`, `/apply-template`.

use paceline_text::tokenizer::Specials;
use serde_json::{Map, Value, json};

use super::RequestParser;
use super::fields::llama::{APPLY, DETOKENIZE, TOKENIZE};
use crate::field::{integer, wrong_type};
use crate::json::show;
use crate::rejection::Rejection;

impl RequestParser<'_> {
    /// `POST /tokenize`: the ids of a text.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn tokenize(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let fields = self.fields(body, TOKENIZE, "")?;
        self.check_model(&fields)?;
        let specials = match fields.get("parse_special") {
            Some(Value::Bool(false)) => Specials::AsText,
            _ => Specials::Parse,
        };
        let text = fields.text("content").unwrap_or_default();
        let tokenizer = &self.model.tokenizer;
        self.check_bytes(text.len(), "content")?;
        let adds = fields.is_true("add_special");
        let ids = self.encode(text, (specials, adds), "content")?;
        if !fields.is_true("with_pieces") {
            return Ok(json!({"tokens": ids}));
        }
        let piece = |id: &u32| {
            let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
            // A token that is not valid text is sent as its bytes.
            let piece = match std::str::from_utf8(bytes) {
                Ok("") => json!(tokenizer.token_text(*id).unwrap_or_default()),
                Ok(text) => json!(text),
                Err(_) => json!(bytes),
            };
            json!({"id": id, "piece": piece})
        };
        let tokens: Vec<Value> = ids.iter().map(piece).collect();
        Ok(json!({"tokens": tokens}))
    }

    /// `POST /detokenize`: the text of ids.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn detokenize(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let mut fields = self.fields(body, DETOKENIZE, "")?;
        self.check_model(&fields)?;
        let tokens = fields.take("tokens").unwrap_or_default();
        let Value::Array(tokens) = tokens else {
            return Err(wrong_type(
                "tokens".into(),
                &tokens,
                "an array of token ids",
            ));
        };
        let vocab = self.model.vocab();
        let id = |(i, value): (usize, &Value)| {
            let at = || format!("tokens[{i}]");
            let id = integer(value).ok_or_else(|| wrong_type(at(), value, "a token id"))?;
            let id = u32::try_from(id).ok().filter(|id| *id < vocab);
            id.ok_or_else(|| Rejection::Range {
                param: at(),
                got: show(value),
                expected: format!("0 to {}", vocab.saturating_sub(1)),
            })
        };
        let ids: Result<Vec<u32>, Rejection> = tokens.iter().enumerate().map(id).collect();
        Ok(json!({"content": self.model.tokenizer.decode_all(&ids?)}))
    }

    /// `POST /apply-template`: the prompt of a conversation, as text.
    ///
    /// # Errors
    /// A [`Rejection`] of status 400 or 404.
    pub(crate) fn apply_template(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let mut fields = self.fields(body, APPLY, "")?;
        self.check_model(&fields)?;
        let conversation = self.conversation(&mut fields)?;
        let Some(template) = &self.model.template else {
            let model = self.model.id.clone();
            return Err(Rejection::NoTemplate { model });
        };
        self.check_bytes(conversation.text_bytes(), "messages")?;
        let terms = (self.unix_s, self.bounds());
        let prompt = conversation.render(template, &self.model.tokenizer, terms)?;
        Ok(json!({"prompt": prompt}))
    }
}
