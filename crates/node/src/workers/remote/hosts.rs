//! The machines that run the workers of an instance.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use paceline_base::Rank;
use paceline_cluster::nodes::NodeId;
use paceline_worker::messages::RankCables;

use super::super::connection::{ConnectionError, MessageConnection};

/// A machine that can host a worker, with an open connection.
#[derive(Debug)]
pub struct WorkerHost {
    /// The machine's name for people.
    pub name: String,
    pub node: NodeId,
    /// A new connection to it, at whose other end [`host`](super::host::host) runs.
    pub line: Box<dyn MessageConnection>,
}

/// Chooses the machines that host workers and the routes between them.
pub trait WorkerHosts: Send + Sync + fmt::Debug {
    /// Opens a connection to the machine of a rank: the one that the placement names, or a
    /// replacement if it is lost. Called before a worker starts; blocks for a bounded time.
    ///
    /// # Errors
    /// [`ConnectionError`]: why there is none.
    fn open(&self, rank: Rank) -> Result<WorkerHost, ConnectionError>;

    /// Opens a connection to a machine for a standby worker of a rank: not the machine of the first
    /// worker, and with enough memory. Blocks while that machine gets the model.
    ///
    /// # Errors
    /// [`ConnectionError`]: why there is none.
    fn open_spare(&self, rank: Rank) -> Result<WorkerHost, ConnectionError>;

    /// Whether a node is alive by the current membership.
    fn lives(&self, node: NodeId) -> bool;

    /// The standby worker of a rank has replaced its worker.
    fn promoted(&self, rank: Rank);
    /// The best measured address at which a worker on `from` reaches one on `to`; the port has no
    /// meaning.
    fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr>;

    /// This machine's address for ranks on `from` if they reach those on `to` through it alone.
    fn relays_at(&self, from: NodeId, to: NodeId) -> Option<IpAddr> {
        let (_, _) = (from, to);
        None
    }

    /// Whether all routes between `nodes`, as [`route`](Self::route) returns them, are on networks
    /// trusted for plaintext. False if a route is missing.
    fn is_trusted(&self, nodes: &[NodeId]) -> bool {
        let _ = nodes;
        false
    }

    /// RDMA cables between ranks on `nodes` that their machines trust; `None` without any.
    fn cables(&self, nodes: &[NodeId]) -> Option<RankCables> {
        let _ = nodes;
        None
    }

    /// The first group over `nodes` uses the routes that are known now, unverified.
    fn trust(&self, nodes: &[NodeId]);

    /// Verifies the routes between `nodes` before a new group replaces a broken one. Measures all
    /// routes again if a node is `doubted`, else only routes never measured or used. Blocks for a
    /// bounded time.
    fn settle(&self, nodes: &[NodeId], doubted: &[NodeId]);

    /// A rank on one node blames one on the other: their routes are in doubt, if none is measured.
    fn blamed(&self, a: NodeId, b: NodeId) {
        let (_, _) = (a, b);
    }

    /// The nodes of ranks on `nodes` that have to move, each with the reason: another rank's node
    /// and they cannot speak.
    fn apart(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, String> {
        let _ = nodes;
        BTreeMap::new()
    }

    /// The worker of a rank has to move, which is no fault of its node.
    fn displaced(&self, rank: Rank) {
        let _ = rank;
    }
}
