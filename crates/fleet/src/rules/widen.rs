//! Widens instances: moves them to new or returned nodes when they are idle.
//!
//! ```text
//! a node dies      its ranks run on the nodes that are left    it comes back, or an idle one is
//!                                                              there: they run there
//! an owner dies,   the next record has fewer nodes than the    nodes come that compute nothing:
//! a node leaves    user asked for                              they are added
//! ```
//! The owner has the placement evaluated, which predicts its speed: one at a time, and at most
//! every few seconds. It waits until no request was open for [`QUIET`], at most [`BUSY`] in an
//! exact kernel class.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use paceline_base::KernelClass;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::NodeView;
use paceline_cluster::nodes::member::Life;

use super::{Action, Round};
use crate::{InstanceId, Observed, OwnedInstance, Specs};

/// Idle time before a placement changes. The next question of a chat may take longer and then waits
/// for a handover.
const QUIET: Duration = Duration::from_secs(10);

/// How long an instance in use waits for a quiet moment. Its open answers continue with the same
/// bits. With [`LIVED`] and a load of some seconds, a returned node is used within 30 s.
const BUSY: Duration = Duration::from_secs(6);

/// Uptime before a node is used: one that restarts repeatedly is no gain.
const LIVED: Duration = Duration::from_secs(8);

/// Time before the same placement of an instance is evaluated again, after a prediction without
/// enough gain. A load costs seconds to minutes.
const AGAIN_AFTER: Duration = Duration::from_secs(300);

/// The same after another obstacle, which may be gone by then: a path without measurements, memory.
/// As long again with each further attempt, at most [`ATTEMPTS_MAX`] times.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const ATTEMPTS_MAX: u32 = 12;

/// An owner's past observations of its instances and of other nodes.
#[derive(Debug, Default)]
pub(super) struct WideningHistory {
    /// Since when each instance is idle.
    quiet: BTreeMap<InstanceId, Instant>,
    /// Since when each node has been seen alive.
    alive: BTreeMap<NodeId, Instant>,
    /// The other placement of each instance, and since when there is one.
    offers: BTreeMap<InstanceId, (Vec<NodeId>, Instant)>,
    /// The last evaluated placements.
    tried: BTreeMap<InstanceId, Attempt>,
}

/// An evaluation of another placement.
#[derive(Debug)]
struct Attempt {
    nodes: Vec<NodeId>,
    at: Instant,
    /// Attempts with these nodes so far.
    count: u32,
}

impl WideningHistory {
    /// Updates which nodes are live and stay.
    fn saw(&mut self, views: &[NodeView], now: Instant) {
        let stays = |view: &&NodeView| view.state == Life::Alive && !view.facts.leaving;
        let there: BTreeSet<NodeId> = views.iter().filter(stays).map(|view| view.id).collect();
        self.alive.retain(|id, _| there.contains(id));
        for id in there {
            self.alive.entry(id).or_insert(now);
        }
    }

    /// Nodes with an uptime of [`LIVED`].
    fn settled(&self, now: Instant) -> BTreeSet<NodeId> {
        let lived = |since: &Instant| now.saturating_duration_since(*since) >= LIVED;
        let all = self.alive.iter().filter(|(_, since)| lived(since));
        all.map(|(id, _)| *id).collect()
    }

    /// Updates an instance's open requests; returns whether it has been idle for [`QUIET`].
    fn is_quiet(&mut self, id: InstanceId, open: Option<usize>, now: Instant) -> bool {
        if open != Some(0) {
            self.quiet.remove(&id);
            return false;
        }
        let since = *self.quiet.entry(id).or_insert(now);
        now.saturating_duration_since(since) >= QUIET
    }

    /// Records another placement of an instance; returns whether it was possible for [`BUSY`].
    fn has_waited(&mut self, id: InstanceId, nodes: &[NodeId], now: Instant) -> bool {
        let offer = self.offers.entry(id).or_insert((nodes.to_vec(), now));
        if offer.0 != nodes {
            *offer = (nodes.to_vec(), now);
        }
        now.saturating_duration_since(offer.1) >= BUSY
    }

    /// Whether this placement of an instance may be evaluated; `is_slower`: the last one was
    /// predicted to be slower.
    fn is_due(&self, id: InstanceId, nodes: &[NodeId], is_slower: bool, now: Instant) -> bool {
        let is_over = |last: &Attempt| {
            let wait = match is_slower {
                true => AGAIN_AFTER,
                false => RETRY_AFTER * last.count.min(ATTEMPTS_MAX),
            };
            last.nodes != nodes || now.saturating_duration_since(last.at) >= wait
        };
        self.tried.get(&id).is_none_or(is_over)
    }

    /// Records that a placement is evaluated now.
    fn tries(&mut self, id: InstanceId, nodes: &[NodeId], at: Instant) {
        let before = self.tried.get(&id).filter(|last| last.nodes == nodes);
        let attempt = Attempt {
            nodes: nodes.to_vec(),
            at,
            count: before.map_or(1, |last| last.count.saturating_add(1)),
        };
        self.tried.insert(id, attempt);
    }

    fn keep(&mut self, is_there: impl Fn(&InstanceId) -> bool) {
        self.quiet.retain(|id, _| is_there(id));
        self.offers.retain(|id, _| is_there(id));
        self.tried.retain(|id, _| is_there(id));
    }
}

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs, now) = (round.observed, round.specs, round.now);
    if observed.is_leaving {
        return Vec::new();
    }
    let history = &mut round.history.widening;
    history.saw(&observed.nodes, now);
    let settled = history.settled(now);
    let answers = |id: &InstanceId| observed.owned.get(id).and_then(|it| it.status);
    history.keep(|id| answers(id).is_some());
    let (mut actions, mut is_evaluating) = (Vec::new(), observed.is_evaluating);
    for (id, it) in &observed.owned {
        let Some(status) = it.status else { continue };
        let open = Some(status.open).filter(|_| status.is_ready);
        let is_quiet = history.is_quiet(*id, open, now);
        let Some(nodes) = other_placement(observed, specs, it, &settled) else {
            history.offers.remove(id);
            actions.push(Action::KeepPlacement { id: *id });
            continue;
        };
        let has_waited = history.has_waited(*id, &nodes, now);
        let in_use = has_waited && open.is_some() && is_exact(it);
        let is_due = !is_evaluating && history.is_due(*id, &nodes, it.is_slower, now);
        if (is_quiet || in_use) && is_due {
            is_evaluating = true;
            history.tries(*id, &nodes, now);
            actions.push(Action::Evaluate {
                id: *id,
                epoch: it.epoch,
                nodes,
                in_use,
            });
        }
    }
    actions
}

/// Alternative nodes of an instance. A rank's own node is back, an idle node replaces a dead one,
/// or nodes are added as requested.
fn other_placement(
    observed: &Observed,
    specs: &Specs,
    it: &OwnedInstance,
    settled: &BTreeSet<NodeId>,
) -> Option<Vec<NodeId>> {
    let spec = &it.spec;
    if spec.nodes.iter().any(|id| it.excluded.contains(id)) {
        return None; // a new record would include it again
    }
    let is_back = |(at, home): (&Option<NodeId>, &NodeId)| {
        at.is_some_and(|at| at != *home) && settled.contains(home)
    };
    let speaks = |nodes: &[NodeId]| spec.together(&observed.broken, nodes).len() == nodes.len();
    let mut nodes = spec.nodes.clone();
    if it.ranks.iter().zip(&spec.nodes).any(is_back) {
        return Some(nodes).filter(|nodes| speaks(nodes));
    }
    let lacks = usize::from(spec.width.unwrap_or(0)).saturating_sub(nodes.len());
    let used = specs.used();
    // If its user named nodes, it moves to no others.
    let may = |id: &NodeId| !spec.named || spec.successors.contains(id);
    let idle = observed.ranked.iter().copied();
    let idle = idle.filter(|id| settled.contains(id) && !nodes.contains(id) && may(id));
    let mut idle: Vec<NodeId> = idle.collect();
    idle.sort_by_key(|id| used.contains(id)); // stable: keeps the order of routes
    let mut idle = idle.into_iter();
    for node in &mut nodes[1..] {
        if matches!(observed.life(*node), Life::Dead | Life::Left)
            && let Some(other) = idle.next()
        {
            *node = other;
        }
    }
    nodes.extend(idle.take(lacks));
    (nodes != spec.nodes && speaks(&nodes)).then_some(nodes)
}

/// Whether the bits of an instance's answers depend on no placement.
fn is_exact(it: &OwnedInstance) -> bool {
    let mut classes = it.spec.nodes.iter().map(|id| it.spec.class_of(*id).parse());
    classes.all(|class| class.is_ok_and(KernelClass::is_exact))
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const ID: InstanceId = InstanceId(3);

    #[test]
    fn a_moment_is_quiet_after_a_while_without_requests() {
        let (mut history, start) = (WideningHistory::default(), Instant::now());
        let looks = [(0, 0), (9, 0), (10, 0), (11, 1), (12, 0), (21, 0), (22, 0)];
        let quiet =
            looks.map(|(s, open)| history.is_quiet(ID, Some(open), start + Duration::from_secs(s)));
        assert_eq!(quiet, [false, false, true, false, false, false, true]);
        let later = start + Duration::from_secs(99);
        assert!(!history.is_quiet(ID, None, later), "it does not answer");
    }

    #[test]
    fn a_node_that_comes_and_goes_is_not_used() {
        let (mut history, start) = (WideningHistory::default(), Instant::now());
        let mut settled = |s: u64, state| {
            let mut observed = Observed::new(node(1));
            lives(&mut observed, 1, 0);
            observed.nodes[0].state = state;
            let now = start + Duration::from_secs(s);
            history.saw(&observed.nodes, now);
            history.settled(now).len()
        };
        assert_eq!(settled(0, Life::Alive), 0);
        assert_eq!(settled(7, Life::Alive), 0);
        assert_eq!(settled(7, Life::Dead), 0);
        assert_eq!(settled(8, Life::Alive), 0);
        assert_eq!(settled(16, Life::Alive), 1);
    }

    #[test]
    fn a_placement_is_evaluated_now_and_then() {
        let (mut history, start) = (WideningHistory::default(), Instant::now());
        let after = |wait: Duration| start + wait;
        let (two, three) = ([1, 2].map(node), [1, 2, 3].map(node));
        assert!(history.is_due(ID, &two, false, start));
        history.tries(ID, &two, start);
        assert!(!history.is_due(ID, &two, false, after(RETRY_AFTER / 2)));
        let is_due = history.is_due(ID, &two, false, after(RETRY_AFTER));
        assert!(is_due, "it may be possible now");
        history.tries(ID, &two, start);
        assert!(
            !history.is_due(ID, &two, false, after(RETRY_AFTER)),
            "less often"
        );
        assert!(history.is_due(ID, &two, false, after(2 * RETRY_AFTER)));
        assert!(!history.is_due(ID, &two, true, after(AGAIN_AFTER / 2)));
        assert!(history.is_due(ID, &two, true, after(AGAIN_AFTER)));
        assert!(history.is_due(ID, &three, true, start), "another placement");
    }

    /// Of the 30 s until a returned machine is used, a load has ten left.
    #[test]
    fn an_instance_in_use_waits_for_a_quiet_moment_for_a_while() {
        let (mut history, start) = (WideningHistory::default(), Instant::now());
        let (two, three) = ([1, 2].map(node), [1, 2, 3].map(node));
        let mut waited =
            |nodes: &[NodeId], s| history.has_waited(ID, nodes, start + Duration::from_secs(s));
        assert!(!waited(&two, 0));
        assert!(!waited(&two, 5) && waited(&two, 6));
        assert!(!waited(&three, 7), "another one begins anew");
        assert!(waited(&three, 13));
        assert!(LIVED + BUSY.max(QUIET) <= Duration::from_secs(20));
    }

    /// The other placement of an instance of node 1 on `nodes`, with ranks at `ranks`. Its user
    /// asked for three nodes. Nodes 1 to 5 live but `dead`, and 5 has another instance.
    fn other(nodes: &[u8], ranks: &[u8], dead: &[u8], deaf: &[(u8, u8)]) -> Option<Vec<u8>> {
        let mut observed = Observed::new(node(1));
        for number in (1..=5).filter(|number| !dead.contains(number)) {
            lives(&mut observed, number, 0);
            observed.ranked.push(node(number));
        }
        observed.ranked.reverse();
        observed.broken = deaf.iter().map(|(a, b)| (node(*a), node(*b))).collect();
        runs(&mut observed, 3, 1, nodes);
        let it = observed.owned.get_mut(&ID).unwrap();
        it.spec.width = Some(3);
        it.ranks = ranks.iter().map(|number| Some(node(*number))).collect();
        let specs = [record(3, 1, nodes), record(4, 1, &[5])]
            .into_iter()
            .collect();
        let settled = observed.ranked.iter().copied().collect();
        let found = other_placement(&observed, &specs, &observed.owned[&ID], &settled);
        found.map(|nodes| nodes.iter().map(|id| id.0[0]).collect())
    }

    #[test]
    fn nodes_that_are_back_or_idle_are_used() {
        assert_eq!(other(&[1, 2, 3], &[1, 2, 3], &[], &[]), None);
        assert_eq!(other(&[1, 2, 3], &[1, 2, 1], &[], &[]), Some(vec![1, 2, 3]));
        assert_eq!(
            other(&[1, 2, 3], &[1, 2, 1], &[3], &[]),
            Some(vec![1, 2, 4])
        );
        assert_eq!(other(&[1, 2], &[1, 2], &[], &[]), Some(vec![1, 2, 4]));
        assert_eq!(other(&[1, 2], &[1, 2], &[3, 4], &[]), Some(vec![1, 2, 5]));
        assert_eq!(other(&[1, 2], &[1, 2], &[], &[(2, 4)]), None);
        assert_eq!(other(&[1, 2], &[1, 2], &[3, 4, 5], &[]), None);
    }
}
