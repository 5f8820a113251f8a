//! How a rank joins its group: it listens, tells its address and connects.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use paceline_base::Rank;
use paceline_comm::tcp::{GroupId, GroupKey, Protection};
use paceline_comm::{Deadline, Group, JoinParams, Strict, init, tcp};
use paceline_model::{Links, Shard};

use super::{RankWorker, START_LIMIT, cables, parse, unexpected};
use crate::Error;
use crate::messages::{FromWorker, RankAssignment, ToWorker};

impl RankWorker<'_> {
    /// Connects to the other ranks: listens, reports its address, receives theirs. `None` if
    /// ordered to leave instead.
    pub(super) fn join(
        &mut self,
        job: &RankAssignment,
        shard: &Shard,
    ) -> Result<Option<Links>, Error> {
        let listener = listen(job.listen, self.ports.clone())?;
        let addr = listener.addr();
        self.send(&FromWorker::Listening { addr })?;
        let addrs = match self.receive_join()? {
            Some(ToWorker::Join { mut addrs }) => {
                addrs
                    .iter_mut()
                    .for_each(|a| by_own_interface(a, job.listen));
                addrs
            }
            Some(ToWorker::Leave) => return Ok(None),
            other => return Err(unexpected(other.as_ref(), "Join")),
        };
        let deadline = Deadline::at(Instant::now() + START_LIMIT);
        let seat = JoinParams {
            listener,
            rank: Rank(job.rank),
            addrs: &addrs,
            id: GroupId(job.group),
            config: tcp::Config {
                protection: protection(job),
                ..tcp::Config::default()
            },
        };
        let world = match &job.cables {
            Some(cables) => {
                let (group, wires) = cables::join(cables, seat, deadline)?;
                self.wires = wires;
                group
            }
            None => self.join_without_cables(job, seat, deadline)?,
        };
        let stage = world.split(shard.stage as u32, job.rank, deadline)?;
        let patience = Duration::from_secs(job.patience_s);
        Ok(Some(Links::new(world, stage, patience)))
    }

    fn join_without_cables(
        &self,
        job: &RankAssignment,
        seat: JoinParams<'_>,
        deadline: Deadline,
    ) -> Result<Box<dyn Group>, Error> {
        let backend = parse(&job.backend, "backend")?;
        let wire = (self.find_wire)(backend).map_err(|source| Error::System {
            what: "find the wires between ranks",
            source,
        })?;
        let wire = wire.as_deref();
        Ok(init(backend, Strict::Yes, seat, wire.as_slice(), deadline)?)
    }

    /// The next message that is not a query to an epoch. The instance may query every rank at any
    /// time, and a rank without an epoch has no answer. `None` after a timeout.
    fn receive_join(&self) -> Result<Option<ToWorker>, Error> {
        let until = Instant::now() + START_LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.channel.recv(left)? {
                Some(
                    ToWorker::Measure
                    | ToWorker::Look
                    | ToWorker::Trace { .. }
                    | ToWorker::Receive(_)
                    | ToWorker::HandTo(_)
                    | ToWorker::Expect { .. },
                ) => {}
                other => return Ok(other),
            }
        }
    }
}

/// Listens at `addr`: at its port, or at the first free one of `ports` if given.
///
/// # Errors
/// [`Error::Ports`] when all are taken, and what the system says.
pub(super) fn listen(
    addr: SocketAddr,
    ports: Option<RangeInclusive<u16>>,
) -> Result<tcp::Listener, Error> {
    let failed = |source| Error::System {
        what: "listen for the other ranks",
        source,
    };
    let Some(ports) = ports.filter(|_| !addr.ip().is_loopback()) else {
        return tcp::Listener::bind(addr).map_err(failed);
    };
    for port in ports.clone() {
        match tcp::Listener::bind(SocketAddr::new(addr.ip(), port)) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            bound => return bound.map_err(failed),
        }
    }
    Err(Error::Ports {
        first: *ports.start(),
        last: *ports.end(),
    })
}

pub(super) fn protection(job: &RankAssignment) -> Protection {
    match &job.key {
        Some(key) => Protection::Key(GroupKey::new(key.0)),
        None if job.plain => Protection::Plaintext,
        None => Protection::Loopback,
    }
}

/// Sets the interface of a link-local address to that of `own`: interface numbers differ between
/// machines.
pub(super) fn by_own_interface(addr: &mut SocketAddr, own: SocketAddr) {
    if let (SocketAddr::V6(addr), SocketAddr::V6(own)) = (addr, own)
        && addr.ip().is_unicast_link_local()
        && own.scope_id() != 0
    {
        addr.set_scope_id(own.scope_id());
    }
}
