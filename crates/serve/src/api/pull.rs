//! `POST /api/pull`: downloads a model into the machine's store, in Ollama's protocol.
//!
//! ```text
//! puller (a blocking thread) --steps--> bounded channel --lines of JSON--> client
//! ```
//!
//! A pull ends when its client disconnects or its key is revoked; the next pull resumes the
//! download. At most [`PULLS_MAX`] pulls run at a time. Pulls that wait for another process to
//! fetch the same model count too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use paceline_base::{CallbackError, hex};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::handlers::{check_admin, client, client_key, named};
use super::no_model::Idle;
use super::{App, json_response};
use crate::config::{Config, PULLS_MAX, PullStep, Puller};
use crate::rejection::Rejection;
use crate::request::ollama::NamedModel;
use paceline_auth::keys::{ClientKey, revoked};

/// Maximum unread steps; the pull blocks then.
const UNREAD_STEPS: usize = 16;

/// Message from the pull's thread to the response.
enum PullMessage {
    Step(PullStep),
    End(Result<bool, CallbackError>),
    /// The last message: the client's key was revoked.
    Revoked,
}

/// `POST /api/pull` of a node that has models.
pub(super) async fn pull(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Rejection> {
    let admin = check_admin(app.keys.as_deref(), &request);
    let key = client_key(app.keys.as_ref(), &client(&request));
    let (named, is_served) = named(&app, request).await?;
    if !is_served {
        admin?;
        return fetch(&app.config, &named, key).await;
    }
    match named.is_stream() {
        false => Ok(json_response(StatusCode::OK, &success())),
        true => Ok(lines([json!({"status": "pulling manifest"}), success()])),
    }
}

fn success() -> Value {
    json!({"status": "success"})
}

/// Fetches a model, if pulls are allowed.
async fn fetch(
    config: &Config,
    named: &NamedModel,
    key: Option<ClientKey>,
) -> Result<Response, Rejection> {
    let Some(puller) = config.puller.clone() else {
        return Err(Rejection::NotDone {
            what: "fetching a model",
            why: "the server was started without --allow-pull",
        });
    };
    let model = named.name()?;
    let permit = Arc::clone(&config.pulls).try_acquire_owned();
    let permit = permit.map_err(|_| Rejection::TooManyPulls { limit: PULLS_MAX })?;
    let mut pulling = PullStream::start(puller, model.to_owned(), (permit, key));
    if named.is_stream() {
        return streamed(pulling, model.to_owned()).await;
    }
    loop {
        if let Some(end) = ended(pulling.next().await, model) {
            return end.map(|()| json_response(StatusCode::OK, &success()));
        }
    }
}

/// A running pull. Dropping it ends the pull within 100 ms, even while it waits for a lock.
struct PullStream {
    told: mpsc::Receiver<PullMessage>,
    /// Set when the response is dropped.
    is_over: Arc<AtomicBool>,
    /// API key of the request.
    key: Option<ClientKey>,
}

impl Drop for PullStream {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl PullStream {
    /// Starts a pull on a blocking thread. The thread holds `permit` until it ends, which may be
    /// after the client left: the permits bound the threads.
    fn start(
        puller: Puller,
        model: String,
        (permit, key): (OwnedSemaphorePermit, Option<ClientKey>),
    ) -> Self {
        let (sender, told) = mpsc::channel(UNREAD_STEPS);
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        tokio::task::spawn_blocking(move || {
            let mut tell = |step| sender.blocking_send(PullMessage::Step(step)).is_ok();
            let end = (puller.0)(&model, &mut tell, &over);
            // Released before the end is sent: the client may start its next pull at once.
            drop(permit);
            // Fails if the client has left.
            let _ = sender.blocking_send(PullMessage::End(end));
        });
        Self { told, is_over, key }
    }

    async fn next(&mut self) -> PullMessage {
        let broken = || PullMessage::End(Err("the pull ended without a result".into()));
        tokio::select! {
            // Checked first: steps may arrive faster than the client reads.
            biased;
            () = revoked(self.key.as_ref()) => PullMessage::Revoked,
            told = self.told.recv() => told.unwrap_or_else(broken),
        }
    }
}

/// The result of a finished pull; `None` while it runs.
fn ended(told: PullMessage, model: &str) -> Option<Result<(), Rejection>> {
    match told {
        PullMessage::Step(_) => None,
        PullMessage::End(end) => Some(checked(end, model)),
        PullMessage::Revoked => Some(Err(Rejection::Revoked)),
    }
}

/// # Errors
/// [`Rejection::NoSuchModel`] for an unknown name, else [`Rejection::Invalid`].
fn checked(end: Result<bool, CallbackError>, model: &str) -> Result<(), Rejection> {
    match end {
        Ok(true) => Ok(()),
        Ok(false) => Err(Rejection::NoSuchModel {
            model: crate::schema::clip(model),
        }),
        Err(error) => Err(Rejection::of_callback(&error)),
    }
}

/// The pull as lines of JSON; a failure before the first step has an HTTP status of its own.
async fn streamed(mut pulling: PullStream, model: String) -> Result<Response, Rejection> {
    let first = match pulling.next().await {
        PullMessage::Step(step) => line(&progress(&step, &model)),
        last => {
            ended(last, &model).transpose()?;
            return Ok(lines([json!({"status": "pulling manifest"}), success()]));
        }
    };
    let head = line(&json!({"status": "pulling manifest"}));
    let head = [head, first].concat();
    let state = Some((pulling, model));
    let rest = stream::unfold(state, |state| async move {
        let (mut pulling, model) = state?;
        let (bytes, is_over) = said(pulling.next().await, &model);
        Some((bytes, (!is_over).then_some((pulling, model))))
    });
    let head = stream::once(async move { head });
    let all = stream::StreamExt::chain(head, rest);
    let all = stream::StreamExt::map(all, |bytes| {
        Ok::<Bytes, std::convert::Infallible>(bytes.into())
    });
    let kind = [(CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(all)).into_response())
}

/// A message as lines of JSON, and whether the pull is over.
fn said(told: PullMessage, model: &str) -> (Vec<u8>, bool) {
    if let PullMessage::Step(step) = &told {
        return (line(&progress(step, model)), false);
    }
    if let Some(Err(rejection)) = ended(told, model) {
        return (line(&json!({"error": rejection.to_string()})), true);
    }
    let last = ["verifying sha256 digest", "writing manifest", "success"];
    let last = last.map(|status| line(&json!({ "status": status })));
    (last.concat(), true)
}

/// A step in Ollama's form. Clients distinguish files by the digest. It is the digest of the file's
/// label, because a file's hash is known only when it is complete.
fn progress(step: &PullStep, model: &str) -> Value {
    let hash = hex(&Sha256::digest(format!("{model}\n{}", step.part)));
    let mut line = json!({
        "status": format!("pulling {}", &hash[..12]),
        "digest": format!("sha256:{hash}"),
        "completed": step.done,
    });
    if let Some(total) = step.total {
        line["total"] = total.into();
    }
    line
}

fn line(value: &Value) -> Vec<u8> {
    format!("{value}\n").into_bytes()
}

fn lines<const N: usize>(values: [Value; N]) -> Response {
    let text: Vec<u8> = values.iter().flat_map(line).collect();
    let kind = [(CONTENT_TYPE, "application/x-ndjson")];
    (kind, text).into_response()
}

/// `POST /api/pull` of a node without models.
pub(super) async fn pull_idle(
    State(idle): State<Arc<Idle>>,
    request: Request,
) -> Result<Response, Rejection> {
    check_admin(idle.keys.as_deref(), &request)?;
    let key = client_key(idle.keys.as_ref(), &client(&request));
    let named = super::handlers::read_name(&idle.config, request).await?;
    fetch(&idle.config, &named, key).await
}
