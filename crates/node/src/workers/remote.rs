//! Owner side of workers on several machines.
//!
//! Each rank has a connection to the host of its worker and a thread that reads it. A rank whose
//! machine is lost is started on another one; the split stays the same, so the answer does too. The
//! host side is [`host`](super::host).

mod hosts;
mod inbox;
mod seats;
mod spare;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::{Rank, lock};
use paceline_cluster::nodes::NodeId;
use paceline_cluster::workers::Event;

use super::connection::{ConnectionError, receive_message, send_message};
use super::host::{FromHost, ModelName, ToHost};
use super::relay::Relay;
use super::{InstanceWorkers, WorkerSite};
use crate::Error;
pub use hosts::{WorkerHost, WorkerHosts};
use inbox::{Inbox, MessageReader};
use paceline_worker::messages::{FromWorker, RankCables, ToWorker};
use seats::{Epochs, RemoteWorker};
use spare::{Spare, SpareSlot};

/// Longest wait for a machine to start a worker: its program may come from a cold disk.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Queued events of a rank after which its connection is not read further.
const HELD_MAX: usize = 4096;

/// Workers on several machines.
#[derive(derive_more::Debug)]
#[debug("{} workers on {:?}", self.ranks, self.places)]
pub struct RemoteWorkers {
    places: Box<dyn WorkerHosts>,
    model: ModelName,
    draft: Option<ModelName>,
    adapters: Vec<ModelName>,
    pin: Option<usize>,
    ranks: u32,
    inbox: Arc<Inbox>,
    /// Number of the next spare worker.
    next_spare: AtomicU64,
    /// Not locked while a worker starts or ends, nor while routes are measured.
    state: Mutex<RemoteState>,
}

/// The workers of the instance now, by rank, and the evidence about their routes.
#[derive(Default)]
struct RemoteState {
    seats: Vec<Option<RemoteWorker>>,
    spares: Vec<SpareSlot>,
    epochs: Epochs,
    /// By the rank that dials and the other one, where their machines cannot speak.
    relays: BTreeMap<(Rank, Rank), Relay>,
    /// Set before the workers are ended, so that a standby that starts meanwhile is ended too.
    is_over: bool,
}

impl RemoteState {
    fn seat(&self, rank: Rank) -> Option<&RemoteWorker> {
        self.seats[rank.0 as usize].as_ref()
    }

    fn slot(&mut self, rank: Rank) -> &mut SpareSlot {
        &mut self.spares[rank.0 as usize]
    }
}

/// Distance between the numbers of standby workers: more than the workers that one rank ever has.
const SPARE_STEP: u64 = 1 << 32;

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
            ranks,
            inbox: Arc::new(inbox),
            next_spare: AtomicU64::new(SPARE_STEP),
            state: Mutex::new(RemoteState {
                seats: (0..ranks).map(|_| None).collect(),
                spares: (0..ranks).map(|_| SpareSlot::default()).collect(),
                ..RemoteState::default()
            }),
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
        let name = |seat: &Option<RemoteWorker>| {
            let name = seat.as_ref().map(|seat| seat.place.clone());
            name.unwrap_or_default()
        };
        lock(&self.state).seats.iter().map(name).collect()
    }

    /// Where a rank's worker runs.
    fn node_of(&self, rank: Rank) -> Option<NodeId> {
        lock(&self.state).seat(rank).map(|seat| seat.node)
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
        place: Result<WorkerHost, ConnectionError>,
    ) -> Result<RemoteWorker, Error> {
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
        let mut state = lock(&self.state);
        let (kept, late) = match spare {
            Some(spare) if state.is_over => (SpareSlot::Empty, Some(spare)),
            Some(spare) => (SpareSlot::Kept(Box::new(spare)), None),
            None => (SpareSlot::Empty, None),
        };
        let is_kept = matches!(kept, SpareSlot::Kept(_));
        *state.slot(rank) = kept;
        drop(state);
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
        let state = lock(&self.state);
        let mut seats = state.seats.iter().flatten();
        seats.all(|seat| seat.listen.is_none())
    }

    /// Verifies the routes between the ranks' nodes, once an epoch, before the ranks connect.
    ///
    /// If a worker was lost and another started, that loss broke the group, so only routes to nodes
    /// whose connection broke are doubted. If a rank failed while all workers live, any route may
    /// be the cause.
    fn settle(&self) {
        let (assigned, started) = {
            let epochs = &mut lock(&self.state).epochs;
            if epochs.assigned == epochs.settled {
                return;
            }
            epochs.settled = epochs.assigned;
            (epochs.assigned, std::mem::take(&mut epochs.started))
        };
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
        match assigned {
            _ if nodes.len() < 2 => {}
            0 | 1 => self.places.trust(&list(nodes)),
            _ => self.places.settle(&list(nodes), &list(doubted)),
        }
        let apart = self.places.apart(&list(self.nodes()));
        lock(&self.state).epochs.apart = apart;
    }

    /// Checks that ranks may join on their nodes. Ranks on nodes that cannot speak to others are
    /// refused, so that they start elsewhere; the others wait for that.
    fn may_join(&self, rank: Rank) -> Result<bool, Error> {
        let state = lock(&self.state);
        let apart = &state.epochs.apart;
        let is_whole = apart.is_empty();
        let refused = state.seat(rank).and_then(|seat| {
            let reason = apart.get(&seat.node)?;
            Some((seat.place.clone(), reason.clone()))
        });
        drop(state);
        if let Some((place, reason)) = refused {
            self.places.displaced(rank);
            let source = ConnectionError::new(format!("{place}: {reason}"));
            return Err(Error::Place { rank, source });
        }
        Ok(is_whole)
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
        let state = lock(&self.state);
        state.seats.iter().flatten().map(|seat| seat.node).collect()
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
            let seat = |state: &RemoteState| {
                let seat = state.seats[to].as_ref()?;
                Some((seat.node, seat.listen))
            };
            let (to, told) = seat(&lock(&self.state)).unzip();
            let told = told.flatten().unwrap_or(own);
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
        let earlier = lock(&self.state).relays.remove(&(rank, to));
        drop(earlier); // of an earlier epoch
        let at = at?;
        if addr.ip().is_unspecified() {
            addr.set_ip(self.listen_of(to)?.ip());
        }
        let relay = Relay::start(at, addr).ok()?;
        let addr = relay.addr();
        lock(&self.state).relays.insert((rank, to), relay);
        Some(addr)
    }

    /// The address at which the owner reaches the machine of a rank's worker.
    fn listen_of(&self, rank: Rank) -> Option<SocketAddr> {
        lock(&self.state).seat(rank)?.listen
    }
}

impl InstanceWorkers for RemoteWorkers {
    fn start(&self, rank: Rank) -> Result<(), Error> {
        self.stop(rank);
        let spare = {
            let mut state = lock(&self.state);
            state.epochs.started = true;
            let slot = state.slot(rank);
            slot.take_packed(|node| self.places.lives(node))
        };
        if let Some(spare) = spare {
            self.places.promoted(rank);
            self.inbox.adopt(rank, spare.worker);
            lock(&self.state).seats[rank.0 as usize] = Some(spare.seat);
            return Ok(());
        }
        let worker = self.inbox.next_worker(rank);
        let seat = self.sit(rank, worker, self.places.open(rank))?;
        lock(&self.state).seats[rank.0 as usize] = Some(seat);
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
            let mut state = lock(&self.state);
            let slot = state.slot(rank);
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
        lock(&self.state).slot(rank).lacks(tag, worker_at)
    }

    fn send(&self, rank: Rank, message: &ToWorker) -> Result<(), Error> {
        let line = {
            let mut state = lock(&self.state);
            if let ToWorker::Assign(job) = message {
                (state.epochs.assigned, state.epochs.plain) = (job.epoch, job.plain);
            }
            state.seat(rank).map(|seat| Arc::clone(&seat.line))
        };
        let join = match message {
            ToWorker::Join { addrs } => {
                self.settle();
                if !self.may_join(rank)? {
                    return Ok(()); // the epoch fails by another rank
                }
                let plain = lock(&self.state).epochs.plain;
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
        let bind = lock(&self.state).seat(rank).map(|seat| seat.post.listen);
        bind.unwrap_or_else(|| self.own_listen())
    }

    fn seen(&self, rank: Rank, addr: SocketAddr, own: SocketAddr) -> SocketAddr {
        if !addr.ip().is_unspecified() {
            return addr;
        }
        let mut place = self.listen_of(rank).unwrap_or(own);
        place.set_port(addr.port());
        place
    }

    fn own_addr(&self) -> Option<SocketAddr> {
        let state = lock(&self.state);
        let mut seats = state.seats.iter().flatten();
        let mut addr = seats.find_map(|seat| seat.line.own_addr())?;
        addr.set_port(0);
        Some(addr)
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
        let seat = lock(&self.state).seats[rank.0 as usize].take();
        if let Some(seat) = seat {
            seat.end();
        }
    }

    /// Hosts apply their own grace period. This does not wait for a standby that is still starting:
    /// the thread that starts it ends it, within `START_LIMIT`.
    fn end(&self, _grace: Duration) {
        lock(&self.state).is_over = true;
        (0..self.ranks).for_each(|rank| self.stop(Rank(rank)));
        let mut state = lock(&self.state);
        let relays = std::mem::take(&mut state.relays);
        let spares: Vec<Spare> = state
            .spares
            .iter_mut()
            .filter_map(SpareSlot::take)
            .collect();
        drop(state);
        drop(relays);
        spares.into_iter().for_each(|spare| spare.seat.end());
    }

    fn post(&self, rank: Rank) -> WorkerSite {
        let (own, is_all_here) = (self.own_listen(), self.is_all_here());
        match lock(&self.state).seat(rank) {
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
        let ranks = (0..self.ranks).map(Rank);
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

#[cfg(test)]
mod tests;
