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
use super::zero_copy;
use super::{TransportGroup, number};
use crate::call::judge;
use crate::locks::lock;
use crate::peer_bytes::PeerBytes;
use crate::plan::{
    BufferSpan, CollectivePlan, PlanAction, PlanBuffer, ReceiveAction, Route, SEGMENT_BYTES,
};
use crate::reduce::OperandSide;
use crate::status::{Cause, FailureNotice};
use crate::transport::{Closed, Pause, Transport, VirtualLane, WaitInterest};
use crate::wire::{FrameKind, HEADER_BYTES, Header};
use crate::{Call, Collective, Deadline, Error, Kind, RegisteredMemory, Site};

/// How long ranks that disagree wait for the calls of the others, to find the odd rank.
const VOTE_WAIT: Duration = Duration::from_secs(1);

/// How long a rank that received a different call waits for a failure notice that explains it.
const DISAGREE_WAIT: Duration = Duration::from_millis(200);

/// Shortest scratch memory that is registered: smaller scratch, below two segments, is copied to.
const REGISTERED_BYTES: usize = 2 * SEGMENT_BYTES;

/// State that collectives reuse.
pub(super) struct Calls {
    sequence: u64,
    plan: CollectivePlan,
    scratch: RegisteredMemory<u8>,
    /// By rank; the own entry is unused.
    peers: Vec<PeerProgress>,
}

#[derive(Default)]
struct PeerProgress {
    inbuf: Inbuf,
    /// The call that the peer announced, once received.
    said: Option<Call>,
    /// Payload of the current frame that is still to arrive.
    left: u64,
    /// The peer wrote the reduced result back into the data sent to it in this call.
    came_back: bool,
    sending: Option<SendProgress>,
    receiving: Option<ReceiveProgress>,
}

struct SendProgress {
    head: [u8; HEADER_BYTES],
    span: BufferSpan,
    /// Bytes of head and span already sent.
    done: usize,
    fate: PayloadUse,
}

/// How the peer uses the data sent to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PayloadUse {
    /// It may be reduced.
    Any,
    /// Most likely it is stored unchanged.
    Kept,
    /// It is reduced, and the result is written back.
    WrittenBack,
}

struct ReceiveProgress {
    step: u16,
    span: BufferSpan,
    take: ReceiveAction,
    done: usize,
}

/// Whether arriving bytes are reduced.
const fn is_reduced(act: &PlanAction) -> bool {
    matches!(
        act,
        PlanAction::Receive {
            take: ReceiveAction::Fold(_),
            ..
        }
    )
}

/// Why a call stops.
enum CallFailure {
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
            plan: CollectivePlan::default(),
            scratch: RegisteredMemory::with(0, |_| None),
            peers: (0..size).map(|_| PeerProgress::default()).collect(),
        }
    }

    pub(super) fn unused(&self) -> Vec<Vec<u8>> {
        let unused = |peer: &PeerProgress| peer.inbuf.bytes().to_vec();
        self.peers.iter().map(unused).collect()
    }

    pub(super) fn go_round(&mut self, route: Route) {
        self.plan.route = route;
    }
}

impl<T: Transport> TransportGroup<T> {
    /// See [`Group::run`](crate::Group::run).
    pub fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        self.run_at(Site::NONE, collective, deadline)
    }

    /// See [`Group::run_at`](crate::Group::run_at).
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
        let mut run = RunningCall {
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
            zero_copy::release_memory(&self.transport, VirtualLane::Calls);
            error
        })
    }
}

impl<T: Transport> TransportGroup<T> {
    /// Scratch memory of the group for at least `bytes` bytes. Long scratch is registered, where a
    /// transport receives in place.
    fn scratch(&self, bytes: usize) -> RegisteredMemory<u8> {
        let register = |pages: &_| match bytes >= REGISTERED_BYTES {
            true => self.register_pages(pages),
            false => None,
        };
        RegisteredMemory::with(bytes.next_power_of_two(), register)
    }
}

struct RunningCall<'a, T> {
    group: &'a TransportGroup<T>,
    call: Call,
    deadline: Deadline,
    algorithm: u8,
    buffers: Buffers<'a>,
    /// See `CollectivePlan::comes_back`.
    comes_back: bool,
    /// Bytes that were reduced and also written back to the peer.
    gave_back: usize,
}

impl<T: Transport> RunningCall<'_, T> {
    fn steps(
        &mut self,
        plan: &CollectivePlan,
        peers: &mut [PeerProgress],
    ) -> Result<(), CallFailure> {
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
        self.receive_headers(peers)
    }

    /// Enters the transfers of a step into the peers' states.
    fn begin(&self, step: u16, acts: &[PlanAction], peers: &mut [PeerProgress]) {
        // In one step all ranks do the same to each other, except in trees.
        let fate = match acts.iter().any(is_reduced) {
            false => PayloadUse::Kept,
            true if self.comes_back => PayloadUse::WrittenBack,
            true => PayloadUse::Any,
        };
        let is_there = self.comes_back && step == 1;
        for act in acts {
            match act {
                PlanAction::Send { span, .. } if is_there && self.gave_back == span.len() => {}
                PlanAction::Receive { peer, .. } if is_there && peers[*peer].came_back => {}
                PlanAction::Send { peer, span } if span.len() > 0 => {
                    self.group.carries(span.len());
                    let sending = self.sending(step, span.clone());
                    peers[*peer].sending = Some(SendProgress { fate, ..sending });
                }
                PlanAction::Receive { peer, span, take } if span.len() > 0 => {
                    self.group.carries(span.len());
                    let (span, take) = (span.clone(), *take);
                    peers[*peer].receiving = Some(ReceiveProgress {
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

    fn sending(&self, step: u16, span: BufferSpan) -> SendProgress {
        let header = Header {
            what: FrameKind::Call,
            algorithm: self.algorithm,
            step,
            call: self.call,
            payload: span.len() as u64,
        };
        let head = header.encode();
        SendProgress {
            head,
            span,
            done: 0,
            fate: PayloadUse::Any,
        }
    }

    /// Announces the call to peers to which the first step sends nothing.
    fn greet(&self, peers: &mut [PeerProgress]) {
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank != self.group.rank && peer.sending.is_none() {
                peer.sending = Some(self.sending(0, BufferSpan::new(PlanBuffer::Work, 0..0)));
            }
        }
    }

    /// Completes the call: every rank has made it, and none abandoned it later.
    fn receive_headers(&mut self, peers: &mut [PeerProgress]) -> Result<(), CallFailure> {
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank != self.group.rank && peer.said.is_none() {
                peer.receiving = Some(ReceiveProgress {
                    step: 0,
                    span: BufferSpan::new(PlanBuffer::Work, 0..0),
                    take: ReceiveAction::Copy,
                    done: 0,
                });
            }
        }
        self.progress(peers)?;
        let sequence = self.call.sequence;
        let aborts = |peer: &PeerProgress| {
            let head = peer.inbuf.bytes().first_chunk();
            head.and_then(Header::decode)
                .is_some_and(|h| h.what == FrameKind::Abort && h.call.sequence <= sequence)
        };
        match peers.iter().position(aborts) {
            Some(peer) => Err(CallFailure::Poisoned(peer)),
            None => Ok(()),
        }
    }

    /// Moves bytes until all transfers of the step are done.
    fn progress(&mut self, peers: &mut [PeerProgress]) -> Result<(), CallFailure> {
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
                return Err(CallFailure::Poisoned(open));
            }
            looks += 1;
            if patience.pause(looks) == Pause::Block {
                if self.deadline.left(self.group.transport.now()).is_zero() {
                    return Err(CallFailure::Late(open));
                }
                self.park(peers);
            }
        }
    }

    /// Blocks until a link may be ready; receives messages meanwhile.
    fn park(&self, peers: &[PeerProgress]) {
        let wants = peers.iter().enumerate().map(|(peer, state)| WaitInterest {
            lane: VirtualLane::Calls,
            peer,
            read: state.receiving.is_some(),
            write: state.sending.is_some(),
        });
        let mut wants: Vec<WaitInterest> = wants.filter(|want| want.read || want.write).collect();
        self.group.mail_wants(&mut wants);
        self.group
            .transport
            .wait(VirtualLane::Calls, &wants, self.deadline.instant());
        self.group.tend();
    }

    /// Sends what the link accepts.
    fn push(&self, rank: usize, peer: &mut PeerProgress) -> Result<bool, CallFailure> {
        let Some(sending) = &mut peer.sending else {
            return Ok(false);
        };
        let head = &sending.head[sending.done.min(HEADER_BYTES)..];
        let body = self.buffers.get(&sending.span);
        let body = &body[sending.done.saturating_sub(HEADER_BYTES)..];
        let (group, lane) = (self.group, VirtualLane::Calls);
        let count = match sending.fate {
            PayloadUse::Kept => group.write_whole(lane, rank, head, body),
            PayloadUse::Any => group.write(lane, rank, head, body),
            PayloadUse::WrittenBack => {
                let whole = self.buffers.all(sending.span.place);
                group.write_reducible(lane, rank, (head, body), whole)
            }
        };
        let count = count.map_err(|Closed| CallFailure::Lost(rank))?;
        sending.done += count;
        let gone = sending.done == HEADER_BYTES + sending.span.len();
        if gone && !zero_copy::holds(&self.group.transport, VirtualLane::Calls, rank) {
            let comes_back = sending.fate == PayloadUse::WrittenBack;
            peer.came_back = comes_back && zero_copy::is_written_back(&self.group.transport, rank);
            peer.sending = None;
        }
        Ok(count > 0)
    }

    /// Receives available bytes.
    fn pull(&mut self, rank: usize, peer: &mut PeerProgress) -> Result<bool, CallFailure> {
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
    fn frame(&self, rank: usize, peer: &mut PeerProgress) -> Result<bool, CallFailure> {
        let head = peer
            .inbuf
            .head::<HEADER_BYTES, T>(&self.group.transport, VirtualLane::Calls, rank)
            .map_err(|Closed| CallFailure::Lost(rank))?;
        let Some(head) = head else { return Ok(false) };
        let header = Header::decode(&head).ok_or(CallFailure::Garbled(rank))?;
        match header.what {
            FrameKind::Call => {}
            FrameKind::Abort => return Err(CallFailure::Poisoned(rank)),
            FrameKind::Message | FrameKind::Credit => return Err(CallFailure::Garbled(rank)),
        }
        peer.inbuf.consume(HEADER_BYTES);
        self.count(HEADER_BYTES);
        peer.said = Some(header.call);
        if header.call != self.call {
            return Err(CallFailure::Disagree);
        }
        self.expect(rank, peer.receiving.as_ref(), &header)?;
        peer.left = header.payload;
        Ok(true)
    }

    /// Whether a frame of this call is the expected one.
    fn expect(
        &self,
        peer: usize,
        due: Option<&ReceiveProgress>,
        header: &Header,
    ) -> Result<(), CallFailure> {
        let missing = due.map_or(0, |due| due.span.len() - due.done) as u64;
        let step = due.map_or(0, |due| due.step);
        if header.algorithm != self.algorithm {
            Err(CallFailure::Garbled(peer))
        } else if header.payload == missing && header.step == step {
            Ok(())
        } else if self.call.kind == Kind::AllToAll {
            // Only in this call does a rank not know the lengths of the others.
            let width = self.call.dtype.bytes() as u64;
            let (expected, got) = (header.payload / width, missing / width);
            Err(CallFailure::Uneven { expected, got })
        } else if header.payload == 0 {
            Ok(())
        } else {
            Err(CallFailure::Garbled(peer))
        }
    }

    /// Receives up to `left` bytes of the payload of `rank`.
    fn take(
        &mut self,
        rank: usize,
        inbuf: &mut Inbuf,
        into: &ReceiveProgress,
        left: u64,
    ) -> Result<usize, CallFailure> {
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
        into: &ReceiveProgress,
    ) -> Result<Option<usize>, CallFailure> {
        if !inbuf.bytes().is_empty() {
            return Ok(None);
        }
        let transport = &self.group.transport;
        let lends = zero_copy::reads_in_place(transport, VirtualLane::Calls, rank);
        match into.take {
            ReceiveAction::Copy if lends || into.span.len() - into.done >= DIRECT_BYTES => {
                let rest = &mut self.buffers.get_mut(&into.span)[into.done..];
                let read = transport.read(VirtualLane::Calls, rank, rest);
                read.map(Some).map_err(|Closed| CallFailure::Lost(rank))
            }
            ReceiveAction::Fold(side) if lends => self.fold_lent(rank, into, side),
            ReceiveAction::Copy | ReceiveAction::Fold(_) => Ok(None),
        }
    }

    /// Receives it through `inbuf`.
    fn take_by_buffer(
        &mut self,
        rank: usize,
        inbuf: &mut Inbuf,
        into: &ReceiveProgress,
    ) -> Result<usize, CallFailure> {
        let width = match into.take {
            ReceiveAction::Copy => 1,
            ReceiveAction::Fold(_) => self.buffers.fold_width(),
        };
        if inbuf.bytes().len() < width {
            let filled = inbuf.fill(&self.group.transport, VirtualLane::Calls, rank, width);
            filled.map_err(|Closed| CallFailure::Lost(rank))?;
        }
        Ok(self.use_up(inbuf, into, width))
    }

    /// Reduces the available whole elements in place. Returns their bytes; `None` if even the first
    /// element is incomplete.
    fn fold_lent(
        &mut self,
        rank: usize,
        into: &ReceiveProgress,
        side: OperandSide,
    ) -> Result<Option<usize>, CallFailure> {
        let (transport, buffers) = (&self.group.transport, &mut self.buffers);
        let width = buffers.fold_width();
        let (mut done, end) = (into.done, into.span.len());
        let mut is_cut = false;
        let whole = |there: usize| there - there % width;
        let given = self.comes_back.then(|| {
            zero_copy::reduce_in_place(transport, rank, &mut |mut bytes| {
                let count = whole(bytes.read().len().min(end - done));
                buffers.fold_both(&into.span, done..done + count, side, &mut bytes);
                is_cut = count == 0;
                count
            })
        });
        let lost = |Closed| CallFailure::Lost(rank);
        let given = given.transpose().map_err(lost)?.flatten();
        if let Some(count) = given {
            self.gave_back += count;
            return Ok((!is_cut).then_some(count));
        }
        let lent = zero_copy::read_in_place(transport, rank, &mut |bytes| {
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
    fn use_up(&mut self, inbuf: &mut Inbuf, into: &ReceiveProgress, width: usize) -> usize {
        let there = (into.span.len() - into.done).min(inbuf.bytes().len());
        let count = there - there % width;
        let bytes = &inbuf.bytes()[..count];
        match into.take {
            ReceiveAction::Copy => {
                let rest = &mut self.buffers.get_mut(&into.span)[into.done..];
                rest[..count].copy_from_slice(bytes);
            }
            ReceiveAction::Fold(side) => {
                let bytes = PeerBytes::of(bytes);
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
    fn fail(&mut self, stop: CallFailure, peers: &mut [PeerProgress]) -> Error {
        let (call, at) = (self.call, self.call.sequence);
        let error = match stop {
            CallFailure::Lost(peer) | CallFailure::Poisoned(peer) => {
                self.group.lost(call, peer, at)
            }
            CallFailure::Garbled(peer) => {
                let cause = Cause::Garbled(number(peer));
                self.group.poison(FailureNotice { cause, at });
                let error = cause.error(call);
                self.group.cause_of(call).unwrap_or(error)
            }
            CallFailure::Uneven { expected, got } => {
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
            CallFailure::Late(open) => {
                // Some calls may have arrived without being read.
                self.receive_header(peers);
                let late = |(rank, peer): &(usize, &PeerProgress)| {
                    *rank != self.group.rank && peer.said.is_none()
                };
                let silent = peers.iter().enumerate().find(late);
                let rank = number(silent.map_or(open, |(rank, _)| rank));
                self.group.fail(call, Error::Timeout { call, rank }, at)
            }
            // The peer may be ahead only because it abandoned this call.
            CallFailure::Disagree if self.group.awaits_news(DISAGREE_WAIT) => {
                let error = self.group.cause_of(call);
                error.expect("news have a cause")
            }
            CallFailure::Disagree => {
                let error = self.vote(peers);
                self.group.fail(call, error, at)
            }
        };
        self.abort(peers);
        error
    }

    /// Receives the others' calls, within bounds, and names the odd rank.
    fn vote(&mut self, peers: &mut [PeerProgress]) -> Error {
        let until = self.group.transport.now() + VOTE_WAIT;
        let until = until.min(self.deadline.instant());
        while !self.receive_header(peers) && self.group.transport.now() < until {
            let soon = self.group.transport.now() + Duration::from_millis(1);
            self.group
                .transport
                .wait(VirtualLane::Calls, &[], soon.min(until));
        }
        let calls = peers.iter().enumerate().filter_map(|(rank, peer)| {
            let own = (rank == self.group.rank).then_some(self.call);
            own.or(peer.said).map(|call| (number(rank), call))
        });
        judge(&calls.collect::<Vec<_>>())
    }

    /// Reads calls that have not arrived yet, and sends this rank's call to peers without it. True
    /// when all are done.
    fn receive_header(&mut self, peers: &mut [PeerProgress]) -> bool {
        let mut all = true;
        for (rank, peer) in peers.iter_mut().enumerate() {
            if rank == self.group.rank {
                continue;
            }
            let begun = |sending: &SendProgress| sending.done >= HEADER_BYTES;
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
    fn abort(&self, peers: &mut [PeerProgress]) {
        for (rank, peer) in peers.iter_mut().enumerate() {
            let whole = peer
                .sending
                .as_ref()
                .is_none_or(|sending| sending.done == 0);
            if rank != self.group.rank && whole {
                let header = Header {
                    what: FrameKind::Abort,
                    algorithm: 0,
                    step: 0,
                    call: self.call,
                    payload: 0,
                };
                // A peer that cannot be reached here learns it from its control connection.
                let _ = self
                    .group
                    .write(VirtualLane::Calls, rank, &header.encode(), &[]);
            }
        }
    }
}
