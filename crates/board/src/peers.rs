//! Status reports of other nodes, requested while a client views the dashboard.
//!
//! A viewed node opens a channel to each other live node, which then sends its report once a
//! second. After [`INTEREST`] without views the channels are closed, so an unviewed cluster sends
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_cluster::nodes::NodeId;
use paceline_cluster::nodes::agent::ServiceChannel;
use paceline_cluster::nodes::member::Life;
use serde_json::Value;

use crate::dashboard::Inner;

/// Name of the report service.
pub(super) const SERVICE: &str = "board";

/// Interval of reports.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// How long channels stay open after the last view.
const INTEREST: Duration = Duration::from_secs(10);

/// Age from which a report is dropped.
const STALE: Duration = Duration::from_secs(6);

/// Maximum bytes of a report: 256 requests and the telemetry of 1,024 cores.
const PART_BYTES_MAX: usize = 512 << 10;

/// Timeout of opening a channel.
const OPEN_LIMIT: Duration = Duration::from_secs(3);

/// Maximum nodes polled at the same time; each takes a thread.
const PEERS_MAX: usize = 64;

/// Reports of other nodes.
#[derive(Default)]
pub(super) struct PeerReports(Mutex<PeerReportsState>);

#[derive(Default)]
struct PeerReportsState {
    looked: Option<Instant>,
    /// Nodes with a reading thread.
    asked: BTreeSet<NodeId>,
    parts: BTreeMap<NodeId, (Instant, Value)>,
}

/// Sends this node's report until the other end closes.
pub(super) fn answer(inner: &Weak<Inner>, channel: &ServiceChannel) {
    loop {
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_over()) else {
            return channel.close();
        };
        let part = inner.own_part().to_string();
        drop(inner);
        if part.len() > PART_BYTES_MAX || channel.send(part.as_bytes()).is_err() {
            return channel.close();
        }
        // The other end sends nothing: waits for the interval, or until it closes.
        if channel.recv(1, TELL_EVERY).is_err() {
            return;
        }
    }
}

impl PeerReports {
    /// Records a view, and starts to poll further nodes.
    pub(super) fn poll(&self, inner: &Arc<Inner>) {
        lock(&self.0).looked = Some(Instant::now());
        let Some(agent) = inner.agent.get() else {
            return;
        };
        let own = agent.id();
        for node in agent.nodes() {
            let is_wanted = node.id != own && node.state == Life::Alive;
            if !is_wanted || !self.begins(node.id) {
                continue;
            }
            let weak = Arc::downgrade(inner);
            let thread = std::thread::Builder::new().name("board-peer".to_owned());
            let id = node.id;
            if thread.spawn(move || read(&weak, id)).is_err() {
                lock(&self.0).asked.remove(&id);
            }
        }
    }

    /// Whether a node has no reading thread yet, and may get one.
    fn begins(&self, id: NodeId) -> bool {
        let asked = &mut lock(&self.0).asked;
        asked.len() < PEERS_MAX && asked.insert(id)
    }

    /// The current reports of other nodes, by id.
    pub(super) fn reports(&self) -> BTreeMap<String, Value> {
        let parts = &mut lock(&self.0).parts;
        parts.retain(|_, (at, _)| at.elapsed() < STALE);
        let parts = parts.iter();
        parts
            .map(|(id, (_, part))| (id.to_string(), part.clone()))
            .collect()
    }

    fn is_wanted(&self) -> bool {
        lock(&self.0)
            .looked
            .is_some_and(|at| at.elapsed() < INTEREST)
    }
}

/// Reads a node's reports while clients view the dashboard.
fn read(weak: &Weak<Inner>, id: NodeId) {
    let channel = weak.upgrade().and_then(|inner| {
        let agent = inner.agent.get()?.clone();
        drop(inner);
        agent.open(id, SERVICE, OPEN_LIMIT).ok()
    });
    while let Some(channel) = &channel {
        let part = channel.recv(PART_BYTES_MAX, TELL_EVERY);
        let Some(inner) = weak.upgrade().filter(|inner| !inner.is_over()) else {
            break;
        };
        let Ok(part) = part else { break };
        if let Some(part) = part.and_then(|part| serde_json::from_slice(&part).ok()) {
            lock(&inner.peers.0)
                .parts
                .insert(id, (Instant::now(), part));
        }
        if !inner.peers.is_wanted() {
            break;
        }
    }
    if let Some(channel) = channel {
        channel.close();
    }
    if let Some(inner) = weak.upgrade() {
        lock(&inner.peers.0).asked.remove(&id);
    }
}
