//! Assigns nodes to the replicas of a model.
//!
//! Replicas get separate nodes while there are enough; then they share nodes, within memory. Pure:
//! memory and the order of nodes are arguments.

use std::collections::BTreeMap;

use paceline_cluster::nodes::NodeId;

/// Memory and nodes that each replica needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// How many replicas.
    pub replicas: usize,
    /// Nodes of each.
    pub each: usize,
    /// Bytes that each of its nodes needs for a replica.
    pub bytes: u64,
}

/// A replica that fits nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Short {
    /// Which replica, from 1.
    pub number: usize,
    /// Bytes that nodes lack for it, those that lack the least first.
    pub lacking: Vec<(NodeId, u64)>,
}

/// Named nodes that make no groups for replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uneven {
    #[error("{nodes} nodes for {replicas} replicas: name as many for each")]
    Rest { nodes: usize, replicas: usize },
    #[error("a node is named twice for one replica")]
    Twice,
}

/// The nodes of each replica. `nodes` are the eligible nodes, best first, each with the bytes that
/// a model may use there.
///
/// # Errors
/// [`Short`]: fewer than [`Need::each`] nodes have room for a replica.
pub fn deal(nodes: &[(NodeId, u64)], need: Need) -> Result<Vec<Vec<NodeId>>, Short> {
    let (mut left, mut held) = (nodes.to_vec(), vec![0_usize; nodes.len()]);
    let mut dealt = Vec::new();
    for number in 1..=need.replicas {
        let has_room = |at: &usize| left[*at].1 >= need.bytes;
        let mut open: Vec<usize> = (0..nodes.len()).filter(has_room).collect();
        if open.len() < need.each {
            return Err(short(number, &left, need));
        }
        open.sort_by_key(|at| held[*at]);
        open.truncate(need.each);
        open.sort_unstable();
        for at in &open {
            left[*at].1 -= need.bytes;
            held[*at] += 1;
        }
        dealt.push(open.into_iter().map(|at| nodes[at].0).collect());
    }
    Ok(dealt)
}

/// Divides the nodes that a user named between `replicas` replicas, in order. With fewer nodes than
/// replicas, each replica gets one node, in turn.
pub fn share_out(named: &[NodeId], replicas: usize) -> Result<Vec<Vec<NodeId>>, Uneven> {
    let n = named.len();
    if n < replicas {
        let in_turn = named.iter().cycle().take(replicas);
        return Ok(in_turn.map(|id| vec![*id]).collect());
    }
    if !n.is_multiple_of(replicas) {
        return Err(Uneven::Rest { nodes: n, replicas });
    }
    let shares: Vec<Vec<NodeId>> = named.chunks(n / replicas).map(<[NodeId]>::to_vec).collect();
    let is_twice = |share: &Vec<NodeId>| (1..share.len()).any(|i| share[..i].contains(&share[i]));
    match shares.iter().any(is_twice) {
        true => Err(Uneven::Twice),
        false => Ok(shares),
    }
}

/// Whether replicas on these nodes fit in their memory together.
///
/// # Errors
/// [`Short`]: the first replica that does not.
pub fn check(dealt: &[Vec<NodeId>], nodes: &[(NodeId, u64)], need: Need) -> Result<(), Short> {
    let mut left: BTreeMap<NodeId, u64> = nodes.iter().copied().collect();
    for (number, share) in (1..).zip(dealt) {
        let of_share = share.iter().map(|id| (*id, left.get(id).copied()));
        let rooms: Vec<(NodeId, u64)> =
            of_share.map(|(id, room)| (id, room.unwrap_or(0))).collect();
        if rooms.iter().any(|(_, room)| *room < need.bytes) {
            return Err(short(number, &rooms, need));
        }
        left.extend(rooms.into_iter().map(|(id, room)| (id, room - need.bytes)));
    }
    Ok(())
}

fn short(number: usize, rooms: &[(NodeId, u64)], need: Need) -> Short {
    let lacks = |(id, room): &(NodeId, u64)| (*id, need.bytes.saturating_sub(*room));
    let mut lacking: Vec<(NodeId, u64)> = rooms.iter().map(lacks).collect();
    lacking.retain(|(_, bytes)| *bytes > 0);
    lacking.sort_by_key(|(_, bytes)| *bytes);
    Short { number, lacking }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    /// Nodes 0, 1, .. with this much free memory.
    fn nodes(rooms: &[u64]) -> Vec<(NodeId, u64)> {
        (0..).map(node).zip(rooms.iter().copied()).collect()
    }

    /// The assigned nodes by number, or the first replica without room and the missing bytes.
    fn dealt(rooms: &[u64], replicas: usize, each: usize) -> Result<Vec<Vec<u8>>, Short> {
        let need = Need {
            replicas,
            each,
            bytes: 10,
        };
        let all = deal(&nodes(rooms), need)?;
        check(&all, &nodes(rooms), need)?;
        Ok(by_number(all))
    }

    fn by_number(dealt: Vec<Vec<NodeId>>) -> Vec<Vec<u8>> {
        let number = |share: Vec<NodeId>| share.into_iter().map(|id| id.0[0]).collect();
        dealt.into_iter().map(number).collect()
    }

    #[test]
    fn replicas_have_nodes_of_their_own_while_there_are_enough() {
        assert_eq!(dealt(&[10, 10], 2, 1).unwrap(), [[0], [1]]);
        assert_eq!(dealt(&[10; 5], 2, 2).unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(
            dealt(&[5, 10, 10], 2, 1).unwrap(),
            [[1], [2]],
            "0 is too small"
        );
        assert_eq!(dealt(&[99, 99], 3, 1).unwrap(), [[0], [1], [0]]);
        assert_eq!(dealt(&[99; 3], 2, 2).unwrap(), [[0, 1], [0, 2]]);
        assert_eq!(dealt(&[30, 10], 4, 1).unwrap(), [[0], [1], [0], [0]]);
    }

    #[test]
    fn what_is_missing_is_told() {
        let short = dealt(&[13, 10], 3, 1).unwrap_err();
        let lacking = vec![(node(0), 7), (node(1), 10)];
        assert_eq!(short, Short { number: 3, lacking });
        let short = dealt(&[10, 4], 1, 2).unwrap_err();
        let lacking = vec![(node(1), 6)];
        assert_eq!(short, Short { number: 1, lacking });
        assert_eq!(dealt(&[], 1, 1).unwrap_err().number, 1);
    }

    #[test]
    fn named_nodes_are_shared_out_in_order() {
        let share = |named: &[u8], replicas| {
            let named: Vec<NodeId> = named.iter().map(|number| node(*number)).collect();
            share_out(&named, replicas).map(by_number)
        };
        assert_eq!(share(&[3, 1], 2).unwrap(), [[3], [1]]);
        assert_eq!(share(&[3, 1, 2, 0], 2).unwrap(), [[3, 1], [2, 0]]);
        assert_eq!(share(&[3, 1, 1, 0], 2).unwrap(), [[3, 1], [1, 0]]);
        assert_eq!(share(&[3, 1], 3).unwrap(), [[3], [1], [3]]);
        let rest = Uneven::Rest {
            nodes: 3,
            replicas: 2,
        };
        assert_eq!(share(&[3, 1, 2], 2), Err(rest));
        assert_eq!(share(&[3, 3, 1, 2], 2), Err(Uneven::Twice));
        let need = Need {
            replicas: 2,
            each: 1,
            bytes: 10,
        };
        let both = [vec![node(0)], vec![node(0)]];
        assert_eq!(check(&both, &nodes(&[20]), need), Ok(()));
        let lacking = vec![(node(0), 1)];
        let short = Short { number: 2, lacking };
        assert_eq!(check(&both, &nodes(&[19]), need), Err(short));
    }
}
