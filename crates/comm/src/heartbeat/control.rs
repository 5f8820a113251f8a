//! The control connections: one for each pair of ranks, for heartbeats and failure notices. They
//! stay usable while the other lanes are full.
//!
//! The group's *heartbeat thread* reads them, also while the rank computes. So a stopped or
//! disconnected peer is detected whether or not a call is running.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paceline_base::{AwakeTime, Rank};
use rustix::event::{PollFd, PollFlags};

use super::Starvation;
use crate::deadline;
use crate::join::{LateConnections, PeerConnection, Refusal, Waker, poll_until};
use crate::locks::lock;
use crate::status::{Cause, FailureNotice};
use crate::transport::{Closed, Transport};
use crate::transport_group::TransportGroup;
use crate::wire::{CONTROL_BYTES, Control};

/// Heartbeats sent per silence limit: four may be late.
const BEATS_PER_SILENCE: u32 = 5;

/// How often the thread receives messages while the rank computes, and checks for late connections.
const TEND_EVERY: Duration = Duration::from_millis(100);

/// Longest credited time between two polls of an awake heartbeat thread, in case one is slow. See
/// [`Awake`].
const AWAKE_MAX: Duration = Duration::from_millis(300);

/// Links that a heartbeat thread monitors.
pub trait MonitoredLinks: Transport {
    /// The control connections of this rank.
    fn controls(&self) -> &Arc<Controls>;

    /// Records that the process of `peer` has ended.
    fn lost(&self, peer: usize);

    /// Closes the links in order, after all peers were notified.
    fn close(&self);

    /// Frees resources that are no longer needed. Called periodically.
    fn tidy(&self) {}

    /// A peer whose link broke with messages in flight. The sender's call may have completed, so
    /// only the control connection can tell the peer not to wait.
    fn cut(&self) -> Option<usize> {
        None
    }

    /// Whether bytes to some peer leave this machine, or a device moves them.
    fn has_wire(&self) -> bool;
}

/// How long the thread waits for a link to accept more of a message, before it polls again.
const PUSH_WAIT: Duration = Duration::from_millis(5);

/// The control connections of one rank.
pub struct Controls {
    /// By rank; `None` for the rank itself.
    streams: Vec<Option<PeerConnection>>,
    /// Bytes that the system has not accepted yet, by rank.
    unsent: Mutex<Vec<Vec<u8>>>,
    /// By rank: the peer sent invalid records on another lane.
    suspects: Vec<AtomicBool>,
    waker: Waker,
    stop: AtomicBool,
    /// See [`Transport::notice_reads`].
    reads: AtomicU64,
    door: LateConnections,
}

impl fmt::Debug for Controls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers = self.streams.iter().flatten().count();
        write!(f, "control connections to {peers} ranks")
    }
}

/// Most bytes queued for a peer that does not read: some frames. Further frames are dropped.
const UNSENT_BYTES: usize = 16 * CONTROL_BYTES;

impl Controls {
    pub(crate) fn new(
        streams: Vec<Option<PeerConnection>>,
        door: LateConnections,
    ) -> std::io::Result<Self> {
        Ok(Self {
            unsent: Mutex::new(vec![Vec::new(); streams.len()]),
            suspects: streams.iter().map(|_| AtomicBool::new(false)).collect(),
            streams,
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            door,
        })
    }

    /// Sends `news` to all peers. A peer that cannot be reached has ended or will be declared
    /// silent: these connections are nearly empty.
    pub(crate) fn send_failure(&self, news: &FailureNotice) {
        self.write(&Control::News(*news));
    }

    fn write(&self, control: &Control) {
        let mut unsent = lock(&self.unsent);
        let bytes = control.encode();
        for (stream, unsent) in self.streams.iter().zip(&mut *unsent) {
            let Some(stream) = stream else { continue };
            if unsent.len() < UNSENT_BYTES {
                unsent.extend_from_slice(&bytes);
            }
            // A peer that has ended is detected by the next read.
            let count = stream.write(unsent, &[]).unwrap_or(unsent.len());
            unsent.drain(..count);
        }
    }

    /// Makes the heartbeat thread declare `peer` lost, because it sent an invalid record.
    pub(crate) fn suspect(&self, peer: usize) {
        self.suspects[peer].store(true, Ordering::Release);
        self.waker.wake();
    }

    /// See [`Transport::notice_reads`].
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Acquire)
    }

    /// Wakes the heartbeat thread.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// See [`Tcp::turned_away`](crate::tcp::Tcp::turned_away).
    pub(crate) fn turned_away(&self) -> Option<Refusal> {
        self.door.turned_away()
    }

    /// Stops the heartbeat thread.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The heartbeat thread's state of a peer.
struct PeerLiveness {
    bytes: [u8; CONTROL_BYTES],
    filled: usize,
    /// Time of the last heartbeat, counted by [`Awake`].
    heard: Duration,
    done: bool,
}

/// Runs until [`Controls::stop`]: sends heartbeats, reads them, and detects silent peers.
pub(super) fn run_heartbeats<T: MonitoredLinks>(group: &TransportGroup<T>, silence: Duration) {
    let controls = group.transport().controls();
    let beat = silence / BEATS_PER_SILENCE;
    let start = deadline::now();
    let mut watches: Vec<PeerLiveness> = controls
        .streams
        .iter()
        .map(|_| PeerLiveness::new())
        .collect();
    let (mut next_beat, mut next_look) = (start, start);
    let mut awake = AwakeTime::new(start, AWAKE_MAX);
    let mut starvation = Starvation::new(start);
    while !controls.stop.load(Ordering::Acquire) {
        let until = match group.push(PUSH_WAIT) {
            true => deadline::now(),
            false => next_beat.min(next_look),
        };
        wait(controls, &watches, until);
        let now = deadline::now();
        starvation.fired(until, now);
        let silence = starvation.stretched(silence, now);
        awake.tick(now);
        let time = awake.total();
        for (peer, watch) in watches.iter_mut().enumerate() {
            if let Some(stream) = &controls.streams[peer] {
                watch.listen(group, peer, stream, time);
            }
        }
        controls.reads.fetch_add(1, Ordering::AcqRel);
        if now >= next_beat {
            controls.write(&Control::Beat);
            next_beat = now + beat;
        }
        for (peer, watch) in watches.iter_mut().enumerate() {
            if controls.streams[peer].is_some() {
                if controls.suspects[peer].load(Ordering::Acquire) {
                    watch.garbled(group, peer);
                }
                watch.judge(group, peer, time, silence);
            }
        }
        if now >= next_look {
            group.tend();
            group.transport().tidy();
            if let Some(peer) = group.transport().cut() {
                let (cause, at) = (Cause::Left(rank(peer)), 0);
                group.poison(FailureNotice { cause, at });
            }
            // A failed group ignores late connections: most likely they are for its successor.
            if group.status_cause().is_none() {
                controls.door.refuse_late();
            }
            next_look = now + TEND_EVERY;
        }
    }
}

fn wait(controls: &Controls, watches: &[PeerLiveness], until: Instant) {
    let streams = controls.streams.iter().zip(watches);
    let open = streams.filter_map(|(stream, watch)| stream.as_ref().filter(|_| !watch.done));
    let mut fds = vec![controls.waker.poll_fd()];
    fds.extend(open.map(|stream| PollFd::new(stream, PollFlags::IN)));
    poll_until(&mut fds, until);
    controls.waker.clear();
}

impl PeerLiveness {
    fn new() -> Self {
        Self {
            bytes: [0; CONTROL_BYTES],
            filled: 0,
            heard: Duration::ZERO,
            done: false,
        }
    }

    /// Reads all available bytes at `time`.
    fn listen<T: MonitoredLinks>(
        &mut self,
        group: &TransportGroup<T>,
        peer: usize,
        stream: &PeerConnection,
        time: Duration,
    ) {
        while !self.done {
            match stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => return,
                Ok(count) => self.filled += count,
                Err(Closed) if stream.is_garbled() => self.garbled(group, peer),
                Err(Closed) => {
                    group.transport().lost(peer);
                    let (cause, at) = (Cause::Left(rank(peer)), u64::MAX);
                    self.end(group, FailureNotice { cause, at });
                }
            }
            if self.filled == CONTROL_BYTES {
                self.filled = 0;
                self.heard = time;
                match Control::decode(&self.bytes) {
                    Some(Control::Beat) => {}
                    Some(Control::News(news)) => group.poison(news),
                    None => self.garbled(group, peer),
                }
            }
        }
    }

    fn garbled<T: MonitoredLinks>(&mut self, group: &TransportGroup<T>, peer: usize) {
        if !self.done {
            let (cause, at) = (Cause::Garbled(rank(peer)), 0);
            self.end(group, FailureNotice { cause, at });
        }
    }

    fn end<T: MonitoredLinks>(&mut self, group: &TransportGroup<T>, news: FailureNotice) {
        self.done = true;
        group.poison(news);
    }

    /// Declares a peer lost that was silent for too long. All bytes that had arrived at `time` are
    /// read.
    fn judge<T: MonitoredLinks>(
        &mut self,
        group: &TransportGroup<T>,
        peer: usize,
        time: Duration,
        silence: Duration,
    ) {
        let quiet = time.saturating_sub(self.heard);
        if !self.done && quiet > silence {
            let millis = u32::try_from(quiet.as_millis()).unwrap_or(u32::MAX);
            let rank = rank(peer);
            let (cause, at) = (Cause::Silent { rank, millis }, 0);
            self.end(group, FailureNotice { cause, at });
        }
    }
}

fn rank(peer: usize) -> Rank {
    Rank(u32::try_from(peer).expect("a rank came from a u32"))
}
