//! The links of one rank as a [`Transport`]: over cables where there are some, else over TCP.
//!
//! Verbs have no descriptor to wait for without a completion channel, which JACCL does not use
//! either. So a waiting thread polls, naps in `poll` on the sockets, and polls again.
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_comm::provider::{
    self, Closed, Controls, FailureNotice, GULP_BYTES, MonitoredLinks, PeerBytes, SpinPolicy,
    Transport, VirtualLane, WaitInterest, WriteBack, ZeroCopy,
};
use paceline_comm::{MemoryRegistration, Pages};

use super::error::RdmaError;
use super::link::CableLink;
use super::memory::{Registration, Registry};
use super::verbs::RdmaAdapter;

/// First nap of a waiting rank, doubled up to the last. The first is the time of one message. The
/// last is small against a call that has waited that long. A poll costs about 0.1 us for each peer,
/// so even the first naps leave the core to others.
const NAP_FIRST: Duration = Duration::from_micros(20);
const NAP_LAST: Duration = Duration::from_millis(1);

/// How long a leaving rank waits for peers to acknowledge its messages.
const LINGER: Duration = Duration::from_secs(1);

#[derive(derive_more::Debug)]
#[debug("rdma")]
pub(super) struct Links {
    /// By rank; `None` for the rank itself, and without a cable.
    links: Vec<Option<Mutex<CableLink>>>,
    sockets: Box<dyn MonitoredLinks>,
    /// By rank: bytes of this group's calls that were read from the sockets during the join.
    early: Vec<Mutex<Vec<u8>>>,
    patience: SpinPolicy,
    devices: Devices,
}

/// The devices and the registry of callers' memory.
pub(super) struct Devices {
    pub(super) adapters: Vec<Arc<RdmaAdapter>>,
    pub(super) registry: Arc<Registry>,
}

impl Devices {
    /// Registers `pages` with all of them for in-place use.
    pub(super) fn register(&self, pages: &Arc<Pages>) -> Result<MemoryRegistration, RdmaError> {
        let (start, bytes) = (pages.start(), pages.bytes());
        // SAFETY: the result holds the pages, and drops them after the registration.
        let registration =
            unsafe { Registration::new(&self.registry, &self.adapters, start, bytes) };
        Ok(MemoryRegistration::new(registration?, pages))
    }
}

impl Links {
    pub(super) fn new(
        links: Vec<Option<CableLink>>,
        (sockets, early): (Box<dyn MonitoredLinks>, Vec<Vec<u8>>),
        patience: SpinPolicy,
        devices: Devices,
    ) -> Self {
        Self {
            links: links.into_iter().map(|link| link.map(Mutex::new)).collect(),
            sockets,
            early: early.into_iter().map(Mutex::new).collect(),
            patience,
            devices,
        }
    }

    pub(super) const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Takes bytes that were read before.
    fn read_early(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> usize {
        if lane == VirtualLane::Messages {
            return 0;
        }
        let mut early = lock(&self.early[peer]);
        let count = early.len().min(into.len());
        for (slot, byte) in into.iter_mut().zip(early.drain(..count)) {
            *slot = byte;
        }
        count
    }

    fn link(&self, peer: usize) -> Option<MutexGuard<'_, CableLink>> {
        let link = self.links[peer].as_ref()?;
        Some(lock(link))
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, CableLink>> {
        (0..self.links.len()).filter_map(|peer| self.link(peer))
    }

    pub(super) fn broken(&self, peer: usize) -> Option<Arc<RdmaError>> {
        self.link(peer)?.broken().cloned()
    }

    /// Number of working cables to `peer`, and the error of the first dead one.
    pub(super) fn cables(&self, peer: usize) -> (usize, Option<Arc<RdmaError>>) {
        let link = self.link(peer);
        link.map_or((0, None), |link| (link.live(), link.lost().cloned()))
    }

    fn is_ready(&self, want: &WaitInterest) -> bool {
        self.link(want.peer).is_some_and(|link| {
            link.is_closed()
                || (want.read && link.has_bytes(want.lane))
                || (want.write && link.is_writable(want.lane))
        })
    }
}

impl Transport for Links {
    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        match self.link(peer) {
            Some(mut link) => link.write(lane, head, body),
            None => self.sockets.write(lane, peer, head, body),
        }
    }

    fn read(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        match self.link(peer) {
            Some(mut link) => link.read(lane, into),
            None => match self.read_early(lane, peer, into) {
                0 => self.sockets.read(lane, peer, into),
                count => Ok(count),
            },
        }
    }

    fn zero_copy(&self) -> Option<&dyn ZeroCopy> {
        Some(self)
    }

    fn wait(&self, lane: VirtualLane, wants: &[WaitInterest], until: Instant) {
        let on_sockets = |want: &&WaitInterest| self.links[want.peer].is_none();
        let sockets: Vec<WaitInterest> = wants.iter().filter(on_sockets).copied().collect();
        let mut nap = NAP_FIRST;
        loop {
            self.each().for_each(|mut link| link.progress());
            let now = provider::now();
            if now >= until || wants.iter().any(|want| self.is_ready(want)) {
                return;
            }
            let soon = until.min(now + nap);
            self.sockets.wait(lane, &sockets, soon);
            if provider::now() < soon {
                // A socket is ready, or a thread called `wake`.
                return;
            }
            nap = NAP_LAST.min(2 * nap);
        }
    }

    fn wake(&self) {
        self.sockets.wake();
    }

    fn notify_failure(&self, news: &FailureNotice) {
        self.sockets.notify_failure(news);
    }

    fn nudge(&self) -> bool {
        self.sockets.nudge()
    }

    fn notice_reads(&self) -> Option<u64> {
        self.sockets.notice_reads()
    }

    fn now(&self) -> Instant {
        provider::now()
    }

    fn patience(&self) -> SpinPolicy {
        self.patience
    }

    fn gulp(&self) -> usize {
        GULP_BYTES
    }
}

impl ZeroCopy for Links {
    fn write_whole(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        match self.link(peer) {
            Some(mut link) => link.write_whole(lane, head, body),
            None => self.sockets.write(lane, peer, head, body),
        }
    }

    fn expect(&self, peer: usize, memory: &[u8]) {
        if let Some(mut link) = self.link(peer) {
            link.expect(memory);
        }
    }

    fn reads_in_place(&self, _lane: VirtualLane, peer: usize) -> bool {
        self.links[peer].is_some()
    }

    fn read_in_place(
        &self,
        peer: usize,
        take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
    ) -> Result<usize, Closed> {
        let link = self.link(peer);
        link.map_or(Ok(0), |mut link| link.read_in_place(take))
    }

    fn placed(&self) -> u64 {
        let placed = self
            .each()
            .map(|link| link.placed.sent + link.placed.received);
        placed.sum()
    }

    fn register_pages(&self, pages: &Arc<Pages>) -> Option<MemoryRegistration> {
        if self.devices.adapters.is_empty() {
            return None;
        }
        self.devices.register(pages).ok()
    }

    fn holds(&self, lane: VirtualLane, peer: usize) -> bool {
        self.link(peer).is_some_and(|link| link.holds(lane))
    }

    fn release_memory(&self, lane: VirtualLane) {
        let holding = self.each().filter(|link| link.uses_memory(lane));
        holding.for_each(|mut link| link.release_memory(lane));
    }

    fn release_peer_memory(&self, lane: VirtualLane, peer: usize) {
        let link = self.link(peer).filter(|link| link.uses_memory(lane));
        if let Some(mut link) = link {
            link.release_memory(lane);
        }
    }

    /// Results are sent as bodies of their own.
    fn write_back(&self) -> Option<&dyn WriteBack> {
        None
    }
}

impl MonitoredLinks for Links {
    fn controls(&self) -> &Arc<Controls> {
        self.sockets.controls()
    }

    fn lost(&self, peer: usize) {
        if let Some(mut link) = self.link(peer) {
            link.end();
        }
        self.sockets.lost(peer);
        self.wake();
    }

    /// Waits until peers have all messages: nothing is repeated afterwards.
    fn close(&self) {
        let until = provider::now() + LINGER;
        let mut nap = NAP_FIRST;
        loop {
            self.each().for_each(|mut link| link.settle());
            if self.each().all(|link| link.is_settled()) || provider::now() >= until {
                break;
            }
            let soon = provider::now() + nap;
            self.sockets.wait(VirtualLane::Messages, &[], soon);
            nap = NAP_LAST.min(2 * nap);
        }
        self.sockets.close();
    }

    fn cut(&self) -> Option<usize> {
        let is_cut = |peer: &usize| self.link(*peer).is_some_and(|link| link.is_cut());
        (0..self.links.len()).find(is_cut)
    }

    fn has_wire(&self) -> bool {
        self.links.iter().any(Option::is_some) || self.sockets.has_wire()
    }
}
