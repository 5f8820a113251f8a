//! Nodes that an instance does not use although its user may expect it, and why: for `ps`.

use std::collections::BTreeSet;
use std::time::Instant;

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::{Report, State};

use super::Inner;
use super::error::no_path;
use super::flaps::LOSSES_MAX;
use super::owner::OwnedInstance;

impl OwnedInstance {
    pub(super) fn nodes_now(&self) -> Vec<NodeId> {
        let ranks = (0..).map(Rank).zip(&self.wanted.nodes);
        ranks
            .map(|(rank, home)| self.flaps.node_of(rank).unwrap_or(*home))
            .collect()
    }

    /// Names of the nodes of its ranks, if they are not those of the record.
    pub(super) fn computing(&self) -> Vec<NodeId> {
        let now = self.nodes_now();
        match now == self.wanted.nodes {
            true => Vec::new(),
            false => now,
        }
    }

    /// Which nodes are not used and why, for people. `None` if all of them are.
    pub(super) fn left_out(&self, inner: &Inner) -> Option<String> {
        let now = self.nodes_now();
        let each: BTreeSet<NodeId> = now.iter().copied().collect();
        let mut said: Vec<String> = Vec::new();
        let asked = usize::from(self.wanted.width.unwrap_or(0));
        if each.len() < asked {
            said.push(format!("{} of {asked} nodes compute", each.len()));
        }
        let homes: BTreeSet<NodeId> = self.wanted.nodes.iter().copied().collect();
        said.extend(homes.difference(&each).filter_map(|id| {
            let reason = self.why_not(inner, *id, &now)?;
            Some(format!("{} is not used: {reason}", inner.name(*id)))
        }));
        let out = self.flaps.out(Instant::now()).into_iter();
        said.extend(out.map(|id| {
            format!(
                "{} is left out: lost {LOSSES_MAX} workers within minutes",
                inner.name(id)
            )
        }));
        said.extend(lock(&self.unused.0).refused.clone());
        (!said.is_empty()).then(|| said.join("; "))
    }

    /// Why a node of the record has no rank with the nodes `now`, if there is a lasting reason.
    fn why_not(&self, inner: &Inner, id: NodeId, now: &[NodeId]) -> Option<String> {
        match inner.agent.life(id) {
            Life::Dead => return Some("it is dead".to_owned()),
            Life::Left => return Some("it left the cluster".to_owned()),
            Life::Alive | Life::Suspect => {}
        }
        let both: Vec<NodeId> = now
            .iter()
            .copied()
            .chain([id, self.wanted.nodes[0]])
            .collect();
        let broken = inner.agent.broken_pairs(&both);
        let others = match self.wanted.relayed {
            true => &self.wanted.nodes[..1],
            false => now,
        };
        let other = others.iter().find(|other| broken.contains(id, **other));
        match other {
            Some(other) => Some(no_path(&inner.name(id), &inner.name(*other))),
            None if self.unused.is_lacking(id) => Some("it could not get the model".to_owned()),
            None => None,
        }
    }

    /// Publishes changed nodes of ranks and changed reasons of unused nodes. `said` is its last
    /// report, by its record. A pending report is published once the instance answers again.
    pub(super) fn tell_unused(&self, inner: &Inner, said: Option<Report>) {
        let Some(said) = said.filter(|it| it.state == State::Ready) else {
            return;
        };
        let reason = self.left_out(inner);
        if reason != said.reason || self.computing() != said.computing {
            self.report(inner, State::Ready, None, reason);
        }
    }
}
