//! Parses request bodies into engine requests: every field is checked, and then honoured or
//! rejected by name.
//!
//! ```text
//! body --[`read`](crate::schema::read)--> request of a dialect --> `ParsedRequest`
//! ```
//!
//! Reading order: one file per dialect has its request types and builds a [`Conversation`] of them;
//! this file has the shared parts.

/// A struct of fields that are accepted and have no effect. Fields accept `any` value, or `only`
/// values that ask for nothing, with the reason. Requests flatten it.
macro_rules! no_effect {
    (
        $name:ident { $($any:ident),* }
        $(only { $($only:ident = [$($value:tt),*] $why:literal),* })?
    ) => {
        #[derive(Debug, Default, serde::Deserialize, schemars::JsonSchema)]
        #[expect(dead_code, reason = "checked, documented, and not used")]
        struct $name {
            $(
                /// Accepted, no effect.
                $any: Option<serde_json::Value>,
            )*
            $($(
                /// Not supported; these values ask for nothing.
                #[schemars(extend("enum" = [$($value,)* null], "x-why" = $why))]
                $only: Option<serde_json::Value>,
            )*)?
        }
    };
}

pub(crate) mod anthropic;
mod bounds;
pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod embeddings;
mod grammars;
pub(crate) mod infill;
pub(crate) mod llama;
mod messages;
pub(crate) mod ollama;
pub(crate) mod responses;
mod sampling;
mod tools;

use paceline_engine::GenerationRequest;
use paceline_text::chat::{Error as ChatError, PromptLimits, TemplateError};
use paceline_text::tokenizer::{self, Specials};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use bounds::{MAX_NOTE, MAX_NOTE_NAME, MAX_NOTES};

use crate::access::ClientIdentity;
use crate::choice::ChoiceState;
use crate::conversation::Conversation;
use crate::limits::ApiLimits;
use crate::model::ServedModel;
use crate::rejection::Rejection;
use crate::render::openai::Kind;
use crate::render::{ollama as to_ollama, responses as to_responses};
use crate::schema::FieldWarnings;
use crate::store::ResponseStore;
use crate::tool_support::ToolSupport;

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
    Infill,
}

/// The name of the model, one of /v1/models. Default: the only one.
#[derive(Debug, Deserialize, JsonSchema)]
struct ModelName(#[schemars(length(min = 1, max = 256))] String);

/// Notes of a client.
#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect")]
struct Metadata(
    #[schemars(extend(
        "additionalProperties" = {"type": "string", "maxLength": MAX_NOTE},
        "propertyNames" = {"maxLength": MAX_NOTE_NAME},
        "maxProperties" = MAX_NOTES,
    ))]
    Map<String, Value>,
);

#[derive(Debug, Deserialize, JsonSchema)]
#[expect(dead_code, reason = "accepted, and no effect")]
struct NoEffectUser {
    /// Accepted, no effect: names the client's user.
    #[schemars(length(max = MAX_NOTE))]
    user: Option<String>,
}

// Anthropic's marker, accepted in any dialect: prompts are always cached.
no_effect!(CacheControl { cache_control });

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

#[derive(Debug)]
pub(crate) enum ParsedRequest {
    Generation(Box<ModelRequest>),
    /// Needs no computation: the response body.
    Immediate(Value),
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
    /// The model's name as the client wrote it, or the served one's where it names none.
    fn check_model(&self, model: Option<ModelName>) -> Result<String, Rejection> {
        let served = &self.model.id;
        let model = model.map_or_else(|| served.clone(), |model| model.0);
        if self.model.is_called(&model) {
            return Ok(model);
        }
        let served = served.clone();
        Err(Rejection::Model { model, served })
    }

    /// # Errors
    /// [`Rejection::Length`] for fewer than `least` messages, or more than the configured limit.
    fn check_messages(&self, param: &str, got: usize, least: usize) -> Result<(), Rejection> {
        let most = self.limits.messages;
        if (least..=most).contains(&got) {
            return Ok(());
        }
        Err(Rejection::Length {
            param: param.to_owned(),
            got,
            unit: "messages",
            expected: format!("{least} to {most}"),
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

/// The rejection of an unsupported value; `got` describes it.
fn unsupported(param: impl Into<String>, got: impl Into<String>, why: &'static str) -> Rejection {
    let (param, got) = (param.into(), got.into());
    Rejection::Unsupported { param, got, why }
}
