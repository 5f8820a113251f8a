//! Point-to-point messages: an inbox, an outbox and credits for each peer.
//!
//! A sender has [`MESSAGES_HELD`] credits for each receiver and regains one when a message is
//! received. So inboxes are bounded and every link can always be read: two ranks that send each
//! other megabytes at once cannot deadlock. Bytes that the link does not accept at once are copied
//! to the outbox. The next thread that holds the mailbox lock and finds room sends them.
//!
//! On a zero-copy transport, a message goes directly into the memory of a waiting receive. This
//! holds for the first receive waiting for each peer, if the message's header matches. The sender
//! then waits too.
//!
//! Several threads may wait. One of them reads the links for all; the others sleep until a message
//! arrived or the reader has left.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use paceline_base::Rank;

use super::TransportGroup;
use super::inbuf::{DIRECT_BYTES, Inbuf};
use super::zero_copy;
use crate::locks::lock;
use crate::status::Cause;
use crate::transport::{Closed, Pause, Transport, VirtualLane, WaitInterest};
use crate::wire::{FrameKind, HEADER_BYTES, Header};
use crate::{Call, Data, DataMut, Deadline, Dtype, Error, Kind, MESSAGES_HELD};

/// A receiver returns credits at once when it owes this many, else when it next waits. This is half
/// of the sender's credits, so that a steady stream neither stalls nor costs a frame per message.
const CREDITS_OWED: usize = MESSAGES_HELD / 2;

/// Memory that an announced message length may claim before its bytes arrive.
const AHEAD_BYTES: usize = 1 << 20;

/// Longest sleep of a thread that waits for the reading thread.
const FOLLOWER_WAIT: Duration = Duration::from_millis(20);

pub(super) struct Mailboxes {
    /// By rank; the own entry is unused.
    posts: Vec<PeerMailbox>,
    /// Buffers to reuse, at most `MESSAGES_HELD`.
    spare: Vec<Vec<u8>>,
    /// A thread polls the links.
    polling: bool,
}

struct PeerMailbox {
    inbox: VecDeque<BufferedMessage>,
    inbuf: Inbuf,
    /// A partly received message.
    partial: Option<PartialMessage>,
    waiter: Option<WaitingReceive>,
    /// A message is being read from its sender's memory.
    lent: bool,
    outbox: Vec<u8>,
    /// Bytes of the outbox already sent.
    gone: usize,
    credits: usize,
    owed: usize,
    closed: bool,
    garbled: bool,
}

struct BufferedMessage {
    call: Call,
    bytes: Vec<u8>,
}

/// A partly received message.
enum PartialMessage {
    /// For the inbox, with its total length.
    Kept(BufferedMessage, usize),
    /// For the waiting receive; the number of bytes received.
    Placed(usize),
}

/// A waiting receive and its memory, which belongs to the caller again once the entry is removed.
struct WaitingReceive {
    call: Call,
    tag: u32,
    memory: *mut [u8],
    /// All bytes have arrived.
    done: bool,
}

// SAFETY: the memory is touched only under the mailbox lock, while the call that borrows it waits.
// [`ReceiveGuard`] removes the entry before that call ends, also when it panics.
unsafe impl Send for WaitingReceive {}

/// Guard of a call that may have a [`WaitingReceive`]. Its drop removes the entry.
struct ReceiveGuard<'a, T: Transport> {
    linked: &'a TransportGroup<T>,
    call: Call,
    peer: usize,
}

impl<T: Transport> Drop for ReceiveGuard<'_, T> {
    fn drop(&mut self) {
        self.linked.wait_no_more(self.call, self.peer);
    }
}

impl WaitingReceive {
    /// The memory behind the first `done` bytes.
    fn rest(&mut self, done: usize) -> &mut [u8] {
        // SAFETY: the caller of `recv` has it mutably borrowed until this entry is removed.
        let memory = unsafe { &mut *self.memory };
        &mut memory[done..]
    }

    /// Whether a message with this header matches the receive.
    fn awaits(&self, call: &Call) -> bool {
        let alike = (call.dtype, call.length) == (self.call.dtype, self.call.length);
        alike && !self.done && is_tagged(call, self.tag)
    }
}

/// Result of a receive.
enum Delivery {
    Kept(BufferedMessage),
    /// The message was written to the receiver's memory.
    Placed,
}

impl Mailboxes {
    pub(super) fn new(size: usize) -> Self {
        let post = || PeerMailbox {
            inbox: VecDeque::new(),
            inbuf: Inbuf::default(),
            partial: None,
            waiter: None,
            lent: false,
            outbox: Vec::new(),
            gone: 0,
            credits: MESSAGES_HELD,
            owed: 0,
            closed: false,
            garbled: false,
        };
        Self {
            posts: (0..size).map(|_| post()).collect(),
            spare: Vec::new(),
            polling: false,
        }
    }

    fn wants(&self, own: usize, wants: &mut Vec<WaitInterest>) {
        for (peer, post) in self.posts.iter().enumerate() {
            if peer != own && !post.closed {
                let write = post.gone < post.outbox.len() || post.lent;
                wants.push(WaitInterest {
                    lane: VirtualLane::Messages,
                    peer,
                    read: true,
                    write,
                });
            }
        }
    }
}

impl PeerMailbox {
    fn pop(&mut self, tag: u32) -> Option<BufferedMessage> {
        let oldest = self.inbox.iter().position(|m| is_tagged(&m.call, tag))?;
        self.inbox.remove(oldest)
    }

    /// Writes a frame, or the part that the link accepts; the rest goes to the outbox.
    fn put<T: Transport>(
        &mut self,
        group: &TransportGroup<T>,
        peer: usize,
        head: &[u8],
        body: &[u8],
    ) {
        let mut gone = 0;
        if self.outbox.is_empty() && !self.closed {
            match group.write_whole(VirtualLane::Messages, peer, head, body) {
                Ok(count) => gone = count,
                Err(Closed) => self.closed = true,
            }
            self.lent |= zero_copy::holds(&group.transport, VirtualLane::Messages, peer);
        }
        self.outbox.extend_from_slice(&head[gone.min(head.len())..]);
        self.outbox
            .extend_from_slice(&body[gone.saturating_sub(head.len())..]);
    }

    /// Sends from the outbox; true if bytes were sent.
    fn flush<T: Transport>(&mut self, group: &TransportGroup<T>, peer: usize) -> bool {
        if self.outbox.is_empty() || self.closed {
            return false;
        }
        let count = group.write(VirtualLane::Messages, peer, &self.outbox[self.gone..], &[]);
        let Ok(count) = count else {
            self.closed = true;
            return true;
        };
        self.gone += count;
        // Sent bytes leave, also those of a stream that never pauses. Fewer are moved than were
        // sent, so it costs no more than another copy.
        if 2 * self.gone >= self.outbox.len() {
            self.outbox.drain(..self.gone);
            self.gone = 0;
        }
        count > 0
    }

    /// Returns owed credits.
    fn pay<T: Transport>(&mut self, group: &TransportGroup<T>, peer: usize) {
        if self.owed > 0 {
            let owed = std::mem::take(&mut self.owed);
            let call = Call::plain(0, Kind::Barrier, Dtype::U8, owed);
            let header = header(FrameKind::Credit, call, 0);
            self.put(group, peer, &header, &[]);
        }
    }

    /// Reads all available bytes; true if there were any.
    fn read<T: Transport>(
        &mut self,
        group: &TransportGroup<T>,
        peer: usize,
        spare: &mut Spare,
    ) -> bool {
        let mut moved = false;
        while !self.closed {
            match self.read_part(group, peer, spare) {
                Ok(true) => moved = true,
                Ok(false) => break,
                Err(Closed) => {
                    self.closed = true;
                    moved = true;
                }
            }
        }
        moved
    }

    /// Reads a header or part of a message.
    fn read_part<T: Transport>(
        &mut self,
        group: &TransportGroup<T>,
        peer: usize,
        spare: &mut Spare,
    ) -> Result<bool, Closed> {
        if self.partial.is_some() {
            let (count, whole) = self.read_body(&group.transport, peer)?;
            group.received.fetch_add(count as u64, Ordering::Relaxed);
            if whole {
                group.carries(self.complete());
            }
            return Ok(whole || count > 0);
        }
        let head = self
            .inbuf
            .head(&group.transport, VirtualLane::Messages, peer)?;
        let Some(head) = head else { return Ok(false) };
        self.inbuf.consume(HEADER_BYTES);
        group
            .received
            .fetch_add(HEADER_BYTES as u64, Ordering::Relaxed);
        self.frame(
            Header::decode(&head),
            spare,
            zero_copy::reads_in_place(&group.transport, VirtualLane::Messages, peer),
        );
        if self.garbled { Err(Closed) } else { Ok(true) }
    }

    /// Reads available bytes of a partly received message: their number, and whether the message is
    /// complete.
    fn read_body<T: Transport>(
        &mut self,
        transport: &T,
        peer: usize,
    ) -> Result<(usize, bool), Closed> {
        match (&mut self.partial, &mut self.waiter) {
            (Some(PartialMessage::Kept(message, length)), _) => {
                let count = fill(message, *length, &mut self.inbuf, transport, peer)?;
                Ok((count, message.bytes.len() == *length))
            }
            (Some(PartialMessage::Placed(done)), Some(waiter)) => {
                let rest = waiter.rest(*done);
                let count = match rest {
                    [] => 0,
                    rest => transport.read(VirtualLane::Messages, peer, rest)?,
                };
                *done += count;
                Ok((count, *done == waiter.memory.len()))
            }
            _ => Ok((0, false)),
        }
    }

    /// Completes a message; returns its bytes.
    fn complete(&mut self) -> usize {
        match self.partial.take() {
            Some(PartialMessage::Kept(message, length)) => {
                self.inbox.push_back(message);
                length
            }
            Some(PartialMessage::Placed(done)) => {
                self.waiter.iter_mut().for_each(|waiter| waiter.done = true);
                done
            }
            None => 0,
        }
    }

    fn frame(&mut self, header: Option<Header>, spare: &mut Spare, lends: bool) {
        let held = self.inbox.len();
        match header {
            Some(Header {
                what: FrameKind::Credit,
                call,
                payload: 0,
                ..
            }) => {
                let paid = usize::try_from(call.length).unwrap_or(usize::MAX);
                self.credits = self.credits.saturating_add(paid).min(MESSAGES_HELD);
            }
            Some(Header {
                what: FrameKind::Message,
                call,
                payload,
                ..
            }) if held < MESSAGES_HELD && fits(&call, payload) => {
                let awaited = self
                    .waiter
                    .as_ref()
                    .is_some_and(|waiter| waiter.awaits(&call));
                let is_next = self.inbox.iter().all(|m| m.call.kind != call.kind);
                self.partial = Some(match lends && awaited && is_next {
                    true => PartialMessage::Placed(0),
                    false => {
                        let mut bytes = spare.pop().unwrap_or_default();
                        bytes.clear();
                        let length = usize::try_from(payload).unwrap_or(usize::MAX);
                        PartialMessage::Kept(BufferedMessage { call, bytes }, length)
                    }
                });
            }
            _ => self.garbled = true,
        }
    }
}

type Spare = Vec<Vec<u8>>;

/// Whether a message has this tag.
fn is_tagged(call: &Call, tag: u32) -> bool {
    matches!(call.kind, Kind::Send { tag: own, .. } if own == tag)
}

/// Whether the payload of a message is what its call announces.
fn fits(call: &Call, payload: u64) -> bool {
    call.length.checked_mul(call.dtype.bytes() as u64) == Some(payload)
}

/// Appends available bytes of a message of `length` bytes.
fn fill<T: Transport>(
    message: &mut BufferedMessage,
    length: usize,
    inbuf: &mut Inbuf,
    transport: &T,
    peer: usize,
) -> Result<usize, Closed> {
    let have = message.bytes.len();
    let missing = length - have;
    let direct = missing >= DIRECT_BYTES
        || (missing > 0 && zero_copy::reads_in_place(transport, VirtualLane::Messages, peer));
    if inbuf.bytes().is_empty() && direct {
        message.bytes.resize(have + missing.min(AHEAD_BYTES), 0);
        let count = transport.read(VirtualLane::Messages, peer, &mut message.bytes[have..]);
        message.bytes.truncate(have + count.unwrap_or(0));
        return count;
    }
    if inbuf.bytes().is_empty() && missing > 0 {
        inbuf.fill(transport, VirtualLane::Messages, peer, missing)?;
    }
    let count = missing.min(inbuf.bytes().len());
    message.bytes.extend_from_slice(&inbuf.bytes()[..count]);
    inbuf.consume(count);
    Ok(count)
}

fn header(what: FrameKind, call: Call, payload: usize) -> [u8; HEADER_BYTES] {
    Header {
        what,
        algorithm: 0,
        step: 0,
        call,
        payload: payload as u64,
    }
    .encode()
}

/// Next step of a waiting thread after it polled the mailboxes.
enum PollResult<R> {
    Done(R),
    Wait,
}

impl<T: Transport> TransportGroup<T> {
    /// The next message call of this rank, with checked arguments.
    fn message(&self, kind: Kind, dtype: Dtype, length: usize) -> Result<Call, Error> {
        let sequence = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call::plain(sequence, kind, dtype, length);
        call.with_peer(self.rank(), self.size())
            .map_err(|error| self.fail(call, error, self.next_call()))
    }

    /// The first collective that is not complete.
    fn next_call(&self) -> u64 {
        self.completed.load(Ordering::Acquire) + 1
    }

    /// See [`Group::send_data`](crate::Group::send_data).
    pub fn send(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Send { to, tag }, message.dtype(), message.len())?;
        let peer = to.0 as usize;
        let head = header(FrameKind::Message, call, message.bytes().len());
        let sent = self.poll_mail(peer, deadline, |mail| {
            if let Some(error) = self.cause_of(call) {
                return PollResult::Done(Err(error));
            }
            let post = &mut mail.posts[peer];
            if post.closed || post.credits == 0 {
                return if post.closed {
                    PollResult::Done(Ok(false))
                } else {
                    PollResult::Wait
                };
            }
            post.credits -= 1;
            self.carries(message.bytes().len());
            post.put(self, peer, &head, message.bytes());
            PollResult::Done(Ok(!post.closed))
        });
        match sent {
            None => Err(self.fail(call, Error::Timeout { call, rank: to }, self.next_call())),
            Some(Ok(true)) => self.see_off(call, peer, deadline),
            Some(Ok(false)) => Err(self.lost(call, peer, self.next_call())),
            Some(Err(error)) => Err(error),
        }
    }

    /// Waits until the outbox is sent and memory that the link reads in place is released.
    fn see_off(&self, call: Call, peer: usize, deadline: Deadline) -> Result<(), Error> {
        let waits = |post: &PeerMailbox| post.lent || !post.outbox.is_empty();
        let (open, lent) = {
            let post = &lock(&self.mail).posts[peer];
            (waits(post), post.lent)
        };
        if !open || (!lent && self.transport.nudge()) {
            return Ok(());
        }
        let gone = self.poll_mail(peer, deadline, |mail| {
            let post = &mut mail.posts[peer];
            post.lent &= zero_copy::holds(&self.transport, VirtualLane::Messages, peer);
            // A sender that only waits for its memory regains it, though the peer has closed by
            // now.
            if !waits(post) {
                PollResult::Done(Ok(()))
            } else if post.closed {
                PollResult::Done(Err(None))
            } else {
                self.cause_of(call)
                    .map_or(PollResult::Wait, |error| PollResult::Done(Err(Some(error))))
            }
        });
        if !matches!(gone, Some(Ok(()))) {
            zero_copy::release_peer_memory(&self.transport, VirtualLane::Messages, peer);
        }
        let rank = super::number(peer);
        match gone {
            Some(Ok(())) => Ok(()),
            Some(Err(Some(error))) => Err(error),
            Some(Err(None)) => Err(self.lost(call, peer, self.next_call())),
            None => Err(self.fail(call, Error::Timeout { call, rank }, self.next_call())),
        }
    }

    /// See [`Group::recv_data`](crate::Group::recv_data).
    pub fn recv(
        &self,
        mut into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let call = self.message(Kind::Recv { from, tag }, into.dtype(), into.len())?;
        let peer = from.0 as usize;
        let lends = zero_copy::reads_in_place(&self.transport, VirtualLane::Messages, peer);
        let memory: *mut [u8] = into.bytes_mut();
        let linked = self;
        let waiting = lends.then_some(ReceiveGuard { linked, call, peer });
        let found = self.poll_mail(peer, deadline, |mail| {
            let found = self.find(mail, peer, tag, call);
            if lends && matches!(found, PollResult::Wait) {
                self.wait_in(&mut mail.posts[peer], peer, (call, tag), memory);
            }
            found
        });
        drop(waiting);
        let message = match found {
            None => {
                let error = Error::Timeout { call, rank: from };
                return Err(self.fail(call, error, self.next_call()));
            }
            Some(Err(error)) => return Err(error),
            Some(Ok(None)) => return Err(self.closed(call, peer)),
            Some(Ok(Some(Delivery::Placed))) => {
                self.taken(&mut lock(&self.mail), peer);
                return Ok(());
            }
            Some(Ok(Some(Delivery::Kept(message)))) => message,
        };
        let got = message.call;
        if (got.dtype, got.length) != (call.dtype, call.length) {
            let error = Error::Mismatch {
                rank: from,
                expected: call,
                got,
            };
            return Err(self.fail(call, error, self.next_call()));
        }
        into.bytes_mut().copy_from_slice(&message.bytes);
        let mut mail = lock(&self.mail);
        if mail.spare.len() < MESSAGES_HELD {
            mail.spare.push(message.bytes);
        }
        self.taken(&mut mail, peer);
        Ok(())
    }

    /// Accounts for a received message of `peer`.
    fn taken(&self, mail: &mut Mailboxes, peer: usize) {
        let post = &mut mail.posts[peer];
        post.owed += 1;
        if post.owed >= CREDITS_OWED {
            post.pay(self, peer);
        }
    }

    /// Registers `memory` for the message of `call`, unless another receive waits.
    fn wait_in(
        &self,
        post: &mut PeerMailbox,
        peer: usize,
        (call, tag): (Call, u32),
        memory: *mut [u8],
    ) {
        let waiter = post.waiter.get_or_insert(WaitingReceive {
            call,
            tag,
            memory,
            done: false,
        });
        if waiter.call.sequence == call.sequence && post.partial.is_none() {
            zero_copy::expect(&self.transport, peer, waiter.rest(0));
        }
    }

    /// Removes a waiting receive. If its message was partly received, the rest is abandoned and the
    /// lane from `peer` counts as closed.
    fn wait_no_more(&self, call: Call, peer: usize) {
        let mut mail = lock(&self.mail);
        let post = &mut mail.posts[peer];
        let own = |waiter: &mut WaitingReceive| waiter.call.sequence == call.sequence;
        if post.waiter.take_if(own).is_some()
            && matches!(post.partial, Some(PartialMessage::Placed(_)))
        {
            zero_copy::release_peer_memory(&self.transport, VirtualLane::Messages, peer);
            (post.partial, post.closed) = (None, true);
        }
    }

    /// A message, or why there will be none: an error, or `None` if the link is closed.
    fn find(
        &self,
        mail: &mut Mailboxes,
        peer: usize,
        tag: u32,
        call: Call,
    ) -> PollResult<Result<Option<Delivery>, Error>> {
        let cause = self.status.cause();
        if let Some(cause @ Cause::Failed(_)) = cause {
            return PollResult::Done(Err(cause.error(call)));
        }
        let post = &mut mail.posts[peer];
        let own = |waiter: &WaitingReceive| waiter.done && waiter.call.sequence == call.sequence;
        if post.waiter.as_ref().is_some_and(own) {
            return PollResult::Done(Ok(Some(Delivery::Placed)));
        }
        if let Some(message) = post.pop(tag) {
            return PollResult::Done(Ok(Some(Delivery::Kept(message))));
        }
        if post.closed {
            return PollResult::Done(Ok(None));
        }
        match cause {
            // Messages sent before the peer left may still be in flight; then the link closes.
            None => PollResult::Wait,
            Some(Cause::Left(rank)) if rank.0 as usize == peer => PollResult::Wait,
            Some(cause) => PollResult::Done(Err(cause.error(call))),
        }
    }

    /// The error of a call whose peer closed the link, or sent invalid bytes.
    fn closed(&self, call: Call, peer: usize) -> Error {
        if lock(&self.mail).posts[peer].garbled {
            let rank = super::number(peer);
            let at = self.next_call();
            self.poison(crate::status::FailureNotice {
                cause: Cause::Garbled(rank),
                at,
            });
            return self.cause_of(call).unwrap_or(Error::Garbled { call, rank });
        }
        self.lost(call, peer, self.next_call())
    }

    /// Polls the mailboxes until `ready` has a result; `None` at the deadline. `peer` is the one to
    /// poll most often.
    fn poll_mail<R>(
        &self,
        peer: usize,
        deadline: Deadline,
        mut ready: impl FnMut(&mut Mailboxes) -> PollResult<R>,
    ) -> Option<R> {
        let patience = self.transport.patience();
        let mut mail = lock(&self.mail);
        let mut looks = 0;
        loop {
            if let PollResult::Done(result) = ready(&mut mail) {
                return Some(result);
            }
            let focus = (looks % 16 != 0).then_some(peer);
            if self.pump(&mut mail, focus) {
                self.mail_changed.notify_all();
                looks = 0;
                continue;
            }
            looks += 1;
            if mail.polling {
                let left = deadline.left(self.transport.now());
                if left.is_zero() {
                    return None;
                }
                let woken = self
                    .mail_changed
                    .wait_timeout(mail, left.min(FOLLOWER_WAIT));
                mail = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(mail);
            let pause = patience.pause(looks);
            mail = lock(&self.mail);
            if pause == Pause::Block && !mail.polling {
                self.pay_all(&mut mail);
                if self.pump(&mut mail, None) {
                    continue;
                }
                if let PollResult::Done(result) = ready(&mut mail) {
                    return Some(result);
                }
                if deadline.left(self.transport.now()).is_zero() {
                    return None;
                }
                let mut wants = Vec::new();
                mail.wants(self.rank, &mut wants);
                mail.polling = true;
                drop(mail);
                self.transport
                    .wait(VirtualLane::Messages, &wants, deadline.instant());
                mail = lock(&self.mail);
                mail.polling = false;
                self.mail_changed.notify_all();
            }
        }
    }

    /// Receives and sends what is possible; true if bytes moved.
    fn pump(&self, mail: &mut Mailboxes, focus: Option<usize>) -> bool {
        let mut moved = false;
        for (peer, post) in mail.posts.iter_mut().enumerate() {
            if peer != self.rank && focus.is_none_or(|focus| focus == peer) {
                moved |= post.flush(self, peer);
                moved |= post.read(self, peer, &mut mail.spare);
            }
        }
        moved
    }

    fn pay_all(&self, mail: &mut Mailboxes) {
        for (peer, post) in mail.posts.iter_mut().enumerate() {
            post.pay(self, peer);
        }
    }

    /// Adds the links that a thread which waits for another event should watch for messages.
    pub(super) fn mail_wants(&self, wants: &mut Vec<WaitInterest>) {
        if let Ok(mail) = self.mail.try_lock()
            && !mail.polling
        {
            mail.wants(self.rank, wants);
        }
    }

    /// Polls the mailboxes, unless another thread does.
    pub(crate) fn tend(&self) {
        if let Ok(mut mail) = self.mail.try_lock()
            && !mail.polling
        {
            self.pay_all(&mut mail);
            if self.pump(&mut mail, None) {
                self.mail_changed.notify_all();
            }
        }
    }

    /// Waits up to `wait` for links to accept the outboxes, unless another thread does. True if
    /// bytes are left.
    pub(crate) fn push(&self, wait: Duration) -> bool {
        // The holder of the lock polls the mailboxes. The heartbeat thread must not queue for it,
        // as its heartbeats would stop.
        let Ok(mut mail) = self.mail.try_lock() else {
            return false;
        };
        let waits = |mail: &Mailboxes| {
            let waits = |post: &PeerMailbox| !post.closed && !post.outbox.is_empty();
            mail.posts.iter().any(waits)
        };
        if mail.polling || !waits(&mail) {
            return false;
        }
        let mut wants = Vec::new();
        mail.wants(self.rank, &mut wants);
        mail.polling = true;
        drop(mail);
        let until = self.transport.now() + wait;
        self.transport.wait(VirtualLane::Messages, &wants, until);
        mail = lock(&self.mail);
        mail.polling = false;
        self.pump(&mut mail, None);
        self.mail_changed.notify_all();
        waits(&mail)
    }

    /// Sends the outboxes; true if bytes are left.
    pub(super) fn flush(&self) -> bool {
        let mut mail = lock(&self.mail);
        self.pump(&mut mail, None);
        let waits = |post: &PeerMailbox| !post.closed && !post.outbox.is_empty();
        mail.posts.iter().any(waits)
    }
}
