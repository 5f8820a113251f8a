//! Ranks as processes that reach each other by TCP.
//!
//! Every rank binds a [`Listener`], somebody hands the list of all addresses to all ranks, and
//! every rank calls [`join`]: each pair is then connected by sockets for collectives, messages and
//! control.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use paceline_base::Rank;
//! use paceline_comm::{Deadline, Group, tcp};
//!
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(5));
//! let bind = || tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
//! let listeners = [bind(), bind()];
//! let addrs = [listeners[0].addr(), listeners[1].addr()];
//! let id = tcp::GroupId::random();
//! let threads: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| {
//!     std::thread::spawn(move || {
//!         let group = tcp::join(listener, Rank(rank), &addrs, id, deadline).unwrap();
//!         (&group as &dyn Group).barrier(deadline)
//!     })
//! }).collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap(), Ok(()));
//! }
//! ```
//!
//! - `join`: who may become a member, and how the others learn why not, in the words of `hello`
//!   and `refusal`; `greeting`: how those come; `door`: who comes, also too late;
//! - `meeting`: how ranks find each other at an address, for [`crate::rendezvous`];
//! - `key`, `seal`: who may read and write the links;
//! - `control`: heartbeats, news, silence;
//! - `link`, `sockets`: the links, to [`crate::linked`].

mod control;
mod door;
mod greeting;
mod hello;
mod join;
mod kept;
mod key;
mod link;
mod meeting;
mod refusal;
mod seal;
pub(crate) mod sockets;

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU8;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::Rank;

pub(crate) use self::control::{Controls, Kept};
use self::door::{Door, Lobby};
use self::greeting::Pending;
pub(crate) use self::hello::parse as parse_hello;
use self::join::Streams;
pub(crate) use self::kept::{Keeping, Origin, gather, keeping_group};
pub use self::key::{GroupKey, KEY_BYTES, Protection};
use self::link::Link;
pub(crate) use self::meeting::parse as parse_meeting;
pub(crate) use self::meeting::{Hall, LIST_BYTES, Unmet, parse_list, print_list, visit};
pub use self::refusal::{JoinError, Refusal};
pub(crate) use self::seal::parse as parse_sealed;
pub(crate) use self::seal::{open_note, seal_note};
use self::sockets::Sockets;
use crate::linked::Linked;
use crate::split::{Member, members};
use crate::transport::Patience;
use crate::{Algorithm, Collective, Data, DataMut, Deadline, Error, Group, Traffic, Tuning};

/// How long a rank may give no sign of life, unless [`Config`] says otherwise. DESIGN.md asks for
/// an error within 2 s; the rest is for a keeper that gets its core late.
pub const SILENCE: Duration = Duration::from_millis(1500);

/// Looks at the sockets before a rank yields its core. A look is a system call of about 0.4 µs and
/// yielding an idle core costs less, so that spinning gains little; where two ranks share a core,
/// 100 spins made 110 µs of a 4 KiB gather that takes 4 µs otherwise (2-core EPYC VM under load,
/// November 2026).
const SPINS: u32 = 4;

/// Looks with the core yielded between them, before a rank blocks: about 0.2 ms on an idle core.
const YIELDS: u32 = 300;

/// Names one group, so that ranks of different groups that meet by mistake do not mix.
///
/// It is no secret: it keeps mistakes out, not enemies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 16]);

impl GroupId {
    /// An id that no other group has, for all practical purposes.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&random().to_le_bytes());
        bytes[8..].copy_from_slice(&random().to_le_bytes());
        Self(bytes)
    }
}

/// 64 bits that differ between calls and processes: std's seed for hash maps.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// How a group behaves. The same on all ranks.
#[derive(Clone, Debug)]
pub struct Config {
    /// A rank that gives no sign of life for so long is given up: [`Error::Silent`].
    pub silence: Duration,
    /// Use this algorithm wherever an operation has it. What rank 0 says counts.
    pub force: Option<Algorithm>,
    /// TCP connections of each pair for collectives, and as many for messages, which take turns.
    /// More than one is for ranks with several addresses, each on a network of its own, and for
    /// networks that give one connection less than they have.
    pub streams: NonZeroU8,
    /// Who may read and write what ranks send.
    pub protection: Protection,
}

impl Config {
    /// Connections of a pair: for calls, for messages, and one for control, which is the last.
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

/// Where a rank is reached: one address, or several, each on another network that leads to it.
///
/// Connection `s` of a pair goes to address `s` modulo their number, so every network carries an
/// equal share; the system's routes decide over which own interface. An address that does not
/// answer while another does is left out after a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addrs(pub(crate) Vec<SocketAddr>);

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

/// Where the other ranks of a group reach this one.
#[derive(Debug)]
pub struct Listener {
    /// At least one.
    sockets: Vec<TcpListener>,
    addrs: Vec<SocketAddr>,
    /// Who has knocked and not been answered.
    waiting: Mutex<VecDeque<Pending>>,
}

impl Listener {
    /// Listens at `addr`; port 0 lets the system choose one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        Self::bind_all(&[addr])
    }

    /// Listens at all of `addrs`, for a rank that is reached over several networks.
    ///
    /// # Errors
    /// If the system refuses one of them, or there is none.
    pub fn bind_all(addrs: &[SocketAddr]) -> io::Result<Self> {
        let bind = |addr: &SocketAddr| {
            let socket = TcpListener::bind(addr)?;
            socket.set_nonblocking(true)?;
            Ok((socket.local_addr()?, socket))
        };
        let bound: Vec<_> = addrs.iter().map(bind).collect::<io::Result<_>>()?;
        let (addrs, sockets) = bound.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
        if addrs.is_empty() {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        let waiting = Mutex::default();
        Ok(Self {
            sockets,
            addrs,
            waiting,
        })
    }

    /// Where it listens, with the port that was chosen; the first of several.
    pub fn addr(&self) -> SocketAddr {
        self.addrs[0]
    }

    /// All addresses where it listens.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// The sockets, for a wire of its own.
    pub fn into_sockets(self) -> Vec<TcpListener> {
        self.sockets
    }

    fn sockets(&self) -> &[TcpListener] {
        &self.sockets
    }

    fn lobby(&self) -> Lobby<'_> {
        Lobby::new(&self.sockets, &self.waiting)
    }
}

/// One rank of a group over TCP. Dropping it ends the group for the others.
pub struct Tcp(Keeping<Sockets>);

/// [`join_with`] the default [`Config`].
///
/// # Errors
/// Any [`JoinError`].
pub fn join<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    join_with(listener, rank, addrs, id, Config::default(), deadline)
}

/// Connects `rank` with all others and returns when all ranks are connected. Collective.
///
/// `addrs` has the address of every rank in rank order (or a list of [`Addrs`]), `id` is the same
/// on all ranks. `listener` is what `addrs[rank]` leads to. Strangers who connect are turned away
/// and cannot end the join. Off loopback [`Config::protection`] has to say how.
/// Blocks until all ranks have come, one of them failed, or the deadline passed.
///
/// # Errors
/// Any [`JoinError`]; the others get one that names this rank.
pub fn join_with<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    assemble(Origin::new(listener, addrs, id, config), rank, deadline)
}

fn assemble(origin: Origin, rank: Rank, deadline: Deadline) -> Result<Tcp, JoinError> {
    let linked = link(&origin, rank, deadline)?;
    start(linked, origin, deadline)
}

/// Makes a group of connected ranks.
pub(crate) fn start(
    linked: Linked<Sockets>,
    origin: Origin,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    Keeping::start(linked, origin, deadline).map(Tcp)
}

/// Connects with all other ranks; nobody looks after the links yet.
pub(crate) fn link(
    origin: &Origin,
    rank: Rank,
    deadline: Deadline,
) -> Result<Linked<Sockets>, JoinError> {
    let (slots, roster) = join::connect(origin, rank, deadline)?;
    let system = |source| JoinError::System {
        what: "set up the group",
        source,
    };
    let (lanes, control) = sort(slots, origin.addrs.len()).map_err(system)?;
    let controls = Arc::new(Controls::new(control, Door::new(origin, roster)).map_err(system)?);
    let patience = patience(&origin.addrs, rank.0 as usize);
    let sockets = Sockets::new(lanes, controls, patience).map_err(system)?;
    let size = u32::try_from(origin.addrs.len()).expect("join has checked the size");
    Ok(Linked::new(rank, size, sockets, Arc::default()))
}

/// The links of both lanes, by rank.
type Lanes = [Vec<Option<Link>>; 2];

/// Makes links of the connections of every slot.
fn sort(mut slots: Vec<Streams>, size: usize) -> io::Result<(Lanes, Streams)> {
    let control = slots.pop().unwrap_or_default();
    let messages = slots.split_off(slots.len() / 2);
    let lane = |mut slots: Vec<Streams>| {
        let link = |rank: usize| {
            let streams: Vec<_> = slots
                .iter_mut()
                .filter_map(|slot| slot[rank].take())
                .collect();
            let link = (!streams.is_empty()).then(|| Link::new(streams));
            link.transpose()
        };
        (0..size).map(link).collect::<io::Result<Vec<_>>>()
    };
    Ok(([lane(slots)?, lane(messages)?], control))
}

/// With more ranks than cores on this machine, a rank that spins keeps the one it waits for from
/// running.
fn patience(addrs: &[Vec<SocketAddr>], rank: usize) -> Patience {
    let ip = |addrs: &Vec<SocketAddr>| addrs.first().map(SocketAddr::ip);
    let here = addrs.iter().filter(|other| ip(other) == ip(&addrs[rank]));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = if here.count() > cores { 0 } else { SPINS };
    Patience {
        spins,
        yields: YIELDS,
    }
}

impl Tcp {
    /// Why somebody was last turned away at this rank's door since the group was complete: such as
    /// a second process of a rank, which is told the same. The group goes on.
    pub fn turned_away(&self) -> Option<Refusal> {
        self.0.linked.transport().controls().turned_away()
    }
}

keeping_group!(Tcp, assemble);

impl GroupId {
    /// The id of a group that is split off this one: the same on all its ranks, another for every
    /// split and color. FNV-1a over all three, twice with different starts.
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

#[cfg(test)]
mod tests;
