//! Why a client does not get what it asked for: status, body and cause of each refusal.
//!
//! The body is `{"error": {"message", "type", "param", "code"}}`, OpenAI's form, which both of its
//! SDKs turn into exceptions. At the paths of Anthropic's and Ollama's clients it is theirs. In a
//! stream that has begun, the same object is an event.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::http::header::{HeaderName, WWW_AUTHENTICATE};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use paceline_engine::Failure;
use paceline_formats::chat;
use paceline_formats::tokenizer;
use serde_json::json;

/// A refusal. The text is the `message` of the body.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejection {
    // 400: the body.
    #[error("the body is not JSON: {reason}")]
    NotJson { reason: String },
    #[error("the body has more than {limit} levels of arrays and objects")]
    TooDeep { limit: usize },
    /// Too many values for the memory that parsing may take.
    #[error("the body has more than {limit} values")]
    TooManyValues { limit: usize },
    #[error("the body is {got}, expected an object")]
    NotObject { got: String },
    /// The body ended early or was sent wrongly.
    #[error("the body could not be read: {reason}")]
    BrokenBody { reason: String },

    // 400: a field.
    #[error("{param} is missing: {expected}")]
    Missing { param: String, expected: String },
    #[error(
        "{param} is no field of this request: it would have no effect, and this server was not \
         started with --lenient"
    )]
    Unknown { param: String },
    /// A field of OpenAI's specification, with a value that would change the answer if it were
    /// implemented.
    #[error("{param} is {got}, which is not supported: {why}")]
    Unsupported {
        param: String,
        got: String,
        why: &'static str,
    },
    #[error("{param} is {got}, expected {expected}")]
    Type {
        param: String,
        got: String,
        expected: String,
    },
    #[error("{param} is {got}, expected {expected}")]
    Range {
        param: String,
        got: String,
        expected: String,
    },
    /// Text or a list over its bound, which is not repeated.
    #[error("{param} has {got} {unit}, expected {expected}")]
    Length {
        param: String,
        got: usize,
        unit: &'static str,
        expected: String,
    },
    /// A schema or grammar that cannot be followed.
    #[error("{param} cannot be held to: {reason}")]
    Grammar { param: String, reason: String },
    #[error("{param} cannot be given {condition}")]
    Conflict {
        param: &'static str,
        condition: &'static str,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, the context is {context}: one must be left to answer")]
    ContextLength {
        tokens: usize,
        context: usize,
        param: &'static str,
    },
    /// The prompt is more than twice the context; it was not made tokens.
    #[error("the prompt has {tokens} tokens at least, the context is {context}")]
    FarTooLong {
        tokens: usize,
        context: usize,
        param: &'static str,
    },
    /// A text whose vector is wanted is longer than the model takes.
    #[error("{param} has {tokens} tokens, the context is {context}")]
    LongInput {
        param: String,
        tokens: usize,
        context: usize,
    },
    /// A response that is not kept, or no longer.
    #[error("no response {id:?} is kept here: it was not stored, is too old, or another key's")]
    NoResponse { id: String },
    /// A streamed answer that is not kept, or no longer.
    #[error(
        "no streamed answer {id:?} is kept: it was left over {stay_s} s ago, there was no room, \
         or it is another key's"
    )]
    NoAnswer { id: String, stay_s: u64 },
    /// A streamed answer that a silent node may keep.
    #[error(
        "streamed answer {id:?} was not found, and a node that may keep it is silent: try again"
    )]
    Unreached { id: String },
    /// The copies of a streamed answer that could be reached are behind its client.
    #[error(
        "the copies of streamed answer {id:?} that were reached lack events that the client has, \
         and its choices cannot be told again in the same order: try again, or ask anew"
    )]
    Behind { id: String },
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt { param: String },
    #[error("{model} has no chat template: it completes text only, at /v1/completions")]
    NoTemplate { model: String },
    #[error(transparent)]
    Template(chat::Error),
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::Error),
    #[error("{reason}")]
    Invalid { reason: String },

    // 400, 401, 403: who asks.
    /// No `Host`, or several.
    #[error("{got} Host headers, expected one")]
    HostCount { got: usize },
    /// A name that this server does not go by: a web page may have pointed it here.
    #[error(
        "host {host:?} is not a name of this server: it was not started with --allow-host for it"
    )]
    Host { host: String },
    #[error(
        "web pages of {origin:?} may not use this server: it was not started with \
         --allow-origin for them"
    )]
    Origin { origin: String },
    #[error("no API key: expected the header Authorization: Bearer KEY, or x-api-key: KEY")]
    NoKey,
    /// A key that is not in the file.
    #[error("the API key is unknown or was revoked")]
    WrongKey,

    /// Without keys, other machines may look and not change.
    #[error(
        "this node is managed from itself, or with an admin's API key where `paceline key api new \
         --admin` made one, and not while it serves the model of its command line"
    )]
    NoManaging,
    /// A key whose holder may ask models only.
    #[error(
        "this API key may ask models and not manage the node: `paceline key api new NAME --admin` \
         makes one that may"
    )]
    NoAdmin,

    // 404, 405, 408, 413, 415: the way of asking.
    #[error("model {model:?} is not served here, {served:?} is")]
    Model { model: String, served: String },
    /// A model that is not in the store.
    #[error("no model {model:?} is kept on this machine")]
    NotKept { model: String },
    /// A model that cannot be fetched, as there is none of that name.
    #[error("no model is called {model:?}")]
    NoSuchModel { model: String },
    /// A model that cannot be removed while it is served.
    #[error("model {model:?} is being served: it can be removed when the server has ended")]
    InUse { model: String },
    #[error("this node has no model loaded: start it with `paceline up MODEL`")]
    NothingLoaded,
    #[error("there is nothing at {path}")]
    NoRoute { path: String },
    #[error("{path} does not take {method}, expected {allowed}")]
    Method {
        path: String,
        method: String,
        allowed: &'static str,
    },
    #[error("the body did not arrive within {limit_s} s")]
    SlowBody { limit_s: u64 },
    #[error("the body is longer than {limit} bytes")]
    LongBody { limit: usize },
    #[error("Content-Encoding is {got:?}, expected none: bodies are read uncompressed only")]
    Encoded { got: String },
    #[error("the address has {got} bytes, expected at most {limit}")]
    LongTarget { got: usize, limit: usize },
    /// Not declared as JSON. A page elsewhere cannot declare it without asking first.
    #[error("Content-Type is {got:?}, expected application/json")]
    MediaType { got: String },

    // 429, 500, 501, 503, 504: the server.
    /// A client has as many requests in work as one client may have.
    #[error("{limit} requests of this client are in work, which is the most that one may have")]
    TooManyOfOne { limit: usize },
    /// A function of other servers that this one does not have.
    #[error("{what} is not done here: {why}")]
    NotDone {
        what: &'static str,
        why: &'static str,
    },
    /// The key of a running answer, stream of events or pull is no longer one.
    #[error("the API key was revoked: the answer was stopped")]
    Revoked,
    /// As many requests as may be are in work.
    #[error("{limit} requests are in work already, which is the most that are taken")]
    TooManyRequests { limit: usize },
    /// As many models as may be are being fetched.
    #[error("{limit} models are being fetched already, which is the most at a time")]
    TooManyPulls { limit: usize },
    #[error("{waiting} requests are waiting already, which is the most that are held")]
    Busy { waiting: usize },
    #[error("the model is being loaded")]
    Loading,
    #[error("the model cannot answer: {reason}")]
    Unavailable { reason: String },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the answer was lost: {reason}")]
    Lost { reason: String },
    /// A defect of ours: work for this request panicked, or its replies ended without a last one.
    #[error("the server failed to {what}")]
    Broken { what: &'static str },
    #[error("no complete answer within {limit_s} s")]
    Deadline { limit_s: u64 },
    #[error("the client is more than {limit} tokens behind: the answer was stopped")]
    SlowReader { limit: usize },
}

/// In whose words a refusal is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Style {
    /// That of the clients which ask at `path`.
    pub(crate) fn of(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// The class of a refusal in HTTP and in OpenAI's terms.
struct Class {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
}

const fn class(status: StatusCode, kind: &'static str, code: &'static str) -> Class {
    let code = Some(code);
    Class { status, kind, code }
}

impl Rejection {
    // long: one line for each kind of rejection
    fn class(&self) -> Class {
        use StatusCode as S;
        let invalid = |code| class(S::BAD_REQUEST, "invalid_request_error", code);
        let request = |status, code| class(status, "invalid_request_error", code);
        let server = |status, code| class(status, "server_error", code);
        match self {
            Self::NotJson { .. } | Self::NotObject { .. } => invalid("invalid_json"),
            Self::TooDeep { .. } | Self::TooManyValues { .. } => invalid("json_too_large"),
            Self::BrokenBody { .. } => invalid("incomplete_body"),
            Self::Missing { .. } => invalid("missing_required_parameter"),
            Self::Unknown { .. } => invalid("unknown_parameter"),
            Self::Unsupported { .. } => invalid("unsupported_parameter"),
            Self::Type { .. } => invalid("invalid_type"),
            Self::Range { .. } | Self::Length { .. } => invalid("invalid_value"),
            Self::Grammar { .. } => invalid("unsupported_schema"),
            Self::Conflict { .. } => invalid("conflicting_parameters"),
            Self::ContextLength { .. } | Self::FarTooLong { .. } | Self::LongInput { .. } => {
                invalid("context_length_exceeded")
            }
            Self::NoResponse { .. } => request(S::NOT_FOUND, "response_not_found"),
            Self::NoAnswer { .. } => request(S::NOT_FOUND, "answer_not_found"),
            Self::Unreached { .. } => server(S::SERVICE_UNAVAILABLE, "answer_unreached"),
            Self::Behind { .. } => server(S::SERVICE_UNAVAILABLE, "answer_behind"),
            Self::EmptyPrompt { .. } => invalid("invalid_value"),
            Self::NoTemplate { .. } => invalid("no_chat_template"),
            Self::Template(chat::Error::Template(failure)) if failure.is_of_model() => {
                server(S::INTERNAL_SERVER_ERROR, "template_failed")
            }
            Self::Template(chat::Error::Template(chat::Failure::Busy)) => {
                server(S::SERVICE_UNAVAILABLE, "template_busy")
            }
            Self::Template(chat::Error::Template(chat::Failure::OutputTooLong { .. })) => {
                invalid("context_length_exceeded")
            }
            Self::Template(_) => invalid("invalid_messages"),
            Self::Tokenizer(_) | Self::Invalid { .. } => invalid("invalid_value"),
            Self::HostCount { .. } => invalid("invalid_host"),
            Self::Host { .. } => request(S::FORBIDDEN, "host_not_allowed"),
            Self::Origin { .. } => request(S::FORBIDDEN, "origin_not_allowed"),
            Self::NoKey => request(S::UNAUTHORIZED, "missing_api_key"),
            Self::WrongKey => request(S::UNAUTHORIZED, "invalid_api_key"),
            Self::NoManaging => request(S::FORBIDDEN, "managing_not_allowed"),
            Self::NoAdmin => request(S::FORBIDDEN, "admin_key_needed"),
            Self::Model { .. } => request(S::NOT_FOUND, "model_not_found"),
            Self::NotKept { .. } | Self::NoSuchModel { .. } => {
                request(S::NOT_FOUND, "model_not_found")
            }
            Self::InUse { .. } => request(S::CONFLICT, "model_in_use"),
            Self::NothingLoaded => server(S::SERVICE_UNAVAILABLE, "no_model_loaded"),
            Self::NoRoute { .. } => request(S::NOT_FOUND, "unknown_url"),
            Self::Method { .. } => request(S::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::SlowBody { .. } => request(S::REQUEST_TIMEOUT, "body_timeout"),
            Self::LongBody { .. } => request(S::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::LongTarget { .. } => request(S::URI_TOO_LONG, "uri_too_long"),
            Self::MediaType { .. } => {
                request(S::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_type")
            }
            Self::Encoded { .. } => {
                request(S::UNSUPPORTED_MEDIA_TYPE, "unsupported_content_encoding")
            }
            Self::TooManyRequests { .. } | Self::Busy { .. } => {
                class(S::TOO_MANY_REQUESTS, "rate_limit_error", "server_busy")
            }
            Self::TooManyOfOne { .. } => {
                class(S::TOO_MANY_REQUESTS, "rate_limit_error", "client_busy")
            }
            Self::TooManyPulls { .. } => {
                class(S::TOO_MANY_REQUESTS, "rate_limit_error", "pulls_busy")
            }
            Self::NotDone { .. } => request(S::NOT_IMPLEMENTED, "not_implemented"),
            Self::Revoked => request(S::UNAUTHORIZED, "invalid_api_key"),
            Self::Loading => server(S::SERVICE_UNAVAILABLE, "model_loading"),
            Self::Unavailable { .. } => server(S::SERVICE_UNAVAILABLE, "model_unavailable"),
            Self::ShuttingDown => server(S::SERVICE_UNAVAILABLE, "shutting_down"),
            Self::Lost { .. } => server(S::INTERNAL_SERVER_ERROR, "answer_lost"),
            Self::Broken { .. } => server(S::INTERNAL_SERVER_ERROR, "internal_error"),
            Self::Deadline { .. } => server(S::GATEWAY_TIMEOUT, "deadline_exceeded"),
            // Seen in streams only, after status 200.
            Self::SlowReader { .. } => request(S::REQUEST_TIMEOUT, "slow_reader"),
        }
    }

    /// The field that is at fault.
    fn param(&self) -> Option<&str> {
        match self {
            Self::Missing { param, .. }
            | Self::Unknown { param }
            | Self::Unsupported { param, .. }
            | Self::Type { param, .. }
            | Self::Range { param, .. }
            | Self::Length { param, .. }
            | Self::Grammar { param, .. }
            | Self::LongInput { param, .. }
            | Self::EmptyPrompt { param } => Some(param),
            Self::Conflict { param, .. }
            | Self::ContextLength { param, .. }
            | Self::FarTooLong { param, .. } => Some(param),
            Self::Model { .. }
            | Self::NotKept { .. }
            | Self::NoSuchModel { .. }
            | Self::InUse { .. } => Some("model"),
            Self::Template(_) | Self::NoTemplate { .. } => Some("messages"),
            Self::NoResponse { .. } => Some("previous_response_id"),
            _ => None,
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.class().status
    }

    /// The code of a refusal for want of a right or a place.
    pub(crate) fn audited(&self) -> Option<&'static str> {
        let Class { status, code, .. } = self.class();
        code.filter(|_| matches!(status.as_u16(), 401 | 403 | 429))
    }

    /// `{"error": {...}}`.
    pub(crate) fn body(&self) -> serde_json::Value {
        let Class { kind, code, .. } = self.class();
        let (message, param) = (self.to_string(), self.param());
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    /// The body in the words of a dialect.
    pub(crate) fn body_as(&self, style: Style) -> serde_json::Value {
        match style {
            Style::OpenAi => self.body(),
            Style::Ollama => json!({"error": self.to_string()}),
            Style::Anthropic => {
                let message = match self {
                    // The words that Claude Code looks for before it shortens a conversation.
                    Self::ContextLength {
                        tokens, context, ..
                    }
                    | Self::FarTooLong {
                        tokens, context, ..
                    } => format!("prompt is too long: {tokens} tokens > {context} maximum"),
                    other => other.to_string(),
                };
                let error = json!({"type": self.anthropic_kind(), "message": message});
                json!({"type": "error", "error": error})
            }
        }
    }

    fn anthropic_kind(&self) -> &'static str {
        match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The response in the words of a dialect.
    pub(crate) fn restyled(response: Response<Body>, style: Style) -> Response<Body> {
        let refusal = response.extensions().get::<Arc<Self>>();
        let Some(body) = refusal.map(|refusal| refusal.body_as(style).to_string()) else {
            return response;
        };
        let (parts, _) = response.into_parts();
        Response::from_parts(parts, Body::from(body))
    }

    /// A header that belongs to the status.
    fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        let text = HeaderValue::from_static;
        match self {
            Self::NoKey | Self::WrongKey => Some((WWW_AUTHENTICATE, text("Bearer"))),
            Self::Method { allowed, .. } => Some((ALLOW, text(allowed))),
            Self::TooManyRequests { .. }
            | Self::Busy { .. }
            | Self::TooManyOfOne { .. }
            | Self::Unreached { .. }
            | Self::Behind { .. } => Some((RETRY_AFTER, text("1"))),
            // Reading weights takes seconds to minutes.
            Self::Loading => Some((RETRY_AFTER, text("2"))),
            // A pull takes seconds to hours.
            Self::Unavailable { .. } | Self::ShuttingDown | Self::TooManyPulls { .. } => {
                Some((RETRY_AFTER, text("5")))
            }
            // What is left of the body is not read.
            Self::LongBody { .. } | Self::SlowBody { .. } => Some((CONNECTION, text("close"))),
            _ => None,
        }
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.body().to_string()));
        *response.status_mut() = self.status();
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(CONTENT_TYPE, json);
        if let Some((name, value)) = self.header() {
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

impl From<Failure> for Rejection {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Busy { waiting } => Self::Busy { waiting },
            Failure::PromptTooLong { tokens, context } => Self::ContextLength {
                tokens,
                context,
                param: "prompt",
            },
            Failure::Invalid { reason } => Self::Invalid { reason },
            Failure::Lost { reason } => Self::Lost { reason },
            Failure::Unavailable { reason } => Self::Unavailable { reason },
        }
    }
}

impl From<chat::Error> for Rejection {
    fn from(error: chat::Error) -> Self {
        match error {
            chat::Error::Tokenizer(error) => Self::Tokenizer(error),
            error => Self::Template(error),
        }
    }
}
