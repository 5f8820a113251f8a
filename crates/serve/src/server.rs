//! The HTTP server: binds its addresses, runs until shutdown, and stops in bounded time.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use paceline_engine::Service;
use socket2::SockRef;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use crate::api::App;
use crate::api::registry::ModelRegistry;
use crate::config::{Config, StatusSource, Timeouts};
use crate::connection::Acceptor;
use crate::phase::{ServerPhase, reach};
use crate::upstream::Upstreams;
use crate::{Error, ServedModel, api, dashboard};
use paceline_auth::tls::ServerProtocol;

/// Threads for HTTP. Parsing and templates have threads of their own; the cores are for the model.
const THREADS: usize = 2;

/// Time for streams to write their last event after the grace time, and for blocked tasks.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A bound server that does not accept requests yet.
#[derive(Debug)]
pub struct HttpServer {
    runtime: Runtime,
    listeners: Vec<tokio::net::TcpListener>,
    addresses: Vec<SocketAddr>,
    wire: ServerProtocol,
    router: Router,
    phase: watch::Sender<ServerPhase>,
    times: Timeouts,
    connections: usize,
    connections_of_one: usize,
    upstreams: Upstreams,
    now: fn() -> Instant,
}

/// Stops a [`HttpServer`], from any thread.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    phase: watch::Sender<ServerPhase>,
}

impl ServerHandle {
    /// Starts the shutdown: the server accepts nothing more, responses in progress get their grace
    /// time, and [`HttpServer::run`] returns. Does not wait.
    pub fn shutdown(&self) {
        self.phase.send_if_modified(|phase| {
            let is_running = *phase == ServerPhase::Running;
            if is_running {
                *phase = ServerPhase::Draining;
            }
            is_running
        });
    }
}

impl HttpServer {
    /// Binds the addresses. `service` need not be ready; until then requests get an error that says
    /// so.
    ///
    /// # Errors
    /// An unusable configuration, one that is open to everybody, an address in use, an unreadable
    /// key file.
    pub fn bind(
        config: Config,
        model: ServedModel,
        service: Arc<dyn Service>,
    ) -> Result<Self, Error> {
        model.check()?;
        if !config.upstreams.is_empty() {
            return Self::bind_all(config, vec![(model, service)]);
        }
        Self::listen(config, |config, seen| {
            let app = Arc::new(App::new(config, model, service, seen)?);
            Ok(api::router(&app))
        })
    }

    /// Binds with several models. A request goes to the one that it names, or else to the first.
    pub fn bind_all(
        config: Config,
        models: Vec<(ServedModel, Arc<dyn Service>)>,
    ) -> Result<Self, Error> {
        Self::listen(config, |config, seen| {
            let nodes = StatusSource(Arc::new(|| serde_json::Value::Null));
            let doors = ModelRegistry::new(config, nodes, seen)?;
            for (i, (model, service)) in models.into_iter().enumerate() {
                doors.register(&i.to_string(), model, service)?;
            }
            Ok(doors.router())
        })
    }

    /// Binds for a node whose models load and unload through [`ModelRegistry`]; without one it
    /// serves its health. `nodes` supplies `/nodes`.
    pub fn bind_node(config: Config, nodes: StatusSource) -> Result<(Self, ModelRegistry), Error> {
        let mut doors = None;
        let server = Self::listen(config, |config, seen| {
            let made = ModelRegistry::new(config, nodes, seen)?;
            Ok(doors.insert(made).router())
        })?;
        Ok((server, doors.expect("listening made them")))
    }

    fn listen(
        config: Config,
        route: impl FnOnce(Config, watch::Receiver<ServerPhase>) -> Result<Router, Error>,
    ) -> Result<Self, Error> {
        config.check()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("paceline-http")
            .enable_all()
            .build()
            .map_err(Error::SetUp)?;
        let _inside = runtime.enter();
        let listeners: Result<Vec<_>, Error> = config.bind.iter().map(|a| listen(*a)).collect();
        let listeners = listeners?;
        let addresses: Result<Vec<_>, _> = listeners.iter().map(|l| l.local_addr()).collect();
        let (phase, seen) = watch::channel(ServerPhase::Running);
        let (times, connections) = (config.times.clone(), config.limits.connections);
        let connections_of_one = config.limits.connections_of_one;
        let (now, wire) = (config.clock.now, config.wire.clone());
        let upstreams = config.upstreams.clone();
        let below = route(config.clone(), seen.clone())?;
        let router = dashboard::over(below, config, seen)?;
        drop(_inside);
        Ok(Self {
            runtime,
            listeners,
            addresses: addresses.map_err(Error::SetUp)?,
            wire,
            router,
            phase,
            times,
            connections,
            connections_of_one,
            upstreams,
            now,
        })
    }

    /// The bound addresses, with the actual ports.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// URLs of these addresses: `https://192.168.1.5:52415`.
    pub fn urls(&self) -> Vec<String> {
        let url = |at: &SocketAddr| format!("{}://{at}", self.wire.scheme(*at));
        self.addresses.iter().map(url).collect()
    }

    /// A handle for shutdown.
    pub fn handle(&self) -> ServerHandle {
        let phase = self.phase.clone();
        ServerHandle { phase }
    }

    /// Serves requests until [`ServerHandle::shutdown`]; blocks. Then responses have
    /// [`Times::grace`] to complete, and end with an error after it. Returns at most two seconds
    /// after the grace time.
    pub fn run(self) {
        let connections = Arc::new(Semaphore::new(self.connections));
        let acceptor = Acceptor {
            router: self.router,
            wire: self.wire,
            times: self.times.clone(),
            connections: Arc::clone(&connections),
            of_one: self.connections_of_one,
            open: Arc::default(),
            now: self.now,
            phase: self.phase.subscribe(),
        };
        let all = u32::try_from(self.connections).unwrap_or(u32::MAX);
        self.runtime.block_on(async {
            self.upstreams.watch();
            for listener in self.listeners {
                tokio::spawn(acceptor.clone().run(listener));
            }
            let mut phase = self.phase.subscribe();
            reach(&mut phase, ServerPhase::Draining).await;
            // All permits are free once all connections are closed.
            if timeout(self.times.grace, connections.acquire_many(all))
                .await
                .is_err()
            {
                self.phase.send_replace(ServerPhase::Ending);
                let _ = timeout(LAST_WORDS, connections.acquire_many(all)).await;
            }
        });
        self.runtime.shutdown_timeout(LAST_WORDS);
    }
}

/// Listen backlog: Linux's default maximum (`net.core.somaxconn`). With the standard library's 128,
/// a burst of 1,200 connections overflowed it. Clients retried after 1, 3, 7 .. seconds, and
/// responses took up to 43 s.
const BACKLOG: i32 = 4096;

fn listen(addr: SocketAddr) -> Result<tokio::net::TcpListener, Error> {
    let failed = |source| Error::Bind { addr, source };
    let listener = TcpListener::bind(addr).map_err(failed)?;
    SockRef::from(&listener).listen(BACKLOG).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    tokio::net::TcpListener::from_std(listener).map_err(failed)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::TcpStream;

    use super::*;

    /// More than the 128 of the standard library, and few enough for a test's open files.
    #[test]
    fn a_burst_of_connections_is_made_before_any_is_accepted() {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(async { listen(([127, 0, 0, 1], 0).into()).unwrap() });
        let addr = listener.local_addr().unwrap();
        let limit = Duration::from_millis(500); // a second try comes after 1 s
        let made = (0..300).map(|_| TcpStream::connect_timeout(&addr, limit));
        let made: Vec<TcpStream> = made.collect::<Result<_, _>>().unwrap();
        assert_eq!(made.len(), 300);
    }
}
