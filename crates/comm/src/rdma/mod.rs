//! Ranks that reach each other over RDMA: Thunderbolt cables between Macs, RoCE or InfiniBand.
//!
//! The verbs library is opened at run time; nothing has to be there to build. Queue pairs are of
//! kind UC and messages two-sided, which is all that Apple's devices have, and as JACCL (MLX's
//! library for them) uses them; its device file, environment and side channel are understood
//! ([`Matrix`], [`Settings`], [`Side`]). What goes over the cables is paceline's own: the frames
//! of every transport, in numbered and acknowledged messages, so that what UC loses without a word
//! is sent again.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use paceline_base::{Bytes, Rank};
//! use paceline_comm::rdma::{self, Cabling, Matrix, Verbs};
//! use paceline_comm::{Deadline, Group, Reduce, tcp};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (rank, addrs) = (Rank(0), Vec::<std::net::SocketAddr>::new());
//! # let (id, listener) = (tcp::GroupId::random(), todo());
//! # fn todo() -> tcp::Listener { tcp::Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap() }
//! let deadline = Deadline::at(Instant::now() + Duration::from_secs(30));
//! let matrix = Matrix::parse(r#"[[null, "rdma_en5"], ["rdma_en5", null]]"#)?;
//! let cabling = Cabling::new(Verbs::load()?, matrix);
//! let group = rdma::join(&cabling, listener, rank, &addrs, id, deadline)?;
//! let mut buffer = group.allocate(4096)?;
//! (&group as &dyn Group).all_reduce(&mut buffer[..], Reduce::Sum, deadline)?;
//! # Ok(())
//! # }
//! ```
//!
//! - `abi`, `verbs`: the library and its objects; `limits`: what Apple's devices can hold;
//! - `message`, `cable`, `link`, `links`: from work requests to a transport;
//! - `track`, `bulk`, `chunks`: large bodies, from memory of callers to memory of callers;
//! - `slab`, `memory`: registered memory, of the group and of callers;
//! - `matrix`, `settings`, `side`: JACCL's configuration;
//! - `join`: how it all comes together;
//! - `route`: rings where not everybody has a cable to everybody;
//! - `soft`: a library in software, for tests.
//!
//! Peers' deaths are known from the control connections, as for shared memory: UC says nothing.
//! Nothing is encrypted.

mod abi;
mod bulk;
mod cable;
mod chunks;
mod error;
mod join;
mod limits;
mod link;
mod links;
mod matrix;
mod memory;
mod message;
mod route;
pub mod settings;
mod side;
mod slab;
#[cfg(test)]
mod soft;
#[cfg(test)]
mod software;
mod track;
mod verbs;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use paceline_base::{Bytes, Rank};

pub use self::error::RdmaError;
use self::join::{Joining, fits};
pub use self::limits::{Limits, MemoryRegions, QueuePairs, WorkRequests};
pub use self::link::CABLES_MAX;
use self::links::{Devices, Links};
pub use self::matrix::{Matrix, MatrixError};
pub use self::memory::Registration;
use self::memory::Registry;
pub use self::settings::{Settings, SettingsError};
pub use self::side::Side;
use self::slab::Slab;
use self::verbs::Adapter;
pub use self::verbs::{LIBRARY, Verbs};
use crate::linked::Linked;
use crate::locks::lock;
use crate::plan::Route;
use crate::split::{Member, members};
use crate::tcp::{Addrs, GroupId, JoinError, Keeping, Kept, Listener, Origin, gather, link};
use crate::transport::Transport as _;
use crate::{
    Algorithm, Collective, Copies, Data, DataMut, Deadline, Error, Group, Memory, Pages,
    Registered, Traffic, Tuning, tcp,
};

/// Longest message, unless [`Config`] says otherwise: long enough that heads and completions cost
/// little (32 KiB at 7 GB/s: 5 us), and 64 of them are 2 MiB for each cable.
pub const MESSAGE_BYTES: u32 = 32 << 10;

/// [`Config::in_place_bytes`], unless it says otherwise: agreeing takes some microseconds, in which
/// shorter parts are copied (docs/measurements.md).
pub const IN_PLACE_BYTES: usize = 128 << 10;

/// How a group behaves. The same on all ranks.
#[derive(Clone, Debug)]
pub struct Config {
    /// As for TCP, over which ranks meet and control each other.
    pub tcp: tcp::Config,
    /// Longest message, head included: 4 KiB to 1 MiB. macOS before 26.3 takes 4 KiB only.
    pub message_bytes: u32,
    /// Shortest part of registered memory that a device puts straight into registered memory of
    /// another rank. Both ends have to agree to that each time, so shorter ones, which are copied
    /// at the receiver, arrive sooner.
    pub in_place_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            tcp: tcp::Config::default(),
            message_bytes: MESSAGE_BYTES,
            in_place_bytes: IN_PLACE_BYTES,
        }
    }
}

/// Bounds of [`Config::message_bytes`].
const MESSAGE_BYTES_MIN: u32 = 4 << 10;
const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// The library, and the devices of this process that are open: each once, as a second context of
/// one device hangs on macOS (ml-explore/mlx #3245).
struct Host {
    verbs: Verbs,
    /// What is registered, for all groups over these devices.
    registry: Arc<Registry>,
    adapters: Mutex<BTreeMap<String, Weak<Adapter>>>,
}

impl Host {
    fn adapter(&self, name: &str) -> Result<Arc<Adapter>, RdmaError> {
        let mut adapters = lock(&self.adapters);
        if let Some(adapter) = adapters.get(name).and_then(Weak::upgrade) {
            return Ok(adapter);
        }
        let adapter = Adapter::open(&self.verbs, name)?;
        adapters.insert(name.to_string(), Arc::downgrade(&adapter));
        Ok(adapter)
    }
}

/// A library, which devices lead to whom, and how to use them. Cheap to clone; clones share open
/// devices, so a process has one.
#[derive(Clone)]
pub struct Cabling {
    host: Arc<Host>,
    matrix: Arc<Matrix>,
    config: Config,
    /// Go round even where everybody has a cable to everybody.
    ring: bool,
}

impl Cabling {
    /// With the default [`Config`].
    pub fn new(verbs: Verbs, matrix: Matrix) -> Self {
        Self::with(verbs, matrix, Config::default())
    }

    /// The same, for a group that meets as `tcp` says.
    pub(crate) fn with_tcp(&self, tcp: tcp::Config) -> Self {
        let mut own = self.clone();
        own.config.tcp = tcp;
        own
    }

    /// Message lengths outside of their bounds are set to the nearer one.
    pub fn with(verbs: Verbs, matrix: Matrix, mut config: Config) -> Self {
        let bytes = config.message_bytes;
        config.message_bytes = bytes.clamp(MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX) & !63;
        let host = Arc::new(Host {
            verbs,
            registry: Arc::default(),
            adapters: Mutex::default(),
        });
        Self {
            host,
            matrix: Arc::new(matrix),
            config,
            ring: false,
        }
    }
}

impl fmt::Debug for Cabling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.host.verbs, self.matrix.to_json())
    }
}

/// One rank of a group over RDMA. Dropping it ends the group for the others.
pub struct Rdma {
    // Dropped in this order: links before the memory of their slots.
    keeping: Keeping<Links>,
    _slabs: Vec<Slab>,
    cabling: Cabling,
    /// Stays open, unused, as JACCL's does.
    _side: Option<Side>,
}

/// Connects `rank` with all others and returns when all ranks are connected. Collective.
///
/// As [`tcp::join_with`]; the table of devices has a row for each of `addrs` and is the same on
/// all ranks. Ranks without a cable between them use TCP.
///
/// # Errors
/// Any [`RdmaError`]; if it is one rank's alone, the others get [`RdmaError::Elsewhere`].
pub fn join<A: Clone + Into<Addrs>>(
    cabling: &Cabling,
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    let origin = Origin::new(listener, addrs, id, cabling.config.tcp.clone());
    assemble(cabling.clone(), origin, rank, None, deadline)
}

/// Connects the rank that JACCL's environment names with all others. Collective.
///
/// Ranks find each other through JACCL's side channel, which also carries what JACCL sends over
/// it, in its bytes: where each queue pair is. The members are paceline ranks: what they say over
/// the cables is not JACCL's.
///
/// # Errors
/// As [`join`], and [`RdmaError::Side`].
pub fn join_settings(
    verbs: Verbs,
    settings: &Settings,
    config: Config,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    let Settings {
        rank,
        coordinator,
        ref matrix,
        ring,
    } = *settings;
    let mut cabling = Cabling::with(verbs, matrix.clone(), config);
    cabling.ring = ring;
    let mut side = Side::open(coordinator, rank, matrix.size(), deadline)?;
    let listener = Listener::bind(SocketAddr::new(side.here(), 0));
    let listener = listener.map_err(|source| JoinError::System {
        what: "listen",
        source,
    })?;
    // Every rank's address, behind a group id: that of rank 0 counts.
    let mut own = GroupId::random().0.to_vec();
    own.extend(listener.addr().to_string().into_bytes());
    let (id, addrs) = meeting(&side.gather_containers(&own, deadline)?)?;
    let origin = Origin::new(listener, &addrs, id, cabling.config.tcp.clone());
    assemble(cabling, origin, rank, Some(side), deadline)
}

/// The group and the addresses of its ranks, out of what each said.
fn meeting(all: &[Vec<u8>]) -> Result<(GroupId, Vec<SocketAddr>), RdmaError> {
    let read = |said: &Vec<u8>| -> Option<(GroupId, SocketAddr)> {
        let (id, addr) = said.split_first_chunk()?;
        Some((GroupId(*id), std::str::from_utf8(addr).ok()?.parse().ok()?))
    };
    let no_meeting = |rank| RdmaError::NoMeeting { rank: Rank(rank) };
    let said = (0..).zip(all);
    let said = said.map(|(rank, said)| read(said).ok_or(no_meeting(rank)));
    let (ids, addrs): (Vec<_>, _) = said.collect::<Result<_, _>>()?;
    let id = ids.into_iter().next();
    Ok((id.ok_or(no_meeting(0))?, addrs))
}

fn assemble(
    cabling: Cabling,
    mut origin: Origin,
    rank: Rank,
    mut side: Option<Side>,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    fits(&cabling.matrix, &origin.addrs, rank)?;
    let linked = link(&origin, rank, deadline)?;
    let (index, size) = (rank.0 as usize, linked.size());
    let joining = Joining {
        rank: index,
        cabling: &cabling,
        matrix: &cabling.matrix,
        deadline,
    };
    let mut wired = joining.wire(&mut |own| match &mut side {
        Some(side) => side.all_gather(own, deadline),
        None => {
            let mut all = vec![0_u8; own.len() * size as usize];
            gather(&linked, own, &mut all, deadline).map_err(JoinError::of_call)?;
            Ok(all)
        }
    })?;
    if let Some(side) = &mut side {
        side.barrier(deadline)?;
    }
    let (sockets, early) = linked.into_transport();
    let registry = Arc::clone(&cabling.host.registry);
    let sockets: Box<dyn Kept> = Box::new(sockets);
    let links = wired.links((sockets, early), &origin.addrs, index, registry);
    let linked = Linked::new(rank, size, links, Arc::default());
    if cabling.ring || !cabling.matrix.is_mesh() {
        linked.go_round(Route::new(route::ring(&cabling.matrix)));
        origin.config.force = origin.config.force.or(Some(Algorithm::Ring));
    }
    let keeping = Keeping::start(linked, origin, deadline)?;
    Ok(Rdma {
        keeping,
        _slabs: wired.slabs,
        cabling,
        _side: side,
    })
}

impl Rdma {
    /// As [`Memory::new`] with this group, for those who want to know why devices cannot use it.
    /// Costs one memory region on each device of this rank.
    ///
    /// # Errors
    /// [`RdmaError::Limit`] or [`RdmaError::Verb`].
    pub fn allocate(&self, bytes: usize) -> Result<Memory<u8>, RdmaError> {
        let mut refused = None;
        let memory = Memory::with(bytes, |pages| {
            let registered = self.devices().register(pages);
            registered.map_err(|error| refused = Some(error)).ok()
        });
        refused.map_or(Ok(memory), Err)
    }

    /// Lets devices read the caller's memory in place when it is sent from, while the result
    /// lives. Costs one memory region on each device of this rank. Apple's devices want whole
    /// pages of mapped memory.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    ///
    /// # Safety
    /// The `bytes` bytes at `start` stay mapped while the result lives.
    pub unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Registration, RdmaError> {
        let Devices { adapters, registry } = self.devices();
        // SAFETY: the caller's promise.
        unsafe { Registration::new(registry, adapters, start, bytes) }
    }

    fn devices(&self) -> &Devices {
        self.keeping.linked.transport().devices()
    }

    /// How many cables to `peer` carry something, 0 where there are none; and why the first of
    /// those that do not any more is dead, whose share the others have taken.
    pub fn cables(&self, peer: Rank) -> (usize, Option<Arc<RdmaError>>) {
        let known = peer.0 < self.size() && peer != self.rank();
        let links = self.keeping.linked.transport();
        match known {
            true => links.cables(peer.0 as usize),
            false => (0, None),
        }
    }

    /// Why the link to `peer` broke, if it did: calls say only that `peer` is lost.
    pub fn broken(&self, peer: Rank) -> Option<Arc<RdmaError>> {
        let known = peer.0 < self.size() && peer != self.rank();
        let links = self.keeping.linked.transport();
        known.then(|| links.broken(peer.0 as usize)).flatten()
    }
}

impl fmt::Debug for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.keeping)
    }
}

impl Group for Rdma {
    fn rank(&self) -> Rank {
        self.keeping.linked.rank()
    }

    fn size(&self) -> u32 {
        self.keeping.linked.size()
    }

    fn run_at(
        &self,
        site: crate::Site,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.keeping.linked.run_at(site, collective, deadline)
    }

    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        self.keeping.linked.run(collective, deadline)
    }

    fn mark(&self, number: u64) {
        self.keeping.linked.mark(number);
    }

    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.keeping.linked.send(message, to, tag, deadline)
    }

    fn recv_data(
        &self,
        into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.keeping.linked.recv(into, from, tag, deadline)
    }

    fn traffic(&self) -> Traffic {
        self.keeping.linked.traffic()
    }

    fn sent_to(&self) -> Vec<Bytes> {
        self.keeping.linked.sent_to()
    }

    fn copies(&self) -> Copies {
        self.keeping.linked.copies()
    }

    fn register_pages(&self, pages: &Arc<Pages>) -> Option<Registered> {
        self.keeping.linked.transport().register_pages(pages)
    }

    fn tuning(&self) -> Tuning {
        self.keeping.linked.tuning()
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let Member { call, rank, ranks } = members(self, color, key, deadline)?;
        let mut origin = self.keeping.part(color, &ranks);
        origin.config = self.cabling.config.tcp.clone();
        let indices: Vec<usize> = ranks.iter().map(|rank| rank.0 as usize).collect();
        let cabling = Cabling {
            matrix: Arc::new(self.cabling.matrix.part(&indices)),
            ..self.cabling.clone()
        };
        match assemble(cabling, origin, rank, None, deadline) {
            Ok(group) => Ok(Box::new(group)),
            Err(RdmaError::Join(error)) => Err(error.of_split(call, rank, &ranks)),
            Err(RdmaError::Elsewhere { rank: peer } | RdmaError::Unwired { rank: peer, .. }) => {
                Err(JoinError::Lost { rank: peer }.of_split(call, rank, &ranks))
            }
            Err(_) => Err(JoinError::Lost { rank }.of_split(call, rank, &ranks)),
        }
    }
}

/// Reads `bytes` as what peers send over cables, and while they join; for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    message::parse(bytes);
    join::parse(bytes);
}

/// Reads `bytes` as what ranks say over JACCL's side channel, for fuzzing.
pub(crate) fn parse_side(bytes: &[u8]) {
    if let Some(said) = side::parse(bytes) {
        let met = meeting(&said);
        assert!(met.is_err() || met.is_ok_and(|(_, addrs)| addrs.len() == said.len()));
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use self::soft::mix;
#[cfg(test)]
pub(crate) use self::tests::switched_cabling;
