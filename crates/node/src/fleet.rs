//! Control plane: the instances of a cluster, as each node reconciles them with the shared map.
//!
//! One thread of each node compares the map with what this node runs, and starts, hands over or
//! ends its part. The node's commands and its HTTP server call [`Fleet`]. It computes nothing
//! itself: that is [`Instance`](crate::Instance) and its workers.
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
//! - Loading writes the specs; replica names, node assignment and placement spread decide which
//!   nodes compute which replica. Expansion adds nodes that join or return.
//! - `replicas`, `choice`, `prefixes`: routing of a request to a replica.
//! - `copies`, `tree`, and the modules of byte ranges, partial files and signed roots: distribution
//!   of model files between nodes. `hub`: bytes that no node has.
//! - `stores`: the models on each node's disk, and their limits. Garbage collection removes records
//!   that no node needs.
//! - Service starts: registration of a model at this node, which may read all of a file.
//! - [`journals`]: copies of streamed answers, for clients that reconnect to another node.

mod answer_traces;
mod assignment;
mod autoscaling;
mod battery;
mod cables;
mod choice;
mod copies;
mod device_memory;
mod drain;
mod durable_journals;
mod encoders;
mod engines;
mod expansion;
mod file_ranges;
mod flaps;
mod garbage_collection;
mod hosts;
mod hub;
mod ingress;
mod inventory;
pub mod journals;
pub mod leases;
mod loading;
mod manifest;
mod node_connection;
mod one_machine;
mod owner;
mod owner_routes;
pub(crate) mod prefixes;
mod preview;
mod proposals;
mod replica_names;
mod replicas;
mod room;
mod roots;
mod service_starts;
mod speed;
mod spread;
mod standby;
mod stores;
mod unserved;
mod unused_nodes;
mod whole_copy;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::agent::{Agent, Kind};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{
    self, AdapterFile, AdapterNaming, Duty, InstanceOptions, InstanceSpec, MachineOptions,
    NODES_MAX, Report, State,
};
use paceline_cluster::nodes::{InstanceId, NodeId, RegisterKey};
use paceline_engine::{AdaptedService, EncoderService, EngineConfig, Service};
use paceline_model::{Config, SplitKind};
use paceline_tensor::Kernels;
use serde::{Deserialize, Serialize};

use crate::classes::Engines;
use crate::trace::{Recording, Stages};
use crate::workers::connection::{MessageConnection, send_message};
use crate::workers::host::{HostSpec, ModelName, host};
use crate::{Instance, InstanceSummary};
pub use answer_traces::TraceRequest;
use copies::ModelCopies;
pub use copies::{MendedFile, RepairReport, StoredFile};
use durable_journals::DurableJournals;
use hosts::NodeConnection;
pub use hub::{ByteSink, FetchProgress, HubOrigin, ModelHub};
use ingress::IngressService;
use journals::{Deaths, JournalCopier, JournalStore};
use owner::OwnedInstance;
use paceline_worker::CollectiveTraffic;
pub use preview::{Preview, Proposal};
use replica_names::Name;
pub use replica_names::Replica;
use replicas::{Preferred, Replicas};
pub use room::{lent_devices, placed_bytes};
use service_starts::ServiceStarts;
pub use stores::{CopyOutcome, Holding, NodeStore, OwnStore};
pub use unserved::{UnservedModel, UnservedState};
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
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Interval between attempts to fetch the beginning of a model file, 4 MB and more. The root of a
/// large file is signed some time after it was loaded.
const PART_EVERY: Duration = Duration::from_secs(5);

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

/// Receives the models that this node can answer with. The HTTP server implements it.
pub trait ModelRegistrar: Send + Sync {
    /// Registers a model over all of its replicas, or one of its adapters. `key` identifies the
    /// registration. `path` is the model's file on this node; `model` is the spec of one replica,
    /// and the adapter.
    ///
    /// # Errors
    /// Why this node cannot answer with it.
    fn open(
        &self,
        key: &str,
        model: (&InstanceSpec, Option<&AdapterFile>),
        path: &Path,
        service: Arc<dyn Service>,
    ) -> Result<(), String>;

    /// Removes the registration `key`.
    fn close(&self, key: &str);

    /// Receives all models of the cluster that this node does not answer with; called about once a
    /// second.
    fn set_unserved(&self, models: Vec<UnservedModel>);

    /// Returns the journal of a streamed answer of this node and ends the stream. Its client, the
    /// holder of the API key with this id, resumes at another node.
    fn journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>>;
}

/// Engine sizes for the model at a path, by its spec.
pub type Sizes = dyn Fn(&Path, &Config, &InstanceSpec) -> EngineConfig + Send + Sync;

/// The file of a model by the user's name for it, or why there is none.
pub type FileLookup = dyn Fn(&str) -> Result<PathBuf, String> + Send + Sync;

/// Makes kernels for a number of threads.
pub type MakeKernels = dyn Fn(usize) -> std::io::Result<Arc<Kernels>> + Send + Sync;

/// Dependencies of a fleet on the program around it.
pub struct FleetSpec {
    /// Starts workers: program and arguments.
    pub program: (PathBuf, Vec<std::ffi::OsString>),
    /// The complete environment of every worker: see [`for_workers`](crate::crew::for_workers).
    pub worker_env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    /// Folders below which workers may write.
    pub worker_folders: Vec<PathBuf>,
    /// The file of a model of this machine, by the user's name for it.
    pub find: Box<FileLookup>,
    /// Where copies of models are kept.
    pub copies: PathBuf,
    /// The user's models on this machine, and the disk budget.
    pub store: Arc<OwnStore>,
    /// The hub, for bytes of models that no node has.
    pub hub: Arc<dyn ModelHub>,
    /// Paceline's home folder, with the measurements for forecasts.
    pub home: PathBuf,
    /// Folder for the journals of open answers, so that they outlive a power cut; `None` keeps them
    /// in memory alone.
    pub journals: Option<PathBuf>,
    /// Makes kernels for a number of threads.
    pub kernels: Box<MakeKernels>,
    /// The only interface on which workers listen; `None` for all.
    pub interface: Option<String>,
    /// Sizes of an engine.
    pub sizes: Box<Sizes>,
    /// Default threads of a worker.
    pub threads: usize,
    /// Receives the models that this node answers with.
    pub doors: Box<dyn ModelRegistrar>,
    /// Receives log lines for people; must not block.
    pub tell: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for FleetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "workers by {}", self.program.0.display())
    }
}

/// A user's request to load a model: the JSON of the commands `load`, `preview` and `borrow`.
/// Clients copy `nodes` and `split` from a preview's placement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadRequest {
    /// The user's name for the model.
    pub model: String,
    /// Names or ids of nodes.
    pub nodes: Vec<String>,
    /// Number of nodes if `nodes` is empty. By default 1, in a preview any number.
    pub count: Option<usize>,
    /// Kind of split: tensor, pipeline or both.
    pub split: SplitKind,
    /// Engine of each node, or one for all; by default MLX where all nodes have a GPU for it, else
    /// the CPU.
    pub engine: Option<Engines>,
    /// Kernel class of the nodes whose engine has it; by default the engine's own.
    pub class: Option<String>,
    /// Threads of each worker; by default all cores of this machine.
    pub threads: Option<u16>,
    #[serde(flatten)]
    pub options: InstanceOptions,
    /// Standby copies of each shard on other nodes, 0 or 1; by default 1 if memory allows.
    pub spare: Option<u16>,
    /// Whole copies of the model, each an instance of its own; 0 is 1. Each has `count` nodes, or
    /// an equal share of `nodes`.
    pub replicas: u16,
    /// The user's name for the draft model of speculative decoding.
    pub draft: Option<String>,
    /// Adapters of the model: names, and their paths on this machine.
    pub adapters: Vec<(String, PathBuf)>,
    /// As of the record.
    pub names: Vec<String>,
    pub adapter_naming: AdapterNaming,
    pub machine: Option<MachineOptions>,
    /// Names or ids of nodes for prefill only.
    pub prefill_nodes: Vec<String>,
    /// Kernel class of these; by default that of the others.
    pub prefill_class: Option<String>,
}

/// An instance, as any node sees it.
#[derive(Clone, Debug, Serialize)]
pub struct InstanceView {
    pub id: String,
    /// The model's name, as its user gave it.
    pub model: String,
    /// Its state; `waiting` before its owner reports one.
    pub state: String,
    /// Steps or bytes done, and their total.
    pub progress: Option<(u64, u64)>,
    /// Why it failed or recovers, or which nodes it does not use and why.
    pub reason: Option<String>,
    /// Names of its nodes, the owner first.
    pub nodes: Vec<String>,
    /// Name of the node that computes each rank, if they are not `nodes`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub computing: Vec<String>,
    /// Which nodes stand in for which, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stand_ins: Vec<String>,
    /// Since when its state, nodes and reason are these, in seconds since 1970; `None` before its
    /// owner reports.
    pub since_unix_s: Option<u64>,
    /// Names of its prefill nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,
    /// Number of the record: one more with each owner.
    pub epoch: u64,
    /// The split as requested.
    pub split: String,
    /// Kernel classes of its nodes in rank order, as `cpu` or `mlx+cpu`.
    pub classes: String,
    /// Name of its numbers: `mlx(metal):0-47+cpu:48-63`; its classes where these say all, and until
    /// it answers. An unlike class of its prefill nodes precedes them, as in `mlx>cpu`.
    pub numbers: String,
    /// Transports between its nodes with RDMA cables, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wires: Option<String>,
    /// Which replica of the model it is, where there are several.
    pub replica: Option<Replica>,
    /// Requests that this node has sent to it.
    pub asked: u64,
    /// Its running requests as far as this node knows; 0 if this node sends it none.
    pub load: usize,
}

/// An instance to which this node can send requests.
#[derive(Clone, Debug, Serialize)]
pub struct UsableInstance {
    #[serde(flatten)]
    pub view: InstanceView,
    /// The model's file on this node.
    pub path: PathBuf,
}

/// The control plane of this node. Dropping it ends the node's instances.
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
    owned: Mutex<BTreeMap<InstanceId, RunningInstance>>,
    open: Mutex<BTreeMap<Name, RoutedModel>>,
    opening: Mutex<ServiceStarts>,
    /// Instances that were ready at the last update of this node's services; it answers with them
    /// if it can.
    seen: Mutex<BTreeSet<InstanceId>>,
    over: AtomicBool,
    /// Instances leased to programs of this machine.
    loans: Mutex<BTreeSet<InstanceId>>,
    /// By instance: time and number of attempts to fetch the files needed to answer with it. Also
    /// of those to sign this node's files.
    tried: Mutex<BTreeMap<InstanceId, (Instant, u32)>>,
    /// When all work of this node had moved to others.
    left: Mutex<Option<Instant>>,
    /// Whether the battery is low, so that this node takes no work.
    rests: AtomicBool,
    copier: JournalCopier,
    shelf: JournalStore,
    durable: Option<DurableJournals>,
    deaths: Deaths,
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

/// An instance of this node, by the epoch of its record.
struct RunningInstance {
    owned: OwnedInstance,
    /// Set once it answers.
    answers: Option<OwnerService>,
    /// Service of the previous record, which answers until this one does.
    former: Option<OwnerService>,
}

impl RunningInstance {
    fn into_instances(self) -> impl Iterator<Item = Arc<Instance>> {
        let services = self.answers.into_iter().chain(self.former);
        services.filter_map(|service| service.instance().cloned())
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

/// The kind of an instance's nodes and their kernel classes. Instances with equal ones continue
/// each other's answers.
type Numbers = (Kind, String);

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
        let find = std::mem::replace(&mut spec.find, Box::new(|_| Err(String::new())));
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
                find: Box::new(move |model| own.find_part(&finder, model)),
                find_whole: Box::new(move |model| {
                    wholes.find_right((&checker, model), copies::CheckRange::All)
                }),
                bring: Box::new(move |model, file, parts, goes_on| {
                    brings.bring(&bringer, (model, file), parts, goes_on)
                }),
                repair: Box::new(move |model, file, parts, goes_on| {
                    repairs.repair(&repairer, (model, file), parts, goes_on)
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
            owned: Mutex::default(),
            open: Mutex::default(),
            opening: Mutex::default(),
            seen: Mutex::default(),
            over: AtomicBool::new(false),
            loans: Mutex::default(),
            tried: Mutex::default(),
            left: Mutex::default(),
            rests: AtomicBool::new(false),
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
    pub fn load(&self, ask: &LoadRequest) -> Result<Vec<InstanceId>, String> {
        let loaded = self.inner.load(ask);
        self.inner.agent.save();
        loaded
    }

    /// Placements of a model over live nodes, each with a prediction; loads nothing. Takes missing
    /// measurements, a second or two the first time.
    ///
    /// # Errors
    /// The model is not on this machine, or a node does not exist.
    pub fn preview(&self, ask: &LoadRequest) -> Result<Preview, String> {
        self.inner.preview(ask)
    }

    /// Requests that a model is unloaded, by its name or an instance's id: all replicas, or the one
    /// with this number. Returns the number of instances.
    ///
    /// # Errors
    /// No such instance.
    pub fn unload(&self, name: &str, replica: Option<u16>) -> Result<usize, String> {
        let unloaded = self.inner.unload(name, replica);
        self.inner.agent.save();
        unloaded
    }

    /// Traces one answer of an instance on all of its ranks. The owner runs it; blocks until the
    /// answer is complete, at most some minutes.
    ///
    /// # Errors
    /// No such instance, or it does not answer.
    pub fn trace(&self, ask: &TraceRequest) -> Result<Recording, String> {
        answer_traces::trace(&self.inner, ask)
    }

    /// Samples for some seconds where the time of an instance's ranks goes, on its owner. `name` is
    /// its id or model. Blocks as long.
    ///
    /// # Errors
    /// No such instance, it does not answer, or another trace of it is running.
    pub fn stages(&self, name: &str) -> Result<Stages, String> {
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
    pub fn service(&self, id: &str) -> Result<Arc<dyn Service>, String> {
        let id: InstanceId = id.parse().map_err(|_| format!("{id:?} is no instance"))?;
        if !self.inner.is_wanted(id) {
            return Err(format!("instance {id} is not loaded"));
        }
        if let Some(all) = self.inner.replicas_with(id) {
            return Ok(Arc::new(Preferred { all, first: id }));
        }
        let service =
            IngressService::start(&self.inner, id, None).map_err(|error| error.to_string())?;
        Ok(Arc::new(service))
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
        let owned = lock(&self.inner.owned);
        let ready = owned.iter().filter_map(|(id, it)| {
            let instance = it.answers.as_ref()?.instance()?;
            Some((id.to_string(), Arc::clone(instance)))
        });
        ready.collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
        let open = std::mem::take(&mut *lock(&self.inner.open));
        open.keys().for_each(|name| self.inner.close(name));
        let owned = std::mem::take(&mut *lock(&self.inner.owned));
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

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fleet of {:?}", self.inner.agent)
    }
}

impl Inner {
    /// Starts the services for other nodes.
    fn serve(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let with = move |run: fn(&Arc<Self>, paceline_cluster::nodes::agent::ServiceChannel)| {
            let weak = weak.clone();
            move |channel| {
                if let Some(inner) = weak.upgrade() {
                    run(&inner, channel);
                }
            }
        };
        self.agent.serve(
            CREW,
            with(|inner, channel| {
                // The owner sees how it ended at its end of the connection.
                let _: Result<(), _> = host(&NodeConnection(channel), &inner.host);
            }),
        );
        self.agent.serve(
            FETCH,
            with(|inner, channel| {
                inner.copies.answer_fetch(&inner.agent, &channel);
            }),
        );
        self.agent.serve(
            FILE,
            with(|inner, channel| inner.copies.answer_file(&channel)),
        );
        self.agent.serve(
            PIECES,
            with(|inner, channel| inner.copies.answer_pieces(&inner.agent, &channel)),
        );
        self.agent.serve(
            STORES,
            with(|inner, channel| {
                let peer = channel.peer();
                stores::answer(inner, &NodeConnection(channel), peer);
            }),
        );
        self.agent.serve(
            SPEED,
            with(|inner, channel| {
                // Optional: the planning node estimates the speed without an answer.
                let _: Result<(), _> = send_message(&NodeConnection(channel), &inner.own_speed());
            }),
        );
        self.agent.serve(
            ANSWERS,
            with(|inner, channel| {
                let line: Arc<dyn MessageConnection> = Arc::new(NodeConnection(channel));
                ingress::answer(inner, &line);
            }),
        );
        self.agent.serve(
            TRACE,
            with(|inner, channel| answer_traces::answer(inner, &NodeConnection(channel))),
        );
        self.agent.serve(
            STAGES,
            with(|inner, channel| answer_traces::answer_stages(inner, &NodeConnection(channel))),
        );
        self.agent.serve(
            journals::KEEP,
            with(|inner, channel| journals::answer_keep(inner, &NodeConnection(channel))),
        );
        self.agent.serve(
            journals::JOURNAL,
            with(|inner, channel| journals::answer_journal(inner, &NodeConnection(channel))),
        );
    }

    fn run(self: &Arc<Self>) {
        let mut watch = self.agent.watch();
        let mut lost = leases::LostLenders::new(Instant::now());
        let mut growth = autoscaling::Autoscaler::default();
        let mut widening = expansion::NodeExpansion::default();
        let mut battery = battery::Battery::default();
        let mut stale = garbage_collection::RecordCollector::default();
        while !self.over.load(Ordering::SeqCst) {
            self.reclaim(&mut lost);
            self.place_cramped();
            self.do_duties();
            self.grow(&mut growth, Instant::now());
            self.widen(&mut widening, Instant::now());
            self.rest(&mut battery, Instant::now());
            self.update_services();
            self.sign_owned();
            self.take_back();
            let _ = self.has_lost_some(); // records each death at its start
            self.stay();
            self.remove_stale(&mut stale, Instant::now());
            let began = Instant::now();
            // In slices, so that shutdown is noticed soon.
            while began.elapsed() < LOOK_EVERY && !self.over.load(Ordering::SeqCst) {
                if watch.wait(LOOK_EVERY / 10) {
                    break;
                }
            }
        }
    }

    /// Reconciles: starts the instances that this node must own and ends those that it no longer
    /// owns.
    fn do_duties(self: &Arc<Self>) {
        let map = self.agent.map();
        let mut own = Vec::new();
        for duty in placement::duties(&map, self.agent.id(), |id| self.agent.life(id)) {
            match duty {
                // The draining thread hands over instances that arrive meanwhile.
                Duty::Own { id, .. } if self.is_leaving() && !self.runs(id) => {}
                Duty::TakeOver { .. } if self.is_leaving() => {}
                Duty::Own { id, epoch, wanted } => {
                    own.push((id, epoch));
                    let told = report(&map, id).filter(|it| it.epoch == epoch);
                    let is_restart = told.is_some_and(|it| it.state != State::Failed);
                    self.begin(OwnedInstance {
                        id,
                        epoch,
                        wanted,
                        flaps: Arc::default(),
                        cramped: Arc::default(),
                        unused: Arc::default(),
                        numbers: Arc::default(),
                        context: Arc::default(),
                        cables: Arc::default(),
                        wires: Arc::default(),
                        split: Arc::default(),
                        goes_on: epoch > 1 || is_restart,
                    });
                }
                Duty::TakeOver { id, epoch, wanted } => {
                    (self.spec.tell)(&format!("{}: its owner is lost, taking over", wanted.model));
                    let wanted = self.with_room(id, &wanted);
                    // Fails if another node wrote first.
                    let _: Result<(), _> = self.want(id, epoch, Some(&wanted));
                }
            }
        }
        let ended: Vec<RunningInstance> = {
            let mut owned = lock(&self.owned);
            let is_old = |id: &InstanceId, it: &mut RunningInstance| {
                !own.contains(&(*id, it.owned.epoch)) && !self.bridges(&map, *id)
            };
            owned.extract_if(.., is_old).map(|(_, it)| it).collect()
        };
        drop(ended); // ends their workers, which takes a moment
    }

    /// The least loaded ready instance of a name or id, and its spec.
    fn ready_called(&self, model: &str) -> Option<(InstanceView, InstanceSpec)> {
        let map = self.agent.map();
        let called = placement::wanted(&map).filter(|(.., wanted)| wanted.is_called(model));
        let called: BTreeSet<String> = called.map(|(id, ..)| id.to_string()).collect();
        let is_it =
            |it: &InstanceView| it.state == "ready" && (called.contains(&it.id) || it.id == model);
        let all = self.list().into_iter().filter(is_it);
        let view = all.min_by_key(|it| (it.load, it.asked))?;
        let id: InstanceId = view.id.parse().ok()?;
        let (_, _, wanted) = placement::wanted(&map).find(|(other, ..)| *other == id)?;
        Some((view, wanted))
    }

    /// Starts an instance on its own thread, once for each record.
    fn begin(self: &Arc<Self>, mut owned: OwnedInstance) {
        let mut all = lock(&self.owned);
        let epoch = owned.epoch;
        let is_same = |it: &RunningInstance| it.owned.epoch == epoch;
        if all.get(&owned.id).is_some_and(is_same) {
            return;
        }
        let running = RunningInstance {
            owned: owned.clone(),
            answers: None,
            former: None,
        };
        let before = all.insert(owned.id, running);
        let former = before.and_then(|it| it.answers.or(it.former));
        // If the previous one answers, it continues when this one cannot start.
        owned.goes_on &= former.is_none();
        if let Some(it) = all.get_mut(&owned.id) {
            it.former = former;
        }
        drop(all);
        let inner = Arc::clone(self);
        let run = move || {
            let answers = owned.start(&inner);
            let mut all = lock(&inner.owned);
            let own = all.get_mut(&owned.id);
            let own = own.filter(|it| it.owned.epoch == epoch);
            let (mut goes_on, mut former) = (false, None);
            match (own, answers) {
                (Some(it), Some(answers)) => {
                    it.answers = Some(answers);
                    former = it.former.take();
                }
                (Some(it), None) => goes_on = it.former.is_some(),
                (None, _) => {}
            }
            drop(all);
            drop(former); // ends its workers, which takes a moment
            // A draining node must learn that its part was not taken over.
            let leaves = || inner.agent.nodes().iter().any(|node| node.facts.leaving);
            if goes_on && !leaves() {
                owned.go_on_as_before(&inner);
            }
        };
        let thread = std::thread::Builder::new().name("owner".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Whether this node starts or runs an instance of this record.
    fn has_begun(&self, id: InstanceId, epoch: u64) -> bool {
        let owned = lock(&self.owned);
        let is_it = owned.get(&id).is_some_and(|it| it.owned.epoch == epoch);
        is_it && !self.is_over()
    }

    /// Registers each model with a ready replica and removes the registrations of unloaded models.
    fn update_services(self: &Arc<Self>) {
        let map = self.agent.map();
        let mut named: BTreeMap<Name, BTreeSet<InstanceId>> = BTreeMap::new();
        let mut ready = Vec::new();
        for (id, _, wanted) in placement::wanted(&map) {
            let name = Name::of(&wanted);
            let is_begun = || {
                lock(&self.owned)
                    .get(&id)
                    .is_some_and(|it| it.answers.is_some())
            };
            let is_ready =
                |it: &Report| it.state == State::Ready && (!self.leases(&wanted) || is_begun());
            if let Some(report) = report(&map, id).filter(is_ready) {
                self.admit(&name, id, &wanted);
                if let Some(replicas) = self.replicas_with(id) {
                    replicas.set_numbers(id, wanted.numbers_name(report.numbers));
                }
                ready.push((name.clone(), id));
            }
            named.entry(name).or_default().insert(id);
        }
        lock(&self.opening).retain(|name| named.contains_key(name));
        lock(&self.tried).retain(|id, _| ready.iter().any(|(_, of)| of == id));
        self.see(ready);
        self.tell_unserved(&map);
        let gone = |name: &Name, door: &mut RoutedModel| match (named.get(name), door) {
            (None, _) => true,
            (Some(ids), RoutedModel::Own(id)) => !ids.contains(id),
            (Some(_), _) => false,
        };
        let gone: Vec<_> = lock(&self.open).extract_if(.., gone).collect();
        gone.iter().for_each(|(name, _)| self.close(name));
        for (name, door) in lock(&self.open).iter() {
            if let (RoutedModel::Replicas(all), Some(ids)) = (door, named.get(name)) {
                all.retain(ids);
            }
        }
    }

    /// Whether an instance is one that this node computes for its own life.
    fn leases(&self, wanted: &InstanceSpec) -> bool {
        wanted.lender == Some(self.agent.id()) && wanted.machine.is_some()
    }

    /// Removes the registrations of a model.
    fn close(&self, name: &Name) {
        let keys = std::iter::once(name.key()).chain(name.adapter_keys());
        keys.for_each(|key| self.spec.doors.close(&key));
    }

    /// Adds a ready replica to the service of its model.
    fn admit(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) {
        let door = lock(&self.open).get(name).cloned();
        match door {
            Some(RoutedModel::Replicas(all)) => all.admit(self, id, wanted),
            Some(RoutedModel::Encoder | RoutedModel::Own(_)) => {}
            None => self.open_door(name, id, wanted),
        }
    }

    /// The replica set that contains an instance, if this node answers with it.
    fn replicas_with(&self, id: InstanceId) -> Option<Arc<Replicas>> {
        let open = lock(&self.open);
        let mut all = open.values().filter_map(|door| match door {
            RoutedModel::Replicas(all) => Some(all),
            RoutedModel::Encoder | RoutedModel::Own(_) => None,
        });
        all.find(|all| all.has(id)).cloned()
    }

    /// Records the ready instances that this node answers with, or cannot.
    fn see(&self, ready: Vec<(Name, InstanceId)>) {
        // Locked throughout, so that a concurrent registration adds to this set.
        let mut seen = lock(&self.seen);
        let is_settled =
            |name: &Name| lock(&self.open).contains_key(name) || lock(&self.opening).failed(name);
        let settled = ready.into_iter().filter(|(name, _)| is_settled(name));
        *seen = settled.map(|(_, id)| id).collect();
    }

    /// Registers a model on its own thread, unless one is running. Present parts of the file are
    /// hashed first, and reconciliation must not wait for that.
    fn open_door(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) {
        if !lock(&self.opening).begin(name, Instant::now()) {
            return;
        }
        let (inner, name, wanted) = (Arc::clone(self), name.clone(), wanted.clone());
        let tried = name.clone();
        let run = move || {
            let opened = inner.try_door(&name, id, &wanted);
            lock(&inner.opening).end(&name, opened, Instant::now());
            let ready = inner.ready_of(&name).into_iter();
            lock(&inner.seen).extend(ready.map(|(id, _)| id));
        };
        let thread = std::thread::Builder::new().name("door".to_owned());
        if let Err(error) = thread.spawn(run) {
            lock(&self.opening).end(&tried, false, Instant::now());
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Registers a model; false if this node has too little of its file.
    fn try_door(self: &Arc<Self>, name: &Name, id: InstanceId, wanted: &InstanceSpec) -> bool {
        // A node without a shard of it may lack the file.
        let Ok(path) = owner::part_of(self, wanted) else {
            self.get_part(id, wanted);
            return false;
        };
        if encoders::is_encoder(&path) {
            // An encoder computes here, with all weights.
            let model = (&self.agent, &name_of(wanted));
            let Ok(path) = self.copies.find_right(model, copies::CheckRange::All) else {
                return false;
            };
            return self.open_encoder(name, id, wanted, &path);
        }
        let map = self.agent.map();
        let mut wanted = wanted.clone();
        let context = || report(&map, id).and_then(|report| report.context);
        wanted.options.context = wanted.options.context.or_else(context);
        if let Some(own) = self.ready_instance(id).filter(|_| self.leases(&wanted)) {
            self.answer_with(name, &wanted, &path, own);
            lock(&self.open).insert(name.clone(), RoutedModel::Own(id));
            return true;
        }
        let all = Arc::new(Replicas::new(&wanted.model, Arc::clone(&self.spec.tell)));
        for (id, wanted) in self.ready_of(name) {
            all.admit(self, id, &wanted);
            let named = report(&map, id).and_then(|report| report.numbers);
            all.set_numbers(id, wanted.numbers_name(named));
        }
        self.answer_with(name, &wanted, &path, Arc::clone(&all) as Arc<dyn Service>);
        lock(&self.open).insert(name.clone(), RoutedModel::Replicas(all));
        true
    }

    /// The instances of a name that are ready.
    fn ready_of(&self, name: &Name) -> Vec<(InstanceId, InstanceSpec)> {
        let map = self.agent.map();
        let of_name = placement::wanted(&map).filter(|(.., wanted)| Name::of(wanted) == *name);
        let is_ready = |id: InstanceId| report(&map, id).is_some_and(|it| it.state == State::Ready);
        let ready = of_name.filter(|(id, ..)| is_ready(*id));
        ready.map(|(id, _, wanted)| (id, wanted)).collect()
    }

    /// Signs the roots of models that this node owns, once it is not alone. Others then fetch the
    /// beginning of the file to answer with it.
    fn sign_owned(&self) {
        if self.agent.nodes().len() < 2 {
            return;
        }
        let map = self.agent.map();
        let is_open = |it: &&RunningInstance| {
            it.answers.is_some() && roots::of(&map, &it.owned.wanted.sha256).is_err()
        };
        let owned: Vec<OwnedInstance> = lock(&self.owned)
            .values()
            .filter(is_open)
            .map(|it| it.owned.clone())
            .collect();
        for it in owned {
            if let (Ok(path), Some(_)) = (owner::path_of(self, &it.wanted), self.attempt(it.id)) {
                self.sign_meanwhile(&it.wanted, &path);
            }
        }
    }

    /// Number of the next attempt to get or sign a file of an instance, from 1; `None` so shortly
    /// after the last.
    fn attempt(&self, id: InstanceId) -> Option<u32> {
        let (now, mut tried) = (Instant::now(), lock(&self.tried));
        let last = tried.get(&id).copied();
        let is_early = |(at, _): (Instant, u32)| now.saturating_duration_since(at) < PART_EVERY;
        if last.is_some_and(is_early) {
            return None;
        }
        let count = last.map_or(1, |(_, count)| count.saturating_add(1));
        tried.insert(id, (now, count));
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
        let thread = std::thread::Builder::new().name("part".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    fn answer_with(&self, name: &Name, wanted: &InstanceSpec, path: &Path, with: Arc<dyn Service>) {
        let open = |key: &str, adapter: Option<&AdapterFile>, with: Arc<dyn Service>| {
            let called = match adapter {
                Some(adapter) => wanted.adapted(&adapter.name),
                None => wanted.id().to_owned(),
            };
            match self.spec.doors.open(key, (wanted, adapter), path, with) {
                Ok(()) => (self.spec.tell)(&format!("answering as {called}")),
                Err(reason) => (self.spec.tell)(&format!("error: {called}: {reason}")),
            }
        };
        if wanted.adapter_naming != AdapterNaming::Model {
            open(&name.key(), None, Arc::clone(&with));
        }
        for (key, adapter) in name.adapter_keys().zip(&wanted.adapters) {
            let adapted = AdaptedService::new(Arc::clone(&with), &*adapter.name);
            open(&key, Some(adapter), Arc::new(adapted));
        }
    }

    /// Registers this node's own copy of an encoder, which it loads unless it owns the instance.
    fn open_encoder(
        &self,
        name: &Name,
        id: InstanceId,
        wanted: &InstanceSpec,
        path: &Path,
    ) -> bool {
        let own = lock(&self.owned).get(&id).and_then(|it| it.answers.clone());
        let loaded = match own {
            Some(OwnerService::Encoder(service)) => Ok(service),
            _ => encoders::load(path, wanted),
        };
        match loaded {
            Ok(service) => self.answer_with(name, wanted, path, service),
            Err(reason) => {
                (self.spec.tell)(&format!("error: {}: {reason}", wanted.id()));
                return false;
            }
        }
        // Reconciliation closes it if it was unloaded meanwhile.
        lock(&self.open).insert(name.clone(), RoutedModel::Encoder);
        true
    }

    /// The instance of this node, once it answers.
    fn ready_instance(&self, id: InstanceId) -> Option<Arc<Instance>> {
        let owned = lock(&self.owned);
        let running = owned.get(&id)?;
        let answers = running.answers.as_ref().or(running.former.as_ref());
        answers?.instance().cloned()
    }

    /// Whether this instance is still the one that answers on this node.
    fn answers_with(&self, id: InstanceId, instance: &Arc<Instance>) -> bool {
        let current = self.ready_instance(id);
        current.is_some_and(|current| Arc::ptr_eq(&current, instance))
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn is_wanted(&self, id: InstanceId) -> bool {
        placement::wanted(&self.agent.map()).any(|(other, ..)| other == id)
    }

    /// Kind and kernel classes of an instance.
    fn numbers_of(&self, id: InstanceId) -> Option<Numbers> {
        let map = self.agent.map();
        let (_, _, wanted) = placement::wanted(&map).find(|(other, ..)| *other == id)?;
        let mut nodes = self.agent.nodes().into_iter();
        let owner = nodes.find(|node| node.id == wanted.nodes[0])?;
        let classes = wanted.numbers_name(None);
        let classes = classes.unwrap_or_else(|| wanted.class_names());
        Some((owner.facts.kind(), classes))
    }

    fn name(&self, id: NodeId) -> String {
        self.agent.name(id)
    }

    fn want(
        &self,
        id: InstanceId,
        epoch: u64,
        wanted: Option<&InstanceSpec>,
    ) -> Result<(), String> {
        let text = wanted.map(|it| serde_json::to_string(it).expect("a record is JSON"));
        let written = self.agent.write(RegisterKey::Record(id), epoch, text);
        written.map_err(|error| error.to_string())
    }

    fn list(&self) -> Vec<InstanceView> {
        let map = self.agent.map();
        let all: Vec<_> = placement::wanted(&map).collect();
        let works = |(id, epoch, _): &&(InstanceId, u64, _)| !has_failed(&map, *id, *epoch);
        let replicas = all
            .iter()
            .filter(works)
            .map(|(id, _, wanted)| (*id, wanted));
        let numbers = replica_names::numbers(replicas);
        // Called once, because it reads the facts of all nodes.
        let names = self.agent.names();
        let name = |id: &NodeId| names.get(id).cloned().unwrap_or_else(|| id.to_string());
        let view = |(id, epoch, wanted): (InstanceId, u64, InstanceSpec)| {
            let report = report(&map, id).filter(|report| report.epoch == epoch);
            let named = report.as_ref().and_then(|report| report.numbers.clone());
            let wires = report.as_ref().and_then(|report| report.wires.clone());
            let (computing, stand_ins) = computing(&wanted, report.as_ref(), &name);
            let since = report.as_ref().and(map.register(&RegisterKey::Report(id)));
            let split = report.as_ref().and_then(|report| report.split.clone());
            let (state, progress, reason) = match self.told(&wanted, report, &name) {
                // A request now would be answered with `no such model`.
                ("ready", ..) if !lock(&self.seen).contains(&id) => ("loading", None, None),
                told => told,
            };
            let usage = self.replicas_with(id).map(|all| all.usage(id));
            let usage = usage.unwrap_or_default();
            InstanceView {
                id: id.to_string(),
                numbers: wanted
                    .numbers_name(named)
                    .unwrap_or_else(|| wanted.class_names()),
                wires,
                classes: wanted.class_names(),
                model: wanted.id().to_owned(),
                state: state.to_owned(),
                progress,
                reason,
                nodes: wanted.nodes.iter().map(name).collect(),
                computing,
                stand_ins,
                since_unix_s: since.map(|register| register.stamp.ms / 1000),
                prompts: wanted.prompts.iter().map(name).collect(),
                epoch,
                split: split.unwrap_or(wanted.split),
                replica: numbers.get(&id).copied(),
                asked: usage.asked,
                load: usage.load,
            }
        };
        all.into_iter().map(view).collect()
    }

    /// State, progress and reason of an instance. The last report of a dead owner is ignored.
    fn told(
        &self,
        wanted: &InstanceSpec,
        report: Option<Report>,
        name: &dyn Fn(&NodeId) -> String,
    ) -> (&'static str, Option<(u64, u64)>, Option<String>) {
        let owner = &wanted.nodes[0];
        if self.agent.life(*owner) == Life::Dead {
            let reason = format!("{}, its owner, is dead", name(owner));
            return ("recovering", None, Some(reason));
        }
        let Some(report) = report else {
            return ("waiting", None, None);
        };
        let state = match report.state {
            State::Fetching => "fetching",
            State::Loading => "loading",
            State::Ready => "ready",
            State::Recovering => "recovering",
            State::Failed => "failed",
        };
        (state, report.progress, report.reason)
    }
}

/// The nodes that compute an instance's ranks now, if they are not those of its record, and which
/// stand in for which.
fn computing(
    wanted: &InstanceSpec,
    report: Option<&Report>,
    name: &dyn Fn(&NodeId) -> String,
) -> (Vec<String>, Vec<String>) {
    let Some(report) = report else {
        return (Vec::new(), Vec::new());
    };
    let ranks = wanted.on_one_machine().map_or(1, |machine| machine.ranks);
    if ranks > 1 {
        return (vec![name(&wanted.nodes[0]); ranks as usize], Vec::new());
    }
    let both = report.computing.iter().zip(&wanted.nodes);
    let others = both.filter(|(now, home)| now != home);
    let stand_ins = others.map(|(now, home)| format!("{} stands in for {}", name(now), name(home)));
    (
        report.computing.iter().map(name).collect(),
        stand_ins.collect(),
    )
}

/// Reads `bytes` as messages between nodes about instances, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    ingress::parse(bytes);
    copies::parse(bytes);
    stores::parse(bytes);
    journals::parse(bytes);
    let _ = serde_json::from_slice::<TraceRequest>(bytes);
    let _ = serde_json::from_slice::<Option<speed::Speed>>(bytes);
}

fn new_id() -> Result<InstanceId, String> {
    let mut number = [0; 8];
    getrandom::fill(&mut number).map_err(|error| error.to_string())?;
    Ok(InstanceId(u64::from_le_bytes(number)))
}

/// Whether the instance of a record has failed for good.
fn has_failed(map: &paceline_cluster::nodes::Registers, id: InstanceId, epoch: u64) -> bool {
    report(map, id).is_some_and(|it| it.epoch == epoch && it.state == State::Failed)
}

/// An owner's report of its instance.
fn report(map: &paceline_cluster::nodes::Registers, id: InstanceId) -> Option<Report> {
    serde_json::from_str(map.get(&RegisterKey::Report(id))?).ok()
}
