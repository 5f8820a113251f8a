//! Sockets as a [`Transport`]: several nonblocking TCP connections for each pair of ranks.

mod link;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use paceline_base::Rank;
use rustix::event::{PollFd, PollFlags};

use self::link::StripedLink;
use crate::heartbeat::{Controls, MonitoredLinks};
use crate::join::{
    JoinError, JoinRecord, LateConnections, PeerConnection, Streams, Waker, poll_until,
};
use crate::status::FailureNotice;
use crate::transport::{
    Closed, GULP_BYTES, SpinPolicy, Transport, VirtualLane, WaitInterest, ZeroCopy,
};
use crate::transport_group::TransportGroup;
use crate::{Deadline, deadline, join};

/// Polls of the sockets before a rank yields its core. A poll is a system call of about 0.4 µs and
/// yielding an idle core costs less, so that spinning gains little. Where two ranks share a core,
/// 100 spins made 110 µs of a 4 KiB gather that takes 4 µs otherwise. Measured on a 2-core EPYC VM
/// under load, November 2026.
const SPINS: u32 = 4;

/// Polls with the core yielded between them, before a rank blocks: about 0.2 ms on an idle core.
const YIELDS: u32 = 300;

/// The links of one rank.
#[derive(derive_more::Debug)]
#[debug("tcp")]
pub struct Sockets {
    /// By lane and rank; `None` for the rank itself.
    lanes: [Vec<Option<StripedLink>>; 2],
    wakers: [Waker; 2],
    controls: Arc<Controls>,
    patience: SpinPolicy,
}

impl Sockets {
    fn new(
        lanes: [Vec<Option<StripedLink>>; 2],
        controls: Arc<Controls>,
        patience: SpinPolicy,
    ) -> io::Result<Self> {
        let wakers = [Waker::new()?, Waker::new()?];
        Ok(Self {
            lanes,
            wakers,
            controls,
            patience,
        })
    }

    fn link(&self, lane: VirtualLane, peer: usize) -> Result<&StripedLink, Closed> {
        self.lanes[lane as usize][peer].as_ref().ok_or(Closed)
    }

    /// The connections of both lanes to `peer`.
    #[cfg(test)]
    pub(crate) fn streams(&self, peer: usize) -> [&[PeerConnection]; 2] {
        [0, 1].map(|lane| {
            self.lanes[lane][peer]
                .as_ref()
                .map_or(&[][..], StripedLink::streams)
        })
    }

    fn shut_down(&self) {
        let links = self.lanes.iter().flatten().flatten();
        links
            .flat_map(StripedLink::streams)
            .for_each(PeerConnection::shut_down);
    }
}

/// Connects with all other ranks, without a heartbeat thread yet. Collective.
pub fn connect(
    origin: &JoinRecord,
    rank: Rank,
    deadline: Deadline,
) -> Result<TransportGroup<Sockets>, JoinError> {
    let (slots, roster) = join::connect(origin, rank, deadline)?;
    let system = |source| JoinError::System {
        what: "set up the group",
        source,
    };
    let (lanes, control) = sort(slots, origin.addrs.len()).map_err(system)?;
    let controls =
        Arc::new(Controls::new(control, LateConnections::new(origin, roster)).map_err(system)?);
    let patience = patience(&origin.addrs, rank.0 as usize);
    let sockets = Sockets::new(lanes, controls, patience).map_err(system)?;
    let size = u32::try_from(origin.addrs.len()).expect("join has checked the size");
    Ok(TransportGroup::new(rank, size, sockets))
}

/// The links of both lanes, by rank.
type Lanes = [Vec<Option<StripedLink>>; 2];

/// Builds links from the connections of every slot.
fn sort(mut slots: Vec<Streams>, size: usize) -> io::Result<(Lanes, Streams)> {
    let control = slots.pop().unwrap_or_default();
    let messages = slots.split_off(slots.len() / 2);
    let lane = |mut slots: Vec<Streams>| {
        let link = |rank: usize| {
            let streams: Vec<_> = slots
                .iter_mut()
                .filter_map(|slot| slot[rank].take())
                .collect();
            let link = (!streams.is_empty()).then(|| StripedLink::new(streams));
            link.transpose()
        };
        (0..size).map(link).collect::<io::Result<Vec<_>>>()
    };
    Ok(([lane(slots)?, lane(messages)?], control))
}

/// With more ranks than cores on this machine, a spinning rank keeps its peer from running.
fn patience(addrs: &[Vec<SocketAddr>], rank: usize) -> SpinPolicy {
    let ip = |addrs: &Vec<SocketAddr>| addrs.first().map(SocketAddr::ip);
    let here = addrs.iter().filter(|other| ip(other) == ip(&addrs[rank]));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = if here.count() > cores { 0 } else { SPINS };
    SpinPolicy {
        spins,
        yields: YIELDS,
    }
}

impl MonitoredLinks for Sockets {
    fn controls(&self) -> &Arc<Controls> {
        &self.controls
    }

    fn lost(&self, _peer: usize) {}

    fn close(&self) {
        self.shut_down();
    }

    fn has_wire(&self) -> bool {
        let links = self.lanes.iter().flatten().flatten();
        links
            .flat_map(StripedLink::streams)
            .any(PeerConnection::is_wire)
    }
}

impl Transport for Sockets {
    fn write(
        &self,
        lane: VirtualLane,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        self.link(lane, peer)?.write(head, body)
    }

    fn read(&self, lane: VirtualLane, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let link = self.link(lane, peer)?;
        let count = link.read(into);
        if count.is_err() && link.streams().iter().any(PeerConnection::is_garbled) {
            self.controls.suspect(peer);
        }
        count
    }

    fn zero_copy(&self) -> Option<&dyn ZeroCopy> {
        None
    }

    fn wait(&self, lane: VirtualLane, wants: &[WaitInterest], until: Instant) {
        let waker = &self.wakers[lane as usize];
        let mut fds = Vec::with_capacity(2 * wants.len() + 1);
        fds.push(waker.poll_fd());
        for want in wants {
            let Ok(link) = self.link(want.lane, want.peer) else {
                continue;
            };
            let [reads, writes] = link.next();
            if want.read && reads.is_filled() {
                return;
            }
            let both = want.read && want.write && std::ptr::eq(reads, writes);
            let flags = [
                (want.read, reads, PollFlags::IN),
                (want.write && !both, writes, PollFlags::OUT),
            ];
            for (_, stream, flag) in flags.into_iter().filter(|(wanted, ..)| *wanted) {
                let more = if both {
                    PollFlags::OUT
                } else {
                    PollFlags::empty()
                };
                fds.push(PollFd::from_borrowed_fd(stream.as_fd(), flag | more));
            }
        }
        poll_until(&mut fds, until);
        if !fds[0].revents().is_empty() {
            waker.clear();
        }
    }

    fn wake(&self) {
        self.wakers.iter().for_each(Waker::wake);
    }

    fn notify_failure(&self, news: &FailureNotice) {
        self.controls.send_failure(news);
    }

    fn nudge(&self) -> bool {
        self.controls.wake();
        true
    }

    fn notice_reads(&self) -> Option<u64> {
        Some(self.controls.reads())
    }

    fn now(&self) -> Instant {
        deadline::now()
    }

    fn patience(&self) -> SpinPolicy {
        self.patience
    }

    fn gulp(&self) -> usize {
        GULP_BYTES
    }
}
