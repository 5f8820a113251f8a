//! Control plane: the instances of a cluster, as each node reconciles them with the shared map.
//!
//! The control loop of each node observes the cluster and performs the actions that the rules of
//! `paceline_fleet` decide. The node's commands and its HTTP server call [`Fleet`]. It computes
//! nothing itself: that is [`Instance`](crate::Instance) and its workers.
//!
//! ```text
//! load: writes a record for each replica to the shared map ──▶ every node looks at its duties
//! owner (the record's first node): copies the model to the others, starts an Instance over them
//!   other nodes: run workers (service `workers`), copy the model (`fetch`, `file`)
//!   every node: opens a door to each model; requests go to the owner of a replica (`ingress`)
//! owner dead: the first successor that lives writes the next record and owns it
//! ```
//!
//! - [`Fleet`]: the handle; runs next to the cluster agent.
//! - [`preview`](Fleet::preview): placements with predictions, before anything loads.
//! - [`leases`]: instances for programs of this machine's user.
//! - [`load`](Fleet::load), [`unload`](Fleet::unload), [`list`](Fleet::list): users' requests.
//! - `control_loop`: the observation and the actions. `expansion` evaluates another placement.
//! - Loading writes the specs; placement spread decides which nodes compute which replica.
//! - `services`, `replicas`, `prefixes`: the models of this node's server, and routing of a request
//!   to a replica.
//! - `copies`, `tree`, and the modules of byte ranges, partial files and signed roots: distribution
//!   of model files between nodes. `hub`: bytes that no node has.
//! - `stores`: the models on each node's disk, and their limits.
//! - [`journals`]: copies of streamed answers, for clients that reconnect to another node.

mod answer_traces;
mod cables;
mod control_loop;
mod copies;
mod device_memory;
mod drain;
mod durable_journals;
mod encoders;
mod engines;
mod error;
mod expansion;
mod file_ranges;
mod flaps;
mod hosts;
mod hub;
mod ingress;
mod inventory;
pub mod journals;
pub mod leases;
mod listing;
mod load_request;
mod loading;
mod manifest;
mod node_connection;
mod one_machine;
mod owner;
mod owner_routes;
mod peer_services;
pub(crate) mod prefixes;
mod preview;
mod proposals;
mod replicas;
mod roots;
mod running;
mod services;
mod spec;
mod speed;
mod spread;
mod stale_records;
mod standby;
mod stores;
mod unused_nodes;
mod whole_copy;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{CallbackError, lock};
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::{NodeId, RegisterKey};
use paceline_engine::{EncoderService, Service};
use paceline_fleet::{InstanceId, InstanceSpec, NODES_MAX, ServiceStarts, specs};
use serde::Serialize;

use crate::trace::{Recording, Stages};
use crate::workers::host::{HostSpec, ModelName};
use crate::{Instance, InstanceSummary};
pub use answer_traces::TraceRequest;
use copies::ModelCopies;
pub use copies::{MendedFile, RepairReport, StoredFile};
use durable_journals::DurableJournals;
pub use error::Error;
use hosts::NodeConnection;
pub use hub::{ByteSink, FetchProgress, HubOrigin, ModelHub};
use ingress::IngressService;
use journals::{Deaths, JournalCopier, JournalStore};
pub use listing::InstanceView;
pub use load_request::LoadRequest;
pub use paceline_fleet::memory::{lent_devices, placed_bytes};
use paceline_fleet::replica_names::Name;
pub use paceline_fleet::replica_names::Replica;
use paceline_fleet::rules::collect::IdleRecords;
use paceline_fleet::rules::route::ModelRoute;
pub use paceline_fleet::rules::route::{UnservedModel, UnservedState};
use paceline_fleet::rules::sign::ATTEMPT_EVERY;
use paceline_worker::CollectiveTraffic;
pub use preview::{Preview, Proposal};
use replicas::{Preferred, Replicas};
use running::RunningInstance;
pub use spec::{FleetSpec, MakeKernels, ModelRegistrar, Sizes};
pub use stores::{CopyOutcome, Holding, NodeStore, OwnStore};
pub use whole_copy::whole_copy;

/// Names of a node's services, as peers open them.
const CREW: &str = "crew";
const FETCH: &str = "fetch";
const FILE: &str = "file";
const PIECES: &str = "pieces";
const STORES: &str = "stores";
const ANSWERS: &str = "answers";
const TRACE: &str = "trace";
const STAGES: &str = "stages";
const SPEED: &str = "speed";

/// Interval of reconciliation when nothing has changed.
const LOOK_EVERY: Duration = paceline_fleet::ROUND;

/// Longest wait for the beginning of a model's file that a command needs: two attempts.
const BEGINNING_LIMIT: Duration = Duration::from_secs(10);

/// Log the failure of this attempt only: earlier ones may precede the signed root.
const PART_TOLD: u32 = 12;

/// Longest wait for the channel of an ingress to an owner.
const OWNER_LIMIT: Duration = Duration::from_secs(3);

/// Longest wait at the end of this node for its own ingress to release an instance. Its workers end
/// with its last user, and the ingress looks every 200 ms.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);

/// Most replicas of one load: one for each node of the largest instance.
const REPLICAS_MAX: u16 = NODES_MAX as u16;

/// The file of a model by the user's name for it, or why there is none.
pub type FileLookup = dyn Fn(&str) -> Result<PathBuf, CallbackError> + Send + Sync;

/// An instance to which this node can send requests.
#[derive(Clone, Debug, Serialize)]
pub struct UsableInstance {
    #[serde(flatten)]
    pub view: InstanceView,
    /// The model's file on this node.
    pub path: PathBuf,
}

/// The control plane of this node. Dropping it ends the node's instances.
#[derive(derive_more::Debug)]
#[debug("fleet of {:?}", self.inner.agent)]
pub struct Fleet {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Inner {
    agent: Agent,
    spec: FleetSpec,
    copies: Arc<ModelCopies>,
    host: Arc<HostSpec>,
    speed: speed::SpeedCache,
    state: Mutex<FleetState>,
    over: AtomicBool,
    copier: JournalCopier,
    shelf: JournalStore,
    durable: Option<DurableJournals>,
    deaths: Deaths,
}

/// State that the control loop shares with the threads that it starts, and with commands.
#[derive(Default)]
struct FleetState {
    owned: BTreeMap<InstanceId, RunningInstance>,
    open: BTreeMap<Name, RoutedModel>,
    starts: ServiceStarts,
    /// Instances leased to programs of this machine.
    leased: BTreeSet<InstanceId>,
    /// By instance: time and number of attempts to fetch the files needed to answer with it. Also
    /// of those to sign this node's files.
    tried: BTreeMap<InstanceId, (Instant, u32)>,
    /// When all work of this node had moved to others.
    drained: Option<Instant>,
    /// Whether a thread evaluates another placement of an instance.
    is_evaluating: bool,
    /// Instances whose last evaluated placement is predicted to be slower.
    slower: BTreeSet<InstanceId>,
    /// Records that no instance used at the last check, and whether a check runs.
    idle_records: IdleRecords,
    is_collecting: bool,
}

/// The service that answers requests for a model name on this node.
#[derive(Clone)]
enum RoutedModel {
    /// Replicas on the cluster's nodes.
    Replicas(Arc<Replicas>),
    /// An encoder in this process.
    Encoder,
    /// The instance that this node leases for its own life, without a detour by an ingress.
    Own(InstanceId),
}

impl RoutedModel {
    const fn route(&self) -> ModelRoute {
        match self {
            Self::Replicas(_) => ModelRoute::Replicas,
            Self::Encoder => ModelRoute::Encoder,
            Self::Own(id) => ModelRoute::Own(*id),
        }
    }
}

/// The service of an instance on its owner.
#[derive(Clone)]
enum OwnerService {
    /// Workers.
    Instance(Arc<Instance>),
    /// An encoder in this process.
    Encoder(Arc<EncoderService>),
}

impl OwnerService {
    fn instance(&self) -> Option<&Arc<Instance>> {
        match self {
            Self::Instance(instance) => Some(instance),
            Self::Encoder(_) => None,
        }
    }
}

/// The revision of the numerics of an instance's nodes, and their kernel classes. Instances with
/// equal ones continue each other's answers, also between two protocols.
type Numbers = (u32, String);

fn name_of(wanted: &InstanceSpec) -> ModelName {
    ModelName {
        name: wanted.model.clone(),
        sha256: wanted.sha256.clone(),
        manifest: wanted.manifest,
    }
}

impl Fleet {
    /// Starts the services for other nodes and the reconciling thread.
    ///
    /// # Errors
    /// What the system says when it refuses a thread.
    pub fn start(agent: Agent, mut spec: FleetSpec) -> std::io::Result<Self> {
        let find = std::mem::replace(&mut spec.find, Box::new(|_| Err("the fleet has it".into())));
        let may_have = stores::limit(&spec.store, &spec.copies, &agent);
        let found = (find, spec.copies.clone());
        let copies = ModelCopies::new(found, may_have, Arc::clone(&spec.tell));
        let copies = Arc::new(copies.with_hub(Arc::clone(&spec.hub)));
        let (own, tell) = (Arc::clone(&copies), Arc::clone(&spec.tell));
        let (brings, repairs) = (Arc::clone(&copies), Arc::clone(&copies));
        let (wholes, checker) = (Arc::clone(&copies), agent.clone());
        let [finder, bringer, repairer, truster] = [(); 4].map(|()| agent.clone());
        let (shelf, tell_of) = (JournalStore::default(), || Arc::clone(&spec.tell));
        let folder = spec.journals.clone();
        let durable = folder.map(|folder| DurableJournals::open(folder, &shelf, tell_of()));
        let durable = durable.transpose()?;
        let inner = Arc::new(Inner {
            copies,
            host: Arc::new(HostSpec {
                program: spec.program.0.clone(),
                args: spec.program.1.clone(),
                env: spec.worker_env.clone(),
                writable: spec.worker_folders.clone(),
                find: Box::new(move |model| Ok(own.find_part(&finder, model)?)),
                find_whole: Box::new(move |model| {
                    Ok(wholes.find_right((&checker, model), copies::CheckRange::All)?)
                }),
                bring: Box::new(move |model, file, parts, goes_on| {
                    Ok(brings.bring(&bringer, (model, file), parts, goes_on)?)
                }),
                repair: Box::new(move |model, file, parts, goes_on| {
                    Ok(repairs.repair(&repairer, (model, file), parts, goes_on)?)
                }),
                trusts: Box::new(move |device, node| truster.trusts_cable(device, node)),
                interface: spec.interface.clone(),
                on_line: Arc::new(move |line| tell(&format!("[worker] {line}"))),
            }),
            copier: JournalCopier::start(agent.clone())?,
            shelf,
            durable,
            deaths: Deaths::default(),
            agent,
            spec,
            speed: speed::SpeedCache::default(),
            state: Mutex::default(),
            over: AtomicBool::new(false),
        });
        inner.serve();
        inner.end_past_leases();
        let own = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("fleet".to_owned());
        let thread = Some(thread.spawn(move || own.run())?);
        Ok(Self { inner, thread })
    }

    /// Requests that a model is loaded. Returns the instance of each replica without waiting;
    /// [`list`](Self::list) has the progress. For several replicas it first takes missing
    /// measurements, as [`preview`](Self::preview) does.
    ///
    /// # Errors
    /// The model is not on this machine, a node does not exist, or the replicas do not fit in
    /// memory. Nothing is loaded then.
    pub fn load(&self, ask: &LoadRequest) -> Result<Vec<InstanceId>, Error> {
        let loaded = self.inner.load(ask);
        self.inner.agent.save();
        loaded
    }

    /// Placements of a model over live nodes, each with a prediction; loads nothing. Takes missing
    /// measurements, a second or two the first time.
    ///
    /// # Errors
    /// The model is not on this machine, or a node does not exist.
    pub fn preview(&self, ask: &LoadRequest) -> Result<Preview, Error> {
        self.inner.preview(ask)
    }

    /// Requests that a model is unloaded, by its name or an instance's id: all replicas, or the one
    /// with this number. Returns the number of instances.
    ///
    /// # Errors
    /// No such instance.
    pub fn unload(&self, name: &str, replica: Option<u16>) -> Result<usize, Error> {
        let unloaded = self.inner.unload(name, replica);
        self.inner.agent.save();
        unloaded
    }

    /// Traces one answer of an instance on all of its ranks. The owner runs it; blocks until the
    /// answer is complete, at most some minutes.
    ///
    /// # Errors
    /// No such instance, or it does not answer.
    pub fn trace(&self, ask: &TraceRequest) -> Result<Recording, Error> {
        answer_traces::trace(&self.inner, ask)
    }

    /// Samples for some seconds where the time of an instance's ranks goes, on its owner. `name` is
    /// its id or model. Blocks as long.
    ///
    /// # Errors
    /// No such instance, it does not answer, or another trace of it is running.
    pub fn stages(&self, name: &str) -> Result<Stages, Error> {
        answer_traces::stages(&self.inner, name)
    }

    /// Drains this node: moves its instances to other nodes while they keep answering. Waits until
    /// others answer with them, at most `limit`; `wait` is called about once a second. Returns the
    /// names of models that could not be moved. If no node can take over, it logs a warning and
    /// returns none.
    pub fn leave(&self, limit: Duration, wait: &mut dyn FnMut()) -> Vec<String> {
        self.inner.leave(limit, wait)
    }

    /// All instances in the shared map.
    pub fn list(&self) -> Vec<InstanceView> {
        self.inner.list()
    }

    /// Replicates a segment of a journal to another node; `done` receives the result. Does not
    /// block.
    pub fn keep(&self, piece: journals::ReplicatedSegment, done: journals::JournalCallback) {
        self.inner.keep(piece, done);
    }

    /// The longest copy of a journal on any node, for the holder of the API key with this id. May
    /// block for some seconds.
    pub fn find_journal(&self, id: &str, key: Option<&str>) -> journals::JournalSearch {
        journals::find(&self.inner, id, key)
    }

    /// The least loaded ready instance of a name or id, if this node has its tokenizer. That needs
    /// the beginning of the model file, which the node fetches once it sees the instance; waits for
    /// it up to [`BEGINNING_LIMIT`].
    pub fn using(&self, model: &str) -> Option<UsableInstance> {
        let until = Instant::now() + BEGINNING_LIMIT;
        loop {
            let (view, wanted) = self.inner.ready_called(model)?;
            match owner::part_of(&self.inner, &wanted) {
                Ok(path) => return Some(UsableInstance { view, path }),
                Err(_) if Instant::now() > until => return None,
                Err(_) => std::thread::sleep(LOOK_EVERY / 10),
            }
        }
    }

    /// An instance of the cluster, on any node, as a local service. Other replicas of its model
    /// answer while it does not.
    ///
    /// # Errors
    /// The id does not parse, or the system refuses a thread.
    pub fn service(&self, id: &str) -> Result<Arc<dyn Service>, Error> {
        let id: InstanceId = id
            .parse()
            .map_err(|_| Error::InstanceId { id: id.to_owned() })?;
        if !self.inner.is_wanted(id) {
            return Err(Error::NotLoaded { id });
        }
        if let Some(all) = self.inner.replicas_with(id) {
            return Ok(Arc::new(Preferred { all, first: id }));
        }
        let service = IngressService::start(&self.inner, id, None);
        Ok(Arc::new(service.map_err(Error::of("a thread"))?))
    }

    /// Summaries of the ready instances that this node owns, by id.
    pub fn portraits(&self) -> BTreeMap<String, InstanceSummary> {
        let told = self.ready().into_iter().map(|(id, it)| (id, it.portrait()));
        told.collect()
    }

    /// Bytes sent between the ranks of this node's own instances. Waits up to `limit` for each
    /// instance and leaves out late ones.
    pub fn exchanged(&self, limit: Duration) -> Vec<CollectiveTraffic> {
        let views = self.list();
        let told = self.ready().into_iter().filter_map(|(id, it)| {
            let view = views.iter().find(|view| view.id == id)?;
            Some(CollectiveTraffic {
                epoch: it.epoch(),
                nodes: view.nodes.clone(),
                sent: it.sent_between(limit)?,
                id,
            })
        });
        told.collect()
    }

    /// The instances that this node owns and that are ready, by id.
    pub fn ready(&self) -> Vec<(String, Arc<Instance>)> {
        let state = lock(&self.inner.state);
        let ready = state.owned.iter();
        let ready = ready.filter_map(|(id, it)| Some((id.to_string(), it.own_instance()?)));
        ready.collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
        let open = std::mem::take(&mut lock(&self.inner.state).open);
        open.keys().for_each(|name| self.inner.close(name));
        let owned = std::mem::take(&mut lock(&self.inner.state).owned);
        let until = Instant::now() + RELEASE_LIMIT;
        for instance in owned
            .into_values()
            .flat_map(RunningInstance::into_instances)
        {
            while Arc::strong_count(&instance) > 1 && Instant::now() < until {
                std::thread::sleep(RELEASE_LIMIT / 100);
            }
            drop(instance); // ends its workers
        }
        self.inner.end_leases();
    }
}

impl Fleet {
    /// The cluster agent of this node.
    pub fn agent(&self) -> Agent {
        self.inner.agent.clone()
    }
}

impl Inner {
    /// The least loaded ready instance of a name or id, and its spec.
    fn ready_called(&self, model: &str) -> Option<(InstanceView, InstanceSpec)> {
        let map = self.agent.map();
        let called = specs(&map).filter(|(.., wanted)| wanted.is_called(model));
        let called: BTreeSet<String> = called.map(|(id, ..)| id.to_string()).collect();
        let is_it =
            |it: &InstanceView| it.state == "ready" && (called.contains(&it.id) || it.id == model);
        let all = self.list().into_iter().filter(is_it);
        let view = all.min_by_key(|it| (it.load, it.asked))?;
        let id: InstanceId = view.id.parse().ok()?;
        let (_, _, wanted) = specs(&map).find(|(other, ..)| *other == id)?;
        Some((view, wanted))
    }

    /// The replica set that contains an instance, if this node answers with it.
    fn replicas_with(&self, id: InstanceId) -> Option<Arc<Replicas>> {
        let state = lock(&self.state);
        let mut all = state.open.values().filter_map(|door| match door {
            RoutedModel::Replicas(all) => Some(all),
            RoutedModel::Encoder | RoutedModel::Own(_) => None,
        });
        all.find(|all| all.has(id)).cloned()
    }

    /// Number of the next attempt to get or sign a file of an instance, from 1; `None` so shortly
    /// after the last.
    fn attempt(&self, id: InstanceId) -> Option<u32> {
        let (now, mut state) = (Instant::now(), lock(&self.state));
        let last = state.tried.get(&id).copied();
        let is_early = |(at, _): (Instant, u32)| now.saturating_duration_since(at) < ATTEMPT_EVERY;
        if last.is_some_and(is_early) {
            return None;
        }
        let count = last.map_or(1, |(_, count)| count.saturating_add(1));
        state.tried.insert(id, (now, count));
        Some(count)
    }

    /// Fetches the beginning of a model file on its own thread: it holds the tokenizer, which this
    /// node needs to answer with another node's instance. A later reconciliation registers the
    /// model.
    fn get_part(self: &Arc<Self>, id: InstanceId, wanted: &InstanceSpec) {
        let Some(count) = self.attempt(id) else {
            return;
        };
        let (inner, wanted) = (Arc::clone(self), wanted.clone());
        let run = move || {
            if let Err(reason) = inner.copies.take_part(&inner.agent, &wanted)
                && count == PART_TOLD
            {
                let model = &wanted.model;
                (inner.spec.tell)(&format!("cannot answer with {model}: {reason}"));
            }
        };
        self.spawn("part", run);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn is_wanted(&self, id: InstanceId) -> bool {
        specs(&self.agent.map()).any(|(other, ..)| other == id)
    }

    /// Revision of the numerics and kernel classes of an instance.
    fn numbers_of(&self, id: InstanceId) -> Option<Numbers> {
        let map = self.agent.map();
        let (_, _, wanted) = specs(&map).find(|(other, ..)| *other == id)?;
        let mut nodes = self.agent.nodes().into_iter();
        let owner = nodes.find(|node| node.id == wanted.nodes[0])?;
        let classes = wanted.numbers_name(None);
        let classes = classes.unwrap_or_else(|| wanted.class_names());
        Some((owner.facts.numerics, classes))
    }

    fn name(&self, id: NodeId) -> String {
        self.agent.name(id)
    }

    fn want(&self, id: InstanceId, epoch: u64, wanted: Option<&InstanceSpec>) -> Result<(), Error> {
        let text = wanted.map(|it| serde_json::to_string(it).expect("a record is JSON"));
        Ok(self.agent.write(RegisterKey::Record(id), epoch, text)?)
    }
}

/// Reads `bytes` as messages between nodes about instances, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    ingress::parse(bytes);
    copies::parse(bytes);
    stores::parse(bytes);
    journals::parse(bytes);
    paceline_fleet::parse(bytes);
    let _ = serde_json::from_slice::<TraceRequest>(bytes);
    let _ = serde_json::from_slice::<Option<speed::MeasuredSpeed>>(bytes);
}

fn new_id() -> Result<InstanceId, Error> {
    let mut number = [0; 8];
    getrandom::fill(&mut number).map_err(Error::Random)?;
    Ok(InstanceId(u64::from_le_bytes(number)))
}
