//! The dashboard of a node: a page, and the routes that it calls.
//!
//! ```text
//! GET  /                            the page, for clients that accept HTML; others get the API's
//! GET  /assets/NAME                 its style and modules; public, as they tell nothing
//! GET  /v1/paceline/status          nodes, telemetry, instances, requests as JSON
//! GET  /v1/paceline/stages?instance=ID  a look of some seconds at where its ranks' time goes
//! GET  /v1/paceline/events?after=N  events as SSE, those kept first; an `error` ends them
//! POST /v1/paceline/markdown        texts as trees
//! POST /v1/paceline/load, unload, preview,
//!                   models, catalogue, search, describe, pull, cancel_pull, remove,
//!                   invite, join, forget, revoke, keys, new_key, revoke_key, doctor, logs
//! ```
//!
//! All routes but the page and its assets need an API key if keys are in use; commands need an
//! admin's. Without keys, only loopback clients may send commands. All other paths go to the
//! wrapped API.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tower::ServiceExt;

use crate::Error;
use crate::access::{Remote, check_key, check_origin};
use crate::api::address;
use crate::api::handlers::body_in_time;
use crate::config::{CommandHandler, Config};
use crate::events::{Event, EventLog};
use crate::markdown::tree;
use crate::phase::{ServerPhase, reach};
use crate::rejection::Rejection;
use paceline_auth::keys::{ClientKey, WatchedKeys, revoked};

const PAGE: &str = include_str!("../assets/index.html");

/// The page's parts: name, type, text.
const ASSETS: [(&str, &str, &str); 10] = [
    (
        "paceline.css",
        "text/css",
        include_str!("../assets/paceline.css"),
    ),
    ("paceline.js", SCRIPT, include_str!("../assets/paceline.js")),
    ("dom.js", SCRIPT, include_str!("../assets/dom.js")),
    ("api.js", SCRIPT, include_str!("../assets/api.js")),
    ("chat.js", SCRIPT, include_str!("../assets/chat.js")),
    ("chats.js", SCRIPT, include_str!("../assets/chats.js")),
    ("markdown.js", SCRIPT, include_str!("../assets/markdown.js")),
    ("models.js", SCRIPT, include_str!("../assets/models.js")),
    ("machines.js", SCRIPT, include_str!("../assets/machines.js")),
    ("activity.js", SCRIPT, include_str!("../assets/activity.js")),
];

const SCRIPT: &str = "text/javascript";

/// Content security policy: loads only the page's own files, and connects only to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Maximum concurrent event streams; each holds a connection for good.
const STREAMS_MAX: usize = 32;

/// Maximum concurrent stage measurements; each takes a thread for some seconds.
const WATCHES_MAX: usize = 4;

/// Maximum events per chunk of a stream.
const PIECE_EVENTS: usize = 256;

/// Timeout of a status or command.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Commands that the dashboard sends.
const COMMANDS: [&str; 19] = [
    "load",
    "unload",
    "preview",
    "models",
    "catalogue",
    "search",
    "describe",
    "pull",
    "cancel_pull",
    "remove",
    "doctor",
    "logs",
    "invite",
    "join",
    "forget",
    "revoke",
    "keys",
    "new_key",
    "revoke_key",
];

/// State shared by the dashboard's requests.
struct DashboardState {
    config: Config,
    keys: Option<Arc<WatchedKeys>>,
    phase: watch::Receiver<ServerPhase>,
    streams: Arc<Semaphore>,
    watches: Arc<Semaphore>,
    api: Router,
}

/// Wraps `api`, which gets all other requests.
///
/// # Errors
/// A key file that cannot be read.
pub(crate) fn over(
    api: Router,
    config: Config,
    phase: watch::Receiver<ServerPhase>,
) -> Result<Router, Error> {
    let keys = config.access.keys.as_deref();
    let shared = DashboardState {
        keys: keys.map(WatchedKeys::open).transpose()?.map(Arc::new),
        config,
        phase,
        streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        watches: Arc::new(Semaphore::new(WATCHES_MAX)),
        api,
    };
    Ok(Router::new().fallback(answer).with_state(Arc::new(shared)))
}

/// Handles the dashboard's requests; passes others on.
async fn answer(State(shared): State<Arc<DashboardState>>, request: Request) -> Response {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    let client = address(&request);
    let path = request.uri().path().to_owned();
    let command = path.strip_prefix("/v1/paceline/").unwrap_or_default();
    let name = path.strip_prefix("/assets/").filter(|_| reads);
    let asset = name.and_then(|name| ASSETS.iter().find(|it| it.0 == name));
    let asset = asset.map(|(_, mime, text)| shared.asset(&request, mime, text));
    let answered = match (path.as_str(), asset) {
        (_, Some(asset)) => asset,
        ("/", _) if reads && wants_html(request.headers()) => shared.page(&request),
        ("/v1/paceline/status", _) if reads => match shared.looks(&request) {
            Ok(may_manage) => shared.status(may_manage).await,
            Err(rejection) => Err(rejection),
        },
        ("/v1/paceline/stages", _) if reads => match shared.watched(&request) {
            Ok(id) => shared.stages(id).await,
            Err(rejection) => Err(rejection),
        },
        ("/v1/paceline/events", _) if reads => shared.events(&request),
        ("/v1/paceline/markdown", _) if request.method() == Method::POST => {
            shared.markdown(request).await
        }
        _ if request.method() == Method::POST && COMMANDS.contains(&command) => {
            let command = command.to_owned();
            shared.manage(request, &command).await
        }
        _ => {
            let api = shared.api.clone();
            return api.oneshot(request).await.into_response();
        }
    };
    let mut response = answered.unwrap_or_else(Rejection::into_response);
    shared.config.tally.answered(client, &response);
    let headers = response.headers_mut();
    let nosniff = axum::http::HeaderValue::from_static("nosniff");
    headers.insert(X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

/// Whether the client accepts HTML.
fn wants_html(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

/// # Errors
/// [`Rejection::MediaType`] unless the body is JSON.
fn check_json(request: &Request) -> Result<(), Rejection> {
    let mime = request.headers().get(CONTENT_TYPE);
    let mime = mime.and_then(|mime| mime.to_str().ok()).unwrap_or_default();
    let got = crate::schema::clip(mime);
    let is_json = mime.starts_with("application/json");
    is_json.then_some(()).ok_or(Rejection::MediaType { got })
}

impl DashboardState {
    fn page(&self, request: &Request) -> Result<Response, Rejection> {
        let mut response = self.asset(request, "text/html", PAGE)?;
        let headers = response.headers_mut();
        let vary = axum::http::HeaderValue::from_static("accept, origin");
        headers.insert(VARY, vary);
        Ok(response)
    }

    fn asset(
        &self,
        request: &Request,
        mime: &str,
        text: &'static str,
    ) -> Result<Response, Rejection> {
        check_origin(request, &self.config.access)?;
        let headers = [
            (CONTENT_TYPE, format!("{mime}; charset=utf-8")),
            (CONTENT_SECURITY_POLICY, POLICY.to_owned()),
            (CACHE_CONTROL, "no-cache".to_owned()),
            (REFERRER_POLICY, "no-referrer".to_owned()),
            (X_FRAME_OPTIONS, "DENY".to_owned()),
        ];
        Ok((headers, text).into_response())
    }

    /// The id of the client's key; `None` without keys.
    fn admit(&self, request: &Request) -> Result<Option<String>, Rejection> {
        check_origin(request, &self.config.access)?;
        let Some(keys) = &self.keys else {
            return Ok(None);
        };
        let key = check_key(request.headers(), keys)?;
        self.config.tally.key_used(address(request), &key);
        Ok(Some(key))
    }

    /// Checks read access; returns whether the client may also send commands.
    fn looks(&self, request: &Request) -> Result<bool, Rejection> {
        let key = self.admit(request)?;
        Ok(self.may_manage(request, key.as_deref()).is_ok())
    }

    async fn status(&self, may_manage: bool) -> Result<Response, Rejection> {
        let status = self.config.board.status.clone();
        let told = blocking(move || (status.0)()).await;
        let mut told = told.ok_or(Rejection::Broken { what: "look" })?;
        if let Some(object) = told.as_object_mut() {
            let version = env!("CARGO_PKG_VERSION").into();
            object.insert("version".into(), version);
            object.insert("may_manage".into(), may_manage.into());
            object.insert("asks_for_keys".into(), self.keys.is_some().into());
        }
        Ok(json(&told))
    }

    /// The instance that a stage query names.
    fn watched(&self, request: &Request) -> Result<String, Rejection> {
        self.admit(request)?;
        let query = request.uri().query().unwrap_or_default();
        let id = query.strip_prefix("instance=").filter(|id| !id.is_empty());
        id.map(str::to_owned).ok_or_else(|| Rejection::Range {
            param: "instance".into(),
            got: crate::schema::clip(query),
            expected: "the id of an instance".into(),
        })
    }

    async fn stages(&self, id: String) -> Result<Response, Rejection> {
        let limit = WATCHES_MAX;
        let permit = Arc::clone(&self.watches).try_acquire_owned();
        let permit = permit.map_err(|_| Rejection::TooManyRequests { limit })?;
        let look = self.config.board.stages.clone();
        let look = look.ok_or_else(|| Rejection::Invalid {
            reason: "there are no instances here".into(),
        })?;
        let watch = move || {
            let _permit = permit; // the check continues when its client is gone
            look(&id)
        };
        let told = blocking(watch).await;
        let told = told.ok_or(Rejection::Broken { what: "look" })?;
        told.map(|stages| json(&stages))
            .map_err(|error| Rejection::of_callback(&error))
    }

    /// Checks the right to send commands, for a client admitted with `key`.
    fn may_manage(
        &self,
        request: &Request,
        key: Option<&str>,
    ) -> Result<Arc<CommandHandler>, Rejection> {
        let manage = self.config.board.manage.clone();
        let manage = manage.ok_or(Rejection::NoManaging)?;
        if let (Some(keys), Some(id)) = (&self.keys, key) {
            let is_admin = keys.is_admin(id);
            return is_admin.then_some(manage).ok_or(Rejection::NoAdmin);
        }
        let remote = request.extensions().get::<Remote>();
        let ip = remote.map(|remote| remote.0.ip().to_canonical());
        let is_here = ip.is_some_and(|ip: IpAddr| ip.is_loopback());
        is_here.then_some(manage).ok_or(Rejection::NoManaging)
    }

    /// The trees of the texts in a request's `texts`; null for those shown as they are.
    async fn markdown(&self, request: Request) -> Result<Response, Rejection> {
        self.admit(&request)?;
        check_json(&request)?;
        let body = body_in_time(&self.config, request).await?;
        let mut arguments: Value = crate::json::parse(&body, &self.config.limits)?.into();
        let texts: Vec<String> = match serde_json::from_value(arguments["texts"].take()) {
            Ok(texts) => texts,
            Err(error) => {
                let reason = format!("texts: {error}");
                return Err(Rejection::Invalid { reason });
            }
        };
        let parse = move || texts.iter().map(|text| tree(text)).collect::<Vec<_>>();
        let trees = blocking(parse).await;
        let trees = trees.ok_or(Rejection::Broken { what: "parse this" })?;
        Ok(json(&json!({ "trees": trees })))
    }

    async fn manage(&self, request: Request, command: &str) -> Result<Response, Rejection> {
        let key = self.admit(&request)?;
        check_json(&request)?;
        let manage = self.may_manage(&request, key.as_deref())?;
        let body = body_in_time(&self.config, request).await?;
        let arguments: Value = crate::json::parse(&body, &self.config.limits)?.into();
        let command = command.to_owned();
        let done = blocking(move || manage(&command, &arguments)).await;
        let done = done.ok_or(Rejection::Broken { what: "do this" })?;
        done.map(|answer| json(&answer))
            .map_err(|error| Rejection::of_callback(&error))
    }

    fn events(&self, request: &Request) -> Result<Response, Rejection> {
        let id = self.admit(request)?;
        let held = |(keys, id): (&Arc<WatchedKeys>, String)| ClientKey {
            keys: Arc::clone(keys),
            id,
        };
        let query = request.uri().query().unwrap_or_default();
        let after = match query {
            "" => "0",
            query => query.strip_prefix("after=").unwrap_or(query),
        };
        let after: u64 = after.parse().map_err(|_| Rejection::Range {
            param: "after".into(),
            got: crate::schema::clip(after),
            expected: "the number of an event".into(),
        })?;
        let permit = Arc::clone(&self.streams).try_acquire_owned();
        let permit = permit.map_err(|_| Rejection::TooManyRequests { limit: STREAMS_MAX })?;
        let feed = EventFeed {
            seen: after,
            newest: self.config.live.events().subscribe(),
            events: self.config.live.events().clone(),
            phase: self.phase.clone(),
            keep_alive: self.config.times.keep_alive,
            key: self.keys.as_ref().zip(id).map(held),
            has_begun: false,
            is_over: false,
            _permit: permit,
        };
        let pieces = stream::unfold(feed, |mut feed| async {
            let piece = feed.next().await?;
            Some((Ok::<_, Infallible>(piece), feed))
        });
        let headers = [
            (CONTENT_TYPE, "text/event-stream"),
            (CACHE_CONTROL, "no-store"),
        ];
        Ok((headers, Body::from_stream(pieces)).into_response())
    }
}

/// A stream of events to one client.
struct EventFeed {
    events: EventLog,
    /// Number of the last event that was sent.
    seen: u64,
    newest: watch::Receiver<u64>,
    phase: watch::Receiver<ServerPhase>,
    keep_alive: Duration,
    key: Option<ClientKey>,
    has_begun: bool,
    /// The last event was sent.
    is_over: bool,
    _permit: OwnedSemaphorePermit,
}

impl EventFeed {
    /// The next events, or a comment as keep-alive. A revoked key gives an error as the last event.
    /// `None` after it, and at shutdown.
    async fn next(&mut self) -> Option<Bytes> {
        while !self.is_over {
            // Checked before each chunk too: a busy stream never reaches the wait below.
            if self.key.as_ref().is_some_and(ClientKey::is_revoked) {
                self.is_over = true;
                return Some(last_word(&Rejection::Revoked));
            }
            self.newest.borrow_and_update();
            let events = self.events.after(self.seen, PIECE_EVENTS);
            let is_first = !std::mem::replace(&mut self.has_begun, true);
            if let Some(last) = events.last() {
                self.seen = last.seq;
                return Some(piece(&events));
            }
            // Sent at once, so that the client sees the status.
            if is_first {
                return Some(Bytes::from_static(b": begun\n\n"));
            }
            tokio::select! {
                () = reach(&mut self.phase, ServerPhase::Draining) => return None,
                changed = self.newest.changed() => changed.ok()?,
                () = revoked(self.key.as_ref()) => {}
                () = tokio::time::sleep(self.keep_alive) => {
                    return Some(Bytes::from_static(b": alive\n\n"));
                }
            }
        }
        None
    }
}

/// The error event that ends a stream. It has no id: a client resumes after the last numbered
/// event.
fn last_word(rejection: &Rejection) -> Bytes {
    format!("event: error\ndata: {}\n\n", rejection.body()).into()
}

/// Events as SSE, with their numbers as ids.
fn piece(events: &[Event]) -> Bytes {
    let mut out = String::new();
    for event in events {
        let json = serde_json::to_string(event).expect("an event is JSON");
        out += &format!("id: {}\ndata: {json}\n\n", event.seq);
    }
    out.into()
}

/// Runs `work` on a blocking thread; `None` when it panicked or took over [`ANSWER_LIMIT`].
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let work = tokio::task::spawn_blocking(work);
    tokio::time::timeout(ANSWER_LIMIT, work).await.ok()?.ok()
}

fn json(value: &Value) -> Response {
    let headers = [
        (CONTENT_TYPE, "application/json"),
        (CACHE_CONTROL, "no-store"),
    ];
    (StatusCode::OK, headers, value.to_string()).into_response()
}
