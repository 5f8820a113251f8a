//! Owner side of workers on several machines.
//!
//! Each rank has a connection to the host of its worker and a thread that reads it. A rank whose
//! machine is lost is started on another one; the split stays the same, so the answer does too. The
//! host side is [`host`](super::host).

mod spare;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::workers::Event;

use super::connection::{
    ConnectionError, MessageConnection, SilenceTimer, receive_message, send_message,
};
use super::host::{BEAT, FromHost, ModelName, SILENCE, ToHost};
use super::relay::Relay;
use super::{InstanceWorkers, WorkerSite};
use crate::Error;
use paceline_worker::messages::{FromWorker, RankCables, ToWorker};
use spare::{Packing, Spare, SpareSlot};

/// Longest wait for a machine to start a worker: its program may come from a cold disk.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Queued events of a rank after which its connection is not read further.
const HELD_MAX: usize = 4096;

/// A machine that can host a worker, with an open connection.
#[derive(Debug)]
pub struct WorkerHost {
    /// The machine's name for people.
    pub name: String,
    pub node: NodeId,
    /// A new connection to it, at whose other end [`host`](super::host::host) runs.
    pub line: Box<dyn MessageConnection>,
}

/// Chooses the machines that host workers and the routes between them.
pub trait WorkerHosts: Send + Sync + fmt::Debug {
    /// Opens a connection to the machine of a rank: the one that the placement names, or a
    /// replacement if it is lost. Called before a worker starts; blocks for a bounded time.
    ///
    /// # Errors
    /// Why there is none.
    fn open(&self, rank: Rank) -> Result<WorkerHost, String>;

    /// Opens a connection to a machine for a standby worker of a rank: not the machine of the first
    /// worker, and with enough memory. Blocks while that machine gets the model.
    ///
    /// # Errors
    /// Why there is none.
    fn open_spare(&self, rank: Rank) -> Result<WorkerHost, String>;

    /// Whether a node is alive by the current membership.
    fn lives(&self, node: NodeId) -> bool;

    /// The standby worker of a rank has replaced its worker.
    fn promoted(&self, rank: Rank);
    /// The best measured address at which a worker on `from` reaches one on `to`; the port has no
    /// meaning.
    fn route(&self, from: NodeId, to: NodeId) -> Option<SocketAddr>;

    /// This machine's address for ranks on `from` if they reach those on `to` through it alone.
    fn relays_at(&self, from: NodeId, to: NodeId) -> Option<IpAddr> {
        let (_, _) = (from, to);
        None
    }

    /// Whether all routes between `nodes`, as [`route`](Self::route) returns them, are on networks
    /// trusted for plaintext. False if a route is missing.
    fn is_trusted(&self, nodes: &[NodeId]) -> bool {
        let _ = nodes;
        false
    }

    /// RDMA cables between ranks on `nodes` that their machines trust; `None` without any.
    fn cables(&self, nodes: &[NodeId]) -> Option<RankCables> {
        let _ = nodes;
        None
    }

    /// The first group over `nodes` uses the routes that are known now, unverified.
    fn trust(&self, nodes: &[NodeId]);

    /// Verifies the routes between `nodes` before a new group replaces a broken one. Measures all
    /// routes again if a node is `doubted`, else only routes never measured or used. Blocks for a
    /// bounded time.
    fn settle(&self, nodes: &[NodeId], doubted: &[NodeId]);

    /// A rank on one node blames one on the other: their routes are in doubt, if none is measured.
    fn blamed(&self, a: NodeId, b: NodeId) {
        let (_, _) = (a, b);
    }

    /// The nodes of ranks on `nodes` that have to move, each with the reason: another rank's node
    /// and they cannot speak.
    fn apart(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, String> {
        let _ = nodes;
        BTreeMap::new()
    }

    /// The worker of a rank has to move, which is no fault of its node.
    fn displaced(&self, rank: Rank) {
        let _ = rank;
    }
}

/// Workers on several machines.
pub struct RemoteWorkers {
    places: Box<dyn WorkerHosts>,
    model: ModelName,
    draft: Option<ModelName>,
    adapters: Vec<ModelName>,
    pin: Option<usize>,
    seats: Vec<Mutex<Option<RemoteWorker>>>,
    spares: Vec<Mutex<SpareSlot>>,
    inbox: Arc<Inbox>,
    /// Number of the next spare worker.
    next_spare: AtomicU64,
    epochs: Mutex<Epochs>,
    /// By the rank that dials and the other one, where their machines cannot speak.
    relays: Mutex<BTreeMap<(Rank, Rank), Relay>>,
    /// Set before the workers are ended, so that a standby that starts meanwhile is ended too.
    over: AtomicBool,
}

/// Evidence from broken groups about the routes between their nodes.
#[derive(Default)]
struct Epochs {
    /// The last epoch that a rank was assigned to.
    assigned: u64,
    /// The last epoch whose routes were verified.
    settled: u64,
    /// Whether a worker was started since: then its loss broke the group, not a route.
    started: bool,
    /// Whether the ranks of that epoch communicate without encryption.
    plain: bool,
    /// Nodes whose ranks have to move before the ranks join, and why.
    apart: BTreeMap<NodeId, String>,
}

/// Distance between the numbers of standby workers: more than the workers that one rank ever has.
const SPARE_STEP: u64 = 1 << 32;

/// A rank's worker and the thread that receives its events.
struct RemoteWorker {
    place: String,
    node: NodeId,
    line: Arc<dyn MessageConnection>,
    post: WorkerSite,
    /// Address at which the owner reaches the worker's machine; `None` for this machine.
    listen: Option<SocketAddr>,
    reader: Option<JoinHandle<()>>,
    packing: Arc<Mutex<Packing>>,
}

impl RemoteWorker {
    /// Makes the host end the worker, and joins the receiving thread.
    fn end(mut self) {
        self.line.close();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join(); // it has no result
        }
    }
}

/// Received events that `receive` has not returned yet.
#[derive(Default)]
struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Default)]
struct InboxState {
    events: VecDeque<(u64, Event<FromWorker>)>,
    /// By rank: number of its current worker. Events of earlier workers are dropped.
    workers: Vec<u64>,
    woken: bool,
    /// Nodes whose connection broke under a rank's worker: routes to them may be broken too.
    doubted: BTreeSet<NodeId>,
    /// Whether a worker reported a failed epoch.
    failed: bool,
    /// Ranks that reported one, and those that they blamed.
    blamed: BTreeSet<(Rank, Rank)>,
}

impl RemoteWorkers {
    /// State for `ranks` workers; starts none.
    pub fn new(
        places: Box<dyn WorkerHosts>,
        model: ModelName,
        ranks: u32,
        pin: Option<usize>,
    ) -> Self {
        let inbox = Inbox::default();
        lock(&inbox.state).workers = vec![0; ranks as usize];
        Self {
            places,
            model,
            draft: None,
            adapters: Vec::new(),
            pin,
            seats: (0..ranks).map(|_| Mutex::new(None)).collect(),
            spares: (0..ranks).map(|_| Mutex::default()).collect(),
            inbox: Arc::new(inbox),
            next_spare: AtomicU64::new(SPARE_STEP),
            epochs: Mutex::default(),
            relays: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    /// Adds the draft model's path to each [`WorkerSite`], where the machine has the file.
    #[must_use]
    pub fn with_draft(mut self, draft: Option<ModelName>) -> Self {
        self.draft = draft;
        self
    }

    /// Adds the adapters' paths to each [`WorkerSite`]; a machine that lacks one starts no worker.
    #[must_use]
    pub fn with_adapters(mut self, adapters: Vec<ModelName>) -> Self {
        self.adapters = adapters;
        self
    }

    /// Names of the machine of each rank, for people; empty where there is none now.
    pub fn machines(&self) -> Vec<String> {
        let name = |seat: &Mutex<Option<RemoteWorker>>| {
            lock(seat)
                .as_ref()
                .map_or_else(String::new, |s| s.place.clone())
        };
        self.seats.iter().map(name).collect()
    }

    fn seat(&self, rank: Rank) -> &Mutex<Option<RemoteWorker>> {
        &self.seats[rank.0 as usize]
    }

    fn slot(&self, rank: Rank) -> &Mutex<SpareSlot> {
        &self.spares[rank.0 as usize]
    }

    /// Where a rank's worker runs.
    fn node_of(&self, rank: Rank) -> Option<NodeId> {
        lock(self.seat(rank)).as_ref().map(|seat| seat.node)
    }

    /// Makes a host start a worker.
    fn begin(&self, place: WorkerHost) -> Result<RemoteWorker, ConnectionError> {
        let WorkerHost { name, node, line } = place;
        let of = |reason: &dyn fmt::Display| ConnectionError::new(format!("{name}: {reason}"));
        let start = ToHost::<ToWorker>::Start {
            model: self.model.clone(),
            pin: self.pin,
            draft: self.draft.clone(),
            adapters: self.adapters.clone(),
        };
        send_message(&*line, &start).map_err(|error| of(&error))?;
        let answer = receive_message(&*line, START_LIMIT).map_err(|error| of(&error))?;
        match answer {
            Some(FromHost::Started {
                listen,
                bind,
                model,
                draft,
                adapters,
                first_core,
                pid,
            }) => Ok(RemoteWorker {
                place: name,
                node,
                line: Arc::from(line),
                post: WorkerSite {
                    listen: bind,
                    model,
                    draft,
                    adapters,
                    first_core,
                    pid,
                },
                listen,
                reader: None,
                packing: Arc::default(),
            }),
            Some(FromHost::Refused { reason }) => Err(of(&reason)),
            Some(_) => Err(of(&"it speaks another version of this protocol")),
            None => Err(of(&format!(
                "it did not start a worker within {START_LIMIT:?}"
            ))),
        }
    }

    /// Starts a worker on a host, and the thread that receives its events.
    fn sit(
        &self,
        rank: Rank,
        worker: u64,
        place: Result<WorkerHost, String>,
    ) -> Result<RemoteWorker, Error> {
        let place = place.map_err(ConnectionError::new);
        let seat = place.and_then(|place| self.begin(place));
        let mut seat = seat.map_err(|source| Error::Place { rank, source })?;
        let reader = MessageReader {
            line: Arc::clone(&seat.line),
            inbox: Arc::clone(&self.inbox),
            packing: Arc::clone(&seat.packing),
            place: seat.place.clone(),
            node: seat.node,
            rank,
            worker,
        };
        let builder = std::thread::Builder::new().name(format!("{rank}"));
        let reader = builder.spawn(move || reader.run());
        seat.reader = Some(reader.map_err(|source| Error::System {
            what: "start a thread",
            source,
        })?);
        Ok(seat)
    }

    /// A standby worker that has its assignment: the current one, or a new one if that is unusable.
    /// `None` if no machine can host it.
    fn prepared(
        &self,
        rank: Rank,
        (tag, earlier): (u64, Option<Spare>),
        message: &dyn Fn(WorkerSite) -> ToWorker,
    ) -> Result<Option<Spare>, Error> {
        let spare = match earlier {
            Some(spare) if spare.is_of_use(self.node_of(rank)) => Some(Spare { tag, ..spare }),
            Some(lost) => {
                lost.seat.end();
                self.new_spare(rank, tag)?
            }
            None => self.new_spare(rank, tag)?,
        };
        let Some(spare) = spare else { return Ok(None) };
        lock(&spare.seat.packing).asked += 1;
        let prepare = ToHost::Worker(message(spare.seat.post.clone()));
        if let Err(source) = send_message(&*spare.seat.line, &prepare) {
            spare.seat.end();
            return Err(Error::Place { rank, source });
        }
        Ok(Some(spare))
    }

    /// Starts a standby worker; `None` if no machine can host it.
    fn new_spare(&self, rank: Rank, tag: u64) -> Result<Option<Spare>, Error> {
        let Ok(place) = self.places.open_spare(rank) else {
            return Ok(None);
        };
        let worker = self.next_spare.fetch_add(SPARE_STEP, Ordering::Relaxed);
        let seat = self.sit(rank, worker, Ok(place))?;
        Ok(Some(Spare { seat, worker, tag }))
    }

    /// Stores a standby worker in its slot and returns true; after the end it ends the worker
    /// instead.
    fn fill(&self, rank: Rank, spare: Option<Spare>) -> bool {
        let mut slot = lock(self.slot(rank));
        // Read under the lock: `end` sets the flag before it empties the slots.
        let is_over = self.over.load(Ordering::SeqCst);
        let (kept, late) = match spare {
            Some(spare) if is_over => (SpareSlot::Empty, Some(spare)),
            Some(spare) => (SpareSlot::Kept(Box::new(spare)), None),
            None => (SpareSlot::Empty, None),
        };
        let is_kept = matches!(kept, SpareSlot::Kept(_));
        *slot = kept;
        drop(slot);
        if let Some(late) = late {
            late.seat.end();
        }
        is_kept
    }

    /// Listen address of the worker on the owner's machine: the one by which another worker's
    /// machine reaches it, or loopback if all ranks are here.
    fn own_listen(&self) -> SocketAddr {
        let known = self.own_addr();
        known.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }

    /// Whether every rank that has a worker has it on this machine.
    fn is_all_here(&self) -> bool {
        let is_here = |seat: &Mutex<Option<RemoteWorker>>| {
            lock(seat).as_ref().is_none_or(|seat| seat.listen.is_none())
        };
        self.seats.iter().all(is_here)
    }

    /// Verifies the routes between the ranks' nodes, once an epoch, before the ranks connect.
    ///
    /// If a worker was lost and another started, that loss broke the group, so only routes to nodes
    /// whose connection broke are doubted. If a rank failed while all workers live, any route may
    /// be the cause.
    fn settle(&self) {
        let mut epochs = lock(&self.epochs);
        if epochs.assigned == epochs.settled {
            return;
        }
        epochs.settled = epochs.assigned;
        let started = std::mem::take(&mut epochs.started);
        let (mut doubted, failed) = self.inbox.drain_suspects();
        let blamed = std::mem::take(&mut lock(&self.inbox.state).blamed);
        for (a, b) in blamed {
            if let (Some(a), Some(b)) = (self.node_of(a), self.node_of(b)) {
                self.places.blamed(a, b);
            }
        }
        let nodes = self.nodes();
        if failed && !started {
            doubted.clone_from(&nodes);
        }
        let list = |nodes: BTreeSet<NodeId>| Vec::from_iter(nodes);
        match epochs.assigned {
            _ if nodes.len() < 2 => {}
            0 | 1 => self.places.trust(&list(nodes)),
            _ => self.places.settle(&list(nodes), &list(doubted)),
        }
        epochs.apart = self.places.apart(&list(self.nodes()));
    }

    /// Checks that ranks may join on their nodes. Ranks on nodes that cannot speak to others are
    /// refused, so that they start elsewhere; the others wait for that.
    ///
    /// # Errors
    /// Why this rank has to move.
    fn may_join(&self, rank: Rank) -> Result<bool, Error> {
        let apart = lock(&self.epochs).apart.clone();
        let place = lock(self.seat(rank))
            .as_ref()
            .map(|seat| (seat.node, seat.place.clone()));
        let refused = place.and_then(|(node, place)| Some((place, apart.get(&node)?)));
        if let Some((place, reason)) = refused {
            self.places.displaced(rank);
            let source = ConnectionError::new(format!("{place}: {reason}"));
            return Err(Error::Place { rank, source });
        }
        Ok(apart.is_empty())
    }

    /// Verifies the routes to a standby's node in advance, so that no recovery waits for it.
    fn meet(&self, node: NodeId) {
        let mut nodes = self.nodes();
        nodes.insert(node);
        if nodes.len() > 1 {
            self.places.settle(&Vec::from_iter(nodes), &[]);
        }
    }

    /// Where the workers run.
    fn nodes(&self) -> BTreeSet<NodeId> {
        let seats = self.seats.iter();
        let nodes = seats.filter_map(|seat| lock(seat).as_ref().map(|seat| seat.node));
        nodes.collect()
    }

    /// The ranks' addresses as seen by `rank`, over the best route between the two machines. A rank
    /// that listens at one specific address is reached there.
    fn seen_by(&self, rank: Rank, addrs: &[SocketAddr]) -> Vec<SocketAddr> {
        let from = self.node_of(rank);
        let own = self.own_listen();
        let seen = |(to, addr): (usize, &SocketAddr)| {
            if to == rank.0 as usize || !addr.ip().is_unspecified() {
                return *addr;
            }
            let seat = lock(&self.seats[to]);
            let told = seat.as_ref().and_then(|seat| seat.listen).unwrap_or(own);
            let to = seat.as_ref().map(|seat| seat.node);
            let ends = from.zip(to).filter(|(from, to)| from != to);
            let route = ends.and_then(|(from, to)| self.places.route(from, to));
            let mut place = route.unwrap_or(told);
            place.set_port(addr.port());
            place
        };
        let seen = addrs.iter().enumerate().map(seen);
        let relayed = |(to, seen): (u32, SocketAddr)| {
            let relay = self.relay(rank, Rank(to), addrs[to as usize]);
            relay.unwrap_or(seen)
        };
        (0..).zip(seen).map(relayed).collect()
    }

    /// The address of a new relay where the machines of two ranks cannot speak. The higher rank
    /// dials. `addr` is the listen address of the lower one. `None` also if the system refuses a
    /// relay: the ranks then do not join, and the epoch fails.
    fn relay(&self, rank: Rank, to: Rank, mut addr: SocketAddr) -> Option<SocketAddr> {
        let ends = self.node_of(rank).zip(self.node_of(to));
        let (from, there) = ends.filter(|_| rank > to)?;
        let at = self.places.relays_at(from, there);
        let mut relays = lock(&self.relays);
        relays.remove(&(rank, to)); // of an earlier epoch
        let at = at?;
        if addr.ip().is_unspecified() {
            let told = lock(self.seat(to)).as_ref().and_then(|seat| seat.listen);
            addr.set_ip(told?.ip());
        }
        let relay = Relay::start(at, addr).ok()?;
        Some(relays.entry((rank, to)).or_insert(relay).addr())
    }
}

impl InstanceWorkers for RemoteWorkers {
    fn start(&self, rank: Rank) -> Result<(), Error> {
        self.stop(rank);
        lock(&self.epochs).started = true;
        let spare = lock(self.slot(rank)).take_packed(|node| self.places.lives(node));
        if let Some(spare) = spare {
            self.places.promoted(rank);
            self.inbox.adopt(rank, spare.worker);
            *lock(self.seat(rank)) = Some(spare.seat);
            return Ok(());
        }
        let worker = self.inbox.next_worker(rank);
        let seat = self.sit(rank, worker, self.places.open(rank))?;
        *lock(self.seat(rank)) = Some(seat);
        Ok(())
    }

    fn keep_spare(
        &self,
        rank: Rank,
        tag: u64,
        message: &dyn Fn(WorkerSite) -> ToWorker,
    ) -> Result<bool, Error> {
        let worker_at = self.node_of(rank);
        let earlier = {
            let mut slot = lock(self.slot(rank));
            if !slot.lacks(tag, worker_at) {
                return Ok(true);
            }
            let earlier = slot.take();
            *slot = SpareSlot::Starting;
            earlier
        };
        let made = self.prepared(rank, (tag, earlier), message);
        let (spare, failed) = match made {
            Ok(spare) => (spare, None),
            Err(error) => (None, Some(error)),
        };
        let spare_at = spare.as_ref().map(|spare| spare.seat.node);
        let is_kept = self.fill(rank, spare);
        if let Some(node) = spare_at.filter(|_| is_kept) {
            self.meet(node);
        }
        failed.map_or(Ok(is_kept), Err)
    }

    fn lacks_spare(&self, rank: Rank, tag: u64) -> bool {
        let worker_at = self.node_of(rank);
        lock(self.slot(rank)).lacks(tag, worker_at)
    }

    fn send(&self, rank: Rank, message: &ToWorker) -> Result<(), Error> {
        let line = lock(self.seat(rank)).as_ref().map(|s| Arc::clone(&s.line));
        if let ToWorker::Assign(job) = message {
            let mut epochs = lock(&self.epochs);
            (epochs.assigned, epochs.plain) = (job.epoch, job.plain);
        }
        let join = match message {
            ToWorker::Join { addrs } => {
                self.settle();
                if !self.may_join(rank)? {
                    return Ok(()); // the epoch fails by another rank
                }
                let plain = lock(&self.epochs).plain;
                if plain && !self.is_trusted() {
                    // A trusted route was lost since; plaintext must not use another one.
                    let source = ConnectionError::new("the trusted way to other ranks is gone");
                    return Err(Error::Place { rank, source });
                }
                let addrs = self.seen_by(rank, addrs);
                Some(ToWorker::Join { addrs })
            }
            _ => None,
        };
        let message = join.as_ref().unwrap_or(message);
        let sent = match line {
            Some(line) => send_message(&*line, &ToHost::Worker(message)),
            None => Err(ConnectionError::new("no worker runs")),
        };
        sent.map_err(|source| Error::Place { rank, source })
    }

    fn transfer_addr(&self, rank: Rank) -> SocketAddr {
        let seat = lock(self.seat(rank));
        let bind = seat.as_ref().map(|seat| seat.post.listen);
        drop(seat);
        bind.unwrap_or_else(|| self.own_listen())
    }

    fn seen(&self, rank: Rank, addr: SocketAddr, own: SocketAddr) -> SocketAddr {
        if !addr.ip().is_unspecified() {
            return addr;
        }
        let told = lock(self.seat(rank)).as_ref().and_then(|seat| seat.listen);
        let mut place = told.unwrap_or(own);
        place.set_port(addr.port());
        place
    }

    fn own_addr(&self) -> Option<SocketAddr> {
        self.seats.iter().find_map(|seat| {
            let mut addr = lock(seat).as_ref()?.line.own_addr()?;
            addr.set_port(0);
            Some(addr)
        })
    }

    fn receive(&self, wait: Duration) -> Option<Event<FromWorker>> {
        self.inbox.take(wait)
    }

    fn wake(&self) {
        lock(&self.inbox.state).woken = true;
        self.inbox.changed.notify_all();
    }

    fn stop(&self, rank: Rank) {
        self.inbox.next_worker(rank);
        let seat = lock(self.seat(rank)).take();
        if let Some(seat) = seat {
            seat.end();
        }
    }

    /// Hosts apply their own grace period. This does not wait for a standby that is still starting:
    /// the thread that starts it ends it, within `START_LIMIT`.
    fn end(&self, _grace: Duration) {
        self.over.store(true, Ordering::SeqCst);
        (0..self.seats.len() as u32).for_each(|rank| self.stop(Rank(rank)));
        lock(&self.relays).clear();
        let spares = self.spares.iter().filter_map(|slot| lock(slot).take());
        let spares: Vec<Spare> = spares.collect(); // the locks are free again
        spares.into_iter().for_each(|spare| spare.seat.end());
    }

    fn post(&self, rank: Rank) -> WorkerSite {
        let (own, is_all_here) = (self.own_listen(), self.is_all_here());
        let seat = lock(self.seat(rank));
        match &*seat {
            Some(seat) if is_all_here => WorkerSite {
                listen: own,
                ..seat.post.clone()
            },
            Some(seat) => seat.post.clone(),
            None => WorkerSite {
                listen: own,
                model: self.model.name.clone().into(),
                draft: None,
                adapters: Vec::new(),
                first_core: None,
                pid: None,
            },
        }
    }

    fn is_one_machine(&self) -> bool {
        false
    }

    fn cables(&self) -> Option<RankCables> {
        let ranks = (0..self.seats.len() as u32).map(Rank);
        let nodes: Option<Vec<NodeId>> = ranks.map(|rank| self.node_of(rank)).collect();
        self.places.cables(&nodes?)
    }

    fn is_trusted(&self) -> bool {
        self.places.is_trusted(&Vec::from_iter(self.nodes()))
    }
}

impl Drop for RemoteWorkers {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

impl fmt::Debug for RemoteWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers on {:?}", self.seats.len(), self.places)
    }
}

/// State of the thread that receives a worker's messages.
struct MessageReader {
    line: Arc<dyn MessageConnection>,
    inbox: Arc<Inbox>,
    packing: Arc<Mutex<Packing>>,
    place: String,
    node: NodeId,
    rank: Rank,
    worker: u64,
}

impl MessageReader {
    /// Puts the worker's events into the inbox until its connection ends, and sends heartbeats to
    /// its host.
    fn run(&self) {
        let lost = self.receive_all();
        self.line.close();
        let reason = format!("{}: {lost}", self.place);
        let rank = self.rank;
        let gone = Event::Gone { rank, reason };
        self.inbox.doubt(self.worker, rank, self.node);
        self.inbox.put(self.worker, rank, gone);
    }

    /// Receives until the connection ends; returns the reason.
    fn receive_all(&self) -> ConnectionError {
        let mut told = Instant::now();
        let mut quiet = SilenceTimer::new(told, BEAT);
        loop {
            if told.elapsed() >= BEAT {
                if let Err(broken) = send_message(&*self.line, &ToHost::<ToWorker>::Beat) {
                    return broken;
                }
                told = Instant::now();
            }
            match receive_message::<FromHost>(&*self.line, BEAT) {
                Ok(Some(news)) => {
                    quiet.heard(Instant::now());
                    self.handle_message(news);
                }
                Ok(None) => {
                    if let Some(silence) = quiet.exceeds(SILENCE, Instant::now()) {
                        let silence = silence.as_secs_f64();
                        return ConnectionError::new(format!("no sign of life for {silence:.1} s"));
                    }
                }
                Err(broken) => return broken,
            }
        }
    }

    fn handle_message(&self, news: FromHost) {
        lock(&self.packing).hear(&news);
        if matches!(news, FromHost::Message(FromWorker::Prepared)) {
            return; // not for the instance
        }
        if let Some(event) = news.event(self.rank, &self.place) {
            self.inbox.put(self.worker, self.rank, event);
        }
    }
}

impl Inbox {
    /// Drops the events of a rank's worker; returns the number of the next worker.
    fn next_worker(&self, rank: Rank) -> u64 {
        let mut held = lock(&self.state);
        let worker = &mut held.workers[rank.0 as usize];
        *worker += 1;
        let worker = *worker;
        held.events.retain(|(_, event)| event.rank() != rank);
        drop(held);
        self.changed.notify_all();
        worker
    }

    /// Replaces a rank's worker by the one with this number.
    fn adopt(&self, rank: Rank, worker: u64) {
        let mut held = lock(&self.state);
        held.workers[rank.0 as usize] = worker;
        held.events.retain(|(_, event)| event.rank() != rank);
    }

    /// Marks a node whose connection broke, unless it was closed because its worker was replaced.
    fn doubt(&self, worker: u64, rank: Rank, node: NodeId) {
        let mut held = lock(&self.state);
        if held.workers[rank.0 as usize] == worker {
            held.doubted.insert(node);
        }
    }

    /// The doubted nodes since the last call, and whether a worker reported a failed epoch.
    fn drain_suspects(&self) -> (BTreeSet<NodeId>, bool) {
        let mut held = lock(&self.state);
        let doubted = std::mem::take(&mut held.doubted);
        (doubted, std::mem::take(&mut held.failed))
    }

    /// Queues an event unless its worker was replaced. Waits while the queue is full.
    fn put(&self, worker: u64, rank: Rank, event: Event<FromWorker>) {
        let mut held = lock(&self.state);
        while held.workers[rank.0 as usize] == worker && held.events.len() >= HELD_MAX {
            let waited = self.changed.wait(held);
            held = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if held.workers[rank.0 as usize] == worker {
            if let Event::Message {
                message: FromWorker::Failed { blamed, .. },
                ..
            } = &event
            {
                held.failed = true;
                let ranks = held.workers.len();
                let blamed = blamed.filter(|blamed| (*blamed as usize) < ranks);
                let blamed = blamed.map(|blamed| (rank, Rank(blamed)));
                held.blamed.extend(blamed);
            }
            held.events.push_back((worker, event));
        }
        drop(held);
        self.changed.notify_all();
    }

    fn take(&self, wait: Duration) -> Option<Event<FromWorker>> {
        let end = Instant::now() + wait;
        let mut held = lock(&self.state);
        loop {
            if let Some((_, event)) = held.events.pop_front() {
                self.changed.notify_all();
                return Some(event);
            }
            let left = end.saturating_duration_since(Instant::now());
            if std::mem::take(&mut held.woken) || left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(held, left);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;

    use paceline_base::testing::Stopwatch;

    use super::super::connection::pair;
    use super::*;
    use crate::workers::connection::MemoryConnection;

    /// Hosts, one at a time: each hands out a connection whose other end the test has.
    #[derive(Debug)]
    struct FakeWorkerHosts {
        lines: Mutex<VecDeque<MemoryConnection>>,
        settled: Arc<Settled>,
    }

    /// By call: how many nodes were verified, and how many of them were doubted; `None` if the
    /// routes were trusted.
    type Settled = Mutex<Vec<(usize, Option<usize>)>>;

    impl WorkerHosts for FakeWorkerHosts {
        fn open(&self, _: Rank) -> Result<WorkerHost, String> {
            let mut lines = lock(&self.lines);
            let left = lines.len() as u8;
            let line = lines.pop_front().ok_or("no machine is left")?;
            Ok(WorkerHost {
                name: "quokka".to_owned(),
                node: NodeId([left; 16]), // each is another one
                line: Box::new(line),
            })
        }

        fn lives(&self, _: NodeId) -> bool {
            true
        }

        /// The seventh machine speaks to this one alone.
        fn apart(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, String> {
            let seventh = nodes.iter().filter(|id| **id == NodeId([7; 16]));
            seventh
                .map(|id| (*id, "no path answers".to_owned()))
                .collect()
        }

        /// The third machine and the first one speak through this one alone.
        fn relays_at(&self, from: NodeId, to: NodeId) -> Option<IpAddr> {
            let ends = [from.0[0], to.0[0]];
            (ends == [1, 3] || ends == [3, 1]).then_some(Ipv4Addr::LOCALHOST.into())
        }

        fn open_spare(&self, rank: Rank) -> Result<WorkerHost, String> {
            self.open(rank)
        }

        fn promoted(&self, _: Rank) {}

        fn route(&self, _: NodeId, _: NodeId) -> Option<SocketAddr> {
            None
        }

        fn trust(&self, nodes: &[NodeId]) {
            lock(&self.settled).push((nodes.len(), None));
        }

        fn settle(&self, nodes: &[NodeId], doubted: &[NodeId]) {
            let doubted = nodes.iter().filter(|id| doubted.contains(id)).count();
            lock(&self.settled).push((nodes.len(), Some(doubted)));
        }
    }

    const WAIT: Duration = Duration::from_secs(5);

    fn crew<const N: usize>() -> (RemoteWorkers, [MemoryConnection; N]) {
        let (crew, hosts, _) = crew_of(1);
        (crew, hosts)
    }

    fn crew_of<const N: usize>(ranks: u32) -> (RemoteWorkers, [MemoryConnection; N], Arc<Settled>) {
        let (lines, hosts): (Vec<_>, Vec<_>) = (0..N).map(|_| pair()).unzip();
        let model = ModelName {
            name: "smollm2".to_owned(),
            sha256: String::new(),
            manifest: false,
        };
        let settled = Arc::<Settled>::default();
        let lines = FakeWorkerHosts {
            lines: Mutex::new(lines.into()),
            settled: Arc::clone(&settled),
        };
        let crew = RemoteWorkers::new(Box::new(lines), model, ranks, None);
        (crew, hosts.try_into().unwrap(), settled)
    }

    fn started() -> FromHost {
        FromHost::Started {
            listen: Some(SocketAddr::from(([10, 0, 0, 7], 0))),
            bind: SocketAddr::from(([0, 0, 0, 0], 0)),
            model: "/there/model.gguf".into(),
            draft: Some("/there/draft.gguf".into()),
            adapters: vec!["/there/poet.gguf".into()],
            first_core: None,
            pid: Some(7),
        }
    }

    fn is_packed(crew: &RemoteWorkers) -> bool {
        matches!(&*lock(crew.slot(Rank(0))), SpareSlot::Kept(spare) if spare.is_packed())
    }

    /// Waits for the receiving thread.
    fn until(what: &str, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < WAIT, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_worker_is_started_heard_and_replaced_when_its_machine_is_gone() {
        let (crew, [first, second]) = crew();
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        let post = crew.post(Rank(0));
        assert_eq!(post.listen, SocketAddr::from(([0, 0, 0, 0], 0)));
        let heard = [SocketAddr::from(([0, 0, 0, 0], 77))];
        assert_eq!(crew.seen_by(Rank(0), &heard), heard, "its own");
        assert_eq!(post.model.to_str(), Some("/there/model.gguf"));
        assert_eq!(post.draft.as_deref(), Some("/there/draft.gguf".as_ref()));
        assert_eq!(post.adapters, [PathBuf::from("/there/poet.gguf")]);

        let listening = FromWorker::Listening { addr: post.listen };
        send_message(&first, &FromHost::Message(listening.clone())).unwrap();
        let expected = Event::Message {
            rank: Rank(0),
            message: listening,
        };
        assert_eq!(crew.receive(WAIT), Some(expected));
        first.close();
        let lost = crew.receive(WAIT).unwrap().to_string();
        assert_eq!(lost, "rank 0 on quokka: the line is closed");

        send_message(&second, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        crew.send(Rank(0), &ToWorker::Leave).unwrap();
        let mut heard = Vec::new();
        while !matches!(heard.last(), Some(ToHost::Worker(ToWorker::Leave))) {
            heard.extend(receive_message::<ToHost>(&second, WAIT).unwrap());
        }
        assert!(matches!(heard[0], ToHost::Start { .. }), "{heard:?}");
        let error = crew.start(Rank(0)).unwrap_err().to_string();
        assert_eq!(error, "rank 0 on no machine is left");
    }

    #[test]
    fn a_spare_takes_the_place_of_a_lost_worker_and_keeps_its_line() {
        let (crew, [first, second]) = crew();
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        send_message(&second, &started()).unwrap();
        let message = |post: WorkerSite| {
            assert_eq!(post.model.to_str(), Some("/there/model.gguf"));
            ToWorker::Measure
        };
        assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
        assert!(crew.keep_spare(Rank(0), 1, &message).unwrap(), "the same");
        assert!(crew.keep_spare(Rank(0), 2, &message).unwrap());
        let loading = FromWorker::Loading { done: 1, of: 2 };
        send_message(&second, &FromHost::Message(loading)).unwrap();
        send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
        send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
        until("both are heard", || is_packed(&crew));
        first.close();
        let lost = crew.receive(WAIT).unwrap().to_string();
        assert_eq!(
            lost, "rank 0 on quokka: the line is closed",
            "and nothing of the spare"
        );
        crew.start(Rank(0)).unwrap();
        let left = FromWorker::Listening {
            addr: SocketAddr::from(([10, 0, 0, 7], 1)),
        };
        send_message(&second, &FromHost::Message(left.clone())).unwrap();
        let expected = Event::Message {
            rank: Rank(0),
            message: left,
        };
        let heard = loop {
            match crew.receive(WAIT) {
                // Sent while it was a standby; it may arrive after the loss.
                Some(Event::Message {
                    message: FromWorker::Loading { .. },
                    ..
                }) => {}
                other => break other,
            }
        };
        assert_eq!(heard, Some(expected));
        let mut prepared = 0;
        crew.send(Rank(0), &ToWorker::Leave).unwrap();
        loop {
            match receive_message::<ToHost>(&second, WAIT).unwrap() {
                Some(ToHost::Worker(ToWorker::Measure)) => prepared += 1,
                Some(ToHost::Worker(ToWorker::Leave)) => break,
                _ => {}
            }
        }
        assert_eq!(prepared, 2);
        second.close();
        let lost = crew.receive(WAIT).unwrap().to_string();
        assert_eq!(lost, "rank 0 on quokka: the line is closed");
        assert!(
            !crew.keep_spare(Rank(0), 2, &message).unwrap(),
            "no machine is left"
        );
    }

    #[test]
    fn a_spare_that_is_not_packed_waits_on_while_a_new_worker_starts() {
        let (crew, [first, second, third]) = crew();
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        assert!(crew.lacks_spare(Rank(0), 1));
        send_message(&second, &started()).unwrap();
        assert!(crew.keep_spare(Rank(0), 1, &|_| ToWorker::Measure).unwrap());
        assert!(!crew.lacks_spare(Rank(0), 1));
        assert!(crew.lacks_spare(Rank(0), 2), "prepared for another tag");

        send_message(&third, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        let at = crew.node_of(Rank(0));
        assert_eq!(at, Some(NodeId([1; 16])), "the third machine");
        send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
        until("it is packed", || is_packed(&crew));
        crew.start(Rank(0)).unwrap();
        let at = crew.node_of(Rank(0));
        assert_eq!(at, Some(NodeId([2; 16])), "the spare's");
        assert!(crew.lacks_spare(Rank(0), 1), "it is none any more");
    }

    #[test]
    fn a_spare_whose_worker_is_lost_takes_no_place_and_is_replaced() {
        let failed = FromWorker::Failed {
            epoch: 0,
            reason: "no memory".to_owned(),
            blamed: None,
            interrupted: false,
        };
        let silence = Duration::from_secs(2);
        for lost in [FromHost::Message(failed), FromHost::Silent { silence }] {
            let (crew, [first, second, third]) = crew();
            send_message(&first, &started()).unwrap();
            crew.start(Rank(0)).unwrap();
            send_message(&second, &started()).unwrap();
            let message = |_: WorkerSite| ToWorker::Measure;
            assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
            send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
            until("it is packed", || is_packed(&crew));
            send_message(&second, &lost).unwrap();
            until("it is lost", || crew.lacks_spare(Rank(0), 1));
            send_message(&third, &started()).unwrap();
            assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
            assert!(!is_packed(&crew), "another one");
            let error = crew.start(Rank(0)).unwrap_err().to_string();
            assert_eq!(error, "rank 0 on no machine is left");
            assert!(!crew.lacks_spare(Rank(0), 1), "it packs on");
        }
    }

    #[test]
    fn ways_are_doubted_where_a_line_broke_or_no_worker_was_lost() {
        let (crew, [first, second, third], settled) = crew_of(2);
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        send_message(&second, &started()).unwrap();
        crew.start(Rank(1)).unwrap();
        let epoch = |number| {
            lock(&crew.epochs).assigned = number;
            crew.settle();
            crew.settle(); // once for each rank
            std::mem::take(&mut *lock(&settled))
        };
        assert_eq!(epoch(1), [(2, None)], "its ways were measured for the plan");
        assert_eq!(epoch(2), [(2, Some(0))], "a planned change");

        let failed = FromWorker::Failed {
            epoch: 2,
            reason: "rank 1 is silent".to_owned(),
            blamed: Some(1),
            interrupted: false,
        };
        send_message(&first, &FromHost::Message(failed.clone())).unwrap();
        crew.receive(WAIT).unwrap();
        assert_eq!(epoch(3), [(2, Some(2))], "all workers live");

        send_message(&first, &FromHost::Message(failed)).unwrap();
        crew.receive(WAIT).unwrap();
        second.close();
        crew.receive(WAIT).unwrap();
        send_message(&third, &started()).unwrap();
        crew.start(Rank(1)).unwrap();
        assert_eq!(epoch(4), [(2, Some(0))], "the lost node is no part of it");
        first.close();
        crew.receive(WAIT).unwrap();
        assert_eq!(epoch(5), [(2, Some(1))], "its line broke");
    }

    #[test]
    fn ranks_join_nowhere_while_two_machines_cannot_speak() {
        let (crew, hosts, _) = crew_of::<9>(3);
        let start = |rank: u32, host: usize| {
            send_message(&hosts[host], &started()).unwrap();
            crew.start(Rank(rank)).unwrap();
        };
        (0..3).for_each(|i| start(i as u32, i));
        let epoch = |number: u64, refused: &[bool]| {
            lock(&crew.epochs).assigned = number;
            let addrs = vec![SocketAddr::from(([127, 0, 0, 1], 1)); 3];
            let join = ToWorker::Join { addrs };
            for (rank, refused) in (0..3).map(Rank).zip(refused) {
                let sent = crew.send(rank, &join);
                assert_eq!(sent.is_err(), *refused, "{rank}: {sent:?}");
            }
        };
        epoch(1, &[false, false, true]);
        start(2, 3); // on the sixth machine
        epoch(2, &[false; 3]);
        for host in [0, 1, 3] {
            let heard =
                std::iter::from_fn(|| receive_message::<ToHost>(&hosts[host], WAIT).ok()?);
            let heard = heard.filter(|it| !matches!(it, ToHost::Beat | ToHost::Start { .. }));
            let joins = heard.take(1).count();
            assert_eq!(joins, 1, "machine {host} joins the second epoch alone");
        }
        assert!(
            lock(&crew.inbox.state)
                .events
                .iter()
                .all(|(_, it)| it.rank() != Rank(0))
        );
    }

    #[test]
    fn the_higher_rank_dials_a_relay_where_two_machines_cannot_speak() {
        let (crew, hosts, _) = crew_of::<3>(3);
        for (rank, host) in (0..3).map(Rank).zip(&hosts) {
            send_message(host, &started()).unwrap();
            crew.start(rank).unwrap();
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addrs = [listener.local_addr().unwrap(); 3];
        assert_eq!(crew.seen_by(Rank(0), &addrs), addrs, "it dials none");
        assert_eq!(crew.seen_by(Rank(1), &addrs), addrs, "it reaches both");
        let seen = crew.seen_by(Rank(2), &addrs);
        assert_eq!(seen[1..], addrs[1..]);
        assert_ne!(seen[0], addrs[0]);
        let mut dialled = TcpStream::connect(seen[0]).unwrap();
        listener.accept().unwrap();
        crew.end(Duration::ZERO);
        assert_eq!(dialled.read(&mut [0]).unwrap_or(0), 0, "the relay is gone");
    }

    #[test]
    fn an_end_does_not_wait_for_a_spare_that_is_starting() {
        let (crew, [first, second]) = crew();
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        std::thread::scope(|scope| {
            let keep = || crew.keep_spare(Rank(0), 1, &|_| ToWorker::Measure).unwrap();
            let kept = scope.spawn(keep);
            let asked = receive_message::<ToHost>(&second, WAIT).unwrap();
            assert!(matches!(asked, Some(ToHost::Start { .. })), "{asked:?}");
            // That machine has up to START_LIMIT to answer, and does so only after the end.
            let began = Instant::now();
            crew.end(Duration::ZERO);
            assert!(began.elapsed() < START_LIMIT / 2);
            send_message(&second, &started()).unwrap();
            assert!(!kept.join().unwrap(), "it comes too late");
        });
        while receive_message::<ToHost>(&second, WAIT).is_ok_and(|heard| heard.is_some()) {}
        let ended = receive_message::<ToHost>(&second, WAIT)
            .unwrap_err()
            .to_string();
        assert_eq!(ended, "the line is closed");
    }

    #[test]
    fn a_machine_that_refuses_or_is_silent_is_named() {
        let (crew, [first, second]) = crew();
        let reason = "there is no model \"smollm2\" here".to_owned();
        send_message(&first, &FromHost::Refused { reason }).unwrap();
        let error = crew.start(Rank(0)).unwrap_err().to_string();
        assert_eq!(
            error,
            "rank 0 on quokka: there is no model \"smollm2\" here"
        );
        send_message(&second, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        let began = Stopwatch::start();
        let lost = crew.receive(WAIT).unwrap().to_string();
        assert!(lost.contains("quokka: no sign of life for 1."), "{lost}");
        assert!(began.elapsed() < Duration::from_secs(2));
    }
}
