//! Links through memory that ranks share: threads of one process, or processes of one machine.
//!
//! Each rank has a *segment*: its bell, and a ring for what each peer sends it on each lane.
//!
//! ```text
//! 0  bell   128  check word   256  rings: lane by lane, peer by peer: counters, then data
//! ```

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::deadline;
use crate::ring::{Bell, Ring};
use crate::status::{News, Status};
use crate::sync::AtomicU64;
use crate::transport::{Closed, Lane, Patience, Transport, Want};

/// Size of a ring by lane. All-reduce of 16 MiB between two processes on the two cores of an EPYC
/// VM, November 2026, rings for calls of 128, 256, 512, 1024 KiB: 2.68, 2.57, 2.49, 2.47 ms.
const RING_BYTES: [usize; 2] = [256 << 10, 64 << 10];

const CHECK_AT: usize = 128;
const RINGS_AT: usize = 256;

/// Bytes of a segment of a group of this size.
const fn segment_bytes(size: usize) -> usize {
    RINGS_AT + size * (2 * Ring::COUNTER_BYTES + RING_BYTES[0] + RING_BYTES[1])
}

/// Where the ring for `lane` from `peer` lies.
const fn ring_at(size: usize, lane: Lane, peer: usize) -> usize {
    match lane {
        Lane::Calls => RINGS_AT + peer * (Ring::COUNTER_BYTES + RING_BYTES[0]),
        Lane::Messages => {
            let before = size * (Ring::COUNTER_BYTES + RING_BYTES[0]);
            RINGS_AT + before + peer * (Ring::COUNTER_BYTES + RING_BYTES[1])
        }
    }
}

/// Memory of one rank, mapped.
pub(crate) struct Segment {
    base: *mut u8,
    size: usize,
}

// SAFETY: all access goes through the bell and the check word (atomic) and the rings, which are
// `Sync` under their protocol.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`.
unsafe impl Sync for Segment {}

impl Segment {
    /// New memory, zeroed, for a group of `size` ranks: of `file`, or of this process only.
    pub(crate) fn new(size: usize, file: Option<&OwnedFd>) -> std::io::Result<Self> {
        let (length, access) = (segment_bytes(size), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the system chooses the address, so nothing that is in use is replaced.
        let base = unsafe {
            match file {
                Some(file) => mmap(
                    ptr::null_mut(),
                    length,
                    access,
                    MapFlags::SHARED,
                    file.as_fd(),
                    0,
                ),
                None => mmap_anonymous(ptr::null_mut(), length, access, MapFlags::PRIVATE),
            }
        }?;
        let base = base.cast();
        Ok(Self { base, size })
    }

    /// Length of a file for a segment.
    pub(crate) const fn file_bytes(size: usize) -> u64 {
        segment_bytes(size) as u64
    }

    fn bell(&self) -> &Bell {
        // SAFETY: the mapping begins with a bell, is aligned to a page and lives as long as `self`;
        // a bell consists of atomics, for which zero is a value.
        unsafe { &*self.base.cast() }
    }

    /// A word by which a peer sees that it has mapped the right memory.
    pub(crate) fn check(&self) -> &AtomicU64 {
        // SAFETY: as in `bell`; the offset is within the mapping and a multiple of 8.
        unsafe { &*self.base.add(CHECK_AT).cast() }
    }

    fn ring(&self, lane: Lane, peer: usize) -> Ring {
        let at = ring_at(self.size, lane, peer);
        // SAFETY: `segment_bytes` has room for the counters and data at `at`, which is a multiple
        // of 128; the memory was zeroed by the system. Callers keep `self` while they use the ring.
        unsafe {
            let counters = self.base.add(at);
            let data = counters.add(Ring::COUNTER_BYTES);
            Ring::new(counters.cast(), data, RING_BYTES[lane as usize])
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `base` was mapped with this length, and nobody has a reference any more. A
        // failure leaves the memory mapped, which harms nobody.
        let _ = unsafe { munmap(self.base.cast(), segment_bytes(self.size)) };
    }
}

/// How news travel.
pub(crate) enum Teller {
    /// All ranks have this status.
    Threads(Arc<Status>),
    /// Over sockets, by a keeper.
    Keeper(Arc<crate::tcp::Controls>),
}

/// The links of one rank.
pub(crate) struct Shared {
    rank: usize,
    segments: Vec<Arc<Segment>>,
    inbound: [Vec<Ring>; 2],
    outbound: [Vec<Ring>; 2],
    /// Ranks that will write no more.
    gone: Arc<[AtomicBool]>,
    teller: Teller,
    patience: Patience,
}

impl Shared {
    /// `segments` are those of all ranks, in rank order.
    pub(crate) fn new(
        rank: usize,
        segments: Vec<Arc<Segment>>,
        gone: Arc<[AtomicBool]>,
        teller: Teller,
        patience: Patience,
    ) -> Self {
        let size = segments.len();
        let lanes = [Lane::Calls, Lane::Messages];
        let inbound = lanes.map(|lane| (0..size).map(|p| segments[rank].ring(lane, p)).collect());
        let outbound = lanes.map(|lane| segments.iter().map(|s| s.ring(lane, rank)).collect());
        Self {
            rank,
            segments,
            inbound,
            outbound,
            gone,
            teller,
            patience,
        }
    }

    /// Takes note that a rank will write no more; what it wrote can still be read.
    pub(crate) fn mark_gone(&self, peer: usize) {
        self.gone[peer].store(true, Ordering::Release);
        self.wake();
    }

    /// As [`mark_gone`](Self::mark_gone), for this rank and for all who share `gone`.
    pub(crate) fn leave(&self) {
        self.gone[self.rank].store(true, Ordering::Release);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.segments
            .iter()
            .for_each(|segment| segment.bell().call());
    }

    pub(crate) const fn controls(&self) -> Option<&Arc<crate::tcp::Controls>> {
        match &self.teller {
            Teller::Threads(_) => None,
            Teller::Keeper(controls) => Some(controls),
        }
    }

    fn is_ready(&self, want: &Want) -> bool {
        let (lane, peer) = (want.lane as usize, want.peer);
        let gone = self.gone[peer].load(Ordering::Acquire);
        (want.read && (gone || self.inbound[lane][peer].is_filled()))
            || (want.write && (gone || self.outbound[lane][peer].has_room()))
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.teller {
            Teller::Threads(_) => "local",
            Teller::Keeper(_) => "shm",
        })
    }
}

impl Transport for Shared {
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        if self.gone[peer].load(Ordering::Acquire) {
            return Err(Closed);
        }
        let count = self.outbound[lane as usize][peer].write(head, body);
        if count > 0 {
            self.segments[peer].bell().ring();
        }
        Ok(count)
    }

    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let gone = self.gone[peer].load(Ordering::Acquire);
        let count = self.inbound[lane as usize][peer].read(into);
        if count > 0 {
            self.segments[peer].bell().ring();
        } else if gone {
            return Err(Closed);
        }
        Ok(count)
    }

    fn wait(&self, lane: Lane, wants: &[Want], until: Instant) {
        let bell = self.segments[self.rank].bell();
        bell.sleep(until, || {
            bell.was_called(lane as usize) || wants.iter().any(|want| self.is_ready(want))
        });
    }

    fn wake(&self) {
        self.segments[self.rank].bell().call();
    }

    fn tell(&self, news: &News) {
        match &self.teller {
            Teller::Threads(status) => {
                status.poison(*news);
                self.wake_all();
            }
            Teller::Keeper(controls) => controls.tell(news),
        }
    }

    fn nudge(&self) -> bool {
        match &self.teller {
            Teller::Threads(_) => false,
            Teller::Keeper(controls) => {
                controls.wake();
                true
            }
        }
    }

    fn now(&self) -> Instant {
        deadline::now()
    }

    fn patience(&self) -> Patience {
        self.patience
    }
}

#[cfg(test)]
mod tests;
