//! The cluster's channels between nodes as message connections of workers.

use std::net::SocketAddr;
use std::time::Duration;

use paceline_cluster::nodes::agent::ServiceChannel;

use crate::workers::connection::{ConnectionError, MESSAGE_BYTES_MAX, MessageConnection};

/// A channel to another node.
#[derive(Debug)]
pub(super) struct NodeConnection(pub(super) ServiceChannel);

impl MessageConnection for NodeConnection {
    fn send(&self, message: &[u8]) -> Result<(), ConnectionError> {
        self.0.send(message).map_err(ConnectionError::new)
    }

    fn receive(&self, wait: Duration) -> Result<Option<Vec<u8>>, ConnectionError> {
        self.0
            .recv(MESSAGE_BYTES_MAX, wait)
            .map_err(ConnectionError::new)
    }

    fn close(&self) {
        self.0.close();
    }

    fn own_addr(&self) -> Option<SocketAddr> {
        self.0.own_addr().ok()
    }
}
