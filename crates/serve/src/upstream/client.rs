//! An HTTP request to an upstream, on a connection of its own.
//!
//! A dropped reply closes its connection, which cancels the request at the upstream. Connections
//! are not reused: a stale one would fail requests that a fresh one answers.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes, to_bytes};
use axum::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, VIA};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::UpstreamSpec;
use super::spec::Route;

/// Time to connect, TLS included. A machine of the same network takes milliseconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Maximum bytes of a response's head. Eight times the limit of common servers.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Headers of a client that an upstream gets. Keys of this node's clients are not among them.
const FORWARDED: [HeaderName; 4] = [
    ACCEPT,
    CONTENT_TYPE,
    HeaderName::from_static("anthropic-beta"),
    HeaderName::from_static("anthropic-version"),
];

/// Why an upstream did not reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UpstreamFailure {
    #[error("no connection: {reason}")]
    Connect { reason: String },
    #[error("silent for {limit_s} s")]
    Silent { limit_s: u64 },
    #[error("the connection broke: {reason}")]
    Broken { reason: String },
    #[error("it answered {status}")]
    Status { status: u16 },
    #[error("it refuses this node's key: it answered {status}")]
    Key { status: u16 },
    #[error("its list of models is unusable: {reason}")]
    List { reason: String },
    #[error("its list has {got} models, expected at most {limit}")]
    LongList { got: usize, limit: usize },
    #[error("it is this server itself")]
    Own,
}

#[derive(Clone, Debug)]
pub(crate) struct UpstreamRequest {
    pub(crate) method: Method,
    /// Path and query.
    pub(crate) target: String,
    /// Of the client; only some are sent.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The servers that the request came through, this one last.
    pub(crate) via: String,
}

/// The head of a reply, and its body as it arrives.
pub(crate) struct UpstreamReply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: ReplyBody,
}

/// A body with its connection, which is closed when the body is dropped.
pub(crate) struct ReplyBody {
    pub(crate) pieces: BodyDataStream,
    _connection: Connection,
}

/// The task that moves a connection's bytes.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ReplyBody {
    /// Reads at most `limit` bytes.
    pub(crate) async fn whole(self, limit: usize) -> Result<Bytes, UpstreamFailure> {
        let bytes = to_bytes(Body::from_stream(self.pieces), limit).await;
        bytes.map_err(|error| UpstreamFailure::Broken {
            reason: error.to_string(),
        })
    }
}

/// A stream of bytes to an upstream.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// Sends a request and returns the reply's head. The caller sets the deadline.
pub(crate) async fn send(
    spec: &UpstreamSpec,
    request: UpstreamRequest,
) -> Result<UpstreamReply, UpstreamFailure> {
    let wire = timeout(CONNECT_LIMIT, connect(spec)).await;
    let limit_s = CONNECT_LIMIT.as_secs();
    let wire = wire.map_err(|_| UpstreamFailure::Connect {
        reason: format!("none within {limit_s} s"),
    })?;
    let wire = wire.map_err(|error| UpstreamFailure::Connect {
        reason: error.to_string(),
    })?;
    let broken = |error: hyper::Error| UpstreamFailure::Broken {
        reason: error.to_string(),
    };
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_BYTES_MAX)
        .handshake::<_, Body>(TokioIo::new(wire))
        .await
        .map_err(broken)?;
    // Its error reaches the request's own future or body.
    let task = tokio::spawn(async move { drop(connection.await) });
    let connection = Connection(task.abort_handle());
    let reply = sender.send_request(built(spec, request)).await;
    let (head, body) = reply.map_err(broken)?.into_parts();
    Ok(UpstreamReply {
        status: head.status,
        headers: head.headers,
        body: ReplyBody {
            pieces: Body::new(body).into_data_stream(),
            _connection: connection,
        },
    })
}

async fn connect(spec: &UpstreamSpec) -> io::Result<Box<dyn Wire>> {
    let (host, port, tls) = match &spec.route {
        Route::Tcp { host, port, tls } => (host, *port, tls),
        Route::Node { dial, .. } => {
            let dial = Arc::clone(dial);
            let stream = tokio::task::spawn_blocking(move || dial()).await??;
            stream.set_nonblocking(true)?;
            return Ok(Box::new(UnixStream::from_std(stream)?));
        }
    };
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    // Tokens are small packets. A failure only costs speed.
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else {
        return Ok(Box::new(stream));
    };
    let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(Arc::clone(tls))
        .connect(name, stream)
        .await?;
    Ok(Box::new(stream))
}

fn built(spec: &UpstreamSpec, request: UpstreamRequest) -> Request<Body> {
    let mut built = Request::new(Body::from(request.body));
    *built.method_mut() = request.method;
    let target = format!("{}{}", spec.base, request.target);
    // A path of a parsed URL and one of a parsed request are a path again.
    *built.uri_mut() = target.parse().unwrap_or_default();
    let headers = built.headers_mut();
    for name in FORWARDED {
        if let Some(value) = request.headers.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    let own = [
        (HOST, Some(spec.name())),
        (VIA, Some(request.via)),
        (
            AUTHORIZATION,
            spec.key.as_ref().map(|key| format!("Bearer {key}")),
        ),
    ];
    for (name, text) in own {
        if let Some(Ok(value)) = text.map(|text| HeaderValue::from_str(&text)) {
            headers.insert(name, value);
        }
    }
    built
}
