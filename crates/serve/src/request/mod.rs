//! Parses request bodies into engine requests: every field is checked, and then honoured or
//! rejected by name.
//!
//! Reading order: [`fields`] lists the fields; one file per dialect builds a [`Conversation`] from
//! a body; this file has the shared parts.

pub(crate) mod anthropic;
mod bounds;
pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod embeddings;
pub(crate) mod fields;
pub(crate) mod grammars;
pub(crate) mod infill;
pub(crate) mod llama;
pub(crate) mod messages;
pub(crate) mod ollama;
pub(crate) mod responses;
pub(crate) mod sampling;
pub(crate) mod schema;
pub(crate) mod tools;

use paceline_engine::GenerationRequest;
use paceline_text::chat::{Error as ChatError, PromptLimits, TemplateError};
use paceline_text::tokenizer::{self, Specials};
use serde_json::{Map, Value};

use bounds::{MAX_NOTE, MAX_NOTE_NAME, MAX_NOTES, MAX_STOP_CHARS, MAX_STOPS};

use crate::access::ClientIdentity;
use crate::choice::ChoiceState;
use crate::conversation::Conversation;
use crate::field::{FieldValues, FieldWarnings, wrong_type};
use crate::json::show;
use crate::limits::ApiLimits;
use crate::model::ServedModel;
use crate::rejection::Rejection;
use crate::render::openai::Kind;
use crate::render::{ollama as to_ollama, responses as to_responses};
use crate::store::ResponseStore;
use crate::tool_support::ToolSupport;

/// API dialect of the response.
#[derive(Clone, Debug)]
pub(crate) enum ApiDialect {
    /// `/v1/chat/completions` and `/v1/completions`.
    OpenAi(Kind),
    /// `/v1/messages`.
    Anthropic {
        /// Whether the response includes the thinking.
        shows_thinking: bool,
    },
    /// `/api/chat` and `/api/generate`.
    Ollama {
        kind: to_ollama::Kind,
        /// The model as the client wrote it.
        model: String,
    },
    /// `/v1/responses`.
    Responses(Box<to_responses::ResponsesEcho>),
    /// `/infill`.
    Infill,
}

/// Options of a streamed response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    /// Whether the last chunk has the usage.
    pub(crate) has_usage: bool,
}

/// A parsed generation request.
#[derive(Debug)]
pub(crate) struct ModelRequest {
    pub(crate) dialect: ApiDialect,
    /// Engine requests by choice index: all of the first prompt, then of the second.
    pub(crate) requests: Vec<GenerationRequest>,
    /// The choices' output parsers.
    pub(crate) choices: Vec<ChoiceState>,
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// Prompt tokens, each prompt counted once.
    pub(crate) prompt_tokens: usize,
    pub(crate) stream: Option<StreamOptions>,
}

/// A parsed request of any kind.
#[derive(Debug)]
pub(crate) enum ParsedRequest {
    /// Generates text.
    Generation(Box<ModelRequest>),
    /// Needs no computation: the response body.
    Immediate(Value),
    /// Computes embeddings.
    Embed(embeddings::EmbeddingRequest),
}

/// Parses requests for one model within the limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestParser<'a> {
    pub(crate) model: &'a ServedModel,
    pub(crate) calling: &'a ToolSupport,
    pub(crate) limits: &'a ApiLimits,
    /// Time for templates that print the date.
    pub(crate) unix_s: u64,
    /// Seed for requests without one.
    pub(crate) fresh_seed: u64,
    /// Bytes of the model's longest token.
    pub(crate) longest_token: usize,
    pub(crate) notes: &'a FieldWarnings,
    pub(crate) store: &'a ResponseStore,
    pub(crate) client: &'a ClientIdentity,
}

impl RequestParser<'_> {
    fn fields(
        &self,
        object: Map<String, Value>,
        table: &[crate::field::Field],
        place: &str,
    ) -> Result<FieldValues, Rejection> {
        FieldValues::new(object, table, place, self.notes)
    }

    /// Fields of an object that clients send back in each turn.
    fn kept_fields(
        &self,
        object: Map<String, Value>,
        table: &[crate::field::Field],
        place: &str,
    ) -> Result<FieldValues, Rejection> {
        FieldValues::open(object, table, place, self.notes)
    }

    /// The model's name as the client wrote it, or the served one's where it names none.
    ///
    /// # Errors
    /// [`Rejection::Model`].
    fn check_model(&self, fields: &FieldValues) -> Result<String, Rejection> {
        let model = fields.text("model").unwrap_or(&self.model.id);
        if self.model.is_called(model) {
            return Ok(model.to_owned());
        }
        let (model, served) = (model.to_owned(), self.model.id.clone());
        Err(Rejection::Model { model, served })
    }

    /// `n`.
    fn choices(&self, fields: &FieldValues) -> Result<usize, Rejection> {
        let Some(value) = fields.get("n") else {
            return Ok(1);
        };
        let most = self.limits.choices;
        let integer = crate::field::integer(value);
        let integer = integer.ok_or_else(|| wrong_type("n".into(), value, "an integer"))?;
        if (1..=most as i128).contains(&integer) {
            return Ok(integer as usize);
        }
        Err(Rejection::Range {
            param: "n".into(),
            got: show(value),
            expected: format!("1 to {most}"),
        })
    }

    /// One engine request per prompt and choice. Choice `i` of a prompt has the request's seed plus
    /// `i`, so that it can be reproduced alone.
    fn fan_out(
        &self,
        prompts: Vec<Vec<u32>>,
        n: usize,
        like: &GenerationRequest,
    ) -> Vec<GenerationRequest> {
        let choice = |prompt: &Vec<u32>, i: usize| {
            let mut request = GenerationRequest {
                prompt: prompt.clone(),
                ..like.clone()
            };
            request.sampling.seed = like.sampling.seed.wrapping_add(i as u64);
            request
        };
        let of_prompt = |prompt| (0..n).map(move |i| (prompt, i));
        let all = prompts.iter().flat_map(of_prompt);
        all.map(|(prompt, i)| choice(prompt, i)).collect()
    }

    /// A request to complete prompts; the output is plain text.
    fn plain(
        &self,
        prompts: Vec<Vec<u32>>,
        n: usize,
        like: &GenerationRequest,
        (teller, stream): (ApiDialect, Option<StreamOptions>),
    ) -> ModelRequest {
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let requests = self.fan_out(prompts, n, like);
        ModelRequest {
            dialect: teller,
            choices: requests
                .iter()
                .map(|_| ChoiceState::new(None, false))
                .collect(),
            requests,
            n,
            prompt_tokens,
            stream,
        }
    }

    /// A request to continue a conversation from `field`.
    fn converse(
        &self,
        conversation: &Conversation,
        n: usize,
        like: &GenerationRequest,
        field: &'static str,
        (teller, stream): (ApiDialect, Option<StreamOptions>),
    ) -> Result<ModelRequest, Rejection> {
        let prompt = self.prompt(conversation, field)?;
        let terms = self.calling.terms(conversation, &prompt, self.notes)?;
        let choice = |i: usize| {
            let id_seed = self.fresh_seed.wrapping_add(i as u64);
            let is_stream = stream.is_some();
            let reader = self.calling.reader(&terms, &prompt, is_stream, id_seed);
            ChoiceState::new(reader, !conversation.is_parallel)
        };
        let choices = (0..n).map(choice).collect();
        let like = GenerationRequest {
            shown: self.calling.shown(&terms).to_vec(),
            constraint: terms.constraint.clone(),
            ..like.clone()
        };
        Ok(ModelRequest {
            choices,
            ..self.plain(vec![prompt], n, &like, (teller, stream))
        })
    }

    /// Renders and tokenises a conversation.
    ///
    /// # Errors
    /// [`Rejection::NoTemplate`], [`Rejection::ContextLength`], and the template's errors.
    fn prompt(
        &self,
        conversation: &Conversation,
        field: &'static str,
    ) -> Result<Vec<u32>, Rejection> {
        let Some(template) = &self.model.template else {
            let model = self.model.id.clone();
            return Err(Rejection::NoTemplate { model });
        };
        self.check_bytes(conversation.text_bytes(), field)?;
        let terms = (self.unix_s, self.bounds());
        let prompt = conversation.encode(template, &self.model.tokenizer, terms);
        let prompt = prompt.map_err(|error| self.too_long(error.into(), field))?;
        self.check_prompt(&prompt, || field.into(), field)?;
        Ok(prompt)
    }

    /// Rejects text far over the context before tokenising it: `bytes` of text are at least `bytes
    /// / longest_token` tokens. Text near the limit is counted exactly.
    ///
    /// # Errors
    /// [`Rejection::FarTooLong`].
    fn check_bytes(&self, bytes: usize, param: &'static str) -> Result<(), Rejection> {
        let (tokens, context) = (bytes / self.longest_token.max(1), self.model.context);
        if tokens < 2 * context {
            return Ok(());
        }
        Err(Rejection::FarTooLong {
            tokens,
            context,
            param,
        })
    }

    /// Limits on tokenising prompts: up to what [`check_bytes`](Self::check_bytes) allows. So the
    /// error has the exact count of a prompt of up to twice the context.
    fn bounds(&self) -> PromptLimits {
        PromptLimits::of(self.model.context.saturating_mul(2), self.longest_token)
    }

    /// Tokenises a text within [`bounds`](Self::bounds).
    ///
    /// # Errors
    /// [`Rejection::FarTooLong`], [`Rejection::Tokenizer`].
    fn encode(
        &self,
        text: &str,
        (specials, add_bos): (Specials, bool),
        param: &'static str,
    ) -> Result<Vec<u32>, Rejection> {
        let tokens_max = self.bounds().tokens;
        let tokenizer = &self.model.tokenizer;
        let ids = tokenizer.encode_within(text, specials, add_bos, tokens_max);
        ids.map_err(|error| self.too_long(error.into(), param))
    }

    /// Tokenises a prompt without a template, within [`bounds`](Self::bounds). Names of special
    /// tokens are these tokens.
    ///
    /// # Errors
    /// [`Rejection::FarTooLong`], [`Rejection::Tokenizer`], and those of
    /// [`check_prompt`](Self::check_prompt); `param` names this prompt of several.
    fn raw(&self, prompt: &str, param: impl FnOnce() -> String) -> Result<Vec<u32>, Rejection> {
        const FIELD: &str = "prompt";
        self.check_bytes(prompt.len(), FIELD)?;
        let ids = self
            .model
            .tokenizer
            .encode_prompt(prompt, self.bounds().tokens);
        let ids = ids.map_err(|error| self.too_long(error.into(), FIELD))?;
        self.check_prompt(&ids, param, FIELD)?;
        Ok(ids)
    }

    /// Rewords `rejection` if it is about a prompt that is too long.
    fn too_long(&self, rejection: Rejection, param: &'static str) -> Rejection {
        let tokens = match rejection {
            Rejection::Tokenizer(tokenizer::Error::TooManyTokens { tokens_max }) => tokens_max,
            Rejection::Template(ChatError::Template(TemplateError::OutputTooLong { .. })) => {
                self.bounds().tokens
            }
            other => return other,
        };
        Rejection::FarTooLong {
            tokens: tokens.saturating_add(1),
            context: self.model.context,
            param,
        }
    }

    /// # Errors
    /// [`Rejection::EmptyPrompt`], [`Rejection::ContextLength`].
    fn check_prompt(
        &self,
        tokens: &[u32],
        param: impl FnOnce() -> String,
        field: &'static str,
    ) -> Result<(), Rejection> {
        let (tokens, context) = (tokens.len(), self.model.context);
        if tokens == 0 {
            return Err(Rejection::EmptyPrompt { param: param() });
        }
        if tokens >= context {
            let param = field;
            return Err(Rejection::ContextLength {
                tokens,
                context,
                param,
            });
        }
        Ok(())
    }
}

/// Parses stop texts, one or a list; `param` is the field.
fn stop(value: Option<Value>, param: &str) -> Result<Vec<String>, Rejection> {
    let texts = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![Value::String(text)],
        Some(Value::Array(texts)) if texts.len() <= MAX_STOPS => texts,
        Some(Value::Array(texts)) => {
            return Err(Rejection::Length {
                param: param.into(),
                got: texts.len(),
                unit: "texts",
                expected: format!("at most {MAX_STOPS}"),
            });
        }
        Some(other) => {
            let expected = "a string or an array of strings";
            return Err(wrong_type(param.into(), &other, expected));
        }
    };
    let text = |(i, value): (usize, Value)| match value {
        Value::String(text) => match text.chars().count() {
            1..=MAX_STOP_CHARS => Ok(text),
            got => Err(Rejection::Length {
                param: format!("{param}[{i}]"),
                got,
                unit: "characters",
                expected: format!("1 to {MAX_STOP_CHARS}"),
            }),
        },
        other => Err(wrong_type(format!("{param}[{i}]"), &other, "a string")),
    };
    texts.into_iter().enumerate().map(text).collect()
}

/// Parses OpenAI's `stream` and `stream_options`.
fn stream(
    fields: &mut FieldValues,
    notes: &FieldWarnings,
) -> Result<Option<StreamOptions>, Rejection> {
    let is_stream = fields.is_true("stream");
    let Some(value) = fields.take("stream_options") else {
        let has_usage = false;
        return Ok(is_stream.then_some(StreamOptions { has_usage }));
    };
    let Value::Object(map) = value else {
        return Err(wrong_type("stream_options".into(), &value, "an object"));
    };
    let options = FieldValues::new(map, fields::STREAM_OPTION, "stream_options.", notes)?;
    if !is_stream {
        let (param, condition) = ("stream_options", "without stream: true");
        return Err(Rejection::Conflict { param, condition });
    }
    let has_usage = options.is_true("include_usage");
    Ok(Some(StreamOptions { has_usage }))
}

/// Checks `metadata`, which is not used.
fn check_metadata(value: Option<&Value>) -> Result<(), Rejection> {
    let map = match value {
        None => return Ok(()),
        Some(Value::Object(map)) => map,
        Some(other) => {
            let expected = "an object of strings";
            return Err(wrong_type("metadata".into(), other, expected));
        }
    };
    if map.len() > MAX_NOTES {
        return Err(Rejection::Length {
            param: "metadata".into(),
            got: map.len(),
            unit: "entries",
            expected: format!("at most {MAX_NOTES}"),
        });
    }
    map.iter()
        .try_for_each(|(name, value)| check_note(name, value))
}

fn check_note(name: &str, value: &Value) -> Result<(), Rejection> {
    let param = || format!("metadata.{}", crate::field::clip(name));
    let Some(text) = value.as_str() else {
        return Err(wrong_type(param(), value, "a string"));
    };
    for (got, most, unit) in [
        (
            name.chars().count(),
            MAX_NOTE_NAME,
            "characters in its name",
        ),
        (text.chars().count(), MAX_NOTE, "characters"),
    ] {
        if got > most {
            return Err(Rejection::Length {
                param: param(),
                got,
                unit,
                expected: format!("at most {most}"),
            });
        }
    }
    Ok(())
}

/// An object at `param`.
fn object(value: Value, param: impl FnOnce() -> String) -> Result<Map<String, Value>, Rejection> {
    match value {
        Value::Object(map) => Ok(map),
        other => Err(wrong_type(param(), &other, "an object")),
    }
}

/// The array at `param`, of at most `most` items; `unit` names them in errors.
fn array(
    value: Value,
    param: &str,
    most: usize,
    unit: &'static str,
) -> Result<Vec<Value>, Rejection> {
    match value {
        Value::Array(items) if items.len() <= most => Ok(items),
        Value::Array(items) => Err(Rejection::Length {
            param: param.to_owned(),
            got: items.len(),
            unit,
            expected: format!("at most {most}"),
        }),
        other => Err(wrong_type(param.to_owned(), &other, "an array")),
    }
}

/// The rejection of an unsupported value; `got` describes it.
fn unsupported(param: impl Into<String>, got: impl Into<String>, why: &'static str) -> Rejection {
    let (param, got) = (param.into(), got.into());
    Rejection::Unsupported { param, got, why }
}
