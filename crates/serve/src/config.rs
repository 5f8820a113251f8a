//! Settings of the caller: where to listen, who may ask, how much and how long.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::Error;
use crate::access::Access;
use crate::clock::Clock;
use crate::events::Events;
use crate::facts::Facts;
use crate::journal::{Bounds, Journals};
use crate::limits::Limits;
use crate::live::Live;
use crate::tally::Tally;
use crate::tls::Wire;

/// The port of exo's API: clients that were set up for it find paceline there.
pub const DEFAULT_PORT: u16 = 52415;

/// Pulls that clients have running or waiting at the same time, on a thread each. As many as the
/// dashboard's own downloads: more share the same line.
pub(crate) const PULLS_MAX: usize = 2;

/// Where to listen, who may ask, how much and how long.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses to listen on; at least one. Port 0 takes a free one.
    pub bind: Vec<SocketAddr>,
    /// Whether TLS is spoken there.
    pub wire: Wire,
    /// Clients and pages that may ask.
    pub access: Access,
    /// How much.
    pub limits: Limits,
    /// How long.
    pub times: Times,
    /// The source of time.
    pub clock: Clock,
    /// Asked for at every scrape of `/metrics`.
    pub facts: Facts,
    /// Whether fields that no specification has are passed over, with a `warning` header, instead
    /// of refused.
    pub is_lenient: bool,
    /// Requests as they run, with the events of this node.
    pub live: Live,
    /// Contents and actions of the dashboard.
    pub board: Board,
    /// Lets clients remove models; without it such requests are refused.
    pub remover: Option<Remover>,
    /// Lets clients fetch models; without it only those that are served are said to be there.
    pub puller: Option<Puller>,
    /// Journals of streamed answers, for clients that reconnect.
    pub journals: Journals,
    /// Tells of keys and refusals; one for all APIs of the server, so that nothing is told twice.
    pub(crate) tally: Arc<Tally>,
    /// Places for pulls, which the APIs of all models share.
    pub(crate) pulls: Arc<Semaphore>,
}

impl Config {
    /// On `127.0.0.1`, with the defaults.
    pub fn new(port: u16, clock: Clock) -> Self {
        let live = Live::new(Events::new(clock));
        Self {
            bind: vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)],
            wire: Wire::Plain,
            access: Access::default(),
            limits: Limits::default(),
            times: Times::default(),
            clock,
            facts: Facts::default(),
            is_lenient: false,
            tally: Arc::new(Tally::new(live.events().clone())),
            live,
            board: Board::default(),
            remover: None,
            puller: None,
            journals: Journals::default(),
            pulls: Arc::new(Semaphore::new(PULLS_MAX)),
        }
    }

    /// Of journals.
    pub(crate) const fn bounds(&self) -> Bounds {
        Bounds {
            count: self.limits.journals,
            bytes: self.limits.journal_bytes,
            stay: self.times.reconnect,
        }
    }

    /// Whether a server can have it; servers ask themselves.
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

/// How long things may take.
#[derive(Clone, Debug)]
pub struct Times {
    /// From the headers of a request to the end of its answer.
    pub request: Duration,
    /// For the headers of a request, from their first byte; for the first of a connection, from
    /// its beginning.
    pub headers: Duration,
    /// Between requests of a connection.
    pub idle: Duration,
    pub body: Duration,
    /// That a client may take nothing of what is to be sent before its connection is closed.
    pub stalled_write: Duration,
    /// Between signs of life in a stream that has nothing to say.
    pub keep_alive: Duration,
    /// That a stream's status waits for the model's first reply, so that an early failure is an
    /// HTTP status and not an event.
    pub first_reply: Duration,
    /// That a client may take to come back to a streamed answer.
    pub reconnect: Duration,
    /// For answers that are under way when the server is told to stop.
    pub grace: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(600), // the SDKs' own default
            headers: Duration::from_secs(10),
            // Longer than the 60 s for which common clients keep connections.
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

/// Removes the model of a name from the machine's store. The second argument has every name of
/// every model that is being served. The file of a served model stays, under whichever name it is
/// to be removed. An error is a reason for the client.
#[derive(Clone)]
pub struct Remover(pub Arc<Remove>);

/// See [`Remover`].
type Remove = dyn Fn(&str, &[String]) -> Result<Removal, String> + Send + Sync;

/// Outcome of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The model's files are gone.
    Done,
    /// The store has no model of this name.
    NotKept,
    /// Its file is that of a model that is being served. Nothing was removed.
    InUse,
}

impl fmt::Debug for Remover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remover(..)")
    }
}

/// How far a pull is with one of the model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullStep {
    /// Label of the file.
    pub part: String,
    /// Its bytes, if they are known.
    pub total: Option<u64>,
    /// Bytes of it that are there.
    pub done: u64,
}

/// Fetches the model of a name into the machine's store and blocks until it is there. The second
/// argument takes each step, and is false where nobody waits for the model any more. The third is
/// set then as well, for the times that have no step to tell, such as a wait for another process.
/// The pull is to end soon after either. False where no model has the name; what went wrong, for
/// the client.
#[derive(Clone)]
pub struct Puller(pub Arc<Pull>);

/// See [`Puller`].
type Pull = dyn Fn(&str, &mut dyn FnMut(PullStep) -> bool, &Arc<AtomicBool>) -> Result<bool, String>
    + Send
    + Sync;

impl fmt::Debug for Puller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Puller(..)")
    }
}

/// The node's report on itself and its cluster, asked for at every request.
#[derive(Clone)]
pub struct Status(pub Arc<dyn Fn() -> serde_json::Value + Send + Sync>);

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Status(..)")
    }
}

/// A command of the dashboard with its arguments: its answer, or a reason for people.
pub type Manage =
    dyn Fn(&str, &serde_json::Value) -> Result<serde_json::Value, String> + Send + Sync;

/// Where the time of an instance's ranks goes now, by its id, or a reason for people. Takes some
/// seconds.
pub type Stages = dyn Fn(&str) -> Result<serde_json::Value, String> + Send + Sync;

/// Contents and actions of a node's dashboard. All are called on threads that may block.
#[derive(Clone)]
pub struct Board {
    /// Nodes, instances and requests, asked for at every look.
    pub status: Status,
    /// Asked for while somebody looks at the stages of an instance; `None` where there are none.
    pub stages: Option<Arc<Stages>>,
    /// `load`, `unload`, `models` and `invite`; `None` where nothing can be managed.
    pub manage: Option<Arc<Manage>>,
}

impl Default for Board {
    fn default() -> Self {
        let status = Status(Arc::new(|| serde_json::json!({})));
        Self {
            status,
            stages: None,
            manage: None,
        }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Board(manages: {})", self.manage.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_kept_for_as_long_as_common_clients_keep_them() {
        assert!(Times::default().idle >= Duration::from_secs(60));
    }
}
