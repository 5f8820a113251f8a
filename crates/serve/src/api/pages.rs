//! Endpoints that need no computation by the model.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use paceline_base::hex;
use paceline_engine::State as Readiness;
use serde_json::{Value, json};

use super::{App, OneOfSeveral, handlers, json_response, resumption};
use crate::access::ClientIdentity;
use crate::facts::ProcessMetrics;
use crate::metrics::OPEN_METRICS;
use crate::model::ServedModel;
use crate::openapi;
use crate::phase::ServerPhase;
use crate::rejection::Rejection;
use crate::render::ollama::rfc3339;
use crate::schema::clip;

/// The version of Ollama's API reported to its clients; it decides which features they use.
const OLLAMA_VERSION: &str = "0.13.5";

/// Endpoints of Ollama and OpenAI that this server does not support.
pub(super) const NOT_DONE: [&str; 5] = [
    "/api/copy",
    "/api/create",
    "/api/push",
    "/api/blobs/{digest}",
    "/v1/audio/transcriptions",
];

pub(super) async fn not_done(request: Request) -> Rejection {
    let (what, why) = match request.uri().path() {
        "/v1/audio/transcriptions" => ("hearing", "the model that is served generates text"),
        _ => (
            "changing the store of models",
            "use paceline pull and paceline rm on the machine",
        ),
    };
    Rejection::NotDone { what, why }
}

pub(super) async fn index(State(app): State<Arc<App>>) -> Response {
    let body = json!({
        "name": "paceline",
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model.id,
        "endpoints": openapi::PATHS,
        // Ollama's clients look for these words.
        "compatible": "Ollama is running",
    });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn document(State(app): State<Arc<App>>) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (json, app.openapi.clone()).into_response()
}

/// Replaces a reason that the client may not see.
const HIDDEN: &str = "an API key is needed to see why";

pub(super) async fn health(
    State(app): State<Arc<App>>,
    client: Option<Extension<ClientIdentity>>,
) -> Response {
    let status = app.service.status();
    let is_ending = *app.phase.borrow() != ServerPhase::Running;
    let (state, reason) = match status.state {
        _ if is_ending => ("stopping", Some("the server is shutting down".to_owned())),
        Readiness::Loading => ("loading", None),
        Readiness::Ready => ("ready", None),
        // The reason may name files of the machine; clients without a key do not get it.
        Readiness::Failed(_) if client.is_none() => ("failed", Some(HIDDEN.to_owned())),
        Readiness::Recovering(_) if client.is_none() => ("recovering", Some(HIDDEN.to_owned())),
        Readiness::Recovering(reason) => ("recovering", Some(reason)),
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

pub(super) async fn metrics(
    State(app): State<Arc<App>>,
    several: Option<Extension<OneOfSeveral>>,
) -> Response {
    let status = app.service.status();
    let none = ProcessMetrics::default();
    let facts = several.map_or(&app.config.facts, |_| &none);
    let text = app.metrics.text(&status, app.places.taken(), facts);
    ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}

/// A model, with the name of its numbers where its service tells one.
fn model_object(app: &App) -> Value {
    let model = &app.model;
    let mut object = json!({
        "id": model.id,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "paceline",
    });
    if let Some(numbers) = app.service.numbers() {
        object["numbers"] = numbers.into();
    }
    object
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let body = json!({"object": "list", "data": [model_object(&app)]});
    json_response(StatusCode::OK, &body)
}

pub(super) async fn model(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let model = id.map(|Path(id)| id).unwrap_or_default();
    if app.model.is_called(&model) {
        return json_response(StatusCode::OK, &model_object(&app));
    }
    let (model, served) = (clip(&model), app.model.id.clone());
    Rejection::Model { model, served }.into_response()
}

pub(super) async fn response(
    State(app): State<Arc<App>>,
    Extension(client): Extension<ClientIdentity>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, Rejection> {
    if let Some(last) = resumption::of_response(&id, uri.query().unwrap_or_default())? {
        handlers::check_ready(&app)?;
        let place = app.places.take(&client, app.has_several_clients(&client))?;
        let terms = handlers::request_context(&app, &client);
        return resumption::resume(&app, last, (terms, place, client)).await;
    }
    if let Some(stored) = app.store.get(&id, &client) {
        return Ok(json_response(StatusCode::OK, &stored.response));
    }
    let missing = || Rejection::NoResponse { id: clip(&id) };
    let mirror = resumption::mirror_for(&app, &id).ok_or_else(missing)?;
    // Bounds the number of lookups at other nodes.
    let _place = app.places.take(&client, app.has_several_clients(&client))?;
    let stored = resumption::stored_elsewhere(mirror, &id, &client).await;
    let stored = stored.ok_or_else(missing)?;
    Ok(json_response(StatusCode::OK, &stored.response))
}

pub(super) async fn forget_response(
    State(app): State<Arc<App>>,
    Extension(client): Extension<ClientIdentity>,
    Path(id): Path<String>,
) -> Result<Response, Rejection> {
    if !app.store.remove(&id, &client) {
        return Err(Rejection::NoResponse { id: clip(&id) });
    }
    let body = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) async fn version() -> Response {
    json_response(StatusCode::OK, &json!({"version": OLLAMA_VERSION}))
}

/// The object that Ollama calls `details`.
pub(super) fn details(model: &ServedModel) -> Value {
    let about = &model.about;
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": about.architecture,
        "families": [about.architecture],
        "parameter_size": parameter_size(about.parameters),
        "quantization_level": about.quantization,
    })
}

/// `135M`, `7.2B`; empty if not known.
fn parameter_size(parameters: u64) -> String {
    match parameters {
        0 => String::new(),
        n if n < 1_000_000_000 => format!("{:.0}M", n as f64 / 1e6),
        n => format!("{:.1}B", n as f64 / 1e9),
    }
}

/// The model under one of its names, as `/api/tags` has it.
fn tag(model: &ServedModel, name: &str) -> Value {
    json!({
        "name": name,
        "model": name,
        "modified_at": rfc3339(model.created_unix_s),
        "size": model.about.bytes,
        "digest": digest(model),
        "details": details(model),
    })
}

/// A hash that names the model: of its name and fingerprint, as weights are not hashed.
fn digest(model: &ServedModel) -> String {
    use sha2::{Digest, Sha256};
    let text = format!(
        "{}\n{}\n{}",
        model.id, model.fingerprint, model.created_unix_s
    );
    hex(&Sha256::digest(text))
}

/// Every name, and those without a tag with `:latest` too: clients look for the exact name.
pub(super) async fn tags(State(app): State<Arc<App>>) -> Response {
    let model = &app.model;
    let with_tag = |name: &str| (!name.contains(':')).then(|| format!("{name}:latest"));
    let names = model
        .names()
        .flat_map(|name| [Some(name.to_owned()), with_tag(name)]);
    let tags: Vec<Value> = names.flatten().map(|name| tag(model, &name)).collect();
    json_response(StatusCode::OK, &json!({"models": tags}))
}

pub(super) async fn running(State(app): State<Arc<App>>) -> Response {
    let mut tag = tag(&app.model, &app.model.id);
    tag["size_vram"] = 0.into();
    tag["context_length"] = app.model.context.into();
    // The model stays loaded: the latest time that clients can parse.
    tag["expires_at"] = "9999-12-31T23:59:59Z".into();
    let models = match app.service.status().state {
        Readiness::Ready => vec![tag],
        _ => vec![],
    };
    json_response(StatusCode::OK, &json!({"models": models}))
}
