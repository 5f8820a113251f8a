//! Thunderbolt cabling between machines: a picture, JSON, and setup commands.

use paceline_launch::hostfile::Hostfile;
use paceline_launch::topology::{
    Addresses, Cable, CableEnd, Error, Graph, ProbedMachine, TopologyChoice, best_ring,
    missing_for_ring, setup,
};
use paceline_plan::draw::{Edge, NetworkDiagram};
use serde_json::{Value, json};

/// The cabling to set up.
#[derive(Clone, Copy, Debug)]
pub struct CablingSetup<'a> {
    pub graph: &'a Graph,
    pub addresses: &'a Addresses,
    /// Current state of the hosts.
    pub machines: &'a [ProbedMachine],
    /// Whether to remove the setup instead.
    pub undo: bool,
}

impl CablingSetup<'_> {
    /// The commands of each host.
    pub fn commands(&self) -> Vec<Vec<String>> {
        let of = |host| match self.undo {
            false => setup::commands(self.graph, self.addresses, host),
            true => setup::undo(self.graph, self.addresses, host),
        };
        (0..self.graph.hosts.len()).map(of).collect()
    }

    /// Hosts whose `sudo` requires a password.
    pub fn without_sudo(&self) -> Vec<String> {
        let all = self.graph.hosts.iter().zip(self.machines);
        let without = all.filter(|(_, machine)| !machine.can_sudo);
        without.map(|(host, _)| host.clone()).collect()
    }
}

/// A drawing of the hosts on a circle, cables labelled with interfaces.
pub fn picture(graph: &Graph) -> String {
    let edge = |Cable { from, to }: &Cable| Edge {
        from: from.host,
        to: to.host,
        label: format!("{}/{}", graph.interface(*from), graph.interface(*to)),
    };
    let net = NetworkDiagram {
        title: "Cables between machines".to_owned(),
        nodes: graph.hosts.clone(),
        edges: graph.cables.iter().chain(&graph.loops).map(edge).collect(),
    };
    net.svg()
}

fn hostfile(file: &Hostfile) -> Value {
    serde_json::to_value(file).expect("a hostfile always has a JSON form")
}

/// An Ethernet topology as JSON.
pub fn ethernet(file: &Hostfile) -> Value {
    json!({"over": "ethernet", "hostfile": hostfile(file)})
}

/// A Thunderbolt topology as JSON: cables, possible backends, and the choice.
///
/// # Errors
/// [`Error`] of a graph that is too large.
pub fn thunderbolt(setup: &CablingSetup<'_>, choice: &TopologyChoice) -> Result<Value, Error> {
    let graph = setup.graph;
    let names = |pairs: Vec<(usize, usize)>| -> Vec<Value> {
        let each = pairs.into_iter().map(|pair| json!(graph.pair(pair)));
        each.collect()
    };
    let ring = best_ring(graph)?.map(|ring| {
        let order: Vec<&String> = ring.order.iter().map(|host| &graph.hosts[*host]).collect();
        json!({"order": order, "cables": ring.cables})
    });
    let setups = graph.hosts.iter().zip(setup.commands());
    let setups: serde_json::Map<String, Value> = setups
        .map(|(host, commands)| (host.clone(), json!(commands)))
        .collect();
    let hosts = graph.hosts.iter().zip(setup.machines);
    Ok(json!({
        "over": "thunderbolt",
        "backend": choice.backend.to_string(),
        "hosts": hosts.map(|(name, machine)| host(name, machine)).collect::<Vec<_>>(),
        "cables": cables(setup),
        "missing_for_mesh": names(graph.missing_for_mesh()),
        "ring": ring,
        "missing_for_ring": names(missing_for_ring(graph)),
        "setup": setups,
        "hostfile": hostfile(&choice.hostfile),
    }))
}

fn host(name: &str, machine: &ProbedMachine) -> Value {
    let ports = machine
        .ports
        .iter()
        .map(|port| json!({"interface": port.interface, "uuid": port.uuid, "peer": port.peer}));
    json!({
        "ssh": name,
        "address": machine.address,
        "rdma": machine.has_rdma,
        "ports": ports.collect::<Vec<_>>(),
    })
}

fn cables(setup: &CablingSetup<'_>) -> Vec<Value> {
    let graph = setup.graph;
    let end = |end: CableEnd, address: Option<String>| {
        let host = &graph.hosts[end.host];
        json!({"host": host, "interface": graph.interface(end), "address": address})
    };
    let all = setup.addresses.cables.iter().map(|(Cable { from, to }, a, b)| {
        json!({"from": end(*from, Some(a.to_string())), "to": end(*to, Some(b.to_string()))})
    });
    let loops = graph
        .loops
        .iter()
        .map(|Cable { from, to }| json!({"from": end(*from, None), "to": end(*to, None)}));
    all.chain(loops).collect()
}
