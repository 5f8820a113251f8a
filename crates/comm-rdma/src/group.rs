//! Groups over RDMA: the functions that join one, and the group type.
use std::net::SocketAddr;
use std::sync::Arc;

use paceline_base::Rank;
use paceline_comm::provider::{
    JoinRecord, LaunchedProvider, MonitoredGroup, MonitoredLinks, Provider, SplitMember,
    TransportGroup, allowed, connect, gather, members,
};
use paceline_comm::tcp::{Addrs, GroupId, JoinError, Listener};
use paceline_comm::{
    Algorithm, Backend, CopyStats, Deadline, Error, Group, InitError, JoinParams,
    MemoryRegistration, Pages, Plaintext, RegisteredMemory,
};

use super::cabling::{Cabling, Config};
use super::error::RdmaError;
use super::fallback::Refusal;
use super::join::{CableJoin, fits};
use super::links::{Devices, Links};
use super::memory::Registration;
use super::route;
use super::settings::JacclSettings;
use super::side_channel::SideChannel;
use super::slab::Slab;
use super::verbs::Verbs;

/// RDMA as a provider of [`init`](paceline_comm::init). Errors of the devices are [`RdmaError`]s.
#[derive(Clone, Debug)]
pub struct RdmaProvider {
    /// The library and the device matrix.
    pub cabling: Cabling,
    /// Whether bytes may leave this machine unencrypted.
    pub plaintext: Plaintext,
}

impl Provider for RdmaProvider {
    fn backend(&self) -> Backend {
        Backend::Rdma
    }

    fn join(
        &self,
        seat: JoinParams<'_, Addrs>,
        deadline: Deadline,
    ) -> Result<Box<dyn Group>, InitError> {
        allowed(self.backend(), self.plaintext)?;
        let JoinParams {
            listener,
            rank,
            addrs,
            id,
            config,
        } = seat;
        let cabling = self.cabling.with_tcp(config);
        let joined = join(&cabling, listener, rank, addrs, id, deadline);
        Ok(Box::new(joined.map_err(InitError::wire)?))
    }
}

/// Ranks that a launcher started with JACCL's environment. Errors are [`RdmaError`]s.
impl LaunchedProvider for JacclSettings {
    fn join_placed(&self, deadline: Deadline) -> Result<Box<dyn Group>, InitError> {
        let verbs = Verbs::load().map_err(InitError::wire)?;
        let joined = join_settings(verbs, self, Config::default(), deadline);
        Ok(Box::new(joined.map_err(InitError::wire)?))
    }
}

/// A rank of a group over RDMA. Dropping it ends the group for the others.
#[derive(derive_more::Debug)]
#[debug("{:?}", self.keeping)]
pub struct Rdma {
    // Dropped in this order: links before the memory of their slots.
    keeping: MonitoredGroup<Links>,
    _slabs: Vec<Slab>,
    cabling: Cabling,
    refusals: Vec<Refusal>,
    /// Stays open, unused, as JACCL's does.
    _side: Option<SideChannel>,
}

/// Connects `rank` with all others and returns when all ranks are connected. Collective.
///
/// As [`tcp::join_with`]. The device matrix has a row for each of `addrs` and is the same on all
/// ranks. Ranks without a cable between them use TCP.
///
/// # Errors
/// Any [`RdmaError`]; if it concerns one rank alone, the others get [`RdmaError::Elsewhere`].
pub fn join<A: Clone + Into<Addrs>>(
    cabling: &Cabling,
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    let origin = JoinRecord::new(listener, addrs, id, cabling.config.tcp.clone());
    assemble(cabling.clone(), origin, rank, None, deadline)
}

/// Connects the rank of JACCL's environment with all others. Collective.
///
/// Ranks find each other through JACCL's side channel, which also carries the queue pairs'
/// destinations in JACCL's encoding. The members are paceline ranks: their protocol over the cables
/// is not JACCL's.
///
/// # Errors
/// As [`join`], and [`RdmaError::Side`].
pub fn join_settings(
    verbs: Verbs,
    settings: &JacclSettings,
    config: Config,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    let JacclSettings {
        rank,
        coordinator,
        ref matrix,
        ring,
    } = *settings;
    let mut cabling = Cabling::with(verbs, matrix.clone(), config);
    cabling.ring = ring;
    let mut side = SideChannel::open(coordinator, rank, matrix.size(), deadline)?;
    let listener = Listener::bind(SocketAddr::new(side.here(), 0));
    let listener = listener.map_err(|source| JoinError::System {
        what: "listen",
        source,
    })?;
    // A group id and this rank's address; rank 0's id is used.
    let mut own = GroupId::random().0.to_vec();
    own.extend(listener.addr().to_string().into_bytes());
    let (id, addrs) = meeting(&side.gather_containers(&own, deadline)?)?;
    let origin = JoinRecord::new(listener, &addrs, id, cabling.config.tcp.clone());
    assemble(cabling, origin, rank, Some(side), deadline)
}

/// The group id and all addresses, from the ranks' messages.
pub(super) fn meeting(all: &[Vec<u8>]) -> Result<(GroupId, Vec<SocketAddr>), RdmaError> {
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
    mut cabling: Cabling,
    mut origin: JoinRecord,
    rank: Rank,
    mut side: Option<SideChannel>,
    deadline: Deadline,
) -> Result<Rdma, RdmaError> {
    fits(&cabling.matrix, &origin.addrs, rank)?;
    let linked = connect(&origin, rank, deadline)?;
    let (index, size) = (rank.0 as usize, linked.size());
    let joining = CableJoin {
        rank: index,
        cabling: &cabling,
        matrix: &cabling.matrix,
        deadline,
    };
    let mut gather = |own: &[u8]| match &mut side {
        Some(side) => side.all_gather(own, deadline),
        None => {
            let mut all = vec![0_u8; own.len() * size as usize];
            gather(&linked, own, &mut all, deadline).map_err(JoinError::of_call)?;
            Ok(all)
        }
    };
    let (mut wired, refusals) = match &cabling.fallback {
        None => (joining.wire(&mut gather)?, Vec::new()),
        Some(refused) => {
            let joined = joining.wire_or_tcp(refused, &mut gather)?;
            cabling.matrix = Arc::new(joined.matrix);
            (joined.connected, joined.refusals)
        }
    };
    if let Some(side) = &mut side {
        side.barrier(deadline)?;
    }
    let (sockets, early) = linked.into_transport();
    let registry = Arc::clone(&cabling.host.registry);
    let sockets: Box<dyn MonitoredLinks> = Box::new(sockets);
    let links = wired.links((sockets, early), &origin.addrs, index, registry);
    let linked = TransportGroup::new(rank, size, links);
    if cabling.ring || !(cabling.matrix.is_mesh() || cabling.matrix.is_bare()) {
        linked.go_round(route::ring(&cabling.matrix));
        origin.config.force = origin.config.force.or(Some(Algorithm::Ring));
    }
    let keeping = MonitoredGroup::start(linked, origin, deadline)?;
    Ok(Rdma {
        keeping,
        _slabs: wired.slabs,
        cabling,
        refusals,
        _side: side,
    })
}

impl Rdma {
    /// As [`Memory::new`] with this group, but reports why devices cannot use the memory. Costs one
    /// memory region on each device of this rank.
    ///
    /// # Errors
    /// [`RdmaError::Limit`] or [`RdmaError::Verb`].
    pub fn allocate(&self, bytes: usize) -> Result<RegisteredMemory<u8>, RdmaError> {
        let mut refused = None;
        let memory = RegisteredMemory::with(bytes, |pages| {
            let registered = self.devices().register(pages);
            registered.map_err(|error| refused = Some(error)).ok()
        });
        refused.map_or(Ok(memory), Err)
    }

    /// Registers the caller's memory, so that devices send from it in place while the result lives.
    /// Costs one memory region on each device of this rank. Apple's devices need whole pages of
    /// mapped memory.
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
        self.keeping.linked().transport().devices()
    }

    /// Number of working cables to `peer`, 0 where there are none, and the error of the first dead
    /// cable. The others have taken over its share.
    pub fn cables(&self, peer: Rank) -> (usize, Option<Arc<RdmaError>>) {
        let known = peer.0 < self.size() && peer != self.rank();
        let links = self.keeping.linked().transport();
        match known {
            true => links.cables(peer.0 as usize),
            false => (0, None),
        }
    }

    /// Why this rank does not use its cables to some peers, with
    /// [`Cabling::with_fallback`]. Other cables may be unused because of their other end.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Why the link to `peer` broke, if it did: calls only report that `peer` is lost.
    pub fn broken(&self, peer: Rank) -> Option<Arc<RdmaError>> {
        let known = peer.0 < self.size() && peer != self.rank();
        let links = self.keeping.linked().transport();
        known.then(|| links.broken(peer.0 as usize)).flatten()
    }
}

impl Group for Rdma {
    paceline_comm::group_methods!(keeping.linked());

    fn copies(&self) -> CopyStats {
        self.keeping.linked().copies()
    }

    fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration> {
        self.keeping.linked().register_pages(pages)
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let SplitMember { call, rank, ranks } = members(self, color, key, deadline)?;
        let mut origin = self.keeping.part(color, &ranks);
        origin.config = self.cabling.config.tcp.clone();
        let indices: Vec<usize> = ranks.iter().map(|rank| rank.0 as usize).collect();
        let cabling = Cabling {
            matrix: Arc::new(self.cabling.matrix.part(&indices)),
            fallback: self.cabling.fallback.as_ref().map(|_| Vec::new()),
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
