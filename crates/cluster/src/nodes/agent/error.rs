//! Reasons why a node's agent, or a command of it, fails.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::super::{NodeId, identity, pairing, session};
use super::SOCKET_PATH_MAX;

/// Reasons why this node or a command of it fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a node already runs with the files in {}", folder.display())]
    Running { folder: PathBuf },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Secret(#[from] identity::Error),
    #[error("cannot listen on control port {port}: {source}")]
    Port { port: u16, source: io::Error },
    /// The system refuses a thread or a socket.
    #[error("cannot start {what}: {source}")]
    Resource {
        what: &'static str,
        source: io::Error,
    },
    /// The local socket's path is too long for the system.
    #[error("the path {} has {} bytes, but a socket's may have {SOCKET_PATH_MAX}",
            path.display(), path.as_os_str().len())]
    SocketPath { path: PathBuf },
    /// No node of the cluster has this name or id.
    #[error("no node of this cluster is called {name:?}")]
    NoNode { name: String },
    #[error("{name:?} is the beginning of several nodes' ids")]
    Ambiguous { name: String },
    #[error("no RDMA cable of this machine is called {link:?}")]
    NoCable { link: String },
    #[error("no address of node {id} is known")]
    NoAddress { id: NodeId },
    /// The node has no such service, or refuses this caller.
    #[error("{node}: {reason}")]
    NoService { node: String, reason: String },
    /// A session cannot be established, or is lost.
    #[error(transparent)]
    Session(#[from] session::Error),
    #[error(transparent)]
    Pairing(#[from] pairing::Error),
    #[error("no machine that shows a code was heard within {} s", limit.as_secs())]
    NobodyInvites {
        /// How long this node listened.
        limit: Duration,
    },
    #[error("peer {text:?}: {reason}")]
    Peer {
        /// The address as it was given.
        text: String,
        reason: String,
    },
    /// The cluster that this node would leave has other members.
    #[error(
        "this node is in a cluster with {others}, which it would lose: `paceline leave` \
             takes it out"
    )]
    HasMembers { others: String },
    /// This node has work for its cluster, as [`Config::work`] says.
    #[error("{work}")]
    HasWork { work: String },
    #[error("{name} is {state}, and only a dead node can be forgotten")]
    Lives { name: String, state: &'static str },
    #[error("a node does not revoke itself")]
    Itself,
    /// The map refuses a write: a bound is reached, or the entry has a higher epoch.
    #[error("the shared map refuses the entry: it is too large, out of date, or one too many")]
    MapRefuses,
}
