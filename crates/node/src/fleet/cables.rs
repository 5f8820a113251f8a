//! RDMA cables between the ranks of an instance: which may be used, and what became of them.

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::rdma::Cable;

use paceline_worker::messages::{PeerWire, RankCables, RankFacts};

/// The cables between ranks of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CablePlan {
    /// Cables that both ends trust.
    pub(super) trusted: RankCables,
    /// Ranks all of whose cables an end does not trust: the pair, and the first cable.
    untrusted: Vec<([usize; 2], Cable)>,
    /// Whether TCP between the ranks is not encrypted, by `up --trusted-interface`.
    pub(super) is_plain: bool,
}

impl CablePlan {
    /// The plan for ranks on `nodes`, by the cables between two nodes.
    pub(super) fn new(nodes: &[NodeId], between: impl Fn(NodeId, NodeId) -> Vec<Cable>) -> Self {
        let size = nodes.len();
        let mut devices = vec![vec![Vec::new(); size]; size];
        let mut untrusted = Vec::new();
        for (a, b) in (0..size).flat_map(|b| (0..b).map(move |a| (a, b))) {
            if nodes[a] == nodes[b] {
                continue;
            }
            for cable in between(nodes[a], nodes[b]) {
                if cable.trusted == [true; 2] {
                    let [here, there] = cable.devices;
                    devices[a][b].push(here);
                    devices[b][a].push(there);
                } else if !untrusted.iter().any(|(pair, _)| *pair == [a, b]) {
                    untrusted.push(([a, b], cable));
                }
            }
        }
        untrusted.retain(|([a, b], _): &([usize; 2], Cable)| devices[*a][*b].is_empty());
        let nodes = nodes.to_vec();
        Self {
            trusted: RankCables {
                devices,
                nodes,
                refused: Vec::new(),
            },
            untrusted,
            is_plain: false,
        }
    }

    /// The transports between ranks with cables, for people; `None` without a cable. `name` names a
    /// node; `facts` are those of the ranks.
    pub(super) fn told(
        &self,
        name: impl Fn(NodeId) -> String,
        facts: &[RankFacts],
    ) -> Option<String> {
        let RankCables { devices, nodes, .. } = &self.trusted;
        let pairs = (0..nodes.len()).flat_map(|b| (0..b).map(move |a| [a, b]));
        let names = |pair: [usize; 2]| pair.map(|rank| name(nodes[rank]));
        let trusted = pairs.filter(|[a, b]| !devices[*a][*b].is_empty());
        let trusted = trusted.map(|pair| self.told_of_pair(pair, &names(pair), facts));
        let untrusted = self.untrusted.iter();
        let untrusted = untrusted.map(|(pair, cable)| self.told_untrusted(&names(*pair), cable));
        let all: Vec<String> = trusted.chain(untrusted).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    const fn tcp(&self) -> &'static str {
        if self.is_plain {
            "TCP"
        } else {
            "encrypted TCP"
        }
    }

    /// The transport of two ranks with a trusted cable, and why some cable is not used.
    fn told_of_pair(
        &self,
        [a, b]: [usize; 2],
        [from, to]: &[String; 2],
        facts: &[RankFacts],
    ) -> String {
        let wire = |rank: usize, peer: usize| -> Option<&PeerWire> {
            let mut wires = facts.get(rank)?.wires.iter();
            wires.find(|wire| wire.peer as usize == peer)
        };
        let (own, other) = (wire(a, b), wire(b, a));
        let reason = |at: &str, wire: Option<&PeerWire>| {
            let reason = wire?.reason.as_ref()?;
            Some(format!(" ({at}: {reason})"))
        };
        let why = reason(from, own).or_else(|| reason(to, other));
        let transport = match own.map_or(0, |wire| wire.cables) {
            0 => self.tcp(),
            _ => "RDMA, not encrypted,",
        };
        let why = why.unwrap_or_default();
        format!("{transport} between {from} and {to}{why}")
    }

    /// The transport of two ranks with a cable that is not trusted, and the commands that trust it.
    fn told_untrusted(&self, [from, to]: &[String; 2], cable: &Cable) -> String {
        let [here, there] = &cable.devices;
        let commands = [(from, here, to), (to, there, from)]
            .map(|(at, device, peer)| format!("`paceline nodes trust {device}:{peer}` on {at}"));
        let missing = commands.into_iter().zip(cable.trusted);
        let missing = missing.filter(|(_, is_trusted)| !is_trusted);
        let missing: Vec<String> = missing.map(|(command, _)| command).collect();
        let (tcp, missing) = (self.tcp(), missing.join(" and "));
        format!("{tcp} between {from} and {to}: for RDMA, which is not encrypted, {missing}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeId; 3] = [NodeId([1; 16]), NodeId([2; 16]), NodeId([3; 16])];

    fn cable(here: &str, there: &str, trusted: [bool; 2]) -> Cable {
        Cable {
            devices: [here.to_owned(), there.to_owned()],
            trusted,
        }
    }

    /// Two cables between the first two nodes, one more that an end does not trust, and one from
    /// the second to the third.
    fn between(a: NodeId, b: NodeId) -> Vec<Cable> {
        match (a.0[0], b.0[0]) {
            (1, 2) => vec![
                cable("en3", "en5", [true; 2]),
                cable("en4", "en6", [true; 2]),
            ],
            (2, 3) => vec![cable("en7", "en3", [true, false])],
            _ => Vec::new(),
        }
    }

    fn rank(wires: &[(u32, u32, Option<&str>)]) -> RankFacts {
        let wire = |(peer, cables, reason): &(u32, u32, Option<&str>)| PeerWire {
            peer: *peer,
            cables: *cables,
            reason: reason.map(str::to_owned),
        };
        RankFacts {
            pid: 1,
            weight_bytes: 0,
            packings: 1,
            threads: 1,
            instruction_set: String::new(),
            wires: wires.iter().map(wire).collect(),
        }
    }

    fn name(node: NodeId) -> String {
        format!("mac{}", node.0[0])
    }

    #[test]
    fn pairs_use_the_cables_that_both_ends_trust() {
        let plan = CablePlan::new(&NODES, between);
        let rows = &plan.trusted.devices;
        assert_eq!(rows[0], [&[][..], &["en3", "en4"], &[]]);
        assert_eq!(rows[1], [&["en5", "en6"][..], &[], &[]]);
        assert_eq!(rows[2], [[""; 0]; 3], "one end does not trust it");
        let twice = [NODES[0], NODES[0], NODES[1]];
        let plan = CablePlan::new(&twice, between);
        assert_eq!(plan.trusted.devices[0], [&[][..], &[], &["en3", "en4"]]);
        assert_eq!(plan.trusted.devices[1], plan.trusted.devices[0]);
        let none = CablePlan::new(&NODES, |_, _| Vec::new());
        assert_eq!(none.told(name, &[]), None);
    }

    #[test]
    fn what_became_of_the_cables_is_told() {
        let plan = CablePlan::new(&NODES, between);
        let other = "; encrypted TCP between mac2 and mac3: for RDMA, which is not encrypted, \
                     `paceline nodes trust en3:mac2` on mac3";
        let used = [rank(&[(1, 2, None)]), rank(&[(0, 2, None)]), rank(&[])];
        let expected = format!("RDMA, not encrypted, between mac1 and mac2{other}");
        assert_eq!(plan.told(name, &used), Some(expected));
        let failed = [
            rank(&[(1, 0, None)]),
            rank(&[(0, 0, Some("port 1 is down"))]),
        ];
        let expected = format!("encrypted TCP between mac1 and mac2 (mac2: port 1 is down){other}");
        assert_eq!(plan.told(name, &failed), Some(expected));
        let plain = CablePlan {
            is_plain: true,
            ..plan
        };
        let told = plain.told(name, &failed).unwrap();
        assert!(told.starts_with("TCP between mac1"), "{told}");
    }
}
