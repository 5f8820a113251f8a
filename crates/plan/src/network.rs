//! Links by pair of nodes.

use crate::{Cluster, NodeLink};

/// The links of a cluster, looked up by pair.
#[derive(Clone, Debug)]
pub struct LinkTable {
    n_nodes: usize,
    links: Vec<NodeLink>,
    /// For pair `(a, b)` with `a < b`, at `a * n_nodes + b`: indices into `links`.
    by_pair: Vec<Vec<u32>>,
}

impl LinkTable {
    /// Indexes the links of a checked cluster. Costs memory for every pair of nodes.
    pub fn new(cluster: &Cluster) -> Self {
        let n_nodes = cluster.nodes.len();
        let mut by_pair = vec![Vec::new(); n_nodes * n_nodes];
        for (index, link) in cluster.links.iter().enumerate() {
            let (low, high) = (link.a.min(link.b), link.a.max(link.b));
            by_pair[low * n_nodes + high].push(u32::try_from(index).unwrap_or(u32::MAX));
        }
        Self {
            n_nodes,
            links: cluster.links.clone(),
            by_pair,
        }
    }

    /// Links between two nodes, as indices.
    fn of(&self, a: usize, b: usize) -> &[u32] {
        let (low, high) = (a.min(b), a.max(b));
        &self.by_pair[low * self.n_nodes + high]
    }

    /// The link that moves `bytes` between two nodes soonest, `None` where none joins them.
    /// Equal times go to the link named first.
    pub fn best(&self, a: usize, b: usize, bytes: f64) -> Option<&NodeLink> {
        self.of(a, b)
            .iter()
            .map(|&index| &self.links[index as usize])
            .min_by(|x, y| x.seconds(bytes).total_cmp(&y.seconds(bytes)))
    }

    /// Whether a link joins any two of `nodes`.
    pub fn joins(&self, nodes: &[usize]) -> bool {
        let mut pairs = nodes.iter().enumerate();
        pairs.all(|(i, &a)| nodes[i + 1..].iter().all(|&b| !self.of(a, b).is_empty()))
    }

    /// The slowest of the best links among `nodes`: it sets the pace of a collective. `None` when
    /// some pair has no link. The link of equal times is that of the first pair.
    pub fn slowest(&self, nodes: &[usize], bytes: f64) -> Option<&NodeLink> {
        let mut worst: Option<&NodeLink> = None;
        for (i, &a) in nodes.iter().enumerate() {
            for &b in &nodes[i + 1..] {
                let link = self.best(a, b, bytes)?;
                if worst.is_none_or(|w| w.seconds(bytes) < link.seconds(bytes)) {
                    worst = Some(link);
                }
            }
        }
        worst
    }

    /// The best link from any node of one group to any of another.
    pub fn between(&self, from: &[usize], to: &[usize], bytes: f64) -> Option<&NodeLink> {
        let pairs = from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b)));
        pairs
            .filter_map(|(a, b)| self.best(a, b, bytes))
            .min_by(|x, y| x.seconds(bytes).total_cmp(&y.seconds(bytes)))
    }
}
