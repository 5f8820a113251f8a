//! Checks of a run: safety (states that must never occur) and liveness (the required final state).
//!
//! *Safety*: a node never runs an instance of an older epoch than it ran before (`world` checks
//! each step).
//!
//! *Liveness*: twenty seconds after the last fault, all live nodes have equal maps. They see
//! exactly the live nodes as alive, or briefly as suspect. Each loaded instance runs on exactly one
//! node, and answers; no unloaded one runs.
//!
//! `serving` has the safety checks of answers.

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::{NodeId, RegisterKey};
use paceline_fleet::{InstanceId, specs};

use crate::world::{SimNode, SimWorld};

/// Whether all nodes live, see all others alive, and have equal maps with all nodes' facts.
pub(crate) fn is_settled(world: &SimWorld) -> bool {
    let mut roots = world
        .nodes
        .iter()
        .map(|node| node.member.as_ref().map(|m| m.map().root()));
    let first = roots.next().flatten();
    let equal = first.is_some() && roots.all(|root| root == first);
    equal
        && world
            .nodes
            .iter()
            .filter_map(|node| node.member.as_ref())
            .all(|member| {
                let alive = |node: &SimNode| {
                    member.life(node.id) == Life::Alive
                        && member.map().get(&RegisterKey::Node(node.id)).is_some()
                };
                world.nodes.iter().all(alive)
            })
}

/// Checks the world after its last event.
pub(crate) fn in_the_end(world: &mut SimWorld) {
    let mut found = lives(world);
    found.extend(maps(world));
    found.extend(instances(world));
    found.extend(answers(world));
    world.violations.append(&mut found);
}

fn lives(world: &SimWorld) -> Vec<String> {
    let mut found = Vec::new();
    for (number, node) in world.nodes.iter().enumerate() {
        let Some(member) = &node.member else { continue };
        for (other, theirs) in world.nodes.iter().enumerate() {
            let (seen, lives) = (member.life(theirs.id), theirs.member.is_some());
            if lives != matches!(seen, Life::Alive | Life::Suspect) {
                let truth = if lives { "alive" } else { "dead" };
                found.push(format!(
                    "node {number} sees node {other} {seen:?}; it is {truth}"
                ));
            }
        }
    }
    found
}

fn maps(world: &SimWorld) -> Vec<String> {
    let mut living = world.nodes.iter().enumerate();
    let of = |node: &SimNode| node.member.as_ref().map(|member| member.map().root());
    let Some((first, root)) = living.find_map(|(number, node)| Some((number, of(node)?))) else {
        return vec!["no node lives".to_owned()];
    };
    let unlike = living.filter(|(_, node)| of(node).is_some_and(|theirs| theirs != root));
    unlike
        .map(|(number, _)| format!("node {number} has another map than node {first}"))
        .collect()
}

fn instances(world: &SimWorld) -> Vec<String> {
    let mut found = Vec::new();
    for id in &world.wanted {
        let runs = |(_, node): &(usize, &SimNode)| node.runs.contains_key(id);
        let owners = world.nodes.iter().enumerate().filter(runs);
        let owners: Vec<usize> = owners.map(|(number, _)| number).collect();
        let Some(expected) = expected(world, id) else {
            continue;
        };
        if owners.len() != expected {
            let said = format!("instance {id} runs at {owners:?}, expected at {expected} nodes");
            found.push(said);
        }
    }
    found
}

/// Violations that clients and supervisors see.
fn answers(world: &SimWorld) -> Vec<String> {
    let has_to_run = |id: &&InstanceId| expected(world, id) == Some(1);
    let wanted = world.wanted.iter().filter(has_to_run).copied().collect();
    let serving = world.serving.as_ref();
    serving.map_or_else(Vec::new, |serving| {
        serving.in_the_end(world.length(), &wanted, &world.deaf)
    })
}

/// On how many nodes an instance must run. `None` if no node lives that may own it. `None` too if
/// the only node that received the request is dead and sent it to no other.
fn expected(world: &SimWorld, id: &InstanceId) -> Option<usize> {
    let members = world.nodes.iter().filter_map(|node| node.member.as_ref());
    let mut known = members.filter_map(|member| member.map().register(&RegisterKey::Record(*id)));
    let is_wanted = known.next()?.value.is_some();
    let told = known.all(|register| register.value.is_some() == is_wanted);
    match (is_wanted && told, world.unwanted.contains(id)) {
        (true, true) => None,
        (true, false) if !has_owner(world, id) => None,
        (true, false) => Some(1),
        (false, _) => Some(0),
    }
}

/// Whether the owner or a successor of an instance lives.
fn has_owner(world: &SimWorld, id: &InstanceId) -> bool {
    let lives = |id: NodeId| {
        let mut nodes = world.nodes.iter();
        nodes.any(|node| node.id == id && node.member.is_some())
    };
    let mut members = world.nodes.iter().filter_map(|node| node.member.as_ref());
    let record = members.find_map(|it| specs(it.map()).find(|(other, ..)| other == id));
    record.is_some_and(|(.., spec)| {
        let mut owners = spec.nodes[..1].iter().chain(&spec.successors);
        owners.any(|id| lives(*id))
    })
}
