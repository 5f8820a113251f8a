//! Runs the plans of collectives over the links.
//!
//! In its first step a rank sends *every* peer a frame that carries its call, even a peer to which
//! the plan sends nothing. A call completes only when a frame of every peer has arrived. So every
//! rank sees every call, and the lockstep guard compares them before data is used. A missing rank
//! is named, however indirect its part in the plan.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::buffers::Buffers;
use super::inbuf::{DIRECT_BYTES, Inbuf};
use super::lending;
use super::{Linked, number};
use crate::call::judge;
use crate::lent::Lent;
use crate::locks::lock;
use crate::plan::{Act, Place, Plan, Route, SEGMENT_BYTES, Span, Take};
use crate::reduce::Side;
use crate::status::{Cause, News};
use crate::transport::{Closed, Lane, Pause, Transport, Want};
use crate::wire::{HEADER_BYTES, Header, What};
use crate::{Call, Collective, Deadline, Error, Kind, Memory, Site};

/// How long ranks that disagree wait for the calls of the others, to find the odd rank.
const VOTE_WAIT: Duration = Duration::from_secs(1);

/// How long a rank that received a different call waits for a failure notice that explains it.
const DISAGREE_WAIT: Duration = Duration::from_millis(200);

/// Shortest scratch memory that is registered: smaller scratch, below two segments, is copied to.
const REGISTERED_BYTES: usize = 2 * SEGMENT_BYTES;

/// State that collectives reuse.
pub(super) struct Calls {
    sequence: u64,
    plan: Plan,
    scratch: Memory<u8>,
    /// By rank; the own entry is unused.
    peers: Vec<Peer>,
}

#[derive(Default)]
struct Peer {
    inbuf: Inbuf,
    /// The call that the peer announced, once received.
    said: Option<Call>,
    /// Payload of the current frame that is still to arrive.
    left: u64,
    /// The peer wrote the reduced result back into the data sent to it in this call.
    came_back: bool,
    sending: Option<Sending>,
    receiving: Option<Receiving>,
}

struct Sending {
    head: [u8; HEADER_BYTES],
    span: Span,
    /// Bytes of head and span already sent.
    done: usize,
    fate: Fate,
}

/// How the peer uses the data sent to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It may be reduced.
    Any,
    /// Most likely it is stored unchanged.
    Kept,
    /// It is reduced, and the result is written back.
    ComesBack,
}

struct Receiving {
    step: u16,
    span: Span,
    take: Take,
    done: usize,
}

/// Whether arriving bytes are reduced.
const fn is_reduced(act: &Act) -> bool {
    matches!(
        act,
        Act::Receive {
            take: Take::Fold(_),
            ..
        }
    )
}

/// Why a call stops.
enum Stop {
    Lost(usize),
    Garbled(usize),
    Disagree,
    /// A peer sends a different number of bytes than this rank expects.
    Uneven {
        expected: u64,
        got: u64,
    },
    /// The group is poisoned, or a peer abandoned this call; its failure notice is on the way.
    Poisoned(usize),
    Late(usize),
}

impl Calls {
    pub(super) fn new(size: usize) -> Self {
        Self {
            sequence: 0,
            plan: Plan::default(),
            scratch: Memory::with(0, |_| None),
            peers: (0..size).map(|_| Peer::default()).collect(),
        }
    }

    pub(super) fn unused(&self) -> Vec<Vec<u8>> {
        let unused = |peer: &Peer| peer.inbuf.bytes().to_vec();
        self.peers.iter().map(unused).collect()
    }

    pub(super) fn go_round(&mut self, route: Route) {
        self.plan.route = route;
    }
}

impl<T: Transport> Linked<T> {
    /// See [`Group::run`](crate::Group::run).
    ///
    /// # Errors
    /// Any [`Error`].
    pub fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        self.run_at(Site::NONE, collective, deadline)
    }

    /// See [`Group::run_at`](crate::Group::run_at).
    ///
    /// # Errors
    /// Any [`Error`].
    pub fn run_at(
        &self,
        site: Site,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let site = match self.mark.load(Ordering::Relaxed) {
            0 => site,
            mark => Site::mark(mark),
        };
        let mut calls = lock(&self.calls);
        calls.sequence += 1;
        let sequence = calls.sequence;
        self.run_numbered(&mut calls, collective, (sequence, site), deadline)?;
        self.completed.store(sequence, Ordering::Release);
        Ok(())
    }

    /// A call before the group is returned to the caller. All of them have the number 0.
    pub(crate) fn rehearse(
        &self,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        self.run_numbered(
            &mut lock(&self.calls),
            collective,
            (0, Site::NONE),
            deadline,
        )
    }

    fn run_numbered(
        &self,
        calls: &mut Calls,
        mut collective: Collective<'_>,
        (sequence, site): (u64, Site),
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = Call::of(&collective, sequence, self.rank(), self.size());
        let call = call.map_err(|error| self.fail(error.call(), error, sequence))?;
        let call = Call { site, ..call };
        if let Some(error) = self.cause_of(call) {
            return Err(error);
        }
        let Calls {
            plan,
            scratch,
            peers,
            ..
        } = calls;
        plan.make(&collective, &self.tuning(), self.rank, self.size);
        if scratch.len() < plan.scratch {
            *scratch = self.scratch(plan.scratch);
        }
        let mut run = Run {
            group: self,
            call,
            deadline,
            algorithm: plan.algorithm.code(),
            buffers: Buffers::new(&mut collective, plan, scratch, (self.rank, self.size)),
            comes_back: plan.comes_back,
            gave_back: 0,
        };
        run.steps(plan, peers).map_err(|stop| {
            let error = run.fail(stop, peers);
            lending::let_go(&self.transport, Lane::Calls);
            error
        })
    }
}

impl<T: Transport> Linked<T> {
    /// Scratch memory of the group for at least `bytes` bytes. Long scratch is registered, where a
    /// transport receives in place.
    fn scratch(&self, bytes: usize) -> Memory<u8> {
        let register = |pages: &_| match bytes >= REGISTERED_BYTES {
            true => self.register_pages(pages),
            false => None,
        };
        Memory::with(bytes.next_power_of_two(), register)
    }
}

/// A call in progress.
struct Run<'a, T> {
    group: &'a Linked<T>,
    call: Call,
    deadline: Deadline,
    algorithm: u8,
    buffers: Buffers<'a>,
    /// See `Plan::comes_back`.
    comes_back: bool,
    /// Bytes that were reduced and also written back to the peer.
    gave_back: usize,
}

impl<T: Transport> Run<'_, T> {
    fn steps(&mut self, plan: &Plan, peers: &mut [Peer]) -> Result<(), Stop> {
        for peer in &mut *peers {
            (peer.said, peer.sending, peer.receiving) = (None, None, None);
            peer.came_back = false;
        }
        let mut greeted = false;
        for (step, acts) in (0..).zip(plan.steps()) {
            self.begin(step, acts, peers);
            if !std::mem::replace(&mut greeted, true) {
                self.greet(peers);
            }
            self.progress(peers)?;
            self.buffers.finish(acts);
        }
        if !greeted {
            self.greet(peers);
        }
        self.hear_all(peers)
    }

    /// Enters the transfers of a step into the peers' states.
    fn begin(&self, step: u16, acts: &[Act], peers: &mut [Peer]) {
        // In one step all ranks do the same to each other, except in trees.
        let fate = match acts.iter().any(is_reduced) {
            false => Fate::Kept,
            true if self.comes_back => Fate::ComesBack,
            true => Fate::Any,
        };
        let is_there = self.comes_back && step == 1;
        for act in acts {
            match act {
                Act::Send { span, .. } if is_there && self.gave_back == span.len() => {}
                Act::Receive { peer, .. } if is_there && peers[*peer].came_back => {}
                Act::Send { peer, span } if span.len() > 0 => {
                    self.group.carries(span.len());
                    let sending = self.sending(step, span.clone());
                    peers[*peer].sending = Some(Sending { fate, ..sending });
                }
                Act::Receive { peer, span, take } if span.len() > 0 => {
                    self.group.carries(span.len());
                    let (span, take) = (span.clone(), *take);
                    peers[*peer].receiving = Some(Receiving {
                        step,
                        span,
                        take,
                        done: 0,
                    });
                }
                _ => {}
            }
        }
    }

    fn sending(&self, step: u16, span: Span) -> Sending {
        let header = Header {
            what: What::Call,
            algorithm: self.algorithm,
            step,
            call: self.call,
            payload: span.len() as u64,
        };
        let head = header.encode();
        Sending {
            head,
            span,
            done: 0,
            fate: Fate::Any,
        }
    }

    /// Announces the call to peers to which the first step sends nothing.
    fn greet(&self, peers: &mut [Peer]) {
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank != self.group.rank && peer.sending.is_none() {
                peer.sending = Some(self.sending(0, Span::new(Place::Work, 0..0)));
            }
        }
    }

    /// Completes the call: every rank has made it, and none abandoned it later.
    fn hear_all(&mut self, peers: &mut [Peer]) -> Result<(), Stop> {
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank != self.group.rank && peer.said.is_none() {
                peer.receiving = Some(Receiving {
                    step: 0,
                    span: Span::new(Place::Work, 0..0),
                    take: Take::Copy,
                    done: 0,
                });
            }
        }
        self.progress(peers)?;
        let sequence = self.call.sequence;
        let aborts = |peer: &Peer| {
            let head = peer.inbuf.bytes().first_chunk();
            head.and_then(Header::decode)
                .is_some_and(|h| h.what == What::Abort && h.call.sequence <= sequence)
        };
        match peers.iter().position(aborts) {
            Some(peer) => Err(Stop::Poisoned(peer)),
            None => Ok(()),
        }
    }

    /// Moves bytes until all transfers of the step are done.
    fn progress(&mut self, peers: &mut [Peer]) -> Result<(), Stop> {
        let patience = self.group.transport.patience();
        let mut looks = 0;
        loop {
            let (mut moved, mut open) = (false, None);
            for (rank, peer) in peers.iter_mut().enumerate() {
                moved |= self.push(rank, peer)? | self.pull(rank, peer)?;
                if open.is_none() && (peer.sending.is_some() || peer.receiving.is_some()) {
                    open = Some(rank);
                }
            }
            let Some(open) = open else { return Ok(()) };
            if moved {
                looks = 0;
                continue;
            }
            if self.group.status.stops(self.call.sequence) {
                return Err(Stop::Poisoned(open));
            }
            looks += 1;
            if patience.pause(looks) == Pause::Block {
                if self.deadline.left(self.group.transport.now()).is_zero() {
                    return Err(Stop::Late(open));
                }
                self.park(peers);
            }
        }
    }

    /// Blocks until a link may be ready; receives messages meanwhile.
    fn park(&self, peers: &[Peer]) {
        let wants = peers.iter().enumerate().map(|(peer, state)| Want {
            lane: Lane::Calls,
            peer,
            read: state.receiving.is_some(),
            write: state.sending.is_some(),
        });
        let mut wants: Vec<Want> = wants.filter(|want| want.read || want.write).collect();
        self.group.mail_wants(&mut wants);
        self.group
            .transport
            .wait(Lane::Calls, &wants, self.deadline.instant());
        self.group.tend();
    }

    /// Sends what the link accepts.
    fn push(&self, rank: usize, peer: &mut Peer) -> Result<bool, Stop> {
        let Some(sending) = &mut peer.sending else {
            return Ok(false);
        };
        let head = &sending.head[sending.done.min(HEADER_BYTES)..];
        let body = self.buffers.get(&sending.span);
        let body = &body[sending.done.saturating_sub(HEADER_BYTES)..];
        let (group, lane) = (self.group, Lane::Calls);
        let count = match sending.fate {
            Fate::Kept => group.write_whole(lane, rank, head, body),
            Fate::Any => group.write(lane, rank, head, body),
            Fate::ComesBack => {
                let whole = self.buffers.all(sending.span.place);
                group.write_to_come_back(lane, rank, (head, body), whole)
            }
        };
        let count = count.map_err(|Closed| Stop::Lost(rank))?;
        sending.done += count;
        let gone = sending.done == HEADER_BYTES + sending.span.len();
        if gone && !lending::holds(&self.group.transport, Lane::Calls, rank) {
            let comes_back = sending.fate == Fate::ComesBack;
            peer.came_back = comes_back && lending::has_come_back(&self.group.transport, rank);
            peer.sending = None;
        }
        Ok(count > 0)
    }

    /// Receives available bytes.
    fn pull(&mut self, rank: usize, peer: &mut Peer) -> Result<bool, Stop> {
        let mut moved = false;
        while let Some(receiving) = &mut peer.receiving {
            let missing = receiving.span.len() - receiving.done;
            if peer.left > 0 {
                let count = self.take(rank, &mut peer.inbuf, receiving, peer.left)?;
                if count == 0 {
                    break;
                }
                receiving.done += count;
                peer.left -= count as u64;
            } else if missing == 0 && peer.said.is_some() {
                peer.receiving = None;
            } else if !self.frame(rank, peer)? {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Reads the header of the next frame; false if it is incomplete.
    fn frame(&self, rank: usize, peer: &mut Peer) -> Result<bool, Stop> {
        let head = peer
            .inbuf
            .head::<HEADER_BYTES, T>(&self.group.transport, Lane::Calls, rank)
            .map_err(|Closed| Stop::Lost(rank))?;
        let Some(head) = head else { return Ok(false) };
        let header = Header::decode(&head).ok_or(Stop::Garbled(rank))?;
        match header.what {
            What::Call => {}
            What::Abort => return Err(Stop::Poisoned(rank)),
            What::Message | What::Credit => return Err(Stop::Garbled(rank)),
        }
        peer.inbuf.consume(HEADER_BYTES);
        self.count(HEADER_BYTES);
        peer.said = Some(header.call);
        if header.call != self.call {
            return Err(Stop::Disagree);
        }
        self.expect(rank, peer.receiving.as_ref(), &header)?;
        peer.left = header.payload;
        Ok(true)
    }

    /// Whether a frame of this call is the expected one.
    fn expect(&self, peer: usize, due: Option<&Receiving>, header: &Header) -> Result<(), Stop> {
        let missing = due.map_or(0, |due| due.span.len() - due.done) as u64;
        let step = due.map_or(0, |due| due.step);
        if header.algorithm != self.algorithm {
            Err(Stop::Garbled(peer))
        } else if header.payload == missing && header.step == step {
            Ok(())
        } else if self.call.kind == Kind::AllToAll {
            // Only in this call does a rank not know the lengths of the others.
            let width = self.call.dtype.bytes() as u64;
            let (expected, got) = (header.payload / width, missing / width);
            Err(Stop::Uneven { expected, got })
        } else if header.payload == 0 {
            Ok(())
        } else {
            Err(Stop::Garbled(peer))
        }
    }

    /// Receives up to `left` bytes of the payload of `rank`.
    fn take(
        &mut self,
        rank: usize,
        inbuf: &mut Inbuf,
        into: &Receiving,
        left: u64,
    ) -> Result<usize, Stop> {
        debug_assert_eq!(
            (into.span.len() - into.done) as u64,
            left,
            "a frame fits what is due"
        );
        let count = match self.take_in_place(rank, inbuf, into)? {
            Some(count) => count,
            None => self.take_by_buffer(rank, inbuf, into)?,
        };
        self.count(count);
        Ok(count)
    }

    /// Receives it without a copy, if none of it is in `inbuf` and the transport supports that.
    fn take_in_place(
        &mut self,
        rank: usize,
        inbuf: &Inbuf,
        into: &Receiving,
    ) -> Result<Option<usize>, Stop> {
        if !inbuf.bytes().is_empty() {
            return Ok(None);
        }
        let transport = &self.group.transport;
        let lends = lending::lends(transport, Lane::Calls, rank);
        match into.take {
            Take::Copy if lends || into.span.len() - into.done >= DIRECT_BYTES => {
                let rest = &mut self.buffers.get_mut(&into.span)[into.done..];
                let read = transport.read(Lane::Calls, rank, rest);
                read.map(Some).map_err(|Closed| Stop::Lost(rank))
            }
            Take::Fold(side) if lends => self.fold_lent(rank, into, side),
            Take::Copy | Take::Fold(_) => Ok(None),
        }
    }

    /// Receives it through `inbuf`.
    fn take_by_buffer(
        &mut self,
        rank: usize,
        inbuf: &mut Inbuf,
        into: &Receiving,
    ) -> Result<usize, Stop> {
        let width = match into.take {
            Take::Copy => 1,
            Take::Fold(_) => self.buffers.fold_width(),
        };
        if inbuf.bytes().len() < width {
            let filled = inbuf.fill(&self.group.transport, Lane::Calls, rank, width);
            filled.map_err(|Closed| Stop::Lost(rank))?;
        }
        Ok(self.use_up(inbuf, into, width))
    }

    /// Reduces the available whole elements in place. Returns their bytes; `None` if even the first
    /// element is incomplete.
    fn fold_lent(
        &mut self,
        rank: usize,
        into: &Receiving,
        side: Side,
    ) -> Result<Option<usize>, Stop> {
        let (transport, buffers) = (&self.group.transport, &mut self.buffers);
        let width = buffers.fold_width();
        let (mut done, end) = (into.done, into.span.len());
        let mut is_cut = false;
        let whole = |there: usize| there - there % width;
        let given = self.comes_back.then(|| {
            lending::lend_to_come_back(transport, rank, &mut |mut bytes| {
                let count = whole(bytes.read().len().min(end - done));
                buffers.fold_both(&into.span, done..done + count, side, &mut bytes);
                is_cut = count == 0;
                count
            })
        });
        let lost = |Closed| Stop::Lost(rank);
        let given = given.transpose().map_err(lost)?.flatten();
        if let Some(count) = given {
            self.gave_back += count;
            return Ok((!is_cut).then_some(count));
        }
        let lent = lending::lend(transport, rank, &mut |bytes| {
            let count = whole(bytes.len().min(end - done));
            buffers.fold(&into.span, done, side, bytes.part(0, count));
            done += count;
            is_cut = done == into.done;
            count
        });
        let count = lent.map_err(lost)?;
        Ok((!is_cut).then_some(count))
    }

    /// Consumes whole elements of `inbuf`.
    fn use_up(&mut self, inbuf: &mut Inbuf, into: &Receiving, width: usize) -> usize {
        let there = (into.span.len() - into.done).min(inbuf.bytes().len());
        let count = there - there % width;
        let bytes = &inbuf.bytes()[..count];
        match into.take {
            Take::Copy => {
                let rest = &mut self.buffers.get_mut(&into.span)[into.done..];
                rest[..count].copy_from_slice(bytes);
            }
            Take::Fold(side) => {
                let bytes = Lent::of(bytes);
                self.buffers.fold(&into.span, into.done, side, bytes);
            }
        }
        inbuf.consume(count);
        count
    }

    fn count(&self, bytes: usize) {
        let received = &self.group.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The error of a stopped call; poisons the group.
    fn fail(&mut self, stop: Stop, peers: &mut [Peer]) -> Error {
        let (call, at) = (self.call, self.call.sequence);
        let error = match stop {
            Stop::Lost(peer) | Stop::Poisoned(peer) => self.group.lost(call, peer, at),
            Stop::Garbled(peer) => {
                let cause = Cause::Garbled(number(peer));
                self.group.poison(News { cause, at });
                let error = cause.error(call);
                self.group.cause_of(call).unwrap_or(error)
            }
            Stop::Uneven { expected, got } => {
                let (rank, buffer) = (number(self.group.rank), "receives");
                let error = Error::Length {
                    call,
                    rank,
                    buffer,
                    expected,
                    got,
                };
                self.group.fail(call, error, at)
            }
            Stop::Late(open) => {
                // Some calls may have arrived without being read.
                self.heard(peers);
                let late =
                    |(rank, peer): &(usize, &Peer)| *rank != self.group.rank && peer.said.is_none();
                let silent = peers.iter().enumerate().find(late);
                let rank = number(silent.map_or(open, |(rank, _)| rank));
                self.group.fail(call, Error::Timeout { call, rank }, at)
            }
            // The peer may be ahead only because it abandoned this call.
            Stop::Disagree if self.group.awaits_news(DISAGREE_WAIT) => {
                let error = self.group.cause_of(call);
                error.expect("news have a cause")
            }
            Stop::Disagree => {
                let error = self.vote(peers);
                self.group.fail(call, error, at)
            }
        };
        self.abort(peers);
        error
    }

    /// Receives the others' calls, within bounds, and names the odd rank.
    fn vote(&mut self, peers: &mut [Peer]) -> Error {
        let until = self.group.transport.now() + VOTE_WAIT;
        let until = until.min(self.deadline.instant());
        while !self.heard(peers) && self.group.transport.now() < until {
            let soon = self.group.transport.now() + Duration::from_millis(1);
            self.group.transport.wait(Lane::Calls, &[], soon.min(until));
        }
        let calls = peers.iter().enumerate().filter_map(|(rank, peer)| {
            let own = (rank == self.group.rank).then_some(self.call);
            own.or(peer.said).map(|call| (number(rank), call))
        });
        judge(&calls.collect::<Vec<_>>())
    }

    /// Reads calls that have not arrived yet, and sends this rank's call to peers without it. True
    /// when all are done.
    fn heard(&mut self, peers: &mut [Peer]) -> bool {
        let mut all = true;
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank == self.group.rank {
                continue;
            }
            let begun = |sending: &Sending| sending.done >= HEADER_BYTES;
            if !peer.sending.as_ref().is_none_or(begun) {
                all &= self.push(rank, peer).is_ok_and(|moved| moved);
            }
            if peer.said.is_none() {
                // A failure here adds nothing: only announced calls count.
                let _ = self.frame(rank, peer);
                all &= peer.said.is_some();
            }
        }
        all
    }

    /// Notifies peers that already have all they need for this call that it failed, in case they
    /// are late. The notice follows the last frame, where the link has room.
    fn abort(&self, peers: &mut [Peer]) {
        for (rank, peer) in peers.iter_mut().enumerate() {
            let whole = peer
                .sending
                .as_ref()
                .is_none_or(|sending| sending.done == 0);
            if rank != self.group.rank && whole {
                let header = Header {
                    what: What::Abort,
                    algorithm: 0,
                    step: 0,
                    call: self.call,
                    payload: 0,
                };
                // A peer that cannot be reached here learns it from its control connection.
                let _ = self.group.write(Lane::Calls, rank, &header.encode(), &[]);
            }
        }
    }
}
