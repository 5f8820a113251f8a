//! Standby nodes: where an instance continues when the nodes of its record are all dead or have too
//! little memory left.
//!
//! - A new record has *standby* nodes as its last successors, and the first of them gets the model.
//!   Once all other nodes are dead it takes over ([`placement::duties`]).
//! - If no node has memory for a lost rank, the next record has the live nodes plus the fewest
//!   further ones that hold the model.
//! - If no node helps, the owner reports the missing memory and waits for nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Instant;

use paceline_base::lock;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{
    self, InstanceSpec, NODES_MAX, SPLIT_ANY, split_of_fewer,
};
use paceline_cluster::nodes::{InstanceId, NodeId};

use super::owner::OwnedInstance;
use super::room::{no_room, part_bytes};
use super::{Inner, LOOK_EVERY};
use crate::supervisor::LONGEST_WAIT;

/// Most standby nodes of an instance. They matter once all of its own nodes are dead; two more
/// deaths before a new owner has loaded it are rare.
const RESERVES_MAX: usize = 3;

/// Bytes available on each node for an instance.
type NodeMemory = BTreeMap<NodeId, u64>;

impl Inner {
    /// Standby nodes of `wanted` once none of `nodes` is left: those with memory for all of it,
    /// idle nodes first. Empty if its user named the nodes.
    pub(super) fn reserves(&self, wanted: &InstanceSpec, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        if wanted.named {
            return Vec::new();
        }
        let rooms = self.rooms_beside(None, wanted);
        let mut all = self.others(wanted, nodes);
        all.retain(|id| has(&rooms, *id, part_bytes(wanted, 1)));
        all.truncate(RESERVES_MAX);
        all
    }

    /// Live nodes outside of `nodes` that may compute `wanted`, idle nodes first.
    fn others(&self, wanted: &InstanceSpec, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let map = self.agent.map();
        let used: BTreeSet<NodeId> = placement::wanted(&map)
            .flat_map(|(.., wanted)| wanted.nodes.into_iter().chain(wanted.prompts))
            .collect();
        let (mut all, _) = self.ranked();
        let may = |id: &NodeId| !wanted.named || wanted.successors.contains(id);
        all.retain(|id| !nodes.contains(id) && !wanted.prompts.contains(id) && may(id));
        self.retain_engines(wanted, &mut all);
        all.sort_by_key(|id| used.contains(id)); // stable: keeps the order of routes
        all
    }

    /// Keeps the nodes that have the engine for an instance.
    pub(super) fn retain_engines(&self, wanted: &InstanceSpec, nodes: &mut Vec<NodeId>) {
        let views = self.agent.nodes();
        nodes.retain(|id| {
            let view = views.iter().find(|view| view.id == *id);
            view.is_some_and(|view| wanted.fits_engine(*id, &view.facts))
        });
    }

    /// The spec after a loss: over its live nodes, plus further ones if those have too little
    /// memory. Unchanged if its nodes suffice or no node helps.
    pub(super) fn with_room(&self, id: InstanceId, wanted: &InstanceSpec) -> InstanceSpec {
        let lives = |id: &NodeId| matches!(self.agent.life(*id), Life::Alive | Life::Suspect);
        let left: Vec<NodeId> = wanted.nodes.iter().copied().filter(lives).collect();
        let mut others = self.others(wanted, &left.iter().copied().collect());
        let broken = self.agent.broken_pairs(&[&left[..], &others].concat());
        let left = wanted.together(&broken, &left);
        others.retain(|id| match wanted.relayed {
            true => !left
                .first()
                .is_some_and(|first| broken.contains(*first, *id)),
            false => broken.suits(*id, &left),
        });
        let rooms = self.rooms_beside(Some(id), wanted);
        let part = |n: usize| part_bytes(wanted, n);
        match filled(&left, &others, &rooms, part) {
            Some(nodes) if nodes != wanted.nodes => over(wanted, nodes),
            _ => wanted.clone(),
        }
    }

    /// Checks whether the nodes of a spec have the memory for it. One with the requested number of
    /// nodes was checked when it was loaded.
    ///
    /// # Errors
    /// The machine that lacks memory, and how much.
    pub(super) fn check_room(&self, id: InstanceId, wanted: &InstanceSpec) -> Result<(), String> {
        if wanted.nodes.len() >= usize::from(wanted.width.unwrap_or(0)) {
            return Ok(());
        }
        let (rooms, part) = (
            self.rooms_beside(Some(id), wanted),
            part_bytes(wanted, wanted.nodes.len()),
        );
        let mut nodes = wanted.nodes.iter();
        match nodes.find(|id| !has(&rooms, **id, part)) {
            None => Ok(()),
            Some(lacks) => Err(no_room(
                &self.name(*lacks),
                part,
                rooms.get(lacks).copied().unwrap_or(0),
            )),
        }
    }

    /// Bytes for an instance on each node, by the engine that it has there, after all records but
    /// `without`. Unlimited for a node that does not report its memory.
    pub(super) fn rooms_beside(
        &self,
        without: Option<InstanceId>,
        wanted: &InstanceSpec,
    ) -> NodeMemory {
        let map = self.agent.map();
        let records = placement::wanted(&map).filter(|(id, ..)| Some(*id) != without);
        let records: Vec<InstanceSpec> = records.map(|(.., wanted)| wanted).collect();
        let views = self.agent.nodes().into_iter();
        views
            .map(|view| {
                let is_on_mlx = wanted.is_on_mlx(view.id);
                (view.id, super::room::room(&view, is_on_mlx, &records))
            })
            .collect()
    }

    /// Places instances of this node again if their nodes have no memory for a lost rank.
    pub(super) fn place_cramped(&self) {
        let cramped: Vec<OwnedInstance> = {
            let owned = lock(&self.owned);
            let all = owned.values().map(|it| &it.owned);
            all.filter(|it| it.cramped.swap(false, Ordering::SeqCst))
                .cloned()
                .collect()
        };
        for owned in cramped {
            let next = self.with_room(owned.id, &owned.wanted);
            if next.nodes == owned.wanted.nodes {
                continue; // the workers are tried again, and report what is missing
            }
            let names: Vec<String> = next.nodes.iter().map(|id| self.name(*id)).collect();
            let (model, names) = (&owned.wanted.model, names.join(", "));
            (self.spec.tell)(&format!("{model} moves to {names}, which have room for it"));
            // It does not answer, so there is no service to fall back to.
            let former = lock(&self.owned)
                .get_mut(&owned.id)
                .and_then(|it| it.answers.take());
            drop(former); // ends its workers, which takes a moment
            // Fails if the instance was unloaded meanwhile.
            let _: Result<(), _> = self.want(owned.id, owned.epoch + 1, Some(&next));
        }
    }

    /// Live nodes.
    fn living(&self) -> BTreeSet<NodeId> {
        let mut views = self.agent.nodes();
        views.retain(|view| view.state == Life::Alive);
        views.into_iter().map(|view| view.id).collect()
    }
}

impl OwnedInstance {
    /// Waits until a node joins or leaves, at most [`LONGEST_WAIT`], before the next attempt to
    /// start. False if a newer record makes the attempt useless.
    pub(super) fn wait_for_nodes(&self, inner: &Inner) -> bool {
        let (before, since) = (inner.living(), Instant::now());
        while inner.has_begun(self.id, self.epoch) {
            let next = inner.with_room(self.id, &self.wanted);
            if next.nodes != self.wanted.nodes
                && inner.want(self.id, self.epoch + 1, Some(&next)).is_ok()
            {
                return false;
            }
            if inner.living() != before || since.elapsed() >= LONGEST_WAIT {
                return true;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        false
    }
}

fn has(rooms: &NodeMemory, id: NodeId, bytes: u64) -> bool {
    rooms.get(&id).is_some_and(|room| *room >= bytes)
}

/// `nodes` plus the fewest of `others` that hold the model together. `part` returns the bytes per
/// node for a number of nodes. `None` if all together are too few.
fn filled(
    nodes: &[NodeId],
    others: &[NodeId],
    rooms: &NodeMemory,
    part: impl Fn(usize) -> u64,
) -> Option<Vec<NodeId>> {
    let most = (nodes.len() + others.len()).min(NODES_MAX);
    (nodes.len().max(1)..=most).find_map(|n| {
        let fits = |id: &&NodeId| has(rooms, **id, part(n));
        let more = others.iter().filter(fits).take(n - nodes.len());
        let all: Vec<NodeId> = nodes.iter().chain(more).copied().collect();
        (all.len() == n && all.iter().all(|id| fits(&id))).then_some(all)
    })
}

/// The spec over other nodes; its former owners and successors come first.
fn over(wanted: &InstanceSpec, nodes: Vec<NodeId>) -> InstanceSpec {
    let mut next = wanted.clone();
    if nodes.len() < wanted.nodes.len() {
        next.split = split_of_fewer(next.split);
    } else if nodes.len() > wanted.nodes.len() && !wanted.relayed {
        // A layer may have too few leaves for this number of nodes.
        next.split = SPLIT_ANY.to_owned();
    }
    let owner = nodes.first().copied();
    next.successors.retain(|id| Some(*id) != owner);
    let all = wanted.nodes.iter().chain(&nodes).copied();
    for id in all.filter(|id| Some(*id) != owner) {
        if !next.successors.contains(&id) {
            next.successors.push(id);
        }
    }
    next.successors.truncate(NODES_MAX);
    next.nodes = nodes;
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn nodes(numbers: &[u8]) -> Vec<NodeId> {
        numbers.iter().map(|number| node(*number)).collect()
    }

    #[test]
    fn as_few_further_nodes_as_hold_the_model() {
        let rooms: NodeMemory = [(1, 60), (2, 10), (3, 40), (4, 40), (5, 35)]
            .into_iter()
            .map(|(number, room)| (node(number), room))
            .collect();
        let found = |bytes: u64, left: &[u8]| {
            let others: Vec<u8> = (2..6).filter(|number| !left.contains(number)).collect();
            filled(&nodes(left), &nodes(&others), &rooms, |n| bytes / n as u64)
        };
        assert_eq!(found(60, &[1]), Some(nodes(&[1])), "it fits");
        assert_eq!(found(80, &[1]), Some(nodes(&[1, 3])), "2 is too small");
        assert_eq!(found(120, &[1]), Some(nodes(&[1, 3, 4])));
        assert_eq!(found(140, &[1]), Some(nodes(&[1, 3, 4, 5])));
        assert_eq!(found(160, &[1]), None, "each would need 40, and 5 has 35");
        assert_eq!(found(50, &[2]), None, "2 stays, and holds no quarter");
        assert_eq!(found(30, &[]), Some(nodes(&[3])));
        assert_eq!(found(1, &[9]), None, "9 is not known");
    }
}
