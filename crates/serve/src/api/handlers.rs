//! Handlers of requests with a body: read it within limits, parse it, and send the response.
//!
//! Streaming requests continue in [`stream`](crate::stream), reconnecting clients in `resumption`,
//! and embeddings in `embeddings`. The Ollama endpoints that show and remove models are here too.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, ORIGIN,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use paceline_engine::State as Readiness;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};

use super::{App, Endpoint, embeddings, fresh_seed, json_response, pages, random_hex, resumption};
use crate::access::ClientIdentity;
use crate::concurrency::ConcurrencyPermit;
use crate::config::{Config, Removal};
use crate::events::Kind;
use crate::journal::JournalHead;
use crate::json;
use crate::log;
use crate::model::ServedModel;
use crate::phase::ServerPhase;
use crate::rejection::Rejection;
use crate::render::anthropic::Anthropic;
use crate::render::llama::Infill;
use crate::render::ollama::Ollama;
use crate::render::openai::{OpenAi, OpenAiOptions};
use crate::render::responses::{ResponseKeep, Responses};
use crate::render::{DialectWriter, ResponseBuilder, ResponseFrame};
use crate::request::ollama::NamedModel;
use crate::request::{ApiDialect, ModelRequest, ParsedRequest, RequestParser};
use crate::response_stream::{RequestContext, ResponseStream};
use crate::schema::{self, FieldWarnings};
use crate::stream::{KeepAliveRequest, Recorder, SseStream};
use paceline_auth::keys::{ClientKey, WatchedKeys};

/// Maximum bytes of a rejected body to drain before replying; many clients read only after sending
/// everything.
const DRAINED_BYTES: usize = 64 << 20;

/// A parsed request with its warnings for the client.
struct ParsedBody {
    understood: ParsedRequest,
    warnings: Vec<String>,
    body: Vec<u8>,
    given: RequestMeta,
}

/// Inputs of a response besides the request body: equal inputs give equal responses.
#[derive(Clone, Debug)]
pub(super) struct RequestMeta {
    /// Id of the response: 128 random bits.
    pub(super) id: String,
    /// Seed for requests without one.
    pub(super) seed: u64,
    pub(super) unix_s: u64,
}

impl RequestMeta {
    fn fresh(app: &App) -> Result<Self, Rejection> {
        Ok(Self {
            id: random_hex()?,
            seed: fresh_seed()?,
            unix_s: (app.config.clock.unix_s)(),
        })
    }
}

pub(super) async fn answer(
    app: Arc<App>,
    request: Request,
    endpoint: Endpoint,
) -> Result<Response, Rejection> {
    let client = client(&request);
    let mut terms = request_context(&app, &client);
    check_head(&app.config, &request)?;
    check_ready(&app)?;
    app.check_ability(endpoint)?;
    let place = app.places.take(&client, app.has_several_clients(&client))?;
    if let Some(last) = resumption::last_event(request.headers(), endpoint)? {
        body_in_time(&app.config, request).await?; // the journal has the one that counts
        return resumption::resume(&app, last, (terms, place, client)).await;
    }
    let limit_s = terms.deadline_s;
    let reading = tokio::select! {
        () = &mut terms.deadline => return Err(Rejection::Deadline { limit_s }),
        reading = read(&app, request, &client, endpoint) => reading?,
    };
    let ParsedBody {
        understood,
        warnings,
        body,
        given,
    } = reading;
    let response = match understood {
        ParsedRequest::Immediate(value) => json_response(StatusCode::OK, &value),
        ParsedRequest::Embed(ask) => embeddings::respond(&app, ask, terms, place).await?,
        ParsedRequest::Generation(ask) => {
            let head = resumption::head(&app, &ask, &given, (endpoint, body), &client);
            respond(&app, *ask, given, (terms, place, client), head).await?
        }
    };
    Ok(warned(response, &warnings))
}

/// Deadline, limits and API key for a response to `client`; the deadline counts from now.
pub(super) fn request_context(app: &App, client: &ClientIdentity) -> RequestContext {
    let limit = app.config.times.request;
    RequestContext {
        deadline: Box::pin(sleep(limit)),
        deadline_s: limit.as_secs(),
        phase: app.phase.clone(),
        context: app.model.context,
        unread_replies: app.config.limits.unread_replies,
        key: client_key(app.keys.as_ref(), client),
        asked: (app.config.clock.now)(),
        now: app.config.clock.now,
    }
}

/// The client's API key, if keys are in use.
pub(super) fn client_key(
    keys: Option<&Arc<WatchedKeys>>,
    client: &ClientIdentity,
) -> Option<ClientKey> {
    let (Some(keys), ClientIdentity::Key(id)) = (keys, client) else {
        return None;
    };
    let (keys, id) = (Arc::clone(keys), id.clone());
    Some(ClientKey { keys, id })
}

pub(super) fn client(request: &Request) -> ClientIdentity {
    let client = request.extensions().get::<ClientIdentity>();
    client.cloned().unwrap_or(ClientIdentity::Anybody)
}

/// Adds a `warning` header (RFC 7234) for each ignored field.
fn warned(mut response: Response, warnings: &[String]) -> Response {
    for warning in warnings {
        let value = HeaderValue::from_str(&format!("299 paceline \"{warning}\""));
        if let Ok(value) = value {
            response.headers_mut().append("warning", value);
        }
    }
    response
}

/// Checks type, encoding and length. Programs may call the body what they like, as `curl -d` does:
/// JSON is assumed. Web pages, which send `Origin`, may not: a form of theirs needs no permission.
pub(super) fn check_head(config: &Config, request: &Request) -> Result<(), Rejection> {
    let headers = request.headers();
    let value = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let is_of_page = headers.contains_key(ORIGIN);
    let text = String::from_utf8_lossy(value.unwrap_or_default());
    let essence = text.split(';').next().unwrap_or_default().trim();
    if is_of_page && !essence.eq_ignore_ascii_case("application/json") {
        let got = crate::schema::clip(&text);
        return Err(Rejection::MediaType { got });
    }
    if let Some(encoding) = headers.get(CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        let got = crate::schema::clip(&String::from_utf8_lossy(encoding.as_bytes()));
        return Err(Rejection::Encoded { got });
    }
    let limit = config.limits.body_bytes;
    // Shorter bodies are drained first: see `body`.
    let is_far_over = length(headers).is_some_and(|length| length > limit.max(DRAINED_BYTES));
    if is_far_over {
        return Err(Rejection::LongBody { limit });
    }
    Ok(())
}

fn length(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

pub(super) fn check_ready(app: &App) -> Result<(), Rejection> {
    if *app.phase.borrow() != ServerPhase::Running {
        return Err(Rejection::ShuttingDown);
    }
    match app.service.status().state {
        Readiness::Ready | Readiness::Recovering(_) => Ok(()),
        Readiness::Loading => Err(Rejection::Loading),
        Readiness::Failed(reason) => Err(Rejection::Unavailable { reason }),
    }
}

/// Reads and parses the body; the parser runs on a blocking thread.
async fn read(
    app: &Arc<App>,
    request: Request,
    client: &ClientIdentity,
    endpoint: Endpoint,
) -> Result<ParsedBody, Rejection> {
    let body = body_in_time(&app.config, request).await?;
    let permit = Arc::clone(&app.parsing).acquire_owned().await;
    let permit = permit.expect("the semaphore is never closed");
    let (app, client) = (Arc::clone(app), client.clone());
    let work = tokio::task::spawn_blocking(move || {
        let given = RequestMeta::fresh(&app)?;
        let understood = parse_body(&app, &body, &client, (endpoint, &given));
        drop(permit);
        let (understood, warnings) = understood?;
        Ok(ParsedBody {
            understood,
            warnings,
            body,
            given,
        })
    });
    let what = "read the request";
    work.await.map_err(|_| Rejection::Broken { what })?
}

/// Reads the body within the limits on bytes and time.
pub(crate) async fn body_in_time(config: &Config, request: Request) -> Result<Vec<u8>, Rejection> {
    let patience = config.times.body;
    let limit_s = patience.as_secs();
    let body = timeout(patience, body(request, config.limits.body_bytes)).await;
    body.map_err(|_| Rejection::SlowBody { limit_s })?
}

/// Parses a body as a request of `endpoint`, with warnings for the client.
pub(super) fn parse_body(
    app: &App,
    body: &[u8],
    client: &ClientIdentity,
    (endpoint, given): (Endpoint, &RequestMeta),
) -> Result<(ParsedRequest, Vec<String>), Rejection> {
    let body = json::parse(body, &app.config.limits)?;
    let notes = FieldWarnings::new(app.config.is_lenient);
    let reader = RequestParser {
        model: &app.model,
        calling: &app.calling,
        limits: &app.config.limits,
        unix_s: given.unix_s,
        fresh_seed: given.seed,
        longest_token: app.longest_token,
        notes: &notes,
        store: &app.store,
        client,
    };
    let ask = |ask: ModelRequest| ParsedRequest::Generation(Box::new(ask));
    let understood = match endpoint {
        Endpoint::Chat => reader.chat(body).map(ask),
        Endpoint::Completion => reader.completion(body).map(ask),
        Endpoint::Response => reader.response(body).map(ask),
        Endpoint::Message => reader.anthropic(body).map(ask),
        Endpoint::Infill => reader.infill(body).map(ask),
        Endpoint::OllamaChat => reader.ollama_chat(body),
        Endpoint::OllamaGenerate => reader.ollama_generate(body),
        Endpoint::CountTokens => reader.count_tokens(body).map(ParsedRequest::Immediate),
        Endpoint::Tokenize => reader.tokenize(body).map(ParsedRequest::Immediate),
        Endpoint::Detokenize => reader.detokenize(body).map(ParsedRequest::Immediate),
        Endpoint::Embeddings => reader
            .embeddings(body, app.embedder()?)
            .map(ParsedRequest::Embed),
        Endpoint::OllamaEmbed => reader
            .ollama_embed(body, app.embedder()?)
            .map(ParsedRequest::Embed),
        Endpoint::OllamaEmbeddings => reader
            .ollama_embeddings(body, app.embedder()?)
            .map(ParsedRequest::Embed),
        Endpoint::ApplyTemplate => reader.apply_template(body).map(ParsedRequest::Immediate),
    }?;
    Ok((understood, notes.into_warnings()))
}

/// Reads a body of at most `limit` bytes. A longer one is drained up to [`DRAINED_BYTES`], because
/// a client that reads only after sending would see a broken connection.
async fn body(request: Request, limit: usize) -> Result<Vec<u8>, Rejection> {
    let length = length(request.headers());
    let mut pieces = request.into_body().into_data_stream();
    let mut body = Vec::with_capacity(length.unwrap_or(0).min(limit));
    let mut read = 0;
    while let Some(piece) = pieces.next().await {
        let piece: Bytes = piece.map_err(|error| Rejection::BrokenBody {
            reason: error.to_string(),
        })?;
        read += piece.len();
        if read <= limit {
            body.extend_from_slice(&piece);
        } else if read > limit.max(DRAINED_BYTES) {
            break;
        } else {
            body = Vec::new();
        }
    }
    if read > limit {
        return Err(Rejection::LongBody { limit });
    }
    Ok(body)
}

/// Submits the request and responds. With a head, a streamed response has a journal.
async fn respond(
    app: &App,
    mut ask: ModelRequest,
    given: RequestMeta,
    (terms, place, client): (RequestContext, ConcurrencyPermit, ClientIdentity),
    head: Option<JournalHead>,
) -> Result<Response, Rejection> {
    let telling = response_builder(app, &mut ask, given, (&terms, client));
    log::prompts(&app.model.tokenizer, &ask.requests);
    let requests = ask.requests.into_iter();
    let requests = requests
        .map(|request| Some((request, Vec::new())))
        .collect();
    let answer = ResponseStream::start(&app.service, &app.metrics, requests, terms)?;
    if ask.stream.is_some() {
        let recorder = head.and_then(|head| resumption::record(app, head));
        return stream(app, answer, telling, (place, recorder)).await;
    }
    whole(answer, telling).await
}

/// The response builder for the request's dialect.
pub(super) fn response_builder(
    app: &App,
    ask: &mut ModelRequest,
    given: RequestMeta,
    (terms, client): (&RequestContext, ClientIdentity),
) -> ResponseBuilder {
    let writer = writer(app, ask, given, client);
    let sizes = (ask.prompt_tokens, ask.n);
    let choices = std::mem::take(&mut ask.choices);
    ResponseBuilder::new(
        writer,
        choices,
        sizes,
        (terms.asked, terms.now),
        &app.metrics,
    )
}

/// The writer for the request's dialect.
fn writer(
    app: &App,
    ask: &ModelRequest,
    given: RequestMeta,
    client: ClientIdentity,
) -> Box<dyn DialectWriter> {
    let frame = ResponseFrame {
        id: given.id,
        created_unix_s: given.unix_s,
        model: app.model.id.clone(),
        fingerprint: app.model.fingerprint_of(app.service.numbers()),
    };
    let stops = || {
        ask.requests
            .first()
            .map_or(vec![], |first| first.stop.clone())
    };
    match &ask.dialect {
        ApiDialect::OpenAi(kind) => {
            let mut requests = ask.requests.iter();
            let shape = OpenAiOptions {
                kind: kind.clone(),
                has_logprobs: requests.any(|request| request.logprobs.is_some()),
                has_usage: ask.stream.is_some_and(|options| options.has_usage),
                n: ask.n,
                choices: ask.requests.len(),
            };
            Box::new(OpenAi::new(frame, shape, Arc::clone(&app.model.tokenizer)))
        }
        ApiDialect::Anthropic { shows_thinking } => {
            Box::new(Anthropic::new(frame, stops(), *shows_thinking))
        }
        ApiDialect::Ollama { kind, model } => {
            Box::new(Ollama::new(*kind, model.clone(), frame.created_unix_s))
        }
        ApiDialect::Responses(terms) => {
            let store = Arc::clone(&app.store);
            let keeper = ResponseKeep { store, client };
            Box::new(Responses::new(frame, (**terms).clone(), keeper))
        }
        ApiDialect::Infill => Box::new(Infill::new(frame, stops())),
    }
}

async fn whole(
    mut answer: ResponseStream,
    mut telling: ResponseBuilder,
) -> Result<Response, Rejection> {
    while !answer.is_complete() {
        let (choice, reply) = answer.next().await?;
        telling.collect(choice, reply);
    }
    Ok(json_response(StatusCode::OK, &telling.whole()))
}

async fn stream(
    app: &App,
    mut answer: ResponseStream,
    telling: ResponseBuilder,
    (place, recorder): (ConcurrencyPermit, Option<Recorder>),
) -> Result<Response, Rejection> {
    let early = timeout(app.config.times.first_reply, answer.next()).await;
    let events = SseStream {
        early: early.ok().transpose()?,
        past: None,
        answer,
        builder: telling,
        keep_alive: app.config.times.keep_alive,
        recorder,
        beat: KeepAliveRequest::default(),
        _place: place,
    };
    Ok(streamed(events))
}

pub(super) fn streamed(events: SseStream) -> Response {
    let headers = [
        (CONTENT_TYPE, events.builder.framing().content_type()),
        (CACHE_CONTROL, "no-cache"),
        // Disables nginx's buffering.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let beat = Extension(events.beat.clone());
    (headers, beat, events.into_body()).into_response()
}

/// Parses a body that names a model; also whether it is the served one.
pub(super) async fn named(app: &App, request: Request) -> Result<(NamedModel, bool), Rejection> {
    let named = read_name(&app.config, request).await?;
    let is_served = named.name().is_ok_and(|name| app.model.is_called(name));
    Ok((named, is_served))
}

/// Parses a body that names a model.
pub(super) async fn read_name(config: &Config, request: Request) -> Result<NamedModel, Rejection> {
    check_head(config, &request)?;
    let body = body_in_time(config, request).await?;
    let body: Map<String, Value> = json::parse(&body, &config.limits)?;
    schema::read(body, &FieldWarnings::new(config.is_lenient))
}

/// `POST /api/show`.
pub(super) async fn show(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, Rejection> {
    let (named, is_served) = named(&app, request).await?;
    if !is_served {
        return Err(Rejection::Model {
            model: named.name().unwrap_or_default().to_owned(),
            served: app.model.id.clone(),
        });
    }
    let model = &app.model;
    let architecture = model.about.architecture.as_str();
    let mut info = Map::new();
    info.insert("general.architecture".into(), architecture.into());
    info.insert(
        "general.parameter_count".into(),
        model.about.parameters.into(),
    );
    info.insert(
        format!("{architecture}.context_length"),
        model.context.into(),
    );
    let body = json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": pages::details(model),
        "model_info": info,
        "capabilities": app.capabilities(),
        "modified_at": crate::render::ollama::rfc3339(model.created_unix_s),
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// `DELETE /api/delete`: removes a model from the machine's store, where that was allowed.
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    served: Option<Extension<ServedNames>>,
    request: Request,
) -> Result<Response, Rejection> {
    let Some(remover) = app.config.remover.clone() else {
        return Err(Rejection::NotDone {
            what: "removing a model",
            why: "the server was started without --allow-delete",
        });
    };
    check_admin(app.keys.as_deref(), &request)?;
    let client = super::address(&request);
    let (named, is_served) = named(&app, request).await?;
    let model = named.name()?.to_owned();
    if is_served {
        return Err(Rejection::InUse { model });
    }
    let Extension(served) = served.unwrap_or_else(|| Extension(ServedNames::of([&app.model])));
    let name = model.clone();
    let removed = tokio::task::spawn_blocking(move || (remover.0)(&name, &served.0)).await;
    let what = "remove the model";
    match removed.map_err(|_| Rejection::Broken { what })? {
        Ok(Removal::Done) => {
            app.config.live.events().put(Kind::Managed {
                action: "model_removed",
                subject: model,
                by: Some(client),
            });
            Ok(StatusCode::OK.into_response())
        }
        Ok(Removal::NotKept) => Err(Rejection::NotKept { model }),
        Ok(Removal::InUse) => Err(Rejection::InUse { model }),
        Err(error) => Err(Rejection::of_callback(&error)),
    }
}

/// All names of all served models. One model's API knows only its own names, so a server with
/// several adds this to the request.
#[derive(Clone, Debug)]
pub(super) struct ServedNames(Arc<[String]>);

impl ServedNames {
    pub(super) fn of<'a>(models: impl IntoIterator<Item = &'a ServedModel>) -> Self {
        let names = models.into_iter().flat_map(ServedModel::names);
        Self(names.map(str::to_owned).collect())
    }
}

/// Checks the right to manage models: an admin's key, if keys are in use.
pub(super) fn check_admin(keys: Option<&WatchedKeys>, request: &Request) -> Result<(), Rejection> {
    let Some(keys) = keys else { return Ok(()) };
    match request.extensions().get() {
        Some(ClientIdentity::Key(id)) if keys.is_admin(id) => Ok(()),
        _ => Err(Rejection::NoAdmin),
    }
}

impl App {
    /// The model's capabilities as Ollama names them.
    fn capabilities(&self) -> Vec<&'static str> {
        let notes = FieldWarnings::default();
        let reader = RequestParser {
            model: &self.model,
            calling: &self.calling,
            limits: &self.config.limits,
            unix_s: 0,
            fresh_seed: 0,
            longest_token: self.longest_token,
            notes: &notes,
            store: &self.store,
            client: &ClientIdentity::Anybody,
        };
        if self.service.embedder().is_some() {
            return vec!["embedding"];
        }
        let mut all = vec!["completion"];
        if reader.hole_tokens().is_some() {
            all.push("insert");
        }
        all.extend(self.calling.has_calls().then_some("tools"));
        all.extend(self.calling.reasons().then_some("thinking"));
        all
    }
}
