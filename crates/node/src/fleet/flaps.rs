//! Flapping nodes: a node that loses workers repeatedly is excluded for a while.
//!
//! A failed epoch ends on all ranks, and several may need a new worker. Only the causing rank
//! counts against its node: the others fail because of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;

/// Lost workers after which a node is excluded.
pub(super) const LOSSES_MAX: usize = 3;

/// Older losses no longer count and the node is readmitted: the machine may have been restarted
/// since.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Counts the workers that each node of an instance has lost.
#[derive(Debug, Default)]
pub(super) struct Flaps(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    /// The node that runs the worker of each rank.
    at: BTreeMap<Rank, NodeId>,
    losses: BTreeMap<NodeId, Vec<Instant>>,
}

impl Flaps {
    /// An epoch failed because of `rank`: counts a loss of the node that runs its worker.
    pub(super) fn lost(&self, rank: Rank, now: Instant) {
        let mut counted = lock(&self.0);
        let Some(node) = counted.at.get(&rank).copied() else {
            return;
        };
        let losses = counted.losses.entry(node).or_default();
        losses.retain(|at| now.saturating_duration_since(*at) < FORGET_AFTER);
        losses.push(now);
        // Older ones are irrelevant.
        let first = losses.len().saturating_sub(LOSSES_MAX);
        losses.drain(..first);
    }

    /// The worker of `rank` is gone. A failure to start the next one is no loss of its node.
    pub(super) fn vacated(&self, rank: Rank) {
        lock(&self.0).at.remove(&rank);
    }

    /// Forgets the losses of these nodes.
    pub(super) fn readmit(&self, nodes: &BTreeSet<NodeId>) {
        lock(&self.0).losses.retain(|node, _| !nodes.contains(node));
    }

    pub(super) fn started(&self, rank: Rank, node: NodeId) {
        lock(&self.0).at.insert(rank, node);
    }

    /// The node that runs the worker of a rank; `None` while none is known.
    pub(super) fn node_of(&self, rank: Rank) -> Option<NodeId> {
        lock(&self.0).at.get(&rank).copied()
    }

    /// Whether a node is excluded.
    pub(super) fn is_out(&self, node: NodeId, now: Instant) -> bool {
        let counted = lock(&self.0);
        let losses = counted.losses.get(&node);
        let fresh = |at: &&Instant| now.saturating_duration_since(**at) < FORGET_AFTER;
        losses.is_some_and(|all| all.iter().filter(fresh).count() >= LOSSES_MAX)
    }

    /// The excluded nodes.
    pub(super) fn out(&self, now: Instant) -> Vec<NodeId> {
        let all: Vec<NodeId> = lock(&self.0).losses.keys().copied().collect();
        all.into_iter()
            .filter(|node| self.is_out(*node, now))
            .collect()
    }
}

/// Facts of an instance's owner about unused nodes, besides lives, paths and lost workers.
#[derive(Debug, Default)]
pub(super) struct UnusedNodes(pub(super) Mutex<UnusedFacts>);

#[derive(Debug, Default)]
pub(super) struct UnusedFacts {
    /// Nodes that could not get the model.
    pub(super) lacking: BTreeSet<NodeId>,
    /// Why the last evaluated placement is not used.
    pub(super) refused: Option<String>,
}

impl UnusedNodes {
    /// A node could not get the model: the current record starts no worker there.
    pub(super) fn lacks(&self, node: NodeId) {
        lock(&self.0).lacking.insert(node);
    }

    /// Whether a node could not get the model.
    pub(super) fn is_lacking(&self, node: NodeId) -> bool {
        lock(&self.0).lacking.contains(&node)
    }

    /// Sets why another placement is not used; `None` if there is no other one. Returns whether
    /// that is new.
    pub(super) fn refuse(&self, reason: Option<String>) -> bool {
        let mut facts = lock(&self.0);
        let is_new = facts.refused != reason;
        facts.refused = reason;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_left_out_after_the_third_loss_for_a_while() {
        let (flaps, start) = (Flaps::default(), Instant::now());
        let node = |number: u8| NodeId([number; 16]);
        let at = |s| start + Duration::from_secs(s);
        flaps.lost(Rank(0), at(0)); // none was started before
        for s in 1..=3 {
            assert!(!flaps.is_out(node(1), at(s)));
            flaps.started(Rank(0), node(1));
            flaps.started(Rank(1), node(2));
            flaps.lost(Rank(0), at(s));
        }
        assert!(flaps.is_out(node(1), at(3)) && !flaps.is_out(node(2), at(3)));
        assert_eq!(flaps.out(at(600)), [node(1)]);
        assert_eq!(flaps.out(at(601)), []);
    }

    #[test]
    fn only_the_cause_is_charged() {
        let (flaps, now) = (Flaps::default(), Instant::now());
        let node = |number: u8| NodeId([number; 16]);
        for _ in 0..LOSSES_MAX {
            flaps.started(Rank(0), node(1));
            flaps.started(Rank(1), node(2));
            flaps.lost(Rank(0), now);
            // Both workers are replaced.
            flaps.vacated(Rank(0));
            flaps.vacated(Rank(1));
            flaps.lost(Rank(1), now); // it cannot be started
        }
        assert_eq!(flaps.out(now), [node(1)]);
    }

    #[test]
    fn a_readmitted_node_is_counted_anew() {
        let (flaps, now) = (Flaps::default(), Instant::now());
        let [node, other] = [1, 2].map(|number| NodeId([number; 16]));
        let lose = || {
            flaps.started(Rank(0), node);
            (0..LOSSES_MAX).for_each(|_| flaps.lost(Rank(0), now));
        };
        lose();
        flaps.readmit(&BTreeSet::from([other]));
        assert!(flaps.is_out(node, now));
        flaps.readmit(&BTreeSet::from([node]));
        assert!(!flaps.is_out(node, now));
        lose();
        assert!(flaps.is_out(node, now));
    }
}
