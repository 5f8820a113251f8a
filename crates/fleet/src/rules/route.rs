//! Routes a node's requests: the models that its server answers with, each over which instances,
//! and what it says about the others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use paceline_cluster::nodes::agent::NodeView;

use super::{Action, Round};
use crate::replica_names::Name;
use crate::{InstanceId, InstanceSpec, Observed, Record, Specs, State};

/// Attempts to get the beginning of a model's file. After them this node is unlikely to answer with
/// the model: it has several files, or no source is left.
const ATTEMPTS: u32 = 3;

/// How a node's server answers requests for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelRoute {
    /// By replicas on the cluster's nodes.
    Replicas,
    /// By an encoder in this process.
    Encoder,
    /// By the instance that this node leases for its own life.
    Own(InstanceId),
}

/// A replica that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyReplica {
    pub id: InstanceId,
    pub spec: InstanceSpec,
    /// Name of its numbers, as its owner last reported it.
    pub numbers: Option<String>,
}

impl ReadyReplica {
    /// An instance, by its record.
    pub fn of(id: InstanceId, record: &Record) -> Self {
        let numbers = record.report.as_ref().and_then(|it| it.numbers.clone());
        Self {
            id,
            spec: record.spec.clone(),
            numbers: record.spec.numbers_name(numbers),
        }
    }
}

/// A model that this node does not answer with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedModel {
    /// Names that clients call it by.
    pub names: Vec<String>,
    pub state: UnservedState,
}

/// Why a node does not answer with a model; the first of several replicas' states holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnservedState {
    /// It loads, or this node is about to answer with it.
    Loading,
    /// Other nodes answer with it; addresses of the owner's HTTP API.
    Elsewhere(Vec<SocketAddr>),
    Failed(String),
}

/// The instances of a name.
#[derive(Default)]
struct Replicas {
    ready: Vec<ReadyReplica>,
    all: BTreeSet<InstanceId>,
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs) = (round.observed, round.specs);
    let mut models: BTreeMap<Name, Replicas> = BTreeMap::new();
    for (id, it) in specs.iter() {
        let model = models.entry(Name::of(&it.spec)).or_default();
        model.all.insert(id);
        model.ready.extend(ready(observed, id, it));
    }
    let mut actions = Vec::new();
    for (name, route) in &observed.routes {
        let is_open = models.get(name).is_some_and(|model| match route {
            ModelRoute::Own(id) => model.all.contains(id),
            ModelRoute::Replicas | ModelRoute::Encoder => true,
        });
        if !is_open {
            actions.push(Action::Close { name: name.clone() });
        }
    }
    for (name, Replicas { mut ready, all }) in models {
        match observed.routes.get(&name) {
            Some(ModelRoute::Replicas) => actions.push(Action::Route { name, ready, all }),
            Some(ModelRoute::Encoder | ModelRoute::Own(_)) => {}
            None if ready.is_empty() || !observed.starts.is_due(&name, round.now) => {}
            None => {
                let ReadyReplica { id, spec, .. } = ready.swap_remove(0);
                actions.push(Action::Open { name, id, spec });
            }
        }
    }
    let models = unserved(observed, specs);
    if models != round.history.unserved {
        round.history.unserved.clone_from(&models);
        actions.push(Action::TellUnserved { models });
    }
    actions
}

/// An instance that answers requests of this node. One that this node leases for its own life does
/// so once its workers are in this process's hands.
fn ready(observed: &Observed, id: InstanceId, record: &Record) -> Option<ReadyReplica> {
    let answers = || observed.owned.get(&id).is_some_and(|it| it.answers);
    let is_ready = record.is_in(State::Ready) && (!is_leased(observed, &record.spec) || answers());
    is_ready.then(|| ReadyReplica::of(id, record))
}

/// Whether an instance is one that this node computes for its own life.
fn is_leased(observed: &Observed, spec: &InstanceSpec) -> bool {
    spec.lender == Some(observed.own) && spec.machine.is_some()
}

/// The models of the cluster that this node does not answer with.
fn unserved(observed: &Observed, specs: &Specs) -> Vec<UnservedModel> {
    let mut models: BTreeMap<Name, UnservedModel> = BTreeMap::new();
    for (id, record) in specs.iter() {
        let name = Name::of(&record.spec);
        if observed.routes.contains_key(&name) {
            continue;
        }
        let state = unserved_state(observed, id, record);
        let known = models.entry(name).or_insert_with(|| UnservedModel {
            names: names(&record.spec),
            state: state.clone(),
        });
        known.state = known.state.clone().min(state);
    }
    models.into_values().collect()
}

fn unserved_state(observed: &Observed, id: InstanceId, record: &Record) -> UnservedState {
    let report = record.report.as_ref();
    let report = report.filter(|report| report.epoch == record.epoch);
    let attempts = observed.tried.get(&id).map_or(0, |(_, count)| *count);
    match report.map(|it| it.state) {
        Some(State::Failed) => {
            let reason = report.and_then(|it| it.reason.clone());
            UnservedState::Failed(reason.unwrap_or_default())
        }
        Some(State::Ready) if attempts >= ATTEMPTS => {
            UnservedState::Elsewhere(api_of(&observed.nodes, &record.spec))
        }
        _ => UnservedState::Loading,
    }
}

/// Addresses of the HTTP API of an instance's owner.
pub fn api_of(nodes: &[NodeView], spec: &InstanceSpec) -> Vec<SocketAddr> {
    let owner = nodes.iter().find(|view| view.id == spec.nodes[0]);
    owner.map_or_else(Vec::new, |owner| owner.facts.api.clone())
}

fn names(spec: &InstanceSpec) -> Vec<String> {
    let adapters = spec.adapters.iter();
    let adapters = adapters.map(|adapter| spec.adapted(&adapter.name));
    std::iter::once(spec.model.clone())
        .chain(adapters)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::testing::*;
    use super::*;
    use crate::MachineOptions;

    type Case<'a> = &'a dyn Fn(&mut Observed, &mut Vec<(InstanceId, Record)>);

    /// The actions of node 1 for a ready instance 5 of nodes 2 and 3, which `case` changes.
    fn actions(case: Case<'_>) -> Vec<String> {
        let (mut observed, mut records) = (Observed::new(node(1)), vec![record(5, 3, &[2, 3])]);
        lives(&mut observed, 2, 0);
        observed.nodes[0].facts.api = vec![SocketAddr::from(([10, 0, 0, 2], 80))];
        records[0].1.report = Some(reported(3, State::Ready));
        case(&mut observed, &mut records);
        let said = |action: Action| match action {
            Action::Open { id, .. } => format!("open {}", id.0),
            Action::Close { .. } => "close".to_owned(),
            Action::Route { ready, all, .. } => {
                let of = |ids: Vec<InstanceId>| ids.iter().map(|id| id.0).collect::<Vec<u64>>();
                let ready = of(ready.iter().map(|it| it.id).collect());
                format!("route {ready:?} of {:?}", of(all.into_iter().collect()))
            }
            Action::TellUnserved { models } => {
                let told = |it: UnservedModel| format!("{:?} {:?}", it.names, it.state);
                models.into_iter().map(told).collect::<String>()
            }
            other => format!("{other:?}"),
        };
        run(rule, &observed, records)
            .into_iter()
            .map(said)
            .collect()
    }

    const LOADING: &str = r#"["smollm2"] Loading"#;

    fn open(observed: &mut Observed, route: ModelRoute) {
        let name = Name::of(&record(5, 3, &[2, 3]).1.spec);
        observed.routes.insert(name, route);
    }

    fn check(cases: &[(&str, Case<'_>, &[&str])]) {
        for (name, case, expected) in cases {
            assert_eq!(actions(case), *expected, "{name}");
        }
    }

    #[test]
    fn a_node_answers_with_what_is_ready_and_says_why_not_with_the_rest() {
        let tried = |count| {
            move |it: &mut Observed, _: &mut Vec<_>| {
                it.starts.begin(&Name::of(&record(5, 3, &[2]).1.spec));
                it.tried.insert(InstanceId(5), (Instant::now(), count));
            }
        };
        let cases: [(&str, Case<'_>, &[&str]); 7] = [
            ("ready", &|_, _| (), &["open 5", LOADING]),
            (
                "loads",
                &|_, all| all[0].1.report = Some(reported(3, State::Loading)),
                &[LOADING],
            ),
            (
                "none reported",
                &|_, all| all[0].1.report = None,
                &[LOADING],
            ),
            ("its start runs", &tried(2), &[LOADING]),
            (
                "no source of its file is left",
                &tried(3),
                &[r#"["smollm2"] Elsewhere([10.0.0.2:80])"#],
            ),
            (
                "failed",
                &|_, all| {
                    let reason = Some("no memory".to_owned());
                    let failed = reported(3, State::Failed);
                    all[0].1.report = Some(crate::Report { reason, ..failed });
                },
                &[r#"["smollm2"] Failed("no memory")"#],
            ),
            (
                "one of two loads, the other failed",
                &|_, all| {
                    all[0].1.report = Some(reported(3, State::Failed));
                    all.push(record(6, 1, &[2]));
                },
                &[LOADING],
            ),
        ];
        check(&cases);
    }

    #[test]
    fn models_open_go_to_what_is_ready_and_close_with_the_last() {
        let lease = |record: &mut Record| {
            record.spec.lender = Some(node(1));
            record.spec.machine = Some(MachineOptions::default());
        };
        let cases: [(&str, Case<'_>, &[&str]); 7] = [
            (
                "open",
                &|it, _| open(it, ModelRoute::Replicas),
                &["route [5] of [5]"],
            ),
            (
                "open, with one that loads",
                &|it, all| {
                    open(it, ModelRoute::Replicas);
                    all.push(record(6, 1, &[2]));
                },
                &["route [5] of [5, 6]"],
            ),
            ("an encoder", &|it, _| open(it, ModelRoute::Encoder), &[]),
            (
                "unloaded",
                &|it, all| {
                    open(it, ModelRoute::Encoder);
                    all.clear();
                },
                &["close"],
            ),
            (
                "another instance than the leased one",
                &|it, _| open(it, ModelRoute::Own(InstanceId(4))),
                &["close"],
            ),
            (
                "leased, not in its hands",
                &|_, all| lease(&mut all[0].1),
                &[LOADING],
            ),
            (
                "leased",
                &|it, all| {
                    lease(&mut all[0].1);
                    runs(it, 5, 3, &[1]);
                },
                &["open 5", LOADING],
            ),
        ];
        check(&cases);
    }

    #[test]
    fn what_is_unserved_is_told_when_it_changes() {
        let (mut observed, now) = (Observed::new(node(1)), Instant::now());
        let mut history = super::super::History::new(now);
        let specs: Specs = [record(5, 3, &[2])].into_iter().collect();
        let mut told = |observed: &Observed| {
            let mut round = Round {
                observed,
                specs: &specs,
                now: now + Duration::from_secs(1),
                history: &mut history,
            };
            rule(&mut round).len()
        };
        assert_eq!([told(&observed), told(&observed)], [1, 0]);
        open(&mut observed, ModelRoute::Encoder);
        assert_eq!([told(&observed), told(&observed)], [1, 0]);
    }
}
