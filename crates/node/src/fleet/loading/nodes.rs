//! The nodes for a load: those that its user names, or the best by what they have.

use std::collections::BTreeSet;
use std::time::Instant;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::paths::PathProbe;
use paceline_cluster::nodes::reach::BrokenPairs;
use paceline_fleet::NODES_MAX;

use super::super::error::no_path;
use super::super::{Error, Inner, LoadRequest, engines, preview};
use super::{PATHS_EVERY, PATHS_WAIT, RELAY_AFTER, may_relay};

impl Inner {
    /// Chooses the nodes of one instance, this one first if it is among them.
    pub(in crate::fleet) fn choose(&self, ask: &LoadRequest) -> Result<Vec<NodeId>, Error> {
        let mut nodes: Vec<NodeId> = match ask.nodes.is_empty() {
            true => self.best(ask, &self.readers(ask)?)?,
            false => self.named(ask)?,
        };
        if nodes.is_empty() || nodes.len() > NODES_MAX {
            return Err(Error::nodes(nodes.len()));
        }
        let own = self.agent.id();
        nodes.sort_by_key(|id| *id != own);
        let mut each = BTreeSet::new();
        if let Some(twice) = nodes.iter().find(|id| !each.insert(**id)) {
            let node = self.name(*twice);
            return Err(Error::NamedTwice { node });
        }
        let star = |broken: &BrokenPairs| broken.star(&nodes, nodes.len());
        let is_relayed = |broken: &BrokenPairs| may_relay(ask) && star(broken).is_some();
        let broken = self.broken_unless(&nodes, BrokenPairs::is_empty, is_relayed);
        match (broken.iter().next(), star(&broken)) {
            (None, _) => Ok(nodes),
            (Some(_), Some(star)) if may_relay(ask) => Ok(star),
            (Some((a, b)), _) => Err(no_path(&self.name(a), &self.name(b)).into()),
        }
    }

    /// Pairs of `nodes` that cannot speak. Measures again what was broken before, and what never
    /// answered, for some seconds.
    pub(in crate::fleet) fn broken_now(&self, nodes: &[NodeId]) -> BrokenPairs {
        let known = || -> BrokenPairs {
            let pairs = preview::pairs(nodes);
            pairs.filter(|(a, b)| self.is_apart(*a, *b)).collect()
        };
        let before = known();
        if before.is_empty() {
            return before;
        }
        self.agent.measure(nodes, PathProbe::Latency);
        known()
    }

    /// As [`broken_now`](Self::broken_now), but measures again until `enough`, for [`PATHS_WAIT`];
    /// for [`RELAY_AFTER`] if `is_relayed`.
    fn broken_unless(
        &self,
        nodes: &[NodeId],
        enough: impl Fn(&BrokenPairs) -> bool,
        is_relayed: impl Fn(&BrokenPairs) -> bool,
    ) -> BrokenPairs {
        let began = Instant::now();
        let mut broken = self.broken_now(nodes);
        let waits = |broken: &BrokenPairs| match is_relayed(broken) {
            true => RELAY_AFTER,
            false => PATHS_WAIT,
        };
        while !enough(&broken) && began.elapsed() < waits(&broken) {
            std::thread::sleep(PATHS_EVERY);
            broken = self.broken_now(nodes);
        }
        broken
    }

    /// `count` live nodes in order of their routes, without prefill nodes.
    pub(super) fn best(&self, ask: &LoadRequest, readers: &[NodeId]) -> Result<Vec<NodeId>, Error> {
        let (count, views) = (ask.count.unwrap_or(1), self.agent.nodes());
        let (mut order, notes) = self.ranked();
        let lacks = |id: &NodeId| {
            let view = views.iter().find(|view| view.id == *id);
            view.is_some_and(|view| !engines::may_compute(ask, &view.facts))
        };
        order.retain(|id| !readers.contains(id) && !lacks(id));
        if order.len() < count {
            return Err(Error::too_few(count, order.len(), notes));
        }
        let suffice = |broken: &BrokenPairs| broken.group(&order).len() >= count;
        let star = |broken: &BrokenPairs| broken.star(&order, count);
        let is_relayed = |broken: &BrokenPairs| may_relay(ask) && star(broken).is_some();
        let broken = self.broken_unless(&order, suffice, is_relayed);
        let mut speaking = broken.group(&order);
        if speaking.len() < count {
            if let Some(star) = star(&broken).filter(|_| may_relay(ask)) {
                return Ok(star);
            }
            let told = |(a, b)| no_path(&self.name(a), &self.name(b));
            return Err(Error::TooFewNodes {
                wanted: count,
                live: speaking.len(),
                how: "can all speak to each other",
                notes: broken.iter().map(told).collect(),
            });
        }
        speaking.truncate(count);
        Ok(speaking)
    }

    /// The named nodes, in order. A draining node is an error: it would never start its part.
    pub(in crate::fleet) fn named(&self, ask: &LoadRequest) -> Result<Vec<NodeId>, Error> {
        let find = |name: &String| {
            let node = self.agent.find(name)?;
            match node.facts.leaving {
                true => Err(preview::takes_none(&node).into()),
                false => Ok(node.id),
            }
        };
        ask.nodes.iter().map(find).collect()
    }

    /// The prefill nodes. They must have this node's revision of the numerics.
    pub(super) fn readers(&self, ask: &LoadRequest) -> Result<Vec<NodeId>, Error> {
        if ask.prefill_nodes.is_empty() {
            return Ok(Vec::new());
        }
        if ask.prefill_nodes.len() > NODES_MAX {
            return Err(Error::Count {
                what: "nodes for prompts",
                got: ask.prefill_nodes.len(),
                least: 0,
                most: NODES_MAX,
            });
        }
        if ask.replicas > 1 || ask.options.grows {
            return Err(Error::ReadersOfReplicas);
        }
        let views = self.agent.nodes();
        let own = views.iter().find(|view| view.id == self.agent.id());
        let own = own.map(|view| view.facts.kind());
        let mut all = BTreeSet::new();
        let find = |name: &String| {
            let node = self.agent.find(name)?;
            let (node_name, facts) = (node.facts.name.clone(), &node.facts);
            if facts.leaving {
                return Err(preview::takes_none(&node).into());
            }
            let kind = facts.kind();
            if own.as_ref().is_some_and(|own| *own != kind) {
                return Err(Error::ReaderKind {
                    node: node_name,
                    kind,
                });
            }
            match all.insert(node.id) {
                true => Ok(node.id),
                false => Err(Error::NamedTwice { node: node_name }),
            }
        };
        ask.prefill_nodes.iter().map(find).collect()
    }
}
