//! Relocates instances whose nodes have no memory for a lost rank. The next record has the live
//! nodes plus the fewest further ones that hold the model.
//!
//! If no node helps, the owner reports the missing memory and waits for nodes. *Standby* nodes are
//! the last successors of a record. Once all other nodes are dead, the first of them takes over.

use std::collections::BTreeSet;

use paceline_base::Bytes;
use paceline_cluster::nodes::NodeId;

use super::{Action, Round, WriteReason};
use crate::memory::{NoRoom, part_bytes};
use crate::ownership::split_of_fewer;
use crate::{InstanceId, InstanceSpec, NODES_MAX, NodeMemory, Observed, SPLIT_ANY, Specs};

/// Most standby nodes of an instance. They matter once all of its own nodes are dead; two more
/// deaths before a new owner has loaded it are rare.
const STANDBYS_MAX: usize = 3;

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let (observed, specs) = (round.observed, round.specs);
    let cramped = observed.owned.iter().filter(|(_, it)| it.is_cramped);
    let next = |(id, it): (&InstanceId, &crate::OwnedInstance)| {
        let spec = with_room(observed, specs, *id, &it.spec);
        // With the same nodes the workers are tried again, and report what is missing.
        (spec.nodes != it.spec.nodes).then_some(Action::Write {
            id: *id,
            epoch: it.epoch + 1,
            spec,
            reason: WriteReason::NoRoom,
        })
    };
    cramped.filter_map(next).collect()
}

/// Standby nodes of an instance once none of `nodes` is left: those with memory for all of it,
/// idle nodes first. Empty if its user named the nodes.
pub fn standbys(
    observed: &Observed,
    specs: &Specs,
    spec: &InstanceSpec,
    nodes: &BTreeSet<NodeId>,
) -> Vec<NodeId> {
    if spec.named {
        return Vec::new();
    }
    let rooms = observed.rooms(specs, None, spec);
    let mut all = others(observed, specs, spec, nodes);
    all.retain(|id| has(&rooms, *id, part_bytes(spec, 1)));
    all.truncate(STANDBYS_MAX);
    all
}

/// Live nodes outside of `nodes` that may compute an instance, idle nodes first.
fn others(
    observed: &Observed,
    specs: &Specs,
    spec: &InstanceSpec,
    nodes: &BTreeSet<NodeId>,
) -> Vec<NodeId> {
    let used = specs.used();
    let mut all = observed.ranked.clone();
    let may = |id: &NodeId| !spec.named || spec.successors.contains(id);
    all.retain(|id| !nodes.contains(id) && !spec.prompts.contains(id) && may(id));
    retain_engines(observed, spec, &mut all);
    all.sort_by_key(|id| used.contains(id)); // stable: keeps the order of routes
    all
}

pub(super) fn retain_engines(observed: &Observed, spec: &InstanceSpec, nodes: &mut Vec<NodeId>) {
    nodes.retain(|id| {
        let view = observed.nodes.iter().find(|view| view.id == *id);
        view.is_some_and(|view| spec.fits_engine(*id, &view.facts))
    });
}

/// The spec after a loss: over its live nodes, plus further ones if those have too little memory.
/// Unchanged if its nodes suffice or no node helps.
pub fn with_room(
    observed: &Observed,
    specs: &Specs,
    id: InstanceId,
    spec: &InstanceSpec,
) -> InstanceSpec {
    let lives = |id: &NodeId| observed.lives(*id);
    let left: Vec<NodeId> = spec.nodes.iter().copied().filter(lives).collect();
    let mut others = others(observed, specs, spec, &left.iter().copied().collect());
    let broken = &observed.broken;
    let left = spec.together(broken, &left);
    others.retain(|id| match spec.relayed {
        true => !left
            .first()
            .is_some_and(|first| broken.contains(*first, *id)),
        false => broken.suits(*id, &left),
    });
    let rooms = observed.rooms(specs, Some(id), spec);
    let part = |n: usize| part_bytes(spec, n);
    match filled(&left, &others, &rooms, part) {
        Some(nodes) if nodes != spec.nodes => over(spec, nodes),
        _ => spec.clone(),
    }
}

/// Checks whether the nodes of a spec have the memory for it. One with the requested number of
/// nodes was checked when it was loaded.
///
/// # Errors
/// [`NoRoom`]: the first machine that lacks memory, by its name from `name`.
pub fn check_room(
    observed: &Observed,
    specs: &Specs,
    (id, spec): (InstanceId, &InstanceSpec),
    name: impl Fn(NodeId) -> String,
) -> Result<(), NoRoom> {
    if spec.nodes.len() >= usize::from(spec.width.unwrap_or(0)) {
        return Ok(());
    }
    let rooms = observed.rooms(specs, Some(id), spec);
    let part = part_bytes(spec, spec.nodes.len());
    let mut nodes = spec.nodes.iter();
    match nodes.find(|id| !has(&rooms, **id, part)) {
        None => Ok(()),
        Some(lacks) => Err(NoRoom {
            node: name(*lacks),
            part: Bytes(part),
            room: Bytes(rooms.get(lacks).copied().unwrap_or(0)),
        }),
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
fn over(spec: &InstanceSpec, nodes: Vec<NodeId>) -> InstanceSpec {
    let mut next = spec.clone();
    if nodes.len() < spec.nodes.len() {
        next.split = split_of_fewer(next.split);
    } else if nodes.len() > spec.nodes.len() && !spec.relayed {
        // A layer may have too few leaves for this number of nodes.
        next.split = SPLIT_ANY.to_owned();
    }
    let owner = nodes.first().copied();
    next.successors.retain(|id| Some(*id) != owner);
    let all = spec.nodes.iter().chain(&nodes).copied();
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
    use super::super::testing::*;
    use super::*;

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

    /// Nodes 1 to 4 with 10 GB each; an instance of 24 GB on 1, 2 and 3 lost 3.
    #[test]
    fn a_cramped_instance_gets_an_idle_node_that_speaks_to_the_others() {
        let placed = |is_cramped: bool, deaf: &[(u8, u8)]| {
            let mut observed = Observed::new(node(1));
            (1..=4).for_each(|number| lives(&mut observed, number, 10_000_000_000));
            observed.lives.remove(&node(3));
            observed.ranked = nodes(&[1, 2, 4]);
            observed.broken = deaf.iter().map(|(a, b)| (node(*a), node(*b))).collect();
            runs(&mut observed, 5, 3, &[1, 2, 3]);
            let it = observed.owned.get_mut(&InstanceId(5)).unwrap();
            (it.is_cramped, it.spec.bytes) = (is_cramped, 16_000_000_000);
            let spec = it.spec.clone();
            let mut records = vec![record(5, 3, &[1, 2, 3])];
            records[0].1.spec = spec;
            let actions = run(rule, &observed, records);
            actions
                .into_iter()
                .map(|action| match action {
                    Action::Write { epoch, spec, .. } => (epoch, spec.nodes),
                    other => panic!("{other:?}"),
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(placed(false, &[]), []);
        assert_eq!(placed(true, &[]), [(4, nodes(&[1, 2, 4]))]);
        assert_eq!(placed(true, &[(2, 4)]), [], "its nodes do not suffice");
    }
}
