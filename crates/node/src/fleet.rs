//! Instances over the nodes of a cluster.
//!
//! ```text
//! load: writes a record to the shared map ──▶ every node looks at its duties
//!   owner (the record's first node): copies the model to the others, starts an Instance over them
//!   other nodes: run workers (service `crew`), copy the model (`fetch`, `file`)
//!   every node: opens a door to each instance; requests go to the owner (`answers`)
//! owner dead: the first successor that lives writes the next record and owns it
//! ```
//!
//! - [`Fleet`]: starts it all beside an agent.
//! - [`preview`](Fleet::preview): placements with predictions, before anything loads.
//! - [`lent`]: instances for programs of this machine's user.
//! - [`load`](Fleet::load), [`unload`](Fleet::unload), [`list`](Fleet::list): what people ask for.
//! - [`journals`]: copies of streamed answers, for clients that come back to another node.

mod answers;
mod copies;
mod encoders;
mod flaps;
pub mod journals;
mod leaving;
pub mod lent;
mod owner;
mod places;
mod preview;
mod speed;
mod traced;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{
    self, Duty, EPOCH_UNWANTED, NODES_MAX, Report, SPLIT_ANY, State, Wanted,
};
use paceline_cluster::nodes::{InstanceId, Key, NodeId};
use paceline_engine::{EncoderService, EngineConfig, Service};
use paceline_model::{Config, SplitKind};
use paceline_tensor::Kernels;
use serde::Serialize;

use crate::crew::host::{HostSpec, ModelName, host};
use crate::crew::line::{Line, say};
use crate::trace::Recording;
use crate::{Instance, Portrait};
use answers::Remote;
use copies::Copies;
use journals::{Copier, Shelf};
use owner::Owned;
use places::Wire;
pub use preview::{Preview, Proposal};
pub use traced::TraceAsk;

/// Services of a node.
const CREW: &str = "crew";
const FETCH: &str = "fetch";
const FILE: &str = "file";
const ANSWERS: &str = "answers";
const TRACE: &str = "trace";
const SPEED: &str = "speed";

/// How often duties are looked at although nothing changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Longest wait for the channel of an entry to an owner.
const OWNER_LIMIT: Duration = Duration::from_secs(3);

/// Hears which models this node answers with.
pub trait Doors: Send + Sync {
    /// Answers with an instance from now on. `path` is its model's file on this node.
    ///
    /// # Errors
    /// Why it cannot be answered with.
    fn open(
        &self,
        id: &str,
        wanted: &Wanted,
        path: &Path,
        service: Arc<dyn Service>,
    ) -> Result<(), String>;

    /// Answers with it no more.
    fn close(&self, id: &str);

    /// The journal of a streamed answer of this node, which stops answering it: its client, who has
    /// the key with this id, goes on at another node.
    fn journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>>;
}

/// Sizes of an engine for a model at a path, as its record asks.
pub type Sizes = dyn Fn(&Path, &Config, &Wanted) -> EngineConfig + Send + Sync;

/// The file of a model by the user's name for it, or why there is none.
pub type Find = dyn Fn(&str) -> Result<PathBuf, String> + Send + Sync;

/// Makes kernels on so many threads.
pub type MakeKernels = dyn Fn(usize) -> std::io::Result<Arc<Kernels>> + Send + Sync;

/// What a fleet needs of the program around it.
pub struct FleetSpec {
    /// Starts workers: program and arguments.
    pub program: (PathBuf, Vec<std::ffi::OsString>),
    /// The file of a model of this machine, by the user's name for it.
    pub find: Box<Find>,
    /// Where copies of models are kept.
    pub copies: PathBuf,
    /// Paceline's files, with what was measured for forecasts.
    pub home: PathBuf,
    /// Kernels on so many threads.
    pub kernels: Box<MakeKernels>,
    /// The only interface that workers listen at; all without.
    pub interface: Option<String>,
    /// Sizes of an engine.
    pub sizes: Box<Sizes>,
    /// Threads of a worker where nobody says.
    pub threads: usize,
    /// Models that this node answers with.
    pub doors: Box<dyn Doors>,
    /// Lines for people; must not block.
    pub tell: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for FleetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "workers by {}", self.program.0.display())
    }
}

/// What somebody wants to have loaded.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The user's name for the model.
    pub model: String,
    /// Names or ids of nodes.
    pub nodes: Vec<String>,
    /// How many nodes, where none are named.
    pub count: usize,
    /// In which directions the model is cut.
    pub split: SplitKind,
    /// Threads of each worker; by default all cores of this machine.
    pub threads: Option<u16>,
    /// Positions of a sequence.
    pub context: Option<u32>,
    /// Answers that are computed at the same time.
    pub parallel: u16,
    /// Further copies of each shard that wait packed on other nodes; 0 or 1.
    pub spare: u16,
}

/// An instance, as any node sees it.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    /// Its id.
    pub id: String,
    /// What its user calls the model.
    pub model: String,
    /// How it is; `waiting` before its owner says.
    pub state: String,
    /// Steps or bytes done and of how many.
    pub progress: Option<(u64, u64)>,
    /// Why it failed or recovers, or which nodes are left out.
    pub reason: Option<String>,
    /// Names of its nodes, the owner first.
    pub nodes: Vec<String>,
    /// Number of the record: one more with each owner.
    pub epoch: u64,
    /// How the model is cut, as it was asked for.
    pub split: String,
}

/// An instance that this node can ask.
#[derive(Clone, Debug, Serialize)]
pub struct Using {
    /// The instance.
    #[serde(flatten)]
    pub view: View,
    /// The model's file on this node.
    pub path: PathBuf,
}

/// Instances over the nodes of a cluster. Dropping it ends those of this node.
pub struct Fleet {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Inner {
    agent: Agent,
    spec: FleetSpec,
    copies: Arc<Copies>,
    host: Arc<HostSpec>,
    speed: speed::Known,
    owned: Mutex<BTreeMap<InstanceId, Running>>,
    open: Mutex<BTreeMap<InstanceId, u64>>,
    over: AtomicBool,
    /// Instances that programs of this machine borrow now.
    loans: Mutex<BTreeSet<InstanceId>>,
    /// When the work of this node had moved to others, so that it can go.
    left: Mutex<Option<Instant>>,
    copier: Copier,
    shelf: Shelf,
}

/// An instance of this node, by the epoch of its record.
struct Running {
    owned: Owned,
    /// Once it answers.
    answers: Option<Answers>,
    /// Of the record before, which answers until this one does.
    former: Option<Answers>,
}

/// The service that answers for an instance on its owner.
#[derive(Clone)]
enum Answers {
    /// Workers.
    Instance(Arc<Instance>),
    /// This process: an encoder.
    Encoder(Arc<EncoderService>),
}

impl Answers {
    fn instance(&self) -> Option<&Arc<Instance>> {
        match self {
            Self::Instance(instance) => Some(instance),
            Self::Encoder(_) => None,
        }
    }
}

fn name_of(wanted: &Wanted) -> ModelName {
    ModelName {
        name: wanted.model.clone(),
        sha256: wanted.sha256.clone(),
    }
}

impl Fleet {
    /// Serves other nodes, and looks at this node's duties from now on.
    ///
    /// # Errors
    /// What the system says when it refuses a thread.
    pub fn start(agent: Agent, mut spec: FleetSpec) -> std::io::Result<Self> {
        let find = std::mem::replace(&mut spec.find, Box::new(|_| Err(String::new())));
        let copies = Arc::new(Copies::new(find, spec.copies.clone()));
        let (own, tell) = (Arc::clone(&copies), Arc::clone(&spec.tell));
        let inner = Arc::new(Inner {
            copies,
            host: Arc::new(HostSpec {
                program: spec.program.0.clone(),
                args: spec.program.1.clone(),
                find: Box::new(move |model| own.find(model)),
                interface: spec.interface.clone(),
                on_line: Arc::new(move |line| tell(&format!("[worker] {line}"))),
            }),
            copier: Copier::start(agent.clone())?,
            shelf: Shelf::default(),
            agent,
            spec,
            speed: speed::Known::default(),
            owned: Mutex::default(),
            open: Mutex::default(),
            over: AtomicBool::new(false),
            loans: Mutex::default(),
            left: Mutex::default(),
        });
        inner.serve();
        let own = Arc::clone(&inner);
        let thread = std::thread::Builder::new().name("fleet".to_owned());
        let thread = Some(thread.spawn(move || own.run())?);
        Ok(Self { inner, thread })
    }

    /// Wants a model loaded. Returns at once with the instance's id; [`list`](Self::list) says how
    /// it goes.
    ///
    /// # Errors
    /// A model that is not on this machine, nodes that there are not.
    pub fn load(&self, ask: &Ask) -> Result<InstanceId, String> {
        self.inner.load(ask)
    }

    /// Placements of a model over living nodes, each with a prediction; loads nothing. Measures
    /// what is not known yet, which takes a second or two the first time.
    ///
    /// # Errors
    /// A model that is not on this machine, nodes that there are not.
    pub fn preview(&self, ask: &Ask) -> Result<Preview, String> {
        self.inner.preview(ask)
    }

    /// Wants a model unloaded, by its name or an instance's id; how many instances that were.
    ///
    /// # Errors
    /// No such instance.
    pub fn unload(&self, name: &str) -> Result<usize, String> {
        self.inner.unload(name)
    }

    /// Has an instance answer a prompt, and every rank of it record what that takes. The node that
    /// owns the instance does so; blocks until the answer is complete, at most some minutes.
    ///
    /// # Errors
    /// No such instance, one that does not answer.
    pub fn trace(&self, ask: &TraceAsk) -> Result<Recording, String> {
        traced::trace(&self.inner, ask)
    }

    /// Moves what this node computes to others, before it goes: the instances answer all the while.
    /// Waits until others answer with them, at most `limit`; `wait` is called about once a second.
    /// Names of the models that could not be moved; none where no other node lives, or where all
    /// that live leave as well, which is told.
    pub fn leave(&self, limit: Duration, wait: &mut dyn FnMut()) -> Vec<String> {
        self.inner.leave(limit, wait)
    }

    /// All wanted instances.
    pub fn list(&self) -> Vec<View> {
        self.inner.list()
    }

    /// Has another node keep a piece of a journal; `done` hears whether one does. Does not block.
    pub fn keep(&self, piece: journals::Piece, done: journals::Done) {
        self.inner.copier.put(piece, done);
    }

    /// The longest copy of a journal that any node has, for the holder of the key with this id. May
    /// block for some seconds.
    pub fn find_journal(&self, id: &str, key: Option<&str>) -> Option<Vec<u8>> {
        journals::find(&self.inner, id, key)
    }

    /// The instance of a name or id that answers, if this node can tell its tokens: it needs the
    /// model's file for that.
    pub fn using(&self, model: &str) -> Option<Using> {
        let is_it = |it: &View| it.state == "ready" && (it.model == model || it.id == model);
        let view = self.list().into_iter().find(is_it)?;
        let id: InstanceId = view.id.parse().ok()?;
        let map = self.inner.agent.map();
        let (_, _, wanted) = placement::wanted(&map).find(|(other, ..)| *other == id)?;
        let path = owner::path_of(&self.inner, &wanted).ok()?;
        Some(Using { view, path })
    }

    /// An instance of the cluster, wherever it runs, as a service of this node.
    ///
    /// # Errors
    /// An id that is none, what the system says when it refuses a thread.
    pub fn service(&self, id: &str) -> Result<Arc<dyn Service>, String> {
        let id: InstanceId = id.parse().map_err(|_| format!("{id:?} is no instance"))?;
        if !self.inner.is_wanted(id) {
            return Err(format!("instance {id} is not loaded"));
        }
        let service = Remote::start(&self.inner, id).map_err(|error| error.to_string())?;
        Ok(Arc::new(service))
    }

    /// How the instances that this node owns compute, by id; those that are ready.
    pub fn portraits(&self) -> BTreeMap<String, Portrait> {
        let owned = lock(&self.inner.owned);
        let ready: Vec<_> = owned
            .iter()
            .filter_map(|(id, it)| Some((id.to_string(), it.answers.as_ref()?.instance()?.clone())))
            .collect();
        drop(owned);
        let told = ready.into_iter().map(|(id, it)| (id, it.portrait()));
        told.collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.inner.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
        let owned = std::mem::take(&mut *lock(&self.inner.owned));
        drop(owned); // ends their workers
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fleet of {:?}", self.inner.agent)
    }
}

impl Inner {
    /// Answers other nodes.
    fn serve(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let with = move |run: fn(&Arc<Self>, paceline_cluster::nodes::agent::Channel)| {
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
                // How it ended is told at the other end.
                let _: Result<(), _> = host(&Wire(channel), &inner.host);
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
            SPEED,
            with(|inner, channel| {
                // A node that plans does without, if it is gone or this one cannot say.
                let _: Result<(), _> = say(&Wire(channel), &inner.own_speed());
            }),
        );
        self.agent.serve(
            ANSWERS,
            with(|inner, channel| {
                let line: Arc<dyn Line> = Arc::new(Wire(channel));
                answers::answer(inner, &line);
            }),
        );
        self.agent.serve(
            TRACE,
            with(|inner, channel| traced::answer(inner, &Wire(channel))),
        );
        self.agent.serve(
            journals::KEEP,
            with(|inner, channel| journals::answer_keep(inner, &Wire(channel))),
        );
        self.agent.serve(
            journals::JOURNAL,
            with(|inner, channel| journals::answer_journal(inner, &Wire(channel))),
        );
    }

    fn run(self: &Arc<Self>) {
        let mut watch = self.agent.watch();
        let mut lost = lent::Lost::new(Instant::now());
        while !self.over.load(Ordering::SeqCst) {
            self.reclaim(&mut lost);
            self.do_duties();
            self.tend_doors();
            self.take_back();
            self.stay();
            let began = Instant::now();
            // In slices, so that an end is seen soon.
            while began.elapsed() < LOOK_EVERY && !self.over.load(Ordering::SeqCst) {
                if watch.wait(LOOK_EVERY / 10) {
                    break;
                }
            }
        }
    }

    /// Starts what this node has to own, and ends what it owns no more.
    fn do_duties(self: &Arc<Self>) {
        let map = self.agent.map();
        let mut own = Vec::new();
        for duty in placement::duties(&map, self.agent.id(), |id| self.agent.life(id)) {
            match duty {
                // The thread that leaves hands on what was handed to this node meanwhile.
                Duty::Own { id, .. } if self.is_leaving() && !self.runs(id) => {}
                Duty::TakeOver { .. } if self.is_leaving() => {}
                Duty::Own { id, epoch, wanted } => {
                    own.push((id, epoch));
                    let flaps = Arc::default();
                    self.begin(Owned {
                        id,
                        epoch,
                        wanted,
                        flaps,
                    });
                }
                Duty::TakeOver { id, epoch, wanted } => {
                    (self.spec.tell)(&format!("{}: its owner is lost, taking over", wanted.model));
                    // Refused where another node was faster.
                    let _: Result<(), _> = self.want(id, epoch, Some(&wanted));
                }
            }
        }
        let ended: Vec<Running> = {
            let mut owned = lock(&self.owned);
            let is_old = |id: &InstanceId, it: &mut Running| {
                !own.contains(&(*id, it.owned.epoch)) && !self.bridges(&map, *id)
            };
            owned.extract_if(.., is_old).map(|(_, it)| it).collect()
        };
        drop(ended); // ends their workers, which takes a moment
    }

    /// Starts an instance on a thread of its own, once for each record.
    fn begin(self: &Arc<Self>, owned: Owned) {
        let mut all = lock(&self.owned);
        let epoch = owned.epoch;
        let is_same = |it: &Running| it.owned.epoch == epoch;
        if all.get(&owned.id).is_some_and(is_same) {
            return;
        }
        let running = Running {
            owned: owned.clone(),
            answers: None,
            former: None,
        };
        let before = all.insert(owned.id, running);
        let former = before.and_then(|it| it.answers.or(it.former));
        if let Some(it) = all.get_mut(&owned.id) {
            it.former = former;
        }
        drop(all);
        let inner = Arc::clone(self);
        let run = move || {
            let answers = owned.start(&inner);
            let mut all = lock(&inner.owned);
            let former = match all.get_mut(&owned.id) {
                Some(it) if it.owned.epoch == epoch && answers.is_some() => {
                    it.answers = answers;
                    it.former.take()
                }
                _ => None,
            };
            drop(all);
            drop(former); // ends its workers, which takes a moment
        };
        let thread = std::thread::Builder::new().name("owner".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// Opens a door to each instance that answers, and closes those of instances that are gone.
    fn tend_doors(self: &Arc<Self>) {
        let map = self.agent.map();
        let wanted: Vec<_> = placement::wanted(&map).collect();
        for (id, _, wanted) in &wanted {
            let is_open = lock(&self.open).contains_key(id);
            let is_ready = report(&map, *id).is_some_and(|it| it.state == State::Ready);
            if is_ready && !is_open {
                self.open_door(*id, wanted);
            }
        }
        let gone = |id: &InstanceId, _: &mut u64| !wanted.iter().any(|(other, ..)| other == id);
        let gone: Vec<_> = lock(&self.open).extract_if(.., gone).collect();
        for (id, _) in gone {
            self.spec.doors.close(&id.to_string());
        }
    }

    fn open_door(self: &Arc<Self>, id: InstanceId, wanted: &Wanted) {
        // A node that computes nothing of it may lack the file.
        let Ok(path) = owner::path_of(self, wanted) else {
            return;
        };
        if encoders::is_encoder(&path) {
            return self.open_encoder(id, wanted.clone(), path);
        }
        let Ok(service) = Remote::start(self, id) else {
            return;
        };
        self.answer_with(id, wanted, &path, Arc::new(service));
        lock(&self.open).insert(id, 0);
    }

    fn answer_with(&self, id: InstanceId, wanted: &Wanted, path: &Path, with: Arc<dyn Service>) {
        match self.spec.doors.open(&id.to_string(), wanted, path, with) {
            Ok(()) => (self.spec.tell)(&format!("answering as {}", wanted.model)),
            Err(reason) => (self.spec.tell)(&format!("error: {}: {reason}", wanted.model)),
        }
    }

    /// Opens a door to this node's own copy of an encoder, which a thread loads.
    fn open_encoder(self: &Arc<Self>, id: InstanceId, wanted: Wanted, path: PathBuf) {
        lock(&self.open).insert(id, 0);
        let own = lock(&self.owned).get(&id).and_then(|it| it.answers.clone());
        let inner = Arc::clone(self);
        let run = move || {
            let loaded = match own {
                Some(Answers::Encoder(service)) => Ok(service),
                _ => encoders::load(&path, &wanted),
            };
            match loaded {
                Ok(service) => inner.answer_with(id, &wanted, &path, service),
                Err(reason) => (inner.spec.tell)(&format!("error: {}: {reason}", wanted.model)),
            }
            // It may have been unloaded meanwhile, when there was no door to close.
            if !lock(&inner.open).contains_key(&id) {
                inner.spec.doors.close(&id.to_string());
            }
        };
        let thread = std::thread::Builder::new().name("encoder".to_owned());
        if let Err(error) = thread.spawn(run) {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
    }

    /// The instance of this node, once it answers.
    fn ready_instance(&self, id: InstanceId) -> Option<Arc<Instance>> {
        let owned = lock(&self.owned);
        let running = owned.get(&id)?;
        let answers = running.answers.as_ref().or(running.former.as_ref());
        answers?.instance().cloned()
    }

    /// Whether requests for an instance of this node are still for this one.
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

    /// A line to the owner of an instance, which may be this node.
    fn reach_owner(self: &Arc<Self>, id: InstanceId) -> Option<Arc<dyn Line>> {
        let map = self.agent.map();
        let (_, _, wanted) = placement::wanted(&map).find(|(other, ..)| *other == id)?;
        let owner = wanted.nodes[0];
        if owner == self.agent.id() {
            return answers::here(self);
        }
        // A frozen machine still accepts connections: asking it would cost the whole limit, while
        // its successor gets ready.
        if !matches!(self.agent.life(owner), Life::Alive | Life::Suspect) {
            return None;
        }
        let channel = self.agent.open(owner, ANSWERS, OWNER_LIMIT).ok()?;
        Some(Arc::new(Wire(channel)))
    }

    fn name(&self, id: NodeId) -> String {
        let known = self.agent.nodes().into_iter().find(|node| node.id == id);
        known.map_or_else(|| id.to_string(), |node| node.facts.name)
    }

    fn want(&self, id: InstanceId, epoch: u64, wanted: Option<&Wanted>) -> Result<(), String> {
        let text = wanted.map(|it| serde_json::to_string(it).expect("a record is JSON"));
        let written = self.agent.write(Key::Instance(id), epoch, text);
        written.map_err(|error| error.to_string())
    }

    fn load(&self, ask: &Ask) -> Result<InstanceId, String> {
        let (id, wanted) = (new_id()?, self.record(ask)?);
        self.want(id, 1, Some(&wanted)).map(|()| id)
    }

    /// The first record of what is asked for.
    fn record(&self, ask: &Ask) -> Result<Wanted, String> {
        let nodes = self.choose(ask)?;
        if ask.spare > 0 && nodes.len() < 2 {
            let reason = "a spare is kept by another node of the instance";
            return Err(format!(
                "{reason}: ask for --nodes 2 or more, or for no --spare"
            ));
        }
        let path = self.copies.of_user(&ask.model)?;
        let failed = |error| format!("{}: {error}", path.display());
        preview::check_file(&path, nodes.len())?;
        self.measure_unknown(&nodes);
        for way in self.ways_told(&nodes) {
            (self.spec.tell)(&format!("{}: {way}", ask.model));
        }
        Ok(Wanted {
            model: ask.model.clone(),
            sha256: self.copies.hash(&path).map_err(failed)?,
            bytes: std::fs::metadata(&path).map_err(failed)?.len(),
            successors: nodes[1..].to_vec(),
            nodes,
            named: !ask.nodes.is_empty(),
            split: match ask.split {
                SplitKind::Auto => SPLIT_ANY.to_owned(),
                kind => kind.to_string(),
            },
            threads: ask.threads.unwrap_or(self.spec.threads as u16),
            context: ask.context,
            parallel: ask.parallel,
            spare: ask.spare,
            lender: None,
        })
    }

    /// The nodes that are to compute, this one first if it is among them.
    fn choose(&self, ask: &Ask) -> Result<Vec<NodeId>, String> {
        let mut nodes: Vec<NodeId> = if ask.nodes.is_empty() {
            let (order, notes) = self.ranked();
            if order.len() < ask.count {
                let (wanted, live) = (ask.count, order.len());
                let notes: String = notes.iter().map(|note| format!("; {note}")).collect();
                return Err(format!("{wanted} nodes are wanted and {live} live{notes}"));
            }
            order.into_iter().take(ask.count).collect()
        } else {
            let find = |name: &String| self.agent.find(name).map(|node| node.id);
            let found: Result<_, _> = ask.nodes.iter().map(find).collect();
            found.map_err(|error| error.to_string())?
        };
        if nodes.is_empty() || nodes.len() > NODES_MAX {
            return Err(format!("{} nodes, expected 1 to {NODES_MAX}", nodes.len()));
        }
        let own = self.agent.id();
        nodes.sort_by_key(|id| *id != own);
        let each: BTreeSet<_> = nodes.iter().collect();
        match each.len() == nodes.len() {
            true => Ok(nodes),
            false => Err("a node is named twice".to_owned()),
        }
    }

    fn unload(&self, name: &str) -> Result<usize, String> {
        let map = self.agent.map();
        let ids: Vec<InstanceId> = placement::wanted(&map)
            .filter(|(id, _, wanted)| wanted.model == name || id.to_string() == name)
            .map(|(id, ..)| id)
            .collect();
        if ids.is_empty() {
            return Err(format!("no instance of {name:?} is loaded"));
        }
        for id in &ids {
            self.want(*id, EPOCH_UNWANTED, None)?;
        }
        Ok(ids.len())
    }

    fn list(&self) -> Vec<View> {
        let map = self.agent.map();
        // Once: each look at the nodes reads all of their facts.
        let nodes = self.agent.nodes().into_iter();
        let names: BTreeMap<NodeId, String> = nodes.map(|n| (n.id, n.facts.name)).collect();
        let name = |id: &NodeId| names.get(id).cloned().unwrap_or_else(|| id.to_string());
        let view = |(id, epoch, wanted): (InstanceId, u64, Wanted)| {
            let report = report(&map, id).filter(|report| report.epoch == epoch);
            let state = report.as_ref().map_or("waiting", |it| match it.state {
                State::Fetching => "fetching",
                State::Loading => "loading",
                State::Ready => "ready",
                State::Recovering => "recovering",
                State::Failed => "failed",
            });
            let (progress, reason) = report
                .as_ref()
                .map_or((None, None), |it| (it.progress, it.reason.clone()));
            View {
                id: id.to_string(),
                model: wanted.model,
                state: state.to_owned(),
                progress,
                reason,
                nodes: wanted.nodes.iter().map(name).collect(),
                epoch,
                split: wanted.split,
            }
        };
        placement::wanted(&map).map(view).collect()
    }
}

fn new_id() -> Result<InstanceId, String> {
    let mut number = [0; 8];
    getrandom::fill(&mut number).map_err(|error| error.to_string())?;
    Ok(InstanceId(u64::from_le_bytes(number)))
}

/// What the owner of an instance says of it.
fn report(map: &paceline_cluster::nodes::Registers, id: InstanceId) -> Option<Report> {
    serde_json::from_str(map.get(&Key::State(id))?).ok()
}
