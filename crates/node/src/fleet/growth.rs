//! Replicas that come and go by load, where the user allowed it.
//!
//! The owner of the instance that was loaded may add a replica. It does so when more requests are
//! open there than it computes at a time, for [`ADD_AFTER`]. Requests go to the replica with the
//! fewest, so the others have as many. An added replica is ended by its own owner when it had no
//! request for [`REMOVE_AFTER`]. Nobody needs to know how the others stand, so no node is asked.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::placement::{self, EPOCH_UNWANTED, State, Wanted};
use paceline_cluster::nodes::{InstanceId, NodeId};
use paceline_engine::{Service, Status};

use super::deal::{Need, deal};
use super::{Answers, Inner, naming, report};

/// How long requests must wait before a replica is added: longer than a burst, shorter than people
/// are patient.
const ADD_AFTER: Duration = Duration::from_secs(5);

/// How long a replica must be idle before it ends. A pause between two questions of a chat is
/// shorter, and to load it again costs seconds to minutes.
const REMOVE_AFTER: Duration = Duration::from_secs(120);

/// Verdict on the load of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Add,
    Remove,
}

/// The load of an instance as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Requests wait for a place.
    Full,
    /// There is none.
    Idle,
    Some,
}

impl Load {
    fn of(status: &Status, parallel: u16) -> Self {
        match status.running + status.waiting {
            0 => Self::Idle,
            open if open > usize::from(parallel) => Self::Full,
            _ => Self::Some,
        }
    }
}

/// How long the instances of this node have been as they are.
#[derive(Debug, Default)]
pub(super) struct Growth(BTreeMap<InstanceId, (Load, Instant)>);

impl Growth {
    /// Takes in the load of an instance; returns the verdict on it by now. `added` says whether
    /// load had added the instance.
    fn look(&mut self, id: InstanceId, load: Load, added: bool, now: Instant) -> Option<Verdict> {
        let (before, since) = self.0.entry(id).or_insert((load, now));
        if *before != load {
            (*before, *since) = (load, now);
        }
        let lasted = now.saturating_duration_since(*since);
        let verdict = match load {
            Load::Full if !added && lasted >= ADD_AFTER => Verdict::Add,
            Load::Idle if added && lasted >= REMOVE_AFTER => Verdict::Remove,
            Load::Full | Load::Idle | Load::Some => return None,
        };
        *since = now; // the next one takes as long
        Some(verdict)
    }
}

impl Inner {
    /// Adds and ends replicas as the load of this node's instances asks for.
    pub(super) fn grow(&self, growth: &mut Growth, now: Instant) {
        let map = self.agent.map();
        let has_failed = |id| report(&map, id).is_some_and(|it| it.state == State::Failed);
        let owned = lock(&self.owned);
        let running = owned.iter().filter_map(|(id, it)| {
            let instance = it.answers.as_ref().and_then(Answers::instance).cloned();
            let wanted = &it.owned.wanted;
            // An added instance that cannot start ends as an idle one: until then none is added.
            let counts = instance.is_some() || (wanted.added && has_failed(*id));
            (wanted.grows && counts).then(|| (*id, wanted.clone(), instance))
        });
        let running: Vec<_> = running.collect();
        drop(owned);
        growth
            .0
            .retain(|id, _| running.iter().any(|it| it.0 == *id));
        for (id, wanted, instance) in running {
            let load = match instance {
                Some(instance) => Load::of(&instance.status(), wanted.parallel),
                None => Load::Idle,
            };
            match growth.look(id, load, wanted.added, now) {
                Some(Verdict::Add) => self.add_replica(&wanted),
                Some(Verdict::Remove) => {
                    (self.spec.tell)(&format!("{}: a replica is idle and ends", wanted.model));
                    // Refused where somebody unloaded it meanwhile.
                    let _: Result<(), _> = self.want(id, EPOCH_UNWANTED, None);
                }
                None => {}
            }
        }
    }

    /// Loads one more replica like `wanted` on nodes that compute nothing, if there are some. Does
    /// nothing while a replica of the model is still on its way.
    fn add_replica(&self, wanted: &Wanted) {
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
        let number = naming::next(&wanted.model, others, 1).first().copied();
        let reserves = self.reserves(wanted, &nodes.iter().copied().collect());
        let added = Wanted {
            successors: nodes[1..].iter().chain(&reserves).copied().collect(),
            nodes,
            named: false,
            replica: number.unwrap_or(0),
            source: Some(self.agent.id()),
            lender: None,
            added: true,
            prompts: Vec::new(), // they read for one instance
            ..wanted.clone()
        };
        let outcome = match self.want_new(&added) {
            Ok(_) => "requests wait, a replica is added".to_owned(),
            Err(reason) => format!("requests wait, and no replica can be added: {reason}"),
        };
        (self.spec.tell)(&format!("{}: {outcome}", wanted.model));
    }

    /// As many nodes as `wanted` has, which no instance of `all` has, with room for it.
    fn idle_nodes(
        &self,
        all: &[(InstanceId, u64, Wanted)],
        wanted: &Wanted,
    ) -> Option<Vec<NodeId>> {
        let uses = |it: &Wanted, id: &NodeId| it.nodes.contains(id) || it.prompts.contains(id);
        let is_idle = |id: &NodeId| all.iter().all(|(.., it)| !uses(it, id));
        let rooms = self.rooms();
        let (order, _) = self.ranked();
        let room = |id: NodeId| (id, rooms.get(&id).copied().unwrap_or(0));
        let idle: Vec<(NodeId, u64)> = order.into_iter().filter(is_idle).map(room).collect();
        let each = wanted.nodes.len();
        let need = Need {
            replicas: 1,
            each,
            bytes: wanted.bytes / each.max(1) as u64,
        };
        deal(&idle, need).ok()?.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verdicts on an instance whose load is `load` for so many seconds, second by second.
    fn verdicts(load: Load, added: bool, seconds: u64) -> Vec<(u64, Verdict)> {
        let (mut growth, start) = (Growth::default(), Instant::now());
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
        use Verdict::{Add, Remove};
        assert_eq!(verdicts(Load::Full, false, 12), [(5, Add), (10, Add)]);
        assert_eq!(verdicts(Load::Idle, true, 130), [(120, Remove)]);
        for (load, added) in [
            (Load::Full, true),
            (Load::Idle, false),
            (Load::Some, true),
            (Load::Some, false),
        ] {
            assert_eq!(verdicts(load, added, 300), [], "{load:?} {added}");
        }
    }

    #[test]
    fn a_moment_of_another_load_begins_anew() {
        let (mut growth, start) = (Growth::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for second in 0..100 {
            let is_moment = second % 4 == 3;
            let load = if is_moment { Load::Some } else { Load::Full };
            assert_eq!(growth.look(InstanceId(7), load, false, at(second)), None);
        }
    }

    #[test]
    fn an_instance_is_full_when_requests_wait() {
        let of = |running, waiting| {
            let state = paceline_engine::State::Ready;
            let status = Status {
                state,
                running,
                waiting,
            };
            Load::of(&status, 4)
        };
        assert_eq!(of(0, 0), Load::Idle);
        assert_eq!(
            of(3, 1),
            Load::Some,
            "a prompt that is read waits for nothing"
        );
        assert_eq!(of(4, 1), Load::Full);
    }
}
