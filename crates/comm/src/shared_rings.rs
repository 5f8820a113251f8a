//! Links through memory that ranks share: threads of one process, or processes of one machine.
//!
//! Each rank has a *segment*: its bell, and a ring for each peer and lane.
//!
//! ```text
//! 0  bell   128  check word   256  a slot for loans per peer, then rings: lane by lane, peer by
//! peer: counters, then data
//! ```
//!
//! Between processes, long payloads of collectives are single-copy transfers (`single_copy`): from
//! memory that the reader can map (`regions`), or by reading the writer's process. All other bytes
//! use rings.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use rustix::mm::ProtFlags;

use crate::deadline;
use crate::locks::lock;
use crate::mapping::Mapping;
use crate::peer_bytes::{PeerBytes, PeerBytesMut};
use crate::process;
use crate::regions::{self, MappedView, SHARED_BYTES, Views};
use crate::ring::{Bell, Ring};
use crate::single_copy::{
    LOAN_BYTES, MappedLocation, ReadAccess, SingleCopyTransfer, TransferSlot,
};
use crate::status::{FailureNotice, GroupStatus};
use crate::sync::AtomicU64;
use crate::transport::{
    Closed, SpinPolicy, Transport, VirtualLane, WaitInterest, WriteBack, ZeroCopy,
};
use crate::{MemoryRegistration, Pages};

/// Size of a ring by lane. All-reduce of 16 MiB between two processes on the two cores of an EPYC
/// VM, November 2026: 2.68, 2.57, 2.49, 2.47 ms. The call rings had 128, 256, 512, 1024 KiB.
const RING_BYTES: [usize; 2] = [256 << 10, 64 << 10];

const CHECK_AT: usize = 128;
const SLOTS_AT: usize = 256;

/// Longest part of a transfer that is read at once, so that a call notices its failure within a
/// millisecond or two.
const GULP_BYTES: usize = 8 << 20;

const fn rings_at(size: usize) -> usize {
    SLOTS_AT + size * size_of::<TransferSlot>()
}

const fn segment_bytes(size: usize) -> usize {
    rings_at(size) + size * (2 * Ring::COUNTER_BYTES + RING_BYTES[0] + RING_BYTES[1])
}

/// Offset of the ring for `lane` from `peer`.
const fn ring_at(size: usize, lane: VirtualLane, peer: usize) -> usize {
    match lane {
        VirtualLane::Calls => rings_at(size) + peer * (Ring::COUNTER_BYTES + RING_BYTES[0]),
        VirtualLane::Messages => {
            let before = size * (Ring::COUNTER_BYTES + RING_BYTES[0]);
            rings_at(size) + before + peer * (Ring::COUNTER_BYTES + RING_BYTES[1])
        }
    }
}

/// The mapped memory of one rank.
pub(crate) struct Segment {
    /// All access goes through the bell and the check word (atomic), the slots (atomic) and the
    /// rings, which are `Sync` under their protocol.
    mapping: Mapping,
    size: usize,
}

impl Segment {
    /// New zeroed memory for a group of `size` ranks: of `file`, or private.
    pub(crate) fn new(size: usize, file: Option<&OwnedFd>) -> std::io::Result<Self> {
        // Little of the rings may ever be used, so no huge pages.
        let mapping = Mapping::map(segment_bytes(size))?;
        if let Some(file) = file {
            // SAFETY: nothing uses it yet.
            unsafe { mapping.replace(file, 0, ProtFlags::READ | ProtFlags::WRITE) }?;
        }
        Ok(Self { mapping, size })
    }

    pub(crate) const fn file_bytes(size: usize) -> u64 {
        segment_bytes(size) as u64
    }

    const fn base(&self) -> *mut u8 {
        self.mapping.start()
    }

    fn bell(&self) -> &Bell {
        // SAFETY: the mapping begins with a bell, is aligned to a page and lives as long as `self`;
        // a bell consists of atomics, for which zero is a value.
        unsafe { &*self.base().cast() }
    }

    /// A word by which a peer verifies that it has mapped the right memory.
    pub(crate) fn check(&self) -> &AtomicU64 {
        // SAFETY: as in `bell`; the offset is within the mapping and a multiple of 8.
        unsafe { &*self.base().add(CHECK_AT).cast() }
    }

    /// Address of this word in this process.
    pub(crate) fn check_address(&self) -> u64 {
        std::ptr::from_ref(self.check()) as u64
    }

    /// The slot for transfers from `peer`.
    fn slot(&self, peer: usize) -> &TransferSlot {
        // SAFETY: as in `bell`; the slots are aligned to 128 and within the mapping for peers of
        // this group.
        unsafe {
            &*self
                .base()
                .add(SLOTS_AT + peer * size_of::<TransferSlot>())
                .cast()
        }
    }

    fn ring(&self, lane: VirtualLane, peer: usize) -> Ring {
        let at = ring_at(self.size, lane, peer);
        // SAFETY: `segment_bytes` has room for the counters and data at `at`, which is a multiple
        // of 128; the memory was zeroed by the system. Callers keep `self` while they use the ring.
        unsafe {
            let counters = self.base().add(at);
            let data = counters.add(Ring::COUNTER_BYTES);
            Ring::new(counters.cast(), data, RING_BYTES[lane as usize])
        }
    }
}

/// How failure notices are sent.
pub(crate) enum FailureNotifier {
    /// All ranks share this status.
    Threads(Arc<GroupStatus>),
    /// Over sockets, by a heartbeat thread.
    Keeper(Arc<crate::heartbeat::Controls>),
}

/// This rank's state of transfers from one peer.
#[derive(Default)]
struct TransferSource {
    /// The peer's process, if this rank can read its memory, and how.
    lender: Option<(u32, ReadAccess)>,
    /// Bytes of the current transfer that were read, and that were written back. Only the thread
    /// that runs calls uses them.
    done: AtomicUsize,
    returned: AtomicUsize,
    /// Mapped memory of the peer.
    views: Mutex<Views>,
}

impl TransferSource {
    /// The mapped file of a transfer, if it is or can be mapped.
    fn view(&self, loan: &SingleCopyTransfer) -> Option<Arc<MappedView>> {
        let (process, place) = (self.lender?.0, loan.place?);
        let mut views = lock(&self.views);
        views.get(process, &place)
    }

    /// The rest of a transfer, at most [`GULP_BYTES`]: its first byte, and the number of bytes.
    fn next(&self, loan: &SingleCopyTransfer) -> (usize, usize) {
        let done = self.done.load(Ordering::Relaxed);
        let all = usize::try_from(loan.bytes).unwrap_or(usize::MAX);
        (done, all.saturating_sub(done).min(GULP_BYTES))
    }
}

/// Bytes of a caller that a peer may write to.
struct WritableBytes(*const [u8]);

// SAFETY: the calling thread has them borrowed while this value exists.
unsafe impl Send for WritableBytes {}

/// How a payload is sent to a peer.
enum PayloadTransfer {
    /// Copied to the ring, as far as there is room.
    Ring,
    /// Single copy: the peer reads it from this process.
    Process,
    /// Zero copy: the peer maps the file.
    File(MappedLocation),
}

/// The links of one rank.
pub(crate) struct SharedRings {
    rank: usize,
    segments: Vec<Arc<Segment>>,
    inbound: [Vec<Ring>; 2],
    outbound: [Vec<Ring>; 2],
    /// By peer.
    borrowing: Vec<TransferSource>,
    /// By peer: bytes that the peer may write to.
    returning: Vec<Mutex<Option<WritableBytes>>>,
    /// Ranks that will write no more.
    gone: Arc<[AtomicBool]>,
    teller: FailureNotifier,
    patience: SpinPolicy,
    /// See `Transport::placed`.
    placed: AtomicU64,
}

impl SharedRings {
    /// `segments` are those of all ranks, in rank order.
    pub(crate) fn new(
        rank: usize,
        segments: Vec<Arc<Segment>>,
        gone: Arc<[AtomicBool]>,
        teller: FailureNotifier,
        patience: SpinPolicy,
    ) -> Self {
        let size = segments.len();
        let lanes = [VirtualLane::Calls, VirtualLane::Messages];
        let inbound = lanes.map(|lane| (0..size).map(|p| segments[rank].ring(lane, p)).collect());
        let outbound = lanes.map(|lane| segments.iter().map(|s| s.ring(lane, rank)).collect());
        Self {
            rank,
            segments,
            inbound,
            outbound,
            borrowing: (0..size).map(|_| TransferSource::default()).collect(),
            returning: (0..size).map(|_| Mutex::new(None)).collect(),
            gone,
            teller,
            patience,
            placed: AtomicU64::new(0),
        }
    }

    /// Enables transfers from a peer whose process memory this rank can read.
    pub(crate) fn borrow_from(&mut self, peer: usize, process: u32, able: ReadAccess) {
        self.borrowing[peer].lender = Some((process, able));
        self.segments[self.rank].slot(peer).enable(able);
    }

    /// Unmaps memory that peers have ended.
    pub(crate) fn forget_ended(&self) {
        for TransferSource { views, .. } in &self.borrowing {
            let mut views = lock(views);
            views.forget_ended();
        }
    }

    /// Records that a rank will write no more; its written bytes stay readable.
    pub(crate) fn mark_gone(&self, peer: usize) {
        self.gone[peer].store(true, Ordering::Release);
        self.wake();
    }

    /// As [`mark_gone`](Self::mark_gone), for this rank and all ranks that share `gone`.
    pub(crate) fn leave(&self) {
        self.gone[self.rank].store(true, Ordering::Release);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.segments
            .iter()
            .for_each(|segment| segment.bell().call());
    }

    pub(crate) const fn controls(&self) -> Option<&Arc<crate::heartbeat::Controls>> {
        match &self.teller {
            FailureNotifier::Threads(_) => None,
            FailureNotifier::Keeper(controls) => Some(controls),
        }
    }

    fn is_ready(&self, want: &WaitInterest) -> bool {
        let (lane, peer) = (want.lane as usize, want.peer);
        let gone = self.gone[peer].load(Ordering::Acquire);
        let readable =
            || self.inbound[lane][peer].is_filled() || self.due(want.lane, peer).is_some();
        let writable = || self.outbound[lane][peer].has_room() && !self.holds(want.lane, peer);
        (want.read && (gone || readable())) || (want.write && (gone || writable()))
    }

    /// The transfer of `peer` that comes next in the stream.
    fn due(&self, lane: VirtualLane, peer: usize) -> Option<SingleCopyTransfer> {
        if lane == VirtualLane::Messages || self.borrowing[peer].lender.is_none() {
            return None;
        }
        let loan = self.segments[self.rank].slot(peer).loan()?;
        (loan.at == self.inbound[lane as usize][peer].taken()).then_some(loan)
    }

    /// As `due`, if the bytes can be used in place.
    fn due_in_view(
        &self,
        lane: VirtualLane,
        peer: usize,
    ) -> Option<(SingleCopyTransfer, Arc<MappedView>)> {
        let loan = self.due(lane, peer)?;
        let view = self.borrowing[peer].view(&loan)?;
        (!self.gone[peer].load(Ordering::Acquire)).then_some((loan, view))
    }

    /// Reads the next bytes of the transfer.
    fn collect(
        &self,
        peer: usize,
        loan: &SingleCopyTransfer,
        into: &mut [u8],
    ) -> Result<usize, Closed> {
        let borrowing = &self.borrowing[peer];
        if let Some(view) = borrowing.view(loan) {
            return self.take(peer, loan, &view, &mut |bytes| {
                let count = into.len().min(bytes.len());
                bytes.part(0, count).copy_to(&mut into[..count]);
                count
            });
        }
        let (process, able) = borrowing.lender.ok_or(Closed)?;
        let (read, left) = borrowing.next(loan);
        let count = into.len().min(left);
        let address = loan.address.wrapping_add(read as u64);
        if !able.reads || !process::read(process, address, &mut into[..count]) {
            return Err(Closed);
        }
        self.has_used(peer, loan, count)
    }

    /// The next bytes of a transfer in its view: offset and length.
    fn piece(&self, peer: usize, loan: &SingleCopyTransfer) -> (u64, usize) {
        let (done, left) = self.borrowing[peer].next(loan);
        let offset = loan.place.map_or(0, |place| place.offset);
        (offset.saturating_add(done as u64), left)
    }

    /// Calls `take` with the next bytes of the transfer, in place.
    fn take(
        &self,
        peer: usize,
        loan: &SingleCopyTransfer,
        view: &MappedView,
        take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
    ) -> Result<usize, Closed> {
        let (offset, count) = self.piece(peer, loan);
        let count = take(view.bytes(offset, count).ok_or(Closed)?);
        self.placed.fetch_add(count as u64, Ordering::Relaxed);
        self.has_used(peer, loan, count)
    }

    /// Accounts for `count` used bytes of a transfer; completes it with the last.
    fn has_used(
        &self,
        peer: usize,
        loan: &SingleCopyTransfer,
        count: usize,
    ) -> Result<usize, Closed> {
        let slot = self.segments[self.rank].slot(peer);
        if !slot.is_valid(loan) {
            return Err(Closed);
        }
        let done = &self.borrowing[peer].done;
        let used = done.load(Ordering::Relaxed) + count;
        let is_over = used as u64 >= loan.bytes;
        done.store(if is_over { 0 } else { used }, Ordering::Relaxed);
        if is_over {
            let returned = self.borrowing[peer].returned.swap(0, Ordering::Relaxed);
            slot.complete(loan, returned > 0 && returned as u64 == loan.bytes);
            self.segments[peer].bell().ring();
        }
        Ok(count)
    }

    /// How to send the payload that begins here; `find` looks for a shared file that contains it.
    fn carriage(
        &self,
        lane: VirtualLane,
        peer: usize,
        (head, body): (&[u8], &[u8]),
        find: impl FnOnce() -> Option<MappedLocation>,
    ) -> PayloadTransfer {
        if lane != VirtualLane::Calls || head.is_empty() || body.len() < SHARED_BYTES {
            return PayloadTransfer::Ring;
        }
        let able = self.segments[peer].slot(self.rank).able();
        match able.maps.then(find).flatten() {
            Some(place) => PayloadTransfer::File(place),
            None if able.reads && body.len() >= LOAN_BYTES => PayloadTransfer::Process,
            None => PayloadTransfer::Ring,
        }
    }

    /// Starts a transfer of `body`, which comes next in the stream of calls.
    fn offer_body(&self, peer: usize, body: &[u8], place: Option<MappedLocation>) -> usize {
        let at = self.outbound[VirtualLane::Calls as usize][peer].written();
        let slot = self.segments[peer].slot(self.rank);
        slot.offer(at, body.as_ptr() as u64, body.len() as u64, place);
        if place.is_some() {
            self.placed.fetch_add(body.len() as u64, Ordering::Relaxed);
        }
        body.len()
    }

    /// Writes what fits, or starts a transfer of the body; `find` looks for its file.
    fn write_by(
        &self,
        lane: VirtualLane,
        peer: usize,
        (head, body): (&[u8], &[u8]),
        find: impl FnOnce() -> Option<MappedLocation>,
    ) -> Result<usize, Closed> {
        if self.gone[peer].load(Ordering::Acquire) {
            // A peer may leave once it has completed all transfers.
            let all_taken = head.is_empty() && body.is_empty() && !self.holds(lane, peer);
            return if all_taken { Ok(0) } else { Err(Closed) };
        }
        let ring = &self.outbound[lane as usize][peer];
        let lend = |place| match ring.write(head, &[]) {
            written if written == head.len() => written + self.offer_body(peer, body, place),
            written => written,
        };
        let count = match self.carriage(lane, peer, (head, body), find) {
            PayloadTransfer::Ring => ring.write(head, body),
            PayloadTransfer::Process => lend(None),
            PayloadTransfer::File(place) => lend(Some(place)),
        };
        if count > 0 {
            self.segments[peer].bell().ring();
        }
        Ok(count)
    }

    fn returning(&self, peer: usize) -> MutexGuard<'_, Option<WritableBytes>> {
        lock(&self.returning[peer])
    }
}

impl fmt::Debug for SharedRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.teller {
            FailureNotifier::Threads(_) => "local",
            FailureNotifier::Keeper(_) => "shm",
        })
    }
}

impl Transport for SharedRings {
    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        self.write_by(lane, peer, (head, body), || regions::find(body))
    }

    fn read(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let gone = self.gone[peer].load(Ordering::Acquire);
        if let Some(loan) = self.due(lane, peer).filter(|_| !gone) {
            return self.collect(peer, &loan, into);
        }
        let count = self.inbound[lane as usize][peer].read(into);
        if count > 0 {
            self.segments[peer].bell().ring();
        } else if gone {
            return Err(Closed);
        }
        Ok(count)
    }

    fn zero_copy(&self) -> Option<&dyn ZeroCopy> {
        Some(self)
    }

    fn wait(&self, lane: VirtualLane, wants: &[WaitInterest], until: Instant) {
        let bell = self.segments[self.rank].bell();
        bell.sleep(until, || {
            bell.was_called(lane as usize) || wants.iter().any(|want| self.is_ready(want))
        });
    }

    fn wake(&self) {
        self.segments[self.rank].bell().call();
    }

    fn notify_failure(&self, news: &FailureNotice) {
        match &self.teller {
            FailureNotifier::Threads(status) => {
                status.poison(*news);
                self.wake_all();
            }
            FailureNotifier::Keeper(controls) => controls.send_failure(news),
        }
    }

    fn nudge(&self) -> bool {
        match &self.teller {
            FailureNotifier::Threads(_) => false,
            FailureNotifier::Keeper(controls) => {
                controls.wake();
                true
            }
        }
    }

    fn notice_reads(&self) -> Option<u64> {
        self.controls().map(|controls| controls.reads())
    }

    fn now(&self) -> Instant {
        deadline::now()
    }

    fn patience(&self) -> SpinPolicy {
        self.patience
    }

    /// More than a ring holds. Each `process_vm_readv` has a fixed cost, so longer reads pay
    /// although they leave the cache. All-reduce of 16 MiB between two processes on an EPYC VM,
    /// November 2026: 1.74, 1.54, 1.46 ms. The reads had 256 KiB, 512 KiB and 1 MiB.
    fn gulp(&self) -> usize {
        1 << 20
    }
}

impl ZeroCopy for SharedRings {
    fn write_whole(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        self.write(lane, peer, head, body)
    }

    /// No-op: the sender's address is in the transfer.
    fn expect(&self, _peer: usize, _memory: &[u8]) {}

    fn reads_in_place(&self, lane: VirtualLane, peer: usize) -> bool {
        self.due_in_view(lane, peer).is_some()
    }

    fn read_in_place(
        &self,
        peer: usize,
        take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
    ) -> Result<usize, Closed> {
        match self.due_in_view(VirtualLane::Calls, peer) {
            Some((loan, view)) => self.take(peer, &loan, &view, take),
            None => Ok(0),
        }
    }

    fn placed(&self) -> u64 {
        self.placed.load(Ordering::Relaxed)
    }

    /// Between threads there is nothing to map.
    fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration> {
        match &self.teller {
            FailureNotifier::Threads(_) => None,
            FailureNotifier::Keeper(_) => regions::share(pages),
        }
    }

    fn holds(&self, lane: VirtualLane, peer: usize) -> bool {
        lane == VirtualLane::Calls && self.segments[peer].slot(self.rank).is_out()
    }

    fn release_memory(&self, lane: VirtualLane) {
        if lane == VirtualLane::Messages {
            return;
        }
        for (peer, segment) in self.segments.iter().enumerate() {
            segment.slot(self.rank).revoke();
            if let Some(WritableBytes(bytes)) = self.returning(peer).take() {
                // SAFETY: found to be writable when the transfer started, and the call that has it
                // borrowed is this one, which fails.
                unsafe { regions::take_back(bytes) };
            }
        }
    }

    /// Messages are never transferred in place.
    fn release_peer_memory(&self, _lane: VirtualLane, _peer: usize) {}

    fn write_back(&self) -> Option<&dyn WriteBack> {
        Some(self)
    }
}

impl WriteBack for SharedRings {
    fn write_reducible(
        &self,
        lane: VirtualLane,
        peer: usize,
        (head, body): (&[u8], &[u8]),
        whole: &[u8],
    ) -> Result<usize, Closed> {
        let writable = std::cell::Cell::new(false);
        let written = self.write_by(lane, peer, (head, body), || {
            let place = regions::find_writable(body, whole);
            writable.set(place.is_some());
            place.or_else(|| regions::find(body))
        })?;
        // The whole frame was written only if a transfer started, which may already be complete.
        if writable.get() && written == head.len() + body.len() {
            *self.returning(peer) = Some(WritableBytes(body));
        }
        Ok(written)
    }

    fn is_written_back(&self, peer: usize) -> bool {
        let returning = self.returning(peer).take();
        returning.is_some() && self.segments[peer].slot(self.rank).is_written_back()
    }

    fn reduce_in_place(
        &self,
        peer: usize,
        take: &mut dyn FnMut(PeerBytesMut<'_>) -> usize,
    ) -> Result<Option<usize>, Closed> {
        let due = self.due_in_view(VirtualLane::Calls, peer);
        let may_write = |loan: &SingleCopyTransfer| loan.place.is_some_and(|place| place.writable);
        let Some((loan, view)) = due.filter(|(loan, _)| may_write(loan)) else {
            return Ok(None);
        };
        let (offset, count) = self.piece(peer, &loan);
        // SAFETY: the transfer allows writes, and only the thread that runs calls uses transfers.
        let bytes = unsafe { view.bytes_mut(offset, count) };
        let count = take(bytes.ok_or(Closed)?);
        let returned = &self.borrowing[peer].returned;
        returned.fetch_add(count, Ordering::Relaxed);
        self.placed.fetch_add(count as u64, Ordering::Relaxed);
        self.has_used(peer, &loan, count).map(Some)
    }
}

#[cfg(test)]
mod tests;
