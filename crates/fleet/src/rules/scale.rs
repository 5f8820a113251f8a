//! Adds and removes replicas by load, if the user allowed it.
//!
//! The owner of the loaded instance adds a replica when its open requests exceed its concurrency
//! for [`ADD_AFTER`]. Requests go to the least loaded replica, so the other replicas are as full.
//! The owner of an added replica ends it after [`REMOVE_AFTER`] without a request. Each decision
//! uses local load only, without messages to other nodes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_cluster::nodes::NodeId;

use super::relocate::{retain_engines, standbys};
use super::{Action, Round, UnloadReason};
use crate::assignment::{Need, deal};
use crate::memory::part_bytes;
use crate::{InstanceId, InstanceSpec, Observed, OwnedInstance, Specs, State, replica_names};

/// Time of overload before a replica is added: longer than a burst, shorter than users' patience.
const ADD_AFTER: Duration = Duration::from_secs(5);

/// Idle time before an added replica ends. Longer than a pause in a chat, because a reload costs
/// seconds to minutes.
const REMOVE_AFTER: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScalingDecision {
    Add,
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstanceLoad {
    /// Requests wait for a slot.
    Full,
    /// No open request.
    Idle,
    Some,
}

impl InstanceLoad {
    fn of(open: usize, parallel: u16) -> Self {
        match open {
            0 => Self::Idle,
            open if open > usize::from(parallel) => Self::Full,
            _ => Self::Some,
        }
    }
}

/// By instance of this node: load level, and since when.
#[derive(Debug, Default)]
pub(super) struct LoadHistory(BTreeMap<InstanceId, (InstanceLoad, Instant)>);

impl LoadHistory {
    /// Updates an instance's load level and returns the decision. `added`: whether autoscaling
    /// added the instance.
    fn look(
        &mut self,
        id: InstanceId,
        load: InstanceLoad,
        added: bool,
        now: Instant,
    ) -> Option<ScalingDecision> {
        let (before, since) = self.0.entry(id).or_insert((load, now));
        if *before != load {
            (*before, *since) = (load, now);
        }
        let lasted = now.saturating_duration_since(*since);
        let verdict = match load {
            InstanceLoad::Full if !added && lasted >= ADD_AFTER => ScalingDecision::Add,
            InstanceLoad::Idle if added && lasted >= REMOVE_AFTER => ScalingDecision::Remove,
            InstanceLoad::Full | InstanceLoad::Idle | InstanceLoad::Some => return None,
        };
        *since = now; // the next replica takes as long
        Some(verdict)
    }
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs, now) = (round.observed, round.specs, round.now);
    let loads: BTreeMap<InstanceId, (InstanceLoad, &InstanceSpec)> = observed
        .owned
        .iter()
        .filter(|(_, it)| it.spec.options.grows)
        .filter_map(|(id, it)| Some((*id, (load(specs, *id, it)?, &it.spec))))
        .collect();
    let history = &mut round.history.load;
    history.0.retain(|id, _| loads.contains_key(id));
    let act = |(id, (load, spec)): (InstanceId, (InstanceLoad, &InstanceSpec))| match history
        .look(id, load, spec.added, now)?
    {
        ScalingDecision::Add => added(observed, specs, spec).map(|spec| Action::Load { spec }),
        ScalingDecision::Remove => Some(Action::Unload {
            id,
            reason: UnloadReason::Idle {
                model: spec.model.clone(),
            },
        }),
    };
    loads.into_iter().filter_map(act).collect()
}

/// The load of an instance. An added one that cannot start ends like an idle one; `None` for others
/// that do not answer yet.
fn load(specs: &Specs, id: InstanceId, it: &OwnedInstance) -> Option<InstanceLoad> {
    let has_failed = || specs.get(id).is_some_and(|it| it.is_in(State::Failed));
    match it.status {
        Some(status) => Some(InstanceLoad::of(status.open, it.spec.options.parallel)),
        None if it.spec.added && has_failed() => Some(InstanceLoad::Idle),
        None => None,
    }
}

/// A further replica like `spec` on idle nodes, if there are some. `None` while a replica of the
/// model is still loading.
fn added(observed: &Observed, specs: &Specs, spec: &InstanceSpec) -> Option<InstanceSpec> {
    let mut own = specs.iter().filter(|(_, it)| it.spec.model == spec.model);
    if !own.all(|(_, it)| it.is_in(State::Ready)) {
        return None;
    }
    let nodes = idle_nodes(observed, specs, spec)?;
    let others = specs.iter().map(|(id, it)| (id, &it.spec));
    let number = replica_names::next(&spec.model, others, 1).first().copied();
    let standbys = standbys(observed, specs, spec, &nodes.iter().copied().collect());
    Some(InstanceSpec {
        successors: nodes[1..].iter().chain(&standbys).copied().collect(),
        nodes,
        named: false,
        replica: number.unwrap_or(0),
        source: Some(observed.own),
        lender: None,
        added: true,
        prompts: Vec::new(), // prefill nodes serve one instance
        ..spec.clone()
    })
}

/// As many nodes as `spec` has, without an instance and with memory for it.
fn idle_nodes(observed: &Observed, specs: &Specs, spec: &InstanceSpec) -> Option<Vec<NodeId>> {
    let used = specs.used();
    let rooms = observed.rooms(specs, None, spec);
    let mut order = observed.ranked.clone();
    order.retain(|id| !used.contains(id));
    retain_engines(observed, spec, &mut order);
    let room = |id: NodeId| (id, rooms.get(&id).copied().unwrap_or(0));
    let idle: Vec<(NodeId, u64)> = order.into_iter().map(room).collect();
    let each = spec.nodes.len();
    let need = Need {
        replicas: 1,
        each,
        bytes: part_bytes(spec, each),
    };
    deal(&idle, need).ok()?.pop()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    /// Decisions for an instance at a constant `load`, second by second for `seconds`.
    fn verdicts(load: InstanceLoad, added: bool, seconds: u64) -> Vec<(u64, ScalingDecision)> {
        let (mut growth, start) = (LoadHistory::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        let id = InstanceId(7);
        let look = |second| {
            growth
                .look(id, load, added, at(second))
                .map(|it| (second, it))
        };
        (0..=seconds).filter_map(look).collect()
    }

    #[test]
    fn only_what_lasts_asks_for_anything() {
        use ScalingDecision::{Add, Remove};
        assert_eq!(
            verdicts(InstanceLoad::Full, false, 12),
            [(5, Add), (10, Add)]
        );
        assert_eq!(verdicts(InstanceLoad::Idle, true, 130), [(120, Remove)]);
        for (load, added) in [
            (InstanceLoad::Full, true),
            (InstanceLoad::Idle, false),
            (InstanceLoad::Some, true),
            (InstanceLoad::Some, false),
        ] {
            assert_eq!(verdicts(load, added, 300), [], "{load:?} {added}");
        }
    }

    #[test]
    fn a_moment_of_another_load_begins_anew() {
        let (mut growth, start) = (LoadHistory::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for second in 0..100 {
            let is_moment = second % 4 == 3;
            let load = if is_moment {
                InstanceLoad::Some
            } else {
                InstanceLoad::Full
            };
            assert_eq!(growth.look(InstanceId(7), load, false, at(second)), None);
        }
    }

    #[test]
    fn an_instance_is_full_when_requests_wait() {
        let of = |open| InstanceLoad::of(open, 4);
        assert_eq!(of(0), InstanceLoad::Idle);
        assert_eq!(
            of(4),
            InstanceLoad::Some,
            "a prompt that is read waits for nothing"
        );
        assert_eq!(of(5), InstanceLoad::Full);
    }

    #[test]
    fn a_replica_goes_to_idle_nodes_once_the_others_are_ready() {
        let added = |state, idle: &[u8]| {
            let mut observed = Observed::new(node(1));
            (1..=3).for_each(|number| lives(&mut observed, number, 1 << 40));
            observed.ranked = idle.iter().map(|number| node(*number)).collect();
            let mut records = vec![record(5, 1, &[1])];
            records[0].1.report = Some(reported(1, state));
            let specs = records.into_iter().collect();
            let spec = record(5, 1, &[1]).1.spec;
            let added = added(&observed, &specs, &spec)?;
            assert!(added.added && added.replica == 2, "{added:?}");
            Some((added.nodes, added.successors))
        };
        let expected = Some((vec![node(2)], vec![node(3), node(1)]));
        assert_eq!(added(State::Ready, &[1, 2, 3]), expected);
        assert_eq!(added(State::Loading, &[1, 2, 3]), None);
        assert_eq!(added(State::Ready, &[1]), None, "1 has an instance");
    }
}
