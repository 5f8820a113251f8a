//! Messages between the ranks of one process: one inbox per receiver.
//!
//! An inbox holds at most [`MESSAGES_HELD`] messages of each sender; a sender that would exceed
//! that waits. Buffers of received messages are kept for the next ones, so a steady exchange does
//! not allocate.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use paceline_base::Rank;

use super::arena::{Arena, Cause, lock, sleep_on};
use crate::{Call, Deadline, Error, Kind, MESSAGES_HELD};

/// What waits for one rank.
#[derive(Default)]
pub(super) struct Inbox {
    queue: Mutex<Queue>,
    /// A message came or went, or the group is poisoned.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// In order of arrival, whoever sent them.
    messages: VecDeque<Message>,
    /// Buffers to use again, at most `MESSAGES_HELD`.
    spare: Vec<Vec<u8>>,
}

struct Message {
    from: Rank,
    call: Call,
    bytes: Vec<u8>,
}

impl Inbox {
    /// Wakes all who wait, to look at the cause of poisoning.
    pub(super) fn wake(&self) {
        drop(lock(&self.queue));
        self.changed.notify_all();
    }
}

impl Queue {
    fn held(&self, from: Rank) -> usize {
        self.messages
            .iter()
            .filter(|message| message.from == from)
            .count()
    }

    fn push(&mut self, from: Rank, call: Call, bytes: &[u8]) {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(bytes);
        self.messages.push_back(Message {
            from,
            call,
            bytes: buffer,
        });
    }

    /// The oldest message of `from` with this tag.
    fn pop(&mut self, from: Rank, tag: u32) -> Option<Message> {
        let tagged = |call: Call| matches!(call.kind, Kind::Send { tag: sent, .. } if sent == tag);
        let oldest = self
            .messages
            .iter()
            .position(|m| m.from == from && tagged(m.call))?;
        self.messages.remove(oldest)
    }

    fn keep(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < MESSAGES_HELD {
            self.spare.push(buffer);
        }
    }
}

impl Arena {
    /// Puts a message of `from` into the inbox that the call (a send) names.
    pub(super) fn put(
        &self,
        from: Rank,
        call: Call,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let Kind::Send { to, .. } = call.kind else {
            unreachable!("{call} is no send")
        };
        let inbox = &self.inboxes[to.0 as usize];
        let mut queue = lock(&inbox.queue);
        loop {
            if let Some(cause) = self.cause() {
                return Err(cause.error(call));
            }
            if queue.held(from) < MESSAGES_HELD {
                queue.push(from, call, bytes);
                inbox.changed.notify_all();
                return Ok(());
            }
            let now = Instant::now();
            if deadline.left(now).is_zero() {
                drop(queue);
                return Err(self.fail(Error::Timeout { call, rank: to }));
            }
            queue = sleep_on(&inbox.changed, queue, deadline, now);
        }
    }

    /// Takes the message that the call (a receive) names out of the inbox of `rank`.
    pub(super) fn take(
        &self,
        rank: Rank,
        call: Call,
        into: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let Kind::Recv { from, tag } = call.kind else {
            unreachable!("{call} is no receive")
        };
        let inbox = &self.inboxes[rank.0 as usize];
        let message = self.next_message(inbox, from, tag, call, deadline)?;
        if (message.call.dtype, message.call.length) != (call.dtype, call.length) {
            let got = message.call;
            return Err(self.fail(Error::Mismatch {
                rank: from,
                expected: call,
                got,
            }));
        }
        into.copy_from_slice(&message.bytes);
        lock(&inbox.queue).keep(message.bytes);
        Ok(())
    }

    /// Waits for a message. One that is there is handed out although a rank has left since.
    fn next_message(
        &self,
        inbox: &Inbox,
        from: Rank,
        tag: u32,
        call: Call,
        deadline: Deadline,
    ) -> Result<Message, Error> {
        let mut queue = lock(&inbox.queue);
        loop {
            let cause = self.cause();
            if let Some(cause @ Cause::Failed(_)) = cause {
                return Err(cause.error(call));
            }
            if let Some(message) = queue.pop(from, tag) {
                inbox.changed.notify_all();
                return Ok(message);
            }
            if let Some(cause) = cause {
                return Err(cause.error(call));
            }
            let now = Instant::now();
            if deadline.left(now).is_zero() {
                drop(queue);
                return Err(self.fail(Error::Timeout { call, rank: from }));
            }
            queue = sleep_on(&inbox.changed, queue, deadline, now);
        }
    }
}
