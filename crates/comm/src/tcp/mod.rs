//! Ranks as processes that reach each other by TCP.
//!
//! Every rank binds a [`Listener`], somebody hands the list of all addresses to all ranks, and
//! every rank calls [`join`]: each pair is then connected by three sockets, for collectives,
//! messages and control.
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
//! - `join`: who may become a member, and how the others learn why not;
//! - `control`: heartbeats, news, silence;
//! - `sockets`: the links, to [`crate::linked`].

mod control;
mod join;
mod kept;
mod sockets;

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use paceline_base::Rank;

pub(crate) use self::control::{Controls, Kept};
#[cfg(any(test, feature = "testing"))]
pub(crate) use self::join::parse as parse_handshake;
pub use self::join::{JoinError, Refusal};
pub(crate) use self::kept::{Keeping, Origin, gather, keeping_group};
use self::sockets::Sockets;
pub(crate) use self::sockets::{outcome, poll_until};
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

/// How a group behaves. The same on all ranks, though nothing depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// A rank that gives no sign of life for so long is given up: [`Error::Silent`].
    pub silence: Duration,
    /// Use this algorithm wherever an operation has it. What rank 0 says counts.
    pub force: Option<Algorithm>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            silence: SILENCE,
            force: None,
        }
    }
}

/// Where the other ranks of a group reach this one.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    addr: SocketAddr,
}

impl Listener {
    /// Listens at `addr`; port 0 lets the system choose one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        let socket = TcpListener::bind(addr)?;
        socket.set_nonblocking(true)?;
        let addr = socket.local_addr()?;
        Ok(Self { socket, addr })
    }

    /// Where it listens, with the port that was chosen.
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// One rank of a group over TCP. Dropping it ends the group for the others.
pub struct Tcp(Keeping<Sockets>);

/// [`join_with`] the default [`Config`].
///
/// # Errors
/// Any [`JoinError`].
pub fn join(
    listener: Listener,
    rank: Rank,
    addrs: &[SocketAddr],
    id: GroupId,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    join_with(listener, rank, addrs, id, Config::default(), deadline)
}

/// Connects `rank` with all others and returns when all ranks are connected. Collective.
///
/// `addrs` has the address of every rank in rank order, `id` is the same on all ranks. `listener`
/// is what `addrs[rank]` leads to. Strangers who connect are turned away and cannot end the join.
/// Blocks until all ranks have come, one of them failed, or the deadline passed.
///
/// # Errors
/// Any [`JoinError`]; the others get one that names this rank.
pub fn join_with(
    listener: Listener,
    rank: Rank,
    addrs: &[SocketAddr],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Tcp, JoinError> {
    let origin = Origin {
        listener: Arc::new(listener),
        addrs: addrs.to_vec(),
        id,
        config,
    };
    assemble(origin, rank, deadline)
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
    let Origin {
        listener,
        addrs,
        id,
        ..
    } = origin;
    let [calls, messages, control] = join::connect(listener, rank, addrs, *id, deadline)?;
    let system = |source| JoinError::System {
        what: "set up the group",
        source,
    };
    let controls = Arc::new(Controls::new(control).map_err(system)?);
    let patience = patience(addrs, rank.0 as usize);
    let sockets = Sockets::new([calls, messages], controls, patience).map_err(system)?;
    let size = u32::try_from(addrs.len()).expect("join has checked the size");
    Ok(Linked::new(rank, size, sockets, Arc::default()))
}

/// With more ranks than cores on this machine, a rank that spins keeps the one it waits for from
/// running.
fn patience(addrs: &[SocketAddr], rank: usize) -> Patience {
    let here = addrs.iter().filter(|addr| addr.ip() == addrs[rank].ip());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = if here.count() > cores { 0 } else { SPINS };
    Patience {
        spins,
        yields: YIELDS,
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
