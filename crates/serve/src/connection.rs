//! Connection handling: accepts up to a limit, and closes connections whose client is silent or
//! reads nothing.
//!
//! ```text
//! Fresh --first bytes--> Head --request--> Busy --answer sent--> Idle --first bytes--> Head
//!   headers deadline      headers deadline   none                  idle time
//! ```
//!
//! With TLS, the handshake is part of `Fresh`. It counts against the deadline of the first headers,
//! and as a connection without a key.
//!
//! At the limit, a new connection closes the one that is idle for longest. Connections without a
//! valid key go first, so a client that only holds connections open cannot lock others out.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response, Version};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::access::{LocalAddress, Remote, UrlScheme};
use crate::config::Timeouts;
use crate::phase::{ServerPhase, reach};
use crate::stream::KeepAliveRequest;
use paceline_auth::tls::{ClientStream, ServerProtocol};

/// Maximum bytes of a request line with headers. Eight times the limit of common servers; keys and
/// cookies of other programs on `localhost` are included.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Retry interval of `accept` when the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Maximum requests of a connection without a valid key, if keys are in use: monitors send one or a
/// few per connection.
const UNTRUSTED_REQUESTS: usize = 8;

/// Time and bytes to read after the last byte of a response. An immediate close could destroy the
/// response in transit.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;

/// Send buffer of a connection. Linux defaults to megabytes, which hold ten thousand tokens. A
/// client that reads nothing would keep its permit until all of them are computed. The kernel
/// doubles the value for its own bookkeeping.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// Interval of probes whether a half-closed client has left or only waits.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Probe: `100 Continue` provokes a reset if the client has gone.
const STILL_THERE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStage {
    /// No bytes received yet.
    Fresh,
    /// Part of a request's head was received.
    Head,
    /// A response is in progress.
    Busy,
    /// Between requests.
    Idle,
}

#[derive(Debug)]
struct ConnectionState {
    stage: ConnectionStage,
    since: Instant,
    is_trusted: bool,
    requests: usize,
    /// The last request's body was received completely.
    is_whole: bool,
    /// The client supports interim responses, which HTTP/1.0 lacks.
    knows_interim: bool,
    /// Requests a keep-alive from the response in progress, if it is a stream.
    beat: Option<KeepAliveRequest>,
}

/// Shared handle of a connection: its state, and a signal to close it.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionHandle {
    facts: Arc<Mutex<ConnectionState>>,
    close: Arc<Notify>,
    now: ClockFn,
}

/// The source of time.
type ClockFn = fn() -> std::time::Instant;

fn read(now: ClockFn) -> Instant {
    Instant::from_std(now())
}

impl ConnectionHandle {
    fn new(now: ClockFn) -> Self {
        let facts = ConnectionState {
            stage: ConnectionStage::Fresh,
            since: read(now),
            is_trusted: false,
            requests: 0,
            is_whole: true,
            knows_interim: false,
            beat: None,
        };
        Self {
            facts: Arc::new(Mutex::new(facts)),
            close: Arc::default(),
            now,
        }
    }

    fn facts(&self) -> MutexGuard<'_, ConnectionState> {
        self.facts.lock().expect("nothing panics with the lock")
    }

    fn go(&self, stage: ConnectionStage) {
        let mut facts = self.facts();
        facts.stage = stage;
        facts.since = read(self.now);
    }

    /// Records a new request.
    fn begin(&self, request: &Request<Incoming>) {
        self.go(ConnectionStage::Busy);
        let mut facts = self.facts();
        facts.requests += 1;
        facts.is_whole = request.body().is_end_stream();
        facts.knows_interim = request.version() > Version::HTTP_10;
        facts.beat = None;
    }

    /// Records that a request had a valid key.
    pub(crate) fn trust(&self) {
        self.facts().is_trusted = true;
    }

    /// Whether the connection has used up its requests without a key.
    pub(crate) fn is_worn(&self) -> bool {
        let facts = self.facts();
        !facts.is_trusted && facts.requests >= UNTRUSTED_REQUESTS
    }
}

/// All open connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionTable {
    all: Mutex<OpenConnections>,
}

#[derive(Debug, Default)]
struct OpenConnections {
    /// Number of the newest connection.
    last: u64,
    by_id: HashMap<u64, (IpAddr, ConnectionHandle)>,
}

impl ConnectionTable {
    fn all(&self) -> MutexGuard<'_, OpenConnections> {
        self.all.lock().expect("nothing panics with the lock")
    }

    fn add(&self, ip: IpAddr, known: &ConnectionHandle) -> u64 {
        let mut all = self.all();
        all.last += 1;
        let id = all.last;
        all.by_id.insert(id, (ip, known.clone()));
        id
    }

    fn remove(&self, id: u64) {
        self.all().by_id.remove(&id);
    }

    fn of(&self, ip: IpAddr) -> usize {
        let all = self.all();
        all.by_id.values().filter(|(other, _)| *other == ip).count()
    }

    /// Closes one waiting connection, never one with a response in progress. Connections without a
    /// key go first, then the one that waits longest.
    fn close_one(&self) {
        let all = self.all();
        let waiting = all.by_id.values().filter_map(|(_, known)| {
            let facts = known.facts();
            let is_waiting = facts.stage != ConnectionStage::Busy;
            is_waiting.then(|| (facts.is_trusted, facts.since, known.clone()))
        });
        let least = waiting.min_by_key(|(is_trusted, since, _)| (*is_trusted, *since));
        if let Some((_, _, known)) = least {
            // Excludes it from the next choice while it closes.
            known.go(ConnectionStage::Busy);
            known.close.notify_one();
        }
    }
}

/// State shared by all connections of a server.
#[derive(Clone, Debug)]
pub(crate) struct Acceptor {
    pub(crate) router: Router,
    pub(crate) wire: ServerProtocol,
    pub(crate) times: Timeouts,
    /// A permit per connection.
    pub(crate) connections: Arc<Semaphore>,
    /// Maximum connections of one other machine.
    pub(crate) of_one: usize,
    pub(crate) open: Arc<ConnectionTable>,
    pub(crate) now: ClockFn,
    pub(crate) phase: watch::Receiver<ServerPhase>,
}

impl Acceptor {
    /// Accepts connections until shutdown. At the limit, further ones wait in the listener's queue.
    pub(crate) async fn run(self, listener: TcpListener) {
        let mut phase = self.phase.clone();
        let mut stop = pin!(reach(&mut phase, ServerPhase::Draining));
        loop {
            let (stream, remote) = tokio::select! {
                () = &mut stop => return,
                accepted = accept(&listener) => accepted,
            };
            let ip = remote.ip().to_canonical();
            if !ip.is_loopback() && self.open.of(ip) >= self.of_one {
                continue;
            }
            let permit = tokio::select! {
                () = &mut stop => return,
                permit = self.permit() => permit,
            };
            tokio::spawn(self.clone().serve(stream, remote, permit));
        }
    }

    /// A permit; may close another connection to get one.
    async fn permit(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() {
                return permit;
            }
            self.open.close_one();
            let free = Arc::clone(&self.connections).acquire_owned();
            if let Ok(permit) = tokio::time::timeout(ACCEPT_PAUSE, free).await {
                return permit.expect("the semaphore is never closed");
            }
        }
    }

    async fn serve(self, stream: TcpStream, remote: SocketAddr, permit: OwnedSemaphorePermit) {
        let known = ConnectionHandle::new(self.now);
        let id = self.open.add(remote.ip().to_canonical(), &known);
        if let Ok(local) = stream.local_addr()
            && let Some(stream) = self.greet(stream, &known).await
        {
            self.answer(stream, (LocalAddress(local), Remote(remote)), known)
                .await;
        }
        self.open.remove(id);
        drop(permit);
    }

    /// Detects the protocol and performs the handshake; `None` if the connection ends before.
    async fn greet(&self, stream: TcpStream, known: &ConnectionHandle) -> Option<ClientStream> {
        // Tokens are small packets that clients wait for. A failure only costs speed.
        let _ = stream.set_nodelay(true);
        // A failure only delays the detection of a client that does not read.
        let _ = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES);
        let deadline = read(self.now) + self.times.headers;
        let mut phase = self.phase.clone();
        tokio::select! {
            biased;
            // The client sees handshake errors itself.
            greeted = self.wire.accept(stream, self.times.stalled_write) => greeted.ok(),
            () = known.close.notified() => None,
            () = reach(&mut phase, ServerPhase::Draining) => None,
            () = sleep_until(deadline) => None,
        }
    }

    /// Serves requests until the client leaves or the connection must close.
    async fn answer(
        &self,
        stream: ClientStream,
        ends: (LocalAddress, Remote),
        known: ConnectionHandle,
    ) {
        let close = Arc::clone(&known.close);
        let scheme = UrlScheme(stream.scheme());
        let io = TokioIo::new(TimeoutStream::new(stream, &self.times, known.clone()));
        let inner = TowerToHyperService::new(self.router.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let known = known.clone();
            known.begin(&request);
            request.extensions_mut().insert(ends.0);
            request.extensions_mut().insert(ends.1);
            request.extensions_mut().insert(scheme);
            request.extensions_mut().insert(known.clone());
            let heard = |body| RequestBody {
                body,
                known: known.clone(),
            };
            let answer = inner.call(request.map(|body| Body::new(heard(body))));
            async move {
                let mut response: Response<Body> = answer.await?;
                known.facts().beat = response.extensions_mut().remove();
                let body = |body| Body::new(TrackedBody { body, known });
                Ok::<_, std::convert::Infallible>(response.map(body))
            }
        });
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(None)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(io, service)
        );
        let mut phase = self.phase.clone();
        tokio::select! {
            // As above.
            _ = connection.as_mut() => {}
            () = close.notified() => {}
            () = reach(&mut phase, ServerPhase::Draining) => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            // No free descriptor, or the client left during the accept.
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// A request body that records its end in the connection's state.
struct RequestBody {
    body: Incoming,
    known: ConnectionHandle,
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.known.facts().is_whole = true;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body that records its end in the connection's state.
struct TrackedBody {
    body: Body,
    known: ConnectionHandle,
}

impl hyper::body::Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.known.go(ConnectionStage::Idle);
    }
}

/// A stream that fails when the client sends nothing where a request is expected.
struct TimeoutStream {
    stream: ClientStream,
    headers: Duration,
    idle: Duration,
    known: ConnectionHandle,
    /// Read timeout of the current stage; `None` while nothing is expected.
    silent: Option<Pin<Box<Sleep>>>,
    /// Bytes were written since the last request, if only a probe.
    has_written: bool,
    /// Probe timer after the client's half-close.
    half_closed: Option<Pin<Box<Sleep>>>,
    /// Bytes drained at the end, and the deadline.
    lingering: Option<(usize, Pin<Box<Sleep>>)>,
}

impl TimeoutStream {
    const fn new(stream: ClientStream, times: &Timeouts, known: ConnectionHandle) -> Self {
        Self {
            stream,
            headers: times.headers,
            idle: times.idle,
            known,
            silent: None,
            has_written: false,
            half_closed: None,
            lingering: None,
        }
    }

    /// Deadline for the next bytes; `None` while a response is in progress.
    fn deadline(&self) -> Option<Instant> {
        let facts = self.known.facts();
        match facts.stage {
            ConnectionStage::Busy => None,
            ConnectionStage::Fresh | ConnectionStage::Head => Some(facts.since + self.headers),
            ConnectionStage::Idle => Some(facts.since + self.idle),
        }
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(deadline) = self.deadline() else {
            self.silent = None;
            return Poll::Pending;
        };
        let silent = self
            .silent
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if silent.deadline() != deadline {
            silent.as_mut().reset(deadline);
        }
        ready!(silent.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Records received bytes.
    fn note_bytes(&mut self) {
        let stage = self.known.facts().stage;
        if matches!(stage, ConnectionStage::Fresh | ConnectionStage::Idle) {
            self.known.go(ConnectionStage::Head);
            self.has_written = false;
        }
    }

    /// Polled after the client's half-close: it waits for its response or has left. After
    /// [`LOOK_EVERY`] the server probes once, before the response and only for HTTP/1.1. A client
    /// that has left then resets the connection. Within a stream, a keep-alive is the probe. An
    /// incomplete request has ended.
    fn poll_half_closed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.known.facts().stage != ConnectionStage::Busy {
                return Poll::Ready(Ok(()));
            }
            let look = self
                .half_closed
                .get_or_insert_with(|| Box::pin(sleep(LOOK_EVERY)));
            ready!(look.as_mut().poll(cx));
            look.as_mut().reset(read(self.known.now) + LOOK_EVERY);
            if !self.known.facts().is_whole {
                return Poll::Ready(Ok(()));
            }
            if !self.has_written && self.known.facts().knows_interim {
                self.has_written = true;
                self.stream.say(STILL_THERE, cx)?;
            }
            if let Some(beat) = self.known.facts().beat.take() {
                beat.ask();
            }
            if let Some(error) = self.stream.take_error()? {
                return Poll::Ready(Err(error));
            }
        }
    }

    /// Adds an error body to hyper's empty response to malformed HTTP; `None` for other heads.
    fn with_words(&self, head: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(head).ok()?;
        let status = text.strip_prefix("HTTP/1.1 4")?;
        if !text.ends_with("\r\n\r\n") || !text.contains("\r\ncontent-length: 0\r\n") {
            return None;
        }
        let (message, code) = match status.get(..2)? {
            "14" => ("the address is too long", "uri_too_long"),
            "31" => ("the headers are too long", "headers_too_large"),
            _ => ("the request is no HTTP", "invalid_http"),
        };
        let error = serde_json::json!({
            "message": message, "type": "invalid_request_error", "param": null, "code": code,
        });
        let body = serde_json::json!({"error": error}).to_string();
        let length = format!("content-length: {}\r\n", body.len());
        let kind = "content-type: application/json\r\n";
        let head = text.replacen("content-length: 0\r\n", &format!("{kind}{length}"), 1);
        Some((head + &body).into_bytes())
    }
}

impl AsyncRead for TimeoutStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.half_closed.is_some() {
            return self.poll_half_closed(cx);
        }
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(Ok(())) if buf.filled().len() > before => {
                self.note_bytes();
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Ok(())) => self.poll_half_closed(cx),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => self.poll_silence(cx),
        }
    }
}

impl AsyncWrite for TimeoutStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.has_written = true;
        if let Some(words) = self.with_words(buf) {
            self.known.facts().is_whole = false;
            // A few hundred bytes into an empty buffer: written at once, or the client is gone.
            let said = self.stream.say(&words, cx);
            return Poll::Ready(said.map(|()| buf.len()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.has_written = true;
        if let [only] = bufs {
            return self.poll_write(cx, only);
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Closes the write side, then drains the rest of a rejected request for [`LINGER`].
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
            if self.known.facts().is_whole {
                return Poll::Ready(Ok(()));
            }
            self.lingering = Some((0, Box::pin(sleep(LINGER))));
        }
        let this = &mut *self;
        let Some((bytes, until)) = &mut this.lingering else {
            return Poll::Ready(Ok(()));
        };
        let mut scratch = [0; 16 << 10];
        loop {
            if until.as_mut().poll(cx).is_ready() || *bytes > LINGER_BYTES {
                return Poll::Ready(Ok(()));
            }
            let mut buf = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buf)) {
                Ok(()) if !buf.filled().is_empty() => *bytes += buf.filled().len(),
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
