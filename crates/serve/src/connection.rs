//! Connections: accepted up to a bound, given up when their client is silent or takes nothing.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep};

use crate::access::Local;
use crate::config::Times;
use crate::server::{Phase, reach};

/// Longest request line with headers. Eight times what common servers allow; keys and cookies of
/// other programs on `localhost` come along.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Between attempts to accept when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What each connection gets.
#[derive(Clone, Debug)]
pub(crate) struct Acceptor {
    pub(crate) router: Router,
    pub(crate) times: Times,
    /// A permit per connection.
    pub(crate) connections: Arc<Semaphore>,
    pub(crate) phase: watch::Receiver<Phase>,
}

impl Acceptor {
    /// Accepts until the server is told to stop. When as many connections are open as may be,
    /// others wait in the listener's queue.
    pub(crate) async fn run(self, listener: TcpListener) {
        let mut phase = self.phase.clone();
        let mut stop = pin!(reach(&mut phase, Phase::Draining));
        loop {
            let (stream, permit) = tokio::select! {
                () = &mut stop => return,
                accepted = self.accept(&listener) => accepted,
            };
            tokio::spawn(self.clone().serve(stream, permit));
        }
    }

    async fn accept(&self, listener: &TcpListener) -> (TcpStream, OwnedSemaphorePermit) {
        let permit = Arc::clone(&self.connections).acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return (stream, permit),
                // No descriptor is free, or a client left while it was accepted.
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    async fn serve(self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        let Ok(local) = stream.local_addr() else {
            return;
        };
        // A token is a small packet that somebody waits for. Works without, only slower.
        let _ = stream.set_nodelay(true);
        let io = TokioIo::new(Impatient::new(stream, self.times.stalled_write));
        let inner = TowerToHyperService::new(self.router);
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Local(local));
            inner.call(request.map(Body::new))
        });
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(self.times.headers)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(io, service)
        );
        let mut phase = self.phase;
        tokio::select! {
            // What goes wrong between a client and its connection is seen by the client.
            _ = connection.as_mut() => {}
            () = reach(&mut phase, Phase::Draining) => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
        drop(permit);
    }
}

/// A stream that fails when its peer takes nothing for a while.
struct Impatient {
    stream: TcpStream,
    patience: Duration,
    /// Runs while something waits to be written.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    const fn new(stream: TcpStream, patience: Duration) -> Self {
        Self {
            stream,
            patience,
            stalled: None,
        }
    }

    /// Passes on what a write gave, or gives up.
    fn judge<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.patience;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
