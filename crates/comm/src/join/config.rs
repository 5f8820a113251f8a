//! Settings that all ranks of a group share: its name, its behaviour, each rank's addresses.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::num::NonZeroU8;
use std::time::Duration;

use super::key::Protection;
use crate::Algorithm;

/// Default of [`Config::silence`]. The contract is an error within 2 s; the rest is slack for a
/// heartbeat thread that is scheduled late.
pub const SILENCE: Duration = Duration::from_millis(1500);

/// Names one group, so that ranks of different groups that meet by mistake do not mix.
///
/// Not a secret: it prevents mistakes, not attacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 16]);

impl GroupId {
    /// A random id, unique for all practical purposes.
    ///
    /// # Panics
    /// As [`random`].
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect(RANDOM);
        Self(bytes)
    }

    /// The id of a group split off this one: the same on all its ranks, different for every split
    /// and color. FNV-1a over all three, twice with different starts.
    pub(crate) fn derive(self, number: u64, color: u32) -> Self {
        let half = |start: u64| {
            let numbers = [number.to_le_bytes(), u64::from(color).to_le_bytes()].concat();
            let bytes = self.0.iter().chain(&numbers);
            bytes.fold(start, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            })
        };
        let halves = [half(0xcbf2_9ce4_8422_2325), half(0x9e37_79b9_7f4a_7c15)];
        let mut id = [0; 16];
        id[..8].copy_from_slice(&halves[0].to_le_bytes());
        id[8..].copy_from_slice(&halves[1].to_le_bytes());
        Self(id)
    }
}

/// Why ids can always be drawn.
const RANDOM: &str = "the system has random numbers: std's hash maps need them too";

/// 64 random bits.
///
/// # Panics
/// If the system has no random numbers.
pub fn random() -> u64 {
    getrandom::u64().expect(RANDOM)
}

/// The first address of `host:port`.
///
/// # Errors
/// The system's error; a name without an address.
pub fn resolve(text: &str) -> io::Result<SocketAddr> {
    let first = text.to_socket_addrs()?.next();
    first.ok_or_else(|| io::Error::other("it leads nowhere"))
}

/// How a group behaves. The same on all ranks.
#[derive(Clone, Debug)]
pub struct Config {
    /// Longest silence of a rank before it is declared lost:
    /// [`Error::Silent`](crate::Error::Silent).
    pub silence: Duration,
    /// Use this algorithm wherever an operation has it. Rank 0's setting applies.
    pub force: Option<Algorithm>,
    /// TCP connections of each pair for collectives, and as many for messages, used round-robin.
    /// Use more than one for ranks with several addresses, each on a network of its own, or for
    /// networks that limit a single connection.
    pub streams: NonZeroU8,
    /// Which processes may read and write the group's traffic.
    pub protection: Protection,
}

impl Config {
    /// Connections of a pair: for calls, for messages, and last one for control.
    pub(crate) fn slots(&self) -> usize {
        2 * usize::from(self.streams.get()) + 1
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            silence: SILENCE,
            force: None,
            streams: NonZeroU8::MIN,
            protection: Protection::default(),
        }
    }
}

/// The addresses of a rank: one, or several on different networks.
///
/// Connection `s` of a pair uses address `s` modulo their number, so every network carries an equal
/// share. The system's routes choose the local interface. An address that does not answer while
/// another does is skipped after a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addrs(pub(super) Vec<SocketAddr>);

impl From<SocketAddr> for Addrs {
    fn from(addr: SocketAddr) -> Self {
        Self(vec![addr])
    }
}

impl From<Vec<SocketAddr>> for Addrs {
    fn from(addrs: Vec<SocketAddr>) -> Self {
        Self(addrs)
    }
}

impl From<Addrs> for Vec<SocketAddr> {
    fn from(addrs: Addrs) -> Self {
        addrs.0
    }
}
