//! Pages that this rank gives away.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_comm::Group;
use paceline_model::{Handed, KeptPage, PageName, PageStore};

use super::{BEAT, NO_POOL, PAGE_LIMIT, TAG, TAKER, within};
use crate::{Error, disk};

/// Most bytes that wait for a taker, as much as the disk's queue has. These are some thousand
/// tokens of a small model, and a few hundred of an 8B one. They take longer to compute than to be
/// sent.
const QUEUE_BYTES: u64 = 64 << 20;

/// Most pages that wait for a taker.
const QUEUE_PAGES: usize = 4096;

/// Longest wait for room in the queue, where a link is slower than the prompt is read: a page of
/// 8 MB at 4 MB/s. Less than the time that a rank has to leave an epoch.
const ROOM_LIMIT: Duration = Duration::from_secs(2);

/// Between two looks for room.
const ROOM_LOOK: Duration = Duration::from_millis(1);

/// A page's part on its way.
struct Parcel {
    name: PageName,
    pool: u32,
    bytes: Vec<u8>,
}

/// The way to one taker.
#[derive(Debug)]
pub(super) struct Lane {
    part: Handed,
    queue: SyncSender<Parcel>,
    queued: Arc<AtomicU64>,
}

/// The thread of a [`Lane`].
pub(super) struct Sender {
    space: [u8; 16],
    parcels: Receiver<Parcel>,
    queued: Arc<AtomicU64>,
}

/// A way to a taker, and what is to run on a thread of its own.
pub(super) fn lane(part: Handed, space: [u8; 16]) -> (Lane, Sender) {
    let (queue, parcels) = sync_channel(QUEUE_PAGES);
    let queued = Arc::new(AtomicU64::new(0));
    let sender = Sender {
        space,
        parcels,
        queued: Arc::clone(&queued),
    };
    let lane = Lane {
        part,
        queue,
        queued,
    };
    (lane, sender)
}

impl Lane {
    /// Whether the page's part is on its way.
    fn put(&self, page: &KeptPage, bytes: &[u8]) -> bool {
        let pool = page.pool as usize;
        if pool >= self.part.runs.len() {
            return false;
        }
        let bytes = self.part.gather(pool, bytes);
        let (len, until) = (bytes.len() as u64, Instant::now() + ROOM_LIMIT);
        let mut parcel = Parcel {
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

impl Sender {
    /// Sends what is queued, until the lane is gone.
    ///
    /// # Errors
    /// When the taker is gone or too slow.
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

    fn send(&self, group: &dyn Group, parcel: &Parcel) -> Result<(), Error> {
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

/// The ways to all takers, and the round in which they were made: none before they are connected.
#[derive(Clone, Debug, Default)]
pub(super) struct Outgoing(Arc<Mutex<(u64, Vec<Lane>)>>);

impl Outgoing {
    /// Takes the ways of a round; those before end when their queues are empty. A thread that
    /// connects for longer than its round lasts comes too late: its ways end.
    pub(super) fn set(&self, round: u64, lanes: Vec<Lane>) {
        let mut own = lock(&self.0);
        if round >= own.0 {
            *own = (round, lanes);
        }
    }
}

/// A store that gives all pages away and has none.
#[derive(Debug)]
pub(super) struct Sent {
    outgoing: Outgoing,
}

impl Sent {
    pub(super) const fn new(outgoing: Outgoing) -> Self {
        Self { outgoing }
    }
}

impl PageStore for Sent {
    fn name(&self, before: &PageName, tokens: &[u32]) -> PageName {
        disk::name(before, tokens)
    }

    fn has(&self, _page: &KeptPage) -> bool {
        false
    }

    /// Waits a bounded time where a link is slower than the prompt is read. A taker that is gone,
    /// or that does not keep up, gets nothing more: its prompts are computed there.
    fn put(&mut self, page: &KeptPage, bytes: &[u8]) {
        let mut own = lock(&self.outgoing.0);
        own.1.retain(|lane| lane.put(page, bytes));
    }

    fn get(&mut self, _page: &KeptPage, _into: &mut [u8]) -> bool {
        false
    }

    fn forget(&mut self, _page: &KeptPage) {}

    fn wants_known(&self) -> bool {
        true
    }
}
