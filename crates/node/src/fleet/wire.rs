//! The cluster's channels between nodes as message connections of workers.

use std::net::SocketAddr;
use std::time::Duration;

use paceline_cluster::nodes::agent::Channel;

use crate::crew::line::{Broken, Line, MESSAGE_BYTES_MAX};

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
