//! Where an instance goes on once the nodes of its record cannot compute it. They are all dead, or
//! those that are left have too little memory.
//!
//! - A new record has *reserves* as its last successors, and the first of them gets the model. Once
//!   all other nodes are dead it takes over ([`placement::duties`]).
//! - Where no node has room for a lost rank, the next record has the living nodes, and as few
//!   further ones as hold the model.
//! - Where no node helps, the owner says what is missing, and waits for nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Instant;

use paceline_base::{Bytes, lock};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::placement::{self, NODES_MAX, SPLIT_ANY, Wanted, split_of_fewer};
use paceline_cluster::nodes::{InstanceId, NodeId};

use super::owner::Owned;
use super::places::part_bytes;
use super::{Inner, LOOK_EVERY};
use crate::supervisor::LONGEST_WAIT;

/// Most nodes beside those of an instance that may own it next. All of its own nodes are dead then;
/// that two of these die too before an owner has loaded it is rare.
const RESERVES_MAX: usize = 3;

/// Memory that each node has for an instance.
type Rooms = BTreeMap<NodeId, u64>;

impl Inner {
    /// Nodes that may own `wanted` when none of `nodes` is left: those that have room for all of
    /// it, nodes without any instance first. None where its user named its nodes.
    pub(super) fn reserves(&self, wanted: &Wanted, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        if wanted.named {
            return Vec::new();
        }
        let rooms = self.rooms_beside(None);
        let mut all = self.others(wanted, nodes);
        all.retain(|id| has(&rooms, *id, part_bytes(wanted, 1)));
        all.truncate(RESERVES_MAX);
        all
    }

    /// Nodes beside `nodes` that live and may compute `wanted`, nodes without any instance first.
    fn others(&self, wanted: &Wanted, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let map = self.agent.map();
        let used: BTreeSet<NodeId> = placement::wanted(&map)
            .flat_map(|(.., wanted)| wanted.nodes.into_iter().chain(wanted.prompts))
            .collect();
        let (mut all, _) = self.ranked();
        let may = |id: &NodeId| !wanted.named || wanted.successors.contains(id);
        all.retain(|id| !nodes.contains(id) && !wanted.prompts.contains(id) && may(id));
        all.sort_by_key(|id| used.contains(id)); // stable: the nodes that are reached best first
        all
    }

    /// The record after a loss: over its nodes that live, with further ones where those have too
    /// little memory. Unchanged where its nodes do, or where no node helps.
    pub(super) fn with_room(&self, id: InstanceId, wanted: &Wanted) -> Wanted {
        let lives = |id: &NodeId| matches!(self.agent.life(*id), Life::Alive | Life::Suspect);
        let left: Vec<NodeId> = wanted.nodes.iter().copied().filter(lives).collect();
        let others = self.others(wanted, &left.iter().copied().collect());
        let rooms = self.rooms_beside(Some(id));
        let part = |n: usize| part_bytes(wanted, n);
        match filled(&left, &others, &rooms, part) {
            Some(nodes) if nodes != wanted.nodes => over(wanted, nodes),
            _ => wanted.clone(),
        }
    }

    /// Checks whether the nodes of a record have the memory for it. A record with as many nodes as
    /// its user asked for was looked at when it was loaded.
    ///
    /// # Errors
    /// The machine that lacks memory, and how much.
    pub(super) fn check_room(&self, id: InstanceId, wanted: &Wanted) -> Result<(), String> {
        if wanted.nodes.len() >= usize::from(wanted.width.unwrap_or(0)) {
            return Ok(());
        }
        let (rooms, part) = (
            self.rooms_beside(Some(id)),
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

    /// Memory that models may have on each node, beside those of all records but `without`. A node
    /// that does not tell its memory may have any.
    fn rooms_beside(&self, without: Option<InstanceId>) -> Rooms {
        let map = self.agent.map();
        let records = placement::wanted(&map).filter(|(id, ..)| Some(*id) != without);
        let records: Vec<Wanted> = records.map(|(.., wanted)| wanted).collect();
        let views = self.agent.nodes().into_iter();
        views
            .map(|view| (view.id, super::places::room(&view, &records)))
            .collect()
    }

    /// Places instances of this node anew whose nodes have no room for a rank that was lost.
    pub(super) fn place_cramped(&self) {
        let cramped: Vec<Owned> = {
            let owned = lock(&self.owned);
            let all = owned.values().map(|it| &it.owned);
            all.filter(|it| it.cramped.swap(false, Ordering::SeqCst))
                .cloned()
                .collect()
        };
        for owned in cramped {
            let next = self.with_room(owned.id, &owned.wanted);
            if next.nodes == owned.wanted.nodes {
                continue; // the crew tries again, and says what is missing
            }
            let names: Vec<String> = next.nodes.iter().map(|id| self.name(*id)).collect();
            let (model, names) = (&owned.wanted.model, names.join(", "));
            (self.spec.tell)(&format!("{model} moves to {names}, which have room for it"));
            // It does not answer, so that nothing is left to fall back to.
            let former = lock(&self.owned)
                .get_mut(&owned.id)
                .and_then(|it| it.answers.take());
            drop(former); // ends its workers, which takes a moment
            // Refused where somebody unloaded it meanwhile.
            let _: Result<(), _> = self.want(owned.id, owned.epoch + 1, Some(&next));
        }
    }

    /// Nodes that live.
    fn living(&self) -> BTreeSet<NodeId> {
        let mut views = self.agent.nodes();
        views.retain(|view| view.state == Life::Alive);
        views.into_iter().map(|view| view.id).collect()
    }
}

impl Owned {
    /// Waits for a node that comes or goes, or [`LONGEST_WAIT`], before the next attempt to start.
    /// False where that is of no use: another record counts now.
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

/// Why a node takes no part of a model.
pub(super) fn no_room(name: &str, part: u64, room: u64) -> String {
    let (part, room) = (Bytes(part), Bytes(room));
    format!("{name}: too little memory: its part needs {part}, and {room} are free")
}

fn has(rooms: &Rooms, id: NodeId, bytes: u64) -> bool {
    rooms.get(&id).is_some_and(|room| *room >= bytes)
}

/// `nodes` with as few of `others` as have room for the model together. `part` gives the bytes of
/// each of so many nodes. `None` where no number of them has.
fn filled(
    nodes: &[NodeId],
    others: &[NodeId],
    rooms: &Rooms,
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

/// The record over other nodes; who could own it so far comes first.
fn over(wanted: &Wanted, nodes: Vec<NodeId>) -> Wanted {
    let mut next = wanted.clone();
    if nodes.len() < wanted.nodes.len() {
        next.split = split_of_fewer(next.split);
    } else if nodes.len() > wanted.nodes.len() {
        // A layer may have too few parts for so many.
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
        let rooms: Rooms = [(1, 60), (2, 10), (3, 40), (4, 40), (5, 35)]
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
