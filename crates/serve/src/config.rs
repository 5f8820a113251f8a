//! Configuration of a server, supplied by the caller.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::Error;
use crate::access::Access;
use crate::clock::TimeSource;
use crate::events::EventLog;
use crate::facts::ProcessMetrics;
use crate::journal::{JournalBounds, Journals};
use crate::limits::ApiLimits;
use crate::live_requests::LiveRequests;
use crate::tally::EventTally;
use crate::upstream::Upstreams;
use paceline_auth::tls::ServerProtocol;
use paceline_base::CallbackError;

/// The port of exo's API: clients that were set up for it find paceline there.
pub const DEFAULT_PORT: u16 = 52415;

/// Maximum pulls that run or wait at the same time, a thread each. As many as the dashboard's own
/// downloads: more would share the same link.
pub(crate) const PULLS_MAX: usize = 2;

/// Addresses, access, limits, timeouts and dashboard of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses to listen on; at least one. Port 0 takes a free one.
    pub bind: Vec<SocketAddr>,
    /// Whether TLS is spoken there.
    pub wire: ServerProtocol,
    /// Clients and pages that may ask.
    pub access: Access,
    pub limits: ApiLimits,
    pub times: Timeouts,
    pub clock: TimeSource,
    /// Read at every scrape of `/metrics`.
    pub facts: ProcessMetrics,
    /// Whether fields that no specification has are passed over, with a `warning` header, instead
    /// of refused.
    pub is_lenient: bool,
    /// Requests as they run, with the events of this node.
    pub live: LiveRequests,
    /// Contents and actions of the dashboard.
    pub board: DashboardConfig,
    /// Lets clients remove models; without it such requests are rejected.
    pub remover: Option<Remover>,
    /// Lets clients fetch models; without it only served models count as present.
    pub puller: Option<Puller>,
    /// Other servers that requests go to.
    pub upstreams: Upstreams,
    /// Journals of streamed answers, for clients that reconnect.
    pub journals: Journals,
    /// Rate-limits events about keys and refusals; shared by all APIs of the server, so that each
    /// is reported once.
    pub(crate) tally: Arc<EventTally>,
    /// Permits for pulls, shared by the APIs of all models.
    pub(crate) pulls: Arc<Semaphore>,
}

impl Config {
    /// On `127.0.0.1`, with the defaults.
    pub fn new(port: u16, clock: TimeSource) -> Self {
        let live = LiveRequests::new(EventLog::new(clock));
        Self {
            bind: vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)],
            wire: ServerProtocol::Plain,
            access: Access::default(),
            limits: ApiLimits::default(),
            times: Timeouts::default(),
            clock,
            facts: ProcessMetrics::default(),
            is_lenient: false,
            tally: Arc::new(EventTally::new(live.events().clone())),
            live,
            board: DashboardConfig::default(),
            remover: None,
            puller: None,
            upstreams: Upstreams::default(),
            journals: Journals::default(),
            pulls: Arc::new(Semaphore::new(PULLS_MAX)),
        }
    }

    pub(crate) const fn bounds(&self) -> JournalBounds {
        JournalBounds {
            count: self.limits.journals,
            bytes: self.limits.journal_bytes,
            stay: self.times.reconnect,
        }
    }

    /// Checks the settings; servers call it themselves.
    ///
    /// # Errors
    /// [`Error::NoAddress`], [`Error::Open`], [`Error::Limit`].
    pub fn check(&self) -> Result<(), Error> {
        if self.bind.is_empty() {
            return Err(Error::NoAddress);
        }
        let is_guarded = self.access.keys.is_some() || self.access.open_to_network;
        let reachable = self.bind.iter().find(|addr| !addr.ip().is_loopback());
        if let (false, Some(&addr)) = (is_guarded, reachable) {
            return Err(Error::Open { addr });
        }
        self.limits.check()
    }
}

/// Timeouts of a server.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// From a request's headers to the end of its response.
    pub request: Duration,
    /// To receive a request's headers, from their first byte; for the first request of a
    /// connection, from its start.
    pub headers: Duration,
    /// Idle time between requests of a connection.
    pub idle: Duration,
    pub body: Duration,
    /// Write stall after which a connection is closed.
    pub stalled_write: Duration,
    /// Interval of keep-alives in a silent stream.
    pub keep_alive: Duration,
    /// Delay of a stream's status for the first reply, so that an early failure is an HTTP status
    /// and not an event.
    pub first_reply: Duration,
    /// Time for a client to reconnect to a streamed response.
    pub reconnect: Duration,
    /// Time to complete responses in progress at shutdown.
    pub grace: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(600), // the SDKs' own default
            headers: Duration::from_secs(10),
            // Longer than the 60 s keep-alive of common clients.
            idle: Duration::from_secs(75),
            body: Duration::from_secs(30),
            stalled_write: Duration::from_secs(15),
            keep_alive: Duration::from_secs(15), // proxies commonly give up at 30 or 60 s
            first_reply: Duration::from_secs(2),
            reconnect: Duration::from_secs(60),
            grace: Duration::from_secs(5),
        }
    }
}

/// Removes a model from the machine's store, by name. The second argument has all names of all
/// served models. The file of a served model stays, under any of its names.
#[derive(Clone, derive_more::Debug)]
#[debug("Remover(..)")]
pub struct Remover(pub Arc<RemoveCallback>);

/// See [`Remover`].
type RemoveCallback = dyn Fn(&str, &[String]) -> Result<Removal, CallbackError> + Send + Sync;

/// Result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The model's files are gone.
    Done,
    /// The store has no model of this name.
    NotKept,
    /// The file belongs to a served model. Nothing was removed.
    InUse,
}

/// Progress of a pull with one of the model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullStep {
    /// Label of the file.
    pub part: String,
    /// Its bytes, if they are known.
    pub total: Option<u64>,
    /// Bytes of it that are there.
    pub done: u64,
}

/// Fetches a model into the machine's store, by name, and blocks until it is complete. The second
/// argument receives each step; it returns false when the client has left. The third flag is set
/// then as well, for phases without steps, such as a wait for another process. The pull should end
/// soon after either. Returns false for an unknown name.
#[derive(Clone, derive_more::Debug)]
#[debug("Puller(..)")]
pub struct Puller(pub Arc<PullCallback>);

/// See [`Puller`].
type PullCallback =
    dyn Fn(&str, OnStep<'_>, &Arc<AtomicBool>) -> Result<bool, CallbackError> + Send + Sync;

/// Receives each step of a pull; false stops it.
type OnStep<'a> = &'a mut dyn FnMut(PullStep) -> bool;

/// The node's report on itself and its cluster, called for every request.
#[derive(Clone, derive_more::Debug)]
#[debug("Status(..)")]
pub struct StatusSource(pub Arc<dyn Fn() -> serde_json::Value + Send + Sync>);

/// Runs a dashboard command with its arguments.
pub type CommandHandler =
    dyn Fn(&str, &serde_json::Value) -> Result<serde_json::Value, CallbackError> + Send + Sync;

/// Measures where an instance's ranks spend their time, by its id. Takes some seconds.
pub type StageProbe = dyn Fn(&str) -> Result<serde_json::Value, CallbackError> + Send + Sync;

/// Data and commands of a node's dashboard. All are called on blocking threads.
#[derive(Clone, derive_more::Debug)]
#[debug("Board(manages: {})", self.manage.is_some())]
pub struct DashboardConfig {
    /// Nodes, instances and requests; called for every refresh.
    pub status: StatusSource,
    /// Called while a client views an instance's stages; `None` without instances.
    pub stages: Option<Arc<StageProbe>>,
    /// `load`, `unload`, `models` and `invite`; `None` where nothing can be managed.
    pub manage: Option<Arc<CommandHandler>>,
}

impl Default for DashboardConfig {
    fn default() -> Self {
        let status = StatusSource(Arc::new(|| serde_json::json!({})));
        Self {
            status,
            stages: None,
            manage: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_kept_for_as_long_as_common_clients_keep_them() {
        assert!(Timeouts::default().idle >= Duration::from_secs(60));
    }
}
