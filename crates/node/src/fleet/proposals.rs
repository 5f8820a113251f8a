//! Proposals for the ranks of an instance: how to cut a model over given nodes, best first.
//!
//! A preview shows them. A load with an automatic split takes the first, and so does the search for
//! a better placement. So the running split is the one that a preview names.

use paceline_cluster::nodes::NodeId;
use paceline_model::{Config, SplitKind};

use super::Inner;
use super::preview::{Proposal, pairs};
use crate::forecast::Forecast;
use crate::forecast::machines::{MachineLink, Machines, Ranked, RemoteMachine};

/// Nodes of an instance's ranks, and the known machines.
pub(super) type Nodes<'a> = (&'a [NodeId], &'a [(NodeId, RemoteMachine)]);

impl Inner {
    /// The splits of a model over `ranks` (the node of each rank), the fastest that fits first.
    /// Also returns why others were refused.
    pub(super) fn proposals(
        &self,
        (config, forecast): (&Config, &Forecast),
        kind: SplitKind,
        (ranks, machines): Nodes<'_>,
    ) -> (Vec<Proposal>, Vec<String>) {
        let machines = match self.machines_of(ranks, machines) {
            Ok(machines) => machines,
            Err(reason) => return (Vec::new(), vec![reason]),
        };
        let (ranked, refused) = forecast.ranked(config, kind, &machines);
        let proposals = ranked.into_iter().map(|said| self.proposal(ranks, said));
        let refused = refused
            .into_iter()
            .map(|(split, error)| format!("{} nodes, {split}: {error}", ranks.len()));
        (proposals.collect(), refused.collect())
    }

    fn proposal(&self, ranks: &[NodeId], (split, said): Ranked) -> Proposal {
        Proposal {
            nodes: ranks.iter().map(|id| self.name(*id)).collect(),
            split: match ranks.len() {
                1 => "auto".to_owned(),
                _ => split.to_string(),
            },
            decode_tok_s: said.decode_tok_s,
            ttft_ms: said.ttft_s.map(|seconds| seconds * 1e3),
            fits: said.fits(),
            bytes: said
                .nodes
                .iter()
                .map(|it| it.usage.total() as u64)
                .collect(),
            paths: self.ways_told(&each_once(ranks).0),
            replicas: Vec::new(),
        }
    }

    /// The machines of `ranks`, each once, and the links between them.
    fn machines_of(
        &self,
        ranks: &[NodeId],
        known: &[(NodeId, RemoteMachine)],
    ) -> Result<Machines, String> {
        let (nodes, of_rank) = each_once(ranks);
        let machine = |id: &NodeId| {
            let known = known.iter().find(|(other, _)| other == id);
            let machine = known.map(|(_, machine)| machine.clone());
            machine.ok_or_else(|| format!("{} is not known", self.name(*id)))
        };
        Ok(Machines {
            all: nodes.iter().map(machine).collect::<Result<_, _>>()?,
            of_rank,
            ways: self.ways(&nodes)?,
        })
    }

    fn ways(&self, nodes: &[NodeId]) -> Result<Vec<MachineLink>, String> {
        let at = |id: NodeId| nodes.iter().position(|other| *other == id);
        let way = |(from, to): (NodeId, NodeId)| {
            let unknown = || {
                let (from, to) = (self.name(from), self.name(to));
                format!(
                    "no way from {from} to {to} answers: `paceline doctor --peer {to}` on {from}"
                )
            };
            let path = self.way(from, to).ok_or_else(unknown)?;
            Ok(MachineLink {
                a: at(from).unwrap_or(0),
                b: at(to).unwrap_or(0),
                round_trip: path.latency_us as f64 / 1e6,
                bytes_per_s: path.bytes_per_s.unwrap_or(1) as f64,
            })
        };
        pairs(nodes).map(way).collect()
    }
}

/// The nodes of `ranks`, each once, and the place of each rank's node among them.
fn each_once(ranks: &[NodeId]) -> (Vec<NodeId>, Vec<usize>) {
    let mut nodes: Vec<NodeId> = Vec::new();
    let place = |id: &NodeId| {
        nodes.iter().position(|node| node == id).unwrap_or_else(|| {
            nodes.push(*id);
            nodes.len() - 1
        })
    };
    let of_rank = ranks.iter().map(place).collect();
    (nodes, of_rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_two_ranks_is_one_machine() {
        let node = |number: u8| NodeId([number; 16]);
        let of = |ranks: &[u8]| each_once(&ranks.iter().copied().map(node).collect::<Vec<_>>());
        assert_eq!(of(&[]), (vec![], vec![]));
        assert_eq!(
            of(&[1, 2, 3]),
            ([1, 2, 3].map(node).to_vec(), vec![0, 1, 2])
        );
        assert_eq!(of(&[1, 2, 1]), ([1, 2].map(node).to_vec(), vec![0, 1, 0]));
    }
}
