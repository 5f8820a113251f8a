//! The API of a node without a loaded model: health, cluster, metrics, and errors for the rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;

use super::handlers::body_in_time;
use super::registry::named_model;
use super::{address, finish_headers, identify, is_preflight, json_response, preflight};
use crate::Error;
use crate::access::{ClientIdentity, check_origin};
use crate::config::{Config, StatusSource};
use crate::connection::ConnectionHandle;
use crate::metrics::{OPEN_METRICS, facts_text};
use crate::rejection::{ErrorStyle, Rejection};
use crate::unserved::UnservedModels;
use paceline_auth::keys::WatchedKeys;

/// State shared by these requests.
#[derive(Debug)]
pub(crate) struct Idle {
    pub(super) config: Config,
    pub(super) keys: Option<Arc<WatchedKeys>>,
    pub(super) unserved: UnservedModels,
    nodes: StatusSource,
    /// Groups of models that are being loaded.
    pub(super) loading: Arc<AtomicUsize>,
}

/// A node that loads models.
#[derive(Debug)]
pub struct Loading(Arc<AtomicUsize>);

impl Loading {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Idle {
    /// # Errors
    /// A key file that cannot be read.
    pub(crate) fn new(config: Config, nodes: StatusSource) -> Result<Self, Error> {
        let keys = config.access.keys.as_deref();
        let keys = keys.map(WatchedKeys::open).transpose()?;
        Ok(Self {
            config,
            keys: keys.map(Arc::new),
            unserved: UnservedModels::default(),
            nodes,
            loading: Arc::default(),
        })
    }
}

pub(crate) fn router(idle: &Arc<Idle>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/health", get(health))
        .route("/nodes", get(nodes))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/api/tags", get(tags))
        .route("/api/version", get(super::pages::version))
        .route("/api/pull", post(super::pull::pull_idle))
        .fallback(nothing_loaded)
        .with_state(Arc::clone(idle))
        .layer(from_fn_with_state(Arc::clone(idle), guard))
}

/// Checks access like the API of a model.
pub(super) async fn guard(State(idle): State<Arc<Idle>>, request: Request, next: Next) -> Response {
    let style = ErrorStyle::of(request.uri().path());
    let client = address(&request);
    let (response, origin) = match check_origin(&request, &idle.config.access) {
        Err(rejection) => (rejection.into_response(), None),
        Ok(origin) if is_preflight(&request) => (preflight(), origin),
        Ok(origin) => (admit(&idle, request, next).await, origin),
    };
    idle.config.tally.answered(client, &response);
    let response = match style {
        ErrorStyle::OpenAi => response,
        style => Rejection::restyled(response, style),
    };
    finish_headers(response, origin)
}

async fn admit(idle: &Idle, mut request: Request, next: Next) -> Response {
    let client = match identify(idle.keys.as_ref(), &request) {
        Ok(client) => client,
        // Monitors poll the health without keys.
        Err(_) if request.uri().path() == "/health" => return next.run(request).await,
        Err(rejection) => return rejection.into_response(),
    };
    if let ClientIdentity::Key(key) = &client {
        idle.config.tally.key_used(address(&request), key);
        if let Some(known) = request.extensions().get::<ConnectionHandle>() {
            known.trust();
        }
    }
    request.extensions_mut().insert(client);
    next.run(request).await
}

async fn index() -> Response {
    let body = json!({
        "name": "paceline",
        "version": env!("CARGO_PKG_VERSION"),
        "model": null,
        "endpoints": [
            "/health", "/metrics", "/nodes", "/v1/models", "/api/tags", "/api/version", "/api/pull",
        ],
        // Ollama's clients look for these words.
        "compatible": "Ollama is running",
    });
    json_response(StatusCode::OK, &body)
}

async fn health(State(idle): State<Arc<Idle>>) -> Response {
    let (status, name) = match idle.loading.load(Ordering::SeqCst) {
        0 => (StatusCode::OK, "idle"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
    };
    json_response(status, &json!({"status": name, "model": null}))
}

async fn nodes(State(idle): State<Arc<Idle>>) -> Response {
    json_response(StatusCode::OK, &(idle.nodes.0)())
}

async fn metrics(State(idle): State<Arc<Idle>>) -> Response {
    let text = facts_text(&idle.config.facts) + "# EOF\n";
    ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}

async fn models() -> Response {
    let body = json!({"object": "list", "data": []});
    json_response(StatusCode::OK, &body)
}

async fn tags() -> Response {
    json_response(StatusCode::OK, &json!({"models": []}))
}

/// Refuses a request; one for a model of the cluster with the reason.
async fn nothing_loaded(State(idle): State<Arc<Idle>>, request: Request) -> Rejection {
    if idle.unserved.is_empty() {
        return Rejection::NothingLoaded;
    }
    match body_in_time(&idle.config, request).await {
        Ok(body) => {
            let refusal = idle.unserved.refusal(named_model(&body).as_deref());
            refusal.unwrap_or(Rejection::NothingLoaded)
        }
        Err(rejection) => rejection,
    }
}
