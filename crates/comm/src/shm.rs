//! Ranks as processes of one machine that share memory.
//!
//! The ranks join over TCP (`join`), exchange their memory, and keep the control connections. Those
//! detect when a process ends or is silent. On Linux the memory is an anonymous file (memfd) that
//! peers open through `/proc`. Elsewhere it is a POSIX shared memory object that is unlinked as
//! soon as all have mapped it. Nothing remains when the processes end.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use paceline_base::Rank;

use crate::file::MemoryFile;
use crate::heartbeat::{Controls, MonitoredGroup, MonitoredLinks, gather, keeping_group};
use crate::join::{Addrs, Config, GroupId, JoinError, JoinRecord, Listener, Refusal, random};
use crate::shared_rings::{FailureNotifier, Segment, SharedRings};
use crate::single_copy::ReadAccess;
use crate::sockets::connect;
use crate::split::{SplitMember, members};
use crate::sync::Ordering;
use crate::transport_group::TransportGroup;
use crate::{Deadline, Error, Group, local, process};

/// Bytes of a rank's announcement: a check word, its address in that process, then the file's name,
/// padded with zeros.
const NAME_BYTES: usize = 64;

/// A rank of a group in shared memory. Dropping it ends the group for the others.
pub struct Shm(MonitoredGroup<SharedRings>);

/// [`join_with`] the default [`Config`].
pub fn join<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    deadline: Deadline,
) -> Result<Shm, JoinError> {
    join_with(listener, rank, addrs, id, Config::default(), deadline)
}

/// As [`crate::tcp::join_with`], for ranks on one machine, of one user. Collective.
///
/// # Errors
/// Any [`JoinError`]; [`JoinError::Apart`] on all ranks if one cannot use the memory of another.
pub fn join_with<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Shm, JoinError> {
    assemble(JoinRecord::new(listener, addrs, id, config), rank, deadline)
}

fn assemble(origin: JoinRecord, rank: Rank, deadline: Deadline) -> Result<Shm, JoinError> {
    let linked = connect(&origin, rank, deadline)?;
    let met = exchange(&linked, deadline)?;
    share(linked, met, origin, deadline)
}

/// Moves a group from sockets to shared memory. The control connections stay.
pub(crate) fn share<T: MonitoredLinks>(
    linked: TransportGroup<T>,
    met: PeerSegments,
    origin: JoinRecord,
    deadline: Deadline,
) -> Result<Shm, JoinError> {
    let rank = linked.rank();
    let controls = Arc::clone(linked.transport().controls());
    let size = linked.size();
    drop(linked);
    let gone = (0..size).map(|_| AtomicBool::new(false)).collect();
    let patience = local::patience(size as usize);
    let teller = FailureNotifier::Keeper(controls);
    let mut shared = SharedRings::new(rank.0 as usize, met.segments, gone, teller, patience);
    for (peer, lender) in (0..).zip(met.lenders) {
        let borrow = |(process, able)| shared.borrow_from(peer, process, able);
        lender.into_iter().for_each(borrow);
    }
    let linked = TransportGroup::new(rank, size, shared);
    MonitoredGroup::start(linked, origin, deadline).map(Shm)
}

/// The mapped segments of all ranks, in rank order.
pub(crate) struct PeerSegments {
    segments: Vec<Arc<Segment>>,
    /// By rank: the process, and the access to its other memory.
    lenders: Vec<Option<(u32, ReadAccess)>>,
}

/// Maps the memory of all ranks. Collective.
pub(crate) fn exchange<T: MonitoredLinks>(
    linked: &TransportGroup<T>,
    deadline: Deadline,
) -> Result<PeerSegments, JoinError> {
    let (rank, size) = (linked.rank().0 as usize, linked.size() as usize);
    let system = |source| JoinError::System {
        what: "make shared memory",
        source,
    };
    let own = MemoryFile::new(Segment::file_bytes(size)).map_err(system)?;
    let segment = Segment::new(size, Some(&own.file)).map_err(system)?;
    let check = random();
    segment.check().store(check, Ordering::SeqCst);
    let segment = Arc::new(segment);

    let mut said = [0_u8; NAME_BYTES];
    said[..8].copy_from_slice(&check.to_le_bytes());
    said[8..16].copy_from_slice(&segment.check_address().to_le_bytes());
    said[16..16 + own.name.len()].copy_from_slice(own.name.as_bytes());
    let mut all = vec![0_u8; NAME_BYTES * size];
    gather(linked, &said, &mut all, deadline).map_err(JoinError::of_call)?;
    let open = |(peer, said): (usize, &[u8; NAME_BYTES])| {
        if peer == rank {
            Ok(Arc::clone(&segment))
        } else {
            open(said, size).map(Arc::new)
        }
    };
    let all = all.as_chunks().0;
    let opened: io::Result<Vec<_>> = all.iter().enumerate().map(open).collect();
    if let [first, second] = all {
        // The system lets a process permit only one reader.
        let peer = if rank == 0 { second } else { first };
        process_of(peer).into_iter().for_each(process::allow);
    }

    // All or none: the ranks agree on whether it worked.
    let mut verdicts = vec![false; size];
    gather(linked, &[opened.is_ok()], &mut verdicts, deadline).map_err(JoinError::of_call)?;
    let unable = (0..).zip(verdicts).find(|(_, able)| !able);
    match (unable, opened) {
        (_, Err(why)) => Err(JoinError::Apart {
            rank: linked.rank(),
            code: why.raw_os_error(),
        }),
        (Some((other, _)), Ok(_)) => Err(JoinError::Apart {
            rank: Rank(other),
            code: None,
        }),
        (None, Ok(segments)) => Ok(PeerSegments {
            segments,
            lenders: (0..)
                .zip(all)
                .map(|(peer, said)| (peer != rank).then(|| lender(said))?)
                .collect(),
        }),
    }
}

/// The process of this announcement, and the access to its memory. Its files can be opened, as all
/// ranks have opened the announced one.
fn lender(said: &[u8; NAME_BYTES]) -> Option<(u32, ReadAccess)> {
    let (check, rest) = said.split_first_chunk::<8>()?;
    let (address, process) = (u64::from_le_bytes(*rest.first_chunk()?), process_of(said)?);
    let mut found = [0; 8];
    let reads = process::read(process, address, &mut found) && found == *check;
    Some((process, ReadAccess { reads, maps: true }))
}

/// The name of its file in an announcement.
fn name_of(said: &[u8; NAME_BYTES]) -> Option<&str> {
    let name = said[16..].split(|byte| *byte == 0).next()?;
    std::str::from_utf8(name).ok()
}

fn process_of(said: &[u8; NAME_BYTES]) -> Option<u32> {
    let rest = name_of(said)?.strip_prefix("/proc/")?;
    rest.split('/').next()?.parse().ok()
}

/// Parses `bytes` as an announcement; nothing is opened.
pub(crate) fn parse(bytes: &[u8]) {
    let Some(said) = bytes.first_chunk() else {
        return;
    };
    let process = process_of(said);
    let name = name_of(said).unwrap_or_default();
    assert!(process.is_none() || name.starts_with("/proc/"));
    #[cfg(target_os = "linux")]
    assert!(
        !crate::file::is_descriptor(name) || !name.contains(".."),
        "a way out of /proc"
    );
}

/// Maps the memory that a peer announced.
///
/// # Errors
/// The system's error; [`NotFound`](io::ErrorKind::NotFound) if it is other memory.
fn open(said: &[u8; NAME_BYTES], size: usize) -> io::Result<Segment> {
    let other = || io::Error::from(io::ErrorKind::NotFound);
    let file = MemoryFile::open(name_of(said).ok_or_else(other)?)?;
    let length = rustix::fs::fstat(&file)?.st_size;
    let is_whole = |length| length >= Segment::file_bytes(size);
    if !u64::try_from(length).is_ok_and(is_whole) {
        return Err(other());
    }
    let segment = Segment::new(size, Some(&file))?;
    let check = said.first_chunk().map(|check| u64::from_le_bytes(*check));
    match check == Some(segment.check().load(Ordering::SeqCst)) {
        true => Ok(segment),
        false => Err(other()),
    }
}

impl MonitoredLinks for SharedRings {
    fn controls(&self) -> &Arc<Controls> {
        Self::controls(self).expect("a group of processes has a keeper")
    }

    fn lost(&self, peer: usize) {
        self.mark_gone(peer);
    }

    fn close(&self) {}

    fn tidy(&self) {
        self.forget_ended();
    }

    fn has_wire(&self) -> bool {
        false
    }
}

impl Shm {
    /// As [`Tcp::turned_away`](crate::tcp::Tcp::turned_away).
    pub fn turned_away(&self) -> Option<Refusal> {
        MonitoredLinks::controls(self.0.linked.transport()).turned_away()
    }
}

keeping_group!(Shm, assemble);

#[cfg(test)]
mod tests;
