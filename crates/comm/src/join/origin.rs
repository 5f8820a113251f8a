//! How a rank came into its group, to split others off it.

use std::net::SocketAddr;
use std::sync::Arc;

use super::config::{Addrs, Config, GroupId};
use super::listener::Listener;

/// How a rank came into its group, to split others off it.
#[derive(Clone, Debug)]
pub struct Origin {
    pub(crate) listener: Arc<Listener>,
    /// Where each rank is reached, by rank, at least one address each.
    pub addrs: Vec<Vec<SocketAddr>>,
    /// Which group it is.
    pub id: GroupId,
    /// How it behaves.
    pub config: Config,
}

impl Origin {
    /// That of rank `listener` among `addrs`; arguments as for `tcp::join_with`.
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
