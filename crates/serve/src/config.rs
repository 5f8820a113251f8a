//! Settings of the caller: where to listen, who may ask, how much and how long.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::Error;
use crate::events::Events;
use crate::journal::{Bounds, Journals};
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

/// Clients and pages that may ask. Loopback names and addresses, and the address that a connection
/// came to, are always accepted as `Host`. A page of the server's own origin is always accepted as
/// `Origin`.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// More names that a `Host` header may have, without port: `llm.example.org`.
    pub hosts: Vec<String>,
    /// Web pages that may use the API, as browsers spell an origin: `https://chat.example.org`.
    pub origins: Vec<String>,
    /// A file of [`keys`](crate::keys); without one nobody is asked for a key. The file is read
    /// again when it changes. An empty or missing file lets nobody in.
    pub keys: Option<PathBuf>,
    /// Allows addresses that others can reach although there are no keys.
    pub open_to_network: bool,
}

/// Bounds; what is over one is refused with the bound's value.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time; further ones wait unaccepted. Each costs some 20 KB.
    pub connections: usize,
    /// Requests to the model at the same time, from their headers to the end of their answer;
    /// further ones get 429.
    pub requests: usize,
    /// Requests of one client among them, when there are several clients: holders of keys, or
    /// machines without one.
    pub requests_of_one: usize,
    /// Connections of one other machine at the same time; further ones are closed.
    pub connections_of_one: usize,
    /// Responses that are kept for `previous_response_id`, and their bytes.
    pub stored_responses: usize,
    /// Bytes of memory that they take, about.
    pub stored_bytes: usize,
    /// Streamed answers that clients may come back to, those under way among them. Streams beyond
    /// that cannot be come back to.
    pub journals: usize,
    /// Bytes of memory that they take; one takes a quarter at most. A stream whose journal would
    /// take more goes on without one, and the event `unprotected` says so.
    pub journal_bytes: usize,
    /// Requests whose body is parsed and made tokens at the same time, on a thread each; further
    /// ones wait. Bounds memory: parsing takes up to 100 bytes per value of the body.
    pub parsing: usize,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Levels of arrays and objects in a body; at most 100 (serde_json refuses more than 127).
    pub json_depth: usize,
    /// Values and keys in a body.
    pub json_values: usize,
    /// Choices of a prompt (`n`).
    pub choices: usize,
    /// Prompts of a request to `/v1/completions`.
    pub prompts: usize,
    /// Messages of a conversation.
    pub messages: usize,
    /// Replies of one choice that wait for a slow reader. A reader that is behind by more is cut
    /// off with an error; a shorter answer never is.
    pub unread_replies: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            requests: 64,
            requests_of_one: 32,
            connections_of_one: 128,
            stored_responses: 256,
            stored_bytes: 64 << 20,
            journals: 256,
            journal_bytes: 64 << 20,
            parsing: 2,
            body_bytes: 8 << 20,
            json_depth: 32,
            json_values: 1 << 20,
            choices: 16,
            prompts: 64,
            messages: 2048,
            unread_replies: 8192,
        }
    }
}

impl Limits {
    fn check(&self) -> Result<(), Error> {
        let at_least_one = [
            ("connections", self.connections),
            ("requests", self.requests),
            ("requests_of_one", self.requests_of_one),
            ("connections_of_one", self.connections_of_one),
            ("stored_responses", self.stored_responses),
            ("stored_bytes", self.stored_bytes),
            ("journals", self.journals),
            ("journal_bytes", self.journal_bytes),
            ("parsing", self.parsing),
            ("body_bytes", self.body_bytes),
            ("json_depth", self.json_depth),
            ("json_values", self.json_values),
            ("choices", self.choices),
            ("prompts", self.prompts),
            ("messages", self.messages),
            ("unread_replies", self.unread_replies),
        ];
        // The largest number of permits of a semaphore is far above this.
        let most = |name| match name {
            "json_depth" => 100,
            _ => 1 << 32,
        };
        let bad = at_least_one
            .into_iter()
            .find(|(name, value)| *value == 0 || *value > most(name));
        bad.map_or(Ok(()), |(limit, got)| {
            let most = most(limit);
            Err(Error::Limit { limit, got, most })
        })
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
    /// For a body.
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

/// The source of time: the crate reads no clock of its own.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// For intervals.
    pub now: fn() -> Instant,
    /// Seconds since 1970, UTC.
    pub unix_s: fn() -> u64,
}

/// Figures of the process that the caller knows, such as memory and bytes on the wire.
#[derive(Clone)]
pub struct Facts(pub Arc<dyn Fn() -> Vec<Fact> + Send + Sync>);

impl Default for Facts {
    fn default() -> Self {
        Self(Arc::new(Vec::new))
    }
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Facts(..)")
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

/// A figure, shown by `/metrics` as a gauge `paceline_<name>`. Both texts go out as they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Lower-case letters, digits and `_`, the unit last.
    pub name: &'static str,
    /// A line without a full stop at its end.
    pub help: &'static str,
    /// Labels that tell values of one name apart, as `layer="3",expert="7"`; empty for one value.
    /// Values of one name follow one another.
    pub labels: String,
    /// The value now.
    pub value: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_kept_for_as_long_as_common_clients_keep_them() {
        assert!(Times::default().idle >= Duration::from_secs(60));
    }
}
