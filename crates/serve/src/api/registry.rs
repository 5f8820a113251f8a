//! The registry of a node's models, which load and unload while the server runs.
//!
//! Each model has an API of its own. With several models, a request is routed to the one that its
//! body names. A request for a model of an upstream goes to the `relay`.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError, RwLock};
use std::{fmt, io};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, VIA};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use paceline_engine::Service;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tower::ServiceExt;

use super::handlers::{ServedNames, body_in_time};
use super::no_model::Loading;
use super::relay::{self, RelayTarget};
use super::{App, OneOfSeveral, identify, json_response, no_model, resumption};
use crate::access::{ClientIdentity, check_origin};
use crate::config::{Config, StatusSource};
use crate::endpoint::needs_model;
use crate::journal::Journals;
use crate::metrics::{END, OPEN_METRICS, facts_text, merged};
use crate::phase::ServerPhase;
use crate::rejection::Rejection;
use crate::unserved::UnservedModel;
use crate::upstream::{Hops, Upstreams};
use crate::{Error, ServedModel};

/// The models that a node serves. Clones share one registry. All methods are thread-safe, and take
/// effect with the next request.
#[derive(Clone)]
pub struct ModelRegistry(Arc<RegistryState>);

struct RegistryState {
    config: Config,
    phase: watch::Receiver<ServerPhase>,
    idle: Router,
    /// Checks clients where no model is loaded.
    gate: Arc<no_model::Idle>,
    /// Serves requests for models of upstreams.
    relay: Router,
    /// The same for other nodes of the cluster.
    node: Router,
    runtime: tokio::runtime::Handle,
    open: RwLock<Vec<ModelApi>>,
}

#[derive(Clone)]
struct ModelApi {
    key: String,
    app: Arc<App>,
    router: Router,
}

impl RegistryState {
    fn apis(&self) -> Vec<ModelApi> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone()
    }
}

impl ModelRegistry {
    /// An empty registry. Called inside the server's runtime.
    ///
    /// # Errors
    /// A key file that cannot be read.
    pub(crate) fn new(
        config: Config,
        nodes: StatusSource,
        phase: watch::Receiver<ServerPhase>,
    ) -> Result<Self, Error> {
        let idle = Arc::new(no_model::Idle::new(config.clone(), nodes)?);
        Ok(Self(Arc::new(RegistryState {
            config,
            relay: relay::router(&idle, phase.clone()),
            node: relay::node_router(&idle, phase.clone()),
            runtime: tokio::runtime::Handle::current(),
            phase,
            idle: no_model::router(&idle),
            gate: idle,
            open: RwLock::default(),
        })))
    }

    pub(crate) fn router(&self) -> Router {
        let shared = Arc::clone(&self.0);
        Router::new().fallback(dispatch).with_state(shared)
    }

    /// Registers a model, replacing the one with this `key`.
    ///
    /// # Errors
    /// A model with an unusable name, or an unreadable key file.
    pub fn register(
        &self,
        key: &str,
        model: ServedModel,
        service: Arc<dyn Service>,
    ) -> Result<(), Error> {
        model.check()?;
        let (config, phase) = (self.0.config.clone(), self.0.phase.clone());
        let app = Arc::new(App::new(config, model, service, phase)?);
        let door = ModelApi {
            key: key.to_owned(),
            router: super::router(&app),
            app,
        };
        let mut open = self.0.open.write().unwrap_or_else(PoisonError::into_inner);
        open.retain(|door| door.key != key);
        open.push(door);
        Ok(())
    }

    /// The health of a node without models is `loading` while the result exists.
    pub fn begin_loading(&self) -> Loading {
        Loading::new(&self.0.gate.loading)
    }

    /// Sets the models of the cluster that this node does not answer with.
    pub fn set_unserved(&self, models: Vec<UnservedModel>) {
        self.0.gate.unserved.set(models);
    }

    /// The journals of streamed responses, shared by all models.
    pub fn journals(&self) -> &Journals {
        &self.0.config.journals
    }

    /// The upstreams of the server.
    pub fn upstreams(&self) -> &Upstreams {
        &self.0.config.upstreams
    }

    /// Serves the own upstreams on a stream from another node of the cluster, until it ends. Keys
    /// of clients are that node's matter. Does not block.
    ///
    /// # Errors
    /// The stream cannot be made non-blocking.
    pub fn serve_upstreams(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let _inside = self.0.runtime.enter();
        let io = TokioIo::new(tokio::net::UnixStream::from_std(stream)?);
        let service = TowerToHyperService::new(self.0.node.clone());
        // The other node sees errors itself.
        let serving = http1::Builder::new().serve_connection(io, service);
        drop(self.0.runtime.spawn(async move { drop(serving.await) }));
        Ok(())
    }

    /// The stored response `id` as JSON, if the key with id `key` created it. Called for another
    /// node's [`Mirror`](crate::Mirror).
    pub fn response(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        let doors = self.0.apis();
        let mut found = doors
            .iter()
            .filter_map(|door| door.app.store.of_key(id, key));
        serde_json::to_vec(&*found.next()?).ok()
    }

    /// Removes a model. Responses in progress are completed.
    pub fn unregister(&self, key: &str) {
        let mut open = self.0.open.write().unwrap_or_else(PoisonError::into_inner);
        open.retain(|door| door.key != key);
    }
}

impl fmt::Debug for ModelRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.0.open.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_list().entries(open.iter().map(|d| &d.key)).finish()
    }
}

/// Routes a request to the API of its model, and adds the upstreams' models to lists.
async fn dispatch(State(shared): State<Arc<RegistryState>>, request: Request) -> Response {
    let doors = shared.apis();
    let path = request.uri().path();
    let list = LISTS.iter().find(|(known, _)| *known == path);
    let list = list.filter(|_| request.method() == Method::GET);
    let Some((path, key)) = list else {
        return dispatch_one(&shared, &doors, request).await;
    };
    let response = match doors.len() {
        0 | 1 => dispatch_one(&shared, &doors, request).await,
        _ => all_models(&doors, request, key).await,
    };
    let has_name = !shared.config.upstreams.own().is_empty();
    match has_name && response.status().is_success() {
        false => response,
        true => with_upstreams(&shared.config, &doors, response, (path, key)).await,
    }
}

async fn dispatch_one(shared: &RegistryState, doors: &[ModelApi], request: Request) -> Response {
    let path = request.uri().path();
    if (doors.is_empty() && shared.config.upstreams.is_empty()) || path == "/nodes" {
        return pass(shared.idle.clone(), request).await;
    }
    if let (2.., &Method::GET, "/health" | "/metrics") = (doors.len(), request.method(), path) {
        let is_health = path == "/health";
        let answers = match query_all(doors, request).await {
            Ok(answers) => answers,
            Err(refusal) => return refusal,
        };
        return match is_health {
            true => all_health(answers),
            false => all_metrics(doors, &answers, &shared.config),
        };
    }
    match route(shared, doors, request).await {
        Ok((Destination::Idle, request)) => pass(shared.idle.clone(), request).await,
        Ok((Destination::Upstream(target), mut request)) => {
            request.extensions_mut().insert(target);
            pass(shared.relay.clone(), request).await
        }
        Ok((Destination::Model(door), mut request)) => {
            if request.uri().path() == "/api/delete" {
                let served = ServedNames::of(doors.iter().map(|door| &door.app.model));
                request.extensions_mut().insert(served);
            }
            pass(door.router.clone(), request).await
        }
        Err(rejection) => rejection.into_response(),
    }
}

async fn pass(router: Router, request: Request) -> Response {
    router.oneshot(request).await.into_response()
}

/// Paths that list models, and the field with the list.
const LISTS: [(&str, &str); 3] = [
    ("/v1/models", "data"),
    ("/api/tags", "models"),
    ("/api/ps", "models"),
];

/// Maximum response of one model to a request sent to all, in bytes.
const LIST_BYTES: usize = 1 << 20;

/// The fields that name a request's model; `name` is Ollama's older one.
#[derive(Deserialize)]
struct ModelSelector {
    model: Option<String>,
    name: Option<String>,
}

pub(super) fn named_model(body: &[u8]) -> Option<String> {
    let named = serde_json::from_slice::<ModelSelector>(body).ok();
    named.and_then(|named| named.model.or(named.name))
}

/// The API that a request goes to.
enum Destination<'a> {
    Model(&'a ModelApi),
    Upstream(RelayTarget),
    /// The API of a node without models.
    Idle,
}

impl<'a> Destination<'a> {
    fn first(doors: &'a [ModelApi]) -> Self {
        doors.first().map_or(Self::Idle, Self::Model)
    }
}

/// The API of the model that a request names. An unknown name goes to the first model, whose API
/// rejects it.
async fn route<'a>(
    shared: &RegistryState,
    doors: &'a [ModelApi],
    request: Request,
) -> Result<(Destination<'a>, Request), Rejection> {
    let config = &shared.config;
    let upstreams = &config.upstreams;
    let unserved = &shared.gate.unserved;
    if doors.len() == 1 && upstreams.is_empty() && unserved.is_empty() {
        return Ok((Destination::first(doors), request));
    }
    // The body of a client without access is not read; the first model's guard rejects it.
    let is_stranger = check_origin(&request, &config.access).is_err();
    let client = match identify(shared.gate.keys.as_ref(), &request) {
        Ok(client) if !is_stranger => client,
        _ => return Ok((Destination::first(doors), request)),
    };
    let holds = |id: &str| doors.iter().find(|door| door.app.has_response(id));
    let resumed = resumption::answer_of(&request);
    if let (Some(id), Some(first)) = (&resumed, doors.first())
        && holds(id).is_none()
    {
        fetch_journal(&first.app, id, &client).await;
    }
    let resumed = resumed.and_then(|id| holds(&id));
    let called = |name: &str| doors.iter().find(|door| door.app.model.is_called(name));
    let has_name = request.method() == Method::POST || request.uri().path() == "/api/delete";
    if !has_name {
        let path = request.uri().path();
        let id = path.strip_prefix("/v1/models/");
        let response = path.strip_prefix("/v1/responses/");
        let door = id.and_then(called).or(resumed);
        let door = door.or(response.and_then(holds));
        let of_upstream = id.filter(|id| door.is_none() && upstreams.has(id));
        let to = match (door, of_upstream) {
            (Some(door), _) => Destination::Model(door),
            (None, Some(id)) => Destination::Upstream(RelayTarget {
                model: Some(id.to_owned()),
                own: None,
            }),
            (None, None) => Destination::first(doors),
        };
        return Ok((to, request));
    }
    let (parts, body) = request.into_parts();
    let whole = Request::from_parts(parts.clone(), body);
    let body = body_in_time(config, whole).await?;
    let name = named_model(&body);
    let is_named = resumed.is_some() || name.is_some();
    if !is_named && doors.len() > 1 && needs_model(parts.uri.path()) {
        return Err(relay::missing_model());
    }
    let door = resumed.or(name.as_deref().and_then(called));
    let request = Request::from_parts(parts, Body::from(body));
    let refusal = name
        .as_deref()
        .and_then(|name| unserved.refusal(Some(name)));
    let is_unserved = refusal.is_some();
    let to = match door {
        _ if resumed.is_some() || !relay::takes(request.method(), request.uri().path()) => None,
        Some(door) => replica(upstreams, door, name),
        None => elsewhere(upstreams, doors, name),
    };
    let own = || match door {
        Some(door) => Destination::Model(door),
        None if is_unserved => Destination::Idle,
        None => Destination::first(doors),
    };
    Ok((to.map_or_else(own, Destination::Upstream), request))
}

/// The upstream as replica of an own model, where that is allowed and better.
fn replica(upstreams: &Upstreams, door: &ModelApi, name: Option<String>) -> Option<RelayTarget> {
    let status = door.app.service.status();
    let is_better = relay::prefers_replica(upstreams, name.as_deref()?, &status);
    let own = Some(door.router.clone());
    is_better.then_some(RelayTarget { model: name, own })
}

/// The upstream of a model that this node does not have. A node without models leaves rejections
/// to the relay.
fn elsewhere(
    upstreams: &Upstreams,
    doors: &[ModelApi],
    name: Option<String>,
) -> Option<RelayTarget> {
    let is_alone = doors.is_empty() && !upstreams.is_empty();
    let is_known = name.as_deref().is_some_and(|name| upstreams.has(name));
    let own = None;
    (is_alone || is_known).then_some(RelayTarget { model: name, own })
}

/// Adds the upstreams' models to a list, and this server's pseudonym to its response.
async fn with_upstreams(
    config: &Config,
    doors: &[ModelApi],
    response: Response,
    (path, key): (&str, &str),
) -> Response {
    let (mut parts, body) = response.into_parts();
    let bytes = to_bytes(body, LIST_BYTES * doors.len().max(1)).await;
    let list = bytes
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let Some(mut list) = list else {
        let what = "list its models";
        return Rejection::Broken { what }.into_response();
    };
    let is_own = |name: &str| doors.iter().any(|door| door.app.model.is_called(name));
    let more = relay::listed(&config.upstreams, path, is_own);
    if let Some(list) = list[key].as_array_mut() {
        list.extend(more);
    }
    parts.headers.remove(CONTENT_LENGTH);
    let via = Hops::default().and(config.upstreams.own());
    if let Ok(via) = HeaderValue::from_str(&via) {
        parts.headers.insert(VIA, via);
    }
    Response::from_parts(parts, Body::from(list.to_string()))
}

/// Fetches the journal of a streamed response from another node: only the journal names the model
/// that continues it. A client over its limit is rejected later, by the model's API.
async fn fetch_journal(app: &App, id: &str, client: &ClientIdentity) {
    let shares = app.has_several_clients(client);
    if let Ok(_place) = app.places.take(client, shares) {
        let (bounds, now) = (app.config.bounds(), app.config.clock.now);
        // The model's API looks it up again, and reports why there is none.
        let _ = app.config.journals.find(id, client, bounds, now).await;
    }
}

/// A model's response: status and body.
type ModelReply = (StatusCode, Vec<u8>);

/// Sends a request without a body to all models.
///
/// # Errors
/// The response of a model that rejects the client; it stands for all.
async fn query_all(doors: &[ModelApi], request: Request) -> Result<Vec<ModelReply>, Response> {
    let (mut parts, _) = request.into_parts();
    // Each API reads the extensions; these requests have no body.
    let mut extensions = std::mem::take(&mut parts.extensions);
    extensions.insert(OneOfSeveral);
    let mut all = Vec::new();
    for door in doors {
        let mut parts = parts.clone();
        parts.extensions = extensions.clone();
        let request = Request::from_parts(parts, Body::empty());
        let response = pass(door.router.clone(), request).await;
        let status = response.status();
        if !status.is_success() && status != StatusCode::SERVICE_UNAVAILABLE {
            return Err(response);
        }
        let body = to_bytes(response.into_body(), LIST_BYTES).await;
        all.push((
            status,
            body.map_or_else(|_| Vec::new(), |bytes| bytes.to_vec()),
        ));
    }
    Ok(all)
}

/// The node's health: that of the first model that is not ready, with each model's own.
fn all_health(answers: Vec<ModelReply>) -> Response {
    let worst = answers.iter().position(|(status, _)| !status.is_success());
    let status = worst.map_or(StatusCode::OK, |i| answers[i].0);
    let models: Vec<Value> = answers
        .iter()
        .map(|(_, body)| serde_json::from_slice(body).unwrap_or_default())
        .collect();
    let sum = |field: &str| {
        models
            .iter()
            .filter_map(|one| one[field].as_u64())
            .sum::<u64>()
    };
    let mut all = models[worst.unwrap_or(0)].clone();
    all["running"] = sum("running").into();
    all["waiting"] = sum("waiting").into();
    all["models"] = models.into();
    json_response(status, &all)
}

/// All models' metrics, labelled by model, then the shared ones.
fn all_metrics(doors: &[ModelApi], answers: &[ModelReply], config: &Config) -> Response {
    let texts = doors.iter().zip(answers).map(|(door, (_, body))| {
        let text = String::from_utf8_lossy(body).into_owned();
        (door.app.model.id.as_str(), text)
    });
    let text = merged(&texts.collect::<Vec<_>>()) + &facts_text(&config.facts) + END;
    ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response()
}

/// Merges all models' lists under `key`. A model that rejects the client decides for all.
async fn all_models(doors: &[ModelApi], request: Request, key: &str) -> Response {
    let answers = match query_all(doors, request).await {
        Ok(answers) => answers,
        Err(refusal) => return refusal,
    };
    let mut all: Option<Value> = None;
    for (_, body) in answers {
        let one: Value = serde_json::from_slice(&body).unwrap_or_default();
        match (&mut all, one) {
            (None, one) => all = Some(one),
            (Some(all), mut one) => {
                let more = one[key].take();
                if let (Some(list), Value::Array(more)) = (all[key].as_array_mut(), more) {
                    list.extend(more);
                }
            }
        }
    }
    json_response(StatusCode::OK, &all.unwrap_or_default())
}
