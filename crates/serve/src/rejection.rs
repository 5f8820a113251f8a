//! Rejections of requests: status, body and cause of each.
//!
//! The body is `{"error": {"message", "type", "param", "code"}}`, OpenAI's form, which both of its
//! SDKs turn into exceptions. At paths of Anthropic's and Ollama's clients it has their form. In a
//! started stream, the same object is an event.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::http::header::{HeaderName, WWW_AUTHENTICATE};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use paceline_base::CallbackError;
use paceline_engine::RequestFailure;
use paceline_text::chat;
use paceline_text::tokenizer;
use serde_json::json;

/// A rejection. Its display text is the `message` of the body.
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
    /// The body ended early or was malformed.
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
    /// A known field whose value would change the response if it were supported.
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
    /// Text or a list over its limit; the value is not quoted.
    #[error("{param} has {got} {unit}, expected {expected}")]
    Length {
        param: String,
        got: usize,
        unit: &'static str,
        expected: String,
    },
    /// A schema or grammar that cannot be enforced.
    #[error("{param} cannot be held to: {reason}")]
    Grammar { param: String, reason: String },
    #[error("{param} cannot be given {condition}")]
    Conflict {
        param: &'static str,
        condition: &'static str,
    },
    /// The prompt leaves no room for output.
    #[error("the prompt has {tokens} tokens, the context is {context}: one must be left to answer")]
    ContextLength {
        tokens: usize,
        context: usize,
        param: &'static str,
    },
    /// The prompt exceeds twice the context; it was not tokenised.
    #[error("the prompt has {tokens} tokens at least, the context is {context}")]
    FarTooLong {
        tokens: usize,
        context: usize,
        param: &'static str,
    },
    /// A text to embed exceeds the model's context.
    #[error("{param} has {tokens} tokens, the context is {context}")]
    LongInput {
        param: String,
        tokens: usize,
        context: usize,
    },
    /// A response that is not stored, or no longer.
    #[error("no response {id:?} is kept here: it was not stored, is too old, or another key's")]
    NoResponse { id: String },
    /// A streamed response without a journal, or no longer.
    #[error(
        "no streamed answer {id:?} is kept: it was left over {stay_s} s ago, there was no room, \
         or it is another key's"
    )]
    NoAnswer { id: String, stay_s: u64 },
    /// A streamed response whose journal an unreachable node may have.
    #[error(
        "streamed answer {id:?} was not found, and a node that may keep it is silent: try again"
    )]
    Unreached { id: String },
    /// All reachable copies of the journal are behind the client.
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
    /// An unknown host name: a web page may have pointed it here (DNS rebinding).
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
    #[error("the API key is unknown or was revoked")]
    WrongKey,

    /// Without keys, other machines have read access only.
    #[error(
        "this node is managed from itself, or with an admin's API key where `paceline key api new \
         --admin` made one, and not while it serves the model of its command line"
    )]
    NoManaging,
    /// A key without admin rights.
    #[error(
        "this API key may ask models and not manage the node: `paceline key api new NAME --admin` \
         makes one that may"
    )]
    NoAdmin,

    // 404, 405, 408, 413, 415: the form of the request.
    #[error("model {model:?} is not served here, {served:?} is")]
    Model { model: String, served: String },
    /// A model that is not in the store.
    #[error("no model {model:?} is kept on this machine")]
    NotKept { model: String },
    /// A pull of an unknown model.
    #[error("no model is called {model:?}")]
    NoSuchModel { model: String },
    /// A served model cannot be removed.
    #[error("model {model:?} is being served: it can be removed when the server has ended")]
    InUse { model: String },
    /// A model that no upstream lists, on a node without models of its own.
    #[error("model {model:?} is served neither here nor by an upstream")]
    NoUpstream { model: String },
    /// A request that was here before, or came through too many servers.
    #[error("model {model:?}: the request came back to this server through its upstreams")]
    UpstreamLoop { model: String },
    /// A path that the upstream does not have.
    #[error(
        "upstream {upstream} does not have {path}, and this server does not translate: it answered \
         {status} {said:?}"
    )]
    UpstreamLacks {
        upstream: String,
        path: String,
        status: u16,
        /// The start of its answer.
        said: String,
    },
    /// An upstream failed while it was asked.
    #[error("upstream {upstream} failed: {reason}")]
    Upstream { upstream: String, reason: String },
    /// All upstreams of the model were down before the request.
    #[error("upstream {upstream} is down: {reason}")]
    UpstreamDown { upstream: String, reason: String },
    #[error("this node has no model loaded: start it with `paceline up MODEL`")]
    NothingLoaded,
    /// Other nodes of the cluster answer with the model, and this one cannot.
    #[error("this node does not answer with {model:?}, which is served at {at}")]
    Elsewhere {
        model: String,
        /// Addresses.
        at: String,
    },
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
    /// Not declared as JSON. Pages of other sites cannot declare it without a preflight.
    #[error("Content-Type is {got:?}, expected application/json")]
    MediaType { got: String },

    // 429, 500, 501, 503, 504: the server.
    /// The client reached its own concurrency limit.
    #[error("{limit} requests of this client are in work, which is the most that one may have")]
    TooManyOfOne { limit: usize },
    /// A feature of other servers that this one lacks.
    #[error("{what} is not done here: {why}")]
    NotDone {
        what: &'static str,
        why: &'static str,
    },
    /// The key of a running response, event stream or pull was revoked.
    #[error("the API key was revoked: the answer was stopped")]
    Revoked,
    /// The concurrency limit is reached.
    #[error("{limit} requests are in work already, which is the most that are taken")]
    TooManyRequests { limit: usize },
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
    /// A bug: work for this request panicked, or its replies ended without a last one.
    #[error("the server failed to {what}")]
    Broken { what: &'static str },
    #[error("no complete answer within {limit_s} s")]
    Deadline { limit_s: u64 },
    #[error("the client is more than {limit} tokens behind: the answer was stopped")]
    SlowReader { limit: usize },
}

/// API dialect of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorStyle {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ErrorStyle {
    /// The dialect of the clients that use `path`.
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

/// HTTP status, and OpenAI's `type` and `code`.
struct ErrorClass {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
}

const fn class(status: StatusCode, kind: &'static str, code: &'static str) -> ErrorClass {
    let code = Some(code);
    ErrorClass { status, kind, code }
}

impl Rejection {
    /// From the program around the server.
    pub(crate) fn of_callback(error: &CallbackError) -> Self {
        let reason = error.to_string();
        Self::Invalid { reason }
    }

    #[expect(clippy::too_many_lines, reason = "one line for each kind of rejection")]
    fn class(&self) -> ErrorClass {
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
            Self::Template(chat::Error::Template(chat::TemplateError::Busy)) => {
                server(S::SERVICE_UNAVAILABLE, "template_busy")
            }
            Self::Template(chat::Error::Template(chat::TemplateError::OutputTooLong {
                ..
            })) => invalid("context_length_exceeded"),
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
            Self::NotKept { .. } | Self::NoSuchModel { .. } | Self::NoUpstream { .. } => {
                request(S::NOT_FOUND, "model_not_found")
            }
            Self::UpstreamLoop { .. } => request(S::LOOP_DETECTED, "upstream_loop"),
            Self::UpstreamLacks { .. } => request(S::NOT_IMPLEMENTED, "not_implemented"),
            Self::Upstream { .. } => server(S::BAD_GATEWAY, "upstream_failed"),
            Self::UpstreamDown { .. } => server(S::SERVICE_UNAVAILABLE, "upstream_down"),
            Self::InUse { .. } => request(S::CONFLICT, "model_in_use"),
            Self::NothingLoaded => server(S::SERVICE_UNAVAILABLE, "no_model_loaded"),
            Self::Elsewhere { .. } => server(S::SERVICE_UNAVAILABLE, "model_elsewhere"),
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
            // Only in streams, after status 200.
            Self::SlowReader { .. } => request(S::REQUEST_TIMEOUT, "slow_reader"),
        }
    }

    /// Name of the invalid field.
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
            | Self::NoUpstream { .. }
            | Self::UpstreamLoop { .. }
            | Self::InUse { .. } => Some("model"),
            Self::Template(_) | Self::NoTemplate { .. } => Some("messages"),
            Self::NoResponse { .. } => Some("previous_response_id"),
            _ => None,
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.class().status
    }

    /// Whether only upstreams are to blame.
    pub(crate) fn is_of_upstream(&self) -> bool {
        matches!(
            self,
            Self::NoUpstream { .. }
                | Self::UpstreamLoop { .. }
                | Self::UpstreamLacks { .. }
                | Self::Upstream { .. }
                | Self::UpstreamDown { .. }
        )
    }

    /// The code of a rejection that the audit log records.
    pub(crate) fn audited(&self) -> Option<&'static str> {
        let ErrorClass { status, code, .. } = self.class();
        code.filter(|_| matches!(status.as_u16(), 401 | 403 | 429))
    }

    /// `{"error": {...}}`.
    pub(crate) fn body(&self) -> serde_json::Value {
        let ErrorClass { kind, code, .. } = self.class();
        let (message, param) = (self.to_string(), self.param());
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    /// The body in the form of a dialect.
    pub(crate) fn body_as(&self, style: ErrorStyle) -> serde_json::Value {
        match style {
            ErrorStyle::OpenAi => self.body(),
            ErrorStyle::Ollama => json!({"error": self.to_string()}),
            ErrorStyle::Anthropic => {
                let message = match self {
                    // Claude Code looks for these words before it compacts a conversation.
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

    /// The response in the form of a dialect.
    pub(crate) fn restyled(response: Response<Body>, style: ErrorStyle) -> Response<Body> {
        let refusal = response.extensions().get::<Arc<Self>>();
        let Some(body) = refusal.map(|refusal| refusal.body_as(style).to_string()) else {
            return response;
        };
        let (parts, _) = response.into_parts();
        Response::from_parts(parts, Body::from(body))
    }

    /// An additional header for the status.
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
            // Upstreams are looked at every two seconds.
            Self::Loading | Self::Upstream { .. } | Self::UpstreamDown { .. } => {
                Some((RETRY_AFTER, text("2")))
            }
            // A pull takes seconds to hours.
            Self::Unavailable { .. } | Self::ShuttingDown | Self::TooManyPulls { .. } => {
                Some((RETRY_AFTER, text("5")))
            }
            // The rest of the body is not read.
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

impl From<RequestFailure> for Rejection {
    fn from(failure: RequestFailure) -> Self {
        match failure {
            RequestFailure::Busy { waiting } => Self::Busy { waiting },
            RequestFailure::PromptTooLong { tokens, context } => Self::ContextLength {
                tokens,
                context,
                param: "prompt",
            },
            RequestFailure::Invalid { reason } => Self::Invalid { reason },
            RequestFailure::Lost { reason } => Self::Lost { reason },
            RequestFailure::Unavailable { reason } => Self::Unavailable { reason },
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
