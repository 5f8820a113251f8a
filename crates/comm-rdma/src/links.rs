//! The links of one rank as a [`Transport`]: cables where there are some, else TCP.
//!
//! Verbs have no descriptor to wait for without a completion channel, which JACCL does not use
//! either. So a waiting thread looks, naps in `poll` on the sockets, and looks again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use paceline_base::lock;
use paceline_comm::provider::{
    self, Closed, ComeBack, Controls, GULP_BYTES, Kept, Lane, Lend, Lent, News, Patience,
    Transport, Want,
};
use paceline_comm::{Pages, Registered};

use super::error::RdmaError;
use super::link::Link;
use super::memory::{Registration, Registry};
use super::verbs::Adapter;

/// First nap of a rank that waits, doubled up to the last. The first is the time that a message
/// takes. The last is lost in the noise of a call that has waited that long. A look costs about 0.1
/// us for each peer, so even the first naps leave the core to others.
const NAP_FIRST: Duration = Duration::from_micros(20);
const NAP_LAST: Duration = Duration::from_millis(1);

/// How long a rank that leaves waits for peers to acknowledge what it sent.
const LINGER: Duration = Duration::from_secs(1);

pub(super) struct Links {
    /// By rank; none for the rank itself, and where no cable leads.
    links: Vec<Option<Mutex<Link>>>,
    sockets: Box<dyn Kept>,
    /// By rank: what was read from the sockets for calls while ranks joined, and is of this group.
    early: Vec<Mutex<Vec<u8>>>,
    patience: Patience,
    devices: Devices,
}

/// The devices and the registry that memory of callers is registered with.
pub(super) struct Devices {
    pub(super) adapters: Vec<Arc<Adapter>>,
    pub(super) registry: Arc<Registry>,
}

impl Devices {
    /// Lets all of them use `pages` in place.
    pub(super) fn register(&self, pages: &Arc<Pages>) -> Result<Registered, RdmaError> {
        let (start, bytes) = (pages.start(), pages.bytes());
        // SAFETY: the result holds the pages, and gives them up after the registration.
        let registration =
            unsafe { Registration::new(&self.registry, &self.adapters, start, bytes) };
        Ok(Registered::new(registration?, pages))
    }
}

impl Links {
    pub(super) fn new(
        links: Vec<Option<Link>>,
        (sockets, early): (Box<dyn Kept>, Vec<Vec<u8>>),
        patience: Patience,
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

    /// Takes of what was read before.
    fn read_early(&self, lane: Lane, peer: usize, into: &mut [u8]) -> usize {
        if lane == Lane::Messages {
            return 0;
        }
        let mut early = lock(&self.early[peer]);
        let count = early.len().min(into.len());
        for (slot, byte) in into.iter_mut().zip(early.drain(..count)) {
            *slot = byte;
        }
        count
    }

    fn link(&self, peer: usize) -> Option<MutexGuard<'_, Link>> {
        let link = self.links[peer].as_ref()?;
        Some(lock(link))
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Link>> {
        (0..self.links.len()).filter_map(|peer| self.link(peer))
    }

    /// Why the link to `peer` carries nothing any more.
    pub(super) fn broken(&self, peer: usize) -> Option<Arc<RdmaError>> {
        self.link(peer)?.broken().cloned()
    }

    /// Cables to `peer` that carry something; and why the first of those that do not is dead.
    pub(super) fn cables(&self, peer: usize) -> (usize, Option<Arc<RdmaError>>) {
        let link = self.link(peer);
        link.map_or((0, None), |link| (link.live(), link.lost().cloned()))
    }

    fn is_ready(&self, want: &Want) -> bool {
        self.link(want.peer).is_some_and(|link| {
            link.is_closed()
                || (want.read && link.has_bytes(want.lane))
                || (want.write && link.is_writable(want.lane))
        })
    }
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rdma")
    }
}

impl Transport for Links {
    fn write(&self, lane: Lane, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        match self.link(peer) {
            Some(mut link) => link.write(lane, head, body),
            None => self.sockets.write(lane, peer, head, body),
        }
    }

    fn read(&self, lane: Lane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        match self.link(peer) {
            Some(mut link) => link.read(lane, into),
            None => match self.read_early(lane, peer, into) {
                0 => self.sockets.read(lane, peer, into),
                count => Ok(count),
            },
        }
    }

    fn lending(&self) -> Option<&dyn Lend> {
        Some(self)
    }

    fn wait(&self, lane: Lane, wants: &[Want], until: Instant) {
        let on_sockets = |want: &&Want| self.links[want.peer].is_none();
        let sockets: Vec<Want> = wants.iter().filter(on_sockets).copied().collect();
        let mut nap = NAP_FIRST;
        loop {
            self.each().for_each(|mut link| link.look());
            let now = provider::now();
            if now >= until || wants.iter().any(|want| self.is_ready(want)) {
                return;
            }
            let soon = until.min(now + nap);
            self.sockets.wait(lane, &sockets, soon);
            if provider::now() < soon {
                // A socket is ready, or somebody calls.
                return;
            }
            nap = NAP_LAST.min(2 * nap);
        }
    }

    fn wake(&self) {
        self.sockets.wake();
    }

    fn tell(&self, news: &News) {
        self.sockets.tell(news);
    }

    fn nudge(&self) -> bool {
        self.sockets.nudge()
    }

    fn now(&self) -> Instant {
        provider::now()
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn gulp(&self) -> usize {
        GULP_BYTES
    }
}

impl Lend for Links {
    fn write_whole(
        &self,
        lane: Lane,
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

    fn lends(&self, _lane: Lane, peer: usize) -> bool {
        self.links[peer].is_some()
    }

    fn lend(&self, peer: usize, take: &mut dyn FnMut(Lent<'_>) -> usize) -> Result<usize, Closed> {
        let link = self.link(peer);
        link.map_or(Ok(0), |mut link| link.lend(take))
    }

    fn placed(&self) -> u64 {
        let placed = self
            .each()
            .map(|link| link.placed.sent + link.placed.received);
        placed.sum()
    }

    fn register_pages(&self, pages: &Arc<Pages>) -> Option<Registered> {
        if self.devices.adapters.is_empty() {
            return None;
        }
        self.devices.register(pages).ok()
    }

    fn holds(&self, lane: Lane, peer: usize) -> bool {
        self.link(peer).is_some_and(|link| link.holds(lane))
    }

    fn let_go(&self, lane: Lane) {
        let holding = self.each().filter(|link| link.uses_memory(lane));
        holding.for_each(|mut link| link.let_go(lane));
    }

    fn let_go_of(&self, lane: Lane, peer: usize) {
        let link = self.link(peer).filter(|link| link.uses_memory(lane));
        if let Some(mut link) = link {
            link.let_go(lane);
        }
    }

    /// Results travel back as bodies of their own.
    fn come_back(&self) -> Option<&dyn ComeBack> {
        None
    }
}

impl Kept for Links {
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

    /// Sees to it that peers have what was sent: nobody repeats it afterwards.
    fn close(&self) {
        let until = provider::now() + LINGER;
        let mut nap = NAP_FIRST;
        loop {
            self.each().for_each(|mut link| link.settle());
            if self.each().all(|link| link.is_settled()) || provider::now() >= until {
                break;
            }
            let soon = provider::now() + nap;
            self.sockets.wait(Lane::Messages, &[], soon);
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
