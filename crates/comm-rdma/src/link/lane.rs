//! The state of a lane: messages that are sent and not yet acknowledged, messages that came and
//! wait to be read.

use std::collections::VecDeque;
use std::time::Instant;

use paceline_comm::provider::Lane;

use crate::cable::{Body, Cable};
use crate::message::{Head, Kind};

/// The sending side of a lane.
#[derive(Default)]
pub(super) struct Outgoing {
    /// Number of the next message.
    pub(super) next: u64,
    /// All below have been received.
    pub(super) received: u64,
    /// All below have been read.
    pub(super) consumed: u64,
    /// `received..next`
    pub(super) flights: VecDeque<Flight>,
    /// Of those, how many are in place.
    pub(super) in_place: usize,
    /// A write found no room.
    pub(super) starved: bool,
}

/// A message under way.
pub(crate) struct Flight {
    pub(super) kind: Kind,
    /// The sender waits for its memory behind it.
    pub(super) asks: bool,
    pub(super) cable: usize,
    pub(super) slot: usize,
    /// Over which cable it was sent first.
    pub(super) first_cable: usize,
    /// Bytes in the slot.
    pub(super) bytes: usize,
    pub(super) body: Option<Body>,
    pub(super) first: Instant,
    pub(super) last: Instant,
    pub(super) tries: u32,
    /// The receiver has it, but not all before it.
    pub(super) held: bool,
}

/// The receiving side of a lane.
#[derive(Default)]
pub(super) struct Incoming {
    /// All below have been read.
    pub(super) consumed: u64,
    /// All below are there.
    pub(super) received: u64,
    /// `consumed..`
    pub(super) held: VecDeque<Option<Held>>,
    /// Bytes of the first that have been read.
    pub(super) at: usize,
    pub(super) told_consumed: u64,
    pub(super) told_received: u64,
}

/// A message that waits to be read.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(super) kind: Kind,
    pub(crate) cable: usize,
    pub(crate) slot: usize,
    pub(crate) bytes: usize,
}

impl Flight {
    pub(crate) const fn new(kind: Kind, bytes: usize, body: Option<Body>, now: Instant) -> Self {
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

impl Outgoing {
    /// Takes note of what the peer has; false if it cannot have it.
    pub(super) fn acknowledged(&mut self, lane: Lane, head: &Head, cables: &mut [Cable]) -> bool {
        let (received, consumed) = (head.received[lane as usize], head.consumed[lane as usize]);
        if received > self.next || consumed > received {
            return false;
        }
        while self.received < received {
            let flight = self.flights.pop_front().expect("all of received..next");
            self.in_place -= usize::from(flight.body.is_some());
            cables[flight.cable].own(flight.slot, false);
            // Whichever cable it came over in the end works; the one that lost it may not.
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

impl Incoming {
    /// Keeps a message unless it is there already.
    pub(super) fn keep(&mut self, sequence: u64, held: Held) -> bool {
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

    /// Which messages behind the first missing one are there.
    pub(super) fn bits(&self) -> u64 {
        let first = small(self.received - self.consumed) + 1;
        let later = self.held.iter().skip(first).take(64);
        let bit = |(index, held): (usize, &Option<Held>)| u64::from(held.is_some()) << index;
        later.enumerate().map(bit).fold(0, |bits, bit| bits | bit)
    }
}

/// A number that is below a window, or below the number of cables, as an index.
pub(crate) fn small(number: u64) -> usize {
    usize::try_from(number).expect("windows are small")
}
