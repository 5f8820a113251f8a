//! Joins processes into a group. Joining uses TCP for every transport.
//!
//! - `config`: the settings that all ranks share; `origin`: how a rank joined its group;
//! - `connect`: the join itself, and the reasons when it fails;
//! - `hello`, `refusal`: messages of a join; `greeting`: parsing of a connection's first bytes;
//! - `listener`, `late_connections`: pending and late connections;
//! - `key`, `seal`: authentication and encryption of connections;
//! - `stream`, `poll`: connections, and waiting for them.

mod config;
mod connect;
mod greeting;
mod hello;
mod key;
mod late_connections;
mod listener;
mod origin;
mod poll;
mod refusal;
mod seal;
mod stream;

pub use self::config::{Addrs, Config, GroupId, SILENCE, random, resolve};
pub(crate) use self::connect::{Streams, connect};
pub(crate) use self::hello::parse as parse_hello;
pub use self::key::{GroupKey, KEY_BYTES, Protection};
pub(crate) use self::late_connections::LateConnections;
pub use self::listener::Listener;
pub use self::origin::JoinRecord;
pub(crate) use self::poll::Waker;
pub use self::poll::{outcome, poll_until};
pub use self::refusal::{JoinError, Refusal};
pub(crate) use self::seal::parse as parse_sealed;
pub(crate) use self::seal::rest;
pub(crate) use self::stream::PeerConnection;
