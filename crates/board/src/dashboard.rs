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

use std::collections::BTreeMap;
use std::fmt;
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
use paceline_cluster::telemetry::{Energy, Gpu, Sampler, TelemetrySample};
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
use crate::label::label;
use crate::own_cluster::MeasuredRates;
use crate::peers::PeerReports;
use crate::traffic::TrafficMeter;
use crate::{CommandError, Error, MessageSink, devices, links, peers, traffic};

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
#[derive(Clone)]
pub struct Dashboard(pub(crate) Arc<Inner>);

impl fmt::Debug for Dashboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Board(..)")
    }
}

/// Outputs of a [`Dashboard`]: files and warnings.
pub struct DashboardOutputs {
    /// File to append events to, a line of JSON each.
    pub events: Option<PathBuf>,
    /// Home of the audit log.
    pub home: Home,
    /// Warnings for people; must not block.
    pub tell: MessageSink,
}

impl fmt::Debug for DashboardOutputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({:?})", self.home)
    }
}

pub(crate) struct Inner {
    live: LiveRequests,
    pub(crate) agent: OnceLock<Agent>,
    instances: OnceLock<Box<InstanceSource>>,
    upstreams: OnceLock<Upstreams>,
    stages: OnceLock<Box<StageProbe>>,
    counts: OnceLock<Box<TrafficSource>>,
    figures: OnceLock<Box<FigureSource>>,
    traffic: TrafficMeter,
    pub(crate) manage: OnceLock<Box<CommandHandler>>,
    /// Price of a kilowatt-hour.
    kwh_price: OnceLock<f64>,
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

    /// Adds instances. Once.
    pub fn set_instances(&self, instances: Box<InstanceSource>) {
        let _ = self.0.instances.set(instances); // the first one stays
    }

    /// Adds the models of upstreams. Once.
    pub(crate) fn set_upstreams(&self, upstreams: &Upstreams) {
        let _ = self.0.upstreams.set(upstreams.clone()); // the first one stays
    }

    /// Adds stage measurements of instances. Once.
    pub fn set_stages(&self, stages: Box<StageProbe>) {
        let _ = self.0.stages.set(stages); // the first one stays
    }

    /// Adds the traffic of instances between machines. Once.
    pub fn set_counts(&self, counts: Box<TrafficSource>) {
        let _ = self.0.counts.set(counts); // the first one stays
    }

    /// Adds metrics of instances. Once.
    pub(crate) fn set_figures(&self, figures: Box<FigureSource>) {
        let _ = self.0.figures.set(figures); // the first one stays
    }

    /// Adds the cost of tokens at `price` per kilowatt-hour. Once.
    pub fn set_kwh_price(&self, price: f64) {
        let _ = self.0.kwh_price.set(price); // the first one stays
    }

    /// Adds commands. Once.
    pub fn set_manage(&self, manage: Box<CommandHandler>) {
        let _ = self.0.manage.set(manage); // the first one stays
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
    ///
    /// # Errors
    /// [`Error::Events`], [`Error::Thread`].
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

/// Current energy per token: watts of all reporting machines over tokens a second of all requests.
fn energy(nodes: &[Value], requests: &[Value], per_kwh: Option<f64>) -> Option<Energy> {
    let watts = nodes.iter().filter_map(|node| {
        let sample = serde_json::from_value::<TelemetrySample>(node["telemetry"].clone());
        sample.ok()?.watts()
    });
    let tok_s = requests
        .iter()
        .filter_map(|request| request["tok_s"].as_f64());
    Energy::of(watts.reduce(|a, b| a + b)?, tok_s.sum(), per_kwh)
}

/// The machine's metrics under their Prometheus names.
fn machine_facts(sample: &TelemetrySample) -> Vec<MetricSample> {
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    let sum = |of: fn(&paceline_cluster::telemetry::InterfaceTraffic) -> f64| {
        let rates = sample.networks.iter().map(of);
        rates.reduce(|a, b| a + b)
    };
    #[rustfmt::skip]
    let all = [
        ("node_cpu_busy_ratio", "Share of time that the cores were busy", sample.cpu_busy),
        ("node_cpu_mhz", "Mean frequency of the cores", sample.cpu_mhz),
        ("node_memory_bytes", "Main memory", bytes(sample.memory_bytes)),
        ("node_memory_available_bytes", "Main memory that programs can still take",
         bytes(sample.memory_available_bytes)),
        ("node_swap_used_bytes", "Swap space in use", bytes(sample.swap_used_bytes)),
        ("node_cpu_pressure_ratio", "Share of time that a task waited for a core",
         sample.cpu_pressure),
        ("node_memory_pressure_ratio", "Share of time that a task waited for memory",
         sample.memory_pressure),
        ("node_io_pressure_ratio", "Share of time that a task waited for a disk",
         sample.io_pressure),
        ("node_disk_read_bytes_per_second", "Read from all disks", sample.disk_read_bytes_s),
        ("node_disk_written_bytes_per_second", "Written to all disks", sample.disk_write_bytes_s),
        ("node_network_received_bytes_per_second", "Received without loopback",
         sum(|network| network.received_bytes_s)),
        ("node_network_sent_bytes_per_second", "Sent without loopback",
         sum(|network| network.sent_bytes_s)),
        ("node_temperature_celsius", "The hottest sensor", sample.temperature_c),
        ("node_package_watts", "Power of all processor packages", sample.package_watts),
        ("node_battery_ratio", "Charge of the battery", sample.battery),
        ("node_watts", "Power of processor packages and graphics processors, on battery of all",
         sample.watts()),
        ("node_throttled_ratio", "Share of time that a package was slowed down by heat",
         sample.throttled),
    ];
    let known = all.into_iter().filter_map(|(name, help, value)| {
        let value = value?;
        Some(MetricSample {
            name,
            help,
            labels: String::new(),
            value,
        })
    });
    known.chain(gpu_facts(&sample.gpus)).collect()
}

/// Metrics of each GPU, grouped by name.
fn gpu_facts(gpus: &[Gpu]) -> impl Iterator<Item = MetricSample> {
    type Of = fn(&Gpu) -> Option<f64>;
    #[rustfmt::skip]
    let all: [(&'static str, &'static str, Of); 6] = [
        ("node_gpu_busy_ratio", "Share of time that the graphics processor was busy",
         |gpu| gpu.busy),
        ("node_gpu_memory_bytes", "Memory of the graphics processor",
         |gpu| gpu.memory_bytes.map(|bytes| bytes as f64)),
        ("node_gpu_memory_used_bytes", "Memory of the graphics processor in use",
         |gpu| gpu.memory_used_bytes.map(|bytes| bytes as f64)),
        ("node_gpu_watts", "Power of the graphics processor", |gpu| gpu.watts),
        ("node_gpu_temperature_celsius", "Its hottest sensor", |gpu| gpu.temperature_c),
        ("node_gpu_throttled", "Whether it is slowed down because of heat or power",
         |gpu| gpu.throttled.map(|is_slow| f64::from(u8::from(is_slow)))),
    ];
    all.into_iter().flat_map(move |(name, help, of)| {
        gpus.iter().filter_map(move |gpu| {
            let value = of(gpu)?;
            let labels = label("gpu", &gpu.name);
            Some(MetricSample {
                name,
                help,
                labels,
                value,
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_cluster::nodes::agent::NodePaths;
    use paceline_cluster::telemetry::InterfaceTraffic;
    use paceline_serve::METRIC_NAMES;

    /// A sample with all values.
    fn full() -> TelemetrySample {
        TelemetrySample {
            cpu_busy: Some(0.5),
            cpu_mhz: Some(1.0),
            memory_bytes: Some(1),
            memory_available_bytes: Some(1),
            swap_used_bytes: Some(1),
            cpu_pressure: Some(0.1),
            memory_pressure: Some(0.1),
            io_pressure: Some(0.1),
            disk_read_bytes_s: Some(1.0),
            disk_write_bytes_s: Some(1.0),
            networks: vec![InterfaceTraffic::default()],
            temperature_c: Some(40.0),
            package_watts: Some(9.0),
            battery: Some(0.5),
            throttled: Some(0.0),
            gpus: vec![gpu("card0"), gpu("card1")],
            ..TelemetrySample::default()
        }
    }

    fn gpu(name: &str) -> Gpu {
        Gpu {
            name: name.to_owned(),
            busy: Some(0.5),
            memory_bytes: Some(2),
            memory_used_bytes: Some(1),
            watts: Some(90.0),
            temperature_c: Some(60.0),
            throttled: Some(true),
        }
    }

    /// A cluster of two whose links are measured.
    fn two() -> [NodePaths; 2] {
        let mut all = [
            links::tests::ways((1, "a"), (2, "b"), 120),
            links::tests::ways((2, "b"), (1, "a"), 130),
        ];
        all[0].paths[0].path.bytes_per_s = Some(940_000_000);
        all
    }

    /// Names of metrics in a text: words that begin with `paceline_`.
    fn names(text: &str) -> Vec<String> {
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let words = text.split(|c| !is_part(c));
        words
            .filter(|word| word.starts_with("paceline_"))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn dashboard_and_alerts_name_metrics_that_there_are() {
        let facts = machine_facts(&full())
            .into_iter()
            .chain(links::facts(&two()))
            .chain(traffic::facts(&[traffic::tests::counts(
                "1",
                1,
                [[0, 5], [6, 0]],
            )]));
        let mut machine: Vec<String> = facts
            .map(|fact| format!("paceline_{}", fact.name))
            .collect();
        machine.dedup(); // of each graphics processor
        assert_eq!(machine.len(), 17 + 6 + 2 + 1);
        // That file has the names of instance metrics.
        let up = include_str!("figures.rs");
        let is_known = |name: &String| {
            let short = name.trim_start_matches("paceline_");
            METRIC_NAMES.contains(&name.as_str())
                || machine.contains(name)
                || up.contains(&format!("\"{short}\""))
        };
        let grafana = include_str!("../../../docs/monitoring/grafana.json");
        let alerts = include_str!("../../../docs/monitoring/alerts.yml");
        let _: Value = serde_json::from_str(grafana).unwrap();
        for (text, least) in [(grafana, 30), (alerts, 11)] {
            let used = names(text);
            assert!(used.len() >= least, "{used:?}");
            let unknown: Vec<_> = used.iter().filter(|name| !is_known(name)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
        // Guards against a dashboard with few metrics.
        let used = names(grafana);
        let forgotten = machine.iter().filter(|name| !used.contains(name)).count();
        assert!(
            forgotten <= 5,
            "{forgotten} of the machine's metrics are shown nowhere"
        );
    }

    #[test]
    fn energy_is_told_while_tokens_come_and_machines_tell_watts() {
        let node = |watts: Option<f64>| json!({ "telemetry": { "package_watts": watts } });
        let (known, silent) = (json!({ "telemetry": { "package_watts": 30.0 } }), json!({}));
        let requests = [json!({ "tok_s": 4.0 }), json!({ "tok_s": 2.0 }), json!({})];
        let told = energy(&[known.clone(), silent, node(None)], &requests, Some(0.36)).unwrap();
        assert_eq!((told.watts, told.joules_per_token), (30.0, 5.0));
        assert!((told.cost_per_million.unwrap() - 0.5).abs() < 1e-12);
        assert_eq!(energy(&[known], &[], None), None);
        assert_eq!(energy(&[], &requests, None), None);
    }

    #[test]
    fn figures_that_a_machine_does_not_tell_are_absent() {
        assert!(machine_facts(&TelemetrySample::default()).is_empty());
        let silent = Gpu {
            name: "card0".to_owned(),
            watts: Some(0.0),
            ..Gpu::default()
        };
        let facts: Vec<MetricSample> = gpu_facts(&[silent]).collect();
        let names: Vec<&str> = facts.iter().map(|fact| fact.name).collect();
        assert_eq!(names, ["node_gpu_watts"]);
    }

    #[test]
    fn graphics_processors_and_links_are_told_apart_by_labels() {
        let told = |facts: Vec<MetricSample>, name: &str| -> Vec<(String, f64)> {
            let own = facts.into_iter().filter(|fact| fact.name == name);
            own.map(|fact| (fact.labels, fact.value)).collect()
        };
        let pair = |labels: &str, value: f64| (labels.to_owned(), value);
        assert_eq!(
            told(machine_facts(&full()), "node_gpu_throttled"),
            [pair("gpu=\"card0\"", 1.0), pair("gpu=\"card1\"", 1.0)]
        );
        // Only this node's links: the other node has its own `/metrics`.
        let labels = "from=\"a\",to=\"b\",interface=\"eth0\"";
        assert_eq!(
            told(links::facts(&two()), "link_latency_seconds"),
            [pair(labels, 0.000_12)]
        );
        assert_eq!(
            told(links::facts(&two()), "link_bandwidth_bytes_per_second"),
            [pair(labels, 940e6)]
        );
        assert_eq!(links::facts(&[]), []);
        assert_eq!(label("a", "b\"\\\n"), "a=\"b\\\"\\\\\\n\"");
    }
}
