//! [`Group`](crate::Group) over links: the one implementation for every [`Transport`].
//!
//! - `collectives`: runs plans, with the lockstep guard;
//! - `messages`: messages, with credits;
//! - `zero_copy`: zero-copy calls, and their replacements where links copy;
//! - here: what they share: the cause of poisoning and the traffic.
//!
//! Links have two lanes, so neither blocks the other. A thread that waits on either lane also
//! receives messages. While no thread waits, the group's heartbeat thread (`heartbeat`) does so. So
//! a sender never depends on what its peer is doing.

mod buffers;
mod collectives;
mod inbuf;
mod messages;
mod zero_copy;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use paceline_base::{Bytes, Rank};

use self::collectives::Calls;
use self::messages::Mailboxes;
use crate::locks::lock;
use crate::plan::Route;
use crate::status::{Cause, FailureNotice, GroupStatus};
use crate::transport::{Closed, Transport, VirtualLane};
use crate::{Call, CopyStats, Error, MemoryRegistration, Pages, Traffic, Tuning};

/// How long a rank that finds a link closed waits for the failure notice.
///
/// A peer sends the notice before it closes the link, and the control connection of a killed peer
/// closes too. So the wait ends at once if the heartbeat thread runs. On a busy machine that
/// thread may be without a core for a second. After 300 ms a rank once blamed the peer that left
/// instead of the call that had failed. A death is to be named within 2 s.
const NEWS_WAIT: Duration = Duration::from_millis(1500);

/// How long a leaving rank waits for the system to accept its last messages.
const LINGER: Duration = Duration::from_secs(1);

/// A rank of a group: its end of all links.
#[derive(derive_more::Debug)]
#[debug("rank {rank} of {size} over {transport:?}")]
pub struct TransportGroup<T> {
    rank: usize,
    size: usize,
    transport: T,
    status: Arc<GroupStatus>,
    tuning: OnceLock<Tuning>,
    calls: Mutex<Calls>,
    /// See `Group::mark`.
    mark: AtomicU64,
    /// Collectives that this rank has completed.
    completed: AtomicU64,
    mail: Mutex<Mailboxes>,
    /// Signals that inboxes changed, or that the reading thread has stopped.
    mail_changed: Condvar,
    messages: AtomicU64,
    /// By destination rank.
    sent: Box<[AtomicU64]>,
    received: AtomicU64,
    /// Payload bytes, in both directions.
    payload: AtomicU64,
    /// The transport's zero-copy count before this group used it.
    placed_before: AtomicU64,
}

impl<T: Transport> TransportGroup<T> {
    /// The end of `rank` in a group of `size`, with no failure known.
    pub fn new(rank: Rank, size: u32, transport: T) -> Self {
        Self::with_status(rank, size, transport, Arc::default())
    }

    /// As [`new`](Self::new), for a group whose ranks share one status.
    pub(crate) fn with_status(
        rank: Rank,
        size: u32,
        transport: T,
        status: Arc<GroupStatus>,
    ) -> Self {
        let (rank, size) = (rank.0 as usize, size as usize);
        Self {
            rank,
            size,
            transport,
            status,
            tuning: OnceLock::new(),
            calls: Mutex::new(Calls::new(size)),
            mark: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            mail: Mutex::new(Mailboxes::new(size)),
            mail_changed: Condvar::new(),
            messages: AtomicU64::new(0),
            sent: (0..size).map(|_| AtomicU64::new(0)).collect(),
            received: AtomicU64::new(0),
            payload: AtomicU64::new(0),
            placed_before: AtomicU64::new(0),
        }
    }

    pub fn rank(&self) -> Rank {
        number(self.rank)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        number(self.size).0
    }

    pub const fn transport(&self) -> &T {
        &self.transport
    }

    /// Makes rings visit the ranks in `order`, in both directions at once. The same on all ranks,
    /// before the first call.
    pub fn go_round(&self, order: Vec<usize>) {
        lock(&self.calls).go_round(Route::new(order));
    }

    /// The links, for another group over them. Also the bytes of the call lane that were read and
    /// not used, by rank; a peer may be ahead.
    pub fn into_transport(self) -> (T, Vec<Vec<u8>>) {
        let calls = self.calls.into_inner();
        let calls = calls.unwrap_or_else(PoisonError::into_inner);
        (self.transport, calls.unused())
    }

    /// See [`Group::traffic`](crate::Group::traffic).
    pub fn traffic(&self) -> Traffic {
        Traffic {
            sent: Bytes(self.sent_to().iter().map(|sent| sent.0).sum()),
            received: Bytes(self.received.load(Ordering::Relaxed)),
        }
    }

    /// See [`Group::sent_to`](crate::Group::sent_to).
    pub fn sent_to(&self) -> Vec<Bytes> {
        let sent = self.sent.iter();
        sent.map(|sent| Bytes(sent.load(Ordering::Relaxed)))
            .collect()
    }

    /// See [`Group::copies`](crate::Group::copies).
    pub fn copies(&self) -> CopyStats {
        let payload = self.payload.load(Ordering::Relaxed);
        let before = self.placed_before.load(Ordering::Relaxed);
        let in_place = zero_copy::placed(&self.transport).saturating_sub(before);
        CopyStats {
            in_place: Bytes(in_place),
            staged: Bytes(payload.saturating_sub(in_place)),
        }
    }

    /// Counts payload bytes.
    fn carries(&self, bytes: usize) {
        self.payload.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The cause of poisoning, if there is one.
    pub(crate) fn status_cause(&self) -> Option<Cause> {
        self.status.cause()
    }

    /// See [`Group::register_pages`](crate::Group::register_pages).
    pub fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration> {
        zero_copy::register_pages(&self.transport, pages)
    }

    pub(crate) fn reset_traffic(&self) {
        for sent in &self.sent {
            sent.store(0, Ordering::Relaxed);
        }
        self.received.store(0, Ordering::Relaxed);
        self.payload.store(0, Ordering::Relaxed);
        let placed = zero_copy::placed(&self.transport);
        self.placed_before.store(placed, Ordering::Relaxed);
    }

    /// Sets the site of this rank's collectives.
    pub fn mark(&self, number: u64) {
        self.mark.store(number, Ordering::Relaxed);
    }

    /// The measurements behind the choice of algorithms.
    pub fn tuning(&self) -> Tuning {
        self.tuning.get().copied().unwrap_or_default()
    }

    /// Sets the tuning, once; before that it is the default.
    pub(crate) fn agree(&self, tuning: Tuning) {
        let _ = self.tuning.set(tuning);
    }

    /// Poisons the group and notifies all peers. The caller holds no lock.
    pub(crate) fn poison(&self, news: FailureNotice) {
        if self.status.poison(news) {
            if let Some(news) = self.status.news() {
                self.transport.notify_failure(&news);
            }
            self.transport.wake();
            drop(lock(&self.mail));
            self.mail_changed.notify_all();
        }
    }

    /// Poisons the group because `call` failed; returns the first cause, which may be another.
    fn fail(&self, call: Call, error: Error, at: u64) -> Error {
        let cause = Cause::Failed(error);
        self.poison(FailureNotice { cause, at });
        self.cause_of(call).unwrap_or(error)
    }

    /// The error of `call` if the group is poisoned.
    fn cause_of(&self, call: Call) -> Option<Error> {
        self.status.cause().map(|cause| cause.error(call))
    }

    /// The error of `call`, which found the link to `peer` closed. The control connection may know
    /// the real cause, as a peer sends it before it leaves.
    fn lost(&self, call: Call, peer: usize, at: u64) -> Error {
        self.awaits_news(NEWS_WAIT);
        let cause = self.status.cause().unwrap_or(Cause::Left(number(peer)));
        self.poison(FailureNotice { cause, at });
        cause.error(call)
    }

    /// Waits for the group to be poisoned; false on timeout. On a busy machine the heartbeat thread
    /// may be without a core for longer than `wait`. So the wait also lasts until that thread has
    /// read all notices of before, up to [`NEWS_WAIT`].
    fn awaits_news(&self, wait: Duration) -> bool {
        let start = self.transport.now();
        // A read that runs now may have passed a notice.
        let enough = self.transport.notice_reads().map(|reads| reads + 2);
        self.transport.nudge();
        while self.status.cause().is_none() {
            let now = self.transport.now();
            let unread = self.transport.notice_reads() < enough && now < start + NEWS_WAIT;
            if now >= start + wait && !unread {
                return false;
            }
            let soon = now + Duration::from_millis(1);
            self.transport.wait(VirtualLane::Calls, &[], soon);
        }
        true
    }

    /// Leaves the group. Pending bytes are handed to the system first, within bounds.
    pub(crate) fn leave(&self) {
        let until = self.transport.now() + LINGER;
        while self.flush() && self.transport.now() < until {
            let soon = self.transport.now() + Duration::from_millis(1);
            self.transport.wait(VirtualLane::Messages, &[], soon);
        }
        let at = self.completed.load(Ordering::Acquire) + 1;
        let cause = Cause::Left(self.rank());
        self.transport.notify_failure(&FailureNotice { cause, at });
    }

    /// Like `write`, for a body that the peer does not reduce.
    fn write_whole(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let count = zero_copy::write_whole(&self.transport, lane, peer, (head, body))?;
        self.sent[peer].fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Like `write`, for a part of `whole` whose result may be written back.
    fn write_reducible(
        &self,
        lane: VirtualLane,
        peer: usize,
        frame: (&[u8], &[u8]),
        whole: &[u8],
    ) -> Result<usize, Closed> {
        let count = zero_copy::write_reducible(&self.transport, lane, peer, frame, whole)?;
        self.sent[peer].fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let count = self.transport.write(lane, peer, head, body)?;
        self.sent[peer].fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Ranks are `u32` outside and indices inside.
fn number(rank: usize) -> Rank {
    Rank(u32::try_from(rank).expect("a rank came from a u32"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use super::*;
    use crate::transport::{SpinPolicy, WaitInterest};

    /// A failure notice has arrived at 0 ms. The thread that reads notices gets a core at 700 ms.
    #[derive(Debug)]
    struct Starved {
        start: Instant,
        millis: AtomicU64,
        status: Arc<GroupStatus>,
    }

    impl Transport for Starved {
        fn write(&self, _: VirtualLane, _: usize, _: &[u8], _: &[u8]) -> Result<usize, Closed> {
            Err(Closed)
        }

        fn read(&self, _: VirtualLane, _: usize, _: &mut [u8]) -> Result<usize, Closed> {
            Err(Closed)
        }

        fn zero_copy(&self) -> Option<&dyn crate::transport::ZeroCopy> {
            None
        }

        fn wait(&self, _: VirtualLane, _: &[WaitInterest], until: Instant) {
            let now = until.duration_since(self.start).as_millis();
            let now = u64::try_from(now).unwrap();
            self.millis.store(now, Ordering::Relaxed);
            if now == 700 {
                let cause = Cause::Left(Rank(1));
                self.status.poison(FailureNotice { cause, at: 0 });
            }
        }

        fn wake(&self) {}

        fn notify_failure(&self, _: &FailureNotice) {}

        fn nudge(&self) -> bool {
            true
        }

        fn notice_reads(&self) -> Option<u64> {
            Some(0)
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_millis(self.millis.load(Ordering::Relaxed))
        }

        fn patience(&self) -> SpinPolicy {
            SpinPolicy {
                spins: 0,
                yields: 0,
            }
        }

        fn gulp(&self) -> usize {
            1
        }
    }

    #[test]
    fn a_notice_is_awaited_until_the_starved_thread_reads_it() {
        let status = Arc::<GroupStatus>::default();
        let links = Starved {
            start: crate::deadline::now(),
            millis: AtomicU64::new(0),
            status: Arc::clone(&status),
        };
        let group = TransportGroup::with_status(Rank(0), 2, links, status);
        assert!(group.awaits_news(Duration::from_millis(200)));
        assert_eq!(group.transport.millis.load(Ordering::Relaxed), 700);
    }
}
