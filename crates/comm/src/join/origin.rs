//! How a rank joined its group: the data that a later split needs.

use std::net::SocketAddr;
use std::sync::Arc;

use super::config::{Addrs, Config, GroupId};
use super::listener::Listener;

/// How a rank joined its group: listener, addresses, id and settings.
#[derive(Clone, Debug)]
pub struct JoinRecord {
    pub(crate) listener: Arc<Listener>,
    /// By rank; at least one address each.
    pub addrs: Vec<Vec<SocketAddr>>,
    pub id: GroupId,
    pub config: Config,
}

impl JoinRecord {
    /// The record of the rank with `listener` among `addrs`; arguments as for `tcp::join_with`.
    pub fn new<A: Clone + Into<Addrs>>(
        listener: Listener,
        addrs: &[A],
        id: GroupId,
        config: Config,
    ) -> Self {
        Self {
            listener: Arc::new(listener),
            addrs: addrs.iter().map(|addrs| addrs.clone().into().0).collect(),
            id,
            config,
        }
    }
}
