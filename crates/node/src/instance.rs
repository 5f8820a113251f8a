//! An instance: a model computed by workers together. This is the shell around its [`Supervisor`].
//!
//! ```text
//! callers --commands--> thread "instance": Supervisor::step --actions--> crew, sinks, observer
//!                            ^                                             |
//!                            +---------- events of the workers <-----------+
//! ```
//! The thread owns the supervisor, the sinks and the clock, and executes the supervisor's actions.
//! Callers send commands and read the published status; only [`Instance::moved`] waits for the
//! thread. `fleet` starts instances on a cluster; `model_setup` starts them for one command.

mod measures;
pub(crate) mod prefill;
pub(crate) mod rebalancing;
mod shell;
mod spares;

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::{Bytes, KernelClass, Rank, lock};
use paceline_comm::Backend;
use paceline_engine::{
    DraftCounts, EngineConfig, RequestFailure, Service, ServiceStatus, Sink, State, Submission,
    Ticket,
};
use paceline_model::trace::RankTrace;
use paceline_model::{Config, Split, numbers_name};
use paceline_plan::Placement;
use paceline_plan::prefill_offload::PrefillOffload;
use paceline_tensor::KvType;

use crate::forecast::Forecast;
use crate::prefill::PrefillCounts;
use crate::supervisor::{
    ChangeRecord, HELD_ALONE_LIMIT, HELD_LIMIT, Health, Notice, Policy, SplitCandidate, Supervisor,
};
use crate::workers::InstanceWorkers;
use crate::{Error, PlannedSplit};
use measures::{RankMeasurements, RankTask};
use paceline_worker::messages::{DraftJob, PrefillRole, RankAssignment, RankFacts};
use paceline_worker::prefill_classes::UnlikePrefill;
use paceline_worker::{AdapterOf, InstanceTraffic, adapters};
use prefill::{DecodingClasses, GroupEventReceiver, GroupEventSender, GroupRole, PrefillGroup};
use rebalancing::Follower;
use shell::{GroupCredentials, Shell};
use spares::Keeper;

/// Interval at which [`Instance::ready_while`] asks its callback.
const READY_LOOK: Duration = Duration::from_millis(200);

/// Time for workers to exit by themselves when the instance ends.
const GRACE: Duration = Duration::from_millis(300);

/// Longest wait of a rank for another's part of a step, in seconds. A step of 512 rows of an 8B
/// model takes minutes on a slow machine. A dead or stopped rank is detected in 2 s by other means.
const PATIENCE_S: u64 = 600;

/// A measurement of an instance over machines.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SpeedSample {
    /// Tokens a second of an answer alone, with [`KEYS`] keys in the cache.
    Decode(f64),
    /// From the first order to its workers until all were ready.
    Load(Duration),
}

/// Receives measurements of a split; must not block.
#[derive(Clone, derive_more::Debug)]
#[debug("a speed observer")]
pub(crate) struct SpeedObserver(pub(crate) Arc<ObserveSpeed>);

type ObserveSpeed = dyn Fn(&Split, SpeedSample) + Send + Sync;

/// A forecast that measured answers correct.
pub type SharedForecast = Arc<Mutex<Forecast>>;

/// Receives an instance's notices and its possible splits, on the instance's thread: must not
/// block.
pub type Observer = Box<dyn FnMut(&Notice, &[PlannedSplit]) + Send>;

/// Specification of an instance: its model, ranks and engine.
#[derive(derive_more::Debug)]
#[debug("{} over {} ranks", self.engine.model, cuts[*first].split.ranks())]
pub struct InstanceConfig {
    /// Shape of the model.
    pub config: Config,
    /// Kernel class by rank: the same within a stage.
    pub classes: Vec<KernelClass>,
    /// Threads of each worker.
    pub threads: usize,
    /// Type of keys and values, if not that of the class; not on MLX.
    pub kv: Option<KvType>,
    /// Most memory of each machine for workers and their caches; not on MLX.
    pub memory: Option<Bytes>,
    /// Transport between the ranks.
    pub backend: Backend,
    /// Sizes of the engine.
    pub engine: EngineConfig,
    /// The possible splits, all over the same ranks; at least one.
    pub cuts: Vec<PlannedSplit>,
    /// Index of the first split to use.
    pub first: usize,
    /// Forecast to correct by measured answers.
    pub forecast: Option<SharedForecast>,
    /// Receives measurements where several machines compute.
    pub(crate) observer: Option<SpeedObserver>,
    /// Whether a new epoch is started after a failure.
    pub restart: bool,
    /// How long an epoch answers before each rank gets a standby worker with packed weights on
    /// another machine; `None` for no standbys.
    pub spares: Option<Duration>,
    /// The identity of its files, by [`paceline_worker::identity`]. Workers refuse other files.
    pub identity: String,
    /// The identity of the draft model, if there is one.
    pub draft: Option<String>,
    /// Layers whose input the draft reads, if it is a draft head.
    pub captures: Vec<usize>,
    /// Adapters of its model, on this machine.
    pub adapters: Vec<AdapterOf>,
    /// Whether slower ranks get a smaller share, by one of `cuts`.
    pub follows: bool,
    /// Whether the instance was started before, by another owner: see [`Policy::goes_on`].
    pub goes_on: bool,
    /// Receives its events, with disaggregated prefill.
    pub(crate) hears: Option<GroupEventSender>,
    /// Set for both groups where the other one computes in another class.
    pub(crate) unlike: Option<UnlikePrefill>,
}

impl InstanceConfig {
    fn ranks(&self) -> u32 {
        self.cuts[self.first].split.ranks()
    }

    /// The predicted speed of several concurrent answers, by split.
    fn together(&self) -> Vec<Vec<(u32, f64)>> {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let most = u32::try_from(self.engine.max_running).unwrap_or(u32::MAX);
        let expected = |cut: &PlannedSplit| match &forecast {
            Some(forecast) => forecast.predict_many(&self.config, &cut.split, most),
            None => Vec::new(),
        };
        self.cuts.iter().map(expected).collect()
    }

    fn supervisor(&self, crew: &dyn InstanceWorkers) -> Result<Supervisor, Error> {
        let forecast = self.forecast.as_ref().map(|forecast| lock(forecast));
        let way = |cut: &PlannedSplit| {
            let known = forecast.as_ref().and_then(|all| all.load_s(&cut.split));
            let tok_s = cut.tok_s.filter(|v| v.is_finite() && *v > 0.0);
            let key_s = forecast
                .as_ref()
                .map(|all| all.key_s(&self.config, &cut.split));
            SplitCandidate {
                name: match self.follows {
                    true => rebalancing::name(&cut.split),
                    false => cut.split.to_string(),
                },
                leader: cut.split.leader(),
                tok_s: tok_s.unwrap_or(1.0), // irrelevant: it is the only split then
                key_s: key_s.unwrap_or(0.0),
                change: known.and_then(|s| Duration::try_from_secs_f64(s).ok()),
            }
        };
        let ways = self.cuts.iter().map(way).collect();
        let near = !self.classes.iter().all(|class| class.is_exact());
        let policy = Policy {
            restart: self.restart,
            resume: !(near && self.engine.strict),
            near,
            reads_near: self.unlike.is_some(),
            held_max: self
                .engine
                .max_waiting
                .saturating_add(self.engine.max_running),
            held_limit: match crew.is_one_machine() {
                true => HELD_ALONE_LIMIT,
                false => HELD_LIMIT,
            },
            holds: self.follows,
            goes_on: self.goes_on,
        };
        Ok(Supervisor::new(ways, self.first, self.ranks(), policy)?)
    }

    fn job(
        &self,
        crew: &dyn InstanceWorkers,
        rank: Rank,
        (epoch, way): (u64, usize),
        meeting: &GroupCredentials,
    ) -> RankAssignment {
        let post = crew.post(rank);
        let (is_here, plain) = (crew.is_one_machine(), crew.is_trusted());
        RankAssignment {
            epoch,
            rank: rank.0,
            split: self.cuts[way].split.clone(),
            draft: self.draft.clone().zip(post.draft).map(DraftJob::from),
            captures: self.captures.clone(),
            model: post.model,
            identity: self.identity.clone(),
            adapters: adapters::at(&self.adapters, &post.adapters),
            class: self.classes[rank.0 as usize].to_string(),
            mixed: self.classes.iter().any(|class| *class != self.classes[0]),
            backend: self.backend.name().to_owned(),
            threads: self.threads,
            first_core: post.first_core,
            kv: self.kv.map(|kv| kv.name().to_owned()),
            memory: self.memory.map(|Bytes(all)| match is_here {
                true => all / u64::from(self.ranks()),
                false => all,
            }),
            engine: self.engine.clone(),
            group: meeting.group,
            key: (!is_here && !plain).then(|| meeting.key.clone()),
            plain,
            cables: meeting.cables.clone(),
            is_alone: is_here,
            listen: post.listen,
            patience_s: PATIENCE_S,
            hands: self.hears.as_ref().map(|hears| match hears.side() {
                GroupRole::Decode => PrefillRole::Take,
                GroupRole::Prefill => PrefillRole::Give,
            }),
            unlike: self.unlike.clone(),
        }
    }
}

/// A model that workers compute together. Dropping it ends them.
#[derive(derive_more::Debug)]
#[debug("instance by split {}", self.split())]
pub struct Instance {
    shared: Arc<InstanceShared>,
    cuts: Vec<PlannedSplit>,
    /// As [`InstanceConfig::classes`].
    classes: Vec<KernelClass>,
    /// By split: concurrent answers, and their predicted tokens a second together.
    together: Vec<Vec<(u32, f64)>>,
    /// Receives the result of the first start, once.
    started: Mutex<Option<Receiver<Result<(), Error>>>>,
    /// The prefill ranks; they end before the decode ranks.
    prompts: Option<PrefillGroup>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by callers and the thread.
struct InstanceShared {
    crew: Box<dyn InstanceWorkers>,
    state: Mutex<InstanceState>,
    /// Signals that a turn has ended.
    turn_over: Condvar,
}

struct InstanceState {
    commands: VecDeque<Command>,
    status: InstanceStatus,
    /// Tasks of all ranks that a caller has its turn at.
    in_turn: Vec<RankTask>,
}

enum Command {
    Accept(Submission, Sink),
    Cancel(Ticket),
    Measure(Sender<(Rank, RankMeasurements)>),
    Trace,
    Traced(Sender<(Rank, RankTrace)>),
    Tell(Notice),
    End,
}

/// Status of the instance after the last event.
struct InstanceStatus {
    health: Health,
    door: Result<(), RequestFailure>,
    load: (usize, usize),
    epoch: u64,
    way: usize,
    restarts: u64,
    continued: u64,
    measured: Option<f64>,
    /// Draft tokens as measured last.
    drafts: DraftCounts,
    n_changes: u32,
    facts: Vec<RankFacts>,
    changes: Vec<ChangeRecord>,
    /// Bytes moved by workers in epochs that they have left.
    moved: InstanceTraffic,
}

impl Instance {
    /// Starts the workers of `workers`; `observer` receives their load progress and all later
    /// notices. Returns at once: [`ready`](Self::ready) waits.
    ///
    /// # Errors
    /// What the system refuses; no worker is left then.
    pub fn begin(
        spec: InstanceConfig,
        crew: Box<dyn InstanceWorkers>,
        observer: Observer,
    ) -> Result<Self, Error> {
        let supervisor = spec.supervisor(&*crew)?;
        let status = InstanceStatus {
            health: supervisor.health(),
            door: supervisor.check(),
            load: (0, 0),
            epoch: 0,
            way: spec.first,
            restarts: 0,
            continued: 0,
            measured: None,
            drafts: DraftCounts::default(),
            n_changes: 0,
            facts: Vec::new(),
            changes: Vec::new(),
            moved: InstanceTraffic::default(),
        };
        let shared = Arc::new(InstanceShared {
            crew,
            state: Mutex::new(InstanceState {
                commands: VecDeque::new(),
                status,
                in_turn: Vec::new(),
            }),
            turn_over: Condvar::new(),
        });
        let (first, started) = channel();
        let (cuts, together, classes) = (spec.cuts.clone(), spec.together(), spec.classes.clone());
        let follower = || Follower::new(&spec.config, &cuts, spec.first);
        let mut shell = Shell {
            follower: spec.follows.then(follower),
            shared: Arc::clone(&shared),
            spec,
            supervisor,
            observer,
            begun: Instant::now(),
            sinks: HashMap::new(),
            meeting: GroupCredentials::default(),
            measuring: Vec::new(),
            tracing: Vec::new(),
            first: Some(first),
            keeper: Keeper::default(),
            over: false,
        };
        let thread = std::thread::Builder::new().name("instance".to_owned());
        let thread = thread.spawn(move || shell.run());
        let thread = thread.map_err(|source| Error::System {
            what: "start a thread",
            source,
        })?;
        Ok(Self {
            shared,
            cuts,
            classes,
            together,
            started: Mutex::new(Some(started)),
            prompts: None,
            thread: Some(thread),
        })
    }

    /// Attaches another instance of the same model as prefill ranks. `heard` has received the
    /// events of both from their start. `readers` holds the predicted prefill speeds; the first
    /// start waits for the other instance if it is `awaited`. `strict` ranks take no pages of other
    /// numbers.
    pub(crate) fn with_prompts(
        mut self,
        prompts: Self,
        heard: GroupEventReceiver,
        (readers, awaited, strict): (PrefillOffload, bool, bool),
    ) -> Result<Self, Error> {
        let here = Arc::clone(&self.shared);
        let classes = self.classes.clone();
        let options = (readers, awaited, DecodingClasses { classes, strict });
        let prompts = PrefillGroup::begin(prompts, here, heard, options)?;
        self.prompts = Some(prompts);
        Ok(self)
    }

    /// Waits until all workers are ready for the first time; later calls return at once. Takes as
    /// long as loading the largest shard.
    ///
    /// # Errors
    /// [`Error::Worker`] names the rank that failed; no worker is left then.
    pub fn ready(&self) -> Result<(), Error> {
        let Some(started) = lock(&self.started).take() else {
            return Ok(());
        };
        started.recv().map_err(|_| Error::Ended {
            what: "the thread of an instance",
        })??;
        self.prompts.as_ref().map_or(Ok(()), PrefillGroup::ready)
    }

    /// As [`ready`](Self::ready), but only while `goes_on` returns true; it is called five times a
    /// second. An instance that was started before is restarted until it is ready.
    ///
    /// # Errors
    /// As `ready`, and [`Error::Ended`] when it stops waiting.
    pub fn ready_while(&self, goes_on: impl Fn() -> bool) -> Result<(), Error> {
        let Some(started) = lock(&self.started).take() else {
            return Ok(());
        };
        loop {
            match started.recv_timeout(READY_LOOK) {
                Ok(outcome) => {
                    outcome?;
                    let prompts = self.prompts.as_ref();
                    return prompts.map_or(Ok(()), |it| it.ready_while(goes_on));
                }
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(_) => {
                    return Err(Error::Ended {
                        what: "the wait for an instance",
                    });
                }
            }
        }
    }

    /// The possible splits.
    pub fn cuts(&self) -> &[PlannedSplit] {
        &self.cuts
    }

    /// The placement in use: one pipeline, with the epoch's number.
    pub fn placement(&self) -> Placement {
        let view = &lock(&self.shared.state).status;
        let own = self.cuts[view.way].placement.clone();
        let behind = self.cuts[view.way].split.ranks() as usize;
        Placement {
            epoch: view.epoch,
            prefill: self.prompts.as_ref().map(|it| it.pipeline(behind)),
            ..own
        }
    }

    /// The prefill instance, if there is one: whether both are connected, the outcomes of prompts,
    /// and the prefill speed of both.
    pub(crate) fn prompts(&self) -> Option<(&Self, (bool, PrefillCounts, PrefillOffload))> {
        let prompts = self.prompts.as_ref()?;
        Some((&*prompts.instance, prompts.figures()))
    }

    /// The split in use.
    pub fn split(&self) -> &Split {
        &self.cuts[lock(&self.shared.state).status.way].split
    }

    /// Predicted decode tokens a second of the split in use.
    pub fn predicted(&self) -> Option<f64> {
        self.cuts[lock(&self.shared.state).status.way].tok_s
    }

    /// Replaces that prediction.
    pub(crate) fn expect(&mut self, tok_s: f64) {
        let way = lock(&self.shared.state).status.way;
        self.cuts[way].tok_s = Some(tok_s);
    }

    /// Predicted decode tokens a second of 2, 4, 8 and more concurrent answers with the split in
    /// use. Empty without a forecast.
    pub fn predicted_together(&self) -> &[(u32, f64)] {
        &self.together[lock(&self.shared.state).status.way]
    }

    /// Measured decode tokens a second of the split in use, from single answers.
    pub fn measured(&self) -> Option<f64> {
        lock(&self.shared.state).status.measured
    }

    /// All changes of the split so far, refused ones included.
    pub fn changes(&self) -> Vec<ChangeRecord> {
        lock(&self.shared.state).status.changes.clone()
    }

    /// Changes that were made.
    pub fn n_changes(&self) -> u32 {
        lock(&self.shared.state).status.n_changes
    }

    /// Number of epochs started after a failure.
    pub fn restarts(&self) -> u64 {
        lock(&self.shared.state).status.restarts
    }

    /// Answers that continued from their tokens with numbers that are near and not the same to the
    /// bit, after a failure or with another split.
    pub fn continued(&self) -> u64 {
        lock(&self.shared.state).status.continued
    }

    /// Number of the epoch, from 1.
    pub fn epoch(&self) -> u64 {
        lock(&self.shared.state).status.epoch
    }

    /// The facts of the last epoch's ranks when they were ready, in rank order.
    pub fn facts(&self) -> Vec<RankFacts> {
        lock(&self.shared.state).status.facts.clone()
    }
}

impl Service for Instance {
    fn accept(&self, submission: Submission, sink: Sink) -> Result<(), RequestFailure> {
        lock(&self.shared.state).status.door.clone()?;
        // The prefill ranks have no adapters, and an adapter's pages differ.
        let is_adapted = submission.request.adapter.is_some();
        match self.prompts.as_ref().filter(|_| !is_adapted) {
            Some(prompts) => prompts.accept(submission, sink),
            None => self.shared.command(Command::Accept(submission, sink)),
        }
        Ok(())
    }

    fn cancel(&self, ticket: Ticket) {
        match &self.prompts {
            Some(prompts) => prompts.cancel(ticket),
            None => self.shared.command(Command::Cancel(ticket)),
        }
    }

    fn cut(&self) -> String {
        self.split().to_string()
    }

    fn numbers(&self) -> Option<String> {
        numbers(self.split(), &self.classes, &self.facts())
    }

    fn status(&self) -> ServiceStatus {
        let view = &lock(&self.shared.state).status;
        let (running, waiting) = view.load;
        let is_open = view.door.is_ok();
        let state = match &view.health {
            Health::Ready => State::Ready,
            Health::Loading if is_open => State::Recovering(String::from("workers start again")),
            Health::Loading => State::Loading,
            Health::Failed { reason, .. } if is_open => State::Recovering(reason.clone()),
            Health::Failed { reason, .. } => State::Failed(reason.clone()),
        };
        let held = self.prompts.as_ref().map_or(0, PrefillGroup::held);
        ServiceStatus {
            state,
            running,
            waiting: waiting + held,
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        drop(self.prompts.take());
        self.shared.command(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has no result, and a panic there was reported
        }
        self.shared.crew.end(GRACE);
    }
}

impl InstanceShared {
    fn command(&self, command: Command) {
        lock(&self.state).commands.push_back(command);
        self.crew.wake();
    }
}

/// Names the numbers of ready ranks with these classes; see [`Service::numbers`].
pub(crate) fn numbers(
    split: &Split,
    classes: &[KernelClass],
    facts: &[RankFacts],
) -> Option<String> {
    let devices = facts.iter().map(|rank| &*rank.instruction_set);
    let ranks: Vec<(KernelClass, &str)> = classes.iter().copied().zip(devices).collect();
    numbers_name(split, &ranks)
}
