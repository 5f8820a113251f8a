//! Cables between machines.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Error, Port};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CableEnd {
    /// Index of the host.
    pub host: usize,
    /// Index of the port among the host's.
    pub port: usize,
}

/// A cable between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cable {
    /// The end listed first.
    pub from: CableEnd,
    pub to: CableEnd,
}

/// Hosts, their ports, and the cables between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// Names of the hosts for `ssh`.
    pub hosts: Vec<String>,
    pub ports: Vec<Vec<Port>>,
    /// Cables between different hosts, in the order of hosts and ports.
    pub cables: Vec<Cable>,
    /// Cables from a host to itself.
    pub loops: Vec<Cable>,
}

impl Graph {
    /// Finds the cables. A cable that only one end reports counts; a cable to an unlisted host does
    /// not.
    pub fn new(hosts: Vec<String>, ports: Vec<Vec<Port>>) -> Result<Self, Error> {
        let mut ends: BTreeMap<&str, CableEnd> = BTreeMap::new();
        for (host, list) in ports.iter().enumerate() {
            for (port, described) in list.iter().enumerate() {
                let known = ends.insert(&described.uuid, CableEnd { host, port });
                if let Some(known) = known.filter(|known| known.host != host) {
                    let (first, second) = (hosts[known.host].clone(), hosts[host].clone());
                    return Err(Error::SameMachine { first, second });
                }
            }
        }
        let (mut cables, mut loops, mut taken) = (Vec::new(), Vec::new(), Vec::new());
        for (host, list) in ports.iter().enumerate() {
            for (port, described) in list.iter().enumerate() {
                let from = CableEnd { host, port };
                let to = described.peer.as_deref().and_then(|peer| ends.get(peer));
                let Some(to) = to.copied().filter(|_| !taken.contains(&from)) else {
                    continue;
                };
                taken.extend([from, to]);
                let kind = if to.host == host {
                    &mut loops
                } else {
                    &mut cables
                };
                kind.push(Cable { from, to });
            }
        }
        Ok(Self {
            hosts,
            ports,
            cables,
            loops,
        })
    }

    /// Number of cables between each two hosts.
    pub fn counts(&self) -> Vec<Vec<u32>> {
        let mut counts = vec![vec![0; self.hosts.len()]; self.hosts.len()];
        for Cable { from, to } in &self.cables {
            counts[from.host][to.host] += 1;
            counts[to.host][from.host] += 1;
        }
        counts
    }

    /// The network interface at an end.
    pub fn interface(&self, end: CableEnd) -> &str {
        &self.ports[end.host][end.port].interface
    }

    /// Names of two hosts.
    pub fn pair(&self, (a, b): (usize, usize)) -> (String, String) {
        (self.hosts[a].clone(), self.hosts[b].clone())
    }

    /// Pairs of hosts without a cable.
    pub fn missing_for_mesh(&self) -> Vec<(usize, usize)> {
        let counts = self.counts();
        let all = 0..self.hosts.len();
        let pairs = all.clone().flat_map(|a| all.clone().map(move |b| (a, b)));
        pairs
            .filter(|(a, b)| a < b && counts[*a][*b] == 0)
            .collect()
    }

    /// Formats a graph for `dot`, in the layout of `mlx.distributed_config --dot`. A cable from a
    /// host to itself is drawn once.
    pub fn dot(&self) -> String {
        let mut text = String::from("graph G {\n  node [shape=rectangle];\n");
        for (host, name) in self.hosts.iter().enumerate() {
            let label = name.replace('\\', "\\\\").replace('"', "\\\"");
            let _ = writeln!(text, "  {} [label=\"{label}\"];", id(host));
        }
        let mut cables: Vec<Cable> = self.cables.iter().chain(&self.loops).copied().collect();
        cables.sort_by_key(|cable| cable.from);
        for Cable { from, to } in cables {
            let (a, b) = (id(from.host), id(to.host));
            let (here, there) = (self.interface(from), self.interface(to));
            let _ = writeln!(text, "  {a} -- {b} [label=\"{here}/{there}\"]");
        }
        text + "}\n"
    }
}

/// a to z, then ab, bb: digits in base 26, lowest first.
fn id(mut host: usize) -> String {
    let mut text = String::new();
    loop {
        text.push(char::from(
            b'a' + u8::try_from(host % 26).expect("below 26"),
        ));
        host /= 26;
        if host == 0 {
            return text;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A graph of pairs of hosts, a cable each, with interfaces `en2` and following.
    pub(in super::super) fn graph(hosts: usize, cables: &[(usize, usize)]) -> Graph {
        let mut ports = vec![Vec::new(); hosts];
        for (number, (a, b)) in cables.iter().enumerate() {
            for (host, own, other) in [(*a, "a", "b"), (*b, "b", "a")] {
                let port = Port {
                    interface: format!("en{}", ports[host].len() + 2),
                    uuid: format!("{number}{own}"),
                    peer: Some(format!("{number}{other}")),
                };
                ports[host].push(port);
            }
        }
        let hosts = (0..hosts).map(|host| format!("h{host}")).collect();
        Graph::new(hosts, ports).unwrap()
    }

    #[test]
    fn cables_are_found_once() {
        let graph = graph(3, &[(0, 1), (1, 0), (2, 2)]);
        assert_eq!((graph.cables.len(), graph.loops.len()), (2, 1));
        assert_eq!(graph.counts(), [[0, 2, 0], [2, 0, 0], [0, 0, 0]]);
        assert_eq!(graph.missing_for_mesh(), [(0, 2), (1, 2)]);
    }

    #[test]
    fn a_loop_is_drawn_once() {
        let graph = graph(2, &[(0, 0), (0, 1)]);
        let expected = "graph G {\n  node [shape=rectangle];\n  a [label=\"h0\"];\n  \
                        b [label=\"h1\"];\n  a -- a [label=\"en2/en3\"]\n  \
                        a -- b [label=\"en4/en2\"]\n}\n";
        assert_eq!(graph.dot(), expected);
    }

    #[test]
    fn an_end_that_does_not_report_its_cable_is_still_connected() {
        let mut ports = graph(2, &[(0, 1)]).ports;
        ports[0][0].peer = None;
        let graph = Graph::new(vec!["a".into(), "b".into()], ports).unwrap();
        assert_eq!(graph.counts(), [[0, 1], [1, 0]]);
    }

    #[test]
    fn two_names_of_one_machine_are_noticed() {
        let ports = graph(2, &[(0, 1)]).ports;
        let ports = vec![ports[0].clone(), ports[1].clone(), ports[0].clone()];
        let hosts = ["a", "b", "a.local"].map(str::to_owned).to_vec();
        let error = Graph::new(hosts, ports).unwrap_err();
        assert_eq!(error.to_string(), "a and a.local are the same machine");
    }

    #[test]
    fn ids_go_on_after_z() {
        assert_eq!([0, 25, 26, 27, 52].map(id), ["a", "z", "ab", "bb", "ac"]);
    }
}
