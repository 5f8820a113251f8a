//! Why a server cannot be made or has ended.

use std::io;
use std::net::SocketAddr;

/// Startup and runtime errors of a server. Errors of clients are rejections of requests.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no address to listen on")]
    NoAddress,
    /// The address is reachable from other machines, and there are no keys.
    #[error(
        "{addr} can be reached from other machines and there are no API keys, \
         expected a loopback address, keys, or leave to be open to the network"
    )]
    Open { addr: SocketAddr },
    #[error("limit {limit} is {got}, expected 1 to {most}")]
    Limit {
        limit: &'static str,
        got: usize,
        most: usize,
    },
    /// The name of a model or a metric has unusable characters.
    #[error("{what} {name:?}: expected 1 to 256 characters without control characters")]
    Name {
        /// The kind of thing that it names.
        what: &'static str,
        name: String,
    },
    #[error("listening on {addr}")]
    Bind { addr: SocketAddr, source: io::Error },
    /// The system refused threads or sockets.
    #[error("setting up the server")]
    SetUp(#[source] io::Error),
    #[error(transparent)]
    Keys(#[from] paceline_auth::keys::Error),
    #[error(transparent)]
    Tls(#[from] paceline_auth::tls::Error),
}
