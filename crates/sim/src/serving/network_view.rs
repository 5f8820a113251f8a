//! The simulated network and records, as instances see them.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::reach::BrokenPairs;
use paceline_fleet::{InstanceId, InstanceSpec, specs};

use crate::world::SimNode;

/// The nodes and the state of the network, at one time.
pub(crate) struct NetworkView<'a> {
    pub(crate) nodes: &'a [SimNode],
    pub(crate) split: u64,
    pub(crate) deaf: &'a BTreeSet<(usize, usize)>,
    pub(crate) now: Duration,
}

impl NetworkView<'_> {
    pub(super) fn lives(&self, node: usize) -> bool {
        self.nodes[node].member.is_some()
    }

    pub(super) fn record(&self, node: usize, id: InstanceId) -> Option<InstanceSpec> {
        let member = self.nodes[node].member.as_ref()?;
        let mut all = specs(member.map());
        all.find(|(other, ..)| *other == id)
            .map(|(.., wanted)| wanted)
    }

    pub(super) fn passes(&self, from: usize, to: usize) -> bool {
        let side = |node: usize| self.split.unbounded_shr(node as u32) & 1;
        side(from) == side(to) && !self.deaf.contains(&(from, to))
    }

    /// The `nodes` on which an instance of `own` may run ranks: they live and all speak to each
    /// other. Nodes measure that by the time at which ranks join.
    pub(super) fn speaking(&self, own: usize, nodes: &[usize]) -> Vec<usize> {
        let reached = nodes.iter().filter(|node| self.reach(own, **node));
        let all: Vec<usize> = std::iter::once(own).chain(reached.copied()).collect();
        let each: BTreeSet<usize> = all.iter().copied().collect();
        let pairs = each
            .iter()
            .flat_map(|a| each.range(..a).map(move |b| (*a, *b)));
        let broken = pairs.filter(|(a, b)| !self.reach(*a, *b));
        let broken: BrokenPairs = broken
            .map(|(a, b)| (self.nodes[a].id, self.nodes[b].id))
            .collect();
        let ids: Vec<NodeId> = all.iter().map(|node| self.nodes[*node].id).collect();
        let group = broken.group(&ids).into_iter();
        group.map(|id| usize::from(id.0[15])).collect()
    }

    /// Whether a connection between two nodes works: it needs both directions.
    pub(super) fn reach(&self, one: usize, two: usize) -> bool {
        let both = self.lives(one) && self.lives(two);
        both && (one == two || (self.passes(one, two) && self.passes(two, one)))
    }
}
