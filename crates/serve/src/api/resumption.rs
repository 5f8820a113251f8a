//! Resumes streamed responses for clients that reconnect, at this node or another.
//!
//! An event's id is `ANSWER:NUMBER`. A client sends it as `Last-Event-ID` with a request to the
//! same endpoint, or calls `GET /v1/responses/{id}?stream=true&starting_after=NUMBER`. The journal
//! has the request, which is parsed again, and the replies so far. They are rendered again without
//! the events that the client has. Then the engine continues after the last token.

use std::sync::Arc;

use axum::http::{self, HeaderMap, Method};
use axum::response::Response;
use paceline_engine::{GenerationRequest, Reply};
use serde::Deserialize;
use serde_json::Value;

use super::handlers::{RequestMeta, parse_body, response_builder, streamed};
use super::{App, ENDPOINTS, Endpoint};
use crate::access::ClientIdentity;
use crate::concurrency::ConcurrencyPermit;
use crate::journal::{
    ChoiceReply, Journal, JournalAbsence, JournalHead, JournalReader, Mirror, key_of,
};
use crate::rejection::Rejection;
use crate::render::ResponseBuilder;
use crate::request::{ModelRequest, ParsedRequest};
use crate::response_stream::{RequestContext, ResponseStream};
use crate::schema::clip;
use crate::store::StoredResponse;
use crate::stream::{KeepAliveRequest, Recorder, SseStream};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StreamPosition {
    id: String,
    /// Number of the last event received; `None` without one.
    event: Option<u64>,
}

/// Endpoints with resumable streams: those whose clients know event ids.
const fn has_ids(endpoint: Endpoint) -> bool {
    matches!(
        endpoint,
        Endpoint::Chat | Endpoint::Completion | Endpoint::Response
    )
}

/// The client's position, from `Last-Event-ID`.
///
/// # Errors
/// [`Rejection::Type`] for a malformed header.
pub(super) fn last_event(
    headers: &HeaderMap,
    endpoint: Endpoint,
) -> Result<Option<StreamPosition>, Rejection> {
    let header = headers.get("last-event-id").filter(|_| has_ids(endpoint));
    let Some(header) = header.filter(|header| !header.is_empty()) else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(header.as_bytes());
    let parsed = text.split_once(':').and_then(|(id, number)| {
        let (id, event) = (id.to_owned(), Some(number.parse().ok()?));
        Some(StreamPosition { id, event })
    });
    parsed.map(Some).ok_or_else(|| Rejection::Type {
        param: "Last-Event-ID".into(),
        got: format!("{:?}", clip(&text)),
        expected: "the id of an event of a stream, such as 4f...a2:17".into(),
    })
}

/// The position in a query of `GET /v1/responses/{id}`; `None` where it asks for no stream.
///
/// # Errors
/// [`Rejection::Type`] for a malformed number.
pub(super) fn of_response(id: &str, query: &str) -> Result<Option<StreamPosition>, Rejection> {
    let get = |name: &str| {
        let mut fields = query.split('&').filter_map(|field| field.split_once('='));
        fields.find(|(known, _)| *known == name).map(|(_, v)| v)
    };
    if get("stream") != Some("true") {
        return Ok(None);
    }
    let event = get("starting_after").map(|text| {
        text.parse().map_err(|_| Rejection::Type {
            param: "starting_after".into(),
            got: format!("{:?}", clip(text)),
            expected: "the sequence_number of an event".into(),
        })
    });
    let id = id.strip_prefix("resp_").unwrap_or(id).to_owned();
    let event = event.transpose()?;
    Ok(Some(StreamPosition { id, event }))
}

/// Id of the journal that a request resumes; `None` for other requests.
pub(super) fn answer_of<B>(request: &http::Request<B>) -> Option<String> {
    let uri = request.uri();
    let last = match (request.method(), uri.path().strip_prefix("/v1/responses/")) {
        (&Method::GET, Some(id)) => of_response(id, uri.query().unwrap_or_default()),
        (&Method::POST, None) => {
            let endpoint = ENDPOINTS.iter().find(|(path, _)| *path == uri.path());
            last_event(request.headers(), endpoint?.1)
        }
        _ => return None,
    };
    Some(last.ok()??.id)
}

/// The mirror that looks up the response `id` at other nodes; `None` where no node can have it.
pub(super) fn mirror_for(app: &App, id: &str) -> Option<Arc<dyn Mirror>> {
    // Any other id may be a journal's, which would be released.
    let mirror = app.config.journals.mirror()?;
    id.starts_with("resp_").then_some(mirror)
}

/// A response stored at another node, if this client created it.
pub(super) async fn stored_elsewhere(
    mirror: Arc<dyn Mirror>,
    id: &str,
    client: &ClientIdentity,
) -> Option<StoredResponse> {
    let (name, key) = (id.to_owned(), key_of(client));
    let asked = key.clone();
    let find = tokio::task::spawn_blocking(move || mirror.find(&name, asked.as_deref()));
    let stored: StoredResponse = serde_json::from_slice(&find.await.ok()?.copy()?).ok()?;
    (stored.id == id && key_of(&stored.client) == key).then_some(stored)
}

/// The field of a body that names an earlier response.
#[derive(Deserialize)]
struct PreviousResponse {
    previous_response_id: Option<String>,
}

/// The first line of a response's journal; `None` for responses without a journal.
pub(super) fn head(
    app: &App,
    ask: &ModelRequest,
    given: &RequestMeta,
    (endpoint, body): (Endpoint, Vec<u8>),
    client: &ClientIdentity,
) -> Option<JournalHead> {
    ask.stream.filter(|_| has_ids(endpoint))?;
    let earlier = (endpoint == Endpoint::Response)
        .then(|| serde_json::from_slice::<PreviousResponse>(&body).ok())
        .flatten();
    let earlier = earlier.and_then(|earlier| earlier.previous_response_id);
    let earlier = earlier.and_then(|id| app.store.get(&id, client));
    Some(JournalHead {
        id: given.id.clone(),
        endpoint,
        body: String::from_utf8(body).ok()?,
        seed: given.seed,
        unix_s: given.unix_s,
        model: app.model.id.clone(),
        key: key_of(client),
        earlier: earlier.map(|earlier| (*earlier).clone()),
    })
}

/// Begins a journal; `None` where there is no room for one.
pub(super) fn record(app: &App, head: JournalHead) -> Option<Recorder> {
    let (journals, now) = (&app.config.journals, app.config.clock.now);
    let journal = journals.begin(head, app.config.bounds(), now())?;
    let (reader, _) = journal.take_over().ok()?;
    Some(recorder(app, journal, reader, None))
}

fn recorder(
    app: &App,
    journal: Arc<Journal>,
    reader: JournalReader,
    after: Option<u64>,
) -> Recorder {
    Recorder {
        journal,
        reader,
        mirror: app.config.journals.mirror(),
        journals: app.config.journals.clone(),
        bounds: app.config.bounds(),
        events: app.config.live.events().clone(),
        now: app.config.clock.now,
        next: 0,
        after,
    }
}

/// Resumes a stream after the client's last event.
///
/// # Errors
/// [`Rejection::NoAnswer`], [`Rejection::Unreached`], [`Rejection::Behind`]; as for a new request.
pub(super) async fn resume(
    app: &Arc<App>,
    last: StreamPosition,
    (terms, place, client): (RequestContext, ConcurrencyPermit, ClientIdentity),
) -> Result<Response, Rejection> {
    let (bounds, now) = (app.config.bounds(), app.config.clock.now);
    let journals = &app.config.journals;
    let id = || clip(&last.id);
    let nowhere = || Rejection::NoAnswer {
        id: id(),
        stay_s: bounds.stay.as_secs(),
    };
    let journal = match journals.find(&last.id, &client, bounds, now).await {
        Ok(journal) if app.model.is_called(&journal.head.model) => journal,
        Ok(_) | Err(JournalAbsence::Nowhere) => return Err(nowhere()),
        Err(JournalAbsence::Unsure) => return Err(Rejection::Unreached { id: id() }),
    };
    let taken = ResumedJournal::from(app, journal, &client, last.event).await?;
    let mut replayed = taken.replay(app, (&terms, client.clone()));
    if replayed.lacks(last.event) {
        let behind = || Rejection::Behind { id: id() };
        let short = &replayed.recorder.journal;
        let longer = journals.find_longer(short, bounds, now).await;
        let taken =
            ResumedJournal::from(app, longer.ok_or_else(behind)?, &client, last.event).await?;
        replayed = taken.replay(app, (&terms, client));
        if replayed.lacks(last.event) {
            return Err(behind());
        }
    }
    let answer = ResponseStream::start(&app.service, &app.metrics, replayed.requests, terms)?;
    Ok(streamed(SseStream {
        answer,
        builder: replayed.telling,
        keep_alive: app.config.times.keep_alive,
        early: None,
        past: Some(replayed.past),
        recorder: Some(replayed.recorder),
        beat: KeepAliveRequest::default(),
        _place: place,
    }))
}

/// A journal that this node now owns, and its request, parsed again.
struct ResumedJournal {
    recorder: Recorder,
    ask: ModelRequest,
    given: RequestMeta,
    lines: Vec<ChoiceReply>,
}

impl ResumedJournal {
    /// Takes over a journal for a client that has the events up to `after`.
    async fn from(
        app: &Arc<App>,
        journal: Arc<Journal>,
        client: &ClientIdentity,
        after: Option<u64>,
    ) -> Result<Self, Rejection> {
        let what = "read the answer's journal";
        let (reader, lines) = journal
            .take_over()
            .map_err(|_| Rejection::Broken { what })?;
        let recorder = recorder(app, Arc::clone(&journal), reader, after);
        let given = RequestMeta {
            id: journal.head.id.clone(),
            seed: journal.head.seed,
            unix_s: journal.head.unix_s,
        };
        let ask = reparse(app, journal, client.clone(), given.clone()).await?;
        Ok(Self {
            recorder,
            ask,
            given,
            lines,
        })
    }

    /// Renders the journal's replies again.
    fn replay(
        mut self,
        app: &App,
        (terms, client): (&RequestContext, ClientIdentity),
    ) -> JournalReplay {
        let mut telling = response_builder(app, &mut self.ask, self.given, (terms, client));
        let requests = remaining_requests(self.ask.requests, &self.lines);
        let mut past = telling.start(None);
        for (choice, reply) in self.lines {
            past.extend(telling.more(choice, reply));
        }
        JournalReplay {
            recorder: self.recorder,
            telling,
            requests,
            past,
        }
    }
}

/// A response rebuilt from its journal.
struct JournalReplay {
    recorder: Recorder,
    telling: ResponseBuilder,
    /// The remaining request of each choice.
    requests: Vec<Option<(GenerationRequest, Vec<u32>)>>,
    /// The rendered events, from number 0.
    past: Vec<Value>,
}

impl JournalReplay {
    /// Whether the client has events, up to `after`, that cannot be reproduced. A single unfinished
    /// choice gives the same tokens, and so the same events. Tokens of several choices interleave
    /// in the order of computation, so equal numbers would be other events.
    fn lacks(&self, after: Option<u64>) -> bool {
        let under_way = self.requests.iter().flatten().count();
        under_way > 1 && after.is_some_and(|after| after >= self.past.len() as u64)
    }
}

async fn reparse(
    app: &Arc<App>,
    journal: Arc<Journal>,
    client: ClientIdentity,
    given: RequestMeta,
) -> Result<ModelRequest, Rejection> {
    let permit = Arc::clone(&app.parsing).acquire_owned().await;
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let head = &journal.head;
        if let Some(mut earlier) = head.earlier.clone() {
            earlier.client = client.clone();
            app.store.put(earlier);
        }
        parse_body(&app, head.body.as_bytes(), &client, (head.endpoint, &given))
    });
    let what = "understand the request again";
    match work.await.map_err(|_| Rejection::Broken { what })?? {
        (ParsedRequest::Generation(ask), _) => Ok(*ask),
        _ => Err(Rejection::Broken { what }),
    }
}

/// Each choice's request with the tokens it already has; `None` for a complete choice.
fn remaining_requests(
    requests: Vec<GenerationRequest>,
    past: &[ChoiceReply],
) -> Vec<Option<(GenerationRequest, Vec<u32>)>> {
    let of = |choice: usize| {
        let own = past.iter().filter(move |(other, _)| *other == choice);
        own.map(|(_, reply)| reply)
    };
    let left = requests.into_iter().enumerate().map(|(choice, request)| {
        let is_over = of(choice).any(|reply| matches!(reply, Reply::Finished { .. }));
        let tokens = of(choice).filter_map(|reply| match reply {
            Reply::Token { token, .. } => Some(*token),
            _ => None,
        });
        (!is_over).then(|| (request, tokens.collect()))
    });
    left.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_has_is_read_strictly() {
        let header = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("last-event-id", text.parse().unwrap());
            last_event(&headers, Endpoint::Chat)
        };
        let last = |id: &str, event| {
            let id = id.to_owned();
            Some(StreamPosition { id, event })
        };
        assert_eq!(header("ab:17").unwrap(), last("ab", Some(17)));
        assert_eq!(header("").unwrap(), None);
        for bad in ["ab", "ab:", "ab:-1", "ab:99999999999999999999", "ab:1:2"] {
            assert!(header(bad).is_err(), "{bad}");
        }
        let of = |query| of_response("resp_ab", query);
        assert_eq!(of("").unwrap(), None);
        assert_eq!(of("starting_after=3").unwrap(), None);
        assert_eq!(of("stream=true").unwrap(), last("ab", None));
        assert_eq!(
            of("include[]=x&stream=true&starting_after=3").unwrap(),
            last("ab", Some(3))
        );
        assert!(of("stream=true&starting_after=x").is_err());
    }
}
