//! llama-server's endpoints without computation: `/tokenize`, `/detokenize`, `/apply-template`.

use paceline_text::tokenizer::Specials;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bounds::MAX_TEXT;
use super::chat::ConversationFields;
use super::{ModelName, RequestParser};
use crate::conversation::AnswerFormat;
use crate::rejection::Rejection;
use crate::schema::read;

/// Body of `POST /tokenize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    model: Option<ModelName>,
    /// Text to tokenise.
    #[schemars(length(max = MAX_TEXT))]
    content: String,
    /// Puts the beginning-of-text token first if the model wants it. Default false.
    add_special: Option<bool>,
    /// Makes names of special tokens these tokens. Default true.
    parse_special: Option<bool>,
    /// Tells each token's text. Default false.
    with_pieces: Option<bool>,
}

/// Body of `POST /detokenize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct DetokenizeRequest {
    model: Option<ModelName>,
    /// Token ids.
    tokens: Vec<i64>,
}

/// Body of `POST /apply-template`.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub(crate) struct ApplyTemplateRequest {
    model: Option<ModelName>,
    #[serde(flatten)]
    conversation: ConversationFields,
    #[serde(flatten)]
    _no_effect: NoEffect,
}

// The generation prompt is always added.
no_effect!(NoEffect {
    add_generation_prompt
});

impl RequestParser<'_> {
    /// `POST /tokenize`: the ids of a text.
    pub(crate) fn tokenize(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let body: TokenizeRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let specials = match body.parse_special {
            Some(false) => Specials::AsText,
            _ => Specials::Parse,
        };
        let tokenizer = &self.model.tokenizer;
        self.check_bytes(body.content.len(), "content")?;
        let adds = body.add_special == Some(true);
        let ids = self.encode(&body.content, (specials, adds), "content")?;
        if body.with_pieces != Some(true) {
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
    pub(crate) fn detokenize(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let body: DetokenizeRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let ids = self.token_ids(&body.tokens, "tokens")?;
        Ok(json!({"content": self.model.tokenizer.decode_all(&ids)}))
    }

    /// `POST /apply-template`: the prompt of a conversation, as text.
    pub(crate) fn apply_template(&self, body: Map<String, Value>) -> Result<Value, Rejection> {
        let body: ApplyTemplateRequest = read(body, self.notes)?;
        self.check_model(body.model)?;
        let conversation = self.conversation(body.conversation, (AnswerFormat::Text, ""))?;
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
