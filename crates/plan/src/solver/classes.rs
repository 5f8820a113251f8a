//! Classes of equivalent nodes.
//!
//! Two nodes are of one class when exchanging them changes nothing: same facts, same links to every
//! other node. Placements that differ only by such an exchange are the same. So the solver counts
//! nodes per class instead of naming them: eight equal machines have 9 subsets, not 256.

use crate::{Cluster, ClusterNode, LinkTable, NodeLink};

/// Nodes by class.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Classes {
    /// Members of each class, ascending; classes in order of their first member.
    pub(crate) members: Vec<Vec<usize>>,
}

/// Number of nodes of each class.
pub(crate) type ClassCounts = Vec<u8>;

impl Classes {
    pub(crate) fn of(cluster: &Cluster, network: &LinkTable) -> Self {
        let mut members: Vec<Vec<usize>> = Vec::new();
        for node in 0..cluster.nodes.len() {
            let twin = |class: &&mut Vec<usize>| {
                class.len() < usize::from(u8::MAX) && same(cluster, network, class[0], node)
            };
            match members.iter_mut().find(twin) {
                Some(class) => class.push(node),
                None => members.push(vec![node]),
            }
        }
        Self { members }
    }

    pub(crate) fn totals(&self) -> ClassCounts {
        let count = |class: &Vec<usize>| u8::try_from(class.len()).unwrap_or(u8::MAX);
        self.members.iter().map(count).collect()
    }

    /// Nodes for `wanted`, leaving out the first `used` of each class.
    pub(crate) fn pick(&self, wanted: &[u8], used: &[u8]) -> Vec<usize> {
        let mut nodes = Vec::new();
        for (class, (&n, &from)) in self.members.iter().zip(wanted.iter().zip(used)) {
            let (n, from) = (usize::from(n), usize::from(from));
            nodes.extend(&class[from..from + n]);
        }
        nodes
    }
}

/// Whether `a` and `b` can be exchanged.
fn same(cluster: &Cluster, network: &LinkTable, a: usize, b: usize) -> bool {
    let facts = |node: &ClusterNode| ClusterNode {
        name: String::new(),
        ..node.clone()
    };
    if facts(&cluster.nodes[a]) != facts(&cluster.nodes[b]) {
        return false;
    }
    let others = (0..cluster.nodes.len()).filter(|&other| other != a && other != b);
    let mut others = others;
    others.all(|other| alike(network, (a, other), (b, other)))
}

/// Sizes at which links are compared: an activation, and a prompt's.
const PROBES: [f64; 2] = [16e3, 16e6];

fn alike(network: &LinkTable, x: (usize, usize), y: (usize, usize)) -> bool {
    let key = |link: Option<&NodeLink>| {
        link.map(|l| (l.alpha.to_bits(), l.beta.to_bits(), l.transport, l.shared))
    };
    let best = |pair: (usize, usize), bytes| key(network.best(pair.0, pair.1, bytes));
    PROBES.iter().all(|&bytes| best(x, bytes) == best(y, bytes))
}
