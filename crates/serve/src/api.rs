//! The routes of one model's API, and the checks before them.
//!
//! ```text
//! Host, Origin --> key --> route --> ready? type? place free? --> body --> Ask --> Answer
//! ```
//!
//! A request holds one of [`ApiLimits::requests`](crate::Limits::requests) permits from its headers
//! to the end of its response. While its body is parsed and tokenised, it also holds one of the
//! fewer parsing permits.

mod embeddings;
pub(crate) mod handlers;
pub(crate) mod no_model;
mod pages;
mod pull;
pub(crate) mod registry;
mod relay;
mod resumption;

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HeaderName, HeaderValue,
    VARY,
};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use paceline_engine::Service;
use serde_json::Value;
use tokio::sync::{Semaphore, watch};

use crate::access::{AllowedOrigin, ClientIdentity, Remote, check_key, check_origin};
use crate::concurrency::ConcurrencyLimit;
use crate::config::Config;
use crate::connection::ConnectionHandle;
use crate::endpoint::{ENDPOINTS, Endpoint};
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::phase::ServerPhase;
use crate::rejection::{ErrorStyle, Rejection};
use crate::store::ResponseStore;
use crate::tool_support::ToolSupport;
use crate::{Error, openapi};
use paceline_auth::keys::WatchedKeys;

/// Longest path and query. Eight times what common servers allow.
const MAX_TARGET_BYTES: usize = 32 << 10;

/// State shared by all requests to one model.
#[derive(Debug)]
pub(crate) struct App {
    config: Config,
    model: ServedModel,
    /// Parses and constrains the model's output.
    calling: ToolSupport,
    service: Arc<dyn Service>,
    keys: Option<Arc<WatchedKeys>>,
    metrics: Arc<Metrics>,
    /// Bounds concurrent requests to the model.
    places: Arc<ConcurrencyLimit>,
    /// Bounds bodies parsed at the same time.
    parsing: Arc<Semaphore>,
    /// Stored responses, for `previous_response_id`.
    store: Arc<ResponseStore>,
    /// Bytes of the model's longest token.
    longest_token: usize,
    phase: watch::Receiver<ServerPhase>,
    openapi: String,
}

impl App {
    /// # Errors
    /// A key file that cannot be read.
    pub(crate) fn new(
        config: Config,
        model: ServedModel,
        service: Arc<dyn Service>,
        phase: watch::Receiver<ServerPhase>,
    ) -> Result<Self, Error> {
        let keys = config
            .access
            .keys
            .as_deref()
            .map(WatchedKeys::open)
            .transpose()?;
        let limits = &config.limits;
        Ok(Self {
            metrics: Arc::new(Metrics::new(&model, config.live.clone())),
            places: Arc::new(ConcurrencyLimit::new(
                limits.requests,
                limits.requests_of_one,
            )),
            parsing: Arc::new(Semaphore::new(limits.parsing)),
            store: Arc::new(ResponseStore::new(
                limits.stored_responses,
                limits.stored_bytes,
            )),
            longest_token: model.longest_token(),
            calling: ToolSupport::new(&model),
            openapi: openapi::document(&config, &model, service.embedder().is_some()).to_string(),
            config,
            model,
            service,
            keys: keys.map(Arc::new),
            phase,
        })
    }
}

/// Marks a request sent to all models: data that the models share is added once, after their own.
#[derive(Clone, Copy, Debug)]
struct OneOfSeveral;

pub(crate) fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new()
        .route("/", get(pages::index))
        .route("/health", get(pages::health))
        .route("/metrics", get(pages::metrics))
        .route("/openapi.json", get(pages::document))
        .route("/v1/models", get(pages::models))
        .route("/v1/models/{*id}", get(pages::model))
        .route(
            "/v1/responses/{id}",
            get(pages::response).delete(pages::forget_response),
        )
        .route("/api/version", get(pages::version))
        .route("/api/tags", get(pages::tags))
        .route("/api/ps", get(pages::running))
        .route("/api/show", post(handlers::show))
        .route("/api/pull", post(pull::pull))
        .route("/api/delete", delete(handlers::remove));
    for (path, endpoint) in ENDPOINTS {
        router = router.route(path, asks(endpoint));
    }
    for path in pages::NOT_DONE {
        router = router.route(path, axum::routing::any(pages::not_done));
    }
    router
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(app))
        .layer(from_fn_with_state(Arc::clone(app), guard))
}

fn asks(endpoint: Endpoint) -> MethodRouter<Arc<App>> {
    post(move |State(app): State<Arc<App>>, request: Request| {
        handlers::answer(app, request, endpoint)
    })
}

/// Checks access, counts the request and gives it an id.
async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let endpoint = request.extensions().get::<MatchedPath>();
    let endpoint = endpoint.map_or("other", MatchedPath::as_str).to_owned();
    let style = ErrorStyle::of(request.uri().path());
    let client = address(&request);
    let (response, origin) = match check_origin(&request, &app.config.access) {
        Err(rejection) => (rejection.into_response(), None),
        Ok(origin) if is_preflight(&request) => (preflight(), origin),
        Ok(origin) => (admit(&app, request, next).await, origin),
    };
    app.config.tally.answered(client, &response);
    let response = match style {
        ErrorStyle::OpenAi => response,
        style => Rejection::restyled(response, style),
    };
    let response = finish_headers(response, origin);
    app.metrics.request(&endpoint, response.status().as_u16());
    response
}

async fn admit(app: &App, mut request: Request, next: Next) -> Response {
    let target = request.uri().path_and_query();
    let got = target.map_or(0, |target| target.as_str().len());
    if got > MAX_TARGET_BYTES {
        let limit = MAX_TARGET_BYTES;
        return Rejection::LongTarget { got, limit }.into_response();
    }
    let known = request.extensions().get::<ConnectionHandle>().cloned();
    let client = match app.client(&request) {
        Ok(client) => client,
        // Monitors poll the health without keys.
        Err(_) if request.uri().path() == "/health" => {
            if known.is_some_and(|known| known.is_worn()) {
                let mut response = next.run(request).await;
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert("connection", close);
                return response;
            }
            return next.run(request).await;
        }
        Err(rejection) => return rejection.into_response(),
    };
    if let (ClientIdentity::Key(_), Some(known)) = (&client, known) {
        known.trust();
    }
    if let ClientIdentity::Key(key) = &client {
        app.config.tally.key_used(address(&request), key);
    }
    request.extensions_mut().insert(client);
    next.run(request).await
}

/// The client's address, for the event log.
pub(crate) fn address(request: &Request) -> String {
    let remote = request.extensions().get::<Remote>();
    remote.map_or_else(String::new, |remote| {
        remote.0.ip().to_canonical().to_string()
    })
}

impl App {
    fn client(&self, request: &Request) -> Result<ClientIdentity, Rejection> {
        identify(self.keys.as_ref(), request)
    }

    /// Whether this model stores the response `id`, or a journal of it.
    fn has_response(&self, id: &str) -> bool {
        let answer = id.strip_prefix("resp_").unwrap_or(id);
        let model = self.config.journals.model_of(answer);
        let is_own = model.is_some_and(|model| self.model.is_called(&model));
        is_own || self.store.has(id)
    }

    fn has_several_clients(&self, client: &ClientIdentity) -> bool {
        shares(self.keys.as_ref(), client)
    }
}

/// Identifies the client of a request.
fn identify(
    keys: Option<&Arc<WatchedKeys>>,
    request: &Request,
) -> Result<ClientIdentity, Rejection> {
    if let Some(keys) = keys {
        return check_key(request.headers(), keys).map(ClientIdentity::Key);
    }
    let remote = request.extensions().get::<Remote>();
    let remote = remote.map(|remote| remote.0.ip().to_canonical());
    let other = remote.filter(|ip| !ip.is_loopback());
    Ok(other.map_or(ClientIdentity::Anybody, ClientIdentity::Address))
}

/// Whether other clients have a right to permits as well.
fn shares(keys: Option<&Arc<WatchedKeys>>, client: &ClientIdentity) -> bool {
    match client {
        ClientIdentity::Anybody => false,
        ClientIdentity::Address(_) => true,
        ClientIdentity::Key(_) => keys.is_some_and(|keys| keys.count() > 1),
    }
}

/// Whether this is a CORS preflight; the origin has been checked.
fn is_preflight(request: &Request) -> bool {
    let headers = request.headers();
    request.method() == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight() -> Response {
    let headers = [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, DELETE"),
        // Those that OpenAI's JavaScript SDK sends begin with x-stainless.
        (
            ACCESS_CONTROL_ALLOW_HEADERS,
            "authorization, content-type, last-event-id, user-agent, x-api-key, anthropic-version, \
            anthropic-beta, anthropic-dangerous-direct-browser-access, \
            x-stainless-arch, x-stainless-helper-method, x-stainless-lang, x-stainless-os, \
            x-stainless-package-version, x-stainless-poll-helper, x-stainless-retry-count, \
            x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout",
        ),
        (ACCESS_CONTROL_MAX_AGE, "600"),
        // Browsers ask for it where a public page uses a local address.
        (
            HeaderName::from_static("access-control-allow-private-network"),
            "true",
        ),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

fn finish_headers(mut response: Response, origin: Option<AllowedOrigin>) -> Response {
    let headers = response.headers_mut();
    let id = random_hex().map(|id| HeaderValue::from_str(&format!("req_{id}")));
    if let Ok(Ok(id)) = id {
        // Anthropic's name for it.
        headers.insert("request-id", id.clone());
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
        // The server's own pages need none of these.
        headers.remove("access-control-allow-private-network");
    }
    response
}

/// An id of 128 random bits. Without keys, a client that knows it may read the response's journal.
fn random_hex() -> Result<String, Rejection> {
    Ok(format!("{:032x}", u128::from_le_bytes(random()?)))
}

fn fresh_seed() -> Result<u64, Rejection> {
    Ok(u64::from_le_bytes(random()?))
}

fn random<const N: usize>() -> Result<[u8; N], Rejection> {
    let mut bytes = [0; N];
    let what = "get random numbers from the system";
    getrandom::fill(&mut bytes).map_err(|_| Rejection::Broken { what })?;
    Ok(bytes)
}

fn json_response(status: StatusCode, body: &Value) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (status, json, body.to_string()).into_response()
}

async fn no_route(request: Request) -> Rejection {
    let path = crate::schema::clip(request.uri().path());
    Rejection::NoRoute { path }
}

async fn wrong_method(request: Request) -> Rejection {
    let path = request.uri().path();
    let is_post = |known: &str| known == path || matches!(path, "/api/show" | "/api/pull");
    let takes_posts = ENDPOINTS.iter().any(|(known, _)| is_post(known));
    let allowed = if takes_posts {
        "POST"
    } else if path.starts_with("/v1/responses/") {
        "GET, HEAD, DELETE"
    } else if path == "/api/delete" {
        "DELETE"
    } else {
        "GET, HEAD"
    };
    Rejection::Method {
        path: crate::schema::clip(path),
        method: crate::schema::clip(request.method().as_str()),
        allowed,
    }
}
