//! The control loop of a node: observes the cluster once a round, and performs what
//! [`reconcile`](paceline_fleet::reconcile) decides.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::telemetry;
use paceline_engine::{Service, State};
use paceline_fleet::{
    Action, EPOCH_UNWANTED, History, InstanceId, InstanceSpec, Observed,
    OwnedInstance as Observation, ResumeReason, Specs, UnloadReason, WorkerStatus, WriteReason,
    reconcile,
};

use super::owner::{self, OwnedInstance};
use super::{Inner, LOOK_EVERY, RunningInstance, roots};
use crate::Instance;

/// Interval of readings of the battery: three small files each. Short, because the battery may
/// already be low when the machine is unplugged.
const BATTERY_EVERY: Duration = Duration::from_secs(5);

impl Inner {
    pub(super) fn run(self: &Arc<Self>) {
        let mut watch = self.agent.watch();
        let mut history = History::new(Instant::now());
        let mut battery_read: Option<Instant> = None;
        while !self.is_over() {
            let now = Instant::now();
            let (mut observed, specs) = self.observe();
            for it in lock(&self.state).owned.values() {
                it.owned.cramped.store(false, Ordering::SeqCst); // it was observed
            }
            if observed.needs_paths(&specs) {
                observed.broken = self.all_broken(&observed);
            }
            if battery_read.is_none_or(|at| now.saturating_duration_since(at) >= BATTERY_EVERY) {
                battery_read = Some(now);
                observed.battery = Some(telemetry::battery("/"));
            }
            observed.rooted = self.rooted(&observed);
            for action in reconcile(&observed, &specs, now, &mut history) {
                self.act(action);
            }
            self.forget_unloaded(&specs);
            self.publish();
            let _ = self.has_lost_some(); // records each death at its start
            let began = Instant::now();
            // In slices, so that shutdown is noticed soon.
            while began.elapsed() < LOOK_EVERY && !self.is_over() {
                if watch.wait(LOOK_EVERY / 10) {
                    break;
                }
            }
        }
    }

    /// As [`observe`](Self::observe), with the pairs of nodes that cannot speak. Cost: parses the
    /// measured paths of all nodes.
    pub(super) fn observe_with_paths(&self) -> (Observed, Specs) {
        let (mut observed, specs) = self.observe();
        observed.broken = self.all_broken(&observed);
        (observed, specs)
    }

    /// The observation of this node now, and the records of the map.
    pub(super) fn observe(&self) -> (Observed, Specs) {
        let specs = Specs::read(&self.agent.map());
        let nodes = self.agent.nodes();
        let of_records = specs.iter().flat_map(|(_, it)| named_nodes(&it.spec));
        let ids: BTreeSet<NodeId> = nodes.iter().map(|it| it.id).chain(of_records).collect();
        // After the map was read: a lease is recorded before its record is written.
        let state = lock(&self.state);
        let running = state.owned.iter();
        let running: Vec<_> = running
            .map(|(id, it)| {
                let (own, any) = (it.own_instance(), it.any_instance());
                (*id, it.owned.clone(), it.answers.is_some(), own, any)
            })
            .collect();
        let (leased, drained) = (state.leased.clone(), state.drained);
        let (is_evaluating, slower) = (state.is_evaluating, state.slower.clone());
        let routes = state.open.iter();
        let routes = routes.map(|(name, to)| (name.clone(), to.route()));
        let (routes, starts) = (routes.collect(), state.starts.clone());
        let tried = state.tried.clone();
        drop(state);
        let owned = running.into_iter().map(|(id, owned, answers, own, any)| {
            let observation = Observation {
                is_slower: slower.contains(&id),
                answers,
                status: own.map(|it| status(&it)),
                serves: any.is_some(),
                ..observation(owned)
            };
            (id, observation)
        });
        let observed = Observed {
            ranked: self.ranked().0,
            lives: ids
                .into_iter()
                .map(|id| (id, self.agent.life(id)))
                .collect(),
            nodes,
            is_leaving: self.is_leaving(),
            drained,
            owned: owned.collect(),
            leased,
            is_evaluating,
            routes,
            starts,
            tried,
            ..Observed::new(self.agent.id())
        };
        (observed, specs)
    }

    fn all_broken(&self, observed: &Observed) -> paceline_cluster::nodes::reach::BrokenPairs {
        let all: Vec<NodeId> = observed.lives.keys().copied().collect();
        self.agent.broken_pairs(&all)
    }

    /// The files of this node's instances whose roots are signed.
    fn rooted(&self, observed: &Observed) -> BTreeSet<String> {
        let map = self.agent.map();
        let files = observed.owned.values().map(|it| &it.spec.sha256);
        files
            .filter(|sha256| roots::of(&map, sha256).is_ok())
            .cloned()
            .collect()
    }

    fn act(self: &Arc<Self>, action: Action) {
        match action {
            Action::Start {
                id,
                epoch,
                spec,
                resumes,
            } => self.begin(OwnedInstance::new((id, epoch), spec, resumes)),
            Action::Stop { id, epoch } => {
                let is_it = |_: &InstanceId, it: &mut RunningInstance| it.owned.epoch == epoch;
                let ended = lock(&self.state).owned.extract_if(id..=id, is_it).next();
                drop(ended); // ends its workers, which takes a moment
            }
            Action::Write {
                id,
                epoch,
                spec,
                reason,
            } => self.write(id, epoch, &spec, reason),
            Action::Load { spec } => {
                let outcome = match self.want_new(&spec) {
                    Ok(_) => "requests wait, a replica is added".to_owned(),
                    Err(reason) => format!("requests wait, and no replica can be added: {reason}"),
                };
                (self.spec.tell)(&format!("{}: {outcome}", spec.model));
            }
            Action::Unload { id, reason } => {
                (self.spec.tell)(&match reason {
                    UnloadReason::Idle { model } => format!("{model}: a replica is idle and ends"),
                    UnloadReason::Unleased => {
                        format!("unloading {id}: the command that borrowed it is gone")
                    }
                });
                // Fails if it was unloaded, or the map is full: the next round tries again.
                let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None);
            }
            Action::Evaluate {
                id,
                epoch,
                nodes,
                in_use,
            } => self.evaluate((id, epoch), nodes, in_use),
            Action::KeepPlacement { id } => {
                if let Some(it) = lock(&self.state).owned.get(&id) {
                    it.owned.unused.refuse(None);
                }
            }
            Action::Readmit { id, nodes } => {
                if let Some(it) = lock(&self.state).owned.get(&id) {
                    it.owned.flaps.readmit(&nodes);
                }
            }
            Action::Drain => self.drain_meanwhile(),
            Action::Strand => drop(self.is_last()), // logs it
            Action::Resume { reason } => {
                lock(&self.state).drained = None;
                self.agent.set_leaving(false);
                if reason == ResumeReason::Power {
                    (self.spec.tell)("the current is back: this machine takes work again");
                }
            }
            Action::Collect { removes } => self.collect_stale(removes),
            Action::Open { name, id, spec } => self.open(name, id, spec),
            Action::Route { name, ready, all } => self.route(&name, &ready, &all),
            Action::Close { name } => self.close(&name),
            Action::TellUnserved { models } => self.spec.doors.set_unserved(models),
            Action::Sign { id, spec } => {
                if let (Ok(path), Some(_)) = (owner::path_of(self, &spec), self.attempt(id)) {
                    self.sign_meanwhile(&spec, &path);
                }
            }
        }
    }

    fn write(&self, id: InstanceId, epoch: u64, spec: &InstanceSpec, reason: WriteReason) {
        let model = &spec.model;
        match reason {
            WriteReason::OwnerLost => {
                (self.spec.tell)(&format!("{model}: its owner is lost, taking over"));
            }
            WriteReason::NoRoom => {
                let names: Vec<String> = spec.nodes.iter().map(|id| self.name(*id)).collect();
                let names = names.join(", ");
                (self.spec.tell)(&format!("{model} moves to {names}, which have room for it"));
                // It does not answer, so there is no service to fall back to.
                let mut state = lock(&self.state);
                let former = state.owned.get_mut(&id).and_then(|it| it.answers.take());
                drop(state);
                drop(former); // ends its workers, which takes a moment
            }
        }
        // Fails if another node wrote first, or the instance was unloaded meanwhile.
        let _: Result<(), _> = self.want(id, epoch, Some(spec));
    }

    /// Publishes changed nodes of this node's instances, and changed reasons of unused ones.
    fn publish(&self) {
        // A copy, so that the lock is free while the map is written.
        let of = |it: &RunningInstance| it.owned.clone();
        let owned: Vec<OwnedInstance> = lock(&self.state).owned.values().map(of).collect();
        let map = self.agent.map();
        for it in owned {
            let said = paceline_fleet::report(&map, it.id).filter(|said| said.epoch == it.epoch);
            it.tell_unused(self, said);
        }
    }

    /// Runs `run` on its own thread; logs if the system refuses it, and returns whether it runs.
    pub(super) fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> bool {
        let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        if let Err(error) = &started {
            (self.spec.tell)(&format!("error: cannot start a thread: {error}"));
        }
        started.is_ok()
    }
}

fn named_nodes(spec: &InstanceSpec) -> impl Iterator<Item = NodeId> + '_ {
    let nodes = spec.nodes.iter().chain(&spec.successors);
    nodes.chain(&spec.prompts).chain(&spec.lender).copied()
}

/// An instance that does not answer yet.
fn observation(owned: OwnedInstance) -> Observation {
    let ranks = (0..).map(Rank).zip(&owned.wanted.nodes);
    Observation {
        epoch: owned.epoch,
        status: None,
        answers: false,
        serves: false,
        ranks: ranks.map(|(rank, _)| owned.flaps.node_of(rank)).collect(),
        excluded: owned.flaps.out(Instant::now()),
        is_cramped: owned.cramped.load(Ordering::SeqCst),
        is_slower: false,
        spec: owned.wanted,
    }
}

fn status(instance: &Arc<Instance>) -> WorkerStatus {
    let status = instance.status();
    WorkerStatus {
        is_ready: status.state == State::Ready,
        open: status.running + status.waiting,
    }
}
