//! Ownership of instances: each node decides alone, from the map and the lives of nodes.
//!
//! An instance's spec names its nodes, the leader's first, and an order of *successors*. The owner
//! is the first node. When the owner is dead, the first live successor writes a record of the next
//! epoch with itself as owner.
//!
//! No vote is needed. Two sides of a partition may write two records of one epoch; the later write
//! wins when they merge. A node that is no longer the owner ends its workers. An unloaded instance
//! has a tombstone of the highest epoch, so that no takeover restores it.
//!
//! A node may *lease* an instance to a program of its machine. The instance is useless after the
//! node is dead: see [`abandoned`].

use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::{NodeId, Registers};

use crate::{InstanceId, InstanceSpec, Record, SPLIT_ANY, Specs, specs};

/// A task of a node about an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Own it: keep it running by its record.
    Own {
        id: InstanceId,
        epoch: u64,
        spec: InstanceSpec,
    },
    /// Write this record: its owner is dead and this node is next.
    TakeOver {
        id: InstanceId,
        epoch: u64,
        /// The next record.
        spec: InstanceSpec,
    },
}

/// The duties of node `own` now, in order of ids. An instance whose lending node is dead
/// has no takeover.
pub fn duties(specs: &Specs, own: NodeId, life: impl Fn(NodeId) -> Life) -> Vec<Duty> {
    let lives = |id: &NodeId| matches!(life(*id), Life::Alive | Life::Suspect);
    let duty = |(id, Record { epoch, spec, .. }): (InstanceId, &Record)| {
        if spec.nodes[0] == own {
            let (epoch, spec) = (*epoch, spec.clone());
            return Some(Duty::Own { id, epoch, spec });
        }
        let is_next = acting(spec, lives) == Some(own);
        (is_next && !has_lost_lender(spec, lives)).then(|| Duty::TakeOver {
            id,
            epoch: epoch + 1,
            spec: succeed(spec.clone(), own, &lives),
        })
    };
    specs.iter().filter_map(duty).collect()
}

/// The leased instances whose lending node is dead or has left. The node `own` must unload them, as
/// their owner or first live successor. In order of ids.
pub fn abandoned(specs: &Specs, own: NodeId, life: impl Fn(NodeId) -> Life) -> Vec<InstanceId> {
    let lives = |id: &NodeId| matches!(life(*id), Life::Alive | Life::Suspect);
    specs
        .iter()
        .filter(|(_, it)| has_lost_lender(&it.spec, lives))
        .filter(|(_, it)| acting(&it.spec, lives) == Some(own))
        .map(|(id, _)| id)
        .collect()
}

/// The instances with ranks on a node, for people; `None` for none.
pub fn work(map: &Registers, own: NodeId) -> Option<String> {
    let own = specs(map).filter(|(.., wanted)| wanted.nodes.contains(&own));
    let models: Vec<String> = own.map(|(.., wanted)| wanted.model).collect();
    let models = (!models.is_empty()).then(|| models.join(", "));
    models.map(|models| format!("this node's cluster has instances: {models}"))
}

/// The owner, or the first live successor of a dead one.
fn acting(wanted: &InstanceSpec, lives: impl Fn(&NodeId) -> bool) -> Option<NodeId> {
    let mut order = wanted.nodes[..1].iter().chain(&wanted.successors);
    order.find(|id| lives(id)).copied()
}

fn has_lost_lender(wanted: &InstanceSpec, lives: impl Fn(&NodeId) -> bool) -> bool {
    wanted.lender.is_some_and(|lender| !lives(&lender))
}

/// The split for fewer nodes. A kind stays as it is; sizes, as in `2x2`, would not fit.
pub fn split_of_fewer(split: String) -> String {
    match split.contains(|c: char| c.is_ascii_digit()) {
        true => SPLIT_ANY.to_owned(),
        false => split,
    }
}

/// The spec after its owner died: on the live nodes, `this_process` first.
fn succeed(
    mut wanted: InstanceSpec,
    own: NodeId,
    lives: &impl Fn(&NodeId) -> bool,
) -> InstanceSpec {
    let former = wanted.nodes[0];
    wanted.split = split_of_fewer(wanted.split);
    let others = wanted.nodes.iter().filter(|id| **id != own && lives(id));
    wanted.nodes = std::iter::once(own).chain(others.copied()).collect();
    wanted.successors.retain(|id| *id != own);
    // A returning former owner comes after all others.
    wanted.successors.retain(|id| *id != former);
    wanted.successors.push(former);
    wanted.prompts.retain(|id| *id != own);
    wanted
}

/// The spec without `leaver`, on the live nodes that stay. The owner stays; a leaving owner is
/// replaced by the first live successor, or the first of `others`. `None` if no node is left.
pub fn without(
    mut wanted: InstanceSpec,
    leaver: NodeId,
    others: &[NodeId],
    life: impl Fn(NodeId) -> Life,
) -> Option<InstanceSpec> {
    let stays = |id: &NodeId| *id != leaver && life(*id) == Life::Alive;
    let owner = wanted.nodes.first().copied().filter(stays);
    let after = wanted.successors.iter().chain(others).copied();
    let owner = owner.or_else(|| after.into_iter().find(stays))?;
    let (before, nodes) = (wanted.nodes.len(), std::mem::take(&mut wanted.nodes));
    let rest = nodes.into_iter().filter(|id| *id != owner && stays(id));
    wanted.nodes = std::iter::once(owner).chain(rest).collect();
    if wanted.nodes.len() != before {
        wanted.split = split_of_fewer(wanted.split);
    }
    wanted.successors.retain(|id| *id != owner && *id != leaver);
    // It may return, and then comes after all others.
    wanted.successors.push(leaver);
    wanted.prompts.retain(|id| *id != owner && *id != leaver);
    Some(wanted)
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::{HybridTimestamp, Register, RegisterKey};

    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    fn map(epoch: u64, nodes: &[u8], successors: &[u8]) -> Specs {
        lent_map(epoch, nodes, successors, None)
    }

    fn lent_map(epoch: u64, nodes: &[u8], successors: &[u8], lender: Option<u8>) -> Specs {
        let wanted = InstanceSpec {
            model: "smollm2".into(),
            nodes: nodes.iter().map(|number| node(*number)).collect(),
            successors: successors.iter().map(|number| node(*number)).collect(),
            split: "auto".into(),
            threads: 1,
            lender: lender.map(node),
            ..InstanceSpec::default()
        };
        let record = Record {
            epoch,
            spec: wanted,
            report: None,
        };
        [(InstanceId(5), record)].into_iter().collect()
    }

    fn lives(living: &'static [u8]) -> impl Fn(NodeId) -> Life {
        move |id| {
            if living.contains(&id.0[0]) {
                Life::Alive
            } else {
                Life::Dead
            }
        }
    }

    #[test]
    fn the_first_successor_that_lives_takes_over() {
        let map = map(3, &[1, 2, 3], &[2, 3, 4]);
        let owns = duties(&map, node(1), lives(&[1, 2, 3, 4]));
        assert!(
            matches!(&owns[..], [Duty::Own { epoch: 3, .. }]),
            "{owns:?}"
        );
        for other in [2, 3, 4] {
            assert_eq!(duties(&map, node(other), lives(&[1, 2, 3, 4])), []);
        }
        assert_eq!(duties(&map, node(4), lives(&[3, 4])), [], "3 is before it");
        let takes = duties(&map, node(3), lives(&[3, 4]));
        let [Duty::TakeOver { epoch: 4, spec, .. }] = &takes[..] else {
            panic!("{takes:?}");
        };
        assert_eq!(spec.nodes, [node(3)], "on those that live");
        assert_eq!(spec.successors, [node(2), node(4), node(1)]);
    }

    #[test]
    fn a_direction_of_a_split_outlives_a_loss() {
        for (split, after) in [
            ("auto", "auto"),
            ("pipeline", "pipeline"),
            ("2x2", "auto"),
            ("2x2-experts", "auto"),
        ] {
            assert_eq!(split_of_fewer(split.to_owned()), after);
        }
    }

    #[test]
    fn a_lent_instance_is_unloaded_by_its_owner_or_the_next_once_its_lender_is_dead() {
        let map = lent_map(3, &[1, 2], &[2, 3], Some(4));
        let to_unload = |own, living| abandoned(&map, node(own), lives(living));
        let all = [1, 2, 3, 4];
        assert!(
            all.iter()
                .all(|own| to_unload(*own, &[1, 2, 3, 4]).is_empty())
        );
        assert_eq!(to_unload(1, &[1, 2, 3]), [InstanceId(5)]);
        assert_eq!(to_unload(2, &[1, 2, 3]), [], "its owner does");
        assert_eq!(to_unload(2, &[2, 3]), [InstanceId(5)]);
        assert_eq!(to_unload(3, &[2, 3]), [], "2 is before it");
        assert_eq!(duties(&map, node(2), lives(&[2, 3])), [], "for nobody");
        assert_eq!(duties(&map, node(2), lives(&[2, 3, 4])).len(), 1);
        let kept = lent_map(3, &[1, 2], &[2], None);
        assert_eq!(abandoned(&kept, node(1), lives(&[1])), []);
    }

    #[test]
    fn work_moves_to_those_that_stay() {
        let of = |nodes: &[u8], successors: &[u8], living| {
            let before = map(3, nodes, successors)
                .get(InstanceId(5))
                .unwrap()
                .spec
                .clone();
            without(before, node(1), &[node(9)], lives(living))
        };
        let nodes =
            |wanted: &InstanceSpec| -> Vec<u8> { wanted.nodes.iter().map(|id| id.0[0]).collect() };
        let owner = of(&[1, 2, 3], &[2, 3], &[1, 2, 3]).unwrap();
        assert_eq!(nodes(&owner), [2, 3]);
        assert_eq!(owner.successors, [node(3), node(1)]);
        let member = of(&[2, 1, 3], &[1, 3], &[1, 2, 3]).unwrap();
        assert_eq!(nodes(&member), [2, 3], "its owner stays");
        assert_eq!(member.successors, [node(3), node(1)]);
        assert_eq!(nodes(&of(&[1, 2], &[2, 3], &[1, 3]).unwrap()), [3]);
        assert_eq!(nodes(&of(&[1], &[], &[1, 9]).unwrap()), [9]);
        assert_eq!(of(&[1, 2], &[2], &[1]), None);
    }

    #[test]
    fn records_that_are_none_are_nobodys() {
        for value in ["", "null", "{}", r#"{"model":"x","nodes":[]}"#] {
            let (ms, count, own) = (1, 0, node(1));
            let register = Register {
                epoch: 3,
                stamp: HybridTimestamp {
                    ms,
                    count,
                    node: own,
                },
                value: Some(value.to_owned()),
            };
            let key = RegisterKey::Record(InstanceId(5));
            let bad = Registers::from_entries([(key, register)]);
            assert_eq!(duties(&Specs::read(&bad), node(1), lives(&[1])), []);
        }
    }
}
