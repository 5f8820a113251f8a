//! Sender of KV pages: a bounded queue and a thread for each receiver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_comm::Group;
use paceline_model::{KvTransferPlan, PageName, PageStore, PersistedPage};
use paceline_tensor::KvType;

use super::{BEAT, NO_POOL, PAGE_LIMIT, TAG, TAKER, within};
use crate::{Error, disk};

/// Most queued bytes per receiver, as in the disk's queue: some thousand tokens of a small model, a
/// few hundred of an 8B one. They take longer to compute than to send.
const QUEUE_BYTES: u64 = 64 << 20;

/// Most queued pages per receiver.
const QUEUE_PAGES: usize = 4096;

/// Longest wait for room in the queue, if a link is slower than prefill: a page of 8 MB at 4 MB/s.
/// Less than the time limit for leaving an epoch.
const ROOM_LIMIT: Duration = Duration::from_secs(2);

/// Poll interval of that wait.
const ROOM_LOOK: Duration = Duration::from_millis(1);

/// A queued part of a page.
struct OutgoingPage {
    name: PageName,
    pool: u32,
    bytes: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct ReceiverQueue {
    part: KvTransferPlan,
    queue: SyncSender<OutgoingPage>,
    queued: Arc<AtomicU64>,
}

/// The thread of a [`Lane`].
pub(super) struct PageSender {
    space: [u8; 16],
    parcels: Receiver<OutgoingPage>,
    queued: Arc<AtomicU64>,
}

/// The queue to a receiver, and the sender to run on its own thread.
pub(super) fn lane(part: KvTransferPlan, space: [u8; 16]) -> (ReceiverQueue, PageSender) {
    let (queue, parcels) = sync_channel(QUEUE_PAGES);
    let queued = Arc::new(AtomicU64::new(0));
    let sender = PageSender {
        space,
        parcels,
        queued: Arc::clone(&queued),
    };
    let lane = ReceiverQueue {
        part,
        queue,
        queued,
    };
    (lane, sender)
}

impl ReceiverQueue {
    /// Queues the page's part; whether it was accepted.
    fn put(&self, page: &PersistedPage, bytes: &[u8]) -> bool {
        let pool = page.pool as usize;
        if pool >= self.part.runs.len() {
            return false;
        }
        let bytes = self.part.gather(pool, bytes);
        let (len, until) = (bytes.len() as u64, Instant::now() + ROOM_LIMIT);
        let mut parcel = OutgoingPage {
            name: page.name,
            pool: page.pool,
            bytes,
        };
        loop {
            let queued = self.queued.load(Ordering::Relaxed);
            if queued == 0 || queued + len <= QUEUE_BYTES {
                self.queued.fetch_add(len, Ordering::Relaxed);
                match self.queue.try_send(parcel) {
                    Ok(()) => return true,
                    Err(TrySendError::Disconnected(_)) => return false,
                    Err(TrySendError::Full(back)) => {
                        self.queued.fetch_sub(len, Ordering::Relaxed);
                        parcel = back;
                    }
                }
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(ROOM_LOOK);
        }
    }
}

impl PageSender {
    /// Sends queued parts until the queue is dropped.
    ///
    /// # Errors
    /// The receiver is lost or too slow.
    pub(super) fn run(self, group: &dyn Group) -> Result<(), Error> {
        loop {
            match self.parcels.recv_timeout(BEAT) {
                Ok(parcel) => {
                    self.send(group, &parcel)?;
                    let len = parcel.bytes.len() as u64;
                    self.queued.fetch_sub(len, Ordering::Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let beat = disk::head(&self.space, (&PageName::default(), NO_POOL), 0);
                    group.send(&beat, TAKER, TAG, within(PAGE_LIMIT))?;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    fn send(&self, group: &dyn Group, parcel: &OutgoingPage) -> Result<(), Error> {
        let deadline = within(PAGE_LIMIT);
        let of = (&parcel.name, parcel.pool);
        let head = disk::head(&self.space, of, parcel.bytes.len());
        group.send(&head, TAKER, TAG, deadline)?;
        if !parcel.bytes.is_empty() {
            group.send(&parcel.bytes, TAKER, TAG, deadline)?;
        }
        let sum = disk::summed(&head, &parcel.bytes);
        Ok(group.send(&sum, TAKER, TAG, deadline)?)
    }
}

/// The queues to all receivers, with their round; empty before they are connected.
#[derive(Clone, Debug, Default)]
pub(super) struct ReceiverQueues(Arc<Mutex<(u64, Vec<ReceiverQueue>)>>);

impl ReceiverQueues {
    /// Sets the queues of a round; earlier ones end when they are empty. Drops the queues of a
    /// thread that connected too late, in a later round.
    pub(super) fn set(&self, round: u64, lanes: Vec<ReceiverQueue>) {
        let mut own = lock(&self.0);
        if round >= own.0 {
            *own = (round, lanes);
        }
    }
}

/// A store that sends all pages and holds none.
#[derive(Debug)]
pub(super) struct Sent {
    outgoing: ReceiverQueues,
    kv: KvType,
}

impl Sent {
    pub(super) const fn new(outgoing: ReceiverQueues, kv: KvType) -> Self {
        Self { outgoing, kv }
    }
}

impl PageStore for Sent {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        disk::name(before, tokens)
    }

    fn has(&self, _page: &PersistedPage) -> bool {
        false
    }

    /// Waits a bounded time if a link is slower than prefill. A receiver that is lost or too slow
    /// gets nothing more and computes its prompts itself.
    fn put(&mut self, page: &PersistedPage, bytes: &[u8]) {
        let mut own = lock(&self.outgoing.0);
        own.1.retain(|lane| lane.put(page, bytes));
    }

    fn get(&mut self, _page: &PersistedPage, _into: &mut [u8]) -> bool {
        false
    }

    fn forget(&mut self, _page: &PersistedPage) {}

    fn wants_known(&self) -> bool {
        true
    }

    fn kv_type(&self) -> Option<KvType> {
        Some(self.kv)
    }
}
