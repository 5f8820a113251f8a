//! Why a server cannot be made or has ended.

use std::io;
use std::net::SocketAddr;

/// Why a server cannot be made or has ended. What a client did wrong is not among these: it is
/// told to the client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nowhere to listen.
    #[error("no address to listen on")]
    NoAddress,
    /// Anybody could use the model: there are no keys, and others reach the address.
    #[error(
        "{addr} can be reached from other machines and there are no API keys, \
         expected a loopback address, keys, or leave to be open to the network"
    )]
    Open {
        /// The address.
        addr: SocketAddr,
    },
    /// A bound that cannot work.
    #[error("limit {limit} is {got}, expected 1 to {most}")]
    Limit {
        /// Its name.
        limit: &'static str,
        /// Its value.
        got: usize,
        /// The largest value.
        most: usize,
    },
    /// The name of the model, or of a fact, cannot be shown.
    #[error("{what} {name:?}: expected 1 to 256 characters without control characters")]
    Name {
        /// What it names.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The address cannot be listened on.
    #[error("listening on {addr}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Threads or sockets of the server cannot be set up.
    #[error("setting up the server")]
    SetUp(#[source] io::Error),
    /// The key file.
    #[error(transparent)]
    Keys(#[from] crate::keys::Error),
}
