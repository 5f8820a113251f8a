//! From the body of a request to what the engine is asked: every field is checked, honoured,
//! or refused by name.
//!
//! Reading order: [`fields`] says what there is; a file per dialect makes a
//! [`Conversation`] of a body; this file has what all share.

pub(crate) mod anthropic;
mod bounds;
pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod embeddings;
pub(crate) mod fields;
pub(crate) mod guided;
pub(crate) mod infill;
pub(crate) mod llama;
pub(crate) mod messages;
pub(crate) mod ollama;
pub(crate) mod responses;
pub(crate) mod sampling;
pub(crate) mod schema;
pub(crate) mod tools;

use paceline_engine::Request;
use paceline_formats::chat::{Bounds, Error as ChatError, Failure};
use paceline_formats::tokenizer::{self, Specials};
use serde_json::{Map, Value};

use bounds::{MAX_NOTE, MAX_NOTE_NAME, MAX_NOTES, MAX_STOP_CHARS, MAX_STOPS};

use crate::access::Client;
use crate::calling::Calling;
use crate::choice::Choice;
use crate::conversation::Conversation;
use crate::field::{Fields, Notes, wrong_type};
use crate::json::show;
use crate::limits::Limits;
use crate::model::Model;
use crate::rejection::Rejection;
use crate::render::openai::Kind;
use crate::render::{ollama as to_ollama, responses as to_responses};
use crate::store::Store;

/// In whose words the answer is told.
#[derive(Clone, Debug)]
pub(crate) enum Teller {
    /// `/v1/chat/completions` and `/v1/completions`.
    OpenAi(Kind),
    /// `/v1/messages`.
    Anthropic {
        /// Whether thinking is shown.
        shows_thinking: bool,
    },
    /// `/api/chat` and `/api/generate`.
    Ollama {
        kind: to_ollama::Kind,
        /// As the client called it.
        model: String,
    },
    /// `/v1/responses`.
    Responses(Box<to_responses::Terms>),
    /// `/infill`.
    Infill,
}

/// How a stream is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    /// Whether a chunk with the usage ends it.
    pub(crate) has_usage: bool,
}

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) teller: Teller,
    /// Choices in the order of their indices: all of the first prompt, then of the second.
    pub(crate) requests: Vec<Request>,
    /// The readers of their answers.
    pub(crate) choices: Vec<Choice>,
    /// Choices of each prompt.
    pub(crate) n: usize,
    /// Tokens of all prompts, each counted once.
    pub(crate) prompt_tokens: usize,
    pub(crate) stream: Option<StreamOptions>,
}

/// The outcome of a request that was understood.
#[derive(Debug)]
pub(crate) enum Understood {
    /// The model is asked.
    Ask(Box<Ask>),
    /// The answer is known.
    Answer(Value),
    /// Vectors are to be made.
    Embed(embeddings::Embed),
}

/// The model and the limits that a request is read against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    pub(crate) model: &'a Model,
    pub(crate) calling: &'a Calling,
    pub(crate) limits: &'a Limits,
    /// For templates that write the date.
    pub(crate) unix_s: u64,
    /// For requests that give no seed.
    pub(crate) fresh_seed: u64,
    /// Bytes of the model's longest token.
    pub(crate) longest_token: usize,
    pub(crate) notes: &'a Notes,
    pub(crate) store: &'a Store,
    pub(crate) client: &'a Client,
}

impl Reader<'_> {
    fn fields(
        &self,
        object: Map<String, Value>,
        table: &[crate::field::Field],
        place: &str,
    ) -> Result<Fields, Rejection> {
        Fields::new(object, table, place, self.notes)
    }

    /// The model's name as the client says it.
    ///
    /// # Errors
    /// [`Rejection::Model`].
    fn check_model(&self, fields: &Fields) -> Result<String, Rejection> {
        let model = fields.text("model").unwrap_or(&self.model.id);
        if self.model.is_called(model) {
            return Ok(model.to_owned());
        }
        let (model, served) = (model.to_owned(), self.model.id.clone());
        Err(Rejection::Model { model, served })
    }

    /// `n`.
    fn choices(&self, fields: &Fields) -> Result<usize, Rejection> {
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

    /// A request per prompt and choice. Choice `i` of a prompt has the request's seed plus `i`, so
    /// that it can be had again alone.
    fn fan_out(&self, prompts: Vec<Vec<u32>>, n: usize, like: &Request) -> Vec<Request> {
        let choice = |prompt: &Vec<u32>, i: usize| {
            let mut request = Request {
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

    /// Asks the model to complete prompts whose answers are plain text.
    fn plain(
        &self,
        prompts: Vec<Vec<u32>>,
        n: usize,
        like: &Request,
        (teller, stream): (Teller, Option<StreamOptions>),
    ) -> Ask {
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let requests = self.fan_out(prompts, n, like);
        Ask {
            teller,
            choices: requests.iter().map(|_| Choice::new(None, false)).collect(),
            requests,
            n,
            prompt_tokens,
            stream,
        }
    }

    /// Asks the model to continue a conversation; `field` is what holds it.
    fn converse(
        &self,
        conversation: &Conversation,
        n: usize,
        like: &Request,
        field: &'static str,
        (teller, stream): (Teller, Option<StreamOptions>),
    ) -> Result<Ask, Rejection> {
        let prompt = self.prompt(conversation, field)?;
        let terms = self.calling.terms(conversation, &prompt, self.notes)?;
        let choice = |i: usize| {
            let id_seed = self.fresh_seed.wrapping_add(i as u64);
            let is_stream = stream.is_some();
            let reader = self.calling.reader(&terms, &prompt, is_stream, id_seed);
            Choice::new(reader, !conversation.is_parallel)
        };
        let choices = (0..n).map(choice).collect();
        let like = Request {
            shown: self.calling.shown(&terms).to_vec(),
            constraint: terms.constraint.clone(),
            ..like.clone()
        };
        Ok(Ask {
            choices,
            ..self.plain(vec![prompt], n, &like, (teller, stream))
        })
    }

    /// The ids of a conversation.
    ///
    /// # Errors
    /// [`Rejection::NoTemplate`], [`Rejection::ContextLength`], and what the template says.
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

    /// Refuses what is far over the context before it is made tokens: `bytes` of text are at least
    /// `bytes / longest_token` tokens. What may be just over it is counted exactly.
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

    /// Bounds on how far prompts are made tokens: up to what [`check_bytes`](Self::check_bytes)
    /// lets pass. So a client hears how much is too much of a prompt of up to twice the context.
    fn bounds(&self) -> Bounds {
        Bounds::of(self.model.context.saturating_mul(2), self.longest_token)
    }

    /// The ids of a text, as far as [`bounds`](Self::bounds) go.
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

    /// The ids of a prompt without a template, as far as [`bounds`](Self::bounds) go. Names of
    /// special tokens are these tokens.
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

    /// `rejection`, in the words for prompts that are too long if it is one.
    fn too_long(&self, rejection: Rejection, param: &'static str) -> Rejection {
        let tokens = match rejection {
            Rejection::Tokenizer(tokenizer::Error::TooManyTokens { tokens_max }) => tokens_max,
            Rejection::Template(ChatError::Template(Failure::OutputTooLong { .. })) => {
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

/// A list of texts that end an answer, or one; `param` is its name.
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

/// `stream` and `stream_options` of OpenAI.
fn stream(fields: &mut Fields, notes: &Notes) -> Result<Option<StreamOptions>, Rejection> {
    let is_stream = fields.is_true("stream");
    let Some(value) = fields.take("stream_options") else {
        let has_usage = false;
        return Ok(is_stream.then_some(StreamOptions { has_usage }));
    };
    let Value::Object(map) = value else {
        return Err(wrong_type("stream_options".into(), &value, "an object"));
    };
    let options = Fields::new(map, fields::STREAM_OPTION, "stream_options.", notes)?;
    if !is_stream {
        let (param, condition) = ("stream_options", "without stream: true");
        return Err(Rejection::Conflict { param, condition });
    }
    let has_usage = options.is_true("include_usage");
    Ok(Some(StreamOptions { has_usage }))
}

/// `metadata` is not used, but what is no metadata is a mistake all the same.
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

/// An array at `param` of at most `most` items, which are `unit`.
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

/// A value of a kind that is not served: `got` is what it is.
fn unsupported(param: impl Into<String>, got: impl Into<String>, why: &'static str) -> Rejection {
    let (param, got) = (param.into(), got.into());
    Rejection::Unsupported { param, got, why }
}
