//! Upstreams: other servers of OpenAI's API, whose models are listed with this node's own.
//!
//! ```text
//! list of models --every 2 s--> health --> /v1/models, ps, dashboard
//! request --> names a model of an upstream? --> whole request --> whole reply, as it arrives
//! ```
//!
//! A request is sent to the same path, byte for byte. It is retried at other upstreams until the
//! first byte of a reply has arrived. Answers have no promise of identity, and streams cannot be
//! resumed.
//!
//! The header `Via` (RFC 9110, section 7.6.3) has a pseudonym of each paceline server on the way of
//! a request. A server that finds its own refuses the request. Lists of models name the servers
//! behind each model, so that a server leaves out its own models when they come back.

pub(crate) mod client;
mod hops;
mod spec;
mod watch;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use serde_json::{Value, json};
use tokio::sync::{Notify, watch as channel};

use crate::facts::MetricSample;
pub(crate) use client::{UpstreamFailure, UpstreamReply, UpstreamRequest};
pub(crate) use hops::Hops;
pub use spec::{ReplicaUse, SpecError, UpstreamArg, UpstreamDialer, UpstreamSpec};

/// Receives a line when an upstream comes up or goes down; must not block.
pub type UpstreamNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// The upstreams of a server. Clones share them. The default has none.
#[derive(Clone)]
pub struct Upstreams(Arc<UpstreamSet>);

struct UpstreamSet {
    /// Pseudonym of this server in `Via`.
    own: String,
    all: RwLock<Vec<Arc<Upstream>>>,
    grown: Notify,
    tell: UpstreamNotice,
}

/// A server that takes whole requests.
pub(crate) struct Upstream {
    pub(crate) spec: UpstreamSpec,
    pub(crate) name: String,
    health: channel::Sender<Health>,
    /// Requests in progress.
    running: AtomicUsize,
    /// Requests so far.
    sent: AtomicUsize,
    /// Of these, failed ones.
    failed: AtomicUsize,
    /// Asks for an early look at its health.
    look: Notify,
    is_watched: AtomicBool,
}

/// An upstream's state, and the models of its last list.
#[derive(Clone, Debug, Default)]
struct Health {
    state: State,
    models: Arc<[UpstreamModel]>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum State {
    /// Not asked yet.
    #[default]
    Unknown,
    Up,
    Down(UpstreamFailure),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UpstreamModel {
    pub(crate) id: String,
    pub(crate) created_unix_s: u64,
    /// Pseudonyms of the servers that requests pass, as far as they are known.
    pub(crate) hops: Vec<String>,
    /// Why the upstream of another node does not answer, as that node says.
    pub(crate) down: Option<String>,
}

impl UpstreamModel {
    /// Whether a client means it by `name`. Ollama's clients append a tag.
    fn is_called(&self, name: &str) -> bool {
        let tagged = |long: &str, short: &str| long.strip_suffix(":latest") == Some(short);
        self.id == name || tagged(&self.id, name) || tagged(name, &self.id)
    }
}

impl fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.all().into_iter().map(|one| one.name.clone());
        f.debug_list().entries(names).finish()
    }
}

impl Default for Upstreams {
    fn default() -> Self {
        Self(Arc::new(UpstreamSet {
            own: String::new(),
            all: RwLock::default(),
            grown: Notify::new(),
            tell: Arc::new(|_| {}),
        }))
    }
}

impl Upstreams {
    /// The upstreams of `specs`. The server looks at them while it runs; `tell` receives changes.
    ///
    /// # Errors
    /// [`crate::Error::SetUp`]: the system has no random numbers.
    pub fn new(specs: Vec<UpstreamSpec>, tell: UpstreamNotice) -> Result<Self, crate::Error> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes)
            .map_err(|error| crate::Error::SetUp(std::io::Error::other(error)))?;
        let own = format!("paceline-{}", paceline_base::hex(&bytes));
        let set = Self(Arc::new(UpstreamSet {
            own,
            all: RwLock::default(),
            grown: Notify::new(),
            tell,
        }));
        specs.into_iter().for_each(|spec| set.add(spec));
        Ok(set)
    }

    /// Adds an upstream, also while the server runs.
    pub fn add(&self, spec: UpstreamSpec) {
        let mut all = self.0.all.write().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::new(Upstream::new(spec)));
        drop(all);
        self.0.grown.notify_one();
    }

    /// Removes the node `name`; its requests in progress end by themselves.
    pub fn remove_node(&self, name: &str) {
        let mut all = self.0.all.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.is_direct() || one.name != name);
    }

    pub(crate) fn all(&self) -> Vec<Arc<Upstream>> {
        let all = self.0.all.read().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }

    /// Whether there are upstreams now.
    pub fn has_any(&self) -> bool {
        !self.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// This server's pseudonym in `Via`.
    pub(crate) fn own(&self) -> &str {
        &self.0.own
    }

    /// The upstreams that list `model`: those that are up, then those with the exact name, then by
    /// load. Models behind a server of `hops` are left out.
    pub(crate) fn serving(&self, model: &str, hops: &Hops) -> Vec<Arc<Upstream>> {
        let rank = |one: &Arc<Upstream>| {
            let health = one.health.borrow();
            let is_usable = |it: &&UpstreamModel| it.is_called(model) && !hops.has_any(&it.hops);
            let mut usable = health.models.iter().filter(is_usable).peekable();
            usable.peek()?;
            let is_up = health.state.is_up() && usable.clone().any(|it| it.down.is_none());
            let is_exact = usable.any(|it| it.id == model);
            Some((!is_up, !is_exact, one.running()))
        };
        let mut found: Vec<_> = self
            .all()
            .into_iter()
            .filter_map(|one| Some((rank(&one)?, one)))
            .collect();
        found.sort_by_key(|(rank, _)| *rank);
        found.into_iter().map(|(_, one)| one).collect()
    }

    /// Whether an upstream lists `model`, up or down.
    pub(crate) fn has(&self, model: &str) -> bool {
        !self.serving(model, &Hops::default()).is_empty()
    }

    /// The upstreams that are up and may answer for `model` of the cluster.
    pub(crate) fn replicas(&self, model: &str) -> Vec<Arc<Upstream>> {
        let mut all = self.serving(model, &Hops::default());
        all.retain(|one| one.is_replica() && one.is_up());
        all.retain(|one| one.failure_of(model).is_none());
        all
    }

    /// The models of the upstreams that are up, each name once, with the upstream's name.
    pub(crate) fn models(&self) -> Vec<(String, UpstreamModel)> {
        let mut all = self.models_of(|_| true);
        all.retain(|(_, model)| model.down.is_none());
        all
    }

    /// The models of the upstreams that `is_meant`, also of those that are down, each name once.
    pub(crate) fn models_of(
        &self,
        is_meant: impl Fn(&Upstream) -> bool,
    ) -> Vec<(String, UpstreamModel)> {
        let mut listed: Vec<(String, UpstreamModel)> = Vec::new();
        for one in self.all().into_iter().filter(|one| is_meant(one)) {
            let health = one.health.borrow().clone();
            let failure = health.state.failure().map(UpstreamFailure::to_string);
            for model in health.models.iter() {
                let down = failure.clone().or_else(|| model.down.clone());
                let model = UpstreamModel {
                    down,
                    ..model.clone()
                };
                match listed.iter_mut().find(|(_, known)| known.id == model.id) {
                    None => listed.push((one.name.clone(), model)),
                    Some(known) if known.1.down.is_some() && model.down.is_none() => {
                        *known = (one.name.clone(), model);
                    }
                    Some(_) => {}
                }
            }
        }
        listed
    }

    /// Gauges of each upstream, for `/metrics`.
    pub fn facts(&self) -> Vec<MetricSample> {
        let all = self.all();
        let gauge = |(name, help, value): Gauge| {
            let sample = move |one: &Arc<Upstream>| MetricSample {
                name,
                help,
                labels: format!("upstream=\"{}\"", one.name),
                value: value(one),
            };
            all.iter().map(sample).collect::<Vec<_>>()
        };
        GAUGES.into_iter().flat_map(gauge).collect()
    }

    /// The upstreams' models as instances, for `ps` and the dashboard. An upstream without a list
    /// is one row.
    pub fn instances(&self) -> Vec<Value> {
        let rows = self.all().into_iter().enumerate().flat_map(|(i, one)| {
            let Health { state, models } = one.health.borrow().clone();
            let (state, reason) = match state {
                State::Unknown => ("waiting", None),
                State::Up => ("ready", None),
                State::Down(failure) => ("failed", Some(failure.to_string())),
            };
            let row = |(j, model, down): (usize, &str, Option<&String>)| {
                let state = if down.is_some() { "failed" } else { state };
                json!({
                    "id": format!("upstream-{}.{}", i + 1, j + 1), "model": model, "state": state,
                    "reason": reason.as_ref().or(down), "nodes": [format!("via {}", one.name)], "epoch": 0,
                    "split": "none", "classes": "upstream", "numbers": "upstream",
                    "upstream": one.name,
                })
            };
            match models.is_empty() {
                true => vec![row((0, "-", None))],
                false => {
                    let models = models.iter().enumerate();
                    let models = models.map(|(j, it)| (j, it.id.as_str(), it.down.as_ref()));
                    models.map(row).collect()
                }
            }
        });
        rows.collect()
    }
}

impl State {
    fn is_up(&self) -> bool {
        *self == Self::Up
    }

    const fn failure(&self) -> Option<&UpstreamFailure> {
        match self {
            Self::Down(failure) => Some(failure),
            Self::Unknown | Self::Up => None,
        }
    }
}

/// A gauge of an upstream: name, help text, value.
type Gauge = (&'static str, &'static str, fn(&Upstream) -> f64);

const GAUGES: [Gauge; 4] = [
    ("upstream_up", "Whether an upstream answers", |one| {
        f64::from(one.is_up())
    }),
    (
        "upstream_running",
        "Requests in progress at an upstream",
        |one| one.running() as f64,
    ),
    (
        "upstream_requests",
        "Requests sent to an upstream since the start",
        |one| one.sent.load(Relaxed) as f64,
    ),
    (
        "upstream_failures",
        "Requests that an upstream failed since the start",
        |one| one.failed.load(Relaxed) as f64,
    ),
];

/// Counts a request while it runs.
pub(crate) struct RunningRequest(Arc<Upstream>);

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

impl Upstream {
    fn new(spec: UpstreamSpec) -> Self {
        Self {
            name: spec.name(),
            spec,
            health: channel::Sender::default(),
            running: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            look: Notify::new(),
            is_watched: AtomicBool::new(false),
        }
    }

    /// Requests in progress.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Relaxed)
    }

    /// Counts a request until the value is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> RunningRequest {
        self.running.fetch_add(1, Relaxed);
        self.sent.fetch_add(1, Relaxed);
        RunningRequest(Arc::clone(self))
    }

    /// Why it takes no requests, if it is known to be down.
    pub(crate) fn failure(&self) -> Option<UpstreamFailure> {
        self.health.borrow().state.failure().cloned()
    }

    /// Why it takes no requests for `model`, if it or the upstream behind it is known to be down.
    pub(crate) fn failure_of(&self, model: &str) -> Option<String> {
        let health = self.health.borrow();
        let behind = || {
            let mut known = health.models.iter().filter(|it| it.is_called(model));
            known.find_map(|it| it.down.clone())
        };
        let own = health.state.failure().map(UpstreamFailure::to_string);
        own.or_else(behind)
    }

    fn is_up(&self) -> bool {
        self.health.borrow().state.is_up()
    }

    /// Whether no other node of the cluster is between.
    pub(crate) fn is_direct(&self) -> bool {
        self.spec.is_direct()
    }

    /// Whether it may answer for a model of the cluster.
    pub(crate) fn is_replica(&self) -> bool {
        self.spec.replica == ReplicaUse::Allowed
    }

    /// Counts a failed request, and looks at its health at once.
    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
        self.look.notify_one();
    }
}
