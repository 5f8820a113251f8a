//! Relays requests whose model an upstream serves.
//!
//! ```text
//! guard --> place free? --> upstream that is up --> head, first bytes --> client
//!                              ^ failed before them: the next one, at most twice each
//! ```
//!
//! The request's body and the reply's body pass unchanged. Of the headers only some do, the
//! client's key never. A reply that fails midway ends with the dialect's error, if it is a stream;
//! other replies break off.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, VIA,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::{StreamExt, stream};
use paceline_engine::{ServiceStatus, State as Readiness};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use super::handlers::{body_in_time, check_head, client, client_key};
use super::no_model::{self, Idle};
use super::{ENDPOINTS, json_response, shares};
use crate::access::ClientIdentity;
use crate::concurrency::{ConcurrencyLimit, ConcurrencyPermit};
use crate::live_requests::ProgressUpdater;
use crate::phase::{ServerPhase, reach};
use crate::rejection::{ErrorStyle, Rejection};
use crate::render::StreamFraming;
use crate::render::ollama::rfc3339;
use crate::schema::clip;
use crate::stream::KeepAliveRequest;
use crate::upstream::client::{ReplyBody, send};
use crate::upstream::{
    Hops, RunningRequest, Upstream, UpstreamFailure, UpstreamModel, UpstreamReply, UpstreamRequest,
    Upstreams,
};
use paceline_auth::keys::revoked;

/// Header of relayed responses: host and port of the upstream.
const UPSTREAM: HeaderName = HeaderName::from_static("x-paceline-upstream");

/// Silence after which a reply is given up, if its upstream is declared down as well.
const SILENCE: Duration = Duration::from_secs(5);

/// Maximum bytes of a reply. A batch of 2,048 embeddings of 4,096 numbers has some 100 MB.
const REPLY_BYTES_MAX: usize = 256 << 20;

/// Maximum bytes and time of an error's text that is looked into.
const ERROR_BYTES_MAX: usize = 64 << 10;
const ERROR_LIMIT: Duration = Duration::from_secs(5);

/// Headers of an upstream that clients get. The content type is checked.
const RETURNED: [HeaderName; 3] = [CACHE_CONTROL, CONTENT_ENCODING, RETRY_AFTER];

/// Content types that clients get unchanged. Others could be pages of this server's origin.
const TYPES: [&str; 4] = [
    "application/json",
    "application/x-ndjson",
    "text/event-stream",
    "text/plain",
];

/// The model that a request names, and the API of the own model of this name.
#[derive(Clone)]
pub(super) struct RelayTarget {
    pub(super) model: Option<String>,
    pub(super) own: Option<Router>,
}

/// State shared by relayed requests.
pub(super) struct Relay {
    idle: Arc<Idle>,
    /// Bounds concurrent requests to all upstreams.
    places: Arc<ConcurrencyLimit>,
    phase: watch::Receiver<ServerPhase>,
}

type EarlyEnd = Pin<Box<dyn Future<Output = Rejection> + Send>>;

/// Whether upstreams may take requests to `path`.
pub(super) fn takes(method: &Method, path: &str) -> bool {
    let is_endpoint = ENDPOINTS.iter().any(|(known, _)| *known == path);
    method == Method::POST && (is_endpoint || path == "/api/show")
}

/// Whether a replica should take a request for a model of this node. The own instance then takes no
/// requests, or has some waiting and more in progress than the replica.
pub(super) fn prefers_replica(upstreams: &Upstreams, model: &str, status: &ServiceStatus) -> bool {
    let all = upstreams.replicas(model);
    let least = all.iter().map(|one| one.running()).min();
    let own = status.running + status.waiting;
    let is_crowded = status.waiting > 0 && least.is_some_and(|least| least < own);
    let is_ready = matches!(status.state, Readiness::Ready | Readiness::Recovering(_));
    least.is_some() && (is_crowded || !is_ready)
}

pub(super) fn router(idle: &Arc<Idle>, phase: watch::Receiver<ServerPhase>) -> Router {
    Router::new()
        .fallback(answer)
        .with_state(Arc::new(Relay::new(idle, phase)))
        .layer(from_fn_with_state(Arc::clone(idle), no_model::guard))
}

/// The API for other nodes of the cluster, whose sessions prove who they are: the models of this
/// node's own upstreams, and requests for them. Models of a third node are not among them.
pub(super) fn node_router(idle: &Arc<Idle>, phase: watch::Receiver<ServerPhase>) -> Router {
    Router::new()
        .route("/v1/models", get(own_models))
        .fallback(answer_node)
        .with_state(Arc::new(Relay::new(idle, phase)))
}

async fn own_models(State(relay): State<Arc<Relay>>) -> Response {
    let all = relay.upstreams().models_of(Upstream::is_direct).into_iter();
    let all: Vec<Value> = all
        .map(|(host, model)| model_object(&host, &model))
        .collect();
    let body = json_response(StatusCode::OK, &json!({"object": "list", "data": all}));
    let via = Hops::default().and(relay.upstreams().own());
    ([(VIA, via)], body).into_response()
}

async fn answer_node(
    State(relay): State<Arc<Relay>>,
    request: Request,
) -> Result<Response, Rejection> {
    let (mut parts, body) = request.into_parts();
    let whole = Request::from_parts(parts.clone(), body);
    let body = body_in_time(&relay.idle.config, whole).await?;
    let model = super::registry::named_model(&body);
    parts.extensions.insert(RelayTarget { model, own: None });
    parts.extensions.insert(OfNode);
    answer(State(relay), Request::from_parts(parts, Body::from(body))).await
}

/// Marks a request of another node, which only the own upstreams may answer.
#[derive(Clone, Copy)]
struct OfNode;

/// The rejection of a request that must name its model.
pub(super) fn missing_model() -> Rejection {
    Rejection::Missing {
        param: "model".to_owned(),
        expected: "the name of a model".to_owned(),
    }
}

async fn answer(State(relay): State<Arc<Relay>>, request: Request) -> Result<Response, Rejection> {
    let target = request.extensions().get::<RelayTarget>().cloned();
    let own = target.as_ref().and_then(|target| target.own.clone());
    let model = target.and_then(|target| target.model);
    let model = model.ok_or_else(missing_model)?;
    if request.method() == Method::GET {
        return relay.model(&model);
    }
    check_head(&relay.idle.config, &request)?;
    let from = (client(&request), ErrorStyle::of(request.uri().path()));
    let is_of_node = request.extensions().get::<OfNode>().is_some();
    let is_replica = own.is_some();
    let is_meant =
        move |one: &Upstream| (!is_replica || one.is_replica()) && (!is_of_node || one.is_direct());
    let (parts, body) = request.into_parts();
    let request = Request::from_parts(parts.clone(), body);
    let body = Bytes::from(body_in_time(&relay.idle.config, request).await?);
    let wanted = UpstreamRequest {
        method: parts.method.clone(),
        target: parts
            .uri
            .path_and_query()
            .map_or("/", |it| it.as_str())
            .to_owned(),
        headers: parts.headers.clone(),
        body: body.clone(),
        via: String::new(),
    };
    let outcome = relay.relayed(&model, from, wanted, is_meant).await;
    match (outcome, own) {
        // The own instance is one more place to retry.
        (Err(rejection), Some(own)) if rejection.is_of_upstream() => {
            let request = Request::from_parts(parts, Body::from(body));
            Ok(own.oneshot(request).await.into_response())
        }
        (outcome, _) => outcome,
    }
}

impl Relay {
    fn new(idle: &Arc<Idle>, phase: watch::Receiver<ServerPhase>) -> Self {
        let limits = &idle.config.limits;
        Self {
            places: Arc::new(ConcurrencyLimit::new(
                limits.requests,
                limits.requests_of_one,
            )),
            idle: Arc::clone(idle),
            phase,
        }
    }

    fn upstreams(&self) -> &Upstreams {
        &self.idle.config.upstreams
    }

    fn model(&self, id: &str) -> Result<Response, Rejection> {
        let all = self.upstreams().models().into_iter();
        let found = all.into_iter().find(|(_, model)| model.id == id);
        let (host, model) = found.ok_or_else(|| Rejection::NoUpstream { model: clip(id) })?;
        Ok(json_response(StatusCode::OK, &model_object(&host, &model)))
    }

    /// Sends the request to one upstream after the other, until one replies.
    async fn relayed(
        &self,
        model: &str,
        (client, style): (ClientIdentity, ErrorStyle),
        mut wanted: UpstreamRequest,
        is_meant: impl Fn(&Upstream) -> bool,
    ) -> Result<Response, Rejection> {
        if *self.phase.borrow() != ServerPhase::Running {
            return Err(Rejection::ShuttingDown);
        }
        let hops = Hops::of(&wanted.headers);
        if hops.is_loop(self.upstreams().own()) {
            return Err(Rejection::UpstreamLoop { model: clip(model) });
        }
        wanted.via = hops.and(self.upstreams().own());
        let mut all = self.upstreams().serving(model, &hops);
        all.retain(|one| is_meant(one));
        let keys = self.idle.keys.as_ref();
        let place = self.places.take(&client, shares(keys, &client))?;
        let config = &self.idle.config;
        let asked = (config.clock.now)();
        let mut context = RelayContext {
            ended: early_end(
                config.times.request,
                self.phase.clone(),
                client_key(keys, &client),
            ),
            style,
            first: config.times.keep_alive,
            progress: config.live.begin(model, asked, 0),
            now: config.clock.now,
            _place: place,
        };
        let reached = context.reach(&all, &wanted, model).await?;
        context.respond(reached, &wanted).await
    }
}

/// Limits of one relayed request.
struct RelayContext {
    ended: EarlyEnd,
    style: ErrorStyle,
    /// Time for the first bytes of a body, before its head is passed on without them.
    first: Duration,
    progress: ProgressUpdater,
    now: fn() -> std::time::Instant,
    _place: ConcurrencyPermit,
}

/// An upstream's reply with the first bytes of its body, if they came soon.
type Reached = (Arc<Upstream>, RunningRequest, UpstreamReply, Option<Bytes>);

impl RelayContext {
    /// The first reply of one of `all`. A broken connection is tried once more, after the others.
    async fn reach(
        &mut self,
        all: &[Arc<Upstream>],
        wanted: &UpstreamRequest,
        model: &str,
    ) -> Result<Reached, Rejection> {
        let mut last = Rejection::NoUpstream { model: clip(model) };
        let mut left: VecDeque<_> = all.iter().map(|one| (Arc::clone(one), true)).collect();
        while let Some((one, is_first)) = left.pop_front() {
            let upstream = one.name.clone();
            if let Some(reason) = one.failure_of(model) {
                last = Rejection::UpstreamDown { upstream, reason };
                continue;
            }
            let running = one.begin();
            let outcome = tokio::select! {
                rejection = &mut self.ended => return Err(rejection),
                outcome = attempt(&one, wanted, self.first) => outcome,
            };
            match outcome {
                // An error of its own is passed on, unless another upstream may do better.
                Ok((reply, _)) if is_retried(reply.status) && !left.is_empty() => {}
                Ok((reply, first)) => return Ok((one, running, reply, first)),
                Err(failure) => {
                    one.failed();
                    if is_first && matches!(failure, UpstreamFailure::Broken { .. }) {
                        left.push_back((one, false));
                    }
                    let reason = failure.to_string();
                    last = Rejection::Upstream { upstream, reason };
                }
            }
        }
        self.progress.end("failed");
        Err(last)
    }

    async fn respond(
        mut self,
        (upstream, running, reply, first): Reached,
        wanted: &UpstreamRequest,
    ) -> Result<Response, Rejection> {
        let UpstreamReply {
            status,
            headers,
            body,
        } = reply;
        let name = HeaderValue::from_str(&upstream.name);
        let beat = KeepAliveRequest::default();
        let mut response = if is_lack(status) {
            let whole = async { Ok(known_first(first, body.whole(ERROR_BYTES_MAX).await?)) };
            let text = timeout(ERROR_LIMIT, whole).await;
            let text: Result<Bytes, UpstreamFailure> = text.unwrap_or_else(|_| Ok(Bytes::new()));
            let text = text.unwrap_or_default();
            if !names_model(&text) {
                let path = wanted.target.split('?').next().unwrap_or_default();
                let (upstream, path) = (upstream.name.clone(), clip(path));
                return Err(Rejection::UpstreamLacks {
                    upstream,
                    path,
                    status: status.as_u16(),
                    said: clip(&String::from_utf8_lossy(&text)),
                });
            }
            Response::new(Body::from(text))
        } else {
            if !status.is_success() {
                self.progress.end("failed");
            }
            let relayed = RelayedBody {
                framing: framing(&headers, self.style),
                body,
                first,
                beat: beat.clone(),
                is_between: true,
                sent: 0,
                is_good: status.is_success(),
                upstream,
                context: self,
                _running: running,
            };
            Response::new(relayed.into_body())
        };
        *response.status_mut() = status;
        response.extensions_mut().insert(beat);
        let kept = response.headers_mut();
        for header in RETURNED {
            if let Some(value) = headers.get(&header) {
                kept.insert(header, value.clone());
            }
        }
        kept.insert(CONTENT_TYPE, safe_type(&headers));
        if let Ok(name) = name {
            kept.insert(UPSTREAM, name);
        }
        Ok(response)
    }
}

/// Ends a response at its deadline, at shutdown, or when its key is revoked.
fn early_end(
    limit: Duration,
    mut phase: watch::Receiver<ServerPhase>,
    key: Option<paceline_auth::keys::ClientKey>,
) -> EarlyEnd {
    let limit_s = limit.as_secs();
    let deadline = sleep(limit);
    Box::pin(async move {
        tokio::select! {
            () = deadline => Rejection::Deadline { limit_s },
            () = reach(&mut phase, ServerPhase::Ending) => Rejection::ShuttingDown,
            () = revoked(key.as_ref()) => Rejection::Revoked,
        }
    })
}

/// Sends the request once. Returns the head, and the first bytes of the body if they come within
/// `first`.
async fn attempt(
    one: &Upstream,
    wanted: &UpstreamRequest,
    first: Duration,
) -> Result<(UpstreamReply, Option<Bytes>), UpstreamFailure> {
    let mut reply = patient(one, send(&one.spec, wanted.clone())).await??;
    let status = reply.status.as_u16();
    match status {
        401 | 403 => return Err(UpstreamFailure::Key { status }),
        // A redirection would lead clients past their keys.
        ..=199 | 300..=399 => return Err(UpstreamFailure::Status { status }),
        _ => {}
    }
    let piece = timeout(first, patient(one, reply.body.pieces.next())).await;
    let bytes = match piece {
        Err(_) => None,
        Ok(piece) => piece?.transpose().map_err(broken)?,
    };
    Ok((reply, bytes))
}

fn broken(error: axum::Error) -> UpstreamFailure {
    let reason = error.to_string();
    UpstreamFailure::Broken { reason }
}

/// Waits for `future`. Gives up in a silence in which the upstream is declared down: a machine
/// without power does not close its connections.
async fn patient<T>(one: &Upstream, future: impl Future<Output = T>) -> Result<T, UpstreamFailure> {
    let mut future = std::pin::pin!(future);
    loop {
        tokio::select! {
            it = &mut future => return Ok(it),
            () = sleep(SILENCE) => if let Some(failure) = one.failure() {
                return Err(failure);
            }
        }
    }
}

/// Statuses of servers that are busy or ill.
fn is_retried(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 500 | 502..=504)
}

/// Statuses of paths that a server does not have.
fn is_lack(status: StatusCode) -> bool {
    matches!(status.as_u16(), 404 | 405 | 501)
}

/// Whether an error is about the request's model, and not about its path.
fn names_model(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text).to_lowercase();
    text.contains("model")
}

fn known_first(first: Option<Bytes>, rest: Bytes) -> Bytes {
    [first.unwrap_or_default(), rest].concat().into()
}

/// The form of a stream's error; `None` for a reply that is no stream.
fn framing(headers: &HeaderMap, style: ErrorStyle) -> Option<StreamFraming> {
    match (essence(headers).as_str(), style) {
        ("text/event-stream", ErrorStyle::Anthropic) => Some(StreamFraming::Named),
        ("text/event-stream", _) => Some(StreamFraming::Bare),
        ("application/x-ndjson", _) => Some(StreamFraming::Lines),
        _ => None,
    }
}

/// The content type without parameters.
fn essence(headers: &HeaderMap) -> String {
    let value = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let text = String::from_utf8_lossy(value.unwrap_or_default()).to_ascii_lowercase();
    text.split(';').next().unwrap_or_default().trim().to_owned()
}

fn safe_type(headers: &HeaderMap) -> HeaderValue {
    let essence = essence(headers);
    let known = headers.get(CONTENT_TYPE);
    let known = known.filter(|_| TYPES.contains(&essence.as_str())).cloned();
    known.unwrap_or_else(|| HeaderValue::from_static("application/octet-stream"))
}

/// A reply's body on its way to the client. Dropping it, as when the client leaves, closes the
/// connection to the upstream.
struct RelayedBody {
    body: ReplyBody,
    first: Option<Bytes>,
    framing: Option<StreamFraming>,
    beat: KeepAliveRequest,
    /// The bytes so far end with a whole event.
    is_between: bool,
    sent: usize,
    is_good: bool,
    upstream: Arc<Upstream>,
    context: RelayContext,
    _running: RunningRequest,
}

impl RelayedBody {
    fn into_body(self) -> Body {
        Body::from_stream(stream::unfold(Some(Box::new(self)), |state| async move {
            let mut relayed = state?;
            match relayed.next().await {
                Ok(Some(bytes)) => Some((Ok(bytes), Some(relayed))),
                Ok(None) => {
                    if relayed.is_good {
                        relayed.context.progress.end("complete");
                    }
                    None
                }
                Err(rejection) => {
                    relayed.context.progress.end("failed");
                    Some((relayed.error(rejection), None))
                }
            }
        }))
    }

    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Rejection> {
        if let Some(first) = self.first.take() {
            return self.passed(first).map(Some);
        }
        let piece = tokio::select! {
            biased;
            rejection = &mut self.context.ended => return Err(rejection),
            () = self.beat.asked(), if self.is_between && self.framing.is_some() => {
                let mut comment = Vec::new();
                self.framing.inspect(|framing| framing.comment(&mut comment));
                return Ok(Some(comment.into()));
            }
            piece = patient(&self.upstream, self.body.pieces.next()) => piece,
        };
        let piece = piece.and_then(|piece| piece.transpose().map_err(broken));
        match piece.map_err(|failure| self.failed(failure.to_string()))? {
            Some(bytes) => self.passed(bytes).map(Some),
            None => Ok(None),
        }
    }

    fn passed(&mut self, bytes: Bytes) -> Result<Bytes, Rejection> {
        self.sent += bytes.len();
        if self.sent > REPLY_BYTES_MAX {
            return Err(self.failed(format!("its answer has more than {REPLY_BYTES_MAX} bytes")));
        }
        let end: &[u8] = match self.framing {
            Some(StreamFraming::Lines) => b"\n",
            _ => b"\n\n",
        };
        self.is_between = bytes.ends_with(end);
        if self.framing.is_some() {
            self.context.progress.token((self.context.now)());
        }
        Ok(bytes)
    }

    fn failed(&self, reason: String) -> Rejection {
        self.upstream.failed();
        let upstream = self.upstream.name.clone();
        Rejection::Upstream { upstream, reason }
    }

    /// The last bytes of a stream that failed; an error breaks off other replies.
    fn error(&self, rejection: Rejection) -> Result<Bytes, Rejection> {
        let Some(framing) = self.framing else {
            return Err(rejection);
        };
        let mut out = Vec::new();
        if !self.is_between {
            out.extend_from_slice(b"\n\n");
        }
        framing.put(&mut out, &rejection.body_as(self.context.style));
        Ok(out.into())
    }
}

/// A model as `/v1/models` has it.
fn model_object(host: &str, model: &UpstreamModel) -> Value {
    let mut object = json!({
        "id": model.id,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": format!("via {host}"),
    });
    if !model.hops.is_empty() {
        object["hops"] = json!(model.hops);
    }
    if let Some(reason) = &model.down {
        object["down"] = json!(reason); // for other nodes: clients get no such models
    }
    object
}

fn tag(host: &str, model: &UpstreamModel) -> Value {
    json!({
        "name": model.id,
        "model": model.id,
        "modified_at": rfc3339(model.created_unix_s),
        "size": 0,
        "digest": "",
        "details": {
            "parent_model": format!("via {host}"), "format": "", "family": "", "families": [],
            "parameter_size": "", "quantization_level": "",
        },
    })
}

/// The upstreams' models for the list at `path`, without those that are called as an own one.
pub(super) fn listed(
    upstreams: &Upstreams,
    path: &str,
    is_own: impl Fn(&str) -> bool,
) -> Vec<Value> {
    let object = match path {
        "/v1/models" => model_object,
        "/api/tags" => tag,
        _ => return Vec::new(),
    };
    let all = upstreams.models().into_iter();
    let others = all.filter(|(_, model)| !is_own(&model.id));
    others.map(|(host, model)| object(&host, &model)).collect()
}
