//! Ranks as processes of one machine that share memory.
//!
//! They meet over TCP as the ranks of [`crate::tcp`] do, hand each other their memory, and keep
//! the control connections: those tell when a process ends or falls silent. On Linux the memory is
//! an anonymous file (memfd) that peers open through `/proc`, elsewhere a POSIX shared memory
//! object that loses its name as soon as all have it; nothing is left when the processes end.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use paceline_base::Rank;

use crate::linked::Linked;
use crate::shared::{Segment, Shared, Teller};
use crate::split::{Member, members};
use crate::sync::Ordering;
use crate::tcp::{
    Addrs, Config, Controls, GroupId, JoinError, Keeping, Kept, Listener, Origin, gather,
    keeping_group, link, random,
};
use crate::{
    Collective, Data, DataMut, Deadline, Error, Group, Traffic, Tuning, local, process, tcp,
};

/// Bytes in which a rank says where its memory is: a check word, where that is in its process, then
/// a name padded with zeros.
const NAME_BYTES: usize = 64;

/// One rank of a group in shared memory. Dropping it ends the group for the others.
pub struct Shm(Keeping<Shared>);

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
    assemble(Origin::new(listener, addrs, id, config), rank, deadline)
}

/// [`join_with`], or TCP over the same connections if a rank cannot use the memory of another.
pub(crate) fn join_or_tcp<A: Clone + Into<Addrs>>(
    listener: Listener,
    rank: Rank,
    addrs: &[A],
    id: GroupId,
    config: Config,
    deadline: Deadline,
) -> Result<Box<dyn Group>, JoinError> {
    let origin = Origin::new(listener, addrs, id, config);
    let linked = link(&origin, rank, deadline)?;
    match exchange(&linked, deadline) {
        Ok(met) => Ok(Box::new(share(linked, met, origin, deadline)?)),
        Err(JoinError::Apart { .. }) => Ok(Box::new(tcp::start(linked, origin, deadline)?)),
        Err(error) => Err(error),
    }
}

fn assemble(origin: Origin, rank: Rank, deadline: Deadline) -> Result<Shm, JoinError> {
    let linked = link(&origin, rank, deadline)?;
    let met = exchange(&linked, deadline)?;
    share(linked, met, origin, deadline)
}

/// Goes from sockets, of which the control connections stay, to shared memory.
fn share<T: Kept>(
    linked: Linked<T>,
    met: Met,
    origin: Origin,
    deadline: Deadline,
) -> Result<Shm, JoinError> {
    let rank = linked.rank();
    let controls = Arc::clone(linked.transport().controls());
    let size = linked.size();
    drop(linked);
    let gone = (0..size).map(|_| AtomicBool::new(false)).collect();
    let patience = local::patience(size as usize);
    let teller = Teller::Keeper(controls);
    let mut shared = Shared::new(rank.0 as usize, met.segments, gone, teller, patience);
    for (peer, process) in (0..).zip(met.processes) {
        process
            .into_iter()
            .for_each(|process| shared.borrow_from(peer, process));
    }
    let linked = Linked::new(rank, size, shared, Arc::default());
    Keeping::start(linked, origin, deadline).map(Shm)
}

/// The other ranks, as far as they share memory with this one; in rank order.
struct Met {
    segments: Vec<Arc<Segment>>,
    /// Those whose own memory this rank can read too.
    processes: Vec<Option<u32>>,
}

/// Maps the memory of all ranks. Collective.
fn exchange<T: Kept>(linked: &Linked<T>, deadline: Deadline) -> Result<Met, JoinError> {
    let (rank, size) = (linked.rank().0 as usize, linked.size() as usize);
    let system = |source| JoinError::System {
        what: "make shared memory",
        source,
    };
    let own = Memory::new(size).map_err(system)?;
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
            Some(Arc::clone(&segment))
        } else {
            open(said, size).map(Arc::new)
        }
    };
    let all = all.as_chunks().0;
    let segments: Vec<_> = all.iter().enumerate().map(open).collect();
    if let [first, second] = all {
        // The system lets a process name one reader only.
        let peer = if rank == 0 { second } else { first };
        process_of(peer).into_iter().for_each(process::allow);
    }

    // All or none: ranks agree on whether it worked.
    let able = segments.iter().all(Option::is_some);
    let mut verdicts = vec![false; size];
    gather(linked, &[able], &mut verdicts, deadline).map_err(JoinError::of_call)?;
    match (0..).zip(verdicts).find(|(_, able)| !able) {
        Some((rank, _)) => Err(JoinError::Apart { rank: Rank(rank) }),
        None => Ok(Met {
            segments: segments.into_iter().flatten().collect(),
            processes: (0..)
                .zip(all)
                .map(|(peer, said)| (peer != rank).then(|| readable(said))?)
                .collect(),
        }),
    }
}

/// The process that said this, if its memory can be read.
fn readable(said: &[u8; NAME_BYTES]) -> Option<u32> {
    let (check, rest) = said.split_first_chunk::<8>()?;
    let (address, process) = (u64::from_le_bytes(*rest.first_chunk()?), process_of(said)?);
    let mut found = [0; 8];
    (process::read(process, address, &mut found) && found == *check).then_some(process)
}

/// The name of its memory, as a rank said it.
fn name_of(said: &[u8; NAME_BYTES]) -> Option<&str> {
    let name = said[16..].split(|byte| *byte == 0).next()?;
    std::str::from_utf8(name).ok()
}

/// The process that said this.
fn process_of(said: &[u8; NAME_BYTES]) -> Option<u32> {
    let rest = name_of(said)?.strip_prefix("/proc/")?;
    rest.split('/').next()?.parse().ok()
}

/// Reads `bytes` as what a peer says of its memory; nothing is opened.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn parse(bytes: &[u8]) {
    let Some(said) = bytes.first_chunk() else {
        return;
    };
    let process = process_of(said);
    let name = name_of(said).unwrap_or_default();
    assert!(process.is_none() || name.starts_with("/proc/"));
    #[cfg(target_os = "linux")]
    assert!(
        !is_descriptor(name) || !name.contains(".."),
        "a way out of /proc"
    );
}

/// Maps the memory that a peer described; `None` if that does not work, or it is other memory.
fn open(said: &[u8; NAME_BYTES], size: usize) -> Option<Segment> {
    let check = u64::from_le_bytes(*said.first_chunk()?);
    let file = Memory::open(name_of(said)?)?;
    let length = rustix::fs::fstat(&file).ok()?.st_size;
    if u64::try_from(length).ok()? < Segment::file_bytes(size) {
        return None;
    }
    let segment = Segment::new(size, Some(&file)).ok()?;
    (segment.check().load(Ordering::SeqCst) == check).then_some(segment)
}

/// A file without a place in the file system.
struct Memory {
    file: OwnedFd,
    /// How a peer opens it, while this value lives.
    name: String,
}

#[cfg(target_os = "linux")]
impl Memory {
    fn new(size: usize) -> std::io::Result<Self> {
        use rustix::fs::{MemfdFlags, fcntl_add_seals};
        use std::os::fd::AsRawFd;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("paceline", flags)?;
        rustix::fs::ftruncate(&file, Segment::file_bytes(size))?;
        fcntl_add_seals(&file, SEALS)?;
        let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok(Self { file, name })
    }

    /// Opens what another process named, if it is memory whose size is settled. Were it not, a
    /// process that cuts it short would end all that have it mapped.
    fn open(name: &str) -> Option<OwnedFd> {
        use rustix::fs::{Mode, OFlags, fcntl_get_seals};
        if !is_descriptor(name) {
            return None;
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let file = rustix::fs::open(name, flags, Mode::empty()).ok()?;
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        sealed.then_some(file)
    }
}

/// What nobody may do to a segment any more, its owner included.
#[cfg(target_os = "linux")]
const SEALS: rustix::fs::SealFlags = rustix::fs::SealFlags::SHRINK
    .union(rustix::fs::SealFlags::GROW)
    .union(rustix::fs::SealFlags::SEAL);

/// Whether this is `/proc/NUMBER/fd/NUMBER`: a peer is not to make this process open other files.
#[cfg(target_os = "linux")]
fn is_descriptor(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name
        .strip_prefix("/proc/")
        .and_then(|rest| rest.split_once("/fd/"));
    numbers.is_some_and(|(process, descriptor)| number(process) && number(descriptor))
}

#[cfg(not(target_os = "linux"))]
impl Memory {
    fn new(size: usize) -> std::io::Result<Self> {
        use rustix::fs::Mode;
        use rustix::shm::OFlags;
        let name = format!("/paceline-{:016x}", random());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = rustix::shm::open(&name, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, Segment::file_bytes(size))?;
        Ok(Self { file, name })
    }

    /// Opens what another process named. The size of such an object can be set only once.
    fn open(name: &str) -> Option<OwnedFd> {
        use rustix::fs::Mode;
        let valid = name.starts_with("/paceline-");
        let file = valid.then(|| rustix::shm::open(name, rustix::shm::OFlags::RDWR, Mode::empty()));
        file?.ok()
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Memory {
    fn drop(&mut self) {
        // The mappings stay; a name that is gone already is no loss.
        let _ = rustix::shm::unlink(&self.name);
    }
}

impl Kept for Shared {
    fn controls(&self) -> &Arc<Controls> {
        Self::controls(self).expect("a group of processes has a keeper")
    }

    fn lost(&self, peer: usize) {
        self.mark_gone(peer);
    }

    fn close(&self) {}
}

impl Shm {
    /// As [`tcp::Tcp::turned_away`].
    pub fn turned_away(&self) -> Option<tcp::Refusal> {
        Kept::controls(self.0.linked.transport()).turned_away()
    }
}

keeping_group!(Shm, assemble);

#[cfg(test)]
mod tests;
