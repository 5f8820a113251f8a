//! Upstreams of the cluster's nodes: each node reaches those of the others through these nodes.
//!
//! ```text
//! client --> own API --> channel "upstreams" --> other node --> its upstream
//! ```
//!
//! A node with upstreams writes an entry into the shared map. The others add that node as an
//! upstream of their own, whose models are those of its upstreams. Its key and address stay there.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::Duration;

use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::registers::RegisterKey;
use paceline_node::fleet::Fleet;
use paceline_node::tunnel;
use paceline_serve::{ModelRegistry, UpstreamDialer, UpstreamSpec};

/// Name of the service, and of the entries before a node's id.
const SERVICE: &str = "upstreams";

/// Longest wait for a change of the map; also the time in which the thread ends.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Timeout of opening a channel.
const OPEN_LIMIT: Duration = Duration::from_secs(3);

/// Shares this node's upstreams with the cluster, and adds those of the other nodes while `fleet`
/// exists.
pub(crate) fn share(agent: &Agent, doors: &ModelRegistry, fleet: &Arc<Fleet>) -> io::Result<()> {
    let own = doors.clone();
    agent.serve(SERVICE, move |channel| {
        let served = UnixStream::pair().and_then(|(here, there)| {
            own.serve_upstreams(there)?;
            tunnel::bridge(&channel, &here, &mut || true)
        });
        if served.is_err() {
            channel.close(); // the other end sees the closed channel
        }
    });
    let has_own = doors.upstreams().has_any();
    let (agent, doors, fleet) = (agent.clone(), doors.clone(), Arc::downgrade(fleet));
    let thread = std::thread::Builder::new().name(SERVICE.to_owned());
    let run = move || follow(&agent, &doors, &fleet, has_own);
    thread.spawn(run).map(drop)
}

fn key(node: NodeId) -> RegisterKey {
    RegisterKey::Named(format!("{SERVICE}/{node}"))
}

/// Keeps this node's entry, adds other nodes with entries, and removes those without.
fn follow(agent: &Agent, doors: &ModelRegistry, fleet: &Weak<Fleet>, has_own: bool) {
    let mut changes = agent.watch();
    let mut added: BTreeMap<NodeId, String> = BTreeMap::new();
    while fleet.strong_count() > 0 {
        let map = agent.map();
        let has_entry = |node: NodeId| map.get(&key(node)).is_some();
        if has_entry(agent.id()) != has_own {
            // A refused write is repeated with the next look.
            let _ = agent.write(key(agent.id()), 0, has_own.then(|| "true".to_owned()));
        }
        let mut nodes = agent.nodes();
        nodes.retain(|node| node.id != agent.id() && has_entry(node.id));
        added.retain(|id, name| {
            let stays = nodes.iter().any(|node| node.id == *id);
            if !stays {
                doors.upstreams().remove_node(name);
            }
            stays
        });
        for node in nodes {
            added.entry(node.id).or_insert_with(|| {
                let dial = dialer(agent.clone(), node.id);
                let name = node.facts.name;
                doors
                    .upstreams()
                    .add(UpstreamSpec::of_node(name.clone(), dial));
                name
            });
        }
        changes.wait(LOOK_EVERY);
    }
}

/// Opens channels to a node, each with a thread that ends with its stream.
fn dialer(agent: Agent, node: NodeId) -> UpstreamDialer {
    Arc::new(move || {
        let channel = agent
            .open(node, SERVICE, OPEN_LIMIT)
            .map_err(io::Error::other)?;
        let (here, there) = UnixStream::pair()?;
        let thread = std::thread::Builder::new().name(SERVICE.to_owned());
        thread.spawn(move || drop(tunnel::bridge(&channel, &here, &mut || true)))?;
        Ok(there)
    })
}
