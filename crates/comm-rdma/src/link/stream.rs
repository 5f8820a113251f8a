//! The byte stream interface of a link, for the transport: reads and writes of a lane.

use paceline_comm::provider::{self, Closed, PeerBytes, VirtualLane};

use super::CableLink;
use super::lane::{UnackedMessage, UnreadMessage, small};
use crate::bulk::NUMBER_BYTES;
use crate::error::RdmaError;
use crate::message::{HEAD_BYTES, Kind};
use crate::message_pair::RegisteredBody;

/// Shortest part of a caller's memory that is sent in place. Below, copying costs less than the
/// device's second read (4 KiB at 10 GB/s: 0.4 us).
const GATHER_BYTES: usize = 4 << 10;

/// Messages end at multiples of this, the longest element, or of a length that divides it. So a
/// receiver can reduce them in place.
const ELEMENT_BYTES: usize = 16;

/// How many of a body's `bytes` go into a message with this much `room`.
const fn whole_elements(bytes: usize, room: usize) -> usize {
    if bytes <= room {
        bytes
    } else {
        room - room % ELEMENT_BYTES
    }
}

impl CableLink {
    /// Whether a new message of this lane may be sent: none may overtake an offered body.
    pub(crate) fn has_room(&self, lane: VirtualLane) -> bool {
        !self.bulk.sends(lane) && self.has_slot(lane)
    }

    /// Whether there is a slot for a message of this lane.
    pub(crate) fn has_slot(&self, lane: VirtualLane) -> bool {
        let outgoing = &self.outgoing[lane as usize];
        outgoing.next - outgoing.consumed < self.window(lane as usize)
            && self.place(lane as usize, 0).is_some()
    }

    /// Whether bytes are available.
    pub(crate) fn has_bytes(&self, lane: VirtualLane) -> bool {
        matches!(self.incoming[lane as usize].held.front(), Some(Some(_)))
            || self.bulk.has_news(lane)
    }

    /// Whether the link is closed in both directions.
    pub(crate) const fn is_closed(&self) -> bool {
        self.gone || self.broken.is_some()
    }

    /// Whether a writer of this lane can make progress: there is room again, or all memory sent in
    /// place is released.
    pub(crate) fn is_writable(&self, lane: VirtualLane) -> bool {
        match self.outgoing[lane as usize].starved {
            true => self.has_room(lane),
            false => !self.holds(lane),
        }
    }

    /// Whether memory that was sent in place must stay unchanged.
    pub(crate) fn holds(&self, lane: VirtualLane) -> bool {
        let of_calls = self.reading > 0 || self.outgoing[0].in_place > 0;
        match lane {
            VirtualLane::Calls => of_calls || self.bulk.sends(lane),
            VirtualLane::Messages => self.mailed,
        }
    }

    /// Whether a device may read or write callers' memory.
    pub(crate) fn uses_memory(&self, lane: VirtualLane) -> bool {
        self.holds(lane) || self.bulk.receives(lane)
    }

    /// Sends as much of `head` followed by `body` as fits; returns that number of bytes.
    pub(crate) fn write(
        &mut self,
        lane: VirtualLane,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let (mut head, mut body) = (head, body);
        let total = head.len() + body.len();
        let mut looked = false;
        while !(self.is_closed() || head.is_empty() && body.is_empty()) {
            if !self.has_room(lane) {
                if std::mem::replace(&mut looked, true) {
                    break;
                }
                self.progress();
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
        // A writer that only waits for its memory regains it without an error when the peer is
        // gone: the peer may have left after it was done, and its last acknowledgement may be lost.
        match self.broken.is_some() || (self.gone && total > 0) {
            true => Err(Closed),
            false => Ok(total - left),
        }
    }

    /// As [`write`](Self::write), for a body that the peer stores unchanged, so that a zero-copy
    /// transfer is possible. A message needs a peer that waits for it.
    pub(crate) fn write_whole(
        &mut self,
        lane: VirtualLane,
        head: &[u8],
        body: &[u8],
    ) -> Result<usize, Closed> {
        let is_empty = head.is_empty() && body.is_empty();
        if is_empty || !self.has_room(lane) {
            // The caller waits for the release of its memory, or for room.
            self.progress();
        }
        if !is_empty && !self.is_closed() && !self.has_room(lane) {
            // A body is never offered in parts.
            self.outgoing[lane as usize].starved = true;
            return Ok(0);
        }
        let next = self.outgoing[lane as usize].next;
        let awaited = lane == VirtualLane::Calls || self.hungry == Some(next);
        let is_free = awaited && self.has_room(lane) && !self.is_closed();
        if is_free && self.offer(lane, head, body) {
            self.outgoing[lane as usize].starved = false;
            self.mailed |= lane == VirtualLane::Messages;
            return Ok(head.len() + body.len());
        }
        self.write(lane, head, body)
    }

    /// Announces to the peer that a receive waits for its next message in `memory`, if that is
    /// registered.
    pub(crate) fn expect(&mut self, memory: &[u8]) {
        if !self.waiting && self.can_place(memory) {
            (self.waiting, self.urgent) = (true, true);
        }
    }

    /// Sends a new message; `last`: it ends the body.
    pub(crate) fn put(&mut self, lane: VirtualLane, head: &[u8], body: &[u8], last: bool) {
        let now = provider::now();
        let Some((cable, slot)) = self.next_place(lane) else {
            return;
        };
        let key = (lane == VirtualLane::Calls
            && body.len() >= self.in_place_bytes.min(GATHER_BYTES))
        .then(|| self.registry.key(self.cables[cable].pair().adapter(), body))
        .flatten();
        let copied = if key.is_some() { &[] } else { body };
        let body = key.map(|key| RegisteredBody {
            start: body.as_ptr(),
            bytes: body.len(),
            key,
        });
        let bytes = HEAD_BYTES + head.len() + copied.len();
        let flight = UnackedMessage {
            asks: last && (body.is_some() || self.outgoing[lane as usize].in_place > 0),
            ..UnackedMessage::new(Kind::Data(lane), bytes, body, now)
        };
        self.placed.sent += body.map_or(0, |body| body.bytes as u64);
        let sent = self.fly(lane, (cable, slot), &[head, copied], flight);
        self.result(sent);
    }

    /// Sends a new message with copied `parts`.
    pub(crate) fn fly(
        &mut self,
        lane: VirtualLane,
        (cable, slot): (usize, usize),
        parts: &[&[u8]],
        flight: UnackedMessage,
    ) -> Result<(), RdmaError> {
        let (index, now) = (lane as usize, flight.first);
        let sequence = self.outgoing[index].next;
        self.cables[cable].fill(slot, HEAD_BYTES, parts);
        self.cables[cable].own(slot, true);
        let outgoing = &mut self.outgoing[index];
        outgoing.next += 1;
        outgoing.in_place += usize::from(flight.body.is_some());
        outgoing.flights.push_back(UnackedMessage {
            cable,
            slot,
            first_cable: cable,
            ..flight
        });
        self.transmit(index, sequence, now)
    }

    /// Cable and slot of the next message of a lane: cables are used in turn.
    pub(crate) fn next_place(&self, lane: VirtualLane) -> Option<(usize, usize)> {
        let next = self.outgoing[lane as usize].next;
        self.place(lane as usize, small(next % self.cables.len() as u64))
    }

    pub(crate) fn read(&mut self, lane: VirtualLane, into: &mut [u8]) -> Result<usize, Closed> {
        // Also if bytes are available: messages sent before a peer notified others must be seen.
        self.progress();
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
        // Bytes have arrived, so a waiting receive must be announced again.
        self.waiting &= lane == VirtualLane::Calls || count == 0;
        self.look_after_reading(lane);
        Ok(count)
    }

    /// Calls `take` with available bytes of the call lane in place, up to the end of a message at a
    /// time. `take` returns how many it used. Returns the number of used bytes.
    pub(crate) fn read_in_place(
        &mut self,
        take: &mut dyn FnMut(PeerBytes<'_>) -> usize,
    ) -> Result<usize, Closed> {
        if !self.has_bytes(VirtualLane::Calls) {
            self.progress();
        }
        // A body that is reduced cannot be transferred to a destination.
        self.answer(VirtualLane::Calls, &mut []);
        let mut count = 0;
        while let Some(Some(held)) = self.incoming[0].held.front().copied()
            && !self.in_transfer(VirtualLane::Calls)
        {
            let at = self.incoming[0].at;
            let message = self.cables[held.cable].received(
                held.slot,
                HEAD_BYTES + at,
                HEAD_BYTES + held.bytes,
            );
            let (there, taken) = (
                message.len(),
                take(PeerBytes::of(message)).min(message.len()),
            );
            self.taken(VirtualLane::Calls, held, at + taken);
            count += taken;
            if taken < there {
                break;
            }
        }
        if count == 0 && self.is_closed() {
            return Err(Closed);
        }
        self.placed.received += count as u64;
        self.look_after_reading(VirtualLane::Calls);
        Ok(count)
    }

    /// Whether the next message belongs to a transfer.
    fn in_transfer(&self, lane: VirtualLane) -> bool {
        let offered = self.bulk.offer.is_some_and(|(offered, _)| offered == lane);
        offered || self.bulk.receives(lane)
    }

    /// Continues a transfer into `into`, if none of it was `read`; returns its bytes.
    fn read_transfer(&mut self, lane: VirtualLane, read: usize, into: &mut [u8]) -> usize {
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

    /// Reads from the first message of a lane.
    fn read_held(&mut self, lane: VirtualLane, held: UnreadMessage, into: &mut [u8]) -> usize {
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

    /// Records that the first message of a lane has been read up to byte `at`.
    fn taken(&mut self, lane: VirtualLane, held: UnreadMessage, at: usize) {
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

    /// Releases the slot of the first message of a lane.
    fn release(&mut self, lane: VirtualLane, held: UnreadMessage) {
        let incoming = &mut self.incoming[lane as usize];
        incoming.held.pop_front();
        (incoming.consumed, incoming.at) = (incoming.consumed + 1, 0);
        if self.broken.is_none() {
            let posted = self.cables[held.cable].post_receive(held.slot);
            self.result(posted);
        }
    }

    /// Returns credit once much has been read.
    fn look_after_reading(&mut self, lane: VirtualLane) {
        if (self.urgent || self.owes_credit(lane)) && !self.is_closed() {
            let told = self.tell();
            self.result(told);
        }
    }

    /// Whether a quarter of the window was read since the last acknowledgement.
    pub(super) fn owes_credit(&self, lane: VirtualLane) -> bool {
        let incoming = &self.incoming[lane as usize];
        let unsaid = incoming.consumed - incoming.told_consumed;
        unsaid * 4 >= self.window(lane as usize)
    }
}
