//! Settings of a node's agent.
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::member::Pace;
use super::super::{NodeId, Registers};
use super::{DEFAULT_PORT, KeyFile, NodeFacts};

/// Methods by which nodes discover each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discovery {
    /// Beacons and multicast DNS on all interfaces, and the named peers.
    All,
    /// Beacons, and the named peers.
    Beacons,
    /// Multicast DNS, and the named peers.
    Mdns,
    /// The named peers only.
    Peers,
}

/// Settings of a node.
#[derive(Clone, derive_more::Debug)]
#[debug("Config({}, port {})", self.home.display(), self.port)]
pub struct Config {
    /// Folder of paceline's files; the node's are in `node` below it.
    pub home: PathBuf,
    /// The machine's facts that the caller knows.
    pub facts: NodeFacts,
    /// Control port on all addresses; 0 takes a free one.
    pub port: u16,
    /// Nodes to reach at `host` or `host:port`, where beacons do not arrive.
    pub peers: Vec<String>,
    /// Methods by which nodes discover each other.
    pub discovery: Discovery,
    /// Timing of failure detection.
    pub pace: Pace,
    /// The only interface for data between workers; `None` for any. Control sessions use all.
    pub data_interface: Option<String>,
    /// Listen ports of workers; `None` for any.
    pub data_ports: Option<RangeInclusive<u16>>,
    /// Milliseconds added to the wall clock: 0 except in tests.
    pub clock_ahead_ms: u64,
    /// The work of a node for the cluster by the map, for people; `None` for nothing. A node with
    /// work does not leave.
    pub work: fn(&Registers, NodeId) -> Option<String>,
    /// The API keys of this machine, shared with the cluster.
    pub keys: Option<Arc<dyn KeyFile>>,
    /// Receives log lines about the cluster.
    pub tell: LogSink,
}

/// Receives a log line, on its own thread. Lines are dropped while it is behind.
pub type LogSink = Arc<dyn Fn(&str) + Send + Sync>;

impl Config {
    /// The node whose files are below `home`, with the defaults.
    pub fn new(home: &Path, facts: NodeFacts) -> Self {
        Self {
            home: home.to_owned(),
            facts,
            port: DEFAULT_PORT,
            peers: Vec::new(),
            discovery: Discovery::All,
            pace: Pace::default(),
            data_interface: None,
            data_ports: None,
            clock_ahead_ms: 0,
            work: |_, _| None,
            keys: None,
            tell: Arc::new(|_| {}),
        }
    }
}
