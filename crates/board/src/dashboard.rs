//! The dashboard's data: cluster, telemetry, instances and requests of this node.
//!
//! ```text
//! agent, fleet or instance --every 200 ms--> changes --> events (SSE, --events FILE)
//! ways between nodes       --every 2 s-----> changes
//! /proc, /sys              --every 2 s-----> telemetry
//! counts of the ranks      --once a second while somebody looks--> traffic between machines
//! other nodes              --service "board", once a second while somebody looks--> their parts
//! ```
//!
//! Each node reports its own telemetry, its running requests, and the performance of instances that
//! it owns. A node polls the others only while a client views its page.

mod machine_metrics;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::machine::{give_back_free_memory, keep_no_large_blocks, memory_bytes};
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::local::CommandProgress;
use paceline_cluster::telemetry::{Sampler, TelemetrySample};
use paceline_node::InstanceSummary;
use paceline_serve::{
    CommandHandler, LiveRequests, MetricSample, StageProbe, StatusSource, Upstreams,
};
use paceline_store::{Audit, Home};
use paceline_worker::CollectiveTraffic;
use serde_json::{Value, json};

use crate::changes::{self, ChangeDetector};
use crate::downloads::{Downloads, PullSource};
use crate::heap::TrimPolicy;
use crate::host::{self, HostProbes};
use crate::own_cluster::MeasuredRates;
use crate::peers::PeerReports;
use crate::traffic::TrafficMeter;
use crate::{CommandError, Error, MessageSink, devices, links, peers, traffic};
use machine_metrics::{energy, machine_facts};

/// Interval of polls for changes.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Timeout of a connection of the loopback interface, which takes 0.1 ms.
const ENGINE_KNOCK: Duration = Duration::from_millis(50);

/// Polls between two checks of the process's memory: 4 s. A trim takes a millisecond or so.
const LOOKS_AT_MEMORY: u32 = 20;

/// Interval of telemetry samples. Two seconds smooth a decode step's pauses.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Supplies the instances as JSON, and portraits of those that this node owns.
pub type InstanceSource = dyn Fn() -> (Vec<Value>, BTreeMap<String, InstanceSummary>) + Send + Sync;

/// Supplies metrics of this node's instances.
type FigureSource = dyn Fn() -> Vec<MetricSample> + Send + Sync;

/// Supplies the bytes that the ranks of this node's instances have exchanged so far.
pub type TrafficSource = dyn Fn() -> Vec<CollectiveTraffic> + Send + Sync;

/// The data behind a node's dashboard, metrics and logs. Clones share it.
#[derive(Clone, derive_more::Debug)]
#[debug("Board(..)")]
pub struct Dashboard(pub(crate) Arc<Inner>);

/// Outputs of a [`Dashboard`]: files and warnings.
#[derive(derive_more::Debug)]
#[debug("Watch({:?})", self.home)]
pub struct DashboardOutputs {
    /// File to append events to, a line of JSON each.
    pub events: Option<PathBuf>,
    /// Home of the audit log.
    pub home: Home,
    /// Warnings for people; must not block.
    pub tell: MessageSink,
}

/// Parts of the page. A cell is empty until it is set; the first value stays.
pub(crate) struct Inner {
    live: LiveRequests,
    pub(crate) agent: OnceLock<Agent>,
    pub(crate) instances: OnceLock<Box<InstanceSource>>,
    pub(crate) upstreams: OnceLock<Upstreams>,
    pub(crate) stages: OnceLock<Box<StageProbe>>,
    pub(crate) counts: OnceLock<Box<TrafficSource>>,
    pub(crate) figures: OnceLock<Box<FigureSource>>,
    traffic: TrafficMeter,
    pub(crate) manage: OnceLock<Box<CommandHandler>>,
    /// Price of a kilowatt-hour.
    pub(crate) kwh_price: OnceLock<f64>,
    sample: Mutex<TelemetrySample>,
    pub(crate) peers: PeerReports,
    pub(crate) downloads: Downloads,
    pub(crate) host: OnceLock<HostProbes>,
    pub(crate) rates: OnceLock<MeasuredRates>,
    /// The state of `paceline compute` on this machine.
    compute: OnceLock<PathBuf>,
    over: AtomicBool,
}

/// Ends the threads of a [`Dashboard`] when it is dropped.
#[derive(Debug)]
pub struct DashboardThreads {
    board: Dashboard,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for DashboardThreads {
    fn drop(&mut self) {
        self.board.0.over.store(true, Ordering::SeqCst);
        self.board.0.downloads.cancel_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
    }
}

impl Dashboard {
    /// A board with the requests of `live` alone. `downloads` supplies the settings of downloads.
    pub fn new(live: LiveRequests, downloads: PullSource) -> Self {
        Self(Arc::new(Inner {
            live,
            agent: OnceLock::new(),
            instances: OnceLock::new(),
            upstreams: OnceLock::new(),
            stages: OnceLock::new(),
            counts: OnceLock::new(),
            figures: OnceLock::new(),
            traffic: TrafficMeter::default(),
            manage: OnceLock::new(),
            kwh_price: OnceLock::new(),
            sample: Mutex::default(),
            peers: PeerReports::default(),
            downloads: Downloads::new(downloads),
            host: OnceLock::new(),
            rates: OnceLock::new(),
            compute: OnceLock::new(),
            over: AtomicBool::new(false),
        }))
    }

    /// Adds the cluster's data, and serves this node's to the others. Once.
    pub fn set_agent(&self, agent: &Agent) {
        if self.0.agent.set(agent.clone()).is_ok() {
            let own = Arc::downgrade(&self.0);
            agent.serve(peers::SERVICE, move |channel| peers::answer(&own, &channel));
            let own = Arc::downgrade(&self.0);
            agent.serve(host::LINES, move |channel| host::answer(&own, &channel));
            let own = Arc::downgrade(&self.0);
            agent.serve_local("board", move |_: &Value, _: &mut CommandProgress<'_>| {
                let own = own.upgrade().ok_or("the node is stopping")?;
                Ok(Self(own).status())
            });
        }
    }

    /// Adds the probes of this machine. Once.
    pub fn set_host(&self, host: HostProbes) {
        let _ = self.0.host.set(host); // the first one stays
    }

    /// The dashboard's callbacks for the HTTP server.
    pub fn for_server(&self) -> paceline_serve::DashboardConfig {
        let (status, watched, manage) = (self.clone(), self.clone(), self.clone());
        let stages = move |id: &str| match watched.0.stages.get() {
            Some(stages) => stages(id),
            None => Err(CommandError::Starting.into()),
        };
        let manage =
            move |command: &str, arguments: &Value| Ok(manage.command(command, arguments)?);
        let manage: Arc<CommandHandler> = Arc::new(manage);
        paceline_serve::DashboardConfig {
            status: StatusSource(Arc::new(move || status.status())),
            stages: Some(Arc::new(stages)),
            manage: Some(manage),
        }
    }

    /// Starts the threads for telemetry, changes, memory and logs.
    pub fn watch(&self, watch: DashboardOutputs) -> Result<DashboardThreads, Error> {
        let DashboardOutputs { events, home, tell } = watch;
        let _ = self.0.compute.set(home.root().join("compute/engine.json")); // watched once
        let mut watching = DashboardThreads {
            board: self.clone(),
            threads: Vec::new(),
        };
        let inner = Arc::clone(&self.0);
        watching.spawn("board", move || inner.run())?;
        if let Some(path) = events {
            let file = File::options().append(true).create(true).open(&path);
            let file = file.map_err(|source| Error::Events {
                path: path.clone(),
                source,
            })?;
            let (inner, tell) = (Arc::clone(&self.0), Arc::clone(&tell));
            watching.spawn("events", move || {
                if let Err(error) = inner.log(file) {
                    let path = path.display();
                    tell(&format!("warning: no more events to {path}: {error}"));
                }
            })?;
        }
        keep_no_large_blocks();
        let inner = Arc::clone(&self.0);
        watching.spawn("memory", move || inner.give_back_memory())?;
        match Audit::open(&home) {
            Ok(audit) => {
                let inner = Arc::clone(&self.0);
                watching.spawn("audit", move || inner.audit(&audit, &tell))?;
            }
            Err(error) => tell(&format!("warning: no audit log: {error}")),
        }
        Ok(watching)
    }

    /// All data of the page.
    fn status(&self) -> Value {
        let inner = &self.0;
        let agent = inner.agent.get();
        inner.peers.poll(inner);
        let others = inner.peers.reports();
        let (mut instances, portraits) = inner.instances();
        for it in &mut instances {
            let id = it["id"].as_str().unwrap_or_default().to_owned();
            let own = portraits.get(&id).map(|portrait| json!(portrait));
            let told = others.values().find_map(|part| part["portraits"].get(&id));
            if let Some(portrait) = own.or_else(|| told.cloned()) {
                it["portrait"] = portrait;
            }
        }
        let name = agent.and_then(|agent| Some(agent.nodes().first()?.facts.name.clone()));
        let (nodes, requests) = (
            inner.nodes(&others),
            inner.requests(name.as_deref(), &others),
        );
        let ways = agent.map(Agent::nodes_and_ways).unwrap_or_default();
        let traffic = traffic::sums(inner.traffic(), others.values());
        let links = links::told(&ways, &nodes, &traffic);
        let energy = energy(&nodes, &requests, inner.kwh_price.get().copied());
        json!({
            "name": name,
            "cluster": agent.map(Agent::cluster),
            "nodes": nodes,
            "links": links,
            "energy": energy,
            "problems": agent.map(Agent::problems).unwrap_or_default(),
            "instances": instances,
            "downloads": inner.downloads.recent(),
            "requests": requests,
            "compute": inner.compute.get().and_then(|path| engine_dashboard(path)),
        })
    }

    /// Gauges of this node's instances, this machine and its links, for `/metrics`.
    pub fn facts(&self) -> Vec<MetricSample> {
        let figures = self.0.figures.get();
        let mut facts = figures.map_or_else(Vec::new, |figures| figures());
        facts.extend(machine_facts(&lock(&self.0.sample)));
        let ways = self.0.agent.get().map(Agent::nodes_and_ways);
        facts.extend(links::facts(&ways.unwrap_or_default()));
        if let Some(agent) = self.0.agent.get() {
            let own = agent.nodes().into_iter().next();
            facts.extend(own.iter().flat_map(|own| devices::facts(own, &agent.map())));
        }
        let counts = self.0.counts.get().map(|counts| counts());
        facts.extend(traffic::facts(&counts.unwrap_or_default()));
        facts.extend(
            self.0
                .upstreams
                .get()
                .map(Upstreams::facts)
                .unwrap_or_default(),
        );
        facts
    }
}

impl DashboardThreads {
    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = std::thread::Builder::new().name(name.to_owned());
        self.threads.push(thread.spawn(run).map_err(Error::Thread)?);
        Ok(())
    }
}

impl Inner {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(crate) fn instances(&self) -> (Vec<Value>, BTreeMap<String, InstanceSummary>) {
        let instances = self.instances.get();
        let (mut all, portraits) = instances.map_or_else(Default::default, |it| it());
        all.extend(
            self.upstreams
                .get()
                .into_iter()
                .flat_map(Upstreams::instances),
        );
        (all, portraits)
    }

    /// Samples telemetry and polls for changes until the end.
    fn run(&self) {
        let mut sampler = Sampler::new("/");
        let mut changes = ChangeDetector::default();
        let begun = Instant::now();
        let mut next_sample = begun;
        while !self.is_over() {
            let is_sampled = Instant::now() >= next_sample;
            if is_sampled {
                next_sample += SAMPLE_EVERY;
                let sample = sampler.sample(begun.elapsed());
                *lock(&self.sample) = sample;
            }
            let nodes = self.agent.get().map(Agent::nodes).unwrap_or_default();
            let (instances, portraits) = self.instances();
            let mut news = changes.observe(&nodes, &instances, &portraits);
            if is_sampled {
                let ways = self.agent.get().map(Agent::nodes_and_ways);
                news.extend(changes.observe_links(&ways.unwrap_or_default()));
            }
            let refusals = self.agent.get().map(Agent::refusals).unwrap_or_default();
            news.extend(refusals.into_iter().map(changes::refused));
            let acts = self.agent.get().map(Agent::acts).unwrap_or_default();
            news.extend(acts.into_iter().map(changes::managed));
            for kind in news {
                self.live.events().put(kind);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Appends events to the file until the end.
    fn log(&self, mut file: File) -> std::io::Result<()> {
        let mut seen = 0;
        loop {
            let is_last = self.is_over();
            let events = self.live.events().after(seen, usize::MAX);
            let mut text = String::new();
            for event in &events {
                text += &serde_json::to_string(event).expect("an event is JSON");
                text.push('\n');
                seen = event.seq;
            }
            file.write_all(text.as_bytes())?;
            if is_last {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns freed memory to the system until the end.
    fn give_back_memory(&self) {
        let mut heap = memory_bytes().map(TrimPolicy::new);
        for look in 1_u32.. {
            if self.is_over() {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
            if !look.is_multiple_of(LOOKS_AT_MEMORY) {
                continue;
            }
            let (Some(heap), Some(before)) = (&mut heap, memory_bytes()) else {
                continue; // a system that does not say
            };
            if heap.is_due(before) {
                give_back_free_memory();
                heap.trimmed(before, memory_bytes().unwrap_or(before));
            }
        }
    }

    /// Appends to the audit log until the end. Reports the first failed line.
    fn audit(&self, audit: &Audit, tell: &MessageSink) {
        let (mut seen, mut is_told) = (0, false);
        loop {
            let is_last = self.is_over();
            for event in self.live.events().after(seen, usize::MAX) {
                seen = event.seq;
                if !event.kind.is_audited() {
                    continue;
                }
                let line = serde_json::to_string(&event).expect("an event is JSON");
                if let Err(error) = audit.append(&line)
                    && !is_told
                {
                    is_told = true;
                    tell(&format!("warning: the audit log has gaps: {error}"));
                }
            }
            if is_last {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// This node's part, for its page and the other nodes.
    pub(crate) fn own_part(&self) -> Value {
        let (_, portraits) = self.instances();
        json!({
            "telemetry": *lock(&self.sample),
            "requests": self.live.running(Instant::now()),
            "portraits": portraits,
            "traffic": self.traffic(),
        })
    }

    /// Current traffic of this node's instances between machines.
    fn traffic(&self) -> Vec<traffic::LinkRate> {
        let counts = self.counts.get();
        counts.map_or_else(Vec::new, |counts| {
            self.traffic.rates(Instant::now(), &**counts)
        })
    }

    /// The nodes with telemetry, this one first; only this machine without a cluster.
    fn nodes(&self, others: &BTreeMap<String, Value>) -> Vec<Value> {
        let own = json!(*lock(&self.sample));
        let Some(agent) = self.agent.get() else {
            return vec![
                json!({ "name": "this machine", "state": "alive", "found_by": "self",
                                "linked": true, "telemetry": own }),
            ];
        };
        let map = agent.map();
        let told = |node: paceline_cluster::nodes::agent::NodeView| {
            let id = node.id.to_string();
            let is_own = node.id == agent.id();
            let mut value = json!(node);
            devices::add_placed(&mut value, &node, &map);
            let other = others.get(&id).map(|part| part["telemetry"].clone());
            if let Some(telemetry) = other.or_else(|| is_own.then(|| own.clone())) {
                value["telemetry"] = telemetry;
            }
            value
        };
        agent.nodes().into_iter().map(told).collect()
    }

    /// Running requests of all nodes, each with its ingress node's name.
    fn requests(&self, own: Option<&str>, others: &BTreeMap<String, Value>) -> Vec<Value> {
        let agent = self.agent.get();
        let nodes = agent.map(Agent::nodes).unwrap_or_default();
        let name = |id: &String| {
            let node = nodes.iter().find(|node| node.id.to_string() == *id);
            node.map(|node| node.facts.name.clone())
        };
        let running = json!(self.live.running(Instant::now()));
        let mut all = Vec::new();
        let parts = std::iter::once((own.map(str::to_owned), &running));
        let told = others
            .iter()
            .map(|(id, part)| (name(id), &part["requests"]));
        for (node, requests) in parts.chain(told) {
            for request in requests.as_array().into_iter().flatten() {
                let mut request = request.clone();
                request["node"] = json!(node);
                all.push(request);
            }
        }
        all
    }
}

/// The address of the dashboard of an engine that `paceline compute` has started here, if it
/// listens. Cost: a file and a connection of the loopback interface.
fn engine_dashboard(state: &Path) -> Option<String> {
    let state: Value = serde_json::from_slice(&std::fs::read(state).ok()?).ok()?;
    let address = state["dashboard"].as_str()?;
    let host = address.strip_prefix("http://")?.split('/').next()?;
    let host: SocketAddr = host.parse().ok()?;
    TcpStream::connect_timeout(&host, ENGINE_KNOCK).ok()?;
    Some(address.to_owned())
}

#[cfg(test)]
mod tests;
