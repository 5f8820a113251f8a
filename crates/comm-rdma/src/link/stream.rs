//! A link as what transports ask of it: bytes in, bytes out.

use paceline_comm::provider::{self, Closed, Lane, Lent};

use super::Link;
use super::lane::{Flight, Held, small};
use crate::bulk::NUMBER_BYTES;
use crate::cable::Body;
use crate::error::RdmaError;
use crate::message::{HEAD_BYTES, Kind};

/// Shortest part of a caller's memory that is sent in place. Below, copying costs less than the
/// device's second read (4 KiB at 10 GB/s: 0.4 us).
const GATHER_BYTES: usize = 4 << 10;

/// Messages end between elements, of which the longest have 16 bytes or divide this: whoever
/// reduces them does so where they lie.
const ELEMENT_BYTES: usize = 16;

/// How much of a body of `bytes` goes into a message that has `room` for so much.
const fn whole_elements(bytes: usize, room: usize) -> usize {
    if bytes <= room {
        bytes
    } else {
        room - room % ELEMENT_BYTES
    }
}

impl Link {
    /// Whether a new message of this lane may be sent: none overtakes a body that was offered.
    pub(crate) fn has_room(&self, lane: Lane) -> bool {
        !self.bulk.sends(lane) && self.has_slot(lane)
    }

    /// Whether there is a place for a message of this lane.
    pub(crate) fn has_slot(&self, lane: Lane) -> bool {
        let outgoing = &self.outgoing[lane as usize];
        outgoing.next - outgoing.consumed < self.window(lane as usize)
            && self.place(lane as usize, 0).is_some()
    }

    /// Whether bytes wait to be read.
    pub(crate) fn has_bytes(&self, lane: Lane) -> bool {
        matches!(self.incoming[lane as usize].held.front(), Some(Some(_)))
            || self.bulk.has_news(lane)
    }

    /// Whether nothing more will come, or go.
    pub(crate) const fn is_closed(&self) -> bool {
        self.gone || self.broken.is_some()
    }

    /// Whether a writer of this lane has something to do: there is room again, or everything that
    /// was sent in place may be used again.
    pub(crate) fn is_writable(&self, lane: Lane) -> bool {
        match self.outgoing[lane as usize].starved {
            true => self.has_room(lane),
            false => !self.holds(lane),
        }
    }

    /// Whether memory that was sent in place must stay as it is.
    pub(crate) fn holds(&self, lane: Lane) -> bool {
        let of_calls = self.reading > 0 || self.outgoing[0].in_place > 0;
        match lane {
            Lane::Calls => of_calls || self.bulk.sends(lane),
            Lane::Messages => self.mailed,
        }
    }

    /// Whether a device may read or write memory of callers.
    pub(crate) fn uses_memory(&self, lane: Lane) -> bool {
        self.holds(lane) || self.bulk.receives(lane)
    }

    /// Sends what fits of `head` followed by `body`; how many bytes that is.
    pub(crate) fn write(&mut self, lane: Lane, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let (mut head, mut body) = (head, body);
        let total = head.len() + body.len();
        let mut looked = false;
        while !(self.is_closed() || head.is_empty() && body.is_empty()) {
            if !self.has_room(lane) {
                if std::mem::replace(&mut looked, true) {
                    break;
                }
                self.look();
                continue;
            }
            let room = self.slot_bytes - HEAD_BYTES;
            let first = head.len().min(room);
            let second = whole_elements(body.len(), room - first);
            self.put(lane, &head[..first], &body[..second], second == body.len());
            (head, body) = (&head[first..], &body[second..]);
        }
        let left = head.len() + body.len();
        self.outgoing[lane as usize].starved = left > 0;
        // Whoever only waits for its memory has that back when the peer is gone, and no error: the
        // peer may have left because it was through, and its last acknowledgement may be lost.
        match self.broken.is_some() || (self.gone && total > 0) {
            true => Err(Closed),
            false => Ok(total - left),
        }
    }

    /// As [`write`](Self::write); the peer has a place for the body, which may then go there
    /// without a copy. Of messages it is known to have one if it waits.
    pub(crate) fn write_whole(
        &mut self,
        lane: Lane,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let is_empty = head.is_empty() && body.is_empty();
        if is_empty || !self.has_room(lane) {
            // Its memory is what the caller waits for, or room.
            self.look();
        }
        if !is_empty && !self.is_closed() && !self.has_room(lane) {
            // Not in part: a body is offered as a whole.
            self.outgoing[lane as usize].starved = true;
            return Ok(0);
        }
        let next = self.outgoing[lane as usize].next;
        let awaited = lane == Lane::Calls || self.hungry == Some(next);
        let is_free = awaited && self.has_room(lane) && !self.is_closed();
        if is_free && self.offer(lane, head, body) {
            self.outgoing[lane as usize].starved = false;
            self.mailed |= lane == Lane::Messages;
            return Ok(head.len() + body.len());
        }
        self.write(lane, head, body)
    }

    /// Lets the peer know that whoever waits for its next message wants that in `memory`, if that
    /// can be done without a copy.
    pub(crate) fn expect(&mut self, memory: &[u8]) {
        if !self.waiting && self.can_place(memory) {
            (self.waiting, self.urgent) = (true, true);
        }
    }

    /// Sends a new message, the last of a body or not.
    pub(crate) fn put(&mut self, lane: Lane, head: &[u8], body: &[u8], last: bool) {
        let now = provider::now();
        let Some((cable, slot)) = self.next_place(lane) else {
            return;
        };
        let key = (lane == Lane::Calls && body.len() >= self.in_place_bytes.min(GATHER_BYTES))
            .then(|| self.registry.key(self.cables[cable].pair().adapter(), body))
            .flatten();
        let copied = if key.is_some() { &[] } else { body };
        let body = key.map(|key| Body {
            start: body.as_ptr(),
            bytes: body.len(),
            key,
        });
        let bytes = HEAD_BYTES + head.len() + copied.len();
        let flight = Flight {
            asks: last && (body.is_some() || self.outgoing[lane as usize].in_place > 0),
            ..Flight::new(Kind::Data(lane), bytes, body, now)
        };
        self.placed.sent += body.map_or(0, |body| body.bytes as u64);
        let sent = self.fly(lane, (cable, slot), &[head, copied], flight);
        self.result(sent);
    }

    /// Sends a new message, of which `parts` are copied.
    pub(crate) fn fly(
        &mut self,
        lane: Lane,
        (cable, slot): (usize, usize),
        parts: &[&[u8]],
        flight: Flight,
    ) -> Result<(), RdmaError> {
        let (index, now) = (lane as usize, flight.first);
        let sequence = self.outgoing[index].next;
        self.cables[cable].fill(slot, HEAD_BYTES, parts);
        self.cables[cable].own(slot, true);
        let outgoing = &mut self.outgoing[index];
        outgoing.next += 1;
        outgoing.in_place += usize::from(flight.body.is_some());
        outgoing.flights.push_back(Flight {
            cable,
            slot,
            first_cable: cable,
            ..flight
        });
        self.transmit(index, sequence, now)
    }

    /// Where the next message of a lane goes: cables take turns.
    pub(crate) fn next_place(&self, lane: Lane) -> Option<(usize, usize)> {
        let next = self.outgoing[lane as usize].next;
        self.place(lane as usize, small(next % self.cables.len() as u64))
    }

    /// Reads what is there of a lane.
    pub(crate) fn read(&mut self, lane: Lane, into: &mut [u8]) -> Result<usize, Closed> {
        // Also if bytes wait: what a peer sent before it told somebody else has to be seen.
        self.look();
        let mut count = 0;
        while count < into.len() {
            if self.in_transfer(lane) {
                count += self.read_transfer(lane, count, into);
                break;
            }
            let Some(Some(held)) = self.incoming[lane as usize].held.front().copied() else {
                break;
            };
            count += self.read_held(lane, held, &mut into[count..]);
        }
        if count == 0 && self.is_closed() && !into.is_empty() {
            return Err(Closed);
        }
        // Something has come, so it has to be said anew.
        self.waiting &= lane == Lane::Calls || count == 0;
        self.look_after_reading(lane);
        Ok(count)
    }

    /// Has `take` use what is there of the lane for calls where it lies, up to the end of a message
    /// at a time. `take` says how much of that it has used. Returns how many bytes that were.
    pub(crate) fn lend(
        &mut self,
        take: &mut dyn FnMut(Lent<'_>) -> usize,
    ) -> Result<usize, Closed> {
        if !self.has_bytes(Lane::Calls) {
            self.look();
        }
        // What is reduced is no whole that could be put somewhere.
        self.answer(Lane::Calls, &mut []);
        let mut count = 0;
        while let Some(Some(held)) = self.incoming[0].held.front().copied()
            && !self.in_transfer(Lane::Calls)
        {
            let at = self.incoming[0].at;
            let message = self.cables[held.cable].received(
                held.slot,
                HEAD_BYTES + at,
                HEAD_BYTES + held.bytes,
            );
            let (there, taken) = (message.len(), take(Lent::of(message)).min(message.len()));
            self.taken(Lane::Calls, held, at + taken);
            count += taken;
            if taken < there {
                break;
            }
        }
        if count == 0 && self.is_closed() {
            return Err(Closed);
        }
        self.placed.received += count as u64;
        self.look_after_reading(Lane::Calls);
        Ok(count)
    }

    /// Whether what comes next is no ordinary message.
    fn in_transfer(&self, lane: Lane) -> bool {
        let offered = self.bulk.offer.is_some_and(|(offered, _)| offered == lane);
        offered || self.bulk.receives(lane)
    }

    /// Goes on with a transfer into `into`, if nothing of that has been `read`; how many bytes it
    /// has brought.
    fn read_transfer(&mut self, lane: Lane, read: usize, into: &mut [u8]) -> usize {
        if read == 0 && self.broken.is_none() {
            self.answer(lane, into);
        }
        while self.bulk.receives(lane)
            && let Some(Some(held)) = self.incoming[lane as usize].held.front().copied()
        {
            self.patch(held);
            self.release(lane, held);
        }
        match self.bulk.receives(lane) {
            true => self.finish().unwrap_or(0),
            false => 0,
        }
    }

    /// Reads of the first message of a lane.
    fn read_held(&mut self, lane: Lane, held: Held, into: &mut [u8]) -> usize {
        let at = match (held.kind, self.incoming[lane as usize].at) {
            (Kind::Offer(_), 0) => NUMBER_BYTES,
            (_, at) => at,
        };
        let count = (held.bytes - at).min(into.len());
        let from = HEAD_BYTES + at;
        let bytes = self.cables[held.cable].received(held.slot, from, from + count);
        into[..count].copy_from_slice(bytes);
        self.taken(lane, held, at + count);
        count
    }

    /// The first message of a lane has been read up to byte `at`.
    fn taken(&mut self, lane: Lane, held: Held, at: usize) {
        self.incoming[lane as usize].at = at;
        if at == held.bytes {
            if held.kind == Kind::Offer(lane) {
                let number =
                    self.cables[held.cable].received(held.slot, HEAD_BYTES, HEAD_BYTES + 8);
                let bytes = number.first_chunk().map_or(0, |n| u64::from_le_bytes(*n));
                self.bulk.offer = Some((lane, usize::try_from(bytes).unwrap_or(usize::MAX)));
            }
            self.release(lane, held);
        }
    }

    /// The first message of a lane has been read: its memory is for another.
    fn release(&mut self, lane: Lane, held: Held) {
        let incoming = &mut self.incoming[lane as usize];
        incoming.held.pop_front();
        (incoming.consumed, incoming.at) = (incoming.consumed + 1, 0);
        if self.broken.is_none() {
            let posted = self.cables[held.cable].post_receive(held.slot);
            self.result(posted);
        }
    }

    /// Gives credit back once much has been read.
    fn look_after_reading(&mut self, lane: Lane) {
        if (self.urgent || self.owes_credit(lane)) && !self.is_closed() {
            let told = self.tell();
            self.result(told);
        }
    }

    /// Whether a quarter of the window has been read that the peer does not know of.
    pub(super) fn owes_credit(&self, lane: Lane) -> bool {
        let incoming = &self.incoming[lane as usize];
        let unsaid = incoming.consumed - incoming.told_consumed;
        unsaid * 4 >= self.window(lane as usize)
    }
}
