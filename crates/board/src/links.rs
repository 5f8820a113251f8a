//! Links between nodes: the network path in use of each pair, with its current traffic.
//!
//! Nodes measure and share latency and bandwidth. Traffic is that of the path's outgoing interface,
//! so it includes all that leaves there. It is absent for paths without an own interface, such as
//! loopback. Workers count the model traffic between two nodes.

use std::collections::BTreeMap;

use paceline_cluster::nodes::agent::NodePaths;
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::paths::Path;
use paceline_serve::MetricSample;
use paceline_serve::events::LinkReport;
use serde::Serialize;
use serde_json::Value;

use crate::label::label;
use crate::traffic::PairRates;

/// Maximum reported links: those of 16 nodes, each with each.
const LINKS_MAX: usize = 240;

/// A link as shown by the dashboard.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LinkSummary {
    /// Name of the measuring node.
    pub(super) from: String,
    /// Name of the other node.
    pub(super) to: String,
    #[serde(flatten)]
    pub(super) way: LinkReport,
    /// Current bytes a second sent on the path's interface.
    #[serde(skip_serializing_if = "Option::is_none")]
    sent_bytes_s: Option<f64>,
    /// Current bytes a second that model workers send from one to the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    model_bytes_s: Option<f64>,
}

/// The path in use of each pair of live nodes, by name; `None` if none works. Omits pairs that were
/// never measured.
pub(super) fn used(nodes: &[NodePaths]) -> BTreeMap<(String, String), Option<Path>> {
    let lives = |name: &str| {
        let node = nodes.iter().find(|it| it.node.facts.name == name);
        node.is_some_and(|it| it.node.state == Life::Alive)
    };
    let mut used = BTreeMap::new();
    for it in nodes.iter().filter(|it| it.node.state == Life::Alive) {
        for way in it.paths.iter().filter(|way| lives(&way.to_name)) {
            let pair = (it.node.facts.name.clone(), way.to_name.clone());
            let path = used.entry(pair).or_insert(None);
            if way.path.preferred && way.path.up {
                *path = Some(way.path.clone());
            }
        }
    }
    used
}

/// A path in the form of events.
pub(super) fn link(path: &Path) -> LinkReport {
    let interface = match path.interface.as_str() {
        "" => path.local.to_string(),
        name => name.to_owned(),
    };
    LinkReport {
        interface,
        latency_s: path.latency_us as f64 / 1e6,
        bytes_per_s: path.bytes_per_s,
    }
}

/// The links of `ways`, ordered by node names. `nodes` are the page's, with telemetry; `traffic` is
/// the model traffic.
pub(super) fn told(ways: &[NodePaths], nodes: &[Value], traffic: &PairRates) -> Vec<LinkSummary> {
    let links = used(ways).into_iter().filter_map(|(pair, path)| {
        let way = link(&path?);
        let sent_bytes_s = sent(nodes, &pair.0, &way.interface);
        let model_bytes_s = traffic.get(&pair).copied();
        let (from, to) = pair;
        Some(LinkSummary {
            from,
            to,
            way,
            sent_bytes_s,
            model_bytes_s,
        })
    });
    links.take(LINKS_MAX).collect()
}

/// Bytes a second that a node sends on an interface.
fn sent(nodes: &[Value], name: &str, interface: &str) -> Option<f64> {
    let node = nodes.iter().find(|node| node["name"] == name)?;
    let mut networks = node["telemetry"]["networks"].as_array()?.iter();
    let network = networks.find(|network| network["name"] == interface)?;
    network["sent_bytes_s"].as_f64()
}

/// Gauges of this node's links, for `/metrics`; this node is the first.
pub(super) fn facts(ways: &[NodePaths]) -> Vec<MetricSample> {
    let own = ways.first().map(|it| it.node.facts.name.clone());
    let mut links = told(ways, &[], &PairRates::new());
    links.retain(|link| Some(&link.from) == own.as_ref());
    let fact = |name, help, link: &LinkSummary, value| MetricSample {
        name,
        help,
        labels: labels(link),
        value,
    };
    let latency = "Shortest round trip of the last measurements of a link";
    let latencies = links
        .iter()
        .map(|link| fact("link_latency_seconds", latency, link, link.way.latency_s));
    let bandwidth = "Bytes a second that a link took when it was measured";
    let bandwidths = links.iter().filter_map(|link| {
        let value = link.way.bytes_per_s? as f64;
        let name = "link_bandwidth_bytes_per_second";
        Some(fact(name, bandwidth, link, value))
    });
    latencies.chain(bandwidths).collect()
}

fn labels(link: &LinkSummary) -> String {
    let all = [
        ("from", &link.from),
        ("to", &link.to),
        ("interface", &link.way.interface),
    ];
    all.map(|(name, value)| label(name, value)).join(",")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use paceline_cluster::nodes::NodeId;
    use paceline_cluster::nodes::agent::{NetworkPath, NodeFacts, NodeView};
    use serde_json::json;
    use std::net::{IpAddr, SocketAddr};

    /// A live node with a path to another over `eth0`.
    pub(in super::super) fn ways(
        (number, name): (u8, &str),
        (to, to_name): (u8, &str),
        latency_us: u64,
    ) -> NodePaths {
        let path = Path {
            to: NodeId([to; 16]),
            interface: "eth0".into(),
            local: IpAddr::from([10, 0, 0, number]),
            remote: SocketAddr::from(([10, 0, 0, to], 52416)),
            latency_us,
            bytes_per_s: None,
            up: true,
            preferred: true,
        };
        let node = NodeView {
            id: NodeId([number; 16]),
            state: Life::Alive,
            found_by: "beacon".into(),
            heard_by: Vec::new(),
            linked: true,
            slow_ms: None,
            facts: NodeFacts {
                name: name.to_owned(),
                ..NodeFacts::default()
            },
        };
        let to_name = to_name.to_owned();
        NodePaths {
            node,
            paths: vec![NetworkPath { to_name, path }],
        }
    }

    #[test]
    fn a_link_has_its_way_and_the_traffic_of_its_interface() {
        let mut all = [ways((1, "a"), (2, "b"), 120), ways((2, "b"), (1, "a"), 130)];
        all[0].paths[0].path.bytes_per_s = Some(940_000_000);
        let networks = json!([
            {"name": "wlan0", "received_bytes_s": 1.0, "sent_bytes_s": 2.0},
            {"name": "eth0", "received_bytes_s": 3.0, "sent_bytes_s": 4.0},
        ]);
        let nodes = [
            json!({"name": "a", "telemetry": {"networks": networks}}),
            json!({"name": "b"}),
        ];
        let expected = json!([
            {"from": "a", "to": "b", "interface": "eth0", "latency_s": 0.00012,
             "bytes_per_s": 940_000_000, "sent_bytes_s": 4.0, "model_bytes_s": 3.5},
            {"from": "b", "to": "a", "interface": "eth0", "latency_s": 0.00013},
        ]);
        let traffic = PairRates::from([(("a".to_owned(), "b".to_owned()), 3.5)]);
        assert_eq!(json!(told(&all, &nodes, &traffic)), expected);
    }

    #[test]
    fn ways_that_are_down_or_spare_and_nodes_that_went_have_no_link() {
        let mut all = [ways((1, "a"), (2, "b"), 120), ways((2, "b"), (1, "a"), 130)];
        all[0].paths[0].path.up = false;
        all[1].paths[0].path.preferred = false;
        assert_eq!(told(&all, &[], &PairRates::new()), []);
        assert_eq!(used(&all).len(), 2, "they were measured");
        all[0].node.state = Life::Dead;
        assert!(used(&all).is_empty());
    }
}
