//! Where an instance's workers run: on the nodes that its record names, or on others of them when
//! one is gone.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::{Agent, Channel};
use paceline_cluster::nodes::member::Life;
use paceline_cluster::nodes::paths::Wanted;

use super::CREW;
use super::flaps::Flaps;
use crate::crew::host::{HostSpec, host};
use crate::crew::line::{Broken, Line, MESSAGE_BYTES_MAX, pair};
use crate::crew::remote::{Place, Places};

/// Longest wait for a channel to a node: two handshakes over a slow link.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// A channel to another node.
#[derive(Debug)]
pub(super) struct Wire(pub(super) Channel);

impl Line for Wire {
    fn send(&self, message: &[u8]) -> Result<(), Broken> {
        self.0.send(message).map_err(Broken::new)
    }

    fn receive(&self, wait: Duration) -> Result<Option<Vec<u8>>, Broken> {
        self.0.recv(MESSAGE_BYTES_MAX, wait).map_err(Broken::new)
    }

    fn close(&self) {
        self.0.close();
    }

    fn own_addr(&self) -> Option<SocketAddr> {
        self.0.own_addr().ok()
    }
}

/// Nodes of an instance, by rank.
pub(super) struct Nodes {
    pub(super) agent: Agent,
    pub(super) nodes: Vec<NodeId>,
    pub(super) host: Arc<HostSpec>,
    /// Workers that each node of the instance has lost so far.
    pub(super) flaps: Arc<Flaps>,
    /// The node that holds the second worker, the spare, of each rank that has one.
    pub(super) spares: Mutex<BTreeMap<Rank, NodeId>>,
}

impl Nodes {
    /// The nodes to try for a rank: its own, then the others that live, each rank from another one
    /// on, so that the ranks of a lost node are shared out. Those that lose workers again and again
    /// come last.
    fn candidates(&self, rank: Rank) -> Vec<NodeId> {
        let first = rank.0 as usize % self.nodes.len();
        let others = self.nodes.iter().cycle().skip(first).take(self.nodes.len());
        let lives = |id: &&NodeId| **id == self.agent.id() || self.agent.life(**id) != Life::Dead;
        let mut all: Vec<NodeId> = others.filter(lives).copied().collect();
        // A node that is left out for its losses comes last: it is better than none.
        let now = Instant::now();
        all.sort_by_key(|id| self.flaps.is_out(*id, now));
        all
    }

    fn name(&self, id: NodeId) -> String {
        let known = self.agent.nodes().into_iter().find(|node| node.id == id);
        known.map_or_else(|| id.to_string(), |node| node.facts.name)
    }

    fn reach(&self, id: NodeId) -> Result<Place, String> {
        let name = self.name(id);
        if id == self.agent.id() {
            return here(name, id, &self.host);
        }
        let opened = self.agent.open(id, CREW, OPEN_LIMIT);
        let channel = opened.map_err(|error| format!("{name}: {error}"))?;
        let (node, line) = (id, Box::new(Wire(channel)));
        Ok(Place { name, node, line })
    }
}

/// This machine as a place.
fn here(name: String, node: NodeId, spec: &Arc<HostSpec>) -> Result<Place, String> {
    let (line, there) = pair();
    let spec = Arc::clone(spec);
    // The thread ends with the line; how is told at the other end.
    let run = move || drop(host(&there, &spec));
    let started = std::thread::Builder::new()
        .name("host".to_owned())
        .spawn(run);
    started.map_err(|error| format!("{name}: cannot start a thread: {error}"))?;
    let line = Box::new(line);
    Ok(Place { name, node, line })
}

impl Places for Nodes {
    fn open(&self, rank: Rank) -> Result<Place, String> {
        let mut reasons = Vec::new();
        self.flaps.vacated(rank);
        for id in self.candidates(rank) {
            match self.reach(id) {
                Ok(place) => {
                    self.flaps.started(rank, id);
                    return Ok(place);
                }
                Err(reason) => reasons.push(reason),
            }
        }
        match reasons.is_empty() {
            true => Err("none of its nodes lives".to_owned()),
            false => Err(reasons.join("; ")),
        }
    }

    fn open_spare(&self, rank: Rank) -> Result<Place, String> {
        let mut reason = "no other node lives".to_owned();
        for id in self.spare_candidates(rank) {
            match self.reach(id) {
                Ok(place) => {
                    lock(&self.spares).insert(rank, id);
                    return Ok(place);
                }
                Err(why) => reason = why,
            }
        }
        Err(reason)
    }

    fn promoted(&self, rank: Rank) {
        self.flaps.vacated(rank);
        if let Some(node) = lock(&self.spares).remove(&rank) {
            self.flaps.started(rank, node);
        }
    }

    fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr> {
        self.agent.route(from, to)
    }

    fn settle(&self, nodes: &[NodeId]) {
        self.agent.measure(nodes, Wanted::Latency);
    }
}

impl Nodes {
    /// The nodes to try for a second worker of a rank, those with the fewest first.
    fn spare_candidates(&self, rank: Rank) -> Vec<NodeId> {
        let at = self.flaps.node_of(rank);
        let now = Instant::now();
        let mut all = self.candidates(rank);
        all.retain(|id| Some(*id) != at && !self.flaps.is_out(*id, now));
        let spares = lock(&self.spares);
        all.sort_by_key(|id| spares.values().filter(|node| *node == id).count());
        all
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} nodes", self.nodes.len())
    }
}
