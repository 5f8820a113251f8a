//! The node agent: threads and sockets around [`Membership`].
//!
//! ```text
//!  beacons ─── Found ──▶ ┌─────────────────────────┐ ── Dial ───▶ a thread per attempt
//!  acceptor ── Linked ─▶ │ State: Member, links    │ ── Send ───▶ a bounded queue per link
//!  readers ─ Received ─▶ │ (one mutex, never held  │ ── Life ───▶ channels closed
//!  timer ────── Tick ──▶ │  across a blocking call)│ ── Changed ▶ watchers, disk
//!                        └─────────────────────────┘
//! ```
//!
//! - [`Agent`] starts the node; clones are handles to it.
//! - [`Agent::open`] and [`Agent::serve`]: a [`Channel`] to a service of another node.
//! - [`Agent::write`], [`Agent::map`], [`Agent::watch`]: the map that all nodes share.
//! - [`Agent::nodes`]: the cluster as this node sees it.
//! - [`Agent::route`], [`Agent::measure`]: measured network paths between nodes.
//! - [`Agent::cables`], [`Agent::trust_cable`]: RDMA cables between nodes, and trust in them.
//! - [`Agent::examine`]: a diagnosis of why this node and another one do not reach each other.
//! - [`Agent::join`], [`Agent::leave`], [`Agent::invite`]: cluster membership.
//! - [`local`]: the socket by which the command line reaches the node of its home.
//!
//! Threads: a timer, an acceptor, a thread for beacons and files, a thread for the local socket,
//! and one that measures paths to other nodes. Each link has two more; each handshake, attempt and
//! served channel has one. All have bounds and deadlines.
//!
//! The agent does not know what nodes do for each other. A crate above registers services and local
//! commands, and reads its own records from the map.

mod accept;
mod acts;
mod addresses;
mod channel;
mod config;
mod diagnostics;
mod dial;
mod error;
mod facts;
mod files;
mod handshakes;
mod keys;
mod links;
pub mod local;
mod membership;
mod paths;
mod rdma;
mod refusals;
mod rekey;
mod state;
mod upkeep;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use paceline_base::lock;

use super::member::{Event, Life};
use super::session::{Hello, Purpose};
use super::signature::Signer;
use super::{Identity, NodeId, Now, RegisterKey, Registers, Signature};
pub use acts::ClusterAct;
pub use channel::{Handler, ServiceChannel};
pub use config::{Config, Discovery, LogSink};
pub use diagnostics::{Finding, Test};
pub use error::Error;
pub use facts::{
    DeviceRates, EngineDevice, FormRates, Kind, NetworkPath, NodeFacts, NodePaths, NodeView,
    PROTOCOL,
};
use files::NodeFolder;
pub use keys::KeyFile;
pub use membership::{Joined, Revocation, join_at_rest, join_by_code_at_rest, token_at_rest};
pub use rdma::CableTrust;
pub use refusals::Refusal;
use state::State;

/// Control port of a node, next to the API's 52415.
pub const DEFAULT_PORT: u16 = 52416;

/// Longest time for a handshake and for the opening of a channel.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Most queued log lines; further ones are dropped.
const LINES_MAX: usize = 64;

/// Longest path of a Unix socket on the systems that paceline runs on, less the closing zero
/// (macOS 104, Linux 108).
const SOCKET_PATH_MAX: usize = 103;

/// This machine's node. Clones are handles to the same one; [`Agent::stop`] ends it.
#[derive(Clone, derive_more::Debug)]
#[debug("Agent({}, port {})", self.id(), self.port())]
pub struct Agent {
    inner: Arc<Inner>,
}

/// State shared by the threads.
struct Inner {
    files: NodeFolder,
    identity: Arc<Identity>,
    boot: u64,
    port: u16,
    start: Instant,
    config: Config,
    state: Mutex<State>,
    timer: Condvar,
    /// Wakes watchers.
    changed: Condvar,
    /// Wakes threads that wait for measured paths.
    measured: Condvar,
    services: channel::Services,
    commands: local::Commands,
    counts: accept::ConnectionCounts,
    lines: SyncSender<String>,
}

impl Agent {
    /// Starts the node of a home. The first start of a home makes an identity and a cluster.
    ///
    /// # Errors
    /// [`Error::Running`], [`Error::Port`], files that cannot be used.
    pub fn start(config: Config) -> Result<Self, Error> {
        let files = NodeFolder::new(&config.home);
        files.claim()?;
        let identity = Arc::new(files.identity()?);
        let key = files.key()?;
        let listener = accept::listen(config.port)?;
        let port = listener
            .local_addr()
            .map_or(config.port, |addr| addr.port());
        let start = Instant::now();
        let boot = random();
        let saved = files.map();
        let signer: Arc<dyn Signer> = Arc::clone(&identity) as _;
        let mut state = State::new(
            signer,
            key,
            (saved.map, saved.names),
            config.pace,
            now(start),
        );
        (state.generation, state.former) = files.former_keys(&state.key);
        state.trusted = files.trusted();
        let (lines, told) = sync_channel(LINES_MAX);
        let inner = Arc::new(Inner {
            files,
            identity,
            boot,
            port,
            start,
            state: Mutex::new(state),
            timer: Condvar::new(),
            changed: Condvar::new(),
            measured: Condvar::new(),
            services: channel::Services::default(),
            commands: local::Commands::default(),
            counts: accept::ConnectionCounts::default(),
            lines,
            config,
        });
        let agent = Self { inner };
        agent.inner.adopt(&saved.former);
        agent.begin(listener, told)?;
        Ok(agent)
    }

    fn begin(&self, listener: TcpListener, told: Receiver<String>) -> Result<(), Error> {
        let inner = &self.inner;
        let tell = Arc::clone(&inner.config.tell);
        // Not joined: it may be stuck in a full pipe.
        inner.spawn("tell", move || told.iter().for_each(|line| tell(&line)))?;
        inner.know_peers();
        inner.write_facts();
        let socket = local::bind(&inner.files.socket())?;
        inner.thread("timer", Inner::run_timer)?;
        inner.thread("accept", move |inner| inner.run_acceptor(&listener))?;
        inner.thread("upkeep", Inner::run_upkeep)?;
        let weak = Arc::downgrade(inner);
        let answer = move |channel| {
            if let Some(inner) = weak.upgrade() {
                inner.answer_measurer(&channel);
            }
        };
        inner.services.add(paths::SERVICE, Arc::new(answer));
        let weak = Arc::downgrade(inner);
        let answer = move |channel| {
            if let Some(inner) = weak.upgrade() {
                inner.answer_examiner(&channel);
            }
        };
        inner.services.add(diagnostics::SERVICE, Arc::new(answer));
        let weak = Arc::downgrade(inner);
        let answer = move |channel| {
            if let Some(inner) = weak.upgrade() {
                inner.answer_key(&channel);
            }
        };
        inner.services.add(rekey::SERVICE, Arc::new(answer));
        inner.thread("paths", Inner::run_measurer)?;
        let agent = self.clone();
        inner.thread("local", move |inner| local::serve(inner, &agent, &socket))
    }

    pub fn id(&self) -> NodeId {
        self.inner.identity.id()
    }

    /// Signs a message by this node's static key, for the shared map.
    pub fn sign(&self, message: &[u8]) -> Result<Signature, Error> {
        Ok(self.inner.identity.sign(message)?)
    }

    /// The control port that it listens on.
    pub fn port(&self) -> u16 {
        self.inner.port
    }

    /// A short public name of its cluster.
    pub fn cluster(&self) -> String {
        lock(&self.inner.state).key.name()
    }

    /// A copy of the shared map, which shares the entries. Cost: some 100 ns an entry.
    pub fn map(&self) -> Registers {
        lock(&self.inner.state).member.map().clone()
    }

    /// The life of a node, as this node sees it.
    pub fn life(&self, id: NodeId) -> Life {
        lock(&self.inner.state).member.life(id)
    }

    /// Writes to the shared map, or deletes with `None`. Returns before other nodes have it.
    ///
    /// # Errors
    /// [`Error::MapRefuses`]: nothing has changed.
    pub fn write(&self, key: RegisterKey, epoch: u64, value: Option<String>) -> Result<(), Error> {
        let mut state = lock(&self.inner.state);
        let before = state.member.map().root();
        self.inner
            .step(&mut state, Event::Write { key, epoch, value });
        match state.member.map().root() == before {
            true => Err(Error::MapRefuses),
            false => Ok(()),
        }
    }

    /// Saves the map to this machine's disk before it returns, so that acknowledged writes survive
    /// a crash. Without a call the map is saved within a second. Logs a failure.
    pub fn save(&self) {
        self.inner.save();
    }

    /// Waits for changes of the map or of nodes' lives from now on.
    pub fn watch(&self) -> ChangeWatch {
        ChangeWatch {
            inner: Arc::clone(&self.inner),
            seen: lock(&self.inner.state).version,
        }
    }

    /// Serves channels to `service` on this node; replaces an earlier handler. Each channel gets a
    /// thread; at most 256 at a time.
    pub fn serve(&self, service: &str, handler: impl Fn(ServiceChannel) + Send + Sync + 'static) {
        self.inner.services.add(service, Arc::new(handler));
    }

    /// Handles a command of this home's command line, sent by [`local::ask`]. The handler's second
    /// argument receives progress reports. In the node's first five seconds, earlier clients wait
    /// until the command is registered.
    pub fn serve_local(&self, command: &str, handler: impl local::Command) {
        self.inner.commands.add(command, Arc::new(handler));
    }

    /// Opens a channel to a service of another node; takes no longer than `limit`.
    ///
    /// # Errors
    /// [`Error::NoAddress`], [`Error::NoService`], [`Error::Session`].
    pub fn open(
        &self,
        to: NodeId,
        service: &str,
        limit: Duration,
    ) -> Result<ServiceChannel, Error> {
        let deadline = Instant::now() + limit;
        let open = || self.open_once(to, service, deadline);
        self.inner.with_newest_key(deadline, open)
    }

    fn open_once(
        &self,
        to: NodeId,
        service: &str,
        deadline: Instant,
    ) -> Result<ServiceChannel, Error> {
        let session = self.inner.reach(to, Purpose::Service, deadline)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let channel = channel::ask(session, service, left.max(Duration::from_millis(1)))?;
        self.inner.keep_channel(&channel)?;
        Ok(channel)
    }

    /// Publishes the addresses of the HTTP API to the other nodes.
    pub fn set_api(&self, addresses: Vec<SocketAddr>) {
        lock(&self.inner.state).api = addresses;
        self.inner.write_facts();
    }

    /// Publishes whether this node is draining, so that it gets no work. Returns before the other
    /// nodes have it. Reset when the node joins another cluster.
    pub fn set_leaving(&self, leaving: bool) {
        lock(&self.inner.state).leaving = leaving;
        self.inner.write_facts();
    }

    /// Publishes the devices of this node's engines. Returns before the other nodes have them.
    pub fn set_devices(&self, devices: Vec<EngineDevice>) {
        lock(&self.inner.state).devices = devices;
        self.inner.write_facts();
    }

    /// Whether this node is draining.
    pub fn is_leaving(&self) -> bool {
        lock(&self.inner.state).leaving
    }

    /// All nodes of the cluster, this one first, then by name.
    pub fn nodes(&self) -> Vec<NodeView> {
        let state = lock(&self.inner.state);
        state.views(self.id())
    }

    /// The displayed names of all nodes, also of those that were forgotten while this node was a
    /// member of the cluster.
    pub fn names(&self) -> BTreeMap<NodeId, String> {
        lock(&self.inner.state).names()
    }

    /// The displayed name of a node, as of [`names`](Self::names); a short form of its id if it has
    /// none.
    pub fn name(&self, id: NodeId) -> String {
        lock(&self.inner.state).name(id)
    }

    /// All nodes with their measured paths, as of [`nodes`](Self::nodes). Cost: parses every node's
    /// published paths, some kilobytes each.
    pub fn nodes_and_ways(&self) -> Vec<NodePaths> {
        let state = lock(&self.inner.state);
        let nodes = state.views(self.id());
        let names = nodes.iter().map(|node| (node.id, node.facts.name.clone()));
        let names = names.collect();
        let told = |node: NodeView| NodePaths {
            paths: facts::ways(state.paths(node.id), &names),
            node,
        };
        nodes.into_iter().map(told).collect()
    }

    /// The node of a name, an id or an id's beginning of at least four digits, revoked ones
    /// included.
    ///
    /// # Errors
    /// [`Error::NoNode`], [`Error::Ambiguous`].
    pub fn find(&self, name: &str) -> Result<NodeView, Error> {
        let mut nodes = self.nodes();
        nodes.extend(lock(&self.inner.state).revoked_views());
        if let Some(at) = nodes.iter().position(|node| node.facts.name == name) {
            return Ok(nodes.swap_remove(at));
        }
        nodes.retain(|node| name.len() >= 4 && node.id.to_string().starts_with(name));
        let name = name.to_owned();
        match nodes.len() {
            0 => Err(Error::NoNode { name }),
            1 => Ok(nodes.swap_remove(0)),
            _ => Err(Error::Ambiguous { name }),
        }
    }

    /// Everything that prevents discovery of nodes, a line each.
    pub fn problems(&self) -> Vec<String> {
        lock(&self.inner.state).problems()
    }

    /// Refused connections to the control port that are due for the log. Each cause and address is
    /// due at most once an hour; sixteen addresses per cause are counted separately.
    pub fn refusals(&self) -> Vec<Refusal> {
        let now = self.inner.now().since_start;
        lock(&self.inner.state).refusals.take(now)
    }

    /// Stops all threads and closes all sessions. The other nodes see this one die.
    pub fn stop(&self) {
        self.inner.stop();
    }
}

/// Watches changes of the shared map and of nodes' lives. No change is missed, but several may be
/// reported as one.
#[derive(derive_more::Debug)]
#[debug("Watch(seen {})", self.seen)]
pub struct ChangeWatch {
    inner: Arc<Inner>,
    seen: u64,
}

impl ChangeWatch {
    /// Waits until something has changed since the last call, at most `timeout`. `false` after the
    /// timeout and once the agent has stopped.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = lock(&self.inner.state);
        while state.version == self.seen && !state.stopped {
            let left = deadline.map_or(Duration::from_secs(60), |at| {
                at.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return false;
            }
            let waited = self.inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        let is_new = state.version != self.seen;
        self.seen = state.version;
        is_new && !state.stopped
    }
}

impl Inner {
    fn now(&self) -> Now {
        let mut now = now(self.start);
        now.wall_ms += self.config.clock_ahead_ms;
        now
    }

    fn hello(&self) -> Hello {
        Hello {
            name: self.config.facts.name.clone(),
            boot: self.boot,
            port: self.port,
            wall_ms: self.now().wall_ms,
            build: self.config.facts.build.clone(),
            numerics: self.config.facts.numerics,
        }
    }

    /// Starts a thread that ends by itself once the agent stops, and is joined then.
    fn thread(
        self: &Arc<Self>,
        name: &'static str,
        work: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> Result<(), Error> {
        let inner = Arc::clone(self);
        let handle = self.spawn(name, move || work(&inner))?;
        lock(&self.state).threads.push(handle);
        Ok(())
    }

    fn spawn(
        &self,
        name: &'static str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, Error> {
        let builder = thread::Builder::new().name(format!("node-{name}"));
        let spawned = builder.spawn(work);
        spawned.map_err(|source| Error::Resource { what: name, source })
    }

    fn is_stopped(&self) -> bool {
        lock(&self.state).stopped
    }

    fn tell(&self, line: &str) {
        let _ = self.lines.try_send(line.to_owned());
    }

    fn stop(&self) {
        let threads = {
            let mut state = lock(&self.state);
            state.stopped = true;
            state.cut_all();
            std::mem::take(&mut state.threads)
        };
        self.timer.notify_all();
        self.changed.notify_all();
        self.measured.notify_all();
        for thread in threads {
            // A local command may stop the node from one of its own threads.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        self.save();
        // Another process may be this home's node from here on.
        self.files.release();
    }
}

fn now(start: Instant) -> Now {
    let wall = SystemTime::UNIX_EPOCH.elapsed();
    Now {
        since_start: start.elapsed(),
        wall_ms: wall.map_or(0, |since| since.as_millis() as u64),
    }
}

/// 64 random bits of the system, or bits of the clock if it has none.
fn random() -> u64 {
    let mut bytes = [0; 8];
    if getrandom::fill(&mut bytes).is_err() {
        return SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_nanos() as u64);
    }
    u64::from_le_bytes(bytes)
}

/// Reads `bytes` as an opening message and as messages of this module's channels, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<channel::ServiceOpen>(bytes);
    let _ = serde_json::from_slice::<channel::ServiceOpenReply>(bytes);
    let _ = serde_json::from_slice::<NodeFacts>(bytes);
    diagnostics::parse(bytes);
    rekey::parse(bytes);
}

#[cfg(test)]
mod tests;
