//! Routes and what stands before them.
//!
//! ```text
//! Host, Origin --> key --> route --> ready? type? place free? --> body --> Ask --> Answer
//! ```
//!
//! A request holds one of [`Limits::requests`](crate::Limits::requests) places from its headers to
//! the end of its answer, and one of the fewer places for parsing while its body is made tokens.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, CACHE_CONTROL, CONTENT_LENGTH,
    CONTENT_TYPE, HeaderName, HeaderValue, VARY,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt;
use paceline_engine::{Service, State as Readiness};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::access::{AllowedOrigin, check_key, check_origin};
use crate::answer::{Answer, Terms};
use crate::config::Config;
use crate::keys::Watched;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::rejection::Rejection;
use crate::render::{Frame, Shape, Writer};
use crate::request::{Ask, Reader};
use crate::server::Phase;
use crate::stream::Events;
use crate::{Error, json, openapi};

/// What all requests share.
#[derive(Debug)]
pub(crate) struct App {
    config: Config,
    model: Model,
    service: Arc<dyn Service>,
    keys: Option<Watched>,
    metrics: Arc<Metrics>,
    /// Places for requests to the model.
    requests: Arc<Semaphore>,
    /// Places for requests that are parsed.
    parsing: Arc<Semaphore>,
    phase: watch::Receiver<Phase>,
    openapi: String,
}

impl App {
    /// # Errors
    /// A key file that cannot be read.
    pub(crate) fn new(
        config: Config,
        model: Model,
        service: Arc<dyn Service>,
        phase: watch::Receiver<Phase>,
    ) -> Result<Self, Error> {
        let keys = config
            .access
            .keys
            .as_deref()
            .map(Watched::open)
            .transpose()?;
        Ok(Self {
            metrics: Arc::new(Metrics::new(&model)),
            requests: Arc::new(Semaphore::new(config.limits.requests)),
            parsing: Arc::new(Semaphore::new(config.limits.parsing)),
            openapi: openapi::document(&config, &model).to_string(),
            config,
            model,
            service,
            keys,
            phase,
        })
    }
}

/// An endpoint that asks the model.
#[derive(Clone, Copy, Debug)]
enum Endpoint {
    Chat,
    Completion,
}

/// All routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(document))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(app))
        .layer(from_fn_with_state(Arc::clone(app), guard))
}

/// Lets in who may ask, counts, and names the request.
async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let endpoint = request.extensions().get::<MatchedPath>();
    let endpoint = endpoint.map_or("other", MatchedPath::as_str).to_owned();
    let (response, origin) = match check_origin(&request, &app.config.access) {
        Err(rejection) => (rejection.into_response(), None),
        Ok(origin) if is_preflight(&request) => (preflight(), origin),
        Ok(origin) => (admit(&app, request, next).await, origin),
    };
    let response = finish_headers(response, origin);
    app.metrics.request(&endpoint, response.status().as_u16());
    response
}

async fn admit(app: &App, request: Request, next: Next) -> Response {
    // Monitors of the machine ask for its health without keys.
    let needs_key = request.uri().path() != "/health";
    if let (Some(keys), true) = (&app.keys, needs_key)
        && let Err(rejection) = check_key(request.headers(), keys)
    {
        return rejection.into_response();
    }
    next.run(request).await
}

/// Whether a browser asks on behalf of a page; its origin has been checked.
fn is_preflight(request: &Request) -> bool {
    let headers = request.headers();
    request.method() == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight() -> Response {
    let headers = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
        // Those that OpenAI's JavaScript SDK sends begin with x-stainless.
        (
            ACCESS_CONTROL_ALLOW_HEADERS,
            "authorization, content-type, user-agent, \
            x-stainless-arch, x-stainless-helper-method, x-stainless-lang, x-stainless-os, \
            x-stainless-package-version, x-stainless-poll-helper, x-stainless-retry-count, \
            x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout",
        ),
        (ACCESS_CONTROL_MAX_AGE, "600"),
        // Asked by browsers for pages of the internet that use a local address.
        (
            HeaderName::from_static("access-control-allow-private-network"),
            "true",
        ),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

fn finish_headers(mut response: Response, origin: Option<AllowedOrigin>) -> Response {
    let headers = response.headers_mut();
    let id = format!("req_{}", random_hex());
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", id);
    }
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(VARY, HeaderValue::from_static("origin"));
    let origin = origin.and_then(|origin| HeaderValue::from_str(&origin.0).ok());
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    } else {
        // A preflight of the server's own pages needs none of these.
        headers.remove("access-control-allow-private-network");
    }
    response
}

/// 128 random bits. They name things, so a system that has none is no reason to fail.
fn random_hex() -> String {
    let mut bytes = [0; 16];
    let _ = getrandom::fill(&mut bytes);
    format!("{:032x}", u128::from_le_bytes(bytes))
}

fn fresh_seed() -> u64 {
    let mut bytes = [0; 8];
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

fn json_response(status: StatusCode, body: &Value) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (status, json, body.to_string()).into_response()
}

async fn no_route(request: Request) -> Rejection {
    let path = crate::field::clip(request.uri().path());
    Rejection::NoRoute { path }
}

async fn wrong_method(request: Request) -> Rejection {
    let path = request.uri().path();
    let takes_posts = matches!(path, "/v1/chat/completions" | "/v1/completions");
    Rejection::Method {
        path: crate::field::clip(path),
        method: crate::field::clip(request.method().as_str()),
        allowed: if takes_posts { "POST" } else { "GET, HEAD" },
    }
}

async fn index(State(app): State<Arc<App>>) -> Response {
    let body = json!({
        "name": "paceline",
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model.id,
        "endpoints": openapi::PATHS,
    });
    json_response(StatusCode::OK, &body)
}

async fn document(State(app): State<Arc<App>>) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (json, app.openapi.clone()).into_response()
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let status = app.service.status();
    let is_ending = *app.phase.borrow() != Phase::Running;
    let (state, reason) = match status.state {
        _ if is_ending => ("stopping", Some("the server is shutting down".to_owned())),
        Readiness::Loading => ("loading", None),
        Readiness::Ready => ("ready", None),
        Readiness::Failed(reason) => ("failed", Some(reason)),
    };
    let body = json!({
        "status": state,
        "reason": reason,
        "model": app.model.id,
        "running": status.running,
        "waiting": status.waiting,
    });
    let code = match state {
        "ready" => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    json_response(code, &body)
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let in_flight = app.config.limits.requests - app.requests.available_permits();
    let status = app.service.status();
    let text = app.metrics.text(&status, in_flight, &app.config.facts);
    let open_metrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, open_metrics)], text).into_response()
}

fn model_object(model: &Model) -> Value {
    json!({
        "id": model.id,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "paceline",
    })
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let body = json!({"object": "list", "data": [model_object(&app.model)]});
    json_response(StatusCode::OK, &body)
}

async fn model(State(app): State<Arc<App>>, id: Result<Path<String>, PathRejection>) -> Response {
    let model = id.map(|Path(id)| id).unwrap_or_default();
    if app.model.is_called(&model) {
        return json_response(StatusCode::OK, &model_object(&app.model));
    }
    let (model, served) = (crate::field::clip(&model), app.model.id.clone());
    Rejection::Model { model, served }.into_response()
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Rejection> {
    answer(app, request, Endpoint::Chat).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, Rejection> {
    answer(app, request, Endpoint::Completion).await
}

async fn answer(
    app: Arc<App>,
    request: Request,
    endpoint: Endpoint,
) -> Result<Response, Rejection> {
    let asked = (app.config.clock.now)();
    let limit_s = app.config.times.request.as_secs();
    let mut deadline = Box::pin(sleep(app.config.times.request));
    check_media_type(request.headers())?;
    check_ready(&app)?;
    let limit = app.config.limits.requests;
    let permit = Arc::clone(&app.requests).try_acquire_owned();
    let permit = permit.map_err(|_| Rejection::TooManyRequests { limit })?;
    let ask = tokio::select! {
        () = &mut deadline => return Err(Rejection::Deadline { limit_s }),
        ask = read(&app, request, endpoint) => ask?,
    };
    let terms = Terms {
        deadline,
        deadline_s: limit_s,
        phase: app.phase.clone(),
        context: app.model.context,
        unread_replies: app.config.limits.unread_replies,
        asked,
        now: app.config.clock.now,
    };
    respond(&app, ask, terms, permit).await
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Rejection> {
    let value = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let text = String::from_utf8_lossy(value.unwrap_or_default());
    let essence = text.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let got = crate::field::clip(&text);
    Err(Rejection::MediaType { got })
}

fn check_ready(app: &App) -> Result<(), Rejection> {
    if *app.phase.borrow() != Phase::Running {
        return Err(Rejection::ShuttingDown);
    }
    match app.service.status().state {
        Readiness::Ready => Ok(()),
        Readiness::Loading => Err(Rejection::Loading),
        Readiness::Failed(reason) => Err(Rejection::Unavailable { reason }),
    }
}

/// Reads and understands the body.
async fn read(app: &Arc<App>, request: Request, endpoint: Endpoint) -> Result<Ask, Rejection> {
    let patience = app.config.times.body;
    let limit_s = patience.as_secs();
    let body = timeout(patience, body(request, app.config.limits.body_bytes)).await;
    let body = body.map_err(|_| Rejection::SlowBody { limit_s })??;
    let permit = Arc::clone(&app.parsing).acquire_owned().await;
    let permit = permit.expect("the semaphore is never closed");
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || {
        let ask = understand(&app, &body, endpoint);
        drop(permit);
        ask
    });
    let what = "read the request";
    work.await.map_err(|_| Rejection::Broken { what })?
}

fn understand(app: &App, body: &[u8], endpoint: Endpoint) -> Result<Ask, Rejection> {
    let body = json::parse(body, &app.config.limits)?;
    let reader = Reader {
        model: &app.model,
        limits: &app.config.limits,
        unix_s: (app.config.clock.unix_s)(),
        fresh_seed: fresh_seed(),
    };
    match endpoint {
        Endpoint::Chat => reader.chat(body),
        Endpoint::Completion => reader.completion(body),
    }
}

async fn body(request: Request, limit: usize) -> Result<Vec<u8>, Rejection> {
    let length = request.headers().get(CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limit) {
        return Err(Rejection::LongBody { limit });
    }
    let mut pieces = request.into_body().into_data_stream();
    let mut body = Vec::with_capacity(length.unwrap_or(0));
    while let Some(piece) = pieces.next().await {
        let piece: Bytes = piece.map_err(|error| Rejection::BrokenBody {
            reason: error.to_string(),
        })?;
        if body.len() + piece.len() > limit {
            return Err(Rejection::LongBody { limit });
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// Asks the service and answers the client.
async fn respond(
    app: &App,
    ask: Ask,
    terms: Terms,
    permit: OwnedSemaphorePermit,
) -> Result<Response, Rejection> {
    let frame = Frame {
        id: random_hex(),
        created_unix_s: (app.config.clock.unix_s)(),
        model: app.model.id.clone(),
        fingerprint: app.model.fingerprint.clone(),
    };
    let shape = Shape {
        dialect: ask.dialect,
        has_logprobs: ask
            .requests
            .iter()
            .any(|request| request.logprobs.is_some()),
        has_usage: ask.stream.is_some_and(|options| options.has_usage),
        prompt_tokens: ask.prompt_tokens,
        n: ask.n,
        choices: ask.requests.len(),
    };
    let writer = Writer::new(frame, shape, Arc::clone(&app.model.tokenizer));
    let answer = Answer::start(&app.service, &app.metrics, ask.requests, terms)?;
    if ask.stream.is_some() {
        return stream(app, answer, writer, permit).await;
    }
    whole(answer, writer).await
}

async fn whole(mut answer: Answer, mut writer: Writer) -> Result<Response, Rejection> {
    while !answer.is_complete() {
        let (choice, reply) = answer.next().await?;
        writer.collect(choice, reply);
    }
    Ok(json_response(StatusCode::OK, &writer.whole()))
}

async fn stream(
    app: &App,
    mut answer: Answer,
    writer: Writer,
    permit: OwnedSemaphorePermit,
) -> Result<Response, Rejection> {
    let early = timeout(app.config.times.first_reply, answer.next()).await;
    let events = Events {
        early: early.ok().transpose()?,
        answer,
        writer,
        keep_alive: app.config.times.keep_alive,
        _permit: permit,
    };
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-cache"),
        // Keeps nginx from collecting events.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, events.into_body()).into_response())
}
