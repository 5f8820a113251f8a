//! An instance that this node owns: distributes the model, starts the workers and publishes status
//! reports.

mod reports;

use std::cell::Cell;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass, UnknownKernelClass, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::member::Life;
use paceline_comm::Backend;
use paceline_engine::Service as _;
use paceline_fleet::{InstanceId, InstanceSpec, SPARE_AUTO, State, WeightDistribution};
use paceline_model::{Config, ModelSource, SplitKind};
use paceline_tensor::UnknownKvType;

use super::copies::CheckRange;
use super::device_memory::fitting_shares;
use super::flaps::{Flaps, UnusedNodes};
use super::hosts::{InstanceNodes, RunningFacts, SeenHosts};
use super::{
    FETCH, Inner, LOOK_EVERY, OwnerService, copies, encoders, name_of, one_machine, roots,
};
use crate::classes::Classes;
use crate::workers::remote::RemoteWorkers;
use crate::{Instance, Options, PrefillOptions, PreparedModel};

/// Progress is written to the shared map at most this often: each write goes to all nodes.
const TELL_EVERY: Duration = Duration::from_millis(500);

/// How long the first load waits for a lost node to return before it continues without it. A killed
/// process is back within a second; a longer wait costs more than the ranks of the node elsewhere.
const RETURN_LIMIT: Duration = Duration::from_secs(3);

/// How often a node is asked to get a model, where each attempt fails for another reason.
const FETCHES_MAX: u32 = 4;

/// How long an instance answers before it gets automatic standbys. One loaded for a few questions
/// needs none.
const AUTO_SPARE_AFTER: Duration = Duration::from_secs(30);

/// An instance of this node.
#[derive(Clone)]
pub(super) struct OwnedInstance {
    pub(super) id: InstanceId,
    pub(super) epoch: u64,
    pub(super) wanted: InstanceSpec,
    /// Lost workers by node.
    pub(super) flaps: Arc<Flaps>,
    /// Set when a rank was lost and no other node of the instance has memory for it.
    pub(super) cramped: Arc<AtomicBool>,
    pub(super) unused: Arc<UnusedNodes>,
    pub(super) running: Arc<Mutex<RunningFacts>>,
    /// Whether it was started before, by an earlier record or an earlier process of this node.
    /// Clients may have partial answers, so a failure while it loads does not end it.
    pub(super) goes_on: bool,
}

impl OwnedInstance {
    /// The instance of a record, not yet started.
    pub(super) fn new((id, epoch): (InstanceId, u64), wanted: InstanceSpec, goes_on: bool) -> Self {
        Self {
            id,
            epoch,
            wanted,
            flaps: Arc::default(),
            cramped: Arc::default(),
            unused: Arc::default(),
            running: Arc::default(),
            goes_on,
        }
    }

    /// Starts the instance and publishes reports. Returns its service. An instance that was started
    /// before is tried again when nodes join.
    pub(super) fn start(&self, inner: &Arc<Inner>) -> Option<OwnerService> {
        let mut told = None;
        loop {
            let reason = match self.try_start(inner) {
                Ok(answers) => {
                    self.report(inner, State::Ready, None, self.left_out(inner));
                    self.back_up(inner);
                    return Some(answers);
                }
                Err(reason) => reason,
            };
            if told.as_ref() != Some(&reason) {
                (inner.spec.tell)(&format!("error: {}: {reason}", self.wanted.model));
            }
            told = Some(reason.clone());
            if !self.goes_on {
                self.report(inner, State::Failed, None, Some(reason));
                return None;
            }
            self.report(inner, State::Recovering, None, Some(reason));
            if !self.wait_for_nodes(inner) {
                return None;
            }
        }
    }

    fn try_start(&self, inner: &Arc<Inner>) -> Result<OwnerService, String> {
        if self.goes_on {
            let room = inner.check_room(self.id, &self.wanted);
            room.map_err(|error| error.to_string())?;
        }
        self.report(inner, State::Fetching, None, None);
        let path = self.own_file(inner)?;
        let prepared = (!encoders::is_encoder(&path)).then(|| self.prepare(inner, &path));
        let prepared = prepared.transpose()?;
        self.share(inner, prepared.as_ref())?;
        let draft = self.draft(inner)?;
        let adapters = self.adapter_files(inner)?;
        self.report(inner, State::Loading, None, None);
        let Some(mut prepared) = prepared else {
            let model = (&inner.agent, &name_of(&self.wanted));
            let path = inner.copies.find_right(model, CheckRange::All)?;
            return encoders::load(&path, &self.wanted).map(OwnerService::Encoder);
        };
        let draft = match draft {
            Some(path) => guess_with(&mut prepared, &path).map(|()| Some(path)),
            None => self.own_layer(inner, &mut prepared),
        }?;
        for (name, path) in &adapters {
            let adapted = prepared.adapt(name, path);
            adapted.map_err(|error| error.to_string())?;
        }
        match self.wanted.spare {
            0 => {}
            SPARE_AUTO if self.wanted.nodes.len() < 2 => {}
            SPARE_AUTO => prepared.keep_spares(AUTO_SPARE_AFTER),
            _ => prepared.keep_spares(Duration::ZERO),
        }
        if self.wanted.options.follow {
            prepared.follow_use();
        }
        if self.goes_on {
            prepared.go_on();
        }
        lock(&self.running).context = Some(prepared.engine().context as u32);
        let (mut instance, rehearsal) = match self.wanted.on_one_machine() {
            Some(options) => {
                self.start_here(inner, (prepared, options), (path, draft, adapters))?
            }
            None => (self.start_on_nodes(inner, prepared)?, None),
        };
        let ready = instance.ready_while(|| inner.has_begun(self.id, self.epoch));
        ready.map_err(|error| error.to_string())?;
        if let Some(rehearsal) = rehearsal.filter(|_| !self.goes_on) {
            instance.rehearse(&rehearsal);
        }
        lock(&self.running).numbers = instance.numbers(); // the observer may come later
        Ok(OwnerService::Instance(Arc::new(instance)))
    }

    /// Starts workers on the nodes of the record.
    fn start_on_nodes(
        &self,
        inner: &Arc<Inner>,
        mut prepared: PreparedModel,
    ) -> Result<Instance, String> {
        prepared.succeed(self.successors());
        prepared.observe(inner.speed_observer(&self.wanted, &prepared));
        let crew = self.crew(inner, self.wanted.clone(), Arc::clone(&self.flaps));
        let of_draft = self.wanted.of_draft();
        let of_draft = of_draft.or_else(|| prepared.has_draft().then(|| self.wanted.clone()));
        let crew = crew.with_draft(of_draft.as_ref().map(name_of));
        let of_adapters = self.wanted.of_adapters();
        let crew = crew.with_adapters(of_adapters.map(|it| name_of(&it)).collect());
        let shape = (prepared.config().clone(), prepared.options().threads);
        let (crew, observer) = (Box::new(crew), self.observer(inner, shape));
        let instance = match prepared.prompts() {
            None => prepared.over(crew, true, observer),
            Some(_) => {
                let of_prompts = InstanceSpec {
                    nodes: self.wanted.prompts.clone(),
                    ..self.wanted.clone()
                };
                let readers = Self {
                    running: Arc::default(),
                    ..self.clone()
                };
                let prompts = readers.crew(inner, of_prompts, Arc::default());
                prepared.over_apart(crew, Box::new(prompts), true, observer)
            }
        };
        instance.map_err(|error| error.to_string())
    }

    /// Workers on the nodes of a record.
    fn crew(&self, inner: &Inner, wanted: InstanceSpec, flaps: Arc<Flaps>) -> RemoteWorkers {
        let (model, ranks) = (name_of(&wanted), wanted.nodes.len() as u32);
        lock(&self.running).seen = SeenHosts::default();
        let places = InstanceNodes {
            agent: inner.agent.clone(),
            nodes: wanted.nodes.clone(),
            wanted,
            host: Arc::clone(&inner.host),
            flaps,
            cramped: Arc::clone(&self.cramped),
            unused: Arc::clone(&self.unused),
            running: Arc::clone(&self.running),
        };
        RemoteWorkers::new(Box::new(places), model, ranks, None)
    }

    /// Indices of the record's successors that compute the instance.
    fn successors(&self) -> Vec<usize> {
        let nodes = &self.wanted.nodes;
        let place = |id: &NodeId| nodes.iter().position(|node| node == id);
        self.wanted.successors.iter().filter_map(place).collect()
    }

    /// The model file on this node; fetched from other nodes if missing.
    fn own_file(&self, inner: &Inner) -> Result<PathBuf, String> {
        let source = self.wanted.source.filter(|id| *id != inner.agent.id());
        let model = (&inner.agent, &name_of(&self.wanted));
        if let Ok(found) = inner.copies.find_right(model, CheckRange::Start) {
            inner.tell_origin((&self.wanted.sha256, self.wanted.manifest), &found);
            return Ok(found);
        }
        let told = Cell::new(Instant::now());
        let progress = |bytes: u64| {
            if told.get().elapsed() >= TELL_EVERY {
                told.set(Instant::now());
                let progress = Some((bytes, self.wanted.bytes));
                self.report(inner, State::Fetching, progress, None);
            }
        };
        let taken = inner
            .copies
            .take(&inner.agent, source, &self.wanted, &progress);
        taken.map_err(|reason| format!("the copy of {}: {reason}", self.wanted.model))?;
        path_of(inner, &self.wanted)
    }

    /// As [`draft_file`](Self::draft_file). An owner after a takeover continues without a missing
    /// draft: answers do not depend on it.
    fn draft(&self, inner: &Inner) -> Result<Option<PathBuf>, String> {
        match self.draft_file(inner) {
            Err(reason) if self.epoch > 1 => {
                let model = &self.wanted.model;
                (inner.spec.tell)(&format!("{model} goes on without its draft: {reason}"));
                Ok(None)
            }
            other => other,
        }
    }

    /// The draft model's file on this node, once every node has it; `None` without one.
    fn draft_file(&self, inner: &Inner) -> Result<Option<PathBuf>, String> {
        let Some(wanted) = self.wanted.of_draft() else {
            return Ok(None);
        };
        let of_draft = Self {
            wanted,
            unused: Arc::default(), // ranks compute without a draft
            ..self.clone()
        };
        if of_draft.wanted.sha256 == self.wanted.sha256 {
            return path_of(inner, &of_draft.wanted).map(Some); // only the leader reads it
        }
        let path = of_draft.own_file(inner)?;
        of_draft.share(inner, None)?;
        Ok(Some(path))
    }

    /// Uses the prediction layer in the model's own files as draft head, where they are whole here
    /// and drafts are wanted. Gives their path then. The leader, which is on this node, reads it.
    fn own_layer(
        &self,
        inner: &Inner,
        prepared: &mut PreparedModel,
    ) -> Result<Option<PathBuf>, String> {
        let path = path_of(inner, &self.wanted).ok();
        let path = path.filter(|_| self.wanted.options.drafts != Some(0));
        let Some(path) = path else {
            return Ok(None);
        };
        let is_used = prepared.guess_with_own_layer();
        let is_used = is_used.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(is_used.then_some(path))
    }

    /// Names of the adapters and their files on this node, once every node has them.
    fn adapter_files(&self, inner: &Inner) -> Result<Vec<(String, PathBuf)>, String> {
        let names = self.wanted.adapters.iter().map(|it| it.name.clone());
        let file = |(name, wanted): (String, InstanceSpec)| -> Result<_, String> {
            let of_adapter = Self {
                wanted,
                ..self.clone()
            };
            let path = of_adapter.own_file(inner)?;
            of_adapter.share(inner, None)?;
            Ok((name, path))
        };
        names.zip(self.wanted.of_adapters()).map(file).collect()
    }

    fn classes(&self) -> Result<Vec<KernelClass>, UnknownKernelClass> {
        match self.wanted.on_one_machine() {
            Some(options) if !options.classes.is_empty() => {
                options.classes.iter().map(|class| class.parse()).collect()
            }
            Some(options) => {
                let class = self.wanted.class_of(self.wanted.nodes[0]).parse()?;
                Ok(vec![class; options.ranks.max(1) as usize])
            }
            None => {
                let nodes = self.wanted.nodes.iter();
                nodes.map(|id| self.wanted.class_of(*id).parse()).collect()
            }
        }
    }

    fn prepare(&self, inner: &Inner, path: &Path) -> Result<PreparedModel, String> {
        let source = ModelSource::open(path).map_err(|error| error.to_string())?;
        let split = self.wanted.split.parse();
        let split: SplitKind = split.map_err(|_| {
            format!(
                "{:?} is no split: try auto, tensor, pipeline or experts",
                self.wanted.split
            )
        })?;
        let machine = self.wanted.on_one_machine();
        let kv = self.wanted.machine.as_ref().and_then(|it| it.kv.as_ref());
        let kv = kv.map(|kv| kv.parse()).transpose();
        let classes = self.classes().map_err(|error| error.to_string())?;
        let options = Options {
            nodes: classes.len() as u32,
            classes: Classes::of(classes),
            threads: usize::from(self.wanted.threads.max(1)),
            kv: kv.map_err(|error: UnknownKvType| error.to_string())?,
            // Nothing was predicted. A pipeline is never much slower than one machine.
            kind: match split {
                SplitKind::Auto if self.wanted.nodes.len() > 1 => SplitKind::Pipeline,
                split => split,
            },
            shares: match machine {
                Some(options) => options.shares.clone(),
                None => {
                    let config = Config::read(&source).ok(); // the model's own error follows
                    let model = config.as_ref().map(|config| (&source, config));
                    let rooms = inner.rooms_named(Some(self.id), &self.wanted);
                    fitting_shares(model, &self.wanted, &rooms)?
                }
            },
            backend: machine.map_or(Ok(Backend::Any), one_machine::backend)?,
            probed: machine.map_or(Ok(Backend::Tcp), one_machine::probed)?,
        };
        let record = (self.id, &self.wanted);
        let sizes = |config: &_| {
            let sizes = (inner.spec.sizes)(path, config, &self.wanted);
            let sizes = inner.within_nodes(record, config, sizes);
            inner.with_chunks(&self.wanted, config, sizes)
        };
        let prepared = PreparedModel::new(Arc::new(source), options, sizes);
        let mut prepared = prepared.map_err(|error| error.to_string())?;
        if let Some(memory) = self.wanted.options.memory {
            let limited = prepared.limit_memory(Bytes(memory));
            limited.map_err(|error| error.to_string())?;
        }
        if let Some(options) = machine {
            one_machine::read_prompts(&mut prepared, options)?;
        }
        let tok_s =
            |(name, tok_ks): (&String, &u64)| Some((name.parse().ok()?, *tok_ks as f64 / 1e3));
        let predicted: Vec<_> = self.wanted.predicted.iter().filter_map(tok_s).collect();
        prepared.steer_among(&predicted);
        let readers = self.wanted.prompts.len() as u32;
        if readers > 0 {
            let class = self.wanted.class_of(self.wanted.prompts[0]).parse();
            let class = class.map_err(|error: UnknownKernelClass| error.to_string())?;
            let wanted = PrefillOptions {
                nodes: readers,
                class: Some(class),
                ..PrefillOptions::default()
            };
            let reads = prepared.read_prompts_on(wanted);
            reads.map_err(|error| error.to_string())?;
        }
        inner.check_devices(record, &prepared)?;
        Ok(prepared)
    }

    /// Makes all nodes fetch the model, or the bytes needed to open it, in parallel. A node refuses
    /// if its disk lacks space for its share of `prepared`.
    fn share(&self, inner: &Inner, prepared: Option<&PreparedModel>) -> Result<(), String> {
        let shares = |model: Option<&PreparedModel>, nodes: &[NodeId]| {
            let shares = model.map_or_else(Vec::new, PreparedModel::bytes_by_rank);
            let shares = shares.into_iter().chain(std::iter::repeat(0));
            nodes.iter().copied().zip(shares).collect::<Vec<_>>()
        };
        let prompts = prepared.and_then(PreparedModel::prompts);
        let all = [
            shares(prepared, &self.wanted.nodes),
            shares(prompts, &self.wanted.prompts),
        ];
        let others = all.into_iter().flatten();
        let others = others.filter(|(id, _)| *id != inner.agent.id());
        let done = AtomicU64::new(0);
        let told = std::sync::Mutex::new(Instant::now());
        std::thread::scope(|scope| {
            let fetch = |(node, share): (NodeId, u64)| {
                let (before, done, told) = (Cell::new(0), &done, &told);
                move || {
                    let progress = |bytes: u64| {
                        let more = bytes.saturating_sub(before.replace(bytes));
                        done.fetch_add(more, Ordering::Relaxed);
                        let mut told = lock(told);
                        if told.elapsed() >= TELL_EVERY {
                            *told = Instant::now();
                            let progress = (done.load(Ordering::Relaxed), self.wanted.bytes);
                            self.report(inner, State::Fetching, Some(progress), None);
                        }
                    };
                    let fetch = || {
                        let had = match self.in_parts(inner) {
                            true => {
                                let model = (&self.wanted, share);
                                copies::ensure_part(&inner.agent, node, model, &progress)
                            }
                            false => copies::ensure(&inner.agent, node, &self.wanted, &progress),
                        };
                        had.map_err(|reason| format!("{}: {reason}", inner.name(node)))
                    };
                    self.fetch_or_leave(inner, node, &fetch)
                }
            };
            let all: Vec<_> = others.map(|node| scope.spawn(fetch(node))).collect();
            let all = all.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            all.collect()
        })
    }

    /// Makes a node get the model by `fetch`. Continues without a node that is lost, whose ranks
    /// then run on others; an instance that was started before does so for any reason.
    fn fetch_or_leave(
        &self,
        inner: &Inner,
        node: NodeId,
        fetch: &dyn Fn() -> Result<(), String>,
    ) -> Result<(), String> {
        let Err(mut reason) = fetch() else {
            return Ok(());
        };
        let mut attempts = 1;
        while !self.goes_on && inner.comes_back(node) {
            attempts += 1;
            match fetch() {
                Ok(()) => return Ok(()),
                Err(again) if again == reason || attempts == FETCHES_MAX => return Err(again),
                Err(other) => reason = other,
            }
        }
        self.unused.lacks(node);
        let model = &self.wanted.model;
        (inner.spec.tell)(&format!("warning: {model} goes on without: {reason}"));
        Ok(())
    }

    /// Whether each node fetches only its own ranges. Encoders are loaded whole, and files without
    /// a signed root can only be copied whole.
    fn in_parts(&self, inner: &Inner) -> bool {
        let wanted = &self.wanted;
        let is_signed = || roots::of(&inner.agent.map(), &wanted.sha256).is_ok();
        let is_encoder = || path_of(inner, wanted).is_ok_and(|path| encoders::is_encoder(&path));
        // Weights that are read while steps compute are of complete files.
        let stays = wanted.options.memory.is_none();
        stays && wanted.options.weights.in_parts(wanted.bytes) && is_signed() && !is_encoder()
    }

    /// Makes the first live successor fetch all of the model, so that the loss of this node loses
    /// no weights. With a small file every node has all of it anyway.
    fn back_up(&self, inner: &Arc<Inner>) {
        let is_alone = self.wanted.nodes.len() == 1 && self.wanted.lender.is_none();
        let is_auto = self.wanted.options.weights == WeightDistribution::Auto;
        if !is_auto || !(is_alone || self.in_parts(inner)) {
            return;
        }
        let (own, shared) = (self.clone(), Arc::clone(inner));
        let run = move || {
            let inner = shared;
            let mut heirs = own.wanted.successors.iter();
            let heir = heirs.find(|id| inner.agent.life(**id) == Life::Alive);
            let Some(heir) = heir else { return };
            let mut files = own.wanted.clone().files();
            let had = files.try_for_each(|it| copies::ensure(&inner.agent, *heir, &it, &|_| ()));
            let (name, model) = (inner.name(*heir), &own.wanted.model);
            match had {
                Ok(()) => (inner.spec.tell)(&format!("{name} has all of {model} too")),
                Err(reason) => (inner.spec.tell)(&format!(
                    "warning: {name} does not get all of {model}, which is lost with this node: \
                     {reason}"
                )),
            }
        };
        inner.spawn("backup", run);
    }
}

impl Inner {
    /// Whether a node answers now, or does so within [`RETURN_LIMIT`].
    fn comes_back(&self, node: NodeId) -> bool {
        let until = Instant::now() + RETURN_LIMIT;
        loop {
            match self.agent.open(node, FETCH, RETURN_LIMIT) {
                Ok(channel) => {
                    channel.close();
                    return true;
                }
                Err(_) if self.agent.life(node) == Life::Dead => return false,
                Err(_) if Instant::now() >= until || self.is_over() => return false,
                Err(_) => std::thread::sleep(LOOK_EVERY / 5),
            }
        }
    }
}

/// Adds the draft model at `path`.
fn guess_with(prepared: &mut PreparedModel, path: &Path) -> Result<(), String> {
    let failed = |error: &dyn Display| format!("{}: {error}", path.display());
    let source = ModelSource::open(path).map_err(|error| failed(&error))?;
    let guessed = prepared.guess_with(Arc::new(source));
    guessed.map_err(|error| failed(&error))
}

/// Local path of the model file; weight ranges may be absent.
pub(super) fn part_of(inner: &Inner, wanted: &InstanceSpec) -> Result<PathBuf, String> {
    inner.copies.find_part(&inner.agent, &name_of(wanted))
}

/// The whole file of an instance's model on this node.
pub(super) fn path_of(inner: &Inner, wanted: &InstanceSpec) -> Result<PathBuf, String> {
    inner.copies.find(&name_of(wanted))
}
