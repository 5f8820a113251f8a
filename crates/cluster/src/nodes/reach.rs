//! Which nodes can speak to each other: a graph, by the paths that each node measures.
//!
//! A node may reach two others that do not reach each other. Ranks of a group connect each to each,
//! so it runs on a set of nodes without a broken pair. A pipeline may also run on a
//! [`star`](BrokenPairs::star), whose first node relays between the others.

use std::collections::BTreeSet;

use super::NodeId;
use super::paths::Path;

/// Sets that [`BrokenPairs::group`] compares at most. Some pairs of a cluster need a handful; the
/// limit bounds a network without any path.
const SETS_MAX: usize = 10_000;

/// Pairs of nodes without a path in one direction or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BrokenPairs(BTreeSet<(NodeId, NodeId)>);

/// Whether a node with these measured paths does not reach `to`: it reached `to` before, and none
/// of the paths answers now. One direction is enough, because the rank that dials is given.
pub fn is_broken<'a>(paths: impl IntoIterator<Item = &'a Path>, to: NodeId) -> bool {
    let mut known = paths.into_iter().filter(|path| path.to == to).peekable();
    known.peek().is_some() && known.all(|path| !path.up)
}

impl BrokenPairs {
    /// Adds a pair, in either order.
    pub fn insert(&mut self, a: NodeId, b: NodeId) {
        self.0.insert((a.min(b), a.max(b)));
    }

    /// Whether two nodes cannot speak.
    pub fn contains(&self, a: NodeId, b: NodeId) -> bool {
        self.0.contains(&(a.min(b), a.max(b)))
    }

    /// Whether all pairs can speak.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pairs, each once.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
        self.0.iter().copied()
    }

    /// Whether a node can speak to all of `nodes`.
    pub fn suits(&self, node: NodeId, nodes: &[NodeId]) -> bool {
        !nodes.iter().any(|other| self.contains(node, *other))
    }

    /// The largest set of `nodes` with the first of them and without a broken pair, in order. Of
    /// equally large sets it keeps the earlier nodes.
    pub fn group(&self, nodes: &[NodeId]) -> Vec<NodeId> {
        let Some((first, rest)) = nodes.split_first() else {
            return Vec::new();
        };
        let rest = rest
            .iter()
            .copied()
            .filter(|id| !self.contains(*first, *id));
        let (mut best, mut sets) = (Vec::new(), 0);
        self.search(
            std::iter::once(*first).chain(rest).collect(),
            &mut best,
            &mut sets,
        );
        best
    }

    /// The nodes that the first of `nodes` can speak to, after it, in order.
    pub fn reached(&self, nodes: &[NodeId]) -> Vec<NodeId> {
        let Some(first) = nodes.first() else {
            return Vec::new();
        };
        let is_reached = |id: &&NodeId| !self.contains(*first, **id);
        nodes.iter().filter(is_reached).copied().collect()
    }

    /// `count` of `nodes`. The first can speak to all others, and is the earliest such node. Each
    /// further one can speak to the one before it where an earlier choice allows that.
    /// Prefers nodes that can all speak. `None` if no node reaches as many.
    pub fn star(&self, nodes: &[NodeId], count: usize) -> Option<Vec<NodeId>> {
        let of = |hub: &NodeId| {
            let others = nodes.iter().filter(|id| *id != hub);
            let all: Vec<NodeId> = std::iter::once(hub).chain(others).copied().collect();
            self.reached(&all)
        };
        let all = nodes.iter().map(of).find(|all| all.len() >= count)?;
        let mut left = self.group(&all);
        left.extend(
            all.iter()
                .filter(|id| !left.contains(id))
                .collect::<Vec<_>>(),
        );
        left.truncate(count);
        let mut order = Vec::with_capacity(count);
        while !left.is_empty() {
            let speaks = |id: &NodeId| order.last().is_none_or(|last| !self.contains(*last, *id));
            let next = left.iter().position(speaks).unwrap_or(0);
            order.push(left.remove(next));
        }
        Some(order)
    }

    /// Removes nodes of `set` until no broken pair is left; `best` becomes the largest result.
    fn search(&self, set: Vec<NodeId>, best: &mut Vec<NodeId>, sets: &mut usize) {
        *sets += 1;
        if set.len() <= best.len() {
            return;
        }
        let broken = |id: NodeId| {
            set.iter()
                .filter(|other| self.contains(id, **other))
                .count()
        };
        // The last of those with the most broken pairs.
        let worst = set.iter().copied().max_by_key(|id| broken(*id));
        let Some(worst) = worst.filter(|id| broken(*id) > 0) else {
            *best = set;
            return;
        };
        let without = |out: &dyn Fn(NodeId) -> bool| {
            set.iter()
                .copied()
                .filter(|id| !out(*id))
                .collect::<Vec<_>>()
        };
        self.search(without(&|id| id == worst), best, sets);
        // A node with one broken pair is as good to lose as the other end.
        if broken(worst) > 1 && *sets < SETS_MAX {
            self.search(without(&|id| self.contains(id, worst)), best, sets);
        }
    }
}

impl FromIterator<(NodeId, NodeId)> for BrokenPairs {
    fn from_iter<I: IntoIterator<Item = (NodeId, NodeId)>>(pairs: I) -> Self {
        let mut all = Self::default();
        pairs.into_iter().for_each(|(a, b)| all.insert(a, b));
        all
    }
}

#[cfg(test)]
mod tests {
    use paceline_base::SplitMix64;

    use super::*;

    fn node(number: usize) -> NodeId {
        NodeId([number as u8; 16])
    }

    fn group(count: usize, pairs: &[(usize, usize)]) -> Vec<u8> {
        let broken: BrokenPairs = pairs.iter().map(|(a, b)| (node(*a), node(*b))).collect();
        let nodes: Vec<NodeId> = (0..count).map(node).collect();
        broken.group(&nodes).into_iter().map(|id| id.0[0]).collect()
    }

    #[test]
    fn the_most_nodes_that_speak_stay_together() {
        assert!(group(0, &[]).is_empty());
        assert_eq!(group(3, &[]), [0, 1, 2]);
        assert_eq!(group(3, &[(1, 2)]), [0, 1], "the later one goes");
        assert_eq!(
            group(4, &[(1, 2), (3, 1)]),
            [0, 2, 3],
            "1 speaks to neither"
        );
        assert_eq!(group(3, &[(0, 1)]), [0, 2], "the first one stays");
        assert_eq!(group(3, &[(0, 1), (0, 2)]), [0]);
        assert_eq!(group(6, &[(1, 2), (2, 3), (3, 4), (4, 5)]), [0, 1, 3, 5]);
    }

    #[test]
    fn a_star_has_the_node_that_reaches_the_others_first() {
        let star = |count: usize, pairs: &[(usize, usize)], wanted: usize| {
            let broken: BrokenPairs = pairs.iter().map(|(a, b)| (node(*a), node(*b))).collect();
            let nodes: Vec<NodeId> = (0..count).map(node).collect();
            let star = broken.star(&nodes, wanted)?;
            Some(star.into_iter().map(|id| id.0[0]).collect::<Vec<_>>())
        };
        assert_eq!(star(3, &[(0, 2)], 3), Some(vec![1, 0, 2]), "three in a row");
        assert_eq!(star(3, &[(1, 2)], 3), Some(vec![0, 1, 2]));
        assert_eq!(star(3, &[(0, 1), (0, 2)], 3), None, "0 is alone");
        assert_eq!(star(4, &[(1, 2)], 4), Some(vec![0, 1, 3, 2]), "neighbours");
        assert_eq!(star(4, &[(1, 2)], 3), Some(vec![0, 1, 3]), "all can speak");
    }

    /// All subsets of up to eight nodes, from 500 seeds.
    #[test]
    fn no_larger_set_speaks() {
        for seed in 0..500 {
            let mut random = SplitMix64::new(seed);
            let count = 1 + random.below(8);
            let draw = random.below(12);
            let pairs = (0..draw).map(|_| (random.below(count), random.below(count)));
            let pairs: Vec<_> = pairs.filter(|(a, b)| a != b).collect();
            let speaks = |set: usize| {
                let has = |id: usize| set & (1 << id) != 0;
                has(0) && !pairs.iter().any(|(a, b)| has(*a) && has(*b))
            };
            let sizes = (0_usize..1 << count).filter(|set| speaks(*set));
            let most = sizes.map(usize::count_ones).max();
            let found = group(count, &pairs);
            let set = found.iter().fold(0, |set, id| set | 1 << id);
            assert!(speaks(set), "seed {seed}: {pairs:?}, {found:?}");
            assert_eq!(most, Some(found.len() as u32), "seed {seed}: {pairs:?}");
        }
    }

    #[test]
    fn a_network_of_which_nothing_is_left_is_soon_judged() {
        let ring: Vec<_> = (1..64).map(|id| (id, id % 63 + 1)).collect();
        assert!(group(64, &ring).len() > 30);
        let none: Vec<_> = (0..64).flat_map(|a| (0..a).map(move |b| (a, b))).collect();
        assert_eq!(group(64, &none), [0]);
    }
}
