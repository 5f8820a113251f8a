//! The state of a lane: the window of unacknowledged sent messages, and the window of received
//! messages that were not read yet.

use std::collections::VecDeque;
use std::time::Instant;

use paceline_comm::provider::VirtualLane;

use crate::message::{Kind, MessageHead};
use crate::message_pair::{MessageQueuePair, RegisteredBody};

/// The sending side of a lane.
#[derive(Default)]
pub(super) struct SendWindow {
    /// Number of the next message.
    pub(super) next: u64,
    /// All below are received.
    pub(super) received: u64,
    /// All below are read.
    pub(super) consumed: u64,
    /// `received..next`
    pub(super) flights: VecDeque<UnackedMessage>,
    /// Number of those whose body is in place.
    pub(super) in_place: usize,
    /// A write found no room.
    pub(super) starved: bool,
}

/// A sent message without an acknowledgement.
pub(crate) struct UnackedMessage {
    pub(super) kind: Kind,
    /// The sender waits for the release of its memory.
    pub(super) asks: bool,
    pub(super) cable: usize,
    pub(super) slot: usize,
    pub(super) first_cable: usize,
    pub(super) bytes: usize,
    pub(super) body: Option<RegisteredBody>,
    pub(super) first: Instant,
    pub(super) last: Instant,
    pub(super) tries: u32,
    /// The receiver has it, but lacks an earlier one.
    pub(super) held: bool,
}

/// The receiving side of a lane.
#[derive(Default)]
pub(super) struct ReceiveWindow {
    /// All below are read.
    pub(super) consumed: u64,
    /// All below are received.
    pub(super) received: u64,
    /// `consumed..`
    pub(super) held: VecDeque<Option<UnreadMessage>>,
    /// Bytes of the first message that have been read.
    pub(super) at: usize,
    pub(super) told_consumed: u64,
    pub(super) told_received: u64,
}

/// A received message that was not read yet.
#[derive(Clone, Copy)]
pub(crate) struct UnreadMessage {
    pub(super) kind: Kind,
    pub(crate) cable: usize,
    pub(crate) slot: usize,
    pub(crate) bytes: usize,
}

impl UnackedMessage {
    pub(crate) const fn new(
        kind: Kind,
        bytes: usize,
        body: Option<RegisteredBody>,
        now: Instant,
    ) -> Self {
        Self {
            kind,
            asks: false,
            cable: 0,
            slot: 0,
            first_cable: 0,
            bytes,
            body,
            first: now,
            last: now,
            tries: 0,
            held: false,
        }
    }
}

impl SendWindow {
    /// Handles the peer's acknowledgement; false if it is impossible.
    pub(super) fn acknowledged(
        &mut self,
        lane: VirtualLane,
        head: &MessageHead,
        cables: &mut [MessageQueuePair],
    ) -> bool {
        let (received, consumed) = (head.received[lane as usize], head.consumed[lane as usize]);
        if received > self.next || consumed > received {
            return false;
        }
        while self.received < received {
            let flight = self.flights.pop_front().expect("all of received..next");
            self.in_place -= usize::from(flight.body.is_some());
            cables[flight.cable].own(flight.slot, false);
            // The cable of the last attempt works; the one of the first may not.
            if flight.first_cable != flight.cable {
                cables[flight.first_cable].lost += 1;
            }
            cables[flight.cable].lost = 0;
            self.received += 1;
        }
        self.consumed = self.consumed.max(consumed);
        true
    }
}

impl ReceiveWindow {
    /// Stores a message; false if it is a duplicate.
    pub(super) fn keep(&mut self, sequence: u64, held: UnreadMessage) -> bool {
        if sequence < self.received {
            return false;
        }
        let index = small(sequence - self.consumed);
        if self.held.len() <= index {
            self.held.resize(index + 1, None);
        }
        if self.held[index].is_some() {
            return false;
        }
        self.held[index] = Some(held);
        let there = |sequence: u64| {
            let index = small(sequence - self.consumed);
            matches!(self.held.get(index), Some(Some(_)))
        };
        let mut received = self.received;
        while there(received) {
            received += 1;
        }
        self.received = received;
        true
    }

    /// A bit for each received message behind the first missing one.
    pub(super) fn bits(&self) -> u64 {
        let first = small(self.received - self.consumed) + 1;
        let later = self.held.iter().skip(first).take(64);
        let bit =
            |(index, held): (usize, &Option<UnreadMessage>)| u64::from(held.is_some()) << index;
        later.enumerate().map(bit).fold(0, |bits, bit| bits | bit)
    }
}

/// Converts a number that is below a window, or below the number of cables, to an index.
pub(crate) fn small(number: u64) -> usize {
    usize::try_from(number).expect("windows are small")
}
