//! Nodes whose workers are lost again and again, which are left out for a while.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;

/// Losses of workers after which a node is left out.
pub(super) const LOSSES_MAX: usize = 3;

/// Losses before this count no more, and the node is tried again: a machine that was restarted
/// meanwhile is another one.
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
    /// A worker of `rank` is to be started: the one before was lost.
    pub(super) fn lost(&self, rank: Rank, now: Instant) {
        let mut counted = lock(&self.0);
        let Some(node) = counted.at.remove(&rank) else {
            return;
        };
        let losses = counted.losses.entry(node).or_default();
        losses.retain(|at| now.saturating_duration_since(*at) < FORGET_AFTER);
        losses.push(now);
        // Older ones say nothing more.
        let first = losses.len().saturating_sub(LOSSES_MAX);
        losses.drain(..first);
    }

    /// A worker of `rank` was started at `node`.
    pub(super) fn started(&self, rank: Rank, node: NodeId) {
        lock(&self.0).at.insert(rank, node);
    }

    /// The node that runs the worker of a rank; `None` while none is known.
    pub(super) fn node_of(&self, rank: Rank) -> Option<NodeId> {
        lock(&self.0).at.get(&rank).copied()
    }

    /// Whether a node is left out.
    pub(super) fn is_out(&self, node: NodeId, now: Instant) -> bool {
        let counted = lock(&self.0);
        let losses = counted.losses.get(&node);
        let fresh = |at: &&Instant| now.saturating_duration_since(**at) < FORGET_AFTER;
        losses.is_some_and(|all| all.iter().filter(fresh).count() >= LOSSES_MAX)
    }

    /// The nodes that are left out.
    pub(super) fn out(&self, now: Instant) -> Vec<NodeId> {
        let all: Vec<NodeId> = lock(&self.0).losses.keys().copied().collect();
        all.into_iter()
            .filter(|node| self.is_out(*node, now))
            .collect()
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
}
