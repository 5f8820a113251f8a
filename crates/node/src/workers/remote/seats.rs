//! Connections to the workers of remote machines, by rank.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use paceline_cluster::nodes::NodeId;

use super::super::WorkerSite;
use super::super::connection::MessageConnection;
use super::spare::Packing;

/// Evidence from broken groups about the routes between their nodes.
#[derive(Default)]
pub(super) struct Epochs {
    /// The last epoch that a rank was assigned to.
    pub(super) assigned: u64,
    /// The last epoch whose routes were verified.
    pub(super) settled: u64,
    /// Whether a worker was started since: then its loss broke the group, not a route.
    pub(super) started: bool,
    /// Whether the ranks of that epoch communicate without encryption.
    pub(super) plain: bool,
    /// Nodes whose ranks have to move before the ranks join, and why.
    pub(super) apart: BTreeMap<NodeId, String>,
}

/// A rank's worker and the thread that receives its events.
pub(super) struct RemoteWorker {
    pub(super) place: String,
    pub(super) node: NodeId,
    pub(super) line: Arc<dyn MessageConnection>,
    pub(super) post: WorkerSite,
    /// Address at which the owner reaches the worker's machine; `None` for this machine.
    pub(super) listen: Option<SocketAddr>,
    pub(super) reader: Option<JoinHandle<()>>,
    pub(super) packing: Arc<Mutex<Packing>>,
}

impl RemoteWorker {
    /// Makes the host end the worker, and joins the receiving thread.
    pub(super) fn end(mut self) {
        self.line.close();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join(); // it has no result
        }
    }
}
