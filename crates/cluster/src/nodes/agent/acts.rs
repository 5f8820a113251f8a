//! Acts of users and members on the cluster, for the audit log.

use std::net::IpAddr;

use paceline_base::lock;

use super::super::RegisterKey;
use super::Agent;
use super::state::State;

/// Most acts that wait for the log; the oldest make room. The log takes them some times a second.
const ACTS_MAX: usize = 1024;

/// An act that changes who may do what, or that removes stored files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterAct {
    /// This node shows a code that lets a machine in.
    Invited,
    /// A machine gave the code, and has the cluster's key.
    Paired(IpAddr),
    /// This node revoked a node, by its name.
    Revoked(String),
    /// An API key of this id was made on this node.
    KeyMade(String),
    /// An API key was deleted on this node.
    KeyRevoked(String),
    /// An admin's key of another node may act as one on this node.
    KeyAllowed(String),
    /// This node removed something from its store, by its name.
    Removed {
        name: String,
        /// The name of the node that asked; `None` for this node's user.
        by: Option<String>,
    },
}

impl ClusterAct {
    pub(super) fn of_key(key: &RegisterKey, is_made: bool) -> Self {
        let id = key.as_api_key().map_or("", |(_, id)| id).to_owned();
        match is_made {
            true => Self::KeyMade(id),
            false => Self::KeyRevoked(id),
        }
    }
}

impl State {
    pub(super) fn record(&mut self, act: ClusterAct) {
        if self.acts.len() == ACTS_MAX {
            self.acts.pop_front();
        }
        self.acts.push_back(act);
    }
}

impl Agent {
    /// Records an act of a service of this node for the audit log.
    pub fn record(&self, act: ClusterAct) {
        lock(&self.inner.state).record(act);
    }

    /// Acts since the last call, oldest first.
    pub fn acts(&self) -> Vec<ClusterAct> {
        lock(&self.inner.state).acts.drain(..).collect()
    }
}
