//! Joins processes into a group. Joining uses TCP for every transport.
//!
//! - `config`: the settings that all ranks share; `origin`: how a rank joined its group;
//! - `connect`: the join itself, and the reasons when it fails;
//! - `hello`, `refusal`: messages of a join; `greeting`: parsing of a connection's first bytes;
//! - `listener`, `door`: pending and late connections;
//! - `meeting`: rendezvous at an address, for [`crate::rendezvous`];
//! - `key`, `seal`: authentication and encryption of connections;
//! - `stream`, `poll`: connections, and waiting for them.

mod config;
mod connect;
mod door;
mod greeting;
mod hello;
mod key;
mod listener;
mod meeting;
mod origin;
mod poll;
mod refusal;
mod seal;
mod stream;

pub use self::config::{Addrs, Config, GroupId, SILENCE, random, resolve};
pub(crate) use self::connect::{Streams, connect};
pub(crate) use self::door::LateConnections;
pub(crate) use self::hello::parse as parse_hello;
pub use self::key::{GroupKey, KEY_BYTES, Protection};
pub use self::listener::Listener;
pub(crate) use self::meeting::parse as parse_meeting;
pub(crate) use self::meeting::{
    LIST_BYTES, RendezvousFailure, RendezvousHost, fetch_members, parse_list, print_list,
};
pub use self::origin::JoinRecord;
pub(crate) use self::poll::Waker;
pub use self::poll::{outcome, poll_until};
pub use self::refusal::{JoinError, Refusal};
pub(crate) use self::seal::parse as parse_sealed;
pub(crate) use self::seal::{open_note, rest, seal_note};
pub(crate) use self::stream::PeerConnection;
