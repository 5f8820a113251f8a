//! Replica autoscaling: adds and removes replicas by load, if the user allowed it.
//!
//! The owner of the loaded instance adds a replica when its open requests exceed its concurrency
//! for [`ADD_AFTER`]. Requests go to the least loaded replica, so the other replicas are as full.
//! The owner of an added replica ends it after [`REMOVE_AFTER`] without a request. Each decision
//! uses local load only, without messages to other nodes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::placement::{self, EPOCH_UNWANTED, InstanceSpec, State};
use paceline_cluster::nodes::{InstanceId, NodeId};
use paceline_engine::{Service, ServiceStatus};

use super::assignment::{Need, deal};
use super::room::part_bytes;
use super::{Inner, OwnerService, replica_names, report};

/// Time of overload before a replica is added: longer than a burst, shorter than users' patience.
const ADD_AFTER: Duration = Duration::from_secs(5);

/// Idle time before an added replica ends. Longer than a pause in a chat, because a reload costs
/// seconds to minutes.
const REMOVE_AFTER: Duration = Duration::from_secs(120);

/// Scaling decision for an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScalingDecision {
    Add,
    Remove,
}

/// Load level of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstanceLoad {
    /// Requests wait for a slot.
    Full,
    /// No open request.
    Idle,
    Some,
}

impl InstanceLoad {
    fn of(status: &ServiceStatus, parallel: u16) -> Self {
        match status.running + status.waiting {
            0 => Self::Idle,
            open if open > usize::from(parallel) => Self::Full,
            _ => Self::Some,
        }
    }
}

/// By instance of this node: load level, and since when.
#[derive(Debug, Default)]
pub(super) struct Autoscaler(BTreeMap<InstanceId, (InstanceLoad, Instant)>);

impl Autoscaler {
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

impl Inner {
    /// Adds and ends replicas by the load of this node's instances.
    pub(super) fn grow(&self, growth: &mut Autoscaler, now: Instant) {
        let map = self.agent.map();
        let has_failed = |id| report(&map, id).is_some_and(|it| it.state == State::Failed);
        let owned = lock(&self.owned);
        let running = owned.iter().filter_map(|(id, it)| {
            let instance = it
                .answers
                .as_ref()
                .and_then(OwnerService::instance)
                .cloned();
            let wanted = &it.owned.wanted;
            // An added instance that cannot start ends like an idle one; until then none is added.
            let counts = instance.is_some() || (wanted.added && has_failed(*id));
            (wanted.options.grows && counts).then(|| (*id, wanted.clone(), instance))
        });
        let running: Vec<_> = running.collect();
        drop(owned);
        growth
            .0
            .retain(|id, _| running.iter().any(|it| it.0 == *id));
        for (id, wanted, instance) in running {
            let load = match instance {
                Some(instance) => InstanceLoad::of(&instance.status(), wanted.options.parallel),
                None => InstanceLoad::Idle,
            };
            match growth.look(id, load, wanted.added, now) {
                Some(ScalingDecision::Add) => self.add_replica(&wanted),
                Some(ScalingDecision::Remove) => {
                    (self.spec.tell)(&format!("{}: a replica is idle and ends", wanted.model));
                    // Fails if the instance was unloaded meanwhile.
                    let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None);
                }
                None => {}
            }
        }
    }

    /// Loads one more replica like `wanted` on idle nodes, if there are some. Does nothing while a
    /// replica of the model is still loading.
    fn add_replica(&self, wanted: &InstanceSpec) {
        let map = self.agent.map();
        let all: Vec<_> = placement::wanted(&map).collect();
        let is_ready = |id: InstanceId| report(&map, id).is_some_and(|it| it.state == State::Ready);
        let mut own = all.iter().filter(|(.., it)| it.model == wanted.model);
        if !own.all(|(id, ..)| is_ready(*id)) {
            return;
        }
        let Some(nodes) = self.idle_nodes(&all, wanted) else {
            return;
        };
        let others = all.iter().map(|(id, _, it)| (*id, it));
        let number = replica_names::next(&wanted.model, others, 1)
            .first()
            .copied();
        let reserves = self.reserves(wanted, &nodes.iter().copied().collect());
        let added = InstanceSpec {
            successors: nodes[1..].iter().chain(&reserves).copied().collect(),
            nodes,
            named: false,
            replica: number.unwrap_or(0),
            source: Some(self.agent.id()),
            lender: None,
            added: true,
            prompts: Vec::new(), // prefill nodes serve one instance
            ..wanted.clone()
        };
        let outcome = match self.want_new(&added) {
            Ok(_) => "requests wait, a replica is added".to_owned(),
            Err(reason) => format!("requests wait, and no replica can be added: {reason}"),
        };
        (self.spec.tell)(&format!("{}: {outcome}", wanted.model));
    }

    /// As many nodes as `wanted` has, without an instance in `all` and with memory for it.
    fn idle_nodes(
        &self,
        all: &[(InstanceId, u64, InstanceSpec)],
        wanted: &InstanceSpec,
    ) -> Option<Vec<NodeId>> {
        let uses =
            |it: &InstanceSpec, id: &NodeId| it.nodes.contains(id) || it.prompts.contains(id);
        let is_idle = |id: &NodeId| all.iter().all(|(.., it)| !uses(it, id));
        let rooms = self.rooms_beside(None, wanted);
        let (mut order, _) = self.ranked();
        self.retain_engines(wanted, &mut order);
        let room = |id: NodeId| (id, rooms.get(&id).copied().unwrap_or(0));
        let idle: Vec<(NodeId, u64)> = order.into_iter().filter(is_idle).map(room).collect();
        let each = wanted.nodes.len();
        let need = Need {
            replicas: 1,
            each,
            bytes: part_bytes(wanted, each),
        };
        deal(&idle, need).ok()?.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decisions for an instance at a constant `load`, second by second for `seconds`.
    fn verdicts(load: InstanceLoad, added: bool, seconds: u64) -> Vec<(u64, ScalingDecision)> {
        let (mut growth, start) = (Autoscaler::default(), Instant::now());
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
        let (mut growth, start) = (Autoscaler::default(), Instant::now());
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
        let of = |running, waiting| {
            let state = paceline_engine::State::Ready;
            let status = ServiceStatus {
                state,
                running,
                waiting,
            };
            InstanceLoad::of(&status, 4)
        };
        assert_eq!(of(0, 0), InstanceLoad::Idle);
        assert_eq!(
            of(3, 1),
            InstanceLoad::Some,
            "a prompt that is read waits for nothing"
        );
        assert_eq!(of(4, 1), InstanceLoad::Full);
    }
}
